"""Channels of clients that act one at a time, opened on rows, with functions of tensors for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl.privacy import (
    BoundedMeans,
    Channel,
    GradientPlan,
    RecordGradients,
    RecordPrivacy,
    ScaledRows,
    open_channel,
)

COUNTS, D, IDS = (5, 20, 60), 4, ("a", "b", "c")
PURE = RecordPrivacy(clip_norm=0.5, epsilon=2.0, mechanism="laplace", delta=0.0)
_PLAN = ("allocation", "rate", "published", "keys")


def rows(counts: Sequence[int] = COUNTS, dimension: int = D) -> list[Tensor]:
    """Random rows of each client."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, dimension, generator=generator, dtype=torch.float64) for n in counts]


def door(privacy: Any = PURE, *, caps=(4, 4, 4), counts=COUNTS, dimension: int = D, seed: int = 0, **options: Any):
    """The channel of clients with such rows."""
    x = rows(counts, dimension)
    return open_activations(privacy, x, ids=IDS[: len(x)], caps=np.array(caps), seed=seed, **options)


def nothing(client: int, *where: Tensor) -> Tensor:
    """Factors of records without a gradient."""
    return torch.zeros(len(where[-1]), COUNTS[client], dtype=torch.float64)


def open_activations(
    privacy: Any,
    x: Sequence[Tensor] | None,
    *,
    ids: tuple[str, ...],
    caps: np.ndarray,
    counts: np.ndarray | None = None,
    dimension: int | None = None,
    **options: Any,
) -> Activations:
    """The channel of clients ``ids`` with rows ``x``, or ``counts`` of records with gradients of ``dimension``."""
    if x is not None:
        counts = np.array([len(rows) for rows in x], dtype=np.int64)
        dimension = x[0].shape[-1] if len(x) else 4
    plan = {name: options.pop(name) for name in _PLAN if name in options}
    gradients = GradientPlan(ids=ids, counts=counts, dimension=dimension, caps=caps, x=x, **plan)  # type: ignore[arg-type]
    return Activations(open_channel(privacy, (gradients,), "a schedule", **options))


class Activations:
    """A channel whose gradient releases take functions (client, which, where) of tensors, or (client, where)."""

    def __init__(self, channel: Channel) -> None:
        object.__setattr__(self, "channel", channel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.channel, name, value)

    def release(self, factors: Callable[..., Tensor]) -> Tensor:
        return self.release_run(1, lambda client, which, where: factors(client, where))[0]

    def release_run(self, count: int, factors: Callable[..., Tensor]) -> Tensor:
        return self.channel.release("gradient", ScaledRows(_arrays(factors)), count=count)

    def release_rows(self, rows: Callable[..., Tensor]) -> Tensor:
        return self.release_rows_run(1, lambda client, which, where: rows(client, where))[0]

    def release_rows_run(self, count: int, rows: Callable[..., Tensor]) -> Tensor:
        return self.channel.release("gradient", RecordGradients(_tensors(rows)), count=count)

    def release_bounded(self, means: Callable[..., Tensor]) -> Tensor:
        function = _arrays(lambda client, which, where: means(client, where))
        return self.channel.release("gradient", BoundedMeans(function))[0]


def _tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda client, which, where: function(client, torch.from_numpy(which), torch.from_numpy(where))


def _arrays(function: Callable[..., Tensor]) -> Callable[..., np.ndarray]:
    return lambda *of: _tensors(function)(*of).numpy()
