"""The plan of a private search: all candidates must cost the same, and their noise is calibrated to
one budget.

One candidate is a whole run of T steps and the release of its score. The event of the search is
that candidate repeated a random number of times of which the best is kept
(:mod:`fedmtl.privacy.accounting.selection`), so every candidate must have the same event.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .._rounding import rounded_up
from ..algorithms import Problem
from ..errors import ConfigError, FedmtlError, PrivacyError
from ..local import operation_threads
from ..local.losses import is_quantile, name_of
from ..privacy import (
    BoundSampler,
    ClientPrivacy,
    PrivacyCost,
    PrivacyReport,
    ReleasePlan,
    calibrate_selection,
    selection_epsilon,
)
from ..privacy.accounting.selection import most_repetitions
from ..privacy.binding import step_cost
from ..privacy.channel_report import privacy_report, signal_to_noise
from ..privacy.events import dp_event
from ..privacy.noise.discrete import slack
from ..privacy.noise.laws import LAWS
from ..trainer.run_channel import open_run
from ..trainer.run_fingerprint import describe, fingerprint
from ..trainer.trainer import Trainer

SCORE_BOUND = 0.5
"""Largest absolute value of one client's ``score - 1/2``."""
logger = logging.getLogger("fedmtl")


@dataclass(frozen=True)
class SearchPlan:
    """A search, ready to run.

    Attributes:
        trainers: by candidate, with the calibrated noise and the budget of one run, and without
            folder, baselines, callbacks and progress.
        fingerprints: by candidate: everything its released numbers depend on but the secret coins.
        report: of the first candidate's run, before its first step.
        noise_multiplier: of every release of every candidate.
        epsilon, delta: of the whole search.
        budget: epsilon of the T steps of one run, at ``delta``; its ledger enforces it.
    """

    trainers: Mapping[str, Trainer]
    fingerprints: Mapping[str, str]
    report: PrivacyReport
    noise_multiplier: float
    epsilon: float
    delta: float
    budget: float


def check_candidates(candidates: Mapping[str, Trainer]) -> None:
    """Checks that candidates differ in nothing that enters the accounting, under privacy that a
    search covers.

    Raises:
        ConfigError: names the candidate and the field.
    """
    if not isinstance(candidates, Mapping) or not candidates:
        raise ConfigError("PrivateSearch.candidates is empty; give a mapping of names to trainers.")
    for name, trainer in candidates.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"PrivateSearch.candidates has the name {name!r}; names are non-empty strings."
            )
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"PrivateSearch.candidates[{name!r}] is {trainer!r}; it must be a Trainer."
            )
        objection = next(_objections(trainer), None)
        if objection is not None:
            raise ConfigError(f"candidate {name!r}: {objection}")
    _check_equal({name: _accounted(trainer) for name, trainer in candidates.items()})
    _check_quantiles(candidates)


def _check_quantiles(candidates: Mapping[str, Trainer]) -> None:
    """Refuses candidates of which some predict a quantile and others something else: errors of
    different metrics do not compare.

    Raises:
        ConfigError: names both.
    """
    losses = {name: name_of(trainer.loss) for name, trainer in candidates.items()}
    first = next(iter(losses))
    for name, loss in losses.items():
        if loss != losses[first] and (is_quantile(loss) or is_quantile(losses[first])):
            raise ConfigError(
                f"candidate {name!r}: loss is {loss!r}, but candidate {first!r} has "
                f"{losses[first]!r}; models of a quantile compare with those of the same one only."
            )


def _objections(trainer: Trainer) -> Iterator[str]:
    """Yields the reasons why a trainer cannot be a candidate."""
    privacy = trainer.privacy
    if not isinstance(privacy, ClientPrivacy):
        kind: str | None = None
        if privacy:
            kind = type(privacy).__name__
        yield f"privacy is {kind}; a search is accounted for ClientPrivacy only (privacy=client)."
        return
    if privacy.epsilon is None or privacy.noiseless:
        yield (
            f"privacy.epsilon is {privacy.epsilon}; it must be finite, the budget of the whole "
            "search."
        )
    if privacy.noise_multiplier is not None:
        yield (
            f"privacy.noise_multiplier is {privacy.noise_multiplier}; leave it out, "
            "privacy.epsilon calibrates it."
        )
    if LAWS[privacy.mechanism].refuted is not None:
        yield f"privacy.mechanism is {privacy.mechanism!r}, which protects nothing."
    if trainer.early_stopping is not None:
        yield (
            "early_stopping ends a run by private numbers, which the accounting does not cover; "
            "leave it out."
        )
    if trainer.audit is not None:
        yield (
            "audit adds canaries to one run; leave it out, and audit the run of the chosen "
            "settings."
        )
    if trainer.evaluate_clients is not None:
        # The sensitivity of a score is that of a mean over all clients.
        yield "evaluate_clients is set, but a search scores all clients; leave it out."
    if trainer.runs > 1:
        yield "replicates and epsilons make several runs; a search draws its own."


