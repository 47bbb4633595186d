"""Local: every client trains alone. Nothing leaves a client, so nothing is spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..local import LocalSGD, LocalSolver
from .base import PERSONALIZE_ROUND, Algorithm, Own, Problem, Round, State
from .personal import keep_models, personal_fields, personal_models, starting_models


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    """Local training from the public initial model, on the same schedule as the other methods.

    Args:
        local: the clients' local solver; a client trains whenever the schedule calls it.
    """

    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))

    name = "local"

    def init(self, problem: Problem, replicates: int = 1) -> State:
        return State({}, problem.client_store(personal_fields(problem)))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Tensor], Own]:
        start = starting_models(own, problem.initial)
        models = problem.train_locally(self.local, start, clients, round=round)
        return {}, keep_models(own, models, start)

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the clients' own models; a client that was never called trains once from the initial model."""

        def train_new(ids: Tensor) -> Tensor:
            return problem.train_locally(self.local, problem.initial, ids, round=PERSONALIZE_ROUND)

        return personal_models(own, clients, train_new)
