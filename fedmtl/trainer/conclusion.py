"""The result of a run after its last step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..algorithms.base import State
from ..algorithms.finetune import Personalization
from ..models.networks import NamedFactory
from ..privacy.reporting import privacy_report
from .aggregates import numbers_of
from .coding import Coding
from .constants import constant_loss, own_constants
from .metrics import main_metric
from .personalize import finetuned, not_covered, terms_of
from .result import Result

if TYPE_CHECKING:
    from .run import Run
    from .trainer import Trainer


OUTSIDE = (
    "the {count} runs behind a band: an epsilon covers one run, and figures of several show more "
    "(what is said here of epsilon, budget and noise is the largest of any run)"
)


def informed(settings: Trainer, state: State) -> Trainer:
    """Returns the settings whose finetuning has what else the run has released beside the model."""
    if settings.finetune is None:
        return settings
    return replace(settings, finetune=settings.finetune.informed(state.public))


def conclude(run: Run, state: State, step: int, stopped: str) -> Result:
    """Returns the result after the last step, without baselines and finetuning.

    Args:
        run: with an open channel.
        state: after the last step.
        step: number of steps done.
        stopped: why they ended, see :meth:`Run.ends`.
    """
    problem = run.problem
    evaluated = run.plan.evaluated
    runs, scored = run.evaluations.evaluate(run, state, step)
    tally = run.tally()
    # Rank 0 alone keeps the account and the grids of releases.
    report, released = run.ranks.share(
        lambda: (privacy_report(run.channel), dict(run.channel.on_grid))
    )
    personal, parts = run.engine.models(run, state)
    if run.settings.runs > 1:
        report = replace(report, outside=(OUTSIDE.format(count=run.settings.runs), *report.outside))
    audit = run.settings.audit
    if audit is not None:
        model = run.algorithm.shared(state)
        change = None
        # Canaries of rounds are looked for in the sum of all updates of the shared model.
        if model is not None and not run.algorithm.one_at_a_time:
            change = model - problem.initial
        interval = audit.certificate(run.channel, report.epsilon, change)
        report = replace(report, interval=interval, outside=(*report.outside, audit.outside))
    metric = main_metric(problem.data.spec, problem.loss).name
    scores = {name: metrics.by_client(evaluated) for name, metrics in scored.items()}
    factory = None
    if isinstance(run.settings.model, NamedFactory):
        factory = run.settings.model
    return Result(
        algorithm=run.algorithm.name,
        privacy=replace(report, **run.engine.facts),
        history=run.evaluations.rows,
        personal=personal,
        parts=parts,
        shared=run.algorithm.shared(state),
        ids=problem.data.ids,
        scores=scores or {"personal": {"loss": {}, metric: {}}},
        final=run.evaluations.rows[-1],
        stopped=stopped,
        metric=metric,
        data_name=problem.data.name,
        module=problem.module,
        factory=factory,
        folder=None if run.folder is None else run.folder.root,
        replicates=runs if run.settings.runs > 1 else None,
        released=released,
        asked=run.settings.asked_metrics,
        trained=not 0 < tally.trained == tally.diverged,
        untrained=_untrained(run, state),
        step=run.step_name,
        evaluated=evaluated.data.ids if len(run.plan.clients) < problem.clients else None,
        tested=int((problem.data.test.counts > 0).sum()),
        constants=own_constants(evaluated),
        constant=constant_loss(evaluated),
        coding=Coding.of(problem.data, problem.loss, run.algorithm.loss),
        **{**run.plan.facts, "terms": terms_of(run.settings)},
    )


def with_finetuned(run: Run, result: Result, finetune: Personalization) -> Result:
    """Returns the result with the finetuned models of the clients and their scores.

    The channel is closed: finetuning sends nothing, and its models are in no release.

    Args:
        run: that has ended.
        result: of the run.
        finetune: the settings.
    """
    result, measured = finetuned(
        result,
        run.plan.evaluated,
        finetune,
        name=run.algorithm.name,
        validation=run.plan.validation,
        metrics=run.settings.asked_metrics,
    )
    outside = (*result.privacy.outside, *not_covered(run.algorithm, run.settings.privacy))
    final = result.final | numbers_of(run.plan.evaluated, measured)
    return replace(result, final=final, privacy=replace(result.privacy, outside=outside))


def _untrained(run: Run, state: State) -> tuple[str, ...]:
    """Returns the ids of the evaluated clients whose local trainings all diverged: they keep the
    model that they started from."""
    store = state.private
    clients = run.plan.clients
    # Only clients with models of their own keep these flags.
    if not {"seen", "trained"} <= set(store.fields):
        return ()
    lost = run.problem.spread(
        lambda ids: store.gather("seen", ids) & ~store.gather("trained", ids), clients
    )
    return tuple(run.problem.data.ids[client] for client in clients[lost.cpu()].tolist())
