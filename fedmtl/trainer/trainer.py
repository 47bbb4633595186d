"""The trainer: one loop for every algorithm. Nothing algorithm-specific lives here."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._check import one_of, positive_int
from ..algorithms.base import Algorithm, AnyAlgorithm, AsyncAlgorithm, Problem, State
from ..data import FederatedDataset
from ..errors import BudgetExhausted, ConfigError, ResumeError
from ..execution import Execution, operation_threads
from ..models import ModelFactory
from ..privacy import Channel, ClientPrivacy, OwnerChannel, Privacy, RecordPrivacy
from ..privacy.channel import Recording
from ..schedules import AsynchronousSchedule
from ..stacked.losses import Loss
from .baselines import named_baselines
from .callbacks import Callback, ProgressBar
from .checkpoint import Checkpoint
from .evaluation import evaluate_personal, evaluate_shared, metric_name, summarize
from .folder import RunFolder
from .problem import build_problem, fingerprint
from .result import Result
from .sources import Schedule, Source, bind_schedule, check_schedule, in_rounds, open_activations, open_cohorts
from .stopping import EarlyStopping

logger = logging.getLogger("fedmtl")
_CHECKPOINT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains one model per client and reports what it cost.

    Args:
        algorithm: :class:`~fedmtl.PMTL`, :class:`~fedmtl.FedAvg`, ...
        data: the clients' data.
        model: a module, or a factory called with the data's :class:`~fedmtl.data.DataSpec`.
        schedule: who takes part in a round; :class:`~fedmtl.PoissonClocks` or :class:`~fedmtl.Latencies` for algorithms
            whose clients act one at a time.
        privacy: :class:`~fedmtl.ClientPrivacy`, whose unit is a client, or :class:`~fedmtl.RecordPrivacy`, whose unit
            is one record of a client (local training is then DP-SGD); ``None`` means no clip and no noise.
        rounds: number of rounds, or most activations where clients act one at a time.
        loss: ``"auto"`` (squared error for real targets, else cross-entropy, logistic for two classes and one output),
            ``"cross_entropy"``, ``"mse"``, ``"half_mse"``, ``"binary_cross_entropy"``, or a function
            (outputs, targets) -> (N,).
        seed: of everything that is not a secret coin: start, batches, dropout; in seeded mode of the coins too.
        folder: where the run is kept; ``None`` keeps nothing, and the ledger is in memory.
        baselines: comparison methods, by name (``"local"``, ``"fedavg"``, ``"fedprox"``, ``"pmtl"``, with this
            algorithm's local solver) or as algorithms; each has its own ledger and is marked as not released.
        client_store: where the clients' own tensors are, ``"memory"`` or ``"mapped"``: in files of the folder, for
            populations larger than memory.
        device: ``"auto"`` takes a GPU when there is one.
        dtype: ``"float32"`` or ``"float64"``, of parameters and computation.
        execution: how client work runs.
        eval_every: rounds between evaluations; ``None`` evaluates about twenty times.
        checkpoint_every: rounds between checkpoints; ``None`` writes one about every twenty seconds.
        early_stopping: ends the run when the shared model has stopped moving; decided by what was released, and
            charged as all the planned rounds.
        callbacks: called around the loop.
        progress: show a progress bar.

    Raises:
        ConfigError: a value outside its range.
    """

    algorithm: AnyAlgorithm
    data: FederatedDataset
    model: nn.Module | ModelFactory
    schedule: Schedule
    privacy: Privacy | None
    rounds: int
    loss: str | Loss = "auto"
    seed: int = 0
    folder: str | Path | None = None
    baselines: Sequence[str | Algorithm] = ()
    client_store: str = "memory"
    device: str = "auto"
    dtype: str = "float32"
    execution: Execution = field(default_factory=Execution)
    eval_every: int | None = None
    checkpoint_every: int | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: Sequence[Callback] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, type) or not isinstance(self.algorithm, (Algorithm, AsyncAlgorithm)):
            raise ConfigError(f"algorithm is {self.algorithm!r}; give an algorithm object such as PMTL(lam=1.0).")
        if self.privacy is not None and not isinstance(self.privacy, (ClientPrivacy, RecordPrivacy)):
            raise ConfigError(f"privacy is {self.privacy!r}; give ClientPrivacy(...), RecordPrivacy(...) or None.")
        check_schedule(self.algorithm, self.schedule, self.privacy)
        positive_int(self, rounds=self.rounds)
        one_of(self, ("float32", "float64"), dtype=self.dtype)
        one_of(self, ("memory", "mapped"), client_store=self.client_store)
        if self.client_store == "mapped" and self.folder is None:
            raise ConfigError("client_store is 'mapped', which needs a folder.")
        for name in ("eval_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                positive_int(self, **{name: getattr(self, name)})
        self.schedule.bind(len(self.data))
        named_baselines(self.baselines, self.algorithm)

    def fit(self, *, resume: bool = False) -> Result:
        """Train, evaluate and save.

        Args:
            resume: continue the run in ``folder`` from its last checkpoint.

        Returns:
            The result, with those of the baselines.

        Raises:
            ResumeError: the folder holds a run and ``resume`` is false, or a run that does not match this one.
        """
        folder = None if self.folder is None else RunFolder(Path(self.folder))
        if folder is None and resume:
            raise ResumeError("There is nothing to resume without a folder.")
        if folder is not None and folder.started and not resume:
            raise ResumeError(f"{folder.root} already holds a run; resume it, or choose another folder.")
        result = self._run(folder, resume)
        comparison = {}
        for name, algorithm in named_baselines(self.baselines, self.algorithm).items():
            place = None if folder is None else folder.baseline(name)
            trainer = replace(
                self,
                algorithm=algorithm,
                baselines=(),
                callbacks=(),
                folder=None if place is None else place.root,
            )
            comparison[name] = trainer._run(place, place is not None and place.started)
        result = replace(result, baselines=comparison)
        if folder is not None:
            folder.write_result(result, self._settings(), self.data)
        return result

    def _run(self, folder: RunFolder | None, resume: bool) -> Result:
        problem = build_problem(
            self.data,
            self.model,
            self.loss,
            self.execution,
            self.rounds,
            self.seed,
            self.device,
            self.dtype,
            store_folder=folder.clients if folder is not None and self.client_store == "mapped" else None,
        )
        cohort = 1.0
        if isinstance(self.schedule, AsynchronousSchedule):
            problem = replace(problem, rounds=min(self.rounds, bind_schedule(self.schedule, problem).steps))
        else:
            cohort = self.schedule.bind(problem.clients).denominator
        with closing(problem.executor), operation_threads(cohort * problem.dimension):
            mark = fingerprint(problem, self.algorithm, self.privacy, self.schedule)
            channel, source = self.open(problem, mark, None if folder is None else folder.ledger, resume)
            if isinstance(channel, Channel):
                problem = replace(problem, records=channel.records)
            with closing(channel):  # also after an interruption: steps that never began return to the budget
                state, step, history = self.algorithm.init(problem), 0, []
                if resume and folder is not None and folder.checkpoint.exists():
                    found = Checkpoint.read(folder.checkpoint, fingerprint=mark)
                    state = found.restore(state, problem.initial.device)
                    step, history = found.step, found.history
                    channel.restore(found.channel)
                channel.start(step)  # also when no round is left to draw
                self._announce(channel)
                callbacks = [*([ProgressBar()] if self.progress else []), *self.callbacks]
                with _notified(callbacks, self.algorithm.name, source.stop, step) as end:
                    run = _Loop(self, problem, channel, source, folder, mark, history, callbacks)
                    state, step, stopped = run.advance(state, step)
                    result = run.finish(state, step, stopped)
                    end.append(result)
        if folder is not None:
            folder.write_run(result, problem)
        return result

    def open(
        self,
        problem: Problem,
        mark: str,
        ledger: Path | None = None,
        resume: bool = False,
        replay: Recording | None = None,
    ) -> tuple[Channel | OwnerChannel, Source]:
        """The way out and the events of a run."""
        kept: dict[str, Any] = {
            "seed": self.seed,
            "fingerprint": mark,
            "ledger_path": ledger,
            "resume": resume,
            "replay": replay,
            "every": self.eval_every,
        }
        if isinstance(self.algorithm, AsyncAlgorithm) and isinstance(self.schedule, AsynchronousSchedule):
            assert not isinstance(self.privacy, ClientPrivacy)
            kept["cuts"] = () if self.checkpoint_every is None else (self.checkpoint_every,)
            return open_activations(self.algorithm, problem, self.schedule, self.privacy, **kept)
        algorithm, schedule = in_rounds(self.algorithm, self.schedule)
        return open_cohorts(algorithm, problem, schedule, self.privacy, **kept)

    def _announce(self, channel: Channel | OwnerChannel) -> None:
        signal = channel.snr()
        if signal is not None:
            logger.log(logging.WARNING if signal.warning else logging.INFO, signal.warning or signal.text())

    def _settings(self) -> dict[str, Any]:
        """What a table of runs shows of the settings."""
        settings: dict[str, Any] = {"seed": self.seed, "planned_rounds": self.rounds, "data": self.data.name}
        if self.privacy is not None:
            settings |= {"clip_norm": self.privacy.initial_norm}
        for name in ("lam", "mu", "delta", "server_lr"):
            if hasattr(self.algorithm, name):
                settings["update" if name == "delta" else name] = getattr(self.algorithm, name)
        return settings


@dataclass
class _Loop:
    """One pass over the events of a run."""

    trainer: Trainer
    problem: Problem
    channel: Channel | OwnerChannel
    source: Source
    folder: RunFolder | None
    fingerprint: str
    history: list[dict[str, Any]]
    callbacks: Sequence[Callback]

    def __post_init__(self) -> None:
        spent = self.history[-1]["time"] if self.history else 0.0
        self.began = time.monotonic() - spent
        self.saved = time.monotonic()

    def advance(self, state: State, step: int) -> tuple[State, int, str]:
        """Run the events from ``step`` on; returns the state, the number of events done, and why it stopped."""
        trainer, stopped = self.trainer, "rounds"
        if self.stops(step):  # it did before the resume
            self.channel.forfeit(step)
            return state, step, "early"
        try:
            for event in self.source.events(step):
                self.source.begin(event)
                state = trainer.algorithm.step(self.problem, state, event, self.channel)  # type: ignore[arg-type]
                last = self.source.last(event)
                step = last.step + 1
                for callback in self.callbacks:
                    callback.on_event(last, state)
                if step % self.source.every == 0 and step < self.source.stop:
                    self.evaluate(state, step)
                if self.stops(step):
                    self.channel.forfeit(step)
                    stopped = "early"
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

    def evaluate(self, state: State, step: int) -> tuple[Tensor, Tensor | None]:
        """Append a row to the history; returns every client's score with its own and with the shared model."""
        problem, algorithm = self.problem, self.trainer.algorithm
        metric, counts = metric_name(problem), problem.data.test.counts
        model = algorithm.shared(state)
        shared = None if model is None else evaluate_shared(problem, model)
        personal = shared if not state.private.fields else None
        personal = personal or evaluate_personal(problem, algorithm, state)
        row: dict[str, Any] = {
            "round": step,
            "time": time.monotonic() - self.began,
            "epsilon": self.channel.epsilon,
            "loss": float(personal.loss.mean()),
            **summarize(personal.score, counts, metric=metric),
        }
        if self.trainer.early_stopping is not None:
            if model is None:
                raise ConfigError(f"early_stopping looks at the shared model, but {algorithm.name} has none.")
            row["distance"] = float((model - problem.initial).norm())
        if shared is not None:
            row |= summarize(shared.score, counts, metric=metric, prefix="global_")
        if self.history and self.history[-1]["round"] == step:  # the budget ended at an evaluated round
            self.history.pop()
        self.history.append(row)
        for callback in self.callbacks:
            callback.on_evaluate(row)
        return personal.score, None if shared is None else shared.score

    def checkpoint(self, state: State, step: int, *, force: bool = False) -> None:
        """Write a checkpoint when one is due."""
        if self.folder is None:
            return
        every = self.trainer.checkpoint_every
        due = step % every == 0 if every else time.monotonic() - self.saved > _CHECKPOINT_SECONDS
        if due or force:
            found = Checkpoint.of(step, state, self.history, self.fingerprint, channel=self.channel.state())
            found.write(self.folder.checkpoint)
            state.private.commit()
            self.saved = time.monotonic()

    def finish(self, state: State, step: int, stopped: str) -> Result:
        """The result after the last event."""
        trainer, problem = self.trainer, self.problem
        own, shared = self.evaluate(state, step)
        ids = problem.data.ids
        return Result(
            algorithm=trainer.algorithm.name,
            epsilon=self.channel.epsilon,
            privacy=self.channel.report,
            history=self.history,
            personal=trainer.algorithm.personalize(problem, state, torch.arange(problem.clients)),
            shared=trainer.algorithm.shared(state),
            personal_accuracy=dict(zip(ids, own.tolist(), strict=True)),
            shared_accuracy=None if shared is None else dict(zip(ids, shared.tolist(), strict=True)),
            final=self.history[-1],
            stopped=stopped,
            metric=metric_name(problem),
            data_name=problem.data.name,
            module=problem.module,
            folder=None if self.folder is None else self.folder.root,
        )


@contextmanager
def _notified(callbacks: Sequence[Callback], name: str, rounds: int, step: int) -> Iterator[list[Result]]:
    """Call on_start now and on_end at the end, also after an interruption; the body appends its result."""
    result: list[Result] = []
    try:
        for callback in callbacks:
            callback.on_start(name, rounds, step)
        yield result
    finally:
        for callback in callbacks:
            callback.on_end(result[0] if result else None)
