"""What every algorithm is made of: the problem, the state, and the parts of clients and server in a round."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .._devices import sent, waits
from ..data import FederatedDataset, RowBound
from ..errors import ConfigError, PrivacyError
from ..local import BatchPlan, Executor, LocalSolver, Mixture, plan_batches, train_locally
from ..local.batches import batch_widths, plannable
from ..local.executor import by_decreasing
from ..local.optimizers import Strength, rows_of
from ..local.places import LANES, grain_of, places
from ..local.private import train_privately
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
from .dealing import part_of
from .store import ClientStore, Fields, MappedClientStore, PartStore

PERSONALIZE_ROUND = 2**32 - 1
"""The round number that addresses the batches of :meth:`Algorithm.personalize`: after every real round."""


@dataclass
class Tally:
    """Counts local trainings, and those that ended in a model that is not finite: such a client sends nothing and keeps
    the model that it had.

    Off the CPU the second count is a tensor while a round is computed; whoever asks for :attr:`lost` waits for it.
    """

    trained: int = 0
    diverged: int | Tensor = 0

    @property
    def lost(self) -> int:
        """Return ``diverged`` as a number."""
        self.diverged = int(self.diverged)
        return self.diverged


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
        store_folder: where the clients' own tensors are memory-mapped; ``None`` keeps them in memory.
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
    store_folder: Path | None = None
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
        folder = None if self.store_folder is None else part_of(self.store_folder, self.ranks.rank, self.ranks.size)
        if self.owner is None:
            return self._store(self.clients, fields, folder)
        members = (self.owner == self.ranks.rank).nonzero()[:, 0]
        return PartStore(self.clients, members, self._store(len(members), fields, folder))

    def _store(self, clients: int, fields: Fields, folder: Path | None) -> ClientStore:
        device = self.initial.device
        if folder is None:
            return ClientStore(clients, fields, device=device)
        return MappedClientStore(clients, fields, folder=folder, device=device)

    def gathered(self, store: ClientStore, *, at_all: bool = False) -> ClientStore:
        """Return a store with the tensors of all clients, at the first rank, or at all of them; elsewhere, and where
        the tensors are in files, ``store`` itself."""
        if not isinstance(store, PartStore) or (self.store_folder is not None and not at_all):
            return store
        whole = ClientStore(self.clients, store.fields, device=self.initial.device if at_all else "cpu")
        for name in store.fields:
            rows = self.ranks.join(store.gather(name, store.members), store.members, self.clients, at_all=at_all)
            if at_all or self.ranks.first:
                whole.assign(name, rows)
        return whole if at_all or self.ranks.first else store

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
        less: Tensor | None = None,
        kept: Tensor | None = None,
        out: Tensor | None = None,
        into: RowTotal | None = None,
    ) -> Tensor:
        """Return every client's model after its local run, or how far it is from a point.

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
                :func:`fedmtl.local.train_locally`; not where records are protected.
            moving: bool (D,), the coordinates that are trained; None for all.
            mixture: personal models (k, D) that are trained beside, at the same batches, see
                :class:`fedmtl.local.Mixture`; changed in place, and without noise where records are protected, since
                nothing of them is sent. None without.
            less: (D,), what is subtracted from every model; None for nothing.
            kept: (k, D), where the models themselves go beside the result; None for nowhere.
            out: (k, D), where the result goes; may be ``start``.
            into: a sum that the rows of the result are added to, and nobody keeps them; see :meth:`send_change`.

        Returns:
            (k, D), on the device and in the dtype of ``initial``; (0, D) where it was added ``into`` a sum.

        Raises:
            PrivacyError: single records are protected, and there is no way out: a number in place of the round.
        """
        number = round if isinstance(round, int) else round.number
        count = len(clients) if into is None else 0
        result = self.initial.new_empty(count, self.dimension) if out is None else out
        if self.protects_records:
            if divergence is not None:
                raise ConfigError("A pull that is measured on a client's records has no release; use privacy=client.")
            self._train_privately(solver, start, clients, result, round, lam, anchor, moving, mixture)
            if kept is not None:
                kept.copy_(result)
            return self._counted(result if less is None else result.sub_(less), number)
        sums = None if self.tally is None or not self._by_processor else result.new_zeros(len(clients))
        counts = self.data.train.counts[clients]
        steps, widths = solver.step_counts(counts), batch_widths(counts, solver.batch_size)
        lanes = (clients.cpu() if isinstance(round, int) else round.places(clients)) % LANES
        idle = sent((steps == 0).nonzero()[:, 0], start.device)
        if len(idle) and (out is not start or less is not None):
            stay = start[idle] if start.dim() == 2 else start
            still = stay if less is None else stay - less
            if into is None:
                result[idle] = still
            else:
                into.add(still.expand(len(idle), -1))
            if kept is not None:
                kept[idle] = stay
            if sums is not None:
                sums[idle] = stay.sum(-1)
        for width in widths[steps > 0].unique().tolist():
            alike, grain = ((widths == width) & (steps > 0)).nonzero()[:, 0], grain_of(width, self.executor.chunk)
            members, real = places(steps[alike], lanes[alike], grain)
            block = plannable(int(steps[alike].max()), width, grain)
            for place, used in zip(alike[members].split(block), real.split(block), strict=True):
                plan = plan_batches(
                    self.data, solver, clients[place], seed=self.seed, round=number, width=width, grain=grain
                )
                plan.steps = torch.where(used, plan.steps, 0)  # of a filler nothing is written

                def work(stack: StackedModule, part: slice, place: Tensor = place, plan: BatchPlan = plan) -> None:
                    train_locally(
                        stack,
                        self.data,
                        self.loss,
                        solver,
                        plan.part(part),
                        start,
                        out=result if into is None else into,
                        place=place[part],
                        less=less,
                        kept=kept,
                        sums=sums,
                        lam=lam,
                        anchor=anchor,
                        divergence=divergence,
                        moving=moving,
                        mixture=mixture,
                    )

                with self.executor.products():
                    self.executor.map(work, len(place), grain=grain, examples=width)
        if into is not None:
            into.has(clients)
        if mixture is not None:
            self._counted(mixture.models, number)
        return self._counted(result, number, sums)

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
        """Return what clients send who send how far they are from ``less`` after their local run: rows (k, D), or their
        clipped sum where nobody needs the rows.

        Args:
            name: of the release.
            solver, start, clients, round, less, lam, anchor, kept, mixture: see :meth:`train_locally`.
        """
        total = round.total(name) if round.total is not None and self._by_processor else None
        rows = self.train_locally(
            solver, start, clients, round=round, lam=lam, anchor=anchor, less=less, kept=kept, into=total,
            mixture=mixture
        )  # fmt: skip
        return rows if total is None else total

    @property
    def _by_processor(self) -> bool:
        """Whether local steps are made by the processor, as they are asked for."""
        return not waits(self.initial.device) and not self.executor.execution.graphs

    def _counted(self, models: Tensor, round: int, sums: Tensor | None = None) -> Tensor:
        """Count local trainings; where ``sums`` (k,) are given, which are finite where models are, the models may have
        gone into a sum."""
        if self.tally is not None and round != PERSONALIZE_ROUND:
            self.tally.trained += len(models) if sums is None else len(sums)
            whole = sums is None or (len(models) == len(sums) and not bool(torch.isfinite(sums).all()))
            self.tally.diverged = self.tally.diverged + not_finite(models if whole or sums is None else sums[:, None])
        return models

    def _train_privately(
        self,
        solver: LocalSolver,
        start: Tensor,
        clients: Tensor,
        result: Tensor,
        round: Round | int,
        lam: Strength,
        anchor: Tensor | None,
        moving: Tensor | None,
        mixture: Mixture | None,
    ) -> Tensor:
        if round == PERSONALIZE_ROUND:
            return result.copy_(start if start.dim() == 2 else start.expand(len(clients), -1))
        if isinstance(round, int) or round.local is None:
            raise PrivacyError(
                "Single records are protected, so local training needs the round and not its number: pass the round "
                "that Algorithm.client gets on to train_locally(round=...)."
            )
        local, number, alone = round.local, round.number, self.executor.chunk < LANES
        width = None if alone else piece_width(float(local.plan.expected.max(initial=0.0)))
        order = by_decreasing(local.steps(clients))

        def work(stack: StackedModule, part: slice) -> None:
            own = order[part]
            place = own.to(start.device)
            beside = None if mixture is None else mixture.of(place)
            result[place] = train_privately(
                stack,
                self.data,
                self.loss,
                solver,
                rows_of(start, place),
                clients=clients[own],
                round=number,
                records=local,
                width=width,
                lam=rows_of(lam, place),
                anchor=rows_of(anchor, place),
                moving=moving,
                mixture=beside,
            )
            if mixture is not None and beside is not None:
                mixture.write(place, beside)

        with self.executor.products():
            self.executor.map(work, len(clients), grain=1 if alone else None)
        return result


@dataclass(frozen=True)
class Round:
    """What a client knows of the round, or of the activation, it takes part in, beside the public state.

    Attributes:
        number: of the round, from 0; it addresses batches and dropout masks.
        clip: (name, rows (k, D)) -> the rows as the release ``name`` counts them; for clients that remember what they
            sent.
        local: the local steps that the round has charged, where single records are protected; else None.
        clips: whether releases clip at all.
        time: float64 (1, 1), virtual time.
        members: the records that will take part in the next release of a client that acts alone, for what it computes
            from them by itself: :meth:`fedmtl.privacy.Channel.members`. None in rounds.
        noise: noise that such a client adds inside, and never sends: :meth:`fedmtl.privacy.Channel.local_noise`. None
            in rounds.
        cohort: int64 (k,), who takes part, where the clients of a round are computed in several places; it decides in
            which lanes of a stack they stand (:mod:`fedmtl.local.places`), and no number.
    """

    number: int
    clip: Callable[[str, Tensor], Tensor]
    local: LocalSteps | None = None
    clips: bool = True
    time: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    members: Callable[..., np.ndarray | None] | None = None
    noise: Callable[..., Tensor] | None = None
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
        time: float64 (1, 1), virtual time.
        answered: whether the client of an activation released something; else its values are zero.
    """

    values: Mapping[str, Tensor]
    denominator: float
    noise_std: Callable[[str], Tensor]
    clients: Tensor | None = None
    step: int = 0
    time: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
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
            channel.use_threads(threads)
            for one in block.steps() if self.one_at_a_time else (block,):
                state = self._step(problem, state, one, channel)
        return state

    def _step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        cohort, store = block.cohort, state.private
        clients = cohort[problem.own(cohort)]
        if self.one_at_a_time and not len(clients):
            channel.release(GRADIENT, NOBODY)
            return state
        time = block.time.numpy().T
        round = Round(
            block.first,
            channel.clip,
            channel.local,
            channel.privacy is not None,
            time,
            members=channel.members if self.one_at_a_time else None,
            noise=channel.local_noise if self.one_at_a_time else None,
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
        clients, time = block.cohort, block.time.numpy().T
        clients = clients[problem.own(clients)]
        answered = not self.one_at_a_time or bool(channel.answering(1).any())
        values = {name: channel.release(name, message, clients) for name, message in rows.items()}
        if self.one_at_a_time:
            values = {name: value[0, 0] for name, value in values.items()}
        known, clip = (clients, channel.sums.clip) if self.one_at_a_time else (None, None)
        released = Released(
            values, channel.denominator, channel.noise_std, known, block.first, time, clip, answered=answered
        )
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

    def for_replicates(self, numbers: range) -> Algorithm:
        """Return the settings of some of the repetitions of a run, where each has settings of its own. These settings,
        by default."""
        return self

    def local_baseline(self) -> Algorithm | None:
        """Return what the clients have alone, where that is an exact fit of the same function of their own records;
        else None, the default, and the baseline is local training."""
        return None

    def objective(self, problem: Problem, state: State) -> Tensor | None:
        """Return the training objective of every repetition, (R,) float64, or None, the default; it is not private."""
        return None

    def least_objective(self, problem: Problem) -> float | None:
        """Return the least value of the objective, where the algorithm knows it; it is not private."""
        return None
