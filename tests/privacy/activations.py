"""Channels of clients that act one at a time, opened on rows, with functions of tensors for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.privacy import (
    ActivationChannel,
    GradientPlan,
    PrivacyReport,
    RecordPrivacy,
    open_channel,
    privacy_report,
)

COUNTS, D, IDS = (5, 20, 60), 4, ("a", "b", "c")
PURE = RecordPrivacy(clip_norm=0.5, epsilon=2.0, mechanism="laplace", delta=0.0)
_PLAN = ("allocation", "rate", "published", "keys", "at_cap")


def rows(counts: Sequence[int] = COUNTS, dimension: int = D) -> list[Tensor]:
    """Random rows of each client."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, dimension, generator=generator, dtype=torch.float64) for n in counts]


def door(
    privacy: Any = PURE,
    *,
    caps=(4, 4, 4),
    counts=COUNTS,
    dimension: int = D,
    x=None,
    seed: int = 0,
    **options: Any,
):
    """The channel of clients with such rows, or with ``x``."""
    x = rows(counts, dimension) if x is None else x
    return open_activations(
        privacy, x, ids=IDS[: len(x)], caps=np.array(caps), seed=seed, **options
    )


def nothing(client: int, where: Tensor) -> Tensor:
    """Factors of records without a gradient."""
    return torch.zeros(len(where), COUNTS[client], dtype=torch.float64)


def open_activations(
    privacy: Any,
    x: Sequence[Tensor] | None,
    *,
    ids: tuple[str, ...],
    caps: np.ndarray,
    counts: np.ndarray | None = None,
    dimension: int | None = None,
    **options: Any,
) -> Door:
    """The channel of clients ``ids`` with rows ``x``, or ``counts`` of records with gradients of ``dimension``."""
    if x is not None:
        counts = np.array([len(rows) for rows in x], dtype=np.int64)
        dimension = x[0].shape[-1] if len(x) else 4
    plan = {name: options.pop(name) for name in _PLAN if name in options}
    gradients = GradientPlan(ids=ids, counts=counts, dimension=dimension, caps=caps, x=x, **plan)
    return Door(open_channel(privacy, (gradients,), "a schedule", **options))


class Door:
    """A channel whose releases take functions of tensors: (client, replicates) -> factors (k, n), or gradients
    (k, n, D)."""

    def __init__(self, channel: ActivationChannel) -> None:
        object.__setattr__(self, "channel", channel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.channel, name, value)

    @property
    def report(self) -> PrivacyReport:
        """The privacy report of the run so far."""
        return privacy_report(self.channel)

    def release(self, gradients: Callable[[int, Tensor], Tensor]) -> Tensor:
        made = [gradients(client, torch.from_numpy(runs)) for client, runs in self.channel.acting]
        return torch.from_numpy(
            self.channel.release([one.numpy() if one.dim() == 2 else one for one in made])
        )
