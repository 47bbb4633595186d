"""How blocks reach the loop: cohorts drawn round by round, or activations of a public schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..algorithms.base import Algorithm, Problem
from ..algorithms.cohort import Cohort, Finish
from ..data import FederatedDataset
from ..errors import ConfigError, PrivacyError
from ..local import LocalTraining
from ..privacy import (
    Activations,
    BoundSampler,
    ClientPrivacy,
    GradientPlan,
    Privacy,
    ReleasePlan,
    Rounds,
    Sampler,
    open_channel,
)
from ..schedules import AsynchronousSchedule, Block, BoundSchedule, rounds
from .problem import training_plan

Schedule = Sampler | AsynchronousSchedule
_BLOCK = 256


@dataclass(frozen=True)
class Source:
    """The blocks of a run: one cohort a round, drawn with the privacy coins, or activations of a public schedule.

    Args:
        channel: draws cohorts, and charges blocks.
        schedule: of the clients.
        stop: number of steps of the whole run.
        every: steps between evaluations.
        cuts: blocks of activations end at multiples of these, and of ``every``: where they end does not depend on where
            a run was resumed.
        seed: of the activations.
    """

    channel: Rounds | Activations
    schedule: BoundSampler | BoundSchedule
    stop: int
    every: int
    cuts: tuple[int, ...]
    seed: int

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield all blocks from step ``start`` on."""
        if isinstance(self.channel, Rounds):
            yield from rounds(self.channel.draw, start=start, stop=self.stop)
            return
        assert isinstance(self.schedule, BoundSchedule)
        for first, end in windows(start, self.stop, (self.every, *self.cuts)):
            yield self.schedule.events(self.seed, first, end, replicates=self.channel.replicates)

    def begin(self, block: Block) -> None:
        """Charge a block; raises BudgetExhausted before any data are read."""
        self.channel.begin(block.first, block.cohort if isinstance(self.channel, Rounds) else block.client)


def windows(start: int, stop: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and end step of every block of activations: none reaches over a multiple of one of ``cuts``."""
    while start < stop:
        end = min(stop, *(start - start % cut + cut for cut in (_BLOCK, *cuts)))
        yield start, end
        start = end


def check_schedule(algorithm: Algorithm, schedule: Any, privacy: Privacy | None) -> None:
    """Refuse a schedule or a protected unit that the algorithm cannot have.

    Raises:
        ConfigError: named.
    """
    if isinstance(schedule, type) or not hasattr(schedule, "bind"):
        raise ConfigError(f"schedule is {schedule!r}; give a sampler such as PoissonSampling(cohort=100).")
    clocked = isinstance(schedule, AsynchronousSchedule)
    if algorithm.one_at_a_time:
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


@dataclass(frozen=True)
class _Rehearsal(Cohort):
    """A cohort that counts local trainings and makes none.

    Attributes:
        trainings: number of clients of every training so far.
    """

    trainings: list[int] = field(default_factory=list)

    def _train(self, run: LocalTraining, receive: Finish) -> None:
        self.trainings.append(len(self.ids))


def check_trainings(algorithm: Algorithm, problem: Problem, plans: Sequence[ReleasePlan]) -> None:
    """Refuse an algorithm whose clients train more often in a participation than its plan says.

    The clients' part of a round is rehearsed with no client in it: no data are read, and nothing is charged.

    Raises:
        PrivacyError: named.
    """
    declared = max((plan.trainings for plan in plans), default=1)
    empty = torch.zeros(0, dtype=torch.int64)
    state = algorithm.init(problem)
    rehearsal = _Rehearsal(problem, empty, state.public, state.private.gather_all(empty), round=0)
    algorithm.client(rehearsal)
    if len(rehearsal.trainings) > declared:
        raise PrivacyError(
            f"{algorithm.name}: a client trains {len(rehearsal.trainings)} times in a participation, but the "
            f"algorithm's plan declares {declared}, so the others would not be charged. Set "
            f"ReleasePlan(trainings={len(rehearsal.trainings)})."
        )


def sampler_of(algorithm: Algorithm, schedule: Schedule, clients: int) -> BoundSampler:
    """The sampler of a run in rounds.

    Raises:
        ConfigError: clients act one at a time.
    """
    if algorithm.one_at_a_time or isinstance(schedule, AsynchronousSchedule):
        raise ConfigError(f"{algorithm.name} has clients that act one at a time; this needs an algorithm in rounds.")
    return schedule.bind(clients)


def bind_schedule(schedule: Schedule, data: FederatedDataset, canaries: int = 0) -> BoundSampler | BoundSchedule:
    """Return the schedule of the clients of ``data`` and of ``canaries`` behind them, by their number, or by the names
    and keys of the clients where they act one at a time."""
    if isinstance(schedule, AsynchronousSchedule):
        return schedule.bind(len(data), names=data.ids, keys=data.keys)
    return schedule.bind(len(data) + canaries)


def releases_of(
    algorithm: Algorithm, problem: Problem, schedule: BoundSampler | BoundSchedule
) -> tuple[ReleasePlan | GradientPlan, ...]:
    """Every release of a run: the algorithm's own, and the gradients of local training where records are protected.

    Raises:
        ConfigError: records are protected, and the algorithm does not train locally.
        PrivacyError: clients train more often in a participation than the algorithm declares.
    """
    plans = tuple(algorithm.plan(problem, schedule))
    if not problem.protects_records:
        return plans
    rows = [plan for plan in plans if isinstance(plan, ReleasePlan)]
    if type(algorithm).step is Algorithm.step:
        check_trainings(algorithm, problem, rows)
    return (*plans, training_plan(problem, algorithm, rows))


def open_run(
    algorithm: Algorithm,
    problem: Problem,
    schedule: Schedule | BoundSampler | BoundSchedule,
    privacy: Privacy | Sequence[Privacy] | None,
    *,
    seed: int,
    every: int | None = None,
    cuts: tuple[int, ...] = (),
    replicates: int = 1,
    **options: Any,
) -> tuple[Any, Source]:
    """The channel and the blocks of a run.

    Args:
        algorithm, problem, schedule, privacy: of the run; the schedule may be bound already.
        seed: of the schedule, and of seeded noise.
        every: steps between evaluations; None for a twentieth of the run.
        cuts: blocks of activations end at multiples of these.
        replicates: number of repetitions computed as one program.
        options: for :func:`~fedmtl.privacy.open_channel`.
    """
    check_idle(algorithm, problem)
    options |= {"seed": seed, "replicates": replicates, "notes": problem.notes, "ranks": problem.ranks}
    bound = schedule if isinstance(schedule, BoundSampler | BoundSchedule) else bind_schedule(schedule, problem.data)
    stop = problem.rounds
    if isinstance(bound, BoundSchedule):
        stop = min(stop, bound.steps)
        plans = releases_of(algorithm, replace(problem, rounds=stop), bound)
        channel: Rounds | Activations = open_channel(privacy, plans, bound.describe(), **options)
    else:
        order = torch.argsort(problem.data.keys, stable=True)  # cohorts do not depend on the order of the data
        order = torch.cat([order, torch.arange(len(order), bound.n)])  # canaries come behind the clients
        channel = open_channel(
            privacy, releases_of(algorithm, problem, bound), bound, steps=stop, order=order, **options
        )
    return channel, Source(channel, bound, stop, every or max(1, stop // 20), cuts, seed)
