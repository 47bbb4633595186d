"""The base class of methods with one shared model: release, state, server step, personal models."""

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
from .base import Problem, Public, State
from .client_batch import ClientBatch, ClientStates, personal_fields
from .rounds import Released, RoundAlgorithm
from .server_step import ServerOptimizer, apply_update
from .store import ClientStore, Fields


@dataclass(frozen=True, kw_only=True)
class SharedModel(RoundAlgorithm):
    """A method with one shared model (D,), of which clients release an ``update``.

    A subclass defines ``name`` and :meth:`local_update`, and :meth:`newcomer_models` if its clients
    keep models of their own. If its clients send more than the update, it defines
    :meth:`client_update`.

    Args:
        local: the clients' local solver.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.
        weights: of the clients' updates. ``"uniform"``: 1 each, and their sum is divided by the
            expected cohort m. ``"examples"``: a client with n_k examples has w_k = min(n_k / cap,
            1), as in McMahan et al.: "Learning Differentially Private Recurrent Language Models",
            ICLR 2018. The clip follows the weight, so the privacy cost is that of uniform weights,
            and the sum is divided by m.
        cap: public number of examples from which on a client has weight 1. None: w_k = n_k, and the
            sum is divided by that of the cohort's weights, which is released, too. If whole clients
            are protected, their numbers of examples are private, and a cap is needed.

    Attributes:
        keeps_models: True if every client keeps a personal model.
        trainings: local trainings of a client in a round; under record-level privacy each is
            charged.
        pull: strength of the pull to an anchor in local training, for which the solver must be
            stable: ``lam``, if the method has it.
        from_training: True if an update depends on records only through local training.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, Trainer, load_data, models
        >>> from fedmtl.algorithms import SharedModel
        >>> class Mine(SharedModel):
        ...     name = "mine"
        ...     def local_update(self, c):
        ...         return c.train(self.local, c.shared) - c.shared, c.states
        >>> trainer = Trainer(
        ...     algorithm=Mine(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=4),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=1,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 650])
    """

    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))
    server_lr: Positive = 1.0
    server_optimizer: ServerOptimizer | None = None
    weights: Literal["uniform", "examples"] = "uniform"
    cap: Count | None = None

    baseline = True
    keeps_models: ClassVar[bool] = False
    from_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.cap is not None and self.weights == "uniform":
            without = "which has no effect on uniform weights; leave it out"
            raise ConfigError(f"{name}.cap is {self.cap}, {without}.")
        if self.weights != "uniform" and type(self).client_update is not SharedModel.client_update:
            raise ConfigError(
                f"{name}.weights is {self.weights!r}, but its clients send what its own equations "
                "say; accepted: 'uniform'."
            )
        self.check_solver()

    def check_solver(self) -> None:
        """Refuses a local solver that the method cannot use.

        Raises:
            ConfigError: says which solvers it accepts.
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
        """Returns True if clients release their numbers of examples, which are their weights."""
        return self.weights == "examples" and self.cap is None

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Refuses private numbers of examples as weights.

        Returns:
            The settings as they are.

        Raises:
            ConfigError: they have no cap, and whole clients are protected.
        """
        if self.counts and any(isinstance(settings, ClientPrivacy) for settings in privacy):
            name = type(self).__name__
            raise ConfigError(
                f"{name}.weights is 'examples' without {name}.cap, and privacy=client protects "
                "how many examples a client has; give a public cap, from which on a client has "
                "weight 1."
            )
        return self

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the ``update``, (D,), and if clients release their numbers of examples,
        ``examples``, (1,).
        """
        update = ReleasePlan(
            name="update",
            dimension=problem.dimension,
            from_training=self.from_training,
            trainings=self.trainings,
        )
        if not self.counts:
            return (update,)
        # only under record-level privacy, for which the numbers of records are public
        return (update, replace(update, name="examples", dimension=1))

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts the shared model ``"global"`` (D,) at the public initial one, and an empty client
        store.
        """
        return State({"global": problem.initial.clone()}, self.client_store(problem))

    def client_store(self, problem: Problem) -> ClientStore:
        """Returns an empty store of :meth:`fields`, and of personal models if clients keep some.

        Args:
            problem: of the run.

        Returns:
            A store of n clients, on the device of the initial model.
        """
        fields = self.fields(problem)
        if self.keeps_models:
            fields = {**personal_fields(problem), **fields}
        return problem.client_store(fields)

    def fields(self, problem: Problem) -> Fields:
        """Returns the fields of the clients' states, without the personal model.

        Args:
            problem: of the run, for the size and the dtype of a model.

        Returns:
            Shape of one client's value and dtype, by name; none by default.
        """
        return {}

    def client_update(self, c: ClientBatch) -> tuple[Mapping[str, Tensor], ClientStates]:
        """Sends :meth:`local_update` times the weights of the clients; with ``weights="examples"``
        and no cap their numbers of examples, (k, 1), too.
        """
        if self.weights == "uniform":
            update, states = self.local_update(c)
            return {"update": update}, states
        counts = c.examples.to(c.initial)
        weights = counts
        if self.cap is not None:
            weights = (counts / self.cap).clamp(max=1.0)
        update, states = self.local_update(c)
        sent = {"update": weights[:, None] * update}
        if self.counts:
            sent["examples"] = counts[:, None]
        return sent, states

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Returns the model updates w_k - w without weights, (k, D), and the new client states.

        Args:
            c: the clients of the round that are computed in this call.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its clients compute.")

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Moves the shared model by the released mean update; see :func:`apply_update`."""
        update = released.values["update"]  # float64 (D,)
        optimizer = self.server_optimizer
        if self.counts:
            # both are sums over the cohort divided by m, which cancels
            counts = released.values["examples"]
            update = torch.where(counts > 0, update / counts, 0.0)
        return apply_update(public, "global", update, lr=self.server_lr, optimizer=optimizer)

    def shared(self, state: State) -> Tensor | None:
        """Returns the shared model (D,)."""
        return state.public["global"]

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the clients' own models, (k, D), or the shared one if they keep none.

        :meth:`newcomer_models` makes the model of a client that never took part.
        """
        if self.keeps_models:
            return c.with_newcomers(self.newcomer_models(c.part(c.newcomers)))
        return c.shared.expand(len(c.clients), -1)

    def newcomer_models(self, c: ClientBatch) -> Tensor:
        """Returns the personal models (k, D) of clients that never took part.

        By default each client trains the shared model once, with :attr:`pull` to it.

        Args:
            c: the clients without a model.
        """
        return c.train(self.local, c.shared, lam=self.pull, anchor=c.shared)
