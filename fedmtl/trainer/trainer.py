"""The trainer: one loop for every algorithm. Nothing algorithm-specific lives here."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._check import one_of, positive_int
from ..algorithms.base import Algorithm, Problem, State, Tally
from ..algorithms.finetune import Finetune
from ..algorithms.local import Local
from ..algorithms.local_fit import LocalFit
from ..data import FederatedDataset
from ..errors import ConfigError, ResumeError, TrainingError
from ..local import Execution, operation_threads
from ..models import ModelFactory
from ..privacy import Channel, ClientPrivacy, FullParticipation, NoiseSource, Privacy, RecordPrivacy
from ..privacy.channel import Recording
from ..ranks import ALONE, Ranks
from ..schedules import AsynchronousSchedule
from ..stacked.losses import Loss
from .baselines import named_baselines
from .callbacks import Callback, ProgressBar
from .checkpoint import Checkpoint
from .evaluation import Panel, try_metrics
from .finetuning import check_finetune, finetuned, held_out
from .folder import RunFolder
from .inputs import as_callbacks, as_data, as_execution, as_folder, as_model, check_declared, check_kinds
from .loop import TALLY, Loop
from .metrics import Metric, MetricFunction, resolve_metrics, usual_metrics
from .new_clients import Terms
from .problem import build_problem, coded_for, describe, fingerprint, resolve_device, share_beyond
from .replicates import Replicates, chosen
from .result import Result
from .sources import Schedule, Source, bind_schedule, check_schedule, open_run
from .stopping import EarlyStopping

logger = logging.getLogger("fedmtl")


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains one model per client and reports what it cost.

    Args:
        algorithm: :class:`~fedmtl.PMTL`, :class:`~fedmtl.FedAvg`, ...
        data: the clients' data: a dataset, the name of one (``"digits"``), or a mapping from client to a pair (x, y) or
            torch Dataset, of which a fifth is for test. Floating targets 0 and 1, or -1 and +1, are two classes under a
            logistic or hinge loss.
        model: a module, a factory called with the data's :class:`~fedmtl.data.DataSpec`, or the name of one
            (``"mlp"``).
        schedule: who takes part in a round; :class:`~fedmtl.PoissonClocks` or :class:`~fedmtl.Latencies` for algorithms
            whose clients act one at a time.
        privacy: :class:`~fedmtl.ClientPrivacy`, whose unit is a client, or :class:`~fedmtl.RecordPrivacy`, whose unit
            is one record of a client (local training is then DP-SGD, but for :class:`~fedmtl.Local`, which sends
            nothing); ``None`` means no clip and no noise.
        rounds: number of rounds, or most activations where clients act one at a time.
        trainable: names of the model's parameters or modules that are trained, such as ``("head",)`` or
            ``("*.lora_B",)``; ``*``, ``?`` and ``[...]`` stand for what they do in names of files. All others are
            frozen and public as they were given: they are not trained, clipped, sent, noised or kept by clients, and
            are in every model of the result. ``None`` trains those with ``requires_grad``.
        loss: ``"auto"`` (squared error for real targets, else cross-entropy, logistic for two classes and one output),
            ``"cross_entropy"``, ``"mse"``, ``"half_mse"``, ``"binary_cross_entropy"``, or a function
            (outputs, targets) -> (N,).
        seed: of everything that is not a secret coin: start, batches, dropout; in seeded mode of the coins too.
        folder: where the run is kept; ``None`` keeps nothing, and the ledger is in memory.
        baselines: comparison methods, by name (``"local"``, ``"fedavg"``, ``"fedprox"``, ``"pmtl"``, ``"ditto"``,
            ``"pfedme"``, ``"apfl"``, ``"ppsgd"``, ``"fedrep"``, ``"fedper"``, with this algorithm's local solver) or as
            algorithms; each has its own ledger and is marked as not released.
        finetune: how every client goes on after the run with a released or its personal model, on its own data;
            ``None`` does not. The finetuned models are the personal models of the result and cost no epsilon, since
            nothing is sent. Baselines are finetuned, too, except local training.
        client_store: where the clients' own tensors are between checkpoints, ``"memory"`` or ``"mapped"``: in files of
            the folder alone, for populations larger than memory.
        device: ``"auto"`` takes a GPU when there is one. Algorithms that compute in NumPy are on the CPU in any case.
        dtype: ``"float32"`` or ``"float64"``, of parameters and computation.
        execution: how client work runs.
        eval_every: rounds between evaluations; ``None`` evaluates about twenty times.
        evaluate_clients: how many clients are evaluated, of a large population: a sample of those that have test
            examples, drawn by the seed, the same at every evaluation and for every baseline. Means are then estimates,
            printed with their standard error, and the result has the models and scores of these clients alone.
            ``None`` evaluates all.
        checkpoint_every: rounds between checkpoints; ``None`` writes one about every twenty seconds.
        early_stopping: ends the run when the shared model has stopped moving; decided by what was released, and
            charged as all the planned rounds.
        replicates: R repetitions, each with its own schedule and noise, computed as one batched program by algorithms
            that can; the history then has means and percentiles, and everything else is of the first repetition. The
            data and their split are the same in all. An epsilon is that of one run.
        epsilons: budgets, each with R repetitions of its own, in place of the ``epsilon`` of ``privacy``.
        metrics: what is measured beside the loss and the main metric (accuracy, mean squared error, or recall at 5 for
            more than 5 labels an example), by name: ``"auc"``, ``"auc_micro"``, ``"f1"``, ``"balanced_accuracy"``,
            ``"accuracy"``, ``"recall_at_5"``, ``"rmse"``, ``"mae"``, ``"nmse"``, ..., see
            :mod:`fedmtl.trainer.metrics`; or a function ``metric(outputs, targets) -> float`` of the outputs and
            targets (N, ...) of one client's test rows, on the CPU, whose name is its column. Where less is better it
            has an attribute ``higher_is_better = False``. NaN, or an error at a client, leaves the client out of the
            mean.
        callbacks: called around the loop.
        progress: show a progress bar.

    Raises:
        ConfigError: a value outside its range.
    """

    algorithm: Algorithm
    data: FederatedDataset  # what else is accepted becomes one
    model: nn.Module | ModelFactory
    schedule: Schedule
    privacy: Privacy | None
    rounds: int
    trainable: Sequence[str] | None = None
    loss: str | Loss = "auto"
    seed: int = 0
    folder: str | Path | None = None
    baselines: Sequence[str | Algorithm] = ()
    finetune: Finetune | None = None
    client_store: str = "memory"
    device: str = "auto"
    dtype: str = "float32"
    execution: Execution = field(default_factory=Execution)
    eval_every: int | None = None
    evaluate_clients: int | None = None
    checkpoint_every: int | None = None
    early_stopping: EarlyStopping | None = None
    replicates: int = 1
    epsilons: Sequence[float] | None = None
    metrics: Sequence[str | MetricFunction] = ()
    callbacks: Sequence[Callback] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, type) or not isinstance(self.algorithm, Algorithm):
            raise ConfigError(f"algorithm is {self.algorithm!r}; give an algorithm object such as PMTL(lam=1.0).")
        if self.privacy is not None and not isinstance(self.privacy, (ClientPrivacy, RecordPrivacy)):
            raise ConfigError(f"privacy is {self.privacy!r}; give ClientPrivacy(...), RecordPrivacy(...) or None.")
        check_kinds(self.algorithm, self.early_stopping, self.seed)
        given: dict[str, Any] = {"data": coded_for(as_data(self.data), self.algorithm, self.loss)}
        given |= {"model": as_model(self.model), "folder": as_folder(self.folder)}
        given |= {"callbacks": as_callbacks(self.callbacks), "execution": as_execution(self.execution)}
        given |= {"seed": int(self.seed)}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        check_schedule(self.algorithm, self.schedule, self.privacy)
        positive_int(self, rounds=self.rounds, replicates=self.replicates)
        one_of(self, ("float32", "float64"), dtype=self.dtype)
        one_of(self, ("memory", "mapped"), client_store=self.client_store)
        if self.client_store == "mapped" and self.folder is None:
            raise ConfigError("client_store is 'mapped', which needs a folder.")
        for name in ("eval_every", "evaluate_clients", "checkpoint_every"):
            if getattr(self, name) is not None:
                positive_int(self, **{name: getattr(self, name)})
        if isinstance(self.schedule, AsynchronousSchedule):
            self.schedule.bind(len(self.data), names=self.data.ids)
        else:
            self.schedule.bind(len(self.data))
        named_baselines(self.baselines, self.algorithm)
        self.repeated.check(self.algorithm, self.privacy, self.early_stopping, self.baselines, self.evaluate_clients)
        check_declared(self.data, self.privacy, self.repeated.epsilons)
        check_finetune(self.finetune, self.algorithm, self.repeated.count)
        resolve_metrics(self.metrics, self.data.spec, self.data.name)

    @property
    def asked_metrics(self) -> tuple[Metric, ...]:
        """The metrics by name and function."""
        return resolve_metrics(self.metrics, self.data.spec, self.data.name)

    @property
    def further_metrics(self) -> tuple[Metric, ...]:
        """Those of them that are not measured in any case."""
        return tuple(one for one in self.asked_metrics if one.name not in usual_metrics(self.data.spec))

    @property
    def repeated(self) -> Replicates:
        """The repetitions and their budgets."""
        return Replicates(self.replicates, self.epsilons)  # type: ignore[arg-type]

    @property
    def protects_records(self) -> bool:
        """Whether the protected unit is one record, in rounds, and something is sent: local training is then DP-SGD."""
        sends = not self.algorithm.one_at_a_time and not isinstance(self.algorithm, Local)
        return sends and isinstance(self.privacy, RecordPrivacy)

    @property
    def noiseless(self) -> bool:
        """Whether no repetition has noise, so that nothing is protected."""
        privacies = self.repeated.privacies(self.privacy)
        each = privacies if isinstance(privacies, tuple) else (privacies,)
        return all(one is None or one.noiseless for one in each)

    def problem(
        self,
        *,
        data: FederatedDataset | None = None,
        device: str | None = None,
        ranks: Ranks = ALONE,
    ) -> Problem:
        """Return the problem of a run; close its executor.

        Args:
            data, device: in place of the trainer's.
            ranks: the processes that compute the run.
        """
        data = self.data if data is None else data
        self.algorithm.check_data(data)
        place = self.device if device is None else device
        if self.algorithm.on_host:
            resolve_device(place, ranks)  # refuses one that is not there
            place = "cpu"
        return build_problem(
            data,
            self.model,
            self.loss,
            self.execution,
            self.rounds,
            self.seed,
            place,
            self.dtype,
            rows_in_files=self.client_store == "mapped",
            protects_records=self.protects_records,
            trainable=self.trainable,
            ranks=ranks,
        )

    def resolved(self, problem: Problem) -> Trainer:
        """This trainer with what its algorithm chooses from public rows and bounds (``"auto"``) filled in."""
        bound = bind_schedule(self.schedule, problem) if isinstance(self.schedule, AsynchronousSchedule) else None
        return replace(
            self, algorithm=self.algorithm.resolve_auto(problem, bound, self.repeated.privacies(self.privacy))
        )

    def first_run(self) -> Trainer:
        """The first repetition at the first epsilon, as a run of its own, without baselines and folder."""
        first = replace(self.repeated, repetitions=1, epsilons=self.repeated.epsilons and self.repeated.epsilons[:1])
        privacy = first.privacies(self.privacy)
        return replace(self, replicates=1, epsilons=None, privacy=privacy, baselines=(), folder=None)

    def fit(self, *, resume: bool = False, ranks: Ranks | None = None) -> Result:
        """Train, evaluate and save.

        Args:
            ranks: the processes that compute the run together, each of which calls this; None for those that torchrun
                started, or of the program's process group. ``Ranks()`` is this process alone.
            resume: continue the run in ``folder`` from its last checkpoint. Of a run in secure mode resume one copy
                of the folder alone: every copy would release under the same charges.

        Returns:
            The result, with those of the baselines; the same at every rank, of which the first alone writes.

        Raises:
            ResumeError: the folder holds a run and ``resume`` is false, or a run that does not match this one, whose
                ledger was altered or rolled back.
            PrivacyError: a run in secure mode on a system without file locks.
            TrainingError: of a run without noise, that not one finite number was learned, or that nearly all local
                trainings of its first rounds diverged, after which it stops at once; such a baseline is left out. In a
                run with noise what is not finite counts as zero in a release, and it ends in any case with its result,
                whose :attr:`Result.lost` says so: how long it is, how it ends and which files can be published say
                nothing about the data.
        """
        ranks = Ranks.of_launch() if ranks is None else ranks
        if not isinstance(ranks, Ranks):
            raise ConfigError(f"ranks is {ranks!r}; give None, for the processes that torchrun started, or Ranks().")
        folder = None if self.folder is None else RunFolder(Path(self.folder))
        with ranks.agree():
            self._check_ranks(ranks)
            if folder is None and resume:
                raise ResumeError("There is nothing to resume without a folder.")
            if folder is not None and ranks.first and folder.started and not resume:
                raise ResumeError(f"{folder.root} already holds a run; resume it, or choose another folder.")
        result = self._run(folder, resume, ranks=ranks)
        if result.lost and self.noiseless:
            raise TrainingError(result.lost)
        comparison = {}
        for name, algorithm in named_baselines(self.baselines, self.algorithm).items():
            place = None if folder is None else folder.baseline(name)
            trainer = replace(
                self,
                algorithm=algorithm,
                baselines=(),
                callbacks=(),
                folder=None if place is None else place.root,
                **self._without_release(algorithm),
            )
            started = ranks.share(lambda place=place: place is not None and place.started)  # type: ignore[misc]
            found = trainer._run(place, started, ranks=ranks)
            if found.lost:
                logger.warning("the baseline is left out: %s", found.lost)
            else:
                comparison[name] = found
        result = replace(result, baselines=comparison)

        def write() -> None:
            if folder is not None:
                folder.write_result(result, self._settings(result.module), self.data)
                folder.write_lists()

        ranks.share(write)
        return result

    def _check_ranks(self, ranks: Ranks) -> None:
        """Refuse what needs a single process.

        Raises:
            ConfigError: a run whose clients act one at a time, or one with several replicates.
        """
        if ranks.size == 1:
            return
        single = f"needs one process, and {ranks.size} were started. Start it without torchrun"
        if self.repeated.count > 1:
            raise ConfigError(f"A run with {self.repeated.count} replicates {single}.")
        if self.algorithm.one_at_a_time:
            raise ConfigError(
                f"{self.algorithm.name} has clients that act one at a time, each after the one before: a run of it "
                f"{single}."
            )

    def _without_release(self, baseline: Algorithm) -> dict[str, Any]:
        """What changes for a baseline that releases nothing: no model to stop by, and, where each client fits its
        data once, no schedule, no privacy and no budgets."""
        if not isinstance(baseline, LocalFit):
            return {"early_stopping": None, "finetune": None} if isinstance(baseline, Local) else {}
        return {
            "early_stopping": None,
            "finetune": None,
            "schedule": FullParticipation(),
            "privacy": None,
            "epsilons": None,
            "rounds": 1,
            "eval_every": None,
        }

    def _run(
        self, folder: RunFolder | None, resume: bool, coins: NoiseSource | None = None, ranks: Ranks = ALONE
    ) -> Result:
        """One run, without baselines.

        Args:
            folder: where it is kept, if anywhere.
            resume: continue the run there.
            coins: where the noise and the cohorts come from, in place of the seed; all that is public stays that of the
                seed, and nothing is logged.
            ranks: the processes that compute it.
        """
        with ranks.agree():
            problem = self.problem(ranks=ranks)
        cohort, products = 1.0, math.inf
        if isinstance(self.schedule, AsynchronousSchedule):
            products = problem.clients * problem.dimension
            problem = replace(problem, rounds=min(self.rounds, bind_schedule(self.schedule, problem).steps))
        else:
            cohort = self.schedule.bind(problem.clients).denominator
        with closing(problem.executor), operation_threads(cohort * problem.dimension, products):
            resolved = self.resolved(problem)
            divided = problem.ranks.size > 1
            if divided and resolved.algorithm.all_at_once and resolved.algorithm.row_bound(problem) is None:
                raise ConfigError(
                    f"{self.algorithm.name} takes its step size from the records of all clients where there is no "
                    f"bound on rows; over several ranks give one, as algorithm.row_norm=1.0."
                )
            bound = resolved.algorithm.row_bound(problem)
            shortened = share_beyond(problem.data, bound)
            if bound is not None:  # records are scored as they are trained on
                problem = replace(problem, data=problem.data.bounded(bound))
            data, validation = held_out(problem.data, self.finetune)
            problem = replace(problem, data=data)
            panel = Panel.draw(problem, self.evaluate_clients)
            if validation is not None and panel.drawn:
                validation = validation.subset(panel.clients.tolist())
            if self.finetune is not None:
                self.finetune.check(problem)  # before anything is charged
            self._check_baselines(problem)
            try_metrics(problem, self.further_metrics)
            result = resolved._follow(problem, panel, folder, resume, coins, ranks)
            if self.finetune is not None:
                result = finetuned(result, panel.problem, self.finetune, validation, self.privacy, self.further_metrics)
        result = replace(
            result,
            chosen=chosen(self.algorithm, resolved.algorithm, self.repeated),
            bound=bound,
            shortened=shortened,
            terms=Terms(
                self.algorithm, self.loss, self.finetune, tuple(self.metrics), self.seed, self.dtype, self.trainable
            ),
        )
        if folder is not None:
            ranks.share(lambda: folder.write_run(result, problem, self.model))
        return result

    def _check_baselines(self, problem: Problem) -> None:
        """Refuse a baseline that cannot train this model before the run begins, not after it."""
        for name, baseline in named_baselines(self.baselines, self.algorithm).items():
            if isinstance(baseline, LocalFit) or isinstance(self.schedule, AsynchronousSchedule):
                continue
            try:
                baseline.plan(problem, self.schedule.bind(problem.clients))
            except ConfigError as error:
                raise ConfigError(f"baselines has {name!r}, which cannot be run here: {error}") from error

    def _follow(
        self,
        problem: Problem,
        panel: Panel,
        folder: RunFolder | None,
        resume: bool,
        coins: NoiseSource | None = None,
        ranks: Ranks = ALONE,
    ) -> Result:
        """The run of a trainer whose automatic settings are resolved."""
        repeated = self.repeated
        if folder is not None:
            ranks.share(folder.make)
        if resume and folder is not None:
            ranks.share(folder.check_ledger)
        mark = fingerprint(problem, self.algorithm, self.privacy, self.schedule, repeated, coins)
        channel, source = self.open(problem, mark, None if folder is None else folder.ledger, resume, coins=coins)
        with closing(channel):  # also after an interruption: steps that never began return to the budget
            step, history, tally, checkpoint = 0, [], torch.zeros(2, 2, dtype=torch.int64), None
            if resume and folder is not None:
                checkpoint = ranks.share(lambda: self._checkpoint(folder, mark))
            state = self.start(problem)
            if checkpoint is not None:
                assert folder is not None
                step, history = checkpoint.step, checkpoint.history
                tally = checkpoint.channel.pop(TALLY, tally)
                tally[0] *= int(ranks.first)  # of all ranks together
                state.public = {name: tensor.to(problem.initial.device) for name, tensor in checkpoint.public.items()}
                with ranks.agree():
                    state.private.load(folder.clients, checkpoint.clients)
                channel.restore(checkpoint.channel)
            channel.start(step)  # also when no round is left to draw
            if coins is None:
                if ranks.first:
                    self._announce(channel)
                problem = replace(problem, tally=Tally(*tally[0].tolist()))
            callbacks = [*([ProgressBar()] if self.progress else []), *self.callbacks] if ranks.first else []
            with _notified(callbacks, self.algorithm.name, source.stop, step) as end:
                run = self.loop(self, problem, channel, source, folder, mark, history, callbacks, panel, ranks)
                run.seen = Tally(*tally[1].tolist())
                state, step, stopped = run.advance(state, step)
                result = run.finish(state, step, stopped)
                end.append(result)
        return replace(result, privacy=ranks.share(lambda: result.privacy.with_ledger(channel.account.ledger)))

    @staticmethod
    def _checkpoint(folder: RunFolder, mark: str) -> Checkpoint | None:
        return Checkpoint.read(folder.checkpoint, fingerprint=mark) if folder.checkpoint.exists() else None

    def start(self, problem: Problem) -> State:
        """The state before the first event, of all repetitions."""
        return self.algorithm.init(problem, self.repeated.count)

    def loop(self, *parts: Any) -> Loop:
        """The loop of a run, from the fields of :class:`Loop`."""
        return Loop(*parts)

    def open(
        self,
        problem: Problem,
        mark: str,
        ledger: Path | None = None,
        resume: bool = False,
        replay: Recording | None = None,
        coins: NoiseSource | None = None,
        **options: Any,
    ) -> tuple[Channel, Source]:
        """The channel and the events of a run; ``options`` are those of :func:`~fedmtl.privacy.open_channel`."""
        repeated = self.repeated
        kept: dict[str, Any] = options | {
            "seed": self.seed,
            "fingerprint": mark,
            "ledger_path": ledger if repeated.count == 1 else None,  # simulations are in memory
            "resume": resume,
            "replay": replay,
            "every": self.eval_every,
        }
        if repeated.count > 1:
            kept["replicates"] = repeated.count
        if self.checkpoint_every is not None:
            kept["cuts"] = (self.checkpoint_every,)
        privacy = repeated.privacies(self.privacy)
        return open_run(self.algorithm, problem, self.schedule, privacy, source=coins, **kept)

    def _announce(self, channel: Channel) -> None:
        signal = channel.snr()
        if signal is not None:
            level = logging.WARNING if signal.warning else logging.INFO
            logger.log(level, "%s: %s", self.algorithm.name, signal.warning or signal.text())

    def _settings(self, module: nn.Module | None) -> dict[str, Any]:
        """What a table of runs shows of the settings, and what tells its runs apart."""
        settings: dict[str, Any] = {"seed": self.seed, "planned_rounds": self.rounds, "data": self.data.name}
        settings |= {"data_fingerprint": self.data.fingerprint()}
        if self.privacy is not None:
            settings |= {"clip_norm": self.privacy.initial_norm}
        if self.repeated.count > 1:
            settings |= {"repetitions": self.replicates}
        for name in ("lam", "mu", "delta", "server_lr"):
            if name in vars(self.algorithm):
                settings["update" if name == "delta" else name] = vars(self.algorithm)[name]
        return settings | {"configuration": self._configuration(module)}

    def _configuration(self, module: nn.Module | None) -> dict[str, Any]:
        """All settings that tell one experiment from another, as far as they are known without the data."""
        names = ("algorithm", "schedule", "privacy", "rounds", "trainable", "loss", "finetune", "dtype")
        given = {name: describe(getattr(self, name)) for name in (*names, "early_stopping")}
        assert module is not None  # which only results that were loaded can lack
        size = sum(parameter.numel() for parameter in module.parameters())
        return given | {"model": {"class": type(module).__name__, "parameters": size, "layers": repr(module)}}


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
