"""A run: from the last checkpoint to the result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from ..algorithms.base import State
from ..algorithms.problem import Tally
from ..errors import BudgetExhausted, ConfigError
from ..privacy import ActivationChannel, RoundChannel
from ..privacy.channel_report import signal_to_noise
from ..schedules import BoundBuffered
from .callbacks import Callback, ProgressBar
from .checkpoint import Checkpoint
from .conclusion import conclude, informed, with_finetuned
from .engine import Engine, training_steps
from .evaluator import Evaluator
from .interruption import held_interruption
from .outcome import write_run
from .result import Result
from .run_plan import RunPlan
from .saving import Checkpoints, restore

logger = logging.getLogger("fedmtl")
# A run without noise has failed if this share of the local trainings of its first rounds diverged;
# fewer trainings than _FEW say nothing.
_FIRST_ROUNDS = 3
_HOPELESS = 0.9
_FEW = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has begun, or M replicates that are computed as one.

    Attributes:
        plan: the settings that are fixed before the first step.
        engine: computes the clients' part.
        channel: of its releases, open.
        callbacks: of the first rank.
        evaluator: its history.
        checkpoints: of its state.
    """

    plan: RunPlan
    engine: Engine
    channel: RoundChannel | ActivationChannel
    callbacks: tuple[Callback, ...]
    evaluator: Evaluator
    checkpoints: Checkpoints


def run(plan: RunPlan, engine: Engine, resume: bool) -> Result:
    """Computes all steps of a run and returns the result, without baselines.

    Args:
        plan: the settings and the problem of the run, checked and complete.
        engine: computes the clients' part.
        resume: True to start from the last checkpoint in the folder, if there is one.

    Raises:
        ConfigError: early stopping of an algorithm without a shared model.
        ResumeError: a checkpoint of another run, or one that the ledger does not hold.
    """
    ranks = plan.ranks
    folder = plan.folder
    checkpoint = None
    if folder is not None:
        ranks.share(folder.make)
        if resume:
            checkpoint = ranks.share(folder.read_checkpoint)
    channel = engine.open(plan, resume)
    # The ledger is closed in any case, so that an interrupted run can go on.
    with closing(channel):
        begun, state, step = _start_or_restore(plan, engine, channel, checkpoint)
        plan, result = _compute_with_callbacks(begun, state, step)
    ledger = channel.accountant.ledger
    # The report names the end of the ledger, which is final only now.
    result = replace(result, privacy=ranks.share(lambda: result.privacy.with_ledger(ledger)))
    if plan.settings.finetune is not None:
        result = with_finetuned(plan, result, plan.settings.finetune)
    if folder is not None:
        ranks.share(lambda: write_run(folder, result, plan.problem))
    return result


def _start_or_restore(
    plan: RunPlan,
    engine: Engine,
    channel: RoundChannel | ActivationChannel,
    checkpoint: Checkpoint | None,
) -> tuple[Run, State, int]:
    """Returns a run at its start, or at its checkpoint if there is one; with its state and the
    number of steps done."""
    algorithm = plan.algorithm
    state = engine.init(plan, channel)
    if plan.settings.early_stopping is not None and algorithm.shared(state) is None:
        raise ConfigError(
            f"early_stopping looks at the shared model, but {algorithm.name} has none."
        )
    step = 0
    rows = []
    tally = Tally()
    if checkpoint is not None:
        restore(plan, channel, state, checkpoint)
        step = checkpoint.step
        rows = checkpoint.history
        tally = checkpoint.tally
    # Also if no round is left to draw: it reports the privacy cost, and misses no charge.
    channel.start(step)
    callbacks: list[Callback] = []
    # An engine with coins of its own repeats a run, whose trainings were counted before.
    if engine.coins is None:
        plan = _counting(plan, tally)
        if plan.ranks.first:
            _log_signal(algorithm.name, channel)
            _log_versions(plan, channel, state)
            _log_repeats(channel, step)
    if plan.ranks.first:  # callbacks print and write
        if plan.settings.progress:
            callbacks.append(ProgressBar())
        callbacks.extend(plan.settings.callbacks)
    evaluator = Evaluator(plan, engine, channel, callbacks, rows)
    begun = Run(
        plan=plan,
        engine=engine,
        channel=channel,
        callbacks=tuple(callbacks),
        evaluator=evaluator,
        checkpoints=Checkpoints(plan, channel, evaluator),
    )
    return begun, state, step


def _counting(plan: RunPlan, tally: Tally) -> RunPlan:
    """Returns the plan with a problem that counts local trainings on from those of the whole run so
    far, which rank 0 keeps."""
    if not plan.ranks.first:
        tally = Tally()  # the sum over ranks would count them once a rank
    return replace(plan, problem=replace(plan.problem, tally=tally))


def _log_signal(name: str, channel: RoundChannel | ActivationChannel) -> None:
    """Logs the signal-to-noise ratio of the releases; a warning if noise will hide them."""
    signal = signal_to_noise(channel)
    if signal is None:
        return
    if signal.warning:
        logger.warning("%s: %s", name, signal.warning)
    else:
        logger.info("%s: %s", name, signal.text())


