"""How events reach the loop: cohorts drawn round by round, or activations of a public schedule in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, Round
from ..errors import ConfigError, PrivacyError
from ..privacy import (
    Channel,
    ClientPrivacy,
    OwnerChannel,
    Privacy,
    RecordPrivacy,
    ReleasePlan,
    Sampler,
    open_channel,
    open_owner_channel,
)
from ..schedules import AsynchronousSchedule, BoundSchedule, Event, EventTable
from ..schedules import rounds as round_events
from .problem import client_ranks, record_owners

Schedule = Sampler | AsynchronousSchedule
_BLOCK = 256
_AHEAD = 1 << 12  # activations charged by one line, where nothing is lost by that


class Source(Protocol):
    """Events of a run: what the loop needs to know of them.

    Attributes:
        stop: number of steps of the whole run.
        every: steps between evaluations.
    """

    @property
    def stop(self) -> int: ...

    @property
    def every(self) -> int: ...

    def events(self, start: int) -> Iterator[Any]:
        """Everything from step ``start`` on."""

    def begin(self, event: Any) -> None:
        """Charge what happens in it; raises BudgetExhausted before any data are read."""

    def last(self, event: Any) -> Event:
        """Its last step, for callbacks: the run has made ``step + 1`` of them after it."""


@dataclass(frozen=True)
class Cohorts:
    """One cohort a round, drawn with the privacy coins.

    Attributes:
        channel: draws and charges.
        order: int64 (n,), the client at each rank.
        ranks: int64 (n,), the rank of each client.
        stop: number of rounds.
        every: rounds between evaluations.
    """

    channel: Channel
    order: Tensor
    ranks: Tensor
    stop: int
    every: int

    def events(self, start: int) -> Iterator[Event]:
        return round_events(self.channel.draw, self.order, start=start, stop=self.stop)

    def begin(self, event: Event) -> None:
        self.channel.begin(event.step, self.ranks[event.cohort])

    def last(self, event: Event) -> Event:
        return event


@dataclass(frozen=True)
class Activations:
    """Clients that act one at a time, in blocks that end where the run is evaluated or saved.

    Attributes:
        channel: charges and releases.
        table: (start, stop) -> the events of that window.
        stop: number of activations.
        every: activations between evaluations; blocks end there.
        cuts: blocks do not reach over multiples of these; where they end does not depend on where a run was resumed.
    """

    channel: OwnerChannel
    table: Callable[[int, int], EventTable]
    stop: int
    every: int
    cuts: tuple[int, ...]

    def events(self, start: int) -> Iterator[EventTable]:
        width = _BLOCK * max(1, _AHEAD // (_BLOCK * self.channel.replicates))
        while start < self.stop:
            last = min(self.stop, start - start % width + width)
            first, table = start, self.table(start, last)
            self.channel.reserve(first, table.client)
            while start < last:
                end = min(last, *(start - start % cut + cut for cut in (_BLOCK, self.every, *self.cuts)))
                yield table.window(start - first, end - first)
                start = end

    def begin(self, event: EventTable) -> None:
        self.channel.begin(int(event.step[0]), event.client)

    def last(self, event: EventTable) -> Event:
        return Event(int(event.step[-1]), event.time[:, -1], torch.unique(event.client)[None])


def check_schedule(algorithm: Algorithm, schedule: Any, privacy: Privacy | None) -> None:
    """Refuse a schedule or a protected unit that the algorithm cannot have.

    Raises:
        ConfigError: named.
    """
    if isinstance(schedule, type) or not hasattr(schedule, "bind"):
        raise ConfigError(f"schedule is {schedule!r}; give a sampler such as PoissonSampling(cohort=100).")
    clocked = isinstance(schedule, AsynchronousSchedule)
    if isinstance(algorithm, AsyncAlgorithm):
        if not clocked:
            raise ConfigError(
                f"{algorithm.name} has clients that act one at a time; its schedule is PoissonClocks(...) or "
                f"Latencies(...), not {type(schedule).__name__} (schedule=clocks or latency by name)."
            )
        if isinstance(privacy, ClientPrivacy):
            raise ConfigError(f"{algorithm.name} protects single records: its privacy is RecordPrivacy(...) or None.")
    elif clocked:
        raise ConfigError(
            f"{algorithm.name} goes in rounds; its schedule is a sampler such as PoissonSampling(cohort=100), not "
            f"{type(schedule).__name__}."
        )


def check_idle(algorithm: Algorithm, problem: Problem) -> None:
    """Refuse clients without training examples where the algorithm has no use for them.

    Raises:
        ConfigError: named.
    """
    counts = problem.data.train.counts
    if bool((counts == 0).any()) and not algorithm.accepts_empty_clients:
        name = problem.data.ids[int((counts == 0).nonzero()[0])]
        raise ConfigError(
            f"{problem.data.name}: client {name!r} has no training examples; {algorithm.name} needs them of everyone."
        )


class _Rehearsal(Problem):
    """A problem that counts local trainings and makes none."""

    def train_locally(self, solver: Any, start: Tensor, clients: Tensor, **options: Any) -> Tensor:
        self.trainings.append(len(clients))
        return self.initial.new_empty(len(clients), self.dimension)

    @cached_property
    def trainings(self) -> list[int]:
        """Number of clients of every training so far."""
        return []


def check_trainings(algorithm: Algorithm, problem: Problem, plans: Sequence[ReleasePlan]) -> None:
    """Refuse an algorithm whose clients train more often in a participation than its plan says.

    The clients' part of a round is rehearsed with nobody in it: no data are read, and nothing is charged.

    Raises:
        PrivacyError: named.
    """
    declared = max((plan.trainings for plan in plans), default=1)
    nobody = torch.zeros(0, dtype=torch.int64)
    rehearsal = _Rehearsal(**{field.name: getattr(problem, field.name) for field in fields(problem)})
    state = algorithm.init(replace(problem, store_folder=None))
    algorithm.client(rehearsal, state.public, state.private.gather_all(nobody), nobody, Round(0, _as_they_are))
    if len(rehearsal.trainings) > declared:
        raise PrivacyError(
            f"{algorithm.name}: a client trains {len(rehearsal.trainings)} times in a participation, but the "
            f"algorithm's plan declares {declared}, so the others would not be charged. Set "
            f"ReleasePlan(trainings={len(rehearsal.trainings)})."
        )


def _as_they_are(name: str, rows: Tensor) -> Tensor:
    return rows


def in_rounds(algorithm: Algorithm, schedule: Schedule) -> tuple[Algorithm, Sampler]:
    """The two, where they go in rounds.

    Raises:
        ConfigError: clients act one at a time.
    """
    if isinstance(algorithm, AsyncAlgorithm) or isinstance(schedule, AsynchronousSchedule):
        raise ConfigError(f"{algorithm.name} has clients that act one at a time; this needs an algorithm in rounds.")
    return algorithm, schedule


def bind_schedule(schedule: AsynchronousSchedule, problem: Problem) -> BoundSchedule:
    """The schedule of the problem's clients, by their names and keys."""
    return schedule.bind(problem.clients, names=problem.data.ids, keys=problem.data.keys)


