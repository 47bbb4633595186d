"""Ditto: a global model, and personal models pulled to it that never touch it.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

    min_{v_k} F_k(v_k) + (lam / 2) ||v_k - w*||^2,   w* the minimizer of (1 / K) sum_k F_k(w)       (Ditto)

Every member of a cohort trains twice (Algorithm 1): from the global model w^t, which gives its update, and from its own
last model v_k with the pull to w^t, which stays with it. Only the clipped updates of w leave, summed and noised, so
lambda and the personal models cost nothing at the client level. Where single records are protected, both trainings
touch records, and both are charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .._check import non_negative, positive
from ..local import LocalSolver
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.channel import Message
from .base import PERSONALIZE_ROUND, Own, Problem, Round, State
from .personal import keep_models, personal_fields, personal_models, starting_models
from .server import GlobalModel


@dataclass(frozen=True, kw_only=True)
class Ditto(GlobalModel):
    """Personal models beside a global one (Li et al. 2021, Algorithm 1).

    Args:
        lam: lambda, the strength of the pull of every personal model towards the global one; 0 is local training, and
            ever more brings every personal model to the global one.
        local: the clients' local solver, of both trainings.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.

    Raises:
        ConfigError: a value outside these ranges, or ``lr * lam >= 2`` without the proximal step.
    """

    lam: float = 1.0

    name = "ditto"

    def __post_init__(self) -> None:
        non_negative(self, lam=self.lam)
        positive(self, server_lr=self.server_lr)
        LocalSolver.check_given(self, self.local, self.lam)

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        size, rounds = problem.dimension, problem.rounds
        return (ReleasePlan(name="update", dimension=size, uses=rounds, from_training=True, trainings=2),)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        return State({"global": problem.initial.clone()}, problem.client_store(personal_fields(problem)))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Message], Own]:
        shared = public["global"]
        start = starting_models(own, problem.initial)
        update = problem.send_change("update", self.local, shared, clients, round=round, less=shared)
        models = problem.train_locally(self.local, start, clients, round=round, lam=self.lam, anchor=shared)
        return {"update": update}, keep_models(own, models, start)

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the clients' own models; one that never took part trains once from the global model, pulled to it."""
        shared = public["global"]

        def train_new(ids: Tensor) -> Tensor:
            return problem.train_locally(self.local, shared, ids, round=PERSONALIZE_ROUND, lam=self.lam, anchor=shared)

        return personal_models(own, clients, train_new)