def _accounted(trainer: Trainer) -> dict[str, Any]:
    """Returns the settings that enter the accounting."""
    # Noise is in units of the clip norm, which therefore enters no cost.
    fields = [
        field.name for field in dataclasses.fields(ClientPrivacy) if field.name != "clip_norm"
    ]
    return {
        "rounds": trainer.rounds,
        "seed": trainer.seed,
        "schedule": describe(trainer.schedule),
        **{f"privacy.{field}": getattr(trainer.privacy, field) for field in fields},
        "data": trainer.data.fingerprint(),
    }


def _check_equal(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises :class:`ConfigError` if a candidate differs from the first one."""
    first = next(iter(facts))
    for name, own in facts.items():
        for field, value in own.items():
            if value != facts[first][field]:
                raise ConfigError(
                    f"candidate {name!r}: {field} is {value!r}, but candidate {first!r} has "
                    f"{facts[first][field]!r}. The accounting needs them equal; candidates may "
                    "differ in the algorithm's settings, the model and privacy.clip_norm."
                )


def plan_search(
    candidates: Mapping[str, Trainer], *, mean: float, shape: float, score_noise: float
) -> SearchPlan:
    """Calibrates the noise of every candidate such that the whole search costs at most the budget,
    and logs the signal-to-noise ratio.

    Args:
        candidates: checked by :func:`check_candidates`.
        mean: of the number of repetitions, see :mod:`fedmtl.privacy.accounting.selection`.
        shape: of the law of that number.
        score_noise: standard deviation of the noise on a mean score.

    Raises:
        ConfigError: releases that differ between candidates, or a budget that cannot be met.
        PrivacyError: a combination that Renyi accounting does not cover.
    """
    first_name, first = next(iter(candidates.items()))
    privacy = _client_privacy(first)
    n = len(first.data)
    sampler = first.bound_schedule
    delta = privacy.resolved_delta(n)
    assert privacy.epsilon is not None
    assert isinstance(sampler, BoundSampler)
    problems: dict[str, Problem] = {}
    plans: dict[str, tuple[ReleasePlan, ...]] = {}
    for name, trainer in candidates.items():
        with _named(name):
            problems[name] = trainer.problem()
            every = trainer.algorithm.plan(problems[name], sampler)
            plans[name] = tuple(plan for plan in every if isinstance(plan, ReleasePlan))
    # One cost holds for all candidates only if their releases are alike.
    _check_equal({name: _released(name, plans[name], privacy) for name in candidates})
    sampler = sampler.capped(first.rounds)
    uses = first.rounds
    if sampler.cap is not None:
        uses = sampler.cap
    sensitivity = SCORE_BOUND  # of the sum of ``score - 1/2``
    if sampler.relation == "replace":
        sensitivity = 2 * SCORE_BOUND
    score = dp_event.GaussianDpEvent(score_noise * n / sensitivity)
    largest = max(plans.values(), key=lambda declared: sum(plan.size for plan in declared))
    # The cost of Gaussian noise does not depend on the sizes; other noise has equal ones.
    cost = step_cost(largest, sampler, privacy, delta=delta)

    def candidate(multiplier: float) -> Any:
        return dp_event.ComposedDpEvent([cost.after(uses, multiplier), score])

    runs = most_repetitions(mean, shape)

    def rounded(value: float) -> float:
        """Returns the part of an epsilon that noise in whole numbers, of all runs and scores,
        adds."""
        return cost.slack(uses * runs, value) + slack(runs, value)

    # Noise in whole numbers adds to delta as well as to epsilon.
    within_delta = delta / (1 + rounded(0.0))
    try:
        within = privacy.epsilon - rounded(privacy.epsilon)
        z = calibrate_selection(
            candidate, target=within, delta=within_delta, mean=mean, shape=shape
        )
    except ConfigError as error:
        half = _least_score_noise(within / 2, within_delta, mean, shape) * sensitivity / n
        raise ConfigError(f"{error} {_remedy(score_noise, half, n)}") from error
    except PrivacyError as error:
        raise PrivacyError(
            f"A search over runs with schedule {sampler.describe()}: {error}"
        ) from error
    # A run stops by itself at the planned steps, by a budget that holds no further one.
    budget = _run_budget(cost, z, uses, per_participation=sampler.per_participation)
    trainers: dict[str, Trainer] = {}
    marks: dict[str, str] = {}
    reports: dict[str, PrivacyReport] = {}
    for name, trainer in candidates.items():
        inner = replace(_client_privacy(trainer), epsilon=budget, noise_multiplier=z, delta=delta)
        trainers[name] = replace(  # without the fields that belong to a run of its own
            trainer, privacy=inner, folder=None, baselines=(), callbacks=(), progress=False
        )
        with _named(name):
            marks[name], reports[name] = _opened(name, trainers[name], problems[name])
    # Calibration ends within a tolerance, so the reached epsilon is computed and reported, not the
    # target.
    reached = selection_epsilon(candidate(z), within_delta, mean=mean, shape=shape)
    return SearchPlan(
        trainers=trainers,
        fingerprints=marks,
        report=reports[first_name],
        noise_multiplier=z,
        epsilon=reached + rounded(reached),
        delta=delta,
        budget=budget,
    )


def _least_score_noise(target: float, delta: float, mean: float, shape: float) -> float:
    """Returns the smallest noise multiplier with which the scores of a search alone cost at most
    ``target``; infinite if there is none.

    Args:
        target: epsilon of all scores.
        delta: of all scores.
        mean: of the number of repetitions.
        shape: of the law of that number.
    """
    try:
        return calibrate_selection(
            dp_event.GaussianDpEvent, target=target, delta=delta, mean=mean, shape=shape
        )
    except ConfigError:
        return math.inf


def _remedy(score_noise: float, half: float, clients: int) -> str:
    """Returns the advice that brings a search within its budget.

    Args:
        score_noise: that was asked for.
        half: with which the scores cost half of the budget; infinite for none.
        clients: n.
    """
    if not score_noise < half < math.inf:
        return "A smaller --mean (PrivateSearch.mean in Python) costs less."
    return (
        f"The scores alone cost too much: --score-noise is {score_noise:g}, and with "
        f"{rounded_up(half, 2)} they cost half of the budget (scores lie between 0 and 1, of "
        f"{clients:,} clients; more clients need less noise). A "
        "smaller --mean costs less, too. In Python they are PrivateSearch.score_noise and .mean."
    )


def _released(name: str, plans: tuple[ReleasePlan, ...], privacy: ClientPrivacy) -> dict[str, Any]:
    """Returns the facts of a candidate's releases that enter the accounting.

    Raises:
        ConfigError: no release, or noise of the clients.
    """
    if not plans:
        raise ConfigError(
            f"candidate {name!r}: its algorithm releases nothing, so there is no "
            "noise to calibrate."
        )
    if any(plan.rows is not None for plan in plans):
        raise ConfigError(
            f"candidate {name!r}: its clients add noise to their own rows, an account that a "
            f"search does not compose; leave that noise out (MPMTL.curator_epsilon)."
        )
    sizes: list[int] | None = None  # of Gaussian noise the epsilon does not depend on them
    if privacy.mechanism == "l2_laplace":
        sizes = [plan.size for plan in plans]
    return {
        "the number of releases": len(plans),
        "the allocation of the budget": [plan.allocation for plan in plans],
        "the size of a release": sizes,
    }


def _run_budget(
    cost: PrivacyCost, multiplier: float, uses: int, *, per_participation: bool
) -> float:
    """Returns epsilon of the steps of one run, such that one more step would exceed it."""
    budget = cost.epsilon(uses, multiplier)
    more = math.inf  # the cost has no further step
    if uses != cost.max_uses:
        more = cost.epsilon(uses + 1, multiplier)
    if budget <= 0 or (more <= budget and not per_participation):
        raise PrivacyError(
            f"Epsilon of the {uses} steps of one run is {rounded_up(budget, 6)}, so it cannot "
            f"bound how many there are. Ask for a larger epsilon or a smaller delta."
        )
    return budget


def _opened(name: str, trainer: Trainer, problem: Problem) -> tuple[str, PrivacyReport]:
    """Returns the run's fingerprint and the report of its channel before the first step.

    Raises the errors of the run, and logs the signal-to-noise ratio once: a line for each
    repetition would tell their number.
    """
    assert isinstance(trainer.bound_schedule, BoundSampler)
    with operation_threads(trainer.bound_schedule.denominator * problem.dimension):
        mark = fingerprint(problem, trainer)
    with closing(open_run(trainer, problem, mark)) as channel:
        signal = signal_to_noise(channel)
        if signal is not None and signal.warning:
            logger.warning("candidate %r: %s", name, signal.warning)
        elif signal is not None:
            logger.info("candidate %r: %s", name, signal.text())
        return mark, privacy_report(channel)


def _client_privacy(trainer: Trainer) -> ClientPrivacy:
    """Returns the privacy of a candidate that was checked."""
    assert isinstance(trainer.privacy, ClientPrivacy)
    return trainer.privacy


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Adds the name of the candidate to errors of the block."""
    try:
        yield
    except FedmtlError as error:
        raise type(error)(f"candidate {name!r}: {error}") from error
