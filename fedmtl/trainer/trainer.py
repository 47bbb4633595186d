"""The trainer: the settings of a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..algorithms.base import Algorithm, Problem
from ..algorithms.finetune import usual_of_linear_numbers
from ..algorithms.linear.data import is_linear
from ..algorithms.local_only import Local
from ..algorithms.noise_level import noise_of
from ..contrib.automatic import automatic
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local.executor import resolve_device
from ..models.build import build_module
from ..privacy import BoundSampler, Privacy, RecordPrivacy, Sampler
from ..ranks import SINGLE, Ranks
from ..schedules import AsynchronousSchedule, BoundBuffered, BoundSchedule, Buffered, Deadline
from .baselines import has_tuned_local, named_baselines, usual_baselines
from .check import unscaled
from .engine import Engine
from .fit import run_in_claimed_folder
from .make_problem import ProblemSettings, build_problem, coded_for
from .metrics import Metric, resolve_metrics
from .personalize import usual_finetuning
from .result import Result
from .run_channel import bind_schedule
from .run_settings import Settings
from .setting_checks import check_declared, check_loss
from .trainer_arguments import AUTO, as_data, as_model, is_auto

logger = logging.getLogger("fedmtl")


@dataclass(frozen=True, kw_only=True)
class Trainer(Settings):
    """Trains one model per client and reports the epsilon that it cost.

    Args:
        algorithm: :class:`~fedmtl.PMTL`, :class:`~fedmtl.FedAvg`, ...; ``"auto"`` chooses it by
            public facts, for linear models and for networks of classes
            (:func:`~fedmtl.contrib.automatic.automatic`), and also ``model``, ``schedule``,
            ``rounds``, ``finetune`` and the clip norm of ``privacy`` unless they are given.
        data: the clients' data: a dataset, the name of one (``"digits"``), or a mapping from client
            to a pair (x, y) or torch Dataset, a fifth of which is held out for test; or a function
            without arguments that returns one of these, which is called once all settings are
            checked that need no data. With a logistic or hinge loss floating targets 0 and 1, or -1
            and +1, are two classes.
        model: a module, a factory called with the data's :class:`~fedmtl.data.DataSpec`, or the
            name of one (``"mlp"``).
        schedule: the law of the cohorts; :class:`~fedmtl.PoissonClocks` or
            :class:`~fedmtl.Latencies` for algorithms whose clients act one at a time.
        privacy: :class:`~fedmtl.ClientPrivacy`, whose unit is a client, or
            :class:`~fedmtl.RecordPrivacy`, whose unit is one record of a client (local training is
            then DP-SGD, except with :class:`~fedmtl.Local`, which sends nothing); ``None`` means no
            clip and no noise.
        rounds: number of rounds, or the largest number of activations if clients act one at a time.
        trainable: names of the model's parameters or modules that are trained, such as
            ``("head",)`` or ``("*.lora_B",)``, with ``*``, ``?`` and ``[...]`` as in names of
            files. All others are frozen and public: they keep the values of ``model`` and are not
            clipped, sent, noised or kept by clients. ``None`` trains those with ``requires_grad``.
        loss: ``"auto"`` (squared error for real targets, else cross-entropy, logistic for two
            classes and one output), ``"cross_entropy"``, ``"mse"``, ``"half_mse"``,
            ``"binary_cross_entropy"``, of real targets also ``"huber:DELTA"``, ``"quantile:LEVEL"``
            and ``"poisson"`` (of counts; outputs are logarithms of means), or a function (outputs,
            targets) -> (N,).
        seed: of the starting point, the batches and dropout; in seeded mode also of the cohorts and
            the noise.
        folder: in which the run is saved, with the tensors that clients keep; ``None`` keeps these
            tensors and the ledger in memory, and saves nothing.
        baselines: comparison methods, by name (``"local"``, ``"pmtl"``, or a method with one shared
            model, such as ``"fedavg"`` or ``"ditto"``, with this algorithm's local solver) or as
            algorithms; ``"auto"`` takes local training with FedAvg or PMTL, for linear models the
            exact fit alone, of several runs none. Each has its own ledger and is marked as not
            released. With automatic settings, and for linear models of one real target or of a
            table of classes with any algorithm, ``"local"`` is tuned on left-out records;
            ``Local(local=...)`` trains by a solver.
        finetune: the further training of every client after the run, from a released model or its
            own, on its own data: :class:`~fedmtl.Finetune`, :class:`~fedmtl.Average` or
            ``"average"``, an object or the ``name`` of a class of your own; ``None`` for not at
            all. ``"auto"`` is ``None`` if an algorithm is given. The finetuned models are the
            personal models of the result, and cost no epsilon because nothing is sent. Baselines
            are finetuned as well, except local training.
        device: ``"auto"`` takes a GPU when there is one. Algorithms that compute in NumPy are on
            the CPU in any case.
        dtype: ``"float32"`` or ``"float64"``, of parameters and computation.
        execution: settings of the clients' computation, such as the number of processes.
        eval_every: rounds between evaluations; ``None`` evaluates about twenty times.
        evaluate_clients: number of clients of a large population that are evaluated: a random
            sample of those with test examples, the same at every evaluation and for every baseline.
            Means are then estimates, printed with their standard error, and the result has the
            models and scores of these clients only. ``None`` evaluates all.
        checkpoint_every: rounds between checkpoints; ``None`` writes one about every twenty
            seconds.
        early_stopping: ends the run when the shared model has stopped moving. This depends only on
            the releases, and all planned rounds are charged.
        audit: :class:`~fedmtl.Interval` adds canaries to the clients, with which the run measures a
            lower bound on its epsilon, see :attr:`Result.privacy <fedmtl.Result>`; ``None``
            measures none.
        replicates: R runs, each with its own schedule and noise, computed as one batch by
            algorithms that support it. The history then has means and percentiles, and everything
            else is of the first replicate. All have the same data and split. Epsilon is that of
            one replicate.
        epsilons: budgets instead of the ``epsilon`` of ``privacy``, each for R replicates.
        metrics: the scores beside the loss and the main metric (accuracy, mean squared error,
            or recall at 5 for more than 5 labels an example), by name: ``"auc"``, ``"auc_micro"``,
            ``"f1"``, ``"balanced_accuracy"``, ``"accuracy"``, ``"recall_at_5"``, ``"rmse"``,
            ``"mae"``, ``"nmse"``, ..., see :mod:`fedmtl.trainer.metrics`; or a function
            ``metric(outputs, targets) -> float`` of the outputs and targets (N, ...) of one
            client's test rows, on the CPU. Its column is ``custom_NAME``; give it the attribute
            ``higher_is_better = False`` if less is better. A client for which it returns NaN or
            fails is left out of the mean.
        callbacks: called around the loop.
        progress: show a progress bar, and before it the automatic settings, if the log does not
            show them.

    Raises:
        ConfigError: a value outside its range.

    Example:
        >>> from fedmtl import ClientPrivacy, FedAvg, FullParticipation
        >>> from fedmtl import LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> result = trainer.fit()
        >>> result.epsilon <= 8.0, len(result.ids)
        (True, 10)
    """

    data: FederatedDataset  # the other accepted types become a dataset

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_auto(self.baselines):
            self._set(baselines=usual_baselines(self))
        # The reader of the data may take minutes, so it is called behind all refusals without it.
        if not is_auto(self.model):
            self._set(model=as_model(self.model))
        self._set(data=as_data(self.data), callbacks=tuple(self.callbacks))
        check_loss(self.loss, self.data, self.algorithm)
        self._choose([name for name in AUTO if is_auto(getattr(self, name))])
        self._set(data=coded_for(self.data, self.loss, self.algorithm.loss))
        if self.audit is not None:
            self.audit.check(self)
        # These are made here for their refusals: a run must not fail after hours.
        _ = self.bound_schedule
        _ = self.comparisons
        if self.epsilons is not None:
            self._set(epsilons=tuple(map(float, self.epsilons)))
        check_declared(self)
        _ = self.resolved_metrics

    def _choose(self, left: list[str]) -> None:
        """Fills in the automatic settings ``left``, by public facts of the data."""
        if "algorithm" not in left:
            missing = [name for name in left if name != "finetune"]
            if missing:
                raise ConfigError(
                    f"{', '.join(missing)} must be given beside an algorithm; only "
                    "'auto' chooses them."
                )
            self._set(**dict.fromkeys(left))  # no finetuning
            return
        set_here = {
            name: getattr(self, name)
            for name in ("model", "rounds", "schedule")
            if name not in left
        }
        averages = "finetune" in left or getattr(self.finetune, "votes_help", False)
        chosen = automatic(self.data, self.privacy, averages=averages, loss=self.loss, **set_here)
        logger.info("%s", chosen.text())
        # a program that shows the log has shown them
        if self.progress and not logger.isEnabledFor(logging.INFO):
            print(chosen.text(), file=sys.stderr)
        warnings = [unscaled(self.data)]
        # From 4 times a contribution on, noise left little to share in the runs that were measured.
        if chosen.noise > 4 and not chosen.network:
            warnings.append(chosen.outlook())
        for text in filter(None, warnings):
            logger.warning("%s", text)
        self._set(**{name: getattr(chosen, name) for name in (*left, "privacy")})
        if not isinstance(self.baselines, str):
            own = [chosen.local if item == "local" else item for item in self.baselines]
            self._set(baselines=tuple(own))

    @cached_property
    def bound_schedule(self) -> BoundSampler | BoundSchedule:
        """Returns the schedule of the clients of the data, and of canaries behind them."""
        canaries = 0
        # Canaries of records are in the data of the clients, which take part as before.
        if self.audit is not None and not isinstance(self.privacy, RecordPrivacy):
            canaries = self.audit.canaries
        bound = bind_schedule(self.schedule, self.data, canaries, self.seed)
        scheduled: BoundSampler | BoundSchedule = self.algorithm.scheduled(bound)
        return scheduled

    @cached_property
    def comparisons(self) -> dict[str, Algorithm]:
        """Returns the baselines by name."""
        return named_baselines(self.baselines, self.algorithm, self._alone)

    @property
    def _alone(self) -> Algorithm | None:
        """Returns the baseline ``"local"`` of a linear model of one real target, or of a table of
        classes, that of the registered personalization, such as the average of a client's own
        models.

        It is None for other models, data and losses, whose baseline is local training.
        """
        if "local" not in self.baselines or self.trainable is not None:
            return None
        if self.algorithm.one_at_a_time or self.runs > 1:
            return None
        if self.algorithm.loss is not None or not has_tuned_local(self.data, self.loss):
            return None
        usual = usual_of_linear_numbers()
        if usual and is_linear(build_module(self.model, self.data.spec, 0), self.data):
            return usual.alone()
        return None

    @cached_property
    def resolved_metrics(self) -> tuple[Metric, ...]:
        """Returns the metrics by name and function."""
        return resolve_metrics(self.metrics, self.data.spec, self.data.name, self.loss)

    @property
    def runs(self) -> int:
        """Returns M, the number of replicates: R at each of the epsilons.

        Run m = e R + r is replicate r at the e-th epsilon, with its own schedule and its own
        noise, both drawn from (seed, m). The data, their split and the public starting point are
        those of the seed, common to all.
        """
        return self.replicates * len(self.epsilons or (0,))

    @cached_property
    def privacies(self) -> tuple[Privacy | None, ...]:
        """Returns the privacy of each of the M runs; a single one if all have the same."""
        if self.privacy is None or self.epsilons is None:
            return (self.privacy,)
        each = [replace(self.privacy, epsilon=epsilon) for epsilon in self.epsilons]
        return tuple(privacy for privacy in each for _ in range(self.replicates))

    @property
    def budgets(self) -> list[tuple[float | None, slice]]:
        """Returns the budgets with the runs that have them; None without a budget, and of budgets
        by client the largest one."""
        size = self.replicates
        if self.epsilons is not None:
            return [
                (epsilon, slice(e * size, (e + 1) * size))
                for e, epsilon in enumerate(self.epsilons)
            ]
        epsilon = None if self.privacy is None else self.privacy.epsilon
        if isinstance(epsilon, Mapping):
            epsilon = max(epsilon.values())
        return [(epsilon, slice(0, size))]

    @cached_property
    def noiseless(self) -> bool:
        """Returns True if no run has noise, so that nothing is protected."""
        return all(privacy is None or privacy.noiseless for privacy in self.privacies)

    def problem(self, *, ranks: Ranks = SINGLE) -> Problem:
        """Returns the problem of a run.

        Args:
            ranks: the processes that compute it.

        Raises:
            ConfigError, DataError, ModelError: see :func:`.make_problem.build_problem`.
        """
        self.algorithm.check_data(self.data)
        place = self.device
        # DP-SGD is for gradients that are sent in rounds: activations have noise of their own.
        sends = not self.algorithm.one_at_a_time and not isinstance(self.algorithm, Local)
        if self.algorithm.on_host:
            resolve_device(place, ranks)  # refuses one that is not there
            place = "cpu"
        rounds: int = self.rounds
        if isinstance(self.bound_schedule, BoundSchedule):  # the clocks may stop before
            rounds = min(rounds, self.bound_schedule.steps)
        settings = ProblemSettings(
            loss=self.loss,
            execution=self.execution,
            rounds=rounds,
            seed=self.seed,
            device=place,
            dtype=self.dtype,
            protects_records=sends and isinstance(self.privacy, RecordPrivacy),
            trainable=self.trainable,
        )
        return build_problem(self.data, self.model, settings, ranks)

    def resolved(self, problem: Problem, real: BoundSampler | None = None) -> Trainer:
        """Returns this trainer with the ``"auto"`` settings that its algorithm chooses.

        Args:
            problem: of the run; public rows and bounds are read.
            real: the buffered schedule of real clients; None of simulated ones.
        """
        bound = None
        if isinstance(self.bound_schedule, BoundSchedule):
            bound = self.bound_schedule
        algorithm = self.algorithm.resolve_auto(problem, bound, self.privacies)
        finetune = self.finetune
        if finetune is not None:
            schedule: Sampler | BoundSampler | None = None
            if isinstance(self.bound_schedule, BoundBuffered):
                schedule = real or self.bound_schedule
            elif isinstance(self.schedule, Deadline):
                schedule = self.schedule.sampler
            elif not isinstance(self.schedule, AsynchronousSchedule | Buffered):
                schedule = self.schedule
            noise = noise_of(self.privacy, problem.data, problem.dimension, self.rounds, schedule)
            finetune = usual_finetuning(finetune, problem).resolved(noise)
        if algorithm is self.algorithm and finetune is self.finetune:
            return self
        return replace(self, algorithm=algorithm, finetune=finetune)

    def first_run(self) -> Trainer:
        """Returns the first replicate at the first epsilon as a run of its own, without baselines,
        canaries and folder."""
        one: dict[str, Any] = {"replicates": 1, "epsilons": None, "privacy": self.privacies[0]}
        return replace(self, **one, audit=None, baselines=(), folder=None)

    def fit(self, *, resume: bool = False, ranks: Ranks | None = None) -> Result:
        """Trains, evaluates and saves the run and its baselines.

        Args:
            resume: continue the run in ``folder`` from its last checkpoint. In secure mode
                resume a single copy of the folder: every copy would release under the same charges.
            ranks: the processes that compute the run jointly, each of which calls this; None for
                those that torchrun started, or of the program's process group. ``Ranks()`` is a
                single process.

        Returns:
            The result, with those of the baselines; the same at every rank. Only the first rank
            writes files.

        Raises:
            ResumeError: the folder holds a run and ``resume`` is false, or a run that does not
                match this one, whose ledger was altered or rolled back.
            PrivacyError: a run in secure mode on a system without file locks.
            TrainingError: of a run without noise, that not one finite number was learned, or that
                nearly all local trainings of its first rounds diverged, after which it stops at
                once; such a baseline is left out. In a run with noise rows that are not finite
                count as zero in a release, and it ends in any case with its result, whose
                :attr:`Result.lost` says so: how long it is, how it ends and which files can be
                published say nothing about the data.
        """
        return run_in_claimed_folder(
            self, resume, Engine(ranks=Ranks.of_launch() if ranks is None else ranks)
        )
