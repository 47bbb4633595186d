"""The one loop of a run: blocks are charged and computed, and the state is evaluated and saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..algorithms.base import Algorithm, State
from ..algorithms.problem import Tally
from ..errors import BudgetExhausted, ConfigError
from ..privacy.reporting import signal_to_noise
from ..ranks import Ranks
from ..schedules import Block, BoundBuffered, BoundSchedule, rounds
from .callbacks import Callback, ProgressBar
from .checkpoint import Checkpoint
from .conclusion import conclude, informed, with_finetuned
from .engine import Engine
from .evaluations import Evaluations
from .folder import RunFolder
from .interruption import held_interruption
from .outcome import write_run
from .result import Result
from .run_plan import RunPlan
from .saving import Checkpoints

logger = logging.getLogger("fedmtl")
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
        plan, engine: see above.
        settings: of the plan; after the last step with what finetuning takes from the releases.
        problem: of the plan, which counts local trainings.
        folder: in which the run is saved; None for a run that is not.
        stop: number of steps of the whole run.
        channel: its releases; open while it runs.
        callbacks: of the first rank.
        evaluations: its history.
        checkpoints: of its state.
    """

    channel: Any

    def __init__(self, plan: RunPlan, engine: Engine) -> None:
        self.plan = plan
        self.engine = engine
        self.settings = plan.settings
        self.problem = plan.problem
        self.folder = RunFolder.of(plan.settings.folder)
        self.stop = plan.problem.rounds
        self.callbacks: list[Callback] = []
        self.evaluations = Evaluations()
        self.checkpoints = Checkpoints()

    @property
    def algorithm(self) -> Algorithm:
        """Returns the algorithm with the settings that it chose itself."""
        return self.plan.settings.algorithm

    @property
    def ranks(self) -> Ranks:
        """Returns the processes that compute the run."""
        return self.plan.problem.ranks

    @property
    def ledger(self) -> Path | None:
        """Returns the file of its charges; None without a folder."""
        if self.folder is None:
            return None
        return self.folder.ledger

    @property
    def every(self) -> int:
        """Returns the number of steps between evaluations."""
        return self.settings.eval_every or max(1, self.stop // 20)

    @property
    def step_name(self) -> str:
        """Returns ``"round"``, or ``"activation"`` if clients act one at a time."""
        if self.algorithm.one_at_a_time:
            return "activation"
        return "round"

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
            self.checkpoints.restore(self, state, checkpoint)
            step = checkpoint.step
            tally = checkpoint.tally
        # Also if no round is left to draw: it reports what was spent, and misses no charge.
        self.channel.start(step)
        # An engine with coins of its own repeats a run, whose trainings were counted before.
        if self.engine.coins is None:
            self._count_from(tally)
            if self.ranks.first:
                self._log_signal()
                self._log_versions(state)
        return state, step

    def _count_from(self, tally: Tally) -> None:
        """Counts local trainings on from those of the whole run so far, which rank 0 keeps."""
        if not self.ranks.first:
            tally = Tally()  # the sum over ranks would count them once a rank
        self.problem = replace(self.problem, tally=tally)
        self.evaluations.count_from(tally)

    def _log_signal(self) -> None:
        """Logs the signal-to-noise ratio of the releases; a warning if noise will hide them."""
        signal = signal_to_noise(self.channel)
        if signal is None:
            return
        if signal.warning:
            logger.warning("%s: %s", self.algorithm.name, signal.warning)
        else:
            logger.info("%s: %s", self.algorithm.name, signal.text())

    def _log_versions(self, state: State) -> None:
        """Logs the memory for earlier public states, and warns of clients that never count."""
        # a method without a public state asks nobody
        if not isinstance(self.settings.bound, BoundBuffered) or not state.public:
            return
        sampler = self.channel.sampler
        if not sampler.clients.foreseen:
            return
        size = sum(tensor.nbytes for tensor in state.public.values())
        most = sampler.versions_kept
        logger.info("Buffered keeps up to %d shared models, %d bytes", most, most * size)
        never = int((sampler.uses(self.stop) == 0).sum())
        if never:
            logger.warning(
                "Buffered: no answer of %s of the %s clients counts in %d rounds: they are too "
                "slow, away, or not asked",
                f"{never:,}",
                f"{sampler.n:,}",
                self.stop,
            )

    def _train(self, state: State, step: int) -> Result:
        """Returns the result of the steps from ``step`` on, without finetuning."""
        if self.ranks.first:  # callbacks print and write
            bar = [ProgressBar()] if self.settings.progress else []
            self.callbacks = [*bar, *self.settings.callbacks]
        self.evaluations.start()
        self.checkpoints.start()
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
        steps = self.steps(state, step)
        try:
            for block, state in steps:
                step = block.step + 1
                self.evaluations.warn_first(self, step)
                for callback in self.callbacks:
                    callback.on_event(block, state)
                if step % self.every == 0 and step < self.stop:
                    self.evaluations.evaluate(self, state, step)
                stopped = self.ends(step)
                # Clocks and signals differ between ranks, so rank 0 decides for all of them.
                halt, age = self.ranks.share(lambda: (interrupted(), self.checkpoints.age))
                if stopped or halt:
                    break
                if self.checkpoints.is_due(self.settings.checkpoint_every, step, age):
                    self.checkpoints.save(self, state, step)
        except BudgetExhausted as spent:
            logger.info("%s", spent)
            stopped = "budget"
        self.checkpoints.save(self, state, step)
        return state, step, stopped or "rounds"

    def steps(self, state: State, step: int) -> Iterator[tuple[Block, State]]:
        """Yields the blocks from ``step`` on, each with the state after it.

        Raises:
            BudgetExhausted: a client would exceed its budget in the next block.
        """
        for block in self.blocks(step):
            # The charge is on the disk before the data are read, in secure mode.
            self.channel.begin(block.first, block.clients)
            state = self.engine.step(self, state, block)
            yield block, state

    def blocks(self, start: int) -> Iterator[Block]:
        """Returns the blocks from step ``start`` on.

        They are cohorts that the channel draws with the privacy coins, or activations of the public
        schedule; a block of these ends if the run is evaluated or saved there.
        """
        settings = self.settings
        schedule = self.settings.bound
        if isinstance(schedule, BoundBuffered):
            capped = self.channel.sampler  # with the cap of the account
            drawn = rounds(self.channel.draw, start=start, stop=self.stop)
            return (capped.block(block.first, block.cohort) for block in drawn)
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
        rows = self.evaluations.rows
        if rule is not None and rows and rows[-1]["round"] == step and rule.stops(rows):
            self.channel.charge_remaining(step)
            return "early"
        if step > _FIRST_ROUNDS or not self.settings.noiseless:
            return ""
        tally = self.tally()
        if tally.trained >= _FEW and tally.diverged >= _HOPELESS * tally.trained:
            return "diverged"
        return ""

    def tally(self) -> Tally:
        """Returns the local trainings of all ranks; zeros if they are not counted."""
        mine = self.problem.tally or Tally()
        each = self.ranks.gather((mine.trained, mine.diverged))
        return Tally(*(sum(counts) for counts in zip(*each, strict=True)))
