"""The calibration of secure sums: the noise that clients share, and the cost of a participation.

Under :class:`~fedmtl.privacy.ClientPrivacy` with a trusted server the server adds the noise. In a
secure sum (:mod:`.secure_sum`) the clients do, and epsilon holds against the server, too. The
server knows the cohorts: against it every participation is charged in full, and sampling amplifies
nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np

from .._files import Json
from .._rounding import rounded_up
from ..errors import PrivacyError
from .account_costs import AccountCosts, Demand, StoredNoise
from .binding import bind_releases, step_cost
from .clip import Clip
from .cost import PrivacyCost
from .gradients import GradientPlan
from .noise.laws import GaussianNoise
from .noise.shares import DistributedGaussian
from .release import Release, ReleasePlan
from .samplers import BoundSampler, Relation
from .settings import ClientPrivacy, Privacy, RecordPrivacy


@dataclass(frozen=True)
class SecureCalibration:
    """The calibration of a run of secure sums.

    Attributes:
        release: with its clip and its noise as shares.
        cost: of one account, for each participation.
        uses: planned participations of one client.
    """

    release: Release
    cost: PrivacyCost
    uses: int

    @property
    def noise(self) -> DistributedGaussian:
        """Returns the noise of the sum, as shares."""
        assert self.release.shares is not None
        return self.release.shares

    @property
    def costs(self) -> AccountCosts:
        """Returns the costs of all accounts: one for each client if participations are charged,
        otherwise one for all."""
        accounts = 1
        if self.release.sampling.per_participation:
            accounts = self.release.sampling.n
        kind_of = np.zeros((1, accounts), dtype=np.int64)
        return AccountCosts((self.cost,), (self.noise.multiplier,), kind_of)

    @property
    def relation(self) -> Relation:
        """Returns the relation of neighbours, for which the noise is made."""
        return self.release.relation

    def epsilon_at(self, uses: int) -> float:
        """Returns the epsilon of a client, or of a record of one, against the server and all others
        after ``uses``."""
        return self.cost.epsilon(uses, self.noise.multiplier)

    def text(self, uses: int) -> str:
        """Returns one line on the account after ``uses`` participations."""
        others = f"{self.noise.colluding:,} colluding client"
        if self.noise.colluding != 1:
            others += "s"
        unit = "one client"
        if self.release.unit == "record":
            unit = "one record of a client"
        return (
            f"epsilon {rounded_up(self.epsilon_at(uses))} at delta = "
            f"{rounded_up(self.cost.delta, 3)} for {unit} against the server and up to "
            f"{others} (relation {self.relation})"
        )

    @property
    def digest(self) -> str:
        """Returns a digest of the account and the noise, by which two sides see that they have the
        same."""
        text = json.dumps(self.header(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def header(self) -> dict[str, Json]:
        """Returns the facts of the account for the header of a ledger, JSON-ready."""
        noise = self.noise
        facts: dict[str, Json] = {}
        if self.release.unit == "record":
            facts = {"unit": "record", "units": noise.units}
        return {
            **facts,
            "account": "noise shares",
            "release": [self.release.name, self.release.dimension],
            "clip_norm": self.release.bound,
            "relation": self.relation,
            "sensitivity": noise.sensitivity,
            "colluding": noise.colluding,
            "missing": noise.missing,
            "bits": noise.bits,
            "max_roster": noise.max_roster,
            "kinds": [
                {
                    "cost": self.cost.to_dict(),
                    "multiplier": noise.multiplier,
                    "cap": self.uses,
                }
            ],
        }


def calibrate_secure_sum(
    privacy: ClientPrivacy,
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    steps: int,
    prior: StoredNoise | None = None,
) -> SecureCalibration:
    """Calibrates the noise of secure sums of clients' rows.

    Args:
        privacy: settings, with noise and an aggregation.
        plans: the one release of a round.
        sampler: the law of the cohorts.
        steps: planned rounds.
        prior: the noise of the run that is resumed, which is used as it stands, or None.

    Raises:
        PrivacyError: settings that a secure sum does not support, or that protect nobody.
        ConfigError: a budget that cannot be met.
    """
    plan = _check_supported(plans, sampler)
    sampler = sampler.to_the_server.capped(steps)
    uses = steps
    if sampler.cap is not None:
        uses = sampler.cap
    cost = step_cost(plans, sampler, privacy, delta=privacy.resolved_delta(sampler.n))
    release = bind_releases(plans, sampler, privacy, 1.0)[plan.name]
    demand = Demand(cost, privacy.epsilon, privacy.noise_multiplier, uses)
    return _calibrated(privacy, release, demand, prior or StoredNoise())


def calibrate_secure_gradients(
    privacy: RecordPrivacy,
    plans: tuple[ReleasePlan, ...],
    gradients: GradientPlan,
    sampler: BoundSampler,
    steps: int,
    prior: StoredNoise | None = None,
) -> SecureCalibration:
    """Calibrates the noise of secure sums of gradients of single records.

    The sum over all clients has the noise that one client alone would need (Abadi et al., CCS 2016,
    for a server without the data). Every client draws its records by secret coins, which amplify
    against the server and the other clients; the cohorts are public.

    Args:
        privacy: settings, with noise and an aggregation.
        plans: the one release of a round.
        gradients: of the records, all drawn at one rate.
        sampler: the law of the cohorts.
        steps: planned rounds.
        prior: see :func:`calibrate_secure_sum`.

    Raises:
        PrivacyError: settings that a secure sum does not support, or that protect nobody.
        ConfigError: a budget that cannot be met.
    """
    # first: this is the fault of the methods that train locally, whatever else they release
    other = next((plan.name for plan in plans if not plan.from_gradients), None)
    if other is not None:
        raise PrivacyError(
            f"RecordPrivacy.aggregation adds up gradients of single records, and release "
            f"{other!r} is of other rows; take FedSGD, or leave the aggregation out."
        )
    plan = _check_supported(plans, sampler)
    sampler = sampler.to_the_server.capped(steps)
    if sampler.relation != "zero_out":
        raise PrivacyError(
            f"RecordPrivacy.aggregation needs a public schedule, and {sampler.describe()} is none; "
            "take FullParticipation or CyclicCohorts."
        )
    rates = set(gradients.rates.tolist())
    if len(rates) != 1 or (gradients.local_steps != 1).any():
        raise PrivacyError(
            "RecordPrivacy.aggregation has one noise for the records of all clients, which are "
            "drawn at one rate, once in a round; GradientPlan has other rates or several steps."
        )
    uses = steps
    if sampler.cap is not None:
        uses = sampler.cap
    records = gradients.records
    cost = PrivacyCost(
        law=privacy.mechanism,
        sizes=(plan.dimension,),
        delta=privacy.resolved_delta(records),
        sampled=rates.pop(),
    )
    release = Release(
        **vars(plan),
        sampling=sampler,
        unit="record",
        clip=Clip(privacy.initial_norm, "l2", privacy.stability),
        noise=GaussianNoise(1.0),
    )
    assert privacy.epsilon is None or isinstance(privacy.epsilon, (int, float))
    demand = Demand(cost, privacy.epsilon, privacy.noise_multiplier, uses)
    return _calibrated(privacy, release, demand, prior or StoredNoise(), units=records)


def _calibrated(
    privacy: Privacy,
    release: Release,
    demand: Demand,
    prior: StoredNoise,
    units: int | None = None,
) -> SecureCalibration:
    """Returns the calibration of a release to a demand.

    Args:
        privacy: settings, with an aggregation.
        release: with its clip.
        demand: for a cost that assumes a grid of any number of cells.
        prior: the noise of the run that is resumed.
        units: the most vectors in a sum; None: one of each client.
    """
    stored = prior.kinds
    # A resumed run keeps the noise it began with, to the last bit.
    if len(stored) == 1:
        demand = replace(demand, cost=PrivacyCost.from_dict(stored[0].cost))
    # A fixed point. z sets the width g of the grid, and the slack, and so z, depends on the cells
    # z S / g that the cost assumes. If the grid has fewer, these are assumed and z is calibrated
    # again; the number only falls, so this ends.
    while True:
        if len(stored) == 1:
            multiplier = stored[0].multiplier
            affordable = stored[0].cap or demand.uses
        else:
            multiplier, affordable = demand.met()
        shares = _shares(privacy, release, multiplier, units)
        if shares.cells >= demand.cost.cells:
            break
        demand = replace(demand, cost=replace(demand.cost, cells=shares.cells))
    sampler = release.sampling
    if sampler.per_participation:
        sampler = sampler.with_cap(affordable)
    release = replace(release.with_multiplier(multiplier), sampling=sampler, shares=shares)
    return SecureCalibration(release, demand.cost, affordable)


def _shares(
    privacy: Privacy, release: Release, multiplier: float, units: int | None
) -> DistributedGaussian:
    """Returns the noise of a release as shares."""
    aggregation = privacy.aggregation
    assert aggregation is not None
    cohort = int(release.sampling.cohort)
    return DistributedGaussian(
        multiplier=multiplier,
        sensitivity=release.sensitivity,
        bound=release.bound,
        max_roster=cohort,
        colluding=aggregation.colluding_of(cohort),
        missing=aggregation.missing,
        bits=aggregation.bits,
        units=units,
    )


def _check_supported(plans: tuple[ReleasePlan, ...], sampler: BoundSampler) -> ReleasePlan:
    """Returns the one release of a round.

    Raises:
        PrivacyError: several releases, or one that a secure sum does not support.
    """
    if len(plans) != 1:
        names = ", ".join(plan.name for plan in plans)
        raise PrivacyError(
            f"Secure aggregation takes algorithms with one release in a round, not {names}."
        )
    if sampler.weighted:
        raise PrivacyError(
            f"Secure aggregation has no weights of rows, and {sampler.describe()} gives them; take "
            "FullParticipation or CyclicCohorts."
        )
    (plan,) = plans
    if plan.form != "vector" or plan.rows is not None or plan.allocation is not None:
        raise PrivacyError(
            f"Secure aggregation adds up rows with equal noise in every round; release "
            f"{plan.name!r} is of products, has noise of its own on rows, or an allocation."
        )
    return plan
