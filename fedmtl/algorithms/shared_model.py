"""The base class of methods with one shared model: release, state, the server's step, personal models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from .._check import Count, Positive
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver
from ..privacy import BoundSampler, ClientPrivacy, ReleasePlan
from ..privacy.clip import RowTotal
from ..privacy.rounds import Message
from .base import Algorithm, Problem, Released, State
from .cohort import Cohort, Own, Rows, personal_fields
from .server import ServerOptimizer, apply_update
from .store import ClientStore, Fields


@dataclass(frozen=True, kw_only=True)
class SharedModel(Algorithm):
    """A method whose clients release an ``update`` of one shared model (D,), whatever else they keep.

    A subclass defines ``name`` and :meth:`update`, and :meth:`new` where its clients keep models of their own; or
    :meth:`client` if its clients send more than the update.

    Args:
        local: the clients' local solver.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.
        weights: of the clients' updates. ``"uniform"``: 1 each, and their sum is divided by the expected cohort m.
            ``"examples"``: of a client with n_k examples w_k = min(n_k / cap, 1), as in McMahan et al.: "Learning
            Differentially Private Recurrent Language Models", ICLR 2018; the clip follows the weight, so the release
            costs what it costs with uniform weights, and the sum is divided by m.
        cap: public number of examples from which on a client has weight 1. None: w_k = n_k, and the sum is divided by
            that of the weights of the cohort, which is released, too; not where whole clients are protected, whose
            numbers of examples are private.

    Attributes:
        keeps: whether every client keeps a personal model.
        trainings: local trainings of a client in a round; where single records are protected, each is charged.
        pull: strength of the pull to an anchor in local training, which the solver must be stable for: ``lam``, where
            the method has it.
        from_training: whether an update depends on records only through local training.
    """

    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))
    server_lr: Positive = 1.0
    server_optimizer: ServerOptimizer | None = None
    weights: Literal["uniform", "examples"] = "uniform"
    cap: Count | None = None

    baseline = True
    keeps: ClassVar[bool] = False
    from_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.cap is not None and self.weights == "uniform":
            raise ConfigError(f"{name}.cap is {self.cap}, which has no effect on uniform weights; leave it out.")
        if self.weights != "uniform" and type(self).client is not SharedModel.client:
            raise ConfigError(
                f"{name}.weights is {self.weights!r}, but its clients send what its own equations say; accepted: "
                "'uniform'."
            )
        self.check_solver()

    def check_solver(self) -> None:
        """Refuse a local solver that the method cannot use.

        Raises:
            ConfigError: what is accepted.
        """
        LocalSolver.check_given(self, self.local, self.pull)

    @property
    def trainings(self) -> int:
        return 1

    @property
    def pull(self) -> float:
        return getattr(self, "lam", 0.0)

    @property
    def counts(self) -> bool:
        """Whether clients release their numbers of examples, which are their weights."""
        return self.weights == "examples" and self.cap is None

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Refuse numbers of examples as weights where they are private.

        Raises:
            ConfigError: they have no cap, and whole clients are protected.
        """
        if self.counts and any(isinstance(settings, ClientPrivacy) for settings in privacy):
            name = type(self).__name__
            raise ConfigError(
                f"{name}.weights is 'examples' without {name}.cap, and privacy=client protects how many examples a "
                f"client has; give a public cap, from which on a client has weight 1."
            )
        return self

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        size, trained = problem.dimension, self.from_training
        update = ReleasePlan(name="update", dimension=size, from_training=trained, trainings=self.trainings)
        # where single records are protected, their numbers are public
        return (update, replace(update, name="examples", dimension=1)) if self.counts else (update,)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        return State({"global": problem.initial.clone()}, self.client_store(problem))

    def client_store(self, problem: Problem) -> ClientStore:
        """Return an empty store of personal models, where clients keep some, and of :meth:`fields`."""
        personal: Fields = personal_fields(problem) if self.keeps else {}
        return problem.client_store({**personal, **self.fields(problem)})

    def fields(self, problem: Problem) -> Fields:
        """Return the fields of what clients keep beside a personal model."""
        return {}

    def client(self, c: Cohort) -> tuple[Mapping[str, Message], Own]:
        if self.weights == "uniform":
            update, own = self.update(c)
            return {"update": update}, own
        counts = c.examples.to(c.initial)
        weights = counts if self.cap is None else (counts / self.cap).clamp(max=1.0)
        update, own = self.update(replace(c, weights=weights))
        sent: dict[str, Message] = {"update": update if isinstance(update, RowTotal) else weights[:, None] * update}
        return sent | ({"examples": counts[:, None]} if self.counts else {}), own

    def update(self, c: Cohort) -> tuple[Rows, Own]:
        """Return how far the clients' models are from the shared one, rows (k, D) or their sum, without weights; and
        what they keep."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its clients compute.")

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        """Return the shared model moved by the released mean update, float64 (D,); see :func:`apply_update`."""
        update, optimizer = released.values["update"], self.server_optimizer
        if self.counts:
            counts = released.values["examples"]
            update = torch.where(counts > 0, update / counts, 0.0)
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
