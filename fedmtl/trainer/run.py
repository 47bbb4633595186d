"""The one loop of a run: blocks are charged and computed, and the state is evaluated and saved."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..algorithms.base import Algorithm, Problem, State
from ..algorithms.finetune import Personalization
from ..algorithms.local import Local
from ..algorithms.local_fit import LocalFit
from ..algorithms.problem import Tally
from ..contrib.automatic import unscaled
from ..contrib.average import LocalAverage
from ..errors import BudgetExhausted, ConfigError, ResumeError, TrainingError
from ..local import operation_threads
from ..local.losses import link_of
from ..models.networks import NamedFactory
from ..privacy import BoundSampler, FullParticipation, PoissonSampling, RecordPrivacy
from ..privacy.reporting import privacy_report, signal_to_noise
from ..privacy.samplers import USUAL_COHORT
from ..ranks import Ranks
from ..schedules import Block, BoundSchedule, rounds
from .callbacks import Callback, ProgressBar
from .coding import Coding
from .engine import Engine
from .evaluation import (
    Metrics,
    bands,
    constant_loss,
    evaluated_clients,
    numbers_of,
    own_constants,
    try_metrics,
)
from .folder import Checkpoint, RunFolder
from .metrics import main_metric
from .personalize import finetuned, held_out, not_covered, terms_of
from .problem import describe, fingerprint, share_beyond
from .result import Result

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger("fedmtl")
OUTSIDE = (
    "the {count} runs behind a band: an epsilon covers one run, and figures of several show more "
    "(what is said here of epsilon, budget and noise is the largest of any run)"
)
_CHECKPOINT_SECONDS = 20.0
_HISTORY_SECONDS = 1.0
NO_FORK = (
    "a run has others on Linux only, and where there is no GPU (torchrun starts them anywhere)"
)
_FIRST_ROUNDS = 3
_FEW_CLIENTS = 8  # of a round, for a process
# the share of the local trainings of the first rounds, and fewer of them say nothing
_HOPELESS = 0.9
_FEW = 5


def fitted(settings: Trainer, resume: bool, engine: Engine) -> Result:
    """Claims the folder of a run, trains the run and its baselines, and returns the result; see
    :meth:`Trainer.fit <fedmtl.Trainer.fit>`.

    Args:
        settings: of the run.
        resume: whether to continue the run in the folder.
        engine: where its clients compute.
    """
    ranks = engine.ranks
    folder = RunFolder.of(settings.folder)
    if not isinstance(ranks, Ranks):
        raise ConfigError(
            f"ranks is {ranks!r}; give None, for the processes that torchrun started, or Ranks()."
        )
    if folder is None and resume:
        raise ResumeError("There is nothing to resume without a folder.")
    with ExitStack() as stack:
        with ranks.agree():
            if folder is not None and ranks.first:
                stack.enter_context(folder.claimed(resume=resume))
        return trained(settings, resume, engine)


def trained(settings: Trainer, resume: bool, engine: Engine) -> Result:
    """Trains a run and its baselines in a folder that is claimed, and returns the result; see
    :func:`fitted`."""
    ranks = engine.ranks
    folder = RunFolder.of(settings.folder)
    schedule = settings.schedule
    clients = len(settings.data)
    if schedule == PoissonSampling() and clients < USUAL_COHORT:
        text = "all %d clients take part in every round: fewer than the usual cohort of %d"
        logger.info(text, clients, USUAL_COHORT)
    warning = _loose_delta(settings)
    if warning is not None and ranks.first:
        logger.warning("%s", warning)
    result = single_run(settings, resume, engine)
    if result.lost and settings.noiseless:
        raise TrainingError(result.lost)
    comparison = {}
    for name, algorithm in settings.comparisons.items():
        place = None if folder is None else folder.baseline(name).root
        baseline = single_run(
            _as_baseline(settings, algorithm, place), place is not None, Engine(ranks=ranks)
        )
        if baseline.lost:
            logger.warning("the baseline is left out: %s", baseline.lost)
        else:
            comparison[name] = baseline
    result = replace(result, baselines=comparison)
    if folder is not None:
        # with the numbers of records that were trained on
        data, _ = held_out(settings.data, settings.finetune)
        ranks.share(
            lambda: folder.write_result(result, table_settings(settings, result.module), data)
        )
        ranks.share(folder.write_lists)
    return result


def _loose_delta(settings: Trainer) -> str | None:
    """Return a warning of a delta above one over the number of protected clients or records, or
    None."""
    privacy = settings.privacies[0]
    if privacy is None:
        return None
    units = len(settings.data)
    if isinstance(privacy, RecordPrivacy):
        units = int(settings.data.train.counts.sum())
    return privacy.loose_delta(units)


def in_one_process(settings: Trainer) -> str:
    """Returns the setting that needs all clients in one process; empty if there is none."""
    if settings.audit is not None:
        return "audit=Interval(...)"
    if settings.runs > 1:
        return f"{settings.runs} replicates"
    if settings.algorithm.one_at_a_time:
        return f"{settings.algorithm.name}, whose clients act one at a time,"
    return ""


def processes(settings: Trainer, problem: Problem) -> int:
    """Returns the number of processes that compute a run: the number that is asked for;
    otherwise one for each core if clients train models of their own for long, and at most one
    for 8 clients of a round.

    Raises:
        ConfigError: several, of a run with several replicates, or with canaries, or whose clients
            act one at a time.
    """
    algorithm = settings.algorithm
    schedule = settings.bound
    asked = settings.execution.processes
    ranks = problem.ranks
    kind = in_one_process(settings)
    size = ranks.size
    if kind and size > 1:
        raise ConfigError(
            f"A run with {kind} needs one process, and {size} were started. Start it "
            "without torchrun."
        )
    if asked is not None and asked > 1 and (kind or size > 1 or not Ranks.can_fork()):
        if kind:
            reason = f"a run with {kind} needs one"
        elif size > 1:
            reason = f"{size} were started by torchrun"
        else:
            reason = NO_FORK
        raise ConfigError(f"execution.processes is {asked}, but {reason}; leave it out.")
    if not ranks.may_fork or kind or not isinstance(schedule, BoundSampler):
        return 1
    if algorithm.local is None or algorithm.all_at_once or problem.initial.device.type != "cpu":
        return asked or 1
    return asked or min(
        problem.executor.execution.processes or 1, max(1, int(schedule.denominator) // _FEW_CLIENTS)
    )


def _as_baseline(settings: Trainer, algorithm: Algorithm, folder: Path | None) -> Trainer:
    """Return the settings of a baseline in its own ``folder``. Of one that releases nothing no
    model decides on an early stop; and where each client fits its data once, there are no schedule,
    privacy and budgets."""
    changes: dict[str, Any] = {
        "algorithm": algorithm,
        "folder": folder,
        "baselines": (),
        "callbacks": (),
    }
    changes["audit"] = None
    if isinstance(algorithm, Local | LocalFit | LocalAverage):
        changes["early_stopping"] = None
        changes["finetune"] = None
    if isinstance(algorithm, LocalFit | LocalAverage):
        changes["schedule"] = FullParticipation()
        changes["privacy"] = None
        changes["epsilons"] = None
        changes["rounds"] = 1
        changes["eval_every"] = None
    return replace(settings, **changes)


def single_run(settings: Trainer, resume: bool, engine: Engine) -> Result:
    """Return the result of one run, without baselines.

    Args:
        settings: of the run.
        resume: continue the run in the folder, if there is one.
        engine: where its clients compute.
    """
    with engine.ranks.agree():
        problem = settings.problem(ranks=engine.ranks)
        count = processes(settings, problem)
    cohort = 1.0
    products = math.inf
    if isinstance(settings.bound, BoundSampler):
        cohort = settings.bound.denominator
    else:
        products = problem.clients * problem.dimension
    with engine.ranks.forked(count) as ranks:
        problem = problem.over(ranks)
        with operation_threads(
            0.0 if problem.executor.one_thread else cohort * problem.dimension, products
        ):
            return Run(settings, problem, engine)(resume)


def chosen(asked: Trainer, resolved: Algorithm) -> dict[str, Any]:
    """Return the settings of the algorithm ``resolved`` that were ``"auto"`` in those ``asked``
    for; one value for each budget where the runs have values of their own."""
    settings = {}
    for name, value in vars(asked.algorithm).items():
        new = getattr(resolved, name, value)
        if value == "auto" and new is not None and not isinstance(new, str):
            several = isinstance(new, tuple) and len(new) == asked.runs
            settings[name] = describe(list(new[:: asked.replicates]) if several else new)
    return settings


class Run:
    """One run, or M replicates that are computed as one.

    Args:
        asked: the settings.
        problem: of these settings, on the processes that compute the run.
        engine: where clients compute.

    Attributes:
        settings: with what the algorithm chose itself.
        problem: the data and the model.
        clients, evaluated: the clients that are evaluated, and the problem with their data only.
        validation: these data with the clients' validation records as test side; None where they do
            not choose.
        folder: where the run is saved; None for nowhere.
        about: fields of the result that are settled before the run.
        channel: its releases; open while it runs.
        stop: number of steps of the whole run.
        every: steps between evaluations.
        history: rows of the evaluations so far.
        fingerprint: digests of all that the releases depend on.
    """

    channel: Any

    def __init__(self, asked: Trainer, problem: Problem, engine: Engine) -> None:
        self.settings = asked.resolved(problem)
        self.engine = engine
        self.ranks = problem.ranks
        self.algorithm = self.settings.algorithm
        self.folder = RunFolder.of(asked.folder)
        algorithm = self.algorithm
        finetune = self.settings.finetune
        bound = self.algorithm.row_bound(problem)
        if problem.ranks.size > 1 and algorithm.all_at_once and bound is None:
            raise ConfigError(
                f"{algorithm.name} takes its step size from the records of all clients where there "
                "is no bound on rows; over several ranks give one, as algorithm.row_norm=1.0."
            )
        self.about: dict[str, Any] = {
            "bound": bound,
            "limit": problem.data.limit,
            "link": link_of(problem.loss),
        }
        self.about["shortened"] = {} if bound is None else share_beyond(problem.data, bound)
        # records are scored as they are trained on
        data, validation = held_out(problem.data.bounded(bound), finetune)
        problem = replace(problem, data=data)
        self.clients, self.evaluated = evaluated_clients(problem, asked.evaluate_clients)
        if validation is not None and len(self.clients) < problem.clients:
            validation = validation.take_clients(self.clients)
        self.problem = problem
        self.validation = validation
        if finetune is not None:
            finetune.check(problem)  # before anything is charged
        for name, baseline in asked.comparisons.items():
            try:
                # one that cannot train this model is refused before the run
                baseline.plan(problem, asked.bound)
            except ConfigError as error:
                raise ConfigError(
                    f"baselines has {name!r}, which cannot be run here: {error}"
                ) from error
        try_metrics(problem, asked.asked_metrics)
        self.about["cut_targets"] = data.cut_targets
        self.about["unscaled"] = bool(unscaled(data))
        self.about["chosen"] = chosen(asked, algorithm)
        self.about["terms"] = terms_of(self.settings)
        self.fingerprint = fingerprint(problem, self.settings, engine.coins)
        self.stop = problem.rounds
        self.every = asked.eval_every or max(1, self.stop // 20)
        self.step_name = "activation" if algorithm.one_at_a_time else "round"
        # where charges are written
        self.ledger = None if self.folder is None else self.folder.ledger
        self.history: list[dict[str, Any]] = []
        self.callbacks: list[Callback] = []
        self.warned = 0  # diverged local trainings at the last warning
        self.written = -math.inf  # when metrics.csv was

    def __call__(self, resume: bool) -> Result:
        """Run all steps, from the last checkpoint on where ``resume`` is set, and return the
        result."""
        folder = self.folder
        ranks = self.ranks
        first = self.ranks.first
        checkpoint = None
        if folder is not None:
            ranks.share(folder.make)
            checkpoint = None
            if resume:
                checkpoint = ranks.share(folder.read_checkpoint)
        self.channel = self.engine.open(self, resume)
        with closing(self.channel):  # also after an interruption
            state = self.engine.init(self)
            step = 0
            tally = Tally()
            if self.settings.early_stopping is not None and self.algorithm.shared(state) is None:
                raise ConfigError(
                    f"early_stopping looks at the shared model, but {self.algorithm.name} has none."
                )
            if checkpoint is not None and folder is not None:
                checkpoint.check(folder.checkpoint, self.fingerprint)
                step = checkpoint.step
                tally = checkpoint.tally
                self.history = checkpoint.history
                device = self.problem.initial.device
                state.public = {
                    name: tensor.to(device) for name, tensor in checkpoint.public.items()
                }
                with ranks.agree():
                    state.private.load(folder.clients, checkpoint.clients)
                self.channel.restore(checkpoint.channel)
            self.channel.start(step)  # also when no round is left to draw
            if self.engine.coins is None:
                # tally: of all ranks
                self.problem = replace(self.problem, tally=tally if first else Tally())
                self.warned = tally.diverged if first else 0
            signal = None
            if first and self.engine.coins is None:
                signal = signal_to_noise(self.channel)
            if signal is not None:
                level = logging.WARNING if signal.warning else logging.INFO
                logger.log(level, "%s: %s", self.algorithm.name, signal.warning or signal.text())
            self.callbacks = [
                *([ProgressBar()] if self.settings.progress else []),
                *self.settings.callbacks,
            ]
            self.callbacks *= int(first)
            self.began = time.monotonic() - (self.history[-1]["time"] if self.history else 0.0)
            self.saved = time.monotonic()
            outcome: Result | None = None
            try:
                for callback in self.callbacks:
                    callback.on_start(self.algorithm.name, self.stop, step)
                if folder is not None:
                    ranks.share(folder.reopen)
                with held_interruption() as interrupted:
                    state, step, stopped = self._advance(state, step, interrupted)
                if ranks.share(interrupted):
                    raise KeyboardInterrupt
                outcome = result = self._finish(state, step, stopped)
            finally:  # also after an interruption
                for callback in self.callbacks:
                    callback.on_end(outcome)
        ledger = self.channel.account.ledger  # has its last line
        result = replace(result, privacy=ranks.share(lambda: result.privacy.with_ledger(ledger)))
        if self.settings.finetune is not None:
            result = self._finetuned(result, self.settings.finetune)
        if folder is not None:
            ranks.share(lambda: folder.write_run(result, self.problem))
        return result

    def _advance(
        self, state: State, step: int, interrupted: Callable[[], bool]
    ) -> tuple[State, int, str]:
        """Compute the blocks from ``step`` on; return the state, the number of steps done, and why
        they ended.

        An interruption from the keyboard ends the run after a block, with a checkpoint: a secure
        run continues without paying twice for what was released.
        """
        if stopped := self.ends(step):  # before the resume
            return state, step, stopped
        every = self.settings.checkpoint_every
        try:
            for block in self.blocks(step):
                # charged, in secure mode on the disk, before the data
                self.channel.begin(block.first, block.clients)
                state = self.engine.step(self, state, block)
                step = block.step + 1
                # at once, not only at the next evaluation
                if self.problem.tally is not None and not self.warned:
                    self._warn(step, self.problem.tally)
                for callback in self.callbacks:
                    callback.on_event(block, state)
                if step % self.every == 0 and step < self.stop:
                    self.evaluate(state, step)
                stopped = self.ends(step)
                halt, waited = self.ranks.share(
                    lambda: (interrupted(), time.monotonic() - self.saved)
                )
                if stopped or halt:
                    break
                if step % every == 0 if every else waited > _CHECKPOINT_SECONDS:
                    self.checkpoint(state, step)
        except BudgetExhausted as spent:
            logger.info("%s", spent)
            stopped = "budget"
        self.checkpoint(state, step)
        return state, step, stopped or "rounds"

    def blocks(self, start: int) -> Iterator[Block]:
        """Return all blocks from step ``start`` on: cohorts that the channel draws with the privacy
        coins, or activations of the public schedule, which end where the run is evaluated or
        saved."""
        settings = self.settings
        schedule = self.settings.bound
        if not isinstance(schedule, BoundSchedule):
            return rounds(self.channel.draw, start=start, stop=self.stop)
        cuts = [self.every, *filter(None, [settings.checkpoint_every])]
        return schedule.blocks(settings.seed, start, self.stop, cuts=cuts, replicates=settings.runs)

    def ends(self, step: int) -> str:
        """Return why the run ends after ``step``; empty where it does not.

        By the rule of early stopping, from the rows of the history up to this step; the steps that
        it leaves out are charged. Or because nearly all local trainings of the first rounds
        diverged, in a run without noise: how long a private one is says nothing about the data.
        """
        if not 0 < step < self.stop:
            return ""
        rule = self.settings.early_stopping
        rows = self.history
        if rule is not None and rows and rows[-1]["round"] == step and rule.stops(rows):
            self.channel.charge_remaining(step)
            return "early"
        if step <= _FIRST_ROUNDS and self.settings.noiseless:
            tally = self.tally()
        else:
            tally = Tally()
        if tally.trained >= _FEW and tally.diverged >= _HOPELESS * tally.trained:
            return "diverged"
        return ""

    def evaluate(self, state: State, step: int) -> tuple[list[dict[str, Any]], dict[str, Metrics]]:
        """Append what was measured to the history: a row, or one for each budget where there are
        replicates. Return the numbers of each of these, and the scores of the first one by
        model."""
        settings = self.settings
        several = self.settings.runs > 1
        numbers, scores = self.engine.measure(self, state)
        # the run ended at an evaluated round
        while self.history and self.history[-1]["round"] == step:
            self.history.pop()
        mine = numbers
        when, spent, numbers = self.ranks.share(
            lambda: (time.monotonic() - self.began, self.channel.epsilons, mine)
        )
        counts: dict[str, float] = dict(self._diverged(step, scores))
        if (
            settings.early_stopping is not None
            and (model := self.algorithm.shared(state)) is not None
        ):
            counts["distance"] = float((model - self.problem.initial).norm())
        runs: list[dict[str, Any]] = []
        for budget, members in settings.budgets:
            row = {"round": step, "time": when} | ({"budget": budget} if several else {})
            self.history.append(
                row | {"epsilon": float(spent[members].max())} | bands(numbers[members]) | counts
            )
            runs += [
                {"budget": budget, "repetition": k} | row for k, row in enumerate(numbers[members])
            ]
            for callback in self.callbacks:
                callback.on_evaluate(self.history[-1])
        if (
            self.folder is not None
            and self.ranks.first
            and time.monotonic() - self.written > _HISTORY_SECONDS
        ):
            self.folder.write_history(self.history)
            self.written = time.monotonic()
        return runs, scores

    def tally(self) -> Tally:
        """Return the local trainings of all ranks; none where they are not counted."""
        mine = self.problem.tally or Tally()
        each = self.ranks.gather((mine.trained, mine.diverged))
        return Tally(*(sum(counts) for counts in zip(*each, strict=True)))

    def _warn(self, step: int, tally: Tally) -> None:
        """Warn of local trainings that diverged since the last warning."""
        if tally.diverged > self.warned and self.ranks.first:
            logger.warning(
                "%s, %s %d: %d of %d local trainings diverged: their models are not finite, count "
                "as zero in what is "
                "sent, and are not kept; a smaller learning rate (algorithm.local.lr) may help",
                self.algorithm.name, self.step_name, step, tally.diverged, tally.trained,
            )  # fmt: skip
        self.warned = tally.diverged

    def _diverged(self, step: int, scores: Mapping[str, Metrics]) -> dict[str, int]:
        """Count, and warn of, the local trainings that diverged since the last evaluation, and the
        clients whose models have no finite loss; empty without any."""
        if self.problem.tally is None or not scores:
            return {}
        tally = self.tally()
        counts = {}
        self._warn(step, tally)
        before = {row["round"]: row.get("diverged_trainings", 0) for row in self.history}
        if lost := tally.diverged - sum(before.values()):
            counts["diverged_trainings"] = lost
        losses = scores["personal"].loss[self.evaluated.data.test.counts > 0]
        if diverged := int((~torch.isfinite(losses)).sum()):
            counts["diverged_clients"] = diverged
            if self.ranks.first:
                text = "%s, %s %d: the loss of %d of %d clients' own models is not finite"
                logger.warning(
                    text, self.algorithm.name, self.step_name, step, diverged, len(losses)
                )
        return counts

    def checkpoint(self, state: State, step: int) -> None:
        """Write a checkpoint: each rank writes the rows of its clients, then the first one the
        rest."""
        folder = self.folder
        if folder is None:
            return
        tally = self.tally()
        with self.ranks.agree():
            # is on the disk before the checkpoint is
            own = state.private.save(folder.clients, step)
        files = {file: length for each in self.ranks.gather(own) for file, length in each.items()}
        self.ranks.share(
            lambda: Checkpoint(
                step=step,
                public=dict(state.public),
                clients=files,
                history=self.history,
                fingerprint=self.fingerprint,
                channel=self.channel.state(),
                ledger=self.channel.sync(),
                tally=tally,
            ).write(folder.checkpoint)
        )
        state.private.commit(folder.clients, files)
        self.saved = time.monotonic()

    def _finish(self, state: State, step: int, stopped: str) -> Result:
        """Return the result after the last step."""
        problem = self.problem
        evaluated = self.evaluated
        runs, scored = self.evaluate(state, step)
        tally = self.tally()
        report, released = self.ranks.share(
            lambda: (privacy_report(self.channel), dict(self.channel.on_grid))
        )
        personal, parts = self.engine.models(self, state)
        if self.settings.runs > 1:
            report = replace(
                report, outside=(OUTSIDE.format(count=self.settings.runs), *report.outside)
            )
        audit = self.settings.audit
        if audit is not None:
            model = self.algorithm.shared(state)
            if model is None or self.algorithm.one_at_a_time:
                change = None
            else:
                change = model - problem.initial
            interval = audit.certificate(self.channel, report.epsilon, change)
            report = replace(report, interval=interval, outside=(*report.outside, audit.outside))
        metric = main_metric(problem.data.spec).name
        scores = {name: metrics.by_client(evaluated) for name, metrics in scored.items()}
        factory = None
        if isinstance(self.settings.model, NamedFactory):
            factory = self.settings.model
        return Result(
            algorithm=self.algorithm.name,
            privacy=replace(report, **self.engine.facts),
            history=self.history,
            personal=personal,
            parts=parts,
            shared=self.algorithm.shared(state),
            ids=problem.data.ids,
            scores=scores or {"personal": {"loss": {}, metric: {}}},
            final=self.history[-1],
            stopped=stopped,
            metric=metric,
            data_name=problem.data.name,
            module=problem.module,
            factory=factory,
            folder=None if self.folder is None else self.folder.root,
            replicates=runs if self.settings.runs > 1 else None,
            released=released,
            asked=self.settings.asked_metrics,
            trained=not 0 < tally.trained == tally.diverged,
            untrained=self._untrained(state),
            step=self.step_name,
            evaluated=evaluated.data.ids if len(self.clients) < problem.clients else None,
            tested=int((problem.data.test.counts > 0).sum()),
            constants=own_constants(evaluated),
            constant=constant_loss(evaluated),
            coding=Coding.of(problem.data, problem.loss, self.algorithm.loss),
            **self.about,
        )

    def _finetuned(self, result: Result, finetune: Personalization) -> Result:
        """Return the result with the clients' finetuned models."""
        options: dict[str, Any] = {
            "name": self.algorithm.name,
            "metrics": self.settings.asked_metrics,
        }
        result, measured = finetuned(
            result, self.evaluated, finetune, validation=self.validation, **options
        )
        outside = (*result.privacy.outside, *not_covered(self.algorithm, self.settings.privacy))
        final = result.final | numbers_of(self.evaluated, measured)
        return replace(result, final=final, privacy=replace(result.privacy, outside=outside))

    def _untrained(self, state: State) -> tuple[str, ...]:
        """Return the ids of the evaluated clients that keep the model they started from: all their
        local trainings diverged."""
        store = state.private
        clients = self.clients
        if not {"seen", "trained"} <= set(store.fields):
            return ()
        lost = self.problem.spread(
            lambda ids: store.gather("seen", ids) & ~store.gather("trained", ids), clients
        )
        return tuple(self.problem.data.ids[client] for client in clients[lost.cpu()].tolist())


