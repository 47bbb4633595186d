"""A run and its baselines, as :meth:`fedmtl.Trainer.fit` computes them."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algorithms.base import Algorithm
from ..algorithms.local_only import Local
from ..errors import ConfigError, ResumeError, TrainingError
from ..local import operation_threads
from ..privacy import BoundSampler, FullParticipation, PoissonSampling, RecordPrivacy
from ..privacy.samplers import USUAL_COHORT
from ..ranks import Ranks
from .engine import Engine
from .folder import RunFolder
from .outcome import table_settings, write_result
from .personalize import held_out
from .processes import processes
from .result import Result
from .run import run
from .run_plan import prepare

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger("fedmtl")


def run_in_claimed_folder(settings: Trainer, resume: bool, engine: Engine) -> Result:
    """Returns the result of a run with its baselines; see :meth:`Trainer.fit <fedmtl.Trainer.fit>`.

    The folder is claimed for this process and its ranks.

    Args:
        settings: of the run.
        resume: True to continue the run in the folder.
        engine: computes its clients' part.

    Raises:
        ConfigError: ``ranks`` of another kind, or a folder that another process holds.
        ResumeError: nothing to resume, or a run that would be overwritten.
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
        # One claim stands for all ranks, and an error of it is an error of all.
        with ranks.agree():
            if folder is not None and ranks.first:
                stack.enter_context(folder.claimed(resume=resume))
        return run_with_baselines(settings, resume, engine)


def run_with_baselines(settings: Trainer, resume: bool, engine: Engine) -> Result:
    """Returns the result of a run with its baselines, in a folder that is claimed; for the
    arguments see :func:`run_in_claimed_folder`.

    Raises:
        TrainingError: a run without noise learned nothing.
    """
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
    # How a run with noise ends must say nothing about the data, so it returns its result.
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
        # The table of clients has the numbers of records that were trained on.
        data, _ = held_out(settings.data, settings.finetune)
        ranks.share(
            lambda: write_result(folder, result, table_settings(settings, result.module), data)
        )
        ranks.share(folder.write_lists)
    return result


def _loose_delta(settings: Trainer) -> str | None:
    """Returns a warning of a delta above one over the number of protected clients or records; None
    if it is below.

    Such a delta allows a mechanism that publishes one client, or one record, as it is.
    """
    privacy = settings.privacies[0]
    if privacy is None:
        return None
    units = len(settings.data)
    if isinstance(privacy, RecordPrivacy):
        units = int(settings.data.train.counts.sum())
    return privacy.loose_delta(units)


def _as_baseline(settings: Trainer, algorithm: Algorithm, folder: Path | None) -> Trainer:
    """Returns the settings of a baseline in its own ``folder``: those of the run, without the ones
    that do not apply to it."""
    changes: dict[str, Any] = {
        "algorithm": algorithm,
        "folder": folder,
        "baselines": (),
        "callbacks": (),
        "audit": None,
    }
    # Without a release there is no shared model that stops moving, and none to start from.
    if isinstance(algorithm, Local) or algorithm.fitted_once:
        changes["early_stopping"] = None
        changes["finetune"] = None
    # Other methods send no gradients that could be added up: every client adds its own noise.
    privacy = settings.privacy
    if isinstance(privacy, RecordPrivacy) and not algorithm.sends_gradients:
        changes["privacy"] = replace(privacy, aggregation=None)
    # A fit is made once, of a client's own records, and sends nothing.
    if algorithm.fitted_once:
        changes["schedule"] = FullParticipation()
        changes["privacy"] = None
        changes["epsilons"] = None
        changes["rounds"] = 1
        changes["eval_every"] = None
    return replace(settings, **changes)


def single_run(settings: Trainer, resume: bool, engine: Engine) -> Result:
    """Returns the result of one run, without baselines.

    Args:
        settings: of the run.
        resume: True to continue the run in the folder, if there is one.
        engine: computes its clients' part.
    """
    with engine.ranks.agree():
        problem = settings.problem(ranks=engine.ranks)
        count = processes(settings, problem)
    # Threads pay off for large cohorts of large models only; without rounds a step is one client's.
    cohort = 1.0
    products = math.inf
    if isinstance(settings.bound_schedule, BoundSampler):
        cohort = settings.bound_schedule.denominator
    else:
        products = problem.clients * problem.dimension
    with engine.ranks.forked(count) as ranks:
        problem = problem.over(ranks)
        with operation_threads(
            0.0 if problem.executor.one_thread else cohort * problem.dimension, products
        ):
            plan = prepare(settings, problem, coins=engine.coins, stop=engine.stop)
            return run(plan, engine, resume)
