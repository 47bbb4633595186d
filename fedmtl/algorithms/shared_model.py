"""What methods with one shared model have in common: its release, its state, the server's step, the personal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from .._check import positive
from ..local import LocalSGD, LocalSolver
from ..privacy import BoundSampler, ReleasePlan
from .base import Algorithm, Problem, Released, State
from .cohort import Cohort, personal_fields
from .server import ServerOptimizer, apply_update
from .store import Fields


@dataclass(frozen=True, kw_only=True)
class SharedModel(Algorithm):
    """A method whose clients release an ``update`` of one shared model (D,), whatever else they keep.

    A subclass defines ``name`` and :meth:`client`, and :meth:`new` where its clients keep models of their own.

    Args:
        local: the clients' local solver.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.

    Attributes:
        keeps: whether every client keeps a personal model.
        trainings: local trainings of a client in a round; where single records are protected, each is charged.
        pull: strength of the pull to an anchor in local training, which the solver must be stable for.
    """

    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))
    server_lr: float = 1.0
    server_optimizer: ServerOptimizer | None = None

    keeps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive(self, server_lr=self.server_lr)
        LocalSolver.check_given(self, self.local, self.pull)

    @property
    def trainings(self) -> int:
        return 1

    @property
    def pull(self) -> float:
        return 0.0

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        size, rounds = problem.dimension, problem.rounds
        return (
            ReleasePlan(name="update", dimension=size, uses=rounds, from_training=True, trainings=self.trainings),
        )  # fmt: skip

    def init(self, problem: Problem, replicates: int = 1) -> State:
        return State({"global": problem.initial.clone()}, problem.client_store(self.fields(problem)))

    def fields(self, problem: Problem) -> Fields:
        """Return what clients keep, the fields of the store."""
        return personal_fields(problem) if self.keeps else {}

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        """Return the shared model moved by the released mean update, float64 (D,); see :func:`apply_update`."""
        update, optimizer = released.values["update"], self.server_optimizer
        return apply_update(public, "global", update, lr=self.server_lr, optimizer=optimizer)

    def shared(self, state: State) -> Tensor | None:
        """Return the shared model (D,)."""
        return state.public["global"]

    def personal(self, c: Cohort) -> Tensor:
        """Return the clients' own models where they keep some, :meth:`new` for a client that never took part; else the
        shared model."""
        return c.personal(self.new) if self.keeps else c.shared.expand(len(c.ids), -1)

    def new(self, c: Cohort) -> Tensor:
        """Return the personal models (k, D) of clients that never took part: by default the shared model, trained once
        by each with :attr:`pull` to it."""
        return c.train(self.local, c.shared, lam=self.pull, anchor=c.shared)