def open_cohorts(
    algorithm: Algorithm,
    problem: Problem,
    schedule: Sampler,
    privacy: Privacy | None,
    *,
    every: int | None = None,
    **options: Any,
) -> tuple[Channel, Cohorts]:
    """Channel and events of a run in rounds; ``options`` go to :func:`~fedmtl.privacy.open_channel`."""
    check_idle(algorithm, problem)
    sampler = schedule.bind(problem.clients)
    order, ranks = client_ranks(problem.data)
    plans = algorithm.plan(problem, sampler)
    if isinstance(privacy, RecordPrivacy) and type(algorithm).step is Algorithm.step:
        check_trainings(algorithm, problem, plans)
    channel = open_channel(
        privacy,
        plans,
        sampler,
        steps=problem.rounds,
        owners=record_owners(problem, algorithm, privacy, ranks, plans),
        notes=problem.data.notes,
        **options,
    )
    return channel, Cohorts(channel, order, ranks, problem.rounds, every or max(1, problem.rounds // 20))


def open_activations(
    algorithm: AsyncAlgorithm,
    problem: Problem,
    schedule: AsynchronousSchedule,
    privacy: RecordPrivacy | None,
    *,
    seed: int,
    every: int | None = None,
    cuts: tuple[int, ...] = (),
    replicates: int = 1,
    **options: Any,
) -> tuple[OwnerChannel, Activations]:
    """Channel and events of a run whose clients act one at a time.

    Args:
        algorithm, problem, schedule, privacy: of the run.
        seed: of the schedule, and of seeded noise.
        every: activations between evaluations; None for a twentieth of the run.
        cuts: blocks end at multiples of these.
        replicates: repetitions computed together.
        options: for :func:`~fedmtl.privacy.open_owner_channel`.
    """
    check_idle(algorithm, problem)
    bound = bind_schedule(schedule, problem)
    stop = min(problem.rounds, bound.steps)
    caps = algorithm.caps(problem, bound.caps.clip(max=stop))
    own = algorithm.channel_options(problem, privacy, caps)
    channel = open_owner_channel(
        privacy,
        algorithm.rows(problem),
        ids=tuple(problem.data.ids),
        caps=caps,
        seed=seed,
        replicates=replicates,
        schedule=bound.describe(),
        notes=(*problem.data.notes, *own.pop("notes", ())),
        published=own.pop("published", algorithm.published(problem)),
        **own,
        **options,
    )

    def table(start: int, end: int) -> EventTable:
        return bound.events(seed, start, end, replicates=replicates)

    return channel, Activations(channel, table, stop, every or max(1, stop // 20), cuts)
