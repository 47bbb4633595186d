"""APFL: every client's model is a mixture of the global one and one of its own.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020.

    vbar_k = alpha_k v_k + (1 - alpha_k) w_k,   v_k minimizes l_k(vbar_k),   w minimizes (1/K) sum_k l_k(w)

A local step of a member of a cohort moves its copy w_k of the global model and v_k at the same time and by the same
batch (Algorithm 1):

    w_k <- w_k - lr grad l_k(w_k),   v_k <- v_k - lr alpha_k grad l_k(alpha_k v_k + (1 - alpha_k) w_k)

so that v_k follows the mixture with the copy as it moves. Where alpha adapts, it makes a step once in a local run, by
the first batch: alpha_k <- alpha_k - lr <v_k - w_k, grad l_k(vbar_k)>, within [0, 1]. The member sends the clipped
change of w_k, which v_k and alpha_k do not touch; they stay with their client and cost no epsilon. Where single records
are protected, w_k is trained by DP-SGD, and v_k and alpha_k are moved by the same records without noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._check import boolean, positive, share
from ..local import LocalSolver, Mixture
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.channel import Message
from .base import PERSONALIZE_ROUND, Own, Problem, Round, State
from .personal import keep_models, personal_fields, starting_models
from .server import GlobalModel


@dataclass(frozen=True, kw_only=True)
class APFL(GlobalModel):
    """Mixtures of a global and a personal model (Deng et al. 2020, Algorithm 1).

    Args:
        alpha: the weight of the personal model, in [0, 1]: 0 is federated averaging, 1 local training. With
            ``adaptive`` the one that every client begins with.
        adaptive: whether every client adapts its own alpha, which it does not send.
        local: the clients' local solver, of both trainings; its step size is that of alpha as well.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.

    Raises:
        ConfigError: a value outside these ranges.
    """

    alpha: float = 0.5
    adaptive: bool = False

    name = "apfl"

    def __post_init__(self) -> None:
        share(self, alpha=self.alpha)
        boolean(self, adaptive=self.adaptive)
        positive(self, server_lr=self.server_lr)
        LocalSolver.check_given(self, self.local)

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        size, rounds = problem.dimension, problem.rounds
        return (ReleasePlan(name="update", dimension=size, uses=rounds, from_training=True),)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        fields = {**personal_fields(problem), "alpha": ((), problem.initial.dtype)}
        return State({"global": problem.initial.clone()}, problem.client_store(fields))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Message], Own]:
        shared, start = public["global"], starting_models(own, problem.initial)
        mixture = Mixture(start.clone(), self._weights(own), self.adaptive)
        update = problem.send_change("update", self.local, shared, clients, round=round, less=shared, mixture=mixture)
        return {"update": update}, keep_models(own, mixture.models, start) | {"alpha": mixture.weights}

    def _weights(self, own: Own) -> Tensor:
        """Return a copy of the clients' alpha (k,); one that never took part has the first."""
        return torch.where(own["seen"], own["alpha"], self.alpha)

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the mixtures; a client that never took part trains its own part once, from the public start."""
        shared, models, weights = public["global"], starting_models(own, problem.initial).clone(), self._weights(own)
        new = (~own["seen"]).nonzero()[:, 0]
        if len(new):
            mixture = Mixture(models[new], weights[new], self.adaptive)
            alone = replace(problem, protects_records=False)  # it sends nothing
            alone.train_locally(self.local, shared, clients[new.cpu()], round=PERSONALIZE_ROUND, mixture=mixture)
            models[new], weights[new] = mixture.models, mixture.weights
        return shared.lerp(models, weights[:, None])
