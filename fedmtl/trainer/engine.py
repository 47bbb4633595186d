"""The engine of a run: its channel of releases is opened, and its clients compute in this process
and its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, State
from ..algorithms.returned import check_state, checked_plans
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local import gradient_plan
from ..privacy import (
    Activations,
    BoundSampler,
    FullParticipation,
    GradientPlan,
    NoiseSource,
    PoissonSampling,
    ReleasePlan,
    Rounds,
    Sampler,
    open_channel,
)
from ..privacy.samplers import USUAL_COHORT
from ..ranks import SINGLE, Ranks
from ..schedules import AsynchronousSchedule, Block, BoundSchedule, Buffered
from .aggregates import numbers_of, summarize
from .evaluation import Metrics, evaluate_each, evaluate_models
from .run_plan import RunPlan

if TYPE_CHECKING:
    from .trainer import Trainer

Schedule = Sampler | AsynchronousSchedule | Buffered


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
    solver = algorithm.local
    if solver is None:
        raise ConfigError(
            f"RecordPrivacy protects the gradients of local training, but {algorithm.name} has no "
            "local solver; use pmtl, ditto, fedavg or fedprox."
        )
    # Each training of a client in a round takes local steps of its own, which are charged for.
    trainings = max((plan.trainings for plan in plans if isinstance(plan, ReleasePlan)), default=1)
    gradients = gradient_plan(problem.data, solver, problem.dimension, trainings=trainings)
    return (*plans, gradients)


def open_run(
    settings: Trainer,
    problem: Problem,
    fingerprint: str = "",
    *,
    sampler: BoundSampler | None = None,
    ledger: Path | None = None,
    resume: bool = False,
    coins: NoiseSource | None = None,
    kind: type[Rounds | Activations] | None = None,
) -> Rounds | Activations:
    """Returns the open channel of a run, with the canaries of its audit.

    Args:
        settings: of the run.
        problem: of the run.
        fingerprint: see :func:`~fedmtl.privacy.open_channel`.
        sampler: in place of the settings' schedule.
        ledger: its file; None keeps charges in memory, as those of replicates, which are
            simulations, are in any case.
        resume: see :func:`~fedmtl.privacy.open_channel`.
        kind: see :func:`~fedmtl.privacy.open_channel`.
        coins: source of the noise and of cohorts, in place of the seed's.

    Raises:
        ConfigError: clients without training examples, if the algorithm does not accept them.
    """
    algorithm = settings.algorithm
    bound = sampler or settings.bound
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
        kind = audit.channel_class(settings, plans)
    if isinstance(bound, BoundSampler):
        # The draw follows the order of the clients' keys, so the order of the data does not matter.
        order = torch.argsort(problem.data.keys, stable=True)
        # canaries come behind the clients
        order = torch.cat([order, torch.arange(len(order), bound.n)])
        options = {"steps": problem.rounds, "order": order}
    channel: Rounds | Activations = open_channel(
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
        kind=kind,
        **options,
    )
    if audit is not None:
        audit.plant(settings, channel, problem.data.train.counts)
    return channel


@dataclass(kw_only=True)
class Engine:
    """The execution of the clients' part of a run: in this process, or in one of its ranks each.

    A subclass computes it elsewhere, such as on the nodes of a network.

    Args:
        ranks: the processes that were started; a run of one may start others.
        coins: source of the noise and the cohorts, in place of the seed; all that is public stays
            that of the seed, and nothing is logged, nor are local trainings counted.
        facts: replace those of the channel in the run's report.
        stop: number of steps after which the run ends; None for all that are planned.
    """

    ranks: Ranks = SINGLE
    coins: NoiseSource | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stop: int | None = None

    def open(self, plan: RunPlan, resume: bool) -> Rounds | Activations:
        """Returns the open channel of a run.

        Args:
            plan: of the run.
            resume: True to continue the ledger in the run's folder.
        """
        return open_run(
            plan.settings,
            plan.problem,
            plan.fingerprint,
            ledger=plan.ledger,
            resume=resume,
            coins=self.coins,
        )

    def init(self, plan: RunPlan, channel: Rounds | Activations) -> State:
        """Returns the state before the first step.

        Args:
            plan: of the run.
            channel: open, with the releases of every step.
        """
        state = plan.algorithm.init(plan.problem, plan.settings.runs)
        check_state(type(plan.algorithm).__name__, state, State)
        return state

    def step(
        self, plan: RunPlan, channel: Rounds | Activations, state: State, block: Block
    ) -> State:
        """Returns the state after a block.

        Args:
            plan: of the run.
            channel: which has charged the block.
            state: before the block; it may be changed in place.
            block: a round, or activations.
        """
        return plan.algorithm.step(plan.problem, state, block, channel)

    def measure(
        self, plan: RunPlan, state: State
    ) -> tuple[list[dict[str, float]], dict[str, Metrics]]:
        """Returns the numbers of every replicate, and the scores of the first one by model.

        The personal models come last. Nothing is scored by an engine without the data.

        Args:
            plan: with the clients that are evaluated.
            state: that is scored.
        """
        problem = plan.problem
        algorithm = plan.algorithm
        evaluated = plan.evaluated
        metrics = plan.settings.asked_metrics
        scores = dict[str, Metrics]()
        if plan.settings.runs > 1:
            models = algorithm.models(problem, state, torch.arange(problem.clients))
            each = evaluate_models(problem, models, metrics)
        else:
            if (model := algorithm.shared(state)) is not None:
                scores["shared"] = evaluate_models(
                    evaluated, model.expand(1, evaluated.clients, -1), metrics
                )[0]
            if _is_everyones(plan, model, state):
                each = [scores["shared"]]
            else:
                own = partial(algorithm.personalize, problem, state)
                each = [evaluate_each(problem, own, plan.clients, metrics)]
        # Most methods have no objective, and gathering the clients' states is expensive.
        if type(algorithm).objective is not Algorithm.objective:
            state = State(state.public, problem.gathered(state.private))
        objective = algorithm.objective(problem, state)
        numbers = [numbers_of(evaluated, own) for own in each]
        if objective is not None:
            numbers = [
                row | {"objective": value}
                for row, value in zip(numbers, objective.tolist(), strict=True)
            ]
        if scores:
            numbers[0] |= summarize(evaluated, scores["shared"], "global_")
        return numbers, scores | {"personal": each[0]}

    def models(
        self, plan: RunPlan, channel: Rounds | Activations, state: State, done: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the personal models (n, D) after the last step, and their decomposition in the
        method's paper by name.

        If clients were drawn for evaluation, they are the models (k, D) of these, without a
        decomposition.

        Args:
            plan: with the clients that are evaluated.
            channel: of the run.
            state: after the last step.
            done: number of steps.
        """
        problem = plan.problem
        algorithm = plan.algorithm
        clients = plan.clients
        if _is_everyones(plan, algorithm.shared(state), state):
            personal = algorithm.personalize(problem, state, clients)
        else:
            personal = problem.spread(
                lambda own: algorithm.personalize(problem, state, own), clients
            )
        if len(clients) < problem.clients or type(algorithm).parts is Algorithm.parts:
            return personal, {}
        whole = State(state.public, problem.gathered(state.private))
        return personal, algorithm.parts(problem, whole, personal)


def _is_everyones(plan: RunPlan, model: Tensor | None, state: State) -> bool:
    """Returns True if the personal models are a view of the shared one, which is then scored
    once."""
    if model is None or state.private.fields:
        return False
    # Two clients show it: a view of one row has a stride of 0, whatever the number of clients.
    rows = plan.algorithm.personalize(plan.problem, state, plan.clients[:2])
    return (len(rows) == 1 or rows.stride(0) == 0) and torch.equal(rows[0], model.to(rows))
