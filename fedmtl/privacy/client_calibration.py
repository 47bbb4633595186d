"""The calibration of a run that releases sums over rows of clients: their noise and its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .._files import Json
from ..errors import PrivacyError
from .account_costs import Demand, StoredNoise, calibrate_accounts
from .binding import bind_releases, step_cost
from .calibration import Calibration, caps_of, schedule_facts
from .cost import PrivacyCost
from .noise.banded import Bands
from .noise.grid import check_drawable
from .noise.laws import LAWS
from .noise.sources import NoiseSource, SeededSource
from .quantile import QuantileClip
from .release import Release, ReleasePlan
from .row_noise import bind_rows, refuse_rows, row_facts
from .samplers import BoundSampler
from .secure_calibration import calibrate_secure_sum
from .settings import ClientPrivacy, Privacy


def calibrate_clients(
    settings: tuple[Privacy, ...],
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    steps: int,
    sources: tuple[NoiseSource, ...],
    prior: StoredNoise,
) -> Calibration:
    """Calibrates the noise of R replicates whose protected unit is a client.

    Args:
        settings: of all replicates, or of each; empty for no privacy.
        plans: the releases of every round.
        sampler: the law of the cohorts.
        steps: number of rounds.
        sources: of the noise, R of them.
        prior: the noise of the run that is resumed, whose multipliers are used as they stand.

    Raises:
        ConfigError: a budget that cannot be met.
        PrivacyError: a combination that no accountant supports.
    """
    each_one = tuple(each for each in settings if isinstance(each, ClientPrivacy))
    # the settings with the largest epsilon, which reports are about
    privacy = max(
        each_one, key=lambda each: (not each.noiseless, each.epsilon or 0.0), default=None
    )
    if sampler.weighted:
        _check_weights(privacy, plans, sampler)
    if privacy is None or privacy.noiseless or not plans:
        return _without_noise(privacy, plans, sampler)
    if privacy.aggregation is not None:
        return _with_shares(privacy, plans, sampler, steps, prior)
    delta = privacy.resolved_delta(sampler.n)
    bands = _bands(privacy, plans, sampler, steps)
    cost = step_cost(
        plans,
        sampler,
        privacy,
        delta=delta,
        max_steps=_max_uses(plans, sampler, steps, len(sources)),
        bands=bands,
    )
    _check_allocation(cost, sampler)
    sampler = sampler.capped(steps)
    uses = steps
    if sampler.cap is not None:
        uses = sampler.cap
    accounts = 1
    if sampler.per_participation:
        accounts = sampler.n
    demands = [
        [Demand(cost, each.epsilon, each.noise_multiplier, uses)] * accounts for each in each_one
    ]
    costs, affordable = calibrate_accounts(demands, prior, refuted=LAWS[privacy.mechanism].refuted)
    if sampler.per_participation:
        sampler = sampler.with_cap(int(affordable[0]))
    releases = bind_releases(plans, sampler, privacy, max(costs.multipliers), bands)
    _check_noise(releases, cost, sources[0])
    row_noise = bind_rows(plans, releases, steps, delta, prior)
    return Calibration(
        settings=(privacy,),
        caps=caps_of(sampler),
        costs=costs,
        facts=_facts(plans, sampler, bands) | row_facts(plans, row_noise),
        sampler=sampler,
        releases=releases,
        row_noise=row_noise,
    )


def _with_shares(
    privacy: ClientPrivacy,
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    steps: int,
    prior: StoredNoise,
) -> Calibration:
    """Returns the calibration of a run whose clients add the noise, as shares."""
    secure = calibrate_secure_sum(privacy, plans, sampler, steps, prior)
    sampler = secure.release.sampling
    return Calibration(
        settings=(privacy,),
        caps=caps_of(sampler),
        costs=secure.costs,
        facts=_facts(plans, sampler, None),
        sampler=sampler,
        releases={secure.release.name: secure.release},
    )


def _without_noise(
    privacy: ClientPrivacy | None, plans: tuple[ReleasePlan, ...], sampler: BoundSampler
) -> Calibration:
    """Returns the calibration of a run that clips at most, and charges nothing."""
    refuse_rows(plans)
    settings: tuple[ClientPrivacy, ...] = ()
    if privacy is not None:
        settings = (privacy,)
    return Calibration(
        settings=settings,
        caps=caps_of(sampler),
        sampler=sampler,
        releases=bind_releases(plans, sampler, privacy),
    )


def _max_uses(
    plans: Sequence[ReleasePlan], sampler: BoundSampler, steps: int, replicates: int
) -> int | None:
    """Returns the number of uses beyond which the cost allows none; None without a limit.

    Noise on rows, and the noise of each replicate, is calibrated to the planned steps.
    """
    if sampler.per_participation:
        return None
    if replicates > 1 or any(plan.rows is not None for plan in plans):
        return steps
    return None


def _check_allocation(cost: PrivacyCost, sampler: BoundSampler) -> None:
    if sampler.per_participation and cost.weights is not None:
        raise PrivacyError(
            "An allocation of the budget over the steps needs everybody to be charged for each "
            f"step; {sampler.describe()} charges a client for the steps it took part in. Use "
            "FullParticipation()."
        )


def _check_weights(
    privacy: ClientPrivacy | None, plans: Sequence[ReleasePlan], sampler: BoundSampler
) -> None:
    """Refuses releases whose sensitivity does not follow from rows with weights of at most 1."""
    if privacy is not None and isinstance(privacy.clip_norm, QuantileClip):
        raise PrivacyError(
            "A QuantileClip counts the rows within the clip norm, and rows with weights always "
            f"are; with {sampler.describe()} clip_norm is a number."
        )
    for plan in plans:
        if plan.form != "vector" or plan.rows is not None:
            raise PrivacyError(
                f"Release {plan.name!r} is of products of rows, or of rows with noise of their "
                f"own, which have no weights; accepted: a schedule without weights, not "
                f"{sampler.describe()}."
            )


def _check_noise(releases: Mapping[str, Release], cost: PrivacyCost, source: NoiseSource) -> None:
    """Refuses noise that the source cannot draw. The largest is that of the least weight."""
    least = min(cost.weights or (1.0,))
    for release in releases.values():
        if release.noise is None:
            continue
        largest = replace(release.noise, multiplier=release.noise.multiplier / least)
        check_drawable(
            largest,
            source,
            release.size,
            sensitivity=release.drawn_sensitivity,
            bound=release.drawn_bound,
        )


def _facts(
    plans: Sequence[ReleasePlan], sampler: BoundSampler, bands: Bands | None
) -> dict[str, Json]:
    """Returns the facts about the releases for the header of a ledger."""
    facts = schedule_facts(sampler)
    facts["releases"] = [[plan.name, plan.form, plan.dimension] for plan in plans]
    without_data = [plan.name for plan in plans if plan.without_data]
    if without_data:
        facts["without_data"] = without_data
    if bands is not None:
        facts["bands"] = list(bands.coefficients)
    return facts


def calibrated_release(
    privacy: ClientPrivacy, plan: ReleasePlan, sampler: BoundSampler, steps: int
) -> Release:
    """Returns the release of a run in which it is the only one, with its noise; nothing is opened
    or charged."""
    calibration = calibrate_clients(
        (privacy,), (plan,), sampler, steps, (SeededSource(0),), StoredNoise()
    )
    return calibration.releases[plan.name]


def _bands(
    privacy: ClientPrivacy, plans: tuple[ReleasePlan, ...], sampler: BoundSampler, steps: int
) -> Bands | None:
    """Returns the correlation of the noise over rounds. :mod:`.noise.banded` states its demands
    on the schedule.

    Raises:
        PrivacyError: participations that may follow each other more closely, or cohorts that are
            not public.
    """
    if privacy.bands is None:
        return None
    if sampler.relation != "zero_out":
        raise PrivacyError(
            "ClientPrivacy.bands needs a public schedule in which a client stays away between its "
            f"turns, so CyclicCohorts(...) or Buffered(rest=...); not {sampler.describe()}, where "
            "it may take part in two rounds running. Leave bands out for independent noise."
        )
    if any(plan.rows is not None for plan in plans):
        raise PrivacyError(
            "ClientPrivacy.bands is for noise that the server adds; clients add independent noise."
        )
    least = sampler.separation
    if privacy.bands == "auto":
        count = min(least, steps)
        bound = "is"
    else:
        count = int(privacy.bands)
        bound = f"is {count}, at most"
    if least == 1 or count > least:
        remedy = "Take fewer bands"
        if least == 1:
            remedy = "Take smaller cohorts"
        raise PrivacyError(
            f"ClientPrivacy.bands {bound} the number of rounds between two turns of a client, "
            f"which {sampler.describe()} makes {least}. {remedy}."
        )
    return Bands.square_root(count)


def check_row_plans(plans: tuple[ReleasePlan, ...], steps: int) -> None:
    """Refuses releases of one name, and allocations to another number of steps.

    Raises:
        PrivacyError: named.
    """
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        raise PrivacyError(f"Two releases have the same name: {sorted(names)}.")
    for plan in plans:
        if plan.allocation is not None and len(plan.allocation) != steps:
            raise PrivacyError(
                f"Release {plan.name!r} has an allocation of {len(plan.allocation)} weights; the "
                f"run has {steps} steps, each with a weight."
            )
