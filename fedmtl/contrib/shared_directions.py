"""PP-DMTL with a last step along the directions that the tasks share.

P is public, and so is its row space: the directions that the tasks share, and no others if the
threshold ``a2 lam`` is above the noise. :mod:`fedmtl.algorithms.pp_dmtl.algorithm` fits q_t to the
raw records with a single strength of g. Here the pull is weaker along these directions than across
them,

    min_q (1/n_t) sum_j l(x_tj . (p_t + q), y_tj)
          + (tau / 2) ||along q||^2 + (across / 2) ||q - along q||^2

with ``along`` the projection to the row space of P. q_t is never sent. If P is 0, there are no such
directions, and the strength is tau along all.
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
    """Trains as PP-DMTL, with a last step on raw records along the row space of P.

    The defaults of ``lam`` and ``refine_across`` were tuned on synthetic tasks whose rows have
    norms of at most 1.

    Args:
        refine_tau: the strength of g along the shared directions, above 0. ``None``: ``tau``.
        refine_across: the strength of g across them, above 0.
        loss, lam, tau, a1, a2, delay, smoothness, feature_norm, target, penalty, batch_rate: see
            :class:`PPDMTL`.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import PoissonClocks, RecordPrivacy, SharedDirections, Trainer
        >>> from fedmtl import load_data, models
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
    # the only penalty that does not change under rotations of the features
    own_penalty: ClassVar[Literal["frobenius"]] = "frobenius"  # type: ignore[misc]

    name = "shared_directions"
    title = "PP-DMTL, shared directions"
    colour = "#1e88e5"

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns w_t of ``clients`` after the last step in every replicate, (R, k, p)."""
        shared = state.public["shared"]
        data = self.data(problem)
        tau = self.refine_tau or self.tau
        models = shared[:, clients].clone()
        axes = shared_axes(shared, tau, self.refine_across)
        for k, t in enumerate(clients.tolist()):
            x = data.x[t]
            y = data.y[t]
            fits = []
            for m, p in zip(axes, shared[:, t], strict=True):
                # the rows x M have the same margins at v as x at q = M v
                v = fit_own(self.linear_loss, x @ m, y, p, tau, "frobenius")
                fits.append(m @ v)
            models[:, k] += torch.stack(fits)
        return models.to(problem.initial)


def shared_axes(shared: Tensor, tau: float, across: float) -> Tensor:
    """Returns the map M (R, p, p) from v to q = M v that turns the penalty into tau ||v||^2 / 2.

    The penalty is tau ||q||^2 / 2 along the rows of P^T and across ||q||^2 / 2 across them. M
    leaves every row of P^T as it is, and is the identity if P is 0.

    Args:
        shared: P^T, (R, T, p).
        tau: above 0.
        across: above 0.
    """
    _, values, rows = torch.linalg.svd(shared, full_matrices=False)
    some = values > 1e-6 * values[:, :1]
    directions = rows * some[:, :, None]
    along = directions.mT @ directions  # the projection
    every = torch.eye(shared.shape[-1], dtype=shared.dtype)
    mixed = along + (tau / across) ** 0.5 * (every - along)
    return torch.where(some.any(1)[:, None, None], mixed, every)
