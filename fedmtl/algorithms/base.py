"""What every algorithm is made of: the problem, the state, and the parts of clients and server in a round."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..data import FederatedDataset, RowBound
from ..errors import ConfigError, PrivacyError
from ..local import BatchPlan, Executor, LocalSolver, LocalTraining, Mixture, plan_batches
from ..local.batches import batch_widths, plannable
from ..local.executor import by_decreasing
from ..local.optimizers import Strength, rows_of
from ..local.places import LANES, grain_of, places
from ..privacy import Channel, GradientPlan, LocalSteps, ReleasePlan
from ..privacy.channel import GRADIENT, Message
from ..privacy.clip import Clip, not_finite
from ..privacy.sums import NOBODY
from ..privacy.totals import RowTotal
from ..ranks import ALONE, Ranks
from ..schedules import Block
from ..stacked import Layout, StackedModule
from ..stacked.losses import Loss
from ..stacked.per_example import piece_width
from .store import ClientStore, Fields

PERSONALIZE_ROUND = 2**32 - 1
"""The round number that addresses the batches of :meth:`Algorithm.personalize`: after every real round."""


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
        rows_in_files: whether the clients' own tensors are read from files of the run's folder, and not kept in memory.
        protects_records: whether the protected unit is one record, so that gradients of local training are released.
        tally: counts local trainings, for whoever runs the simulation; private.
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
    rows_in_files: bool = False
    protects_records: bool = False
    tally: Tally | None = None
    ranks: Ranks = ALONE
    owner: Tensor | None = None
    prepared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def clients(self) -> int:
        return len(self.data)

    def own(self, clients: Tensor) -> Tensor:
        """Return the places in ``clients``, int64 (k,), of those that this process computes: all, in a single one."""
        if self.owner is None:
            return torch.arange(len(clients))
        return (self.owner[clients] == self.ranks.rank).nonzero()[:, 0]

    @cached_property
    def mine(self) -> Problem:
        """Return the problem of this rank's clients alone, in their order, as that of a single process."""
        members = (self.owner == self.ranks.rank).nonzero()[:, 0].tolist() if self.owner is not None else []
        return replace(self, data=self.data.subset(members), ranks=ALONE, owner=None)

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
            in_files=self.rows_in_files,
        )

    def gathered(self, store: ClientStore) -> ClientStore:
        """Return a store with the tensors of all clients, at every rank; in a single process ``store`` itself."""
        if self.owner is None:
            return store
        whole, own = ClientStore(self.clients, store.fields, device=self.initial.device), store.members
        joined = {name: self.ranks.join(store.gather(name, own), own, self.clients) for name in store.fields}
        whole.scatter_all(torch.arange(self.clients), joined)
        return whole

    def train_locally(
        self,
        solver: LocalSolver,
        start: Tensor,
        clients: Tensor,
        *,
        round: Round | int,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
        divergence: Loss | None = None,
        moving: Tensor | None = None,
        mixture: Mixture | None = None,
    ) -> Tensor:
        """Return every client's model after its local run.

        Where single records are protected it is DP-SGD on the local steps that the ledger has charged in this round: a
        client without one keeps its start, and so does every client in :data:`PERSONALIZE_ROUND`.

        Args:
            solver: see :class:`fedmtl.local.LocalSolver`.
            start: (D,) or (k, D).
            clients: int64 (k,).
            round: the round, as :meth:`Algorithm.client` gets it, or its number; addresses batches and dropout masks.
            lam, anchor: the pull (lam / 2) ||w - anchor||^2; anchor (D,) or (k, D); lam may be a tensor (D,) or (k, D)
                with one strength for each coordinate, or a :class:`~fedmtl.local.precision.Precision` P, and the pull
                is (1/2) (w - anchor)^T P (w - anchor).
            divergence: what the pull measures in place of the squared distance, see
                :class:`fedmtl.local.LocalTraining`; not where records are protected.
            moving: bool (D,), the coordinates that are trained; None for all.
            mixture: personal models (k, D) that are trained beside, at the same batches, see
                :class:`fedmtl.local.Mixture`; changed in place, and without noise where records are protected, since
                nothing of them is sent. None without.

        Returns:
            (k, D), on the device and in the dtype of ``initial``.

        Raises:
            PrivacyError: single records are protected, and there is no way out: a number in place of the round.
        """
        models = self.initial.new_empty(len(clients), self.dimension)
        number = round if isinstance(round, int) else round.number
        run = LocalTraining(
            self.data, self.loss, solver, number, start, lam, anchor, divergence, moving, mixture
        )  # fmt: skip
        self._train(run, clients, round, lambda place, trained: _write(models, place, trained))
        return models

    def send_change(
        self,
        name: str,
        solver: LocalSolver,
        start: Tensor,
        clients: Tensor,
        *,
        round: Round,
        less: Tensor,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
        kept: Tensor | None = None,
        mixture: Mixture | None = None,
    ) -> Tensor | RowTotal:
        """Return what clients send who send how far they are from a shared model after their local run: rows (k, D), or
        their clipped sum where the channel needs no rows.

        Args:
            name: of the release.
            solver, start, clients, round, lam, anchor, mixture: see :meth:`train_locally`.
            less: (D,), the shared model.
            kept: (k, D), where the models themselves go; None for nowhere.
        """
        total = round.total(name) if round.total is not None and self.initial.device.type == "cpu" else None
        changes = self.initial.new_empty(len(clients) if total is None else 0, self.dimension)

        def send(place: Tensor, models: Tensor) -> None:
            if kept is not None:
                _write(kept, place, models)
            if total is None:
                _write(changes, place, models - less)
            else:
                total.add(models - less)

        run = LocalTraining(self.data, self.loss, solver, round.number, start, lam, anchor, mixture=mixture)
        self._train(run, clients, round, send)
        if total is None:
            return changes
        total.has(clients)
        return total

    def _train(
        self, run: LocalTraining, clients: Tensor, round: Round | int, receive: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Train ``clients``, int64 (k,), and hand places among them, int64 (d,), and models (d, D) to ``receive`` as
        they finish; of a client without a local step its start. Several threads may call it."""
        diverged: list[int] = []

        def finish(place: Tensor, models: Tensor) -> None:
            if self.tally is not None:
                diverged.append(not_finite(models))
            receive(place, models)

        train = self._train_on_records if self.protects_records else self._train_on_batches
        idle = train(run, clients, round, finish)
        if len(idle):
            finish(idle, rows_of(run.start, idle).expand(len(idle), -1))
        if self.tally is not None and run.round != PERSONALIZE_ROUND:
            beside = () if run.mixture is None or self.protects_records else (run.mixture.models,)
            self.tally.trained += len(clients) * (1 + len(beside))
            self.tally.diverged += sum(diverged) + sum(map(not_finite, beside))

    def _train_on_batches(
        self, run: LocalTraining, clients: Tensor, round: Round | int, finish: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        """Train on batches; return the places of clients without a local step."""
        counts = self.data.train.counts[clients]
        steps, widths = run.solver.step_counts(counts), batch_widths(counts, run.solver.batch_size)
        lanes = (clients.cpu() if isinstance(round, int) else round.places(clients)) % LANES
        for width in widths[steps > 0].unique().tolist():
            alike, grain = ((widths == width) & (steps > 0)).nonzero()[:, 0], grain_of(width, self.executor.chunk)
            members, real = places(steps[alike], lanes[alike], grain)
            block = plannable(int(steps[alike].max()), width, grain)
            for place, used in zip(alike[members].split(block), real.split(block), strict=True):
                plan = plan_batches(
                    self.data, run.solver, clients[place], seed=self.seed, round=run.round, width=width, grain=grain
                )
                plan.steps = torch.where(used, plan.steps, 0)  # a filler never finishes

                def work(stack: StackedModule, part: slice, place: Tensor = place, plan: BatchPlan = plan) -> None:
                    for done, models in run.on_batches(stack, plan.part(part), place[part]):
                        finish(done, models)

                self.executor.map(work, len(place), grain=grain)
        return (steps == 0).nonzero()[:, 0]

    def _train_on_records(
        self, run: LocalTraining, clients: Tensor, round: Round | int, finish: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        """Train by DP-SGD; return the places of clients without a local step that was charged."""
        if run.divergence is not None:
            raise ConfigError("A pull that is measured on a client's records has no release; use privacy=client.")
        if run.round == PERSONALIZE_ROUND:
            return torch.arange(len(clients))
        if isinstance(round, int) or round.local is None:
            raise PrivacyError(
                "Single records are protected, so local training needs the round and not its number: pass the round "
                "that Algorithm.client gets on to train_locally(round=...)."
            )
        local, alone = round.local, self.executor.chunk < LANES
        width = None if alone else piece_width(float(local.plan.expected.max(initial=0.0)))
        steps = local.steps(clients)
        order = by_decreasing(steps)
        order = order[steps[order] > 0]

        def work(stack: StackedModule, part: slice) -> None:
            for done, models in run.on_records(stack, clients[order[part]], order[part], local, width):
                finish(done, models)

        self.executor.map(work, len(order), grain=1 if alone else None)
        return (steps == 0).nonzero()[:, 0]


def _write(rows: Tensor, place: Tensor, models: Tensor) -> None:
    """Write models (d, D) to their places, int64 (d,) on the host."""
    rows.index_copy_(0, place.to(rows.device), models)


@dataclass(frozen=True)
class Round:
    """What a client knows of the round, or of the activation, it takes part in, beside the public state.

    Attributes:
        number: of the round, from 0; it addresses batches and dropout masks.
        clip: (name, rows (k, D)) -> the rows as the release ``name`` counts them; for clients that remember what they
            sent.
        local: the local steps that the round has charged, where single records are protected; else None.
        clips: whether releases clip at all.
        cohort: int64 (k,), who takes part, where the clients of a round are computed in several places; it decides in
            which lanes of a stack they stand (:mod:`fedmtl.local.places`), and no number.
    """

    number: int
    clip: Callable[[str, Tensor], Tensor]
    local: LocalSteps | None = None
    clips: bool = True
    cohort: Tensor | None = None
    total: Callable[[str], RowTotal | None] | None = None

    def places(self, clients: Tensor) -> Tensor:
        """Return the positions of ``clients``, int64 (k,), among those who take part, which they are themselves where
        ``cohort`` is not known."""
        if self.cohort is None:
            return torch.arange(len(clients))
        members, order = torch.sort(self.cohort)
        return order[torch.searchsorted(members, clients.cpu())]


@dataclass(frozen=True)
class Released:
    """What the server knows of a round: public values only.

    Attributes:
        values: the releases of the round by name, each a noised sum over ``denominator``; (D,) float64, (D, D) for a
            symmetric one, with a leading R for several repetitions. Of an activation the noised mean gradient, (D,).
        denominator: m, the public constant that divides every sum.
        noise_std: name -> (R,) float64, standard deviation of the noise on a coordinate of that release (of a matrix:
            on its diagonal); 0 without noise.
        clip: of the gradients of single records, where clients act one at a time and their releases clip; else None.
        clients: int64 (1,), who acted, where clients act one at a time; else None: the cohort is nobody's to know.
        step: number of the round or activation.
        answered: whether the client of an activation released something; else its values are zero.
    """

    values: Mapping[str, Tensor]
    denominator: float
    noise_std: Callable[[str], Tensor]
    clients: Tensor | None = None
    step: int = 0
    clip: Clip | None = None
    answered: bool = True


Own = dict[str, Tensor]
"""What the clients of a round keep for themselves, by name: (k, *shape) each, rows in the order of the clients."""


class Algorithm:
    """A federated algorithm: what a client computes, what the server does with what was released.

    A round, or an activation of one client, is ``client`` -> release -> ``server`` -> ``receive``. ``client`` and
    ``receive`` are the clients' part: they read the public state and the data and tensors of their own clients, and
    nothing else, so that they give the same numbers for one client in a process of its own as for a stack of clients.
    ``server`` never sees a client. The smallest algorithm defines ``name``, :meth:`init`, :meth:`plan`, :meth:`client`,
    :meth:`server`, and :meth:`personal`; settings are the fields of a frozen dataclass.

    Attributes:
        name: of the algorithm, in results and reports.
        local: the clients' local solver, where they train by one; record-level privacy takes local steps from it.
        loss: name of the loss that the algorithm computes itself, such as ``"logistic"``; None where it is the run's.
        supports_replicates: whether ``init(problem, replicates)`` and ``step`` compute several runs as one program.
        accepts_empty_clients: whether clients without training examples can take part.
        one_at_a_time: whether its clients act one at a time by clocks of their own, and not in rounds.
        all_at_once: whether ``client`` and ``receive`` compute all clients of the problem in their order, and are never
            called with some of them; over several ranks the problem is then that of the rank's clients.
        on_host: whether it computes on the CPU, in NumPy, whatever the device of the run.
    """

    name: ClassVar[str]
    supports_replicates: ClassVar[bool] = False
    accepts_empty_clients: ClassVar[bool] = False
    one_at_a_time: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    local: LocalSolver | None = None
    loss: str | None = None

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse data that the method has no use for whatever the model, before one is built; none by default.

        Raises:
            DataError: what the method needs, and what the data have.
        """

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Return a bound on the features of a record, which training enforces and which holds wherever models are used:
        for scores, and in the models of the result. None by default."""
        return None

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Any) -> Algorithm:
        """Return this algorithm with its settings that are ``"auto"`` filled in from public rows and bounds.

        Args:
            problem: of the run.
            schedule: of the activations, a ``BoundSchedule``; None for an algorithm that goes in rounds.
            privacy: settings of the run, or a sequence of those of its repetitions.
        """
        return self

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

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[Mapping[str, Message], Own]:
        """Return what the clients of a cohort compute: the rows that they hand to the releases, and what they keep.

        Args:
            problem: the data and the model; only the examples of ``clients`` are read.
            public: the public state, not to be changed.
            own: what the clients keep, their rows of the store; not to be changed in place.
            clients: int64 (k,), positions in the data.
            round: number of the round and clip of the releases.

        Returns:
            Rows (k, D) by release, or the gradients of the records of a client that acts alone; and what the clients
            keep from now on.
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

    def receive(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round) -> Own:
        """Return what the cohort keeps from now on, given the new public state at the end of the round.

        Unchanged by default. The arguments are those of :meth:`client`.
        """
        return own

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Return the state after one round, or after a block of activations; this changes ``state`` in place.

        An algorithm may override it by a faster program that gives the same numbers.

        Args:
            problem: the data and the model.
            state: before the block.
            block: who takes part; charged already.
            channel: the only way out of the clients.
        """
        with problem.executor.one_thread() as threads:
            channel.threads = threads
            for one in block.steps() if self.one_at_a_time else (block,):
                state = self._step(problem, state, one, channel)
        return state

    def _step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        cohort, store = block.cohort, state.private
        clients = cohort[problem.own(cohort)]
        if self.one_at_a_time and not len(clients):
            channel.release(GRADIENT, NOBODY)
            return state
        round = Round(
            block.first,
            channel.clip,
            channel.local,
            channel.privacy is not None,
            cohort=None if problem.owner is None else cohort,
            total=None if self.one_at_a_time else channel.total,
        )
        part, asked = problem, clients
        if self.all_at_once and problem.owner is not None:
            part, asked = problem.mine, torch.arange(len(clients))
        rows, own = self.client(part, state.public, store.gather_all(clients), asked, round)
        store.scatter_all(clients, own)
        state.public = self.conclude(problem, state.public, rows, block, channel)
        if type(self).receive is not Algorithm.receive:
            store.scatter_all(clients, self.receive(part, state.public, own, asked, round))
        return state

    def conclude(
        self,
        problem: Problem,
        public: Mapping[str, Tensor],
        rows: Mapping[str, Message],
        block: Block,
        channel: Channel,
    ) -> dict[str, Tensor]:
        """Return the public state after a round, or one activation, whose clients have sent ``rows``: the releases, and
        :meth:`server`.

        It is all that a server does whose clients are processes of their own.

        Args:
            problem: its public parts.
            public: the public state, not to be changed.
            rows: what :meth:`client` returned, by release; in a round rows (k, D) in the order of the block's cohort,
                or of those of it whom this rank computes.
            block: who takes part; charged already.
            channel: the only way out of the clients.
        """
        clients = block.cohort[problem.own(block.cohort)]
        answered = not self.one_at_a_time or bool(channel.answering(1).any())
        values = {name: channel.release(name, message, clients) for name, message in rows.items()}
        if self.one_at_a_time:
            values = {name: value[0, 0] for name, value in values.items()}
        known, clip = (clients, channel.sums.clip) if self.one_at_a_time else (None, None)
        released = Released(values, channel.denominator, channel.noise_std, known, block.first, clip, answered=answered)
        return self.server(problem, public, released)

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the personal models (k, D) of clients, from the public state and what they keep; no client takes part.

        The arguments are those of :meth:`client`. Clients that never took part have a model, too.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what the personal models are.")

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return the personal models (k, D) of ``clients``, int64 (k,)."""
        return self.personal(problem, state.public, state.private.gather_all(clients), clients)

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

    def models(self, problem: Problem, state: State) -> Tensor:
        """Return the personal models of every repetition, (R, n, D); needed by :attr:`supports_replicates` only."""
        raise NotImplementedError(f"{type(self).__name__} computes one run at a time.")

    def local_baseline(self) -> Algorithm | None:
        """Return what the clients have alone, where that is an exact fit of the same function of their own records;
        else None, the default, and the baseline is local training."""
        return None

    def objective(self, problem: Problem, state: State) -> Tensor | None:
        """Return the training objective of every repetition, (R,) float64, or None, the default; it is not private."""
        return None
