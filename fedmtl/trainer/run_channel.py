"""The opening of a run: its schedule is bound to the clients, its releases are planned, and their
channel is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms.base import Algorithm, Problem
from ..algorithms.returned import checked_plans
from ..data import FederatedDataset
from ..errors import ConfigError
from ..privacy import (
    ActivationChannel,
    BoundSampler,
    FullParticipation,
    GradientPlan,
    NoiseSource,
    PoissonSampling,
    ReleasePlan,
    RoundChannel,
    Sampler,
    open_channel,
)
from ..privacy.samplers import USUAL_COHORT
from ..schedules import AsynchronousSchedule, BoundSchedule, Buffered, Deadline

if TYPE_CHECKING:
    from .trainer import Trainer

Schedule = Sampler | AsynchronousSchedule | Buffered | Deadline


def bind_schedule(
    schedule: Schedule, data: FederatedDataset, canaries: int = 0, seed: int = 0
) -> BoundSampler | BoundSchedule:
    """Returns the schedule of the clients of ``data``, and of ``canaries`` behind them.

    Samplers are bound to the number of clients, clocks and latencies to their names and keys.

    Args:
        schedule: of rounds or of activations.
        data: of the clients.
        canaries: number of canaries that are clients.
        seed: of the run, for latencies.
    """
    if isinstance(schedule, Deadline):
        schedule.in_time(data.ids, data.keys, seed)  # refuses clients without a latency
        return bind_schedule(schedule.sampler, data, canaries, seed)
    if isinstance(schedule, Buffered):
        names = [*data.ids, *(f"canary-{number}" for number in range(canaries))]
        # canaries come behind the clients
        last = torch.iinfo(torch.int64).max - torch.arange(canaries).flip(0)
        keys = torch.cat([data.keys.cpu(), last])
        return schedule.bind(len(names), names=names, keys=keys, seed=seed)
    if isinstance(schedule, AsynchronousSchedule):
        return schedule.bind(len(data), names=data.ids, keys=data.keys)
    # Fewer clients than a cohort all take part. Canaries do not count: an audited run has the
    # schedule of the run that it is about.
    if schedule == PoissonSampling() and len(data) < USUAL_COHORT:
        return FullParticipation().bind(len(data) + canaries)
    return schedule.bind(len(data) + canaries)


def releases_of(
    algorithm: Algorithm, problem: Problem, schedule: BoundSampler | BoundSchedule
) -> tuple[ReleasePlan | GradientPlan, ...]:
    """Returns the plans of all releases of a run: the algorithm's own, and under record privacy the
    gradients of local training.

    The steps of local training and the records of a step follow from the local solver. Rows of
    clients without data are among the rows if the algorithm accepts such clients.

    Args:
        algorithm: with its settings.
        problem: of the run.
        schedule: bound to the clients.

    Raises:
        ConfigError: records are protected, and the algorithm does not train locally.
    """
    plans = checked_plans(type(algorithm).__name__, algorithm.plan(problem, schedule))
    if algorithm.accepts_empty_clients:
        plans = tuple(
            replace(plan, without_data=True) if isinstance(plan, ReleasePlan) else plan
            for plan in plans
        )
    if not problem.protects_records:
        return plans
    # Each training of a client in a round takes local steps of its own, which are charged for.
    trainings = max((plan.trainings for plan in plans if isinstance(plan, ReleasePlan)), default=1)
    return (*plans, algorithm.gradient_plan(problem, trainings))


def open_run(
    settings: Trainer,
    problem: Problem,
    fingerprint: str = "",
    *,
    sampler: BoundSampler | None = None,
    ledger: Path | None = None,
    resume: bool = False,
    coins: NoiseSource | None = None,
    channel_class: type[RoundChannel | ActivationChannel] | None = None,
) -> RoundChannel | ActivationChannel:
    """Returns the open channel of a run, with the canaries of its audit.

    Args:
        settings: of the run.
        problem: of the run.
        fingerprint: see :func:`~fedmtl.privacy.open_channel`.
        sampler: in place of the settings' schedule.
        ledger: its file; None keeps charges in memory, as those of replicates, which are
            simulations, are in any case.
        resume: see :func:`~fedmtl.privacy.open_channel`.
        channel_class: see :func:`~fedmtl.privacy.open_channel`.
        coins: source of the noise and of cohorts, in place of the seed's.

    Raises:
        ConfigError: clients without training examples, if the algorithm does not accept them.
    """
    algorithm = settings.algorithm
    bound = sampler or settings.bound_schedule
    privacies = settings.privacies
    empty = (problem.data.train.counts == 0).nonzero()[:, 0]
    if len(empty) and not algorithm.accepts_empty_clients:
        name = problem.data.ids[int(empty[0])]
        raise ConfigError(
            f"{problem.data.name}: client {name!r} has no training examples; {algorithm.name} "
            "needs them of everyone."
        )
    options: dict[str, Any] = {}
    plans = releases_of(algorithm, problem, bound)
    audit = settings.audit
    if audit is not None:  # of records; clients that are canaries are in the schedule
        number = audit.canaries
        plans = tuple(
            plan.with_canaries(number) if isinstance(plan, GradientPlan) else plan for plan in plans
        )
        channel_class = audit.channel_class(settings, plans)
    if isinstance(bound, BoundSampler):
        # The draw follows the order of the clients' keys, so the order of the data does not matter.
        order = torch.argsort(problem.data.keys, stable=True)
        # canaries come behind the clients
        order = torch.cat([order, torch.arange(len(order), bound.n)])
        options = {"steps": problem.rounds, "order": order}
    channel: RoundChannel | ActivationChannel = open_channel(
        privacies if len(privacies) > 1 else privacies[0],  # type: ignore[arg-type]
        plans,
        bound if isinstance(bound, BoundSampler) else bound.describe(),
        seed=settings.seed,
        source=coins,
        fingerprint=fingerprint,
        ledger_path=ledger if settings.runs == 1 else None,
        resume=resume,
        notes=problem.notes,
        replicates=settings.runs,
        ranks=problem.ranks,
        channel_class=channel_class,
        **options,
    )
    if audit is not None:
        audit.plant(settings, channel, problem.data.train.counts)
    return channel
