"""Personal models that are trained beside the models of a local run, by the gradients at mixtures of the two.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .optimizers import Gradient
from .products import descend

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


class MixtureSteps:
    """The steps of v and alpha in the local run of a stack of clients.

    Args:
        mixture: of n clients.
        solver: of both models; its step size is that of alpha as well.
        round: addresses the step size.
        rows: (k, D), the models w, which the run moves.
        place: int64 (k,), on the host, the clients' rows of ``mixture``.
    """

    def __init__(self, mixture: Mixture, solver: LocalSolver, round: int, rows: Tensor, place: Tensor) -> None:
        self._all, self._rows, self._place = mixture, rows, place
        self._models, self._weights = mixture.models[place], mixture.weights[place]
        self._optimizer = solver.optimizer(self._models, round=round)
        self._lr, self._first = solver.lr_at(round), True

    @torch.no_grad()
    def __call__(self, active: int, gradient: Gradient) -> None:
        """Move v of the first A clients, before their w is moved.

        v <- v - lr alpha g and, in the first step, alpha <- alpha - lr <v - w, g>, within [0, 1], with the gradient g
        at alpha v + (1 - alpha) w; of another optimizer its step by the gradient alpha g.

        Args:
            active: A.
            gradient: at what stands in the rows then.
        """
        rows, v, weights = self._rows[:active], self._models[:active], self._weights[:active]
        w, g = rows.clone(), torch.empty_like(v)
        rows.lerp_(v, weights[:, None])
        gradient(g, 0.0, -1.0)
        rows.copy_(w)
        slopes = torch.linalg.vecdot(v - w, g) if self._all.adaptive and self._first else None
        g.mul_(weights[:, None])
        self._optimizer.step(active, lambda target, keep, rate: descend(target, g, keep=keep, rate=rate))
        if slopes is not None:
            weights.sub_(slopes.nan_to_num(0.0), alpha=self._lr).clamp_(0.0, 1.0)
        self._first = False

    def write(self, done: Tensor) -> None:
        """Write v and alpha of the clients ``done``, int64 numbers in the stack, to the mixture."""
        place = self._place[done]
        self._all.models[place], self._all.weights[place] = self._models[done], self._weights[done]
