"""The base class of all algorithms, and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from .._check import Checked
from ..data import FederatedDataset, RowBound
from ..errors import ConfigError
from ..local import LocalSolver, gradient_plan
from ..privacy import GradientPlan, ReleasePlan
from ..report._names import METHODS, Method
from ..schedules import Block
from .problem import Problem
from .starts import one_start_needed
from .store import ClientStore

Public = Mapping[str, Tensor]
"""The public state, by name."""


@dataclass
class State:
    """The state of an algorithm between two steps: tensors only, so it is the checkpoint.

    Attributes:
        public: tensors that observers may see; they change only by releases.
        private: per-client tensors that never leave their clients.
        earlier: public states from which clients started that have not answered yet, by version;
            see :class:`~fedmtl.schedules.block.Starts`.

    Example:
        >>> import torch
        >>> from fedmtl.algorithms import ClientStore, State
        >>> state = State({"global": torch.zeros(2)}, ClientStore(3, {}))
        >>> sorted(state.public), state.private.clients
        (['global'], 3)
    """

    public: dict[str, Tensor]
    private: ClientStore
    earlier: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class ClaimBeside(Protocol):
    """A claim of privacy that stands beside the ledger's in the report of a run.

    Attributes:
        name: of its files.
    """

    name: ClassVar[str]

    def text(self) -> str:
        """Returns the claim in words, with its adversary."""

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of its table, ``<name>.csv`` in the public folder of a run."""

    def draw(self, path: Path) -> None:
        """Draws its figure, ``<name>.png`` there."""


BASELINES: dict[str, type[Algorithm]] = {}
"""The methods that can be baselines, by name; their classes register themselves."""


