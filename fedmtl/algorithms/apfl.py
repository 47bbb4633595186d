"""APFL: every client's model is a mixture of the global one and one of its own.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020.

    vbar_k = alpha v_k + (1 - alpha) w,   v_k minimizes l_k(vbar_k),   w minimizes (1/K) sum_k l_k(w)

A member of a cohort trains w, whose clipped change it sends, and v_k with the gradient of l_k at the mixture, alpha
grad l_k(vbar_k). During a local run the w in the mixture is the one that was received; with one local step a round
that is the published algorithm, whose further local steps mix with the client's own copy of w. Only w is released, so
v_k and alpha cost nothing at the client level; where single records are protected, both trainings are charged.

The step of v_k moves the mixture by alpha^2 times the step size along its own gradient, so it is computed as a local
run of the mixture with that step size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from .._check import positive
from ..errors import ConfigError
from ..local import LocalSGD
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.channel import Message
from .base import PERSONALIZE_ROUND, Own, Problem, Round, State
from .personal import keep_models, personal_fields, starting_models
from .server import GlobalModel


@dataclass(frozen=True, kw_only=True)
class APFL(GlobalModel):
    """Mixtures of a global and a personal model (Deng et al. 2020, Algorithm 1, with one public alpha).

    Args:
        alpha: the weight of the personal model, in [0, 1]: 0 is federated averaging, 1 local training.
        local: the clients' local solver, of both trainings; :class:`LocalSGD` without weight decay.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.

    Raises:
        ConfigError: a value outside these ranges, or another solver.
    """

    alpha: float = 0.5

    name = "apfl"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"APFL.alpha is {self.alpha!r}; it must be in [0, 1].")
        positive(self, server_lr=self.server_lr)
        check_plain(self, self.local)

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        size, rounds, trainings = problem.dimension, problem.rounds, 1 if self.alpha == 0.0 else 2
        return (
            ReleasePlan(
                name="update", dimension=size, uses=rounds, stateful=False, from_training=True, trainings=trainings
            ),
        )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        return State({"global": problem.initial.clone()}, problem.client_store(personal_fields(problem)))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Message], Own]:
        shared, start = public["global"], starting_models(own, problem.initial)
        update = problem.send_change("update", self.local, shared, clients, round=round, less=shared)
        models = self._train_own(problem, shared, start, clients, round)
        return {"update": update}, keep_models(own, models, start)

    def _train_own(
        self, problem: Problem, shared: Tensor, start: Tensor, clients: Tensor, round: Round | int
    ) -> Tensor:
        """Return (k, D): the clients' v_k after a local run from ``start`` (k, D)."""
        if self.alpha == 0.0:
            return start
        mixture = self._mixture(start, shared)
        solver = replace(self.local, lr=self.alpha**2 * self.local.lr)
        return start + (problem.train_locally(solver, mixture, clients, round=round) - mixture) / self.alpha

    def _mixture(self, models: Tensor, shared: Tensor) -> Tensor:
        return self.alpha * models + (1.0 - self.alpha) * shared

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the mixtures; a client that never took part trains its own part once, from the public start."""
        shared, models = public["global"], starting_models(own, problem.initial).clone()
        new = (~own["seen"]).nonzero()[:, 0]
        if len(new):
            models[new] = self._train_own(problem, shared, models[new], clients[new.cpu()], PERSONALIZE_ROUND)
        return self._mixture(models, shared)


def check_plain(owner: object, solver: object) -> None:
    """Refuse a local solver whose steps are not a step size times a sum of gradients.

    Raises:
        ConfigError: another solver than :class:`LocalSGD`, or one with weight decay.
    """
    if not isinstance(solver, LocalSGD) or solver.weight_decay:
        raise ConfigError(
            f"{type(owner).__name__}.local is {solver!r}; it must be LocalSGD without weight_decay, since the personal "
            "part follows the gradients that moved the shared one."
        )
