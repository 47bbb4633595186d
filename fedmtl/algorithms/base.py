"""The base class of all algorithms, and the problem and the state that they work on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._check import Checked
from ..data import FederatedDataset, RowBound
from ..local import Executor, Layout, LocalSolver
from ..local.losses import Loss
from ..privacy import GradientPlan, ReleasePlan, Rounds
from ..privacy.clip import RowTotal
from ..privacy.rounds import Message
from ..ranks import SINGLE, Ranks
from ..report._names import METHODS, Method
from ..schedules import Block
from .cohort import Cohort, Own
from .store import ClientStore, Fields

_PIECE_BYTES, _PIECE_CLIENTS = 1 << 25, 32  # of models that are computed at a time


@dataclass
class Tally:
    """Counts local trainings, and those that ended in a model that is not finite: such a client sends nothing and keeps
    the model that it had."""

    trained: int = 0
    diverged: int = 0


@dataclass
class State:
    """All that an algorithm carries from one event to the next: tensors only, so this is the checkpoint.

    Attributes:
        public: tensors that observers may see; they change only by releases.
        private: per-client tensors that never leave their clients.
    """

    public: dict[str, Tensor]
    private: ClientStore


@dataclass(frozen=True)
class Problem:
    """The data, the model and the loss that an algorithm works on.

    Attributes:
        data: the clients' data.
        module: prepared template of the model.
        initial: (D,), the public starting point.
        loss: one value per example.
        executor: computes chunks of clients.
        rounds: planned number of events.
        seed: of the run.
        protects_records: whether the protected unit is one record, so that gradients of local training are released.
        tally: counts local trainings, for the report of a simulation; private.
        ranks: the processes that compute the run.
        owner: int64 (n,), the rank that computes each client; None in a single process.
        prepared: what algorithms have made of the data and the model, see :func:`~.linear.data.prepared`; the same
            object in every problem that is derived from this one.
        clients: number of clients, the public nominal population.
    """

    data: FederatedDataset
    module: nn.Module
    initial: Tensor
    loss: Loss
    executor: Executor
    rounds: int
    seed: int
    protects_records: bool = False
    tally: Tally | None = None
    ranks: Ranks = SINGLE
    owner: Tensor | None = None
    prepared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def clients(self) -> int:
        return len(self.data)

    def over(self, ranks: Ranks) -> Problem:
        """Return the problem with its clients divided among ``ranks``."""
        owner = None if ranks.size == 1 else ranks.owners(self.data.train.counts)
        return replace(self, ranks=ranks, owner=owner)

    def own(self, clients: Tensor) -> Tensor:
        """Return the places in ``clients``, int64 (k,), of those that this process computes: all, in a single one."""
        if self.owner is None:
            return torch.arange(len(clients))
        return (self.owner[clients] == self.ranks.rank).nonzero()[:, 0]

    @cached_property
    def mine(self) -> Problem:
        """Return the problem of this rank's clients only, in their order, as that of a single process."""
        members = self.own(torch.arange(self.clients))
        return replace(self, data=self.data.take_clients(members), ranks=SINGLE, owner=None)

    def pieces(self, clients: Tensor) -> tuple[Tensor, ...]:
        """Return ``clients``, int64 (k,), in parts that are computed one after another.

        They are one part if their models take at most 256 MiB. If they take more, a part has a stack of clients, at
        least 32 of them and at least 32 MiB of models: stacks of fewer clients would be filled up.
        """
        row = max(1, self.dimension * self.initial.element_size())
        size = max(self.executor.chunk, _PIECE_BYTES // row, _PIECE_CLIENTS)
        return clients.split(len(clients) or 1 if len(clients) * row <= 8 * _PIECE_BYTES else size)

    def spread(self, work: Callable[[Tensor], Tensor], clients: Tensor) -> Tensor:
        """Return ``work(clients)``, a row a client (k, ...), at every rank; each calls it with its own clients."""
        if self.owner is None:
            return work(clients)
        place = self.own(clients)
        return self.ranks.join(work(clients[place]), place, len(clients))

    @property
    def dimension(self) -> int:
        """Return D, the number of trainable parameters."""
        return len(self.initial)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.module)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what is outside of every epsilon: what the data's own notes say, and what is frozen in the model."""
        total = sum(p.numel() for p in self.module.parameters())
        still = total - self.dimension
        if not still:
            return self.data.notes
        frozen = (
            f"the model's frozen parameters ({still:,} of {total:,} numbers): they are public and stay as they were "
            "given, so nothing covers them if these data were used to make them"
        )
        return (*self.data.notes, frozen)

    def client_store(self, fields: Fields) -> ClientStore:
        """Return an empty store of the clients' own tensors, on the problem's device."""
        return ClientStore(
            self.clients,
            fields,
            device=self.initial.device,
            members=None if self.owner is None else (self.owner == self.ranks.rank).nonzero()[:, 0],
            part=f"{self.ranks.rank}-of-{self.ranks.size}",
        )

    def gathered(self, store: ClientStore) -> ClientStore:
        """Return a store with the tensors of all clients, at every rank; in a single process ``store`` itself."""
        if self.owner is None:
            return store
        whole, own = ClientStore(self.clients, store.fields, device=self.initial.device), store.members
        joined = {name: self.ranks.join(store.gather(name, own), own, self.clients) for name in store.fields}
        whole.scatter_all(torch.arange(self.clients), joined)
        return whole


