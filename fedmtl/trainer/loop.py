"""One pass over the blocks of a run: steps, evaluations, checkpoints."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, State, Tally
from ..errors import BudgetExhausted, ConfigError
from ..privacy import Channel
from ..ranks import Ranks
from ..schedules import Block
from .callbacks import Callback
from .checkpoint import Checkpoint
from .evaluation import Metrics, Panel, constant_loss, evaluate_personal, evaluate_shared, means, metric_name, summarize
from .folder import RunFolder
from .replicates import OUTSIDE, Replicates, bands, each_run, measure_all, numbers_of, objectives, spent_by_run
from .result import Result
from .sources import Source

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger("fedmtl")
_CHECKPOINT_SECONDS = 20.0
_HISTORY_SECONDS = 1.0
_FIRST_ROUNDS = 3
_HOPELESS, _FEW = 0.9, 5  # the share of the local trainings of the first rounds, and fewer of them say nothing
TALLY = "trainings"
"""Under this name a checkpoint has int64 (2, 2): local trainings, and those that diverged; so far, and at the last
evaluation."""


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
    panel: Panel
    ranks: Ranks

    def __post_init__(self) -> None:
        spent = self.history[-1]["time"] if self.history else 0.0
        self.began = time.monotonic() - spent
        self.saved = time.monotonic()
        self.written = -math.inf  # metrics.csv
        self.replicates: Replicates = self.trainer.repeated
        self.groups = self.replicates.groups(self.trainer.privacy)
        self.seen = Tally()  # at the last evaluation
        self.told = 0 if self.problem.tally is None else self.problem.tally.diverged  # when last said

    def advance(self, state: State, step: int) -> tuple[State, int, str]:
        """Run the events from ``step`` on; returns the state, the number of events done, and why it stopped.

        An interruption from the keyboard ends the run after the event, with a checkpoint: a secure run goes on without
        paying twice for what was released.
        """
        with held_interruption() as interrupted:
            reached = self._advance(state, step, interrupted)
        if self.ranks.share(interrupted):
            raise KeyboardInterrupt
        return reached

    def _advance(self, state: State, step: int, interrupted: Callable[[], bool]) -> tuple[State, int, str]:
        stopped = "rounds"
        if self.stops(step):  # it did before the resume
            self.channel.charge_remaining(step)
            return state, step, "early"
        if self.hopeless(step):
            return state, step, "diverged"
        try:
            for block in self.source.blocks(step):
                self.source.begin(block)
                state = self.step(state, block)
                step = block.step + 1
                self._warn_first(step)
                for callback in self.callbacks:
                    callback.on_event(block, state)
                if self.hopeless(step):
                    stopped = "diverged"
                    break
                if step % self.source.every == 0 and step < self.source.stop:
                    self.evaluate(state, step)
                if self.stops(step):
                    self.channel.charge_remaining(step)
                    stopped = "early"
                    break
                ends, due = self.ranks.share(lambda at=step: (interrupted(), self.due(at)))  # type: ignore[misc]
                if ends:
                    break
                if due:
                    self.checkpoint(state, step)
        except BudgetExhausted as spent:
            logger.info("%s", spent)
            stopped = "budget"
        self.checkpoint(state, step)
        return state, step, stopped

    def step(self, state: State, block: Block) -> State:
        """Return the state after a block that is charged."""
        return self.trainer.algorithm.step(self.problem, state, block, self.channel)

    def stops(self, step: int) -> bool:
        """Whether the run ends here because of the row that the history has of this step."""
        rule = self.trainer.early_stopping
        fresh = rule is not None and bool(self.history) and self.history[-1]["round"] == step < self.source.stop
        return fresh and rule is not None and rule.stops(self.history)

    def hopeless(self, step: int) -> bool:
        """Whether nearly all local trainings of the first rounds diverged, of a run without noise that has rounds left:
        how long a private one is says nothing about the data."""
        if not (0 < step <= _FIRST_ROUNDS and step < self.source.stop and self.trainer.noiseless):
            return False
        tally = self.tally()
        return tally is not None and tally.trained >= _FEW and tally.diverged >= _HOPELESS * tally.trained

    def evaluate(self, state: State, step: int) -> Measured:
        """Append what was measured to the history: a row, or one for each budget where there are replicates."""
        found = self._measure_one(state) if self.replicates.count == 1 else self._measure_all(state)
        before = 0
        while self.history and self.history[-1]["round"] == step:  # the budget ended at an evaluated round
            before = self.history.pop().get("diverged_trainings", 0)
        when = self.ranks.share(lambda: time.monotonic() - self.began)
        lost = self._lost(step, found, before)
        for row in found.rows:
            self.history.append({"round": step, "time": when} | row | lost)
            for callback in self.callbacks:
                callback.on_evaluate(self.history[-1])
        if self.folder is not None and self.ranks.first and time.monotonic() - self.written > _HISTORY_SECONDS:
            self.folder.write_history(self.history)
            self.written = time.monotonic()
        return found

    def _warn_first(self, step: int) -> None:
        """Say at once when local training diverges for the first time, and not only at the next evaluation."""
        tally = self.problem.tally
        if tally is not None and tally.diverged and not self.told and self.ranks.first:
            self.told = tally.diverged
            logger.warning(
                "%s, %s %d: %d of %d local trainings diverged: their models are not finite, count as zero in what is "
                "sent, and are not kept; a smaller learning rate may help",
                self.trainer.algorithm.name, self.step_name, step, tally.diverged, tally.trained,
            )  # fmt: skip

    def _lost(self, step: int, found: Measured, before: int) -> dict[str, int]:
        """Return, and say, how many local trainings diverged since the last evaluation (beside ``before`` of this
        round), and how many clients' own models have no finite loss, where any do."""
        tally, counts = self.tally(), {}
        if tally is None:
            return {}
        lost, trained = before + tally.diverged - self.seen.diverged, tally.trained - self.seen.trained
        losses = found.personal.loss[self.panel.problem.data.test.counts > 0]
        diverged = int((~torch.isfinite(losses)).sum())
        where = f"{self.trainer.algorithm.name}, {self.step_name} {step}"
        if lost:
            counts["diverged_trainings"] = lost
            if tally.diverged > self.told and self.ranks.first:
                logger.warning("%s: %d of the last %d local trainings diverged", where, lost, trained)
            self.told = tally.diverged
        if diverged:
            counts["diverged_clients"] = diverged
            text = "%s: the loss of %d of %d clients' own models is not finite"
            if self.ranks.first:
                logger.warning(text, where, diverged, losses.shape[-1])
        self.seen = replace(tally)
        return counts

    def tally(self) -> Tally | None:
        """Return the local trainings of all ranks; None where they are not counted."""
        own = self.problem.tally
        if own is None:
            return None
        each = self.ranks.gather((own.trained, own.diverged))
        return Tally(*(sum(counts) for counts in zip(*each, strict=True)))

    @property
    def step_name(self) -> str:
        return "activation" if self.trainer.algorithm.one_at_a_time else "round"

    def _measure_one(self, state: State) -> Measured:
        problem, algorithm, metrics = self.problem, self.trainer.algorithm, self.trainer.further_metrics
        panel, model = self.panel, algorithm.shared(state)
        shared = None if model is None else evaluate_shared(panel.problem, model, metrics=metrics)
        personal = shared if self._is_everyones(model, state) else None
        personal = personal or evaluate_personal(problem, algorithm, state, metrics=metrics, clients=panel.clients)
        if type(algorithm).objective is not Algorithm.objective:
            state = State(state.public, problem.gathered(state.private))
        row = problem.ranks.share(lambda: self._row(state, personal, shared, model))
        return Measured([row], personal, shared)

    def _is_everyones(self, model: Tensor | None, state: State) -> bool:
        """Return whether the personal models are the shared one, as a view of it, so that it is scored once."""
        if model is None or state.private.fields:
            return False
        rows = self.trainer.algorithm.personalize(self.problem, state, self.panel.clients[:2])
        return (len(rows) == 1 or rows.stride(0) == 0) and torch.equal(rows[0], model.to(rows))

    def _row(self, state: State, personal: Metrics, shared: Metrics | None, model: Tensor | None) -> dict[str, Any]:
        problem, algorithm = self.problem, self.trainer.algorithm
        row: dict[str, Any] = {"epsilon": self.channel.epsilon} | numbers_of(self.panel.problem, personal)
        row |= {name: float(value) for name, value in objectives(problem, algorithm, state).items()}
        row |= self.distance(model)
        if shared is not None:
            row |= summarize(shared.score, shared.weight, metric=metric_name(problem), prefix="global_")
            row |= means(shared, "global_")
        return row

    def distance(self, model: Tensor | None) -> dict[str, float]:
        """Return how far the shared model has moved, where early stopping asks for it."""
        if self.trainer.early_stopping is None:
            return {}
        if model is None:
            raise ConfigError(f"early_stopping looks at the shared model, but {self.trainer.algorithm.name} has none.")
        return {"distance": float((model - self.problem.initial).norm())}

    def _measure_all(self, state: State) -> Measured:
        problem, algorithm, metrics = self.problem, self.trainer.algorithm, self.trainer.further_metrics
        columns, first = measure_all(problem, algorithm, state, metrics)
        spent = spent_by_run(self.channel, self.replicates.count)
        rows = [
            {"budget": row.pop("budget"), "epsilon": float(spent[members].max())} | row
            for row, (_, members) in zip(bands(columns, self.groups), self.groups, strict=True)
        ]
        return Measured(rows, first, None, each_run(columns, self.groups))

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due."""
        every = self.trainer.checkpoint_every
        return step % every == 0 if every else time.monotonic() - self.saved > _CHECKPOINT_SECONDS

    def checkpoint(self, state: State, step: int) -> None:
        """Write a checkpoint, at all ranks together: each writes what its clients keep, then the first one the rest."""
        if self.folder is None:
            return
        tally, place = self.tally(), self.folder.clients
        with self.ranks.agree():
            own = state.private.save(place, step)  # is on the disk before the checkpoint is
        files = {file: length for each in self.ranks.gather(own) for file, length in each.items()}

        def write() -> None:
            channel, head = self.channel.state(), self.channel.sync()
            if tally is not None:
                counts = [[tally.trained, tally.diverged], [self.seen.trained, self.seen.diverged]]
                channel = channel | {TALLY: torch.tensor(counts)}
            found = Checkpoint(step, dict(state.public), files, self.history, self.fingerprint, channel, head)
            assert self.folder is not None
            found.write(self.folder.checkpoint)

        self.ranks.share(write)
        state.private.commit(place, files)
        self.saved = time.monotonic()

    def models(self, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the personal models (n, D), and their parts by name; only the models (k, D) of clients that were
        drawn for evaluation."""
        problem, algorithm, panel = self.problem, self.trainer.algorithm, self.panel
        if self._is_everyones(algorithm.shared(state), state):
            personal = algorithm.personalize(problem, state, panel.clients)
        else:
            personal = problem.spread(lambda own: algorithm.personalize(problem, state, own), panel.clients)
        if panel.drawn or type(algorithm).parts is Algorithm.parts:
            return personal, {}
        whole = State(state.public, problem.gathered(state.private))
        return personal, algorithm.parts(problem, whole, personal)

    def _untrained(self, state: State) -> tuple[str, ...]:
        """Return the ids of the evaluated clients that keep the model they started from: all their local trainings
        diverged."""
        store, clients = state.private, self.panel.clients
        if not {"seen", "trained"} <= set(store.fields):
            return ()
        lost = self.problem.spread(lambda ids: store.gather("seen", ids) & ~store.gather("trained", ids), clients)
        return tuple(self.problem.data.ids[client] for client in clients[lost.cpu()].tolist())

    def finish(self, state: State, step: int, stopped: str) -> Result:
        """The result after the last event."""
        trainer, problem, panel, ranks = self.trainer, self.problem, self.panel, self.ranks
        found, tally = self.evaluate(state, step), self.tally()
        ids = problem.data.ids
        report, epsilon, released = ranks.share(
            lambda: (self.channel.report, self.channel.epsilon, dict(self.channel.on_grid))
        )
        personal, parts = self.models(state)
        if self.replicates.count > 1:
            report = replace(report, outside=(OUTSIDE.format(count=self.replicates.count), *report.outside))
        return Result(
            algorithm=trainer.algorithm.name,
            epsilon=epsilon,
            privacy=report,
            history=self.history,
            personal=personal,
            parts=parts,
            shared=trainer.algorithm.shared(state),
            ids=ids,
            by_client=found.personal.by_client(panel.problem),
            shared_by_client=None if found.shared is None else found.shared.by_client(panel.problem),
            final=self.history[-1],
            stopped=stopped,
            metric=metric_name(problem),
            data_name=problem.data.name,
            module=problem.module,
            folder=None if self.folder is None else self.folder.root,
            replicates=found.runs,
            released=released,
            asked=trainer.asked_metrics,
            trained=tally is None or not 0 < tally.trained == tally.diverged,
            untrained=self._untrained(state),
            step=self.step_name,
            evaluated=panel.ids,
            tested=panel.population,
            constant=constant_loss(panel.problem),
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
