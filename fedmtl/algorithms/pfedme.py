"""pFedMe: personal models as proximal points of a global one.

T Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

    min_w (1/K) sum_k F_k(w),   F_k(w) = min_theta l_k(theta) + (lam / 2) ||theta - w||^2

The gradient of the envelope is lam (w - theta_k(w)). A member of a cohort makes R local rounds from w_0 = w^t, each
with a local run that solves for theta_k(w_r), and w_{r+1} = w_r - eta lam (w_r - theta_k(w_r)); it sends the clipped
w_R - w^t, and keeps theta_k (Algorithm 1). With R = 1 and eta = 1 / lam the global model is that of FedProx.

The K steps of a local run here go over K batches. The paper's local round draws one batch and solves for theta_k on it,
by K steps on the same batch; with ``batch_size=None`` the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from .._check import positive, positive_int
from ..errors import ConfigError
from ..local import LocalSolver
from ..privacy import BoundSampler, ReleasePlan
from .base import PERSONALIZE_ROUND, Own, Problem, Round, State
from .personal import keep_models, personal_fields, personal_models
from .server import GlobalModel


@dataclass(frozen=True, kw_only=True)
class PFedMe(GlobalModel):
    """Personalization with Moreau envelopes (T Dinh et al. 2020, Algorithm 1).

    Args:
        lam: lambda, the strength of the pull of every personal model to the client's copy of the global one.
        eta: step size of that copy; 1 / lam takes it to the personal model.
        local_rounds: R. Where single records are protected, each of them is a training that is charged.
        local: the local solver of a local round.
        server_lr: beta, step size of the server.
        server_optimizer: used instead of the plain server step.

    Raises:
        ConfigError: a value outside these ranges, ``eta * lam >= 2``, or ``lr * lam >= 2`` without the proximal step.
    """

    lam: float = 1.0
    eta: float = 0.5
    local_rounds: int = 2

    name = "pfedme"

    def __post_init__(self) -> None:
        positive(self, lam=self.lam, eta=self.eta, server_lr=self.server_lr)
        positive_int(self, local_rounds=self.local_rounds)
        LocalSolver.check_given(self, self.local, self.lam)
        if self.eta * self.lam >= 2.0:
            raise ConfigError(
                f"PFedMe.eta * lam = {self.eta:g} * {self.lam:g} = {self.eta * self.lam:g}: from 2 on, every step "
                "overshoots. Lower eta."
            )

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        return (
            ReleasePlan(
                name="update",
                dimension=problem.dimension,
                uses=problem.rounds,
                from_training=True,
                trainings=self.local_rounds,
            ),
        )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        return State({"global": problem.initial.clone()}, problem.client_store(personal_fields(problem)))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Tensor], Own]:
        copy = public["global"].expand(len(clients), -1).contiguous()
        start = models = copy
        # batches of their own for every local round; the step size goes by rounds
        solver = replace(self.local, decay_every=self.local.decay_every * self.local_rounds)
        for local_round in range(self.local_rounds):
            part = replace(round, number=round.number * self.local_rounds + local_round)
            models = problem.train_locally(solver, models, clients, round=part, lam=self.lam, anchor=copy)
            copy = copy - self.eta * self.lam * (copy - models)
        return {"update": copy - start}, keep_models(own, models, start)

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the clients' own models; one that never took part trains once from the global model, pulled to it."""
        shared = public["global"]

        def train_new(ids: Tensor) -> Tensor:
            return problem.train_locally(self.local, shared, ids, round=PERSONALIZE_ROUND, lam=self.lam, anchor=shared)

        return personal_models(own, clients, train_new)