def joined(parts: list[Any]) -> Message:
    """Return what the clients of consecutive pieces send as one message: rows (..., k, D) under one another, or their
    sum, which is the same object in all pieces.

    Args:
        parts: a message of each piece; several are taken out of the list, so that no row is in memory twice.
    """
    first: Message = parts[0]
    if isinstance(first, RowTotal) or len(parts) == 1:
        return first
    whole, end = first.new_empty(*first.shape[:-2], sum(part.shape[-2] for part in parts), first.shape[-1]), 0
    while parts:
        part = parts.pop(0)
        start, end = end, end + part.shape[-2]
        whole[..., start:end, :] = part
    return whole


@dataclass(frozen=True)
class Released:
    """What the server knows of a round: public values only.

    Attributes:
        values: the releases of the round by name, each a noised sum over ``denominator``; (D,) float64, (D, D) for a
            symmetric one, with a leading R for several replicates.
        denominator: m, the public constant that divides every sum.
        noise_std: name -> (R,) float64, standard deviation of the noise on a coordinate of that release (of a matrix:
            on its diagonal); 0 without noise.
        step: number of the round.
    """

    values: Mapping[str, Tensor]
    denominator: float
    noise_std: Callable[[str], Tensor]
    step: int = 0


BASELINES: dict[str, type[Algorithm]] = {}
"""The methods that can be named as baselines, by name; their classes register themselves."""


