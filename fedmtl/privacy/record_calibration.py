"""The calibration of a run that releases gradients of single records: their noise and its cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .._files import Json
from ..errors import PrivacyError
from .account_costs import AccountCosts, StoredNoise
from .binding import bind_releases
from .calibration import Calibration, caps_of, schedule_facts
from .gradients import GradientPlan, record_costs
from .noise.grid import check_drawable
from .noise.laws import LAWS
from .noise.sources import NoiseSource
from .release import ReleasePlan
from .samplers import SHIFTS, BoundSampler
from .secure_calibration import calibrate_secure_gradients
from .settings import Privacy, RecordPrivacy

OF_RECORDS: dict[str, str | bool] = {
    "relation": "zero_out",
    "amplified": False,
    "per_participation": True,
}
"""The assumption of the accountant on cohorts of rounds whose unit is one record, whatever draws
them: they are public."""


def calibrate_records(
    settings: tuple[Privacy, ...],
    rows: tuple[ReleasePlan, ...],
    plan: GradientPlan | None,
    sampler: BoundSampler | None,
    steps: int,
    sources: tuple[NoiseSource, ...],
    prior: StoredNoise,
) -> Calibration:
    """Calibrates the noise of R replicates whose protected unit is a record.

    Args:
        settings: of all replicates, or of each.
        rows: releases of rows of clients, which are post-processing.
        plan: the release of gradients; None if there is none.
        sampler: the law of the cohorts; None for clients that act one at a time.
        steps: number of rounds.
        sources: of the noise, R of them.
        prior: the noise of the run that is resumed, whose multipliers are used as they stand.

    Raises:
        ConfigError: a budget that cannot be met.
        PrivacyError: releases that the noise on gradients does not cover.
    """
    records = tuple(each for each in settings if isinstance(each, RecordPrivacy))
    _check_plans(settings, rows, plan, sampler)
    assert plan is not None
    plan = plan.under(records)
    noiseless = all(each.noiseless for each in records)
    if sampler is None:
        if records and records[0].stability is not None:
            raise PrivacyError(
                "RecordPrivacy.clipping='automatic' is for local training in rounds; clients that "
                "act one at a time take clipping='norm'."
            )
        if records and records[0].aggregation is not None:
            raise PrivacyError(
                "RecordPrivacy.aggregation is for rounds of FedSGD; clients that act one at a time "
                "have no cohort whose gradients could be added up. Leave it out."
            )
        plan.check(clients=None)
        calibration = _activations(records, plan)
    elif records and records[0].aggregation is not None:
        plan.check(clients=sampler.n)
        return _with_shares(records[0], rows, plan, sampler, steps, prior)
    else:
        plan.check(clients=sampler.n)
        sampler = sampler.capped(steps)
        calibration = _rounds(records, rows, plan, sampler, steps)
        if noiseless:
            # Nothing is charged then: rounds keep the sampler's own cap.
            calibration = replace(calibration, caps=caps_of(sampler))
    if noiseless:
        return calibration
    assert calibration.caps is not None
    delta = records[0].resolved_delta(int(plan.counts.sum()))
    costs, caps = record_costs(records, plan, calibration.caps, delta, prior=prior)
    _check_noise(costs, plan, records[0], sources[0])
    return replace(calibration, caps=caps, costs=costs)


def _check_plans(
    settings: tuple[Privacy, ...],
    rows: tuple[ReleasePlan, ...],
    plan: GradientPlan | None,
    sampler: BoundSampler | None,
) -> None:
    if not all(isinstance(each, RecordPrivacy) for each in settings):
        raise PrivacyError(
            "Clients that act one at a time protect single records: use RecordPrivacy."
        )
    if plan is None:
        raise PrivacyError(
            "RecordPrivacy needs a GradientPlan: whose records there are, and what "
            "is released of them."
        )
    if sampler is None and rows:
        raise PrivacyError(
            f"Release {rows[0].name!r} is of rows; clients that act one at a time "
            "release gradients."
        )


def _common_facts(plan: GradientPlan) -> dict[str, Json]:
    return {"dimension": plan.dimension, "public": plan.public_digest, "records": plan.describe()}


def _activations(records: tuple[RecordPrivacy, ...], plan: GradientPlan) -> Calibration:
    """Returns the calibration, without costs, of clients that act one at a time."""
    return Calibration(
        settings=records,
        caps=plan.caps,
        facts=_common_facts(plan) | {"at_cap": plan.at_cap},
        gradients=plan,
    )


def _rounds(
    records: tuple[RecordPrivacy, ...],
    rows: tuple[ReleasePlan, ...],
    plan: GradientPlan,
    sampler: BoundSampler,
    steps: int,
) -> Calibration:
    """Returns the calibration, without costs, of rounds in which clients train by DP-SGD."""
    _check_post_processing(rows)
    return Calibration(
        settings=records,
        caps=np.full(sampler.n, most_participations(sampler, steps), dtype=np.int64),
        facts=_common_facts(plan) | schedule_facts(sampler, **OF_RECORDS),
        sampler=sampler,
        releases=bind_releases(rows, sampler, None),
        gradients=plan,
    )


def _with_shares(
    privacy: RecordPrivacy,
    rows: tuple[ReleasePlan, ...],
    plan: GradientPlan,
    sampler: BoundSampler,
    steps: int,
    prior: StoredNoise,
) -> Calibration:
    """Returns the calibration of rounds in which clients add their gradients up in a secure sum."""
    secure = calibrate_secure_gradients(privacy, rows, plan, sampler, steps, prior)
    release = secure.release
    sampler = release.sampling
    facts: dict[str, Json] = {
        "releases": [[release.name, release.form, release.dimension]],
        "units": plan.records,
        "rate": secure.cost.sampled,
    }
    return Calibration(
        settings=(privacy,),
        caps=caps_of(sampler),
        costs=secure.costs,
        facts=_common_facts(plan) | schedule_facts(sampler) | facts,
        sampler=sampler,
        releases={release.name: release},
        gradients=plan,
    )


def _check_noise(
    costs: AccountCosts, plan: GradientPlan, privacy: RecordPrivacy, source: NoiseSource
) -> None:
    """Refuses noise that the source cannot draw. The largest is that of the least weight."""
    largest = max(costs.multipliers)
    if largest == 0:
        return
    least = min(weight for cost in costs.kinds for weight in cost.weights or (1.0,))
    bound = privacy.initial_norm
    check_drawable(
        LAWS[privacy.mechanism](largest / least),
        source,
        plan.dimension,
        sensitivity=SHIFTS[plan.relation] * bound,
        bound=bound,
    )


def _check_post_processing(plans: tuple[ReleasePlan, ...]) -> None:
    for plan in plans:
        if plan.allocation is not None or plan.rows is not None:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} has an allocation or noise on rows; it has "
                "no noise of its own."
            )
        if not plan.from_training:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} is not made only of locally trained models, "
                "so the noise on their gradients does not cover it. Use ClientPrivacy."
            )


def most_participations(sampler: BoundSampler, steps: int) -> int:
    """Returns the hard cap on the participations of one client: the sampler's, or one above the
    average, rounded up."""
    if sampler.cap is not None:
        return sampler.cap
    return min(steps, math.ceil(steps * sampler.probability) + 1)
