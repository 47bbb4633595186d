"""The result of a run after its last step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from .._files import write_bytes
from ..algorithms.base import State
from ..algorithms.finetune import Personalization
from ..models.networks import NamedFactory
from ..privacy import ActivationChannel, RoundChannel
from ..privacy.channel_report import privacy_report
from ..schedules import BoundSchedule
from .aggregates import numbers_of
from .coding import Coding
from .constants import constant_loss, own_constants
from .engine import Engine
from .evaluator import Evaluator
from .metrics import main_metric
from .personalize import adaptation_of, finetuned, not_covered
from .result import Result
from .result_tables import csv_bytes
from .run_plan import RunPlan

if TYPE_CHECKING:
    from .trainer import Trainer


OUTSIDE = (
    "the {count} runs behind a band: an epsilon covers one run, and figures of several show more "
    "(what is said here of epsilon, budget and noise is the largest of any run)"
)


def informed(settings: Trainer, state: State) -> Trainer:
    """Returns the settings whose finetuning has the other releases of the run beside the model."""
    if settings.finetune is None:
        return settings
    return replace(settings, finetune=settings.finetune.informed(state.public))


def conclude(
    plan: RunPlan,
    engine: Engine,
    channel: RoundChannel | ActivationChannel,
    evaluator: Evaluator,
    state: State,
    step: int,
    stopped: str,
) -> Result:
    """Returns the result after the last step, without baselines and finetuning.

    Args:
        plan: of the run.
        engine: has the models.
        channel: open.
        evaluator: of the run so far; the last state is added.
        state: after the last step.
        step: number of steps done.
        stopped: the reason of the end, see :func:`~.run.stop_reason`.
    """
    settings = plan.settings
    algorithm = plan.algorithm
    problem = plan.problem
    evaluated = plan.evaluated
    runs, scored = evaluator.evaluate(state, step)
    tally = problem.trainings()
    # Rank 0 alone keeps the account and the grids of releases.
    report, released = plan.ranks.share(lambda: (privacy_report(channel), dict(channel.on_grid)))
    personal, parts = engine.models(plan, channel, state, step)
    if settings.runs > 1:
        report = replace(report, outside=(OUTSIDE.format(count=settings.runs), *report.outside))
    audit = settings.audit
    if audit is not None:
        model = algorithm.shared(state)
        change = None
        # Canaries of rounds are looked for in the sum of all updates of the shared model.
        if model is not None and not algorithm.one_at_a_time:
            change = model - problem.initial
        interval = audit.certificate(channel, report.epsilon, change)
        report = replace(report, interval=interval, outside=(*report.outside, audit.outside))
    # A claim against a weaker adversary stands beside epsilon, and never in its place.
    claim = algorithm.claim_beside(problem, state, channel, partial(_acted, settings, step))
    if claim is not None:
        report = replace(report, beside=claim.text())
        if plan.folder is not None:
            table = plan.folder.public / f"{claim.name}.csv"
            write_bytes(table, csv_bytes(claim.rows()))
            claim.draw(table.with_suffix(".png"))
    metric = main_metric(problem.data.spec, problem.loss).name
    scores = {name: metrics.by_client(evaluated) for name, metrics in scored.items()}
    records = replace(
        plan.facts["records"],
        tested=int((problem.data.test.counts > 0).sum()),
        constants=own_constants(evaluated),
        constant=constant_loss(evaluated),
    )
    factory = None
    if isinstance(settings.model, NamedFactory):
        factory = settings.model
    return Result(
        algorithm=algorithm.name,
        privacy=replace(report, **engine.facts),
        history=evaluator.history,
        personal=personal,
        parts=parts,
        shared=algorithm.shared(state),
        ids=problem.data.ids,
        scores=scores or {"personal": {"loss": {}, metric: {}}},
        final=evaluator.history[-1],
        stopped=stopped,
        metric=metric,
        data_name=problem.data.name,
        module=problem.module,
        factory=factory,
        folder=None if plan.folder is None else plan.folder.root,
        replicates=runs if settings.runs > 1 else None,
        released=released,
        further_metrics=settings.resolved_metrics,
        trained=not 0 < tally.trained == tally.diverged,
        untrained=_untrained(plan, state),
        step=plan.step_name,
        evaluated=evaluated.data.ids if len(plan.clients) < problem.clients else None,
        coding=Coding.of(problem.data, problem.loss, algorithm.loss),
        adaptation=adaptation_of(settings),
        **{**plan.facts, "records": records},
    )


def _acted(settings: Trainer, step: int) -> Tensor:
    """Returns the client of each activation up to ``step``, int64 (S,), of the first replicate."""
    schedule = settings.bound_schedule
    assert isinstance(schedule, BoundSchedule)  # methods in rounds have no activations
    clients = schedule.activations(settings.seed, 0, step, replicates=settings.runs).client[0]
    return clients[clients >= 0]


def with_finetuned(plan: RunPlan, result: Result, finetune: Personalization) -> Result:
    """Returns the result with the finetuned models of the clients and their scores.

    The channel is closed: finetuning sends nothing, and its models are in no release.

    Args:
        plan: of the run, which has ended.
        result: of the run.
        finetune: the settings.
    """
    result, measured = finetuned(
        result,
        plan.evaluated,
        finetune,
        name=plan.algorithm.name,
        validation=plan.validation,
        metrics=plan.settings.resolved_metrics,
    )
    outside = (*result.privacy.outside, *not_covered(plan.algorithm, plan.settings.privacy))
    final = result.final | numbers_of(plan.evaluated, measured)
    return replace(result, final=final, privacy=replace(result.privacy, outside=outside))


def _untrained(plan: RunPlan, state: State) -> tuple[str, ...]:
    """Returns the ids of the evaluated clients whose local trainings all diverged: they keep the
    model that they started from."""
    store = state.private
    clients = plan.clients
    # Only clients with models of their own keep these flags.
    if not {"seen", "trained"} <= set(store.fields):
        return ()
    lost = plan.problem.spread(
        lambda some: store.gather("seen", some) & ~store.gather("trained", some), clients
    )
    return tuple(plan.problem.data.ids[client] for client in clients[lost.cpu()].tolist())
