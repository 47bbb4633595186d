"""One pass over the blocks of a run: steps, evaluations, checkpoints."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms.base import Problem, State
from ..errors import BudgetExhausted, ConfigError
from ..privacy import Channel
from .callbacks import Callback
from .checkpoint import Checkpoint
from .evaluation import Metrics, evaluate_personal, evaluate_shared, means, metric_name, summarize
from .folder import RunFolder
from .replicates import OUTSIDE, Replicates, bands, each_run, measure_all, numbers_of, objectives, spent_by_run
from .result import Result
from .sources import Source

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger("fedmtl")
_CHECKPOINT_SECONDS = 20.0


@contextmanager
def held_interruption() -> Iterator[Callable[[], bool]]:
    """Hold back the first SIGINT until the event that is being computed is over; a second one interrupts at once.

    Only where SIGINT would raise KeyboardInterrupt, in the main thread: other handlers stay as they are.

    Yields:
        A function that says whether one came. Whoever asks raises KeyboardInterrupt when it is safe.
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


@dataclass
class Loop:
    """One pass over the events of a run, or of M runs that are computed together."""

    trainer: Trainer
    problem: Problem
    channel: Channel
    source: Source
    folder: RunFolder | None
    fingerprint: str
    history: list[dict[str, Any]]
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        spent = self.history[-1]["time"] if self.history else 0.0
        self.began = time.monotonic() - spent
        self.saved = time.monotonic()
        self.replicates: Replicates = self.trainer.repeated
        self.groups = self.replicates.groups(self.trainer.privacy)

    def advance(self, state: State, step: int) -> tuple[State, int, str]:
        """Run the events from ``step`` on; returns the state, the number of events done, and why it stopped.

        An interruption from the keyboard ends the run after the event, with a checkpoint: a secure run goes on without
        paying twice for what was released.
        """
        with held_interruption() as interrupted:
            reached = self._advance(state, step, interrupted)
        if interrupted():
            raise KeyboardInterrupt
        return reached

    def _advance(self, state: State, step: int, interrupted: Callable[[], bool]) -> tuple[State, int, str]:
        trainer, stopped = self.trainer, "rounds"
        if self.stops(step):  # it did before the resume
            self.channel.charge_remaining(step)
            return state, step, "early"
        try:
            for block in self.source.blocks(step):
                self.source.begin(block)
                state = trainer.algorithm.step(self.problem, state, block, self.channel)
                step = block.step + 1
                for callback in self.callbacks:
                    callback.on_event(block, state)
                if step % self.source.every == 0 and step < self.source.stop:
                    self.evaluate(state, step)
                if self.stops(step):
                    self.channel.charge_remaining(step)
                    stopped = "early"
                    break
                if interrupted():
                    break
                self.checkpoint(state, step)
        except BudgetExhausted as spent:
            logger.info("%s", spent)
            stopped = "budget"
        self.checkpoint(state, step, force=True)
        return state, step, stopped

    def stops(self, step: int) -> bool:
        """Whether the run ends here because of the row that the history has of this step."""
        rule = self.trainer.early_stopping
        fresh = rule is not None and bool(self.history) and self.history[-1]["round"] == step < self.source.stop
        return fresh and rule is not None and rule.stops(self.history)

    def evaluate(self, state: State, step: int) -> Measured:
        """Append what was measured to the history: a row, or one for each budget where there are replicates."""
        found = self._measure_one(state) if self.replicates.count == 1 else self._measure_all(state)
        while self.history and self.history[-1]["round"] == step:  # the budget ended at an evaluated round
            self.history.pop()
        when = time.monotonic() - self.began
        for row in found.rows:
            self.history.append({"round": step, "time": when} | row)
            for callback in self.callbacks:
                callback.on_evaluate(self.history[-1])
        return found

    def _measure_one(self, state: State) -> Measured:
        problem, algorithm, metrics = self.problem, self.trainer.algorithm, self.trainer.further_metrics
        model = algorithm.shared(state)
        shared = None if model is None else evaluate_shared(problem, model, metrics=metrics)
        personal = shared if not state.private.fields else None
        personal = personal or evaluate_personal(problem, algorithm, state, metrics=metrics)
        row: dict[str, Any] = {"epsilon": self.channel.epsilon} | numbers_of(problem, personal)
        row |= {name: float(value) for name, value in objectives(problem, algorithm, state).items()}
        if self.trainer.early_stopping is not None:
            if model is None:
                raise ConfigError(f"early_stopping looks at the shared model, but {algorithm.name} has none.")
            row["distance"] = float((model - problem.initial).norm())
        if shared is not None:
            row |= summarize(shared.score, shared.weight, metric=metric_name(problem), prefix="global_")
            row |= means(shared, "global_")
        return Measured([row], personal, shared)

    def _measure_all(self, state: State) -> Measured:
        columns, first = measure_all(self.problem, self.trainer.algorithm, state, self.trainer.further_metrics)
        spent = spent_by_run(self.channel, self.replicates.count)
        rows = [
            {"budget": row.pop("budget"), "epsilon": float(spent[members].max())} | row
            for row, (_, members) in zip(bands(columns, self.groups), self.groups, strict=True)
        ]
        return Measured(rows, first, None, each_run(columns, self.groups))

    def checkpoint(self, state: State, step: int, *, force: bool = False) -> None:
        """Write a checkpoint when one is due."""
        if self.folder is None:
            return
        every = self.trainer.checkpoint_every
        due = step % every == 0 if every else time.monotonic() - self.saved > _CHECKPOINT_SECONDS
        if due or force:
            channel, head = self.channel.state(), self.channel.ledger_head
            found = Checkpoint.of(step, state, self.history, self.fingerprint, channel=channel, ledger=head)
            found.write(self.folder.checkpoint)
            state.private.commit()
            self.saved = time.monotonic()

    def finish(self, state: State, step: int, stopped: str) -> Result:
        """The result after the last event."""
        trainer, problem = self.trainer, self.problem
        found = self.evaluate(state, step)
        ids, report = problem.data.ids, self.channel.report
        if self.replicates.count > 1:
            report = replace(report, outside=(OUTSIDE.format(count=self.replicates.count), *report.outside))
        return Result(
            algorithm=trainer.algorithm.name,
            epsilon=self.channel.epsilon,
            privacy=report,
            history=self.history,
            personal=trainer.algorithm.personalize(problem, state, torch.arange(problem.clients)),
            shared=trainer.algorithm.shared(state),
            ids=ids,
            by_client=found.personal.by_client(problem),
            shared_by_client=None if found.shared is None else found.shared.by_client(problem),
            final=self.history[-1],
            stopped=stopped,
            metric=metric_name(problem),
            data_name=problem.data.name,
            module=problem.module,
            folder=None if self.folder is None else self.folder.root,
            replicates=found.runs,
            released=dict(self.channel.on_grid),
            asked=trainer.asked_metrics,
            step="activation" if self.trainer.algorithm.one_at_a_time else "round",
        )


@dataclass(frozen=True)
class Measured:
    """One evaluation.

    Attributes:
        rows: of the history, one for each budget.
        personal, shared: scores by client, of replicate 0.
        runs: a mapping of numbers for each run, where there are several.
    """

    rows: list[dict[str, Any]]
    personal: Metrics
    shared: Metrics | None
    runs: list[dict[str, Any]] | None = None