class Algorithm(Checked):
    """A federated algorithm, with its settings as the fields of a frozen dataclass.

    :class:`~.rounds.RoundAlgorithm` is the base class of methods in rounds, and
    :class:`~.one_at_a_time.OneAtATime` that of clients that act one at a time. Clients compute from
    the public state and from data and tensors of their own, and from nothing else: a client's
    numbers are the same in a process of its own as in a stack of clients. The server computes from
    releases, so that all it computes is public.

    Attributes:
        name: of the algorithm, in results and reports. A class with a name of its own registers
            itself by it.
        title: the name in print; without one the name.
        colour: the colour in figures, ``#rrggbb``; without one any colour.
        baseline: True if ``Trainer(baselines=[name])`` builds it, from a local solver.
        local: the clients' local solver, if they have one; record-level privacy takes local steps
            from it.
        loss: name of the loss that the algorithm computes itself, such as ``"logistic"``; None if
            it is the run's.
        accepts_empty_clients: True if clients without training examples can take part. Their rows
            count as those of others. If clients take turns in public
            (:class:`~fedmtl.CyclicCohorts`), the noise is that of replace-one, twice as large.
        one_at_a_time: True if clients act one at a time by clocks of their own, and not in rounds.
        all_at_once: True if ``client_update`` and ``receive`` compute all clients of the problem in
            their order, and are never called with some of them. Over several ranks the problem is
            then that of the rank's clients.
        fitted_once: True if every client fits its model once, from its own records and without a
            release.
        sends_gradients: True if clients send sums of gradients of single records, see
            :attr:`ReleasePlan.from_gradients <fedmtl.privacy.ReleasePlan>`.
        on_host: True if it computes on the CPU, in NumPy, whatever the device of the run.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    baseline: ClassVar[bool] = False
    accepts_empty_clients: ClassVar[bool] = False
    one_at_a_time: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = False
    fitted_once: ClassVar[bool] = False
    sends_gradients: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    local: LocalSolver | None = None
    loss: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)  # a class without a name of its own is a variant, such as one of a test
        name = own.get("name")
        if not isinstance(name, str):
            return
        METHODS[name] = Method(own.get("title", name), own.get("colour", ""))
        if cls.baseline:
            BASELINES[name] = cls

    def check_data(self, data: FederatedDataset) -> None:
        """Refuses data that no model makes usable, before a model is built; none by default.

        Args:
            data: of the run.

        Raises:
            DataError: data that the method cannot use; the message has its needs and the facts of
                the data.
        """

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Returns a bound on the features of a record; None, the default, for no bound.

        Training enforces it, and it holds wherever models are used: for scores, and in the models
        of the result.

        Args:
            problem: of the run; the public bounds that its data state are read.
        """
        return None

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Algorithm:
        """Fills in the ``"auto"`` settings of the algorithm from public rows and bounds.

        Args:
            problem: of the run.
            schedule: of the activations, a ``BoundSchedule``; None for an algorithm with rounds.
            privacy: settings of the run, or those of its replicates; None in it is no privacy.

        Returns:
            The algorithm with numbers for them; itself if it has none.
        """
        return self

    def scheduled(self, schedule: Any) -> Any:
        """Returns the schedule of a run with the activations that the method adds; none by default.

        Args:
            schedule: a ``BoundSampler`` or a ``BoundSchedule``.
        """
        return schedule

    def plan(self, problem: Problem, schedule: Any) -> Sequence[ReleasePlan | GradientPlan]:
        """Returns every release of the algorithm, for calibration; none by default.

        Args:
            problem: of the run.
            schedule: a ``BoundSampler`` of rounds, or the ``BoundSchedule`` of clients that act one
                at a time. The latter release by a :class:`~fedmtl.privacy.GradientPlan`.
        """
        return ()

    def gradient_plan(self, problem: Problem, trainings: int) -> GradientPlan:
        """Returns the plan of the gradients of single records that clients release in rounds if
        these are protected: by default those of the steps of local training.

        Args:
            problem: of the run.
            trainings: local trainings of a client in a round, each with local steps of its own.

        Raises:
            ConfigError: the method does not train locally.
        """
        if self.local is None:
            raise ConfigError(
                f"RecordPrivacy protects the gradients of local training, but {self.name} has no "
                "local solver; use pmtl, ditto, fedavg or fedprox."
            )
        return gradient_plan(problem.data, self.local, problem.dimension, trainings=trainings)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Returns the state before the first step; empty by default.

        Args:
            problem: of the run. The public part of the state never reads data.
            replicates: R, the number of runs that are computed as one program.
        """
        return State({}, ClientStore(problem.clients, {}))

    def check_starts(self) -> None:
        """Raises ConfigError if all clients of a round must start from one public state, as they do
        by default."""
        raise one_start_needed(self.name)

    def step(self, problem: Problem, state: State, block: Block, channel: Any) -> State:
        """Computes one round, or a block of activations.

        Args:
            problem: the data and the model.
            state: the state before the block; it is changed in place, and returned.
            block: the participants; charged already.
            channel: makes all releases of the clients: :class:`~fedmtl.privacy.RoundChannel`, or
                :class:`~fedmtl.privacy.ActivationChannel` of clients that act one at a time.

        Returns:
            ``state``, after the block.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it computes.")

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the personal models of ``clients``, (k, D).

        Nothing is released. Clients that never took part have a model, too.

        Args:
            problem: of the run.
            state: after any step.
            clients: int64 (k,).
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} does not say what the personal models are.")

    def shared(self, state: State) -> Tensor | None:
        """Returns the released shared model (D,); None, the default, if there is none.

        Args:
            state: after any step.
        """
        return None

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns the paper's decomposition of the models, such as ``{"P": ..., "Q": ...}``.

        It becomes :attr:`fedmtl.Result.parts`; empty by default. With several replicates it is that
        of the first.

        Args:
            problem: of the run.
            state: after the last step.
            personal: (n, D), the personal models.
        """
        return {}

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the personal models of ``clients`` in every replicate, (R, k, D).

        Only methods that compute replicates as one program have it.

        Args:
            problem: of the run.
            state: after any step.
            clients: int64 (k,).
        """
        raise NotImplementedError(f"{type(self).__name__} computes one run at a time.")

    def local_baseline(self) -> Algorithm | None:
        """Returns the non-federated baseline of this method.

        None, the default, selects local training. Methods with a closed-form local fit return it.
        """
        return None

    def claim_beside(
        self, problem: Problem, state: State, channel: Any, acting: Callable[[], Tensor]
    ) -> ClaimBeside | None:
        """Returns a claim of privacy beside the ledger's, against a weaker adversary; None by
        default.

        Args:
            problem: of the run.
            state: after the last step.
            channel: of the run.
            acting: makes the client of each activation, int64 (S,), of methods that have these.
        """
        return None

    def objective(self, problem: Problem, state: State) -> Tensor | None:
        """Returns the training objective of every replicate, (R,) float64; None by default.

        It reads records without noise, so it is not private.

        Args:
            problem: of the run.
            state: after any step, with the tensors of all clients.
        """
        return None
