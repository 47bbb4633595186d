"""Personal models that are trained beside the models of a local run, by the gradients at mixtures of the two.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._devices import sent

if TYPE_CHECKING:
    from .solver import LocalSolver


@dataclass(frozen=True)
class Mixture:
    """What clients mix into the models w of a local run: v, and its weight alpha. Training changes both in place.

    Attributes:
        models: (n, D), v.
        weights: (n,), alpha in [0, 1].
        adaptive: whether alpha makes a step, too: one in a local run, by the first batch.
    """

    models: Tensor
    weights: Tensor
    adaptive: bool

    def of(self, place: Tensor) -> Mixture:
        """Return copies of the rows ``place``, int64 (k,)."""
        return replace(self, models=self.models[place], weights=self.weights[place])

    def write(self, place: Tensor, other: Mixture, rows: Tensor | None = None) -> None:
        """Write the rows of ``other``, or int64 ``rows`` of them, to the rows ``place``, int64."""
        models, weights = (other.models, other.weights) if rows is None else (other.models[rows], other.weights[rows])
        self.models.index_copy_(0, place, models)
        self.weights.index_copy_(0, place, weights)


class MixtureSteps:
    """The steps of v and alpha in the local run of a stack of clients.

    Args:
        mixture: of n clients.
        solver: of both models; its step size is that of alpha as well.
        round: addresses the step size.
        rows: (K, D) or more, the models w, which the run moves.
        steps: int64 (k,), local steps of the clients, on the host. At 0 nothing is written.
        place: int64 (k,), on the host, the clients' rows of ``mixture``.
    """

    def __init__(
        self, mixture: Mixture, solver: LocalSolver, round: int, rows: Tensor, steps: Tensor, place: Tensor
    ) -> None:
        self._all, self._rows, self._steps, self._place = mixture, rows, steps, place
        self._own = mixture.of(sent(place, rows.device))
        self._own.models.grad = torch.zeros_like(self._own.models)
        self._optimizer = solver.optimizer(self._own.models, round=round, lam=0.0, anchor=None)
        self._lr, self._number = solver.lr_at(round), 0

    @torch.no_grad()
    def __call__(self, active: int, gradients: Callable[[], Tensor]) -> None:
        """Move v of the first A clients, before their w is moved.

        v <- v - lr alpha g and, in the first step, alpha <- alpha - lr <v - w, g>, within [0, 1], with the gradient g
        at alpha v + (1 - alpha) w; of another optimizer its step by the gradient alpha g.

        Args:
            active: A.
            gradients: returns (A, D), the gradients at what stands in the rows then.
        """
        rows, v, weights = self._rows[:active], self._own.models[:active], self._own.weights[:active]
        w = rows.clone()
        rows.lerp_(v, weights[:, None])
        g = gradients()
        rows.copy_(w)
        slopes = torch.linalg.vecdot(v - w, g) if self._own.adaptive and self._number == 0 else None
        assert self._own.models.grad is not None
        torch.mul(g, weights[:, None], out=self._own.models.grad[:active])
        self._optimizer.step(active=slice(0, active))
        if slopes is not None:
            weights.sub_(slopes.nan_to_num(0.0), alpha=self._lr).clamp_(0.0, 1.0)
        self._number += 1
        done = (self._steps == self._number).nonzero()[:, 0]
        if len(done):
            device = rows.device
            self._all.write(sent(self._place[done], device), self._own, sent(done, device))