def _log_versions(plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State) -> None:
    """Logs the memory for earlier public states, and warns of clients that never count."""
    # a method without a public state asks nobody
    if not isinstance(plan.settings.bound_schedule, BoundBuffered) or not state.public:
        return
    assert isinstance(channel, RoundChannel)
    sampler = channel.sampler
    assert isinstance(sampler, BoundBuffered)
    if not sampler.clients.foreseen:
        return
    size = sum(tensor.nbytes for tensor in state.public.values())
    most = sampler.versions_kept
    logger.info("Buffered keeps up to %d shared models, %d bytes", most, most * size)
    never = int((sampler.uses(plan.stop) == 0).sum())
    if never:
        logger.warning(
            "Buffered: no answer of %s of the %s clients counts in %d rounds: they are too "
            "slow, away, or not asked",
            f"{never:,}",
            f"{sampler.n:,}",
            plan.stop,
        )


def _log_repeats(channel: RoundChannel | ActivationChannel, step: int) -> None:
    """Warns that steps are charged twice: their noise cannot be drawn again, so a resumed run makes
    other releases in these steps."""
    ledger = channel.accountant.ledger
    if ledger is None or ledger.replays_free or ledger.reached <= step:
        return
    then = "the run ends early if the budget has no room for both"
    if channel.accountant.by_client:
        then = "clients whose answers are spent take no further part"
    logger.warning(
        "steps %d to %d were charged, and an interruption has lost them: they are computed anew, "
        "with other noise, and charged again. The noise is made for what was planned, so %s",
        step + 1,
        ledger.reached,
        then,
    )


def _log_left_out(channel: RoundChannel | ActivationChannel) -> None:
    """Logs how often clients were left out because their accounts are spent."""
    accountant = channel.accountant
    if accountant.left_out and accountant.caps is not None:
        logger.info(
            "%s answers were left out: their clients had given all that the noise pays for, up "
            "to %s each",
            f"{accountant.left_out:,}",
            f"{int(accountant.caps.max()):,}",
        )


def _compute_with_callbacks(begun: Run, state: State, step: int) -> tuple[RunPlan, Result]:
    """Computes the steps from ``step`` on.

    Returns:
        The plan, whose finetuning has its part of the releases; and the result without finetuning.
    """
    plan = begun.plan
    outcome: Result | None = None
    try:
        for callback in begun.callbacks:
            callback.on_start(plan.algorithm.name, plan.stop, step)
        if plan.folder is not None:
            plan.ranks.share(plan.folder.reopen)
        with held_interruption() as interrupted:
            state, step, stopped = _compute_steps(begun, state, step, interrupted)
        # All ranks end together, so that none waits for one that has left.
        if plan.ranks.share(interrupted):
            raise KeyboardInterrupt
        plan = replace(plan, settings=informed(plan.settings, state))
        outcome = conclude(plan, begun.engine, begun.channel, begun.evaluator, state, step, stopped)
        return plan, outcome
    finally:  # also after an interruption, with None
        for callback in begun.callbacks:
            callback.on_end(outcome)


def _compute_steps(
    begun: Run, state: State, step: int, interrupted: Callable[[], bool]
) -> tuple[State, int, str]:
    """Computes the blocks from ``step`` on, and saves the last state.

    An interruption from the keyboard ends the run after a block, with a checkpoint: a secure run
    continues without paying twice for the same releases.

    Returns:
        The state, the number of steps done, and why they ended, see :attr:`Result.stopped
        <fedmtl.Result>`.
    """
    plan = begun.plan
    ranks = plan.ranks
    evaluator = begun.evaluator
    checkpoints = begun.checkpoints
    stopped = stop_reason(begun, step)
    # A run that was resumed after its end: it has nothing more to do.
    if stopped:
        _charge_left_out(begun, step, stopped)
        return state, step, stopped
    blocks = training_steps(plan, begun.engine, begun.channel, state, step)
    try:
        for block, state in blocks:
            step = block.step + 1
            evaluator.warn_first(step)
            for callback in begun.callbacks:
                callback.on_block(block, state)
            if step % plan.every == 0 and step < plan.stop:
                evaluator.evaluate(state, step)
            stopped = stop_reason(begun, step)
            _charge_left_out(begun, step, stopped)
            # Clocks and signals differ between ranks, so rank 0 decides for all of them.
            halt, due = ranks.share(
                lambda: (interrupted(), checkpoints.is_due(step))  # noqa: B023 - called at once
            )
            if stopped or halt:
                break
            if due:
                checkpoints.save(state, step)
    except BudgetExhausted as spent:
        logger.info("%s", spent)
        stopped = "budget"
    if plan.ranks.first:
        _log_left_out(begun.channel)
    checkpoints.save(state, step)
    return state, step, stopped or "rounds"


def _charge_left_out(begun: Run, step: int, stopped: str) -> None:
    """Charges the steps that early stopping leaves out: the length of the run follows from
    releases."""
    if stopped == "early":
        begun.channel.charge_remaining(step)


def stop_reason(begun: Run, step: int) -> str:
    """Returns the reason why a run ends after ``step``; empty if it goes on.

    ``"early"`` follows from the rule of early stopping and the history up to this step.
    ``"diverged"`` ends a run without noise if nearly all local
    trainings of its first rounds diverged. The length of a private run must say nothing about the
    data, so it goes on.
    """
    plan = begun.plan
    if not 0 < step < plan.stop:
        return ""
    rule = plan.settings.early_stopping
    history = begun.evaluator.history
    if rule is not None and history and history[-1]["round"] == step and rule.stops(history):
        return "early"
    if step > _FIRST_ROUNDS or not plan.settings.noiseless:
        return ""
    tally = plan.problem.trainings()
    if tally.trained >= _FEW and tally.diverged >= _HOPELESS * tally.trained:
        return "diverged"
    return ""
