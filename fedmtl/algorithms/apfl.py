"""APFL: every client's model is a mixture of the global one and one of its own.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020.

    vbar_k = alpha_k v_k + (1 - alpha_k) w_k
    v_k minimizes l_k(vbar_k),   w minimizes (1/K) sum_k l_k(w)

A local step of a member of a cohort moves its copy w_k of the global model and v_k at the same time
and by the same batch (Algorithm 1):

    w_k <- w_k - lr grad l_k(w_k)
    v_k <- v_k - lr alpha_k grad l_k(alpha_k v_k + (1 - alpha_k) w_k)

so that v_k follows the mixture with the copy as it moves. An adaptive alpha makes one step in a
local run, by the first batch: alpha_k <- alpha_k - lr <v_k - w_k, grad l_k(vbar_k)>, within [0, 1].
The member sends the clipped change of w_k, which does not depend on v_k and alpha_k; these stay
with their client and cost no epsilon. Under record-level privacy w_k is trained by DP-SGD, and v_k
and alpha_k are moved by the same records without noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._check import Share
from .._devices import on_device
from ..local import Mixture
from .base import Problem
from .client_batch import ClientBatch, ClientStates
from .shared_model import SharedModel
from .store import Fields


@dataclass(frozen=True, kw_only=True)
class APFL(SharedModel):
    """Trains mixtures of a global and a personal model (Deng et al. 2020, Algorithm 1).

    Args:
        alpha: the weight of the personal model, in [0, 1]: 0 is federated averaging, 1 local
            training. With ``adaptive`` it is the initial one of every client.
        adaptive: True lets every client adapt its own alpha, which it does not send.
        local: the clients' local solver, of both trainings; its step size is that of alpha as well.
        server_lr, server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import APFL, FullParticipation, LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=APFL(alpha=0.5, local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])
    """

    alpha: Share = 0.5
    adaptive: bool = False

    name = "apfl"
    title = "APFL"
    colour = "#b8860b"
    own_starts = True
    keeps_models = True

    def fields(self, problem: Problem) -> Fields:
        """Adds each client's ``alpha`` to its personal model: one number."""
        return {"alpha": ((), problem.initial.dtype)}

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Trains a copy of the shared model, whose change is sent, and the mixture, which stays."""
        start = c.last_models(c.initial)
        mixture = Mixture(start, self._weights(c), self.adaptive)
        models, mixture = c.train_mixture(self.local, c.shared, mixture)
        return models - c.shared, c.keep(mixture.models, start) | {"alpha": mixture.weights}

    def _weights(self, c: ClientBatch) -> Tensor:
        """Returns the clients' alpha (k,); the initial one for new clients."""
        return torch.where(c.states["seen"], c.states["alpha"], self.alpha)

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the mixtures.

        A client that never took part trains its own part once, from the public initial model.
        """
        models = c.last_models(c.initial)
        weights = self._weights(c)
        newcomers = c.newcomers
        if len(newcomers):
            place = on_device(newcomers, models.device)
            mixture = Mixture(models[place], weights[place], self.adaptive)
            # nothing of it is sent, so records need no noise
            private = replace(c.part(newcomers), problem=replace(c.problem, protects_records=False))
            _, mixture = private.train_mixture(self.local, c.shared, mixture)
            models = models.index_copy(0, place, mixture.models)
            weights = weights.index_copy(0, place, mixture.weights)
        return c.shared.lerp(models, weights[:, None])
