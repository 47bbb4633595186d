"""Local: every client trains alone. Nothing leaves a client, so nothing is spent."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..optim import LocalSGD, LocalSolver
from ..privacy import BoundSampler, Channel, ReleasePlan
from ..schedules import Event
from .base import PERSONALIZE_ROUND, Problem, State
from .personal import keep_models, personal_fields, personal_models, starting_models


@dataclass(frozen=True, kw_only=True)
class Local:
    """Local training from the public initial model, on the same schedule as the other methods.

    Args:
        local: the clients' local solver; a client trains whenever the schedule calls it.
    """

    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))

    name = "local"

    def plan(self, problem: Problem, sampler: BoundSampler) -> tuple[ReleasePlan, ...]:
        return ()

    def init(self, problem: Problem) -> State:
        return State({}, problem.client_store(personal_fields(problem)))

    def step(self, problem: Problem, state: State, event: Event, channel: Channel) -> State:
        clients, store = event.cohort, state.private
        models = starting_models(store, clients, problem.initial)
        problem.train_locally(self.local, models, clients, round=event.step, out=models)
        keep_models(store, clients, models, problem.initial)
        return state

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """The clients' own models; a client that was never called trains once from the initial model."""

        def train_new(ids: Tensor) -> Tensor:
            return problem.train_locally(self.local, problem.initial, ids, round=PERSONALIZE_ROUND)

        return personal_models(state.private, clients, train_new)

    def shared(self, state: State) -> Tensor | None:
        return None
