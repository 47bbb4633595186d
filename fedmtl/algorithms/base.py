"""The base class of all algorithms, their state, and the releases of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._check import Checked
from ..data import FederatedDataset, RowBound
from ..local import LocalSolver
from ..privacy import GradientPlan, ReleasePlan, Rounds
from ..privacy.mechanism import Message
from ..report._names import METHODS, Method
from ..schedules import Block
from .cohort import Cohort, Own
from .pieces import joined, one_start_needed, starts, weighted
from .problem import Problem
from .store import ClientStore

Public = Mapping[str, Tensor]
"""The public state, by name."""


@dataclass
class State:
    """The state of an algorithm between two events: tensors only, so it is the checkpoint.

    Attributes:
        public: tensors that observers may see; they change only by releases.
        private: per-client tensors that never leave their clients.
        earlier: public states from which clients started that have not answered yet, by version;
            see :class:`~fedmtl.schedules.block.Asked`.
    """

    public: dict[str, Tensor]
    private: ClientStore
    earlier: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Released:
    """The releases of a round: public values, the only ones that a server gets.

    Attributes:
        values: the releases of the round by name, each a noised sum over ``denominator``. (D,)
            float64, (D, D) for a symmetric one, with a leading R for several replicates.
        denominator: m, the public constant that divides every sum.
        noise_std: returns the standard deviation (R,) float64 of the noise on a coordinate of a
            release, or on the diagonal of a matrix, by the release's name; 0 without noise.
        step: number of the round.
        bounds: the norm C to which a client's row was clipped, by release; infinite without a clip.
    """

    values: Mapping[str, Tensor]
    denominator: float
    noise_std: Callable[[str], Tensor]
    step: int = 0
    bounds: Mapping[str, float] = field(default_factory=dict)


BASELINES: dict[str, type[Algorithm]] = {}
"""The methods that can be baselines, by name; their classes register themselves."""


class Algorithm(Checked):
    """A federated algorithm: the clients' computation and the server's update.

    A round, or an activation of one client, is ``client`` -> release -> ``server`` -> ``receive``.
    ``client`` and ``receive`` are the clients' part. They read the public state and the data and
    tensors of their own clients, and nothing else: a client's numbers are the same in a process of
    its own as in a stack of clients. ``server`` never sees a client. Settings are the fields of a
    frozen dataclass. The public state, and all that ``server`` computes, is public. The rows that
    ``client`` returns are private until the channel has clipped, added up and noised them.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, Trainer, load_data, models
        >>> from fedmtl.algorithms import Algorithm, State
        >>> from fedmtl.privacy import ReleasePlan
        >>> class Average(Algorithm):
        ...     name = "average"
        ...     local = LocalSGD(lr=0.1)
        ...     def plan(self, problem, schedule):  # the releases of each round
        ...         return (ReleasePlan(name="step", dimension=problem.dimension),)
        ...     def init(self, problem, replicates=1):  # clients keep nothing
        ...         return State({"w": problem.initial}, problem.client_store({}))
        ...     def client(self, c):  # rows (k, D) of the clients, and their state
        ...         w = c.public["w"]
        ...         return {"step": c.train(self.local, w) - w}, c.own
        ...     def server(self, problem, public, released):
        ...         return {"w": public["w"] + released.values["step"].to(public["w"])}
        ...     def personal(self, c):  # the clients' models (k, D) in the end
        ...         return c.public["w"].expand(len(c.ids), -1)
        >>> trainer = Trainer(
        ...     algorithm=Average(),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])

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
        all_at_once: True if ``client`` and ``receive`` compute all clients of the problem in their
            order, and are never called with some of them. Over several ranks the problem is then
            that of the rank's clients.
        fitted_once: True if every client fits its model once, from its own records and without a
            release.
        on_host: True if it computes on the CPU, in NumPy, whatever the device of the run.
        one_start: True if all clients of a round must start from one public state.
        own_starts: True if clients read the shared model alone, (D,), or (k, D) with one for each.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    baseline: ClassVar[bool] = False
    accepts_empty_clients: ClassVar[bool] = False
    one_at_a_time: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = False
    fitted_once: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    one_start: ClassVar[bool] = False
    own_starts: ClassVar[bool] = False
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

        Raises:
            DataError: says what the method needs, and what the data have.
        """

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Returns a bound on the features of a record; None, the default, for no bound.

        Training enforces it, and it holds wherever models are used: for scores, and in the models
        of the result.
        """
        return None

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Algorithm:
        """Fills in the ``"auto"`` settings of the algorithm from public rows and bounds.

        Args:
            problem: of the run.
            schedule: of the activations, a ``BoundSchedule``; None for an algorithm with rounds.
            privacy: settings of the run, or those of its replicates; None in it is no privacy.
        """
        return self

    def scheduled(self, schedule: Any) -> Any:
        """Returns the schedule of a run with the events that the method adds; none by default.

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

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Returns the state before the first event; empty by default.

        Args:
            problem: of the run. The public part of the state never reads data.
            replicates: R, the number of runs that are computed as one program.
        """
        return State({}, ClientStore(problem.clients, {}))

    def client(self, c: Cohort) -> tuple[Mapping[str, Message], Own]:
        """Computes the messages and the new states of the clients of a cohort.

        Returns:
            The messages: rows (k, D) by release, or the gradients of the records of a client that
            acts one at a time. And the clients' new states.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its clients compute.")

    def server(self, problem: Problem, public: Public, released: Released) -> dict[str, Tensor]:
        """Returns the public state after the round; unchanged by default.

        It is free post-processing of the releases.

        Args:
            problem: its public parts: the initial model, the dimension, the number of clients.
            public: the public state, not to be changed.
            released: the releases of the round.
        """
        return dict(public)

    def receive(self, c: Cohort) -> Own:
        """Returns the clients' states at the end of the round; unchanged by default.

        Args:
            c: the cohort, with the new public state.
        """
        return c.own

    def check_starts(self) -> None:
        """Raises ConfigError if all clients of a round must start from one public state."""
        if self.one_start or self.all_at_once or type(self).receive is not Algorithm.receive:
            raise one_start_needed(self.name)

    def step(self, problem: Problem, state: State, block: Block, channel: Any) -> State:
        """Computes one round, or a block of activations.

        An algorithm may override it by a faster program that gives the same numbers.

        Args:
            problem: the data and the model.
            state: the state before the block; it is changed in place, and returned.
            block: the participants; charged already.
            channel: makes all releases of the clients: :class:`~fedmtl.privacy.Rounds`, or
                :class:`~fedmtl.privacy.Activations` of clients that act one at a time.
        """
        store = state.private
        ascending = block.ascending()  # as the store's rows
        asked = ascending.asked
        if asked is not None:
            self.check_starts()
        mine = Cohort(
            problem=problem,
            ids=ascending.cohort[problem.own(ascending.cohort)],
            public=state.public,
            round=block.first,
            clip=channel.clip,
            local=channel.local,
            members=block.cohort,
            total=cache(channel.total),  # all pieces add to one sum
        )
        sent: dict[str, list[Message]] = {}
        order: list[Tensor] = []
        known = {**state.earlier, block.first: state.public}
        for start in starts(mine, ascending, known, self.own_starts):
            for ids, c in self._pieces(start, store):
                rows, own = self.client(c)
                store.scatter_all(ids, own)
                order.append(ids)
                for name, part in rows.items():
                    sent.setdefault(name, []).append(part)
                del rows, own, c  # frees their memory before the next piece
        messages = {name: joined(parts) for name, parts in sent.items()}
        if asked is not None:
            weights = asked.weights[problem.own(ascending.cohort)]
            messages = weighted(messages, torch.cat(order), weights, channel)
        state.public = self.conclude(problem, state.public, messages, ascending, channel)
        if asked is not None:
            state.earlier = {version: known[version] for version in sorted(asked.kept)}
        if type(self).receive is not Algorithm.receive:
            for ids, c in self._pieces(replace(mine, public=state.public), store):
                store.scatter_all(ids, self.receive(c))
        return state

    def _pieces(self, mine: Cohort, store: ClientStore) -> Iterator[tuple[Tensor, Cohort]]:
        """Yields the clients of this process piece by piece: their ids, and their cohort with their
        states."""
        problem = mine.problem
        if not self.all_at_once:
            for ids in problem.pieces(mine.ids):
                yield ids, mine.of(ids, store.gather_all(ids))
            return
        ids = mine.ids
        if problem.owner is not None:
            # the problem of this rank's clients alone, with positions among them
            mine = replace(mine, problem=problem.mine, ids=torch.arange(len(ids)))
        yield ids, replace(mine, own=store.gather_all(ids))

    def conclude(
        self,
        problem: Problem,
        public: Public,
        rows: Mapping[str, Message],
        block: Block,
        channel: Rounds,
    ) -> dict[str, Tensor]:
        """Releases the messages of a round and returns the public state after :meth:`server`.

        A server with clients in processes of their own does nothing else.

        Args:
            problem: its public parts.
            public: the public state, not to be changed.
            rows: the messages of :meth:`client` by release: (k, D) in the order of the block's
                cohort, or of its clients that this rank computes.
            block: the participants; charged already.
            channel: makes the releases.
        """
        clients = block.cohort[problem.own(block.cohort)]
        values = {}
        for name, message in rows.items():
            values[name] = channel.release(name, message, clients)
        bounds = {name: channel.bound_of(name) for name in rows}
        released = Released(values, channel.denominator, channel.noise_std, block.first, bounds)
        return self.server(problem, public, released)

    def personal(self, c: Cohort) -> Tensor:
        """Returns the personal models (k, D) of clients, from the public state and their own.

        Nothing is released. Clients that never took part have a model, too.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} does not say what the personal models are.")

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the personal models of ``clients``, (k, D).

        Args:
            problem: of the run.
            state: after any event.
            clients: int64 (k,).
        """
        own = state.private.gather_all(clients)
        return self.personal(Cohort(problem, clients, state.public, own))

    def shared(self, state: State) -> Tensor | None:
        """Returns the released shared model (D,); None, the default, if there is none."""
        return None

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns the paper's decomposition of the models, such as ``{"P": ..., "Q": ...}``.

        It becomes :attr:`fedmtl.Result.parts`; empty by default. With several replicates it is that
        of the first.

        Args:
            problem: of the run.
            state: after the last event.
            personal: (n, D), the personal models.
        """
        return {}

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the personal models of ``clients`` in every replicate, (R, k, D).

        Only methods that compute replicates as one program have it.

        Args:
            problem: of the run.
            state: after any event.
            clients: int64 (k,).
        """
        raise NotImplementedError(f"{type(self).__name__} computes one run at a time.")

    def local_baseline(self) -> Algorithm | None:
        """Returns the non-federated baseline of this method.

        None, the default, selects local training. Methods with a closed-form local fit return it.
        """
        return None

    def objective(self, problem: Problem, state: State) -> Tensor | None:
        """Returns the training objective of every replicate, (R,) float64; None by default.

        It reads records without noise, so it is not private.

        Args:
            problem: of the run.
            state: after any event, with the tensors of all clients.
        """
        return None
