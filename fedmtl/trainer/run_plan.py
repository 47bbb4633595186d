"""The plan of a run: its settings, checked and complete, its data and its model, before the first
release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..algorithms.base import Algorithm
from ..algorithms.problem import Problem
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local.losses import link_of
from ..models.inputs import ModelBounds
from ..privacy import NoiseSource
from ..ranks import Ranks
from .check import unscaled
from .evaluation import evaluated_clients, try_metrics
from .folder import RunFolder
from .make_problem import share_beyond
from .personalize import held_out
from .run_fingerprint import describe, fingerprint
from .scored_models import RecordFacts

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The settings and the problem of a run, checked and complete.

    Attributes:
        settings: with the automatic choices of the algorithm.
        folder: in which the run is saved; None for a run that is not.
        algorithm: of the settings.
        problem: the data that are trained on, the model and the executor.
        clients: int64 (k,), the clients that are evaluated.
        evaluated: the problem with the data of these clients only.
        validation: these data with the clients' validation records as test side; None if no client
            chooses its model on such records.
        facts: fields of the :class:`~fedmtl.Result` that no step of the run changes.
        fingerprint: digests of all that the releases depend on.
        stop: number of steps after which the run ends.
        every: number of steps between evaluations.
    """

    settings: Trainer
    folder: RunFolder | None
    algorithm: Algorithm
    problem: Problem
    clients: Tensor
    evaluated: Problem
    validation: FederatedDataset | None
    facts: Mapping[str, Any]
    fingerprint: str
    stop: int
    every: int

    @property
    def ranks(self) -> Ranks:
        """Returns the processes that compute the run."""
        return self.problem.ranks

    @property
    def ledger(self) -> Path | None:
        """Returns the file of its charges; None without a folder."""
        if self.folder is None:
            return None
        return self.folder.ledger

    @property
    def step_name(self) -> str:
        """Returns ``"round"``, or ``"activation"`` if clients act one at a time."""
        if self.algorithm.one_at_a_time:
            return "activation"
        return "round"


def prepare(
    given: Trainer,
    problem: Problem,
    *,
    coins: NoiseSource | None = None,
    stop: int | None = None,
) -> RunPlan:
    """Returns the plan of a run, and refuses settings that would fail after a release has been
    charged.

    Args:
        given: the settings, with ``"auto"`` for those that the algorithm or the data choose.
        problem: of these settings, on the processes that compute the run.
        coins: source of the noise and the cohorts in place of the seed's; part of the fingerprint.
        stop: number of steps after which the run ends; None for all that are planned.

    Raises:
        ConfigError: settings that the data, the model or the processes do not allow.
    """
    settings = given.resolved(problem)
    algorithm = settings.algorithm
    bound = algorithm.row_bound(problem)
    if problem.ranks.size > 1 and algorithm.all_at_once and bound is None:
        raise ConfigError(
            f"{algorithm.name} computes all clients at once, and where there is no bound on rows "
            "it may take its step size from the records of all; over several ranks give one, as "
            "algorithm.feature_norm=1.0, or compute in one process, execution.processes=1."
        )
    shortened = {}
    if bound is not None:
        shortened = share_beyond(problem.data, bound)
    # Records are scored as they are trained on.
    data, validation = held_out(problem.data.bounded(bound), settings.finetune)
    problem = replace(problem, data=data)
    # The same clients at every evaluation and in every baseline, which can then be compared.
    clients, evaluated = evaluated_clients(problem, given.evaluate_clients)
    if validation is not None and len(clients) < problem.clients:
        validation = validation.take_clients(clients)
    _check_later_parts(given, settings, problem)
    facts = {
        "bounds": ModelBounds(bound, problem.data.limit, link_of(problem.loss)),
        "records": RecordFacts(
            shortened=shortened, cut_targets=data.cut_targets, unscaled=bool(unscaled(data))
        ),
        "chosen": chosen_settings(given, algorithm),
    }
    last = problem.rounds
    if stop is not None:
        last = min(stop, last)
    return RunPlan(
        settings=settings,
        folder=RunFolder.of(settings.folder),
        algorithm=algorithm,
        problem=problem,
        clients=clients,
        evaluated=evaluated,
        validation=validation,
        facts=facts,
        fingerprint=fingerprint(problem, settings, coins),
        stop=last,
        every=settings.eval_every or max(1, last // 20),
    )


def _check_later_parts(given: Trainer, settings: Trainer, problem: Problem) -> None:
    """Refuses finetuning, baselines and metrics that would fail after the run has spent its
    budget."""
    if settings.finetune is not None:
        settings.finetune.check(problem)
    for name, baseline in given.comparisons.items():
        try:
            baseline.plan(problem, given.bound_schedule)
        except ConfigError as error:
            raise ConfigError(
                f"baselines has {name!r}, which cannot be run here: {error}"
            ) from error
    try_metrics(problem, given.resolved_metrics)


def chosen_settings(given: Trainer, resolved: Algorithm) -> dict[str, Any]:
    """Returns the automatic settings of an algorithm by name, with their values.

    Args:
        given: settings, with ``"auto"`` for the choices of the algorithm.
        resolved: the algorithm after its choice.

    Returns:
        One value a setting; a list with one for each budget if replicates have values of their own.
        Settings that stay ``"auto"``, and values that are texts, are left out.
    """
    settings = {}
    for name, value in vars(given.algorithm).items():
        new = getattr(resolved, name, value)
        if value != "auto" or new is None or isinstance(new, str):
            continue
        if isinstance(new, tuple) and len(new) == given.runs:
            # Replicates of one budget are neighbours and share the value.
            new = list(new[:: given.replicates])
        settings[name] = describe(new)
    return settings
