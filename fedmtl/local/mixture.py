"""Training of APFL's mixture: the descent of the mixed model beside that of the common one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._devices import on_device
from .optimizers import Descent
from .products import move_along
from .solver import LocalSolver


@dataclass(frozen=True)
class Mixture:
    """Personal models v of clients, and their weight alpha in a mixture with the models w of a
    local run.

    v follows the gradients at the mixtures of the two (Deng, Kamani, Mahdavi: "Adaptive
    Personalized Federated Learning", 2020, Algorithm 1).

    Attributes:
        models: (n, D), v.
        weights: (n,), alpha in [0, 1].
        adaptive: True if alpha makes a step, too: one in a local run, by the first batch.

    Example:
        >>> import torch
        >>> from fedmtl.local import Mixture
        >>> mixture = Mixture(torch.ones(2, 3), torch.full((2,), 0.25), adaptive=False)
        >>> torch.zeros(3).lerp(mixture.models, mixture.weights[:, None]).tolist()
        [[0.25, 0.25, 0.25], [0.25, 0.25, 0.25]]
    """

    models: Tensor
    weights: Tensor
    adaptive: bool


class MixtureSteps:
    """The steps of v and alpha in the local run of a stack of clients.

    Args:
        mixture: of n clients; :meth:`write` changes it in place.
        solver: of both models; its step size is that of alpha as well.
        round: addresses the step size.
        rows: (k, D), the models w, which the run moves.
        place: int64 (k,), on the host, the clients' rows of ``mixture``.
    """

    def __init__(
        self, mixture: Mixture, solver: LocalSolver, round: int, rows: Tensor, place: Tensor
    ) -> None:
        self._all = mixture
        self._rows = rows
        self._place = on_device(place, mixture.models.device)
        self._models = mixture.models[self._place]
        self._weights = mixture.weights[self._place]
        # Momentum and other state of v are its own, and start anew as those of w do.
        self._optimizer = solver.optimizer(self._models, round=round)
        self._lr = solver.lr_at(round)
        self._first = True

    @torch.no_grad()
    def __call__(self, active: int, descent: Descent) -> None:
        """Moves v of the first A clients, before their w is moved.

        v <- v - lr alpha g and, in the first step, alpha <- alpha - lr <v - w, g>, within [0, 1],
        with the gradient g at alpha v + (1 - alpha) w; of another optimizer its step by the
        gradient alpha g.

        Args:
            active: A.
            descent: along the gradients at the models that the rows hold when it is called.
        """
        rows = self._rows[:active]
        v = self._models[:active]
        weights = self._weights[:active]
        w = rows.clone()
        g = torch.empty_like(v)
        # the gradient is taken at the mixture, which stands there meanwhile
        rows.lerp_(v, weights[:, None])
        descent(g, 0.0, -1.0)  # g becomes the gradients
        rows.copy_(w)
        slopes: Tensor | None = None
        if self._all.adaptive and self._first:
            slopes = torch.linalg.vecdot(v - w, g)
        # The chain rule: the loss is taken at alpha v + (1 - alpha) w.
        g.mul_(weights[:, None])
        self._optimizer.step(
            active, lambda target, keep, rate: move_along(target, g, keep=keep, rate=rate)
        )
        if slopes is not None:
            # A client that has diverged keeps its weight.
            weights.sub_(slopes.nan_to_num(0.0), alpha=self._lr).clamp_(0.0, 1.0)
        self._first = False

    def write(self, done: Tensor) -> None:
        """Writes v and alpha of the clients ``done``, int64 numbers in the stack, to the
        mixture."""
        done = on_device(done, self._place.device)
        place = self._place[done]
        self._all.models[place] = self._models[done]
        self._all.weights[place] = self._weights[done]