@contextmanager
def held_interruption() -> Iterator[Callable[[], bool]]:
    """Hold back the first SIGINT until the event that is being computed is over; a second one
    interrupts at once.

    Only where SIGINT would raise KeyboardInterrupt, in the main thread: other handlers stay as they
    are.

    Yields:
        A function that returns whether it came. The caller raises KeyboardInterrupt when it is
        safe.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def table_settings(settings: Trainer, module: nn.Module | None) -> dict[str, Any]:
    """Returns the settings that a table of runs shows, and those that distinguish its runs."""
    values: dict[str, Any] = {
        "seed": settings.seed,
        "planned_rounds": settings.rounds,
        "data": settings.data.name,
    }
    values["data_fingerprint"] = settings.data.fingerprint()
    names = [
        "algorithm",
        "schedule",
        "privacy",
        "rounds",
        "trainable",
        "loss",
        "finetune",
        "dtype",
        "early_stopping",
    ]
    if settings.audit is not None:
        names.append("audit")
    configuration = {name: describe(getattr(settings, name)) for name in names}
    assert module is not None  # which only results that were loaded can lack
    size = sum(parameter.numel() for parameter in module.parameters())
    configuration["model"] = {
        "class": type(module).__name__,
        "parameters": size,
        "layers": repr(module),
    }
    return values | {"configuration": configuration}