class Algorithm(Checked):
    """A federated algorithm: what a client computes, what the server does with what was released.

    A round, or an activation of one client, is ``client`` -> release -> ``server`` -> ``receive``. ``client`` and
    ``receive`` are the clients' part: they read the public state and the data and tensors of their own clients, and
    nothing else, so that they give the same numbers for one client in a process of its own as for a stack of clients.
    ``server`` never sees a client. Settings are the fields of a frozen dataclass; what ``server`` and the public state
    hold is public, what ``client`` returns is private until the channel has clipped, added up and noised it.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, Trainer, load_data, models
        >>> from fedmtl.algorithms import Algorithm, State
        >>> from fedmtl.privacy import ReleasePlan
        >>> class Average(Algorithm):
        ...     name, local = "average", LocalSGD(lr=0.1)
        ...     def plan(self, problem, schedule):  # what is released in each of the rounds
        ...         return (ReleasePlan(name="step", dimension=problem.dimension),)
        ...     def init(self, problem, replicates=1):  # the public state, and nothing that clients keep
        ...         return State({"w": problem.initial}, problem.client_store({}))
        ...     def client(self, c):  # rows (k, D) of the clients, and what they keep
        ...         return {"step": c.train(self.local, c.public["w"]) - c.public["w"]}, c.own
        ...     def server(self, problem, public, released):
        ...         return {"w": public["w"] + released.values["step"].to(public["w"])}
        ...     def personal(self, c):  # the clients' models (k, D) in the end
        ...         return c.public["w"].expand(len(c.ids), -1)
        >>> data, model = load_data("digits", clients=10), models.softmax_regression()
        >>> Trainer(
        ...     algorithm=Average(), data=data, model=model, schedule=FullParticipation(), privacy=None, rounds=2,
        ...     progress=False,
        ... ).fit().personal.shape
        torch.Size([10, 650])

    Attributes:
        name: of the algorithm, in results and reports. A class with a name of its own registers itself by it.
        title, colour: of the name in print, and in figures, ``#rrggbb``; without them the name, and any colour.
        baseline: whether ``Trainer(baselines=[name])`` builds it, from a local solver.
        local: the clients' local solver, where they train by one; record-level privacy takes local steps from it.
        loss: name of the loss that the algorithm computes itself, such as ``"logistic"``; None where it is the run's.
        accepts_empty_clients: whether clients without training examples can take part. Their rows count as those of
            others, so where clients take turns in public (:class:`~fedmtl.CyclicCohorts`) the noise is that of
            replace-one, twice as large.
        one_at_a_time: whether its clients act one at a time by clocks of their own, and not in rounds.
        all_at_once: whether ``client`` and ``receive`` compute all clients of the problem in their order, and are never
            called with some of them; over several ranks the problem is then that of the rank's clients.
        on_host: whether it computes on the CPU, in NumPy, whatever the device of the run.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    colour: ClassVar[str] = ""
    baseline: ClassVar[bool] = False
    accepts_empty_clients: ClassVar[bool] = False
    one_at_a_time: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    local: LocalSolver | None = None
    loss: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(name := vars(cls).get("name"), str):
            METHODS[name] = Method(vars(cls).get("title", name), vars(cls).get("colour", ""))
            if cls.baseline:
                BASELINES[name] = cls

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse data that the method has no use for whatever the model, before one is built; none by default.

        Raises:
            DataError: what the method needs, and what the data have.
        """

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Return a bound on the features of a record, which training enforces and which holds wherever models are used:
        for scores, and in the models of the result. None by default."""
        return None

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Algorithm:
        """Return this algorithm with its settings that are ``"auto"`` filled in from public rows and bounds.

        Args:
            problem: of the run.
            schedule: of the activations, a ``BoundSchedule``; None for an algorithm that goes in rounds.
            privacy: settings of the run, or those of its repetitions; None where there is none.
        """
        return self

    def scheduled(self, schedule: Any) -> Any:
        """Return the schedule of a run, a ``BoundSampler`` or a ``BoundSchedule``, with what the method puts before it;
        unchanged by default."""
        return schedule

    def plan(self, problem: Problem, schedule: Any) -> Sequence[ReleasePlan | GradientPlan]:
        """Return every release the algorithm will make, and how often: what calibration needs. None by default.

        Args:
            problem: of the run.
            schedule: a ``BoundSampler`` of rounds, or the ``BoundSchedule`` of clients that act one at a time: these
                have a :class:`~fedmtl.privacy.GradientPlan`.
        """
        return ()

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Return the state before the first event; the public part never reads data. Empty by default."""
        return State({}, ClientStore(problem.clients, {}))

    def client(self, c: Cohort) -> tuple[Mapping[str, Message], Own]:
        """Return what the clients of a cohort compute.

        Returns:
            What they send: rows (k, D) by release, or the gradients of the records of a client that acts one at a time;
            and what they keep from now on.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its clients compute.")

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        """Return the public state after the round: free post-processing of what was released. Unchanged by default.

        Args:
            problem: its public parts: the starting point, the dimension, the number of clients.
            public: the public state, not to be changed.
            released: the values, and what is publicly known of them.
        """
        return dict(public)

    def receive(self, c: Cohort) -> Own:
        """Return what the cohort keeps from now on, given the new public state at the end of the round. Unchanged by
        default."""
        return c.own

    def step(self, problem: Problem, state: State, block: Block, channel: Any) -> State:
        """Return the state after one round, or after a block of activations; this changes ``state`` in place.

        An algorithm may override it by a faster program that gives the same numbers.

        Args:
            problem: the data and the model.
            state: before the block.
            block: who takes part; charged already.
            channel: makes all releases of the clients: :class:`~fedmtl.privacy.Rounds`, or
                :class:`~fedmtl.privacy.Activations` of clients that act one at a time.
        """
        cohort, store, total = block.cohort, state.private, cache(channel.total)
        ascending = replace(block, clients=torch.sort(block.clients).values)  # as the store has its rows
        clients = ascending.cohort[problem.own(ascending.cohort)]
        pieces = (clients,) if self.all_at_once else problem.pieces(clients)
        mine = self.all_at_once and problem.owner is not None

        def piece(ids: Tensor) -> Cohort:
            return Cohort(
                problem=problem.mine if mine else problem,
                ids=torch.arange(len(ids)) if mine else ids,
                public=state.public,
                own=store.gather_all(ids),
                round=block.first,
                clip=channel.clip,
                local=channel.local,
                members=cohort,
                total=total,
            )

        sent: dict[str, list[Message]] = {}
        for ids in pieces:
            rows, own = self.client(piece(ids))
            store.scatter_all(ids, own)
            for name, part in rows.items():
                sent.setdefault(name, []).append(part)
            del rows, own
        messages = {name: joined(parts) for name, parts in sent.items()}
        state.public = self.conclude(problem, state.public, messages, ascending, channel)
        if type(self).receive is not Algorithm.receive:
            for ids in pieces:
                store.scatter_all(ids, self.receive(piece(ids)))
        return state

    def conclude(
        self,
        problem: Problem,
        public: Mapping[str, Tensor],
        rows: Mapping[str, Message],
        block: Block,
        channel: Rounds,
    ) -> dict[str, Tensor]:
        """Return the public state after a round whose clients have sent ``rows``: the releases, and :meth:`server`.

        It is all that a server does whose clients are processes of their own.

        Args:
            problem: its public parts.
            public: the public state, not to be changed.
            rows: what :meth:`client` returned, by release: (k, D) in the order of the block's cohort, or of those of it
                that this rank computes.
            block: who takes part; charged already.
            channel: releases what clients send.
        """
        clients = block.cohort[problem.own(block.cohort)]
        values = {name: channel.release(name, message, clients) for name, message in rows.items()}
        released = Released(values, channel.denominator, channel.noise_std, block.first)
        return self.server(problem, public, released)

    def personal(self, c: Cohort) -> Tensor:
        """Return the personal models (k, D) of clients, from the public state and what they keep; no client takes part.
        Clients that never took part have a model, too."""
        raise NotImplementedError(f"{type(self).__name__} does not say what the personal models are.")

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return the personal models (k, D) of ``clients``, int64 (k,)."""
        return self.personal(Cohort(problem, clients, state.public, state.private.gather_all(clients)))

    def shared(self, state: State) -> Tensor | None:
        """Return the released shared model (D,), or None, the default: every client has its own."""
        return None

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Return what a method's paper writes its models with, by the paper's letters: :attr:`fedmtl.Result.parts`.
        None by default. Of several repetitions it is that of the first.

        Args:
            problem: of the run.
            state: after the last event.
            personal: (n, D), the personal models.
        """
        return {}

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return the personal models of ``clients``, int64 (k,), in every repetition, (R, k, D), of a method whose
        ``init`` and ``step`` compute several runs as one program."""
        raise NotImplementedError(f"{type(self).__name__} computes one run at a time.")

    def local_baseline(self) -> Algorithm | None:
        """Return what the clients have by themselves, where that is an exact fit of the same function of their own
        records; else None, the default, and the baseline is local training."""
        return None

    def objective(self, problem: Problem, state: State) -> Tensor | None:
        """Return the training objective of every repetition, (R,) float64, or None, the default; it is not private."""
        return None
