"""PP-DMTL whose last step is along the directions that the tasks share.

P is public, and so is its row space: the directions that the tasks share, and nothing else if the
threshold ``a2 lam`` is above the noise. Where :mod:`.pp_dmtl.algorithm` fits q_t to the raw records
with a single strength of g, here the pull is weaker along these directions than across them,

    min_q (1/n_t) sum_j l(x_tj . (p_t + q), y_tj) + (tau / 2) ||along q||^2 + (across / 2) ||q - along q||^2

with ``along`` the projection to the row space of P. q_t is never sent. Where P is 0 it has no
directions, and the strength is tau in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .._check import NonNegative, Positive
from ..algorithms.base import Problem, State
from ..algorithms.linear.solve import fit_own
from ..algorithms.pp_dmtl.algorithm import PPDMTL


@dataclass(frozen=True, kw_only=True)
class SharedDirections(PPDMTL):
    """PP-DMTL with a last step on raw records along the row space of P.

    The defaults of ``lam`` and ``refine_across`` were tuned on synthetic tasks whose rows have
    norms of at most 1.

    Args:
        refine_tau: the strength of g along the shared directions, above 0. ``None``: ``tau``.
        refine_across: the strength of g across them, above 0.
        loss, lam, tau, a1, a2, delay, smoothness, row_norm, target, penalty, batch_rate: see
            :class:`PPDMTL`.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import PoissonClocks, RecordPrivacy, SharedDirections, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=SharedDirections(),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=PoissonClocks(per_client=2),
        ...     privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        ...     rounds=8,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    lam: NonNegative = 0.1
    a2: Positive | Literal["auto"] | None = "auto"
    refine_across: Positive = 1e-2
    refine: ClassVar[bool] = True  # type: ignore[misc]
    own_penalty: ClassVar[Literal["frobenius"]] = "frobenius"  # type: ignore[misc]  # the only one that a rotation of the features leaves as it is

    name = "shared_directions"
    title = "PP-DMTL, shared directions"
    colour = "#1e88e5"

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns w_t of ``clients`` after the last step in every replicate, (R, k, p)."""
        shared, data, tau = state.public["shared"], self.data(problem), self.refine_tau or self.tau
        models, axes = shared[:, clients].clone(), shared_axes(shared, tau, self.refine_across)
        for k, t in enumerate(clients.tolist()):
            x, y = data.x[t], data.y[t]
            fits = [
                m @ fit_own(self.linear_loss, x @ m, y, p, tau, "frobenius")
                for m, p in zip(axes, shared[:, t], strict=True)
            ]
            models[:, k] += torch.stack(fits)
        return models.to(problem.initial)


def shared_axes(shared: Tensor, tau: float, across: float) -> Tensor:
    """Returns M (R, p, p) such that (tau / 2) ||v||^2 of q = M v is (tau / 2) ||q||^2 along the
    rows of P^T (R, T, p) and (across / 2) ||q||^2 across them; the identity where P is 0. M leaves
    every row of P^T as it is."""
    _, values, rows = torch.linalg.svd(shared, full_matrices=False)
    some = values > 1e-6 * values[:, :1]
    directions = rows * some[:, :, None]
    along, every = directions.mT @ directions, torch.eye(shared.shape[-1], dtype=shared.dtype)
    return torch.where(some.any(1)[:, None, None], along + (tau / across) ** 0.5 * (every - along), every)
