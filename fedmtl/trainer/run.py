"""The one loop of a run: blocks are charged and computed, and the state is evaluated and saved."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from ..algorithms.base import State
from ..algorithms.problem import Tally
from ..errors import BudgetExhausted, ConfigError
from ..privacy.reporting import signal_to_noise
from ..schedules import Block, BoundSchedule, rounds
from .aggregates import bands
from .callbacks import Callback, ProgressBar
from .checkpoint import Checkpoint
from .conclusion import conclude, informed, with_finetuned
from .engine import Engine
from .evaluation import Metrics
from .folder import RunFolder
from .interruption import held_interruption
from .outcome import write_run
from .result import Result
from .run_plan import RunPlan

logger = logging.getLogger("fedmtl")
_CHECKPOINT_SECONDS = 20.0  # between checkpoints, if the settings name no number of steps
_HISTORY_SECONDS = 1.0  # between two writes of metrics.csv
# A run without noise has failed if this share of the local trainings of its first rounds diverged;
# fewer trainings than _FEW say nothing.
_FIRST_ROUNDS = 3
_HOPELESS = 0.9
_FEW = 5


class Run:
    """The loop of one run, or of M replicates that are computed as one.

    Args:
        plan: what is settled before the first step.
        engine: computes the clients' part.

    Attributes:
        settings, problem, clients, evaluated, fingerprint: see :class:`RunPlan`.
        ranks: the processes that compute the run.
        algorithm: with the settings that it chose itself.
        folder: in which the run is saved; None for a run that is not.
        ledger: the file of its charges; None without a folder.
        channel: its releases; open while it runs.
        stop: number of steps of the whole run.
        every: steps between evaluations.
        step_name: ``"round"``, or ``"activation"`` if clients act one at a time.
        history: rows of the evaluations so far.
    """

    channel: Any

    def __init__(self, plan: RunPlan, engine: Engine) -> None:
        self.plan = plan
        self.engine = engine
        self.settings = plan.settings
        self.problem = plan.problem
        self.clients = plan.clients
        self.evaluated = plan.evaluated
        self.fingerprint = plan.fingerprint
        self.ranks = plan.problem.ranks
        self.algorithm = plan.settings.algorithm
        self.folder = RunFolder.of(plan.settings.folder)
        self.ledger = None if self.folder is None else self.folder.ledger
        self.stop = plan.problem.rounds
        self.every = plan.settings.eval_every or max(1, self.stop // 20)
        self.step_name = "activation" if self.algorithm.one_at_a_time else "round"
        self.history: list[dict[str, Any]] = []
        self.callbacks: list[Callback] = []
        self.warned = 0  # diverged local trainings at the last warning
        self.written = -math.inf  # when metrics.csv was

    def __call__(self, resume: bool) -> Result:
        """Computes all steps and returns the result.

        Args:
            resume: whether to start from the last checkpoint in the folder, if there is one.

        Raises:
            ConfigError: early stopping of an algorithm without a shared model.
            ResumeError: a checkpoint of another run, or one that the ledger does not hold.
        """
        ranks = self.ranks
        folder = self.folder
        checkpoint = None
        if folder is not None:
            ranks.share(folder.make)
            if resume:
                checkpoint = ranks.share(folder.read_checkpoint)
        self.channel = self.engine.open(self, resume)
        # The ledger is closed in any case, so that an interrupted run can go on.
        with closing(self.channel):
            state, step = self._start(checkpoint)
            result = self._train(state, step)
        ledger = self.channel.accountant.ledger
        # The report names the end of the ledger, which is final only now.
        result = replace(result, privacy=ranks.share(lambda: result.privacy.with_ledger(ledger)))
        if self.settings.finetune is not None:
            result = with_finetuned(self, result, self.settings.finetune)
        if folder is not None:
            ranks.share(lambda: write_run(folder, result, self.problem))
        return result

    def _start(self, checkpoint: Checkpoint | None) -> tuple[State, int]:
        """Returns the state and the number of steps at the start, of the checkpoint if any."""
        state = self.engine.init(self)
        step = 0
        tally = Tally()
        if self.settings.early_stopping is not None and self.algorithm.shared(state) is None:
            raise ConfigError(
                f"early_stopping looks at the shared model, but {self.algorithm.name} has none."
            )
        if checkpoint is not None:
            self._restore(state, checkpoint)
            step = checkpoint.step
            tally = checkpoint.tally
        # Also if no round is left to draw: it reports what was spent, and misses no charge.
        self.channel.start(step)
        # An engine with coins of its own repeats a run, whose trainings were counted before.
        if self.engine.coins is None:
            self._count_from(tally)
            if self.ranks.first:
                self._log_signal()
        return state, step

    def _restore(self, state: State, checkpoint: Checkpoint) -> None:
        """Puts the state, the history and the channel back to those of a checkpoint, in place."""
        folder = self.folder
        assert folder is not None  # a checkpoint was read from it
        checkpoint.check(folder.checkpoint, self.fingerprint)
        self.history = checkpoint.history
        device = self.problem.initial.device
        state.public = {name: tensor.to(device) for name, tensor in checkpoint.public.items()}
        with self.ranks.agree():
            state.private.load(folder.clients, checkpoint.clients)
        self.channel.restore(checkpoint.channel)

    def _count_from(self, tally: Tally) -> None:
        """Counts local trainings on from those of the whole run so far, which rank 0 keeps."""
        if not self.ranks.first:
            tally = Tally()  # the sum over ranks would count them once a rank
        self.problem = replace(self.problem, tally=tally)
        self.warned = tally.diverged

    def _log_signal(self) -> None:
        """Logs the signal-to-noise ratio of the releases; a warning if noise will hide them."""
        signal = signal_to_noise(self.channel)
        if signal is None:
            return
        if signal.warning:
            logger.warning("%s: %s", self.algorithm.name, signal.warning)
        else:
            logger.info("%s: %s", self.algorithm.name, signal.text())

    def _train(self, state: State, step: int) -> Result:
        """Returns the result of the steps from ``step`` on, without finetuning."""
        if self.ranks.first:  # callbacks print and write
            bar = [ProgressBar()] if self.settings.progress else []
            self.callbacks = [*bar, *self.settings.callbacks]
        before = 0.0
        if self.history:  # time goes on where the interrupted run left it
            before = self.history[-1]["time"]
        self.began = time.monotonic() - before
        self.saved = time.monotonic()
        outcome: Result | None = None
        try:
            for callback in self.callbacks:
                callback.on_start(self.algorithm.name, self.stop, step)
            if self.folder is not None:
                self.ranks.share(self.folder.reopen)
            with held_interruption() as interrupted:
                state, step, stopped = self._advance(state, step, interrupted)
            # All ranks end together, so that none waits for one that has left.
            if self.ranks.share(interrupted):
                raise KeyboardInterrupt
            self.settings = informed(self.settings, state)
            outcome = conclude(self, state, step, stopped)
            return outcome
        finally:  # also after an interruption, with None
            for callback in self.callbacks:
                callback.on_end(outcome)

    def _advance(
        self, state: State, step: int, interrupted: Callable[[], bool]
    ) -> tuple[State, int, str]:
        """Computes the blocks from ``step`` on, and saves the last state.

        An interruption from the keyboard ends the run after a block, with a checkpoint: a secure
        run continues without paying twice for what was released.

        Returns:
            The state, the number of steps done, and why they ended, see :attr:`Result.stopped
            <fedmtl.Result>`.
        """
        # A run that was resumed after its end: it has nothing more to do.
        if stopped := self.ends(step):
            return state, step, stopped
        try:
            for block in self.blocks(step):
                # The charge is on the disk before the data are read, in secure mode.
                self.channel.begin(block.first, block.clients)
                state = self.engine.step(self, state, block)
                step = block.step + 1
                # The first warning comes at once: the next evaluation may be far.
                if self.problem.tally is not None and not self.warned:
                    self._warn(step, self.problem.tally)
                for callback in self.callbacks:
                    callback.on_event(block, state)
                if step % self.every == 0 and step < self.stop:
                    self.evaluate(state, step)
                stopped = self.ends(step)
                # Clocks and signals differ between ranks, so rank 0 decides for all of them.
                halt, waited = self.ranks.share(
                    lambda: (interrupted(), time.monotonic() - self.saved)
                )
                if stopped or halt:
                    break
                if self._is_due(step, waited):
                    self.checkpoint(state, step)
        except BudgetExhausted as spent:
            logger.info("%s", spent)
            stopped = "budget"
        self.checkpoint(state, step)
        return state, step, stopped or "rounds"

    def _is_due(self, step: int, waited: float) -> bool:
        """Returns True if a checkpoint is due: by the settings, or after some seconds."""
        every = self.settings.checkpoint_every
        if every:
            return step % every == 0
        return waited > _CHECKPOINT_SECONDS

    def blocks(self, start: int) -> Iterator[Block]:
        """Returns the blocks from step ``start`` on.

        They are cohorts that the channel draws with the privacy coins, or activations of the public
        schedule; a block of these ends if the run is evaluated or saved there.
        """
        settings = self.settings
        schedule = self.settings.bound
        if not isinstance(schedule, BoundSchedule):
            return rounds(self.channel.draw, start=start, stop=self.stop)
        cuts = [self.every, *filter(None, [settings.checkpoint_every])]
        return schedule.blocks(settings.seed, start, self.stop, cuts=cuts, replicates=settings.runs)

    def ends(self, step: int) -> str:
        """Returns the reason why the run ends after ``step``; empty if it goes on.

        ``"early"`` follows from the rule of early stopping and the history up to this step; the
        steps that it leaves out are charged. ``"diverged"`` ends a run without noise if nearly all
        local trainings of its first rounds diverged. The length of a private run must say nothing
        about the data, so it goes on.
        """
        if not 0 < step < self.stop:
            return ""
        rule = self.settings.early_stopping
        rows = self.history
        if rule is not None and rows and rows[-1]["round"] == step and rule.stops(rows):
            self.channel.charge_remaining(step)
            return "early"
        if step > _FIRST_ROUNDS or not self.settings.noiseless:
            return ""
        tally = self.tally()
        if tally.trained >= _FEW and tally.diverged >= _HOPELESS * tally.trained:
            return "diverged"
        return ""

    def evaluate(self, state: State, step: int) -> tuple[list[dict[str, Any]], dict[str, Metrics]]:
        """Scores the models and adds what was measured to the history.

        The history gets one row; of replicates one row for each budget. A row of the same step is
        replaced.

        Returns:
            The numbers of each replicate, with its budget and its number among those of the
            budget; and the scores of the first replicate by model.
        """
        settings = self.settings
        numbers, scores = self.engine.measure(self, state)
        # The run ended at an evaluated round: its row is made anew, with the same numbers.
        while self.history and self.history[-1]["round"] == step:
            self.history.pop()
        when, spent, numbers = self.ranks.share(
            lambda: (time.monotonic() - self.began, self.channel.epsilons, numbers)
        )
        counts: dict[str, float] = dict(self._diverged(step, scores))
        if settings.early_stopping is not None:
            model = self.algorithm.shared(state)
            if model is not None:  # EarlyStopping reads how far it has come
                counts["distance"] = float((model - self.problem.initial).norm())
        runs: list[dict[str, Any]] = []
        for budget, members in settings.budgets:
            row: dict[str, Any] = {"round": step, "time": when}
            if settings.runs > 1:
                row["budget"] = budget
            # The replicates of a budget differ in their cohorts, and so in what they have spent.
            row["epsilon"] = float(spent[members].max())
            self.history.append(row | bands(numbers[members]) | counts)
            runs += [
                {"budget": budget, "repetition": k} | row for k, row in enumerate(numbers[members])
            ]
            for callback in self.callbacks:
                callback.on_evaluate(self.history[-1])
        self._write_history()
        return runs, scores

    def _write_history(self) -> None:
        """Writes the evaluations so far, at most once a second: frequent ones would cost more than
        the steps between them."""
        if self.folder is None or not self.ranks.first:
            return
        if time.monotonic() - self.written > _HISTORY_SECONDS:
            self.folder.write_history(self.history)
            self.written = time.monotonic()

    def tally(self) -> Tally:
        """Returns the local trainings of all ranks; zeros if they are not counted."""
        mine = self.problem.tally or Tally()
        each = self.ranks.gather((mine.trained, mine.diverged))
        return Tally(*(sum(counts) for counts in zip(*each, strict=True)))

    def _warn(self, step: int, tally: Tally) -> None:
        """Warns of local trainings that diverged since the last warning."""
        if tally.diverged > self.warned and self.ranks.first:
            logger.warning(
                "%s, %s %d: %d of %d local trainings diverged: their models are not finite, count "
                "as zero in what is "
                "sent, and are not kept; a smaller learning rate (algorithm.local.lr) may help",
                self.algorithm.name, self.step_name, step, tally.diverged, tally.trained,
            )  # fmt: skip
        self.warned = tally.diverged

    def _diverged(self, step: int, scores: Mapping[str, Metrics]) -> dict[str, int]:
        """Counts, and warns of, the local trainings that diverged since the last evaluation, and
        the clients whose models have no finite loss.

        Returns:
            The columns ``diverged_trainings`` and ``diverged_clients``, each only if it is not 0.
        """
        if self.problem.tally is None or not scores:
            return {}
        tally = self.tally()
        counts = {}
        self._warn(step, tally)
        # A tally is of the whole run. Rows of one round, of several budgets, have the same count.
        before = {row["round"]: row.get("diverged_trainings", 0) for row in self.history}
        lost = tally.diverged - sum(before.values())
        if lost:
            counts["diverged_trainings"] = lost
        # The loss of a client without test examples is NaN and says nothing about its training.
        losses = scores["personal"].loss[self.evaluated.data.test.counts > 0]
        diverged = int((~torch.isfinite(losses)).sum())
        if diverged:
            counts["diverged_clients"] = diverged
            if self.ranks.first:
                text = "%s, %s %d: the loss of %d of %d clients' own models is not finite"
                logger.warning(
                    text, self.algorithm.name, self.step_name, step, diverged, len(losses)
                )
        return counts

    def checkpoint(self, state: State, step: int) -> None:
        """Writes a checkpoint of the state after ``step`` steps; nothing without a folder.

        Each rank writes the rows of its clients, then rank 0 the rest: a checkpoint names files
        that are whole and on the disk.
        """
        folder = self.folder
        if folder is None:
            return
        tally = self.tally()
        with self.ranks.agree():
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
        # The new checkpoint is on the disk, and nothing names the files of the one before.
        state.private.commit(folder.clients, files)
        self.saved = time.monotonic()
