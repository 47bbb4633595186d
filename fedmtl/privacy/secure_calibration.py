"""The calibration of secure sums: the noise that clients share, and the cost of a participation.

Under :class:`~fedmtl.privacy.ClientPrivacy` with a trusted server the server adds the noise. In a
secure sum (:mod:`.secure_sum`) the clients do, and epsilon holds against the server, too. The
server knows who takes part: against it every participation is charged in full, and sampling
amplifies nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .._rounding import rounded_up
from ..errors import PrivacyError
from .binding import bind_releases, step_cost
from .cost import PrivacyCost
from .costs import Demand
from .noise.shares import DistributedGaussian
from .release import Release, ReleasePlan
from .samplers import BoundSampler, Relation
from .settings import ClientPrivacy


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
    def relation(self) -> Relation:
        """Returns the relation of neighbours, for which the noise is made."""
        return self.release.relation

    def epsilon_at(self, uses: int) -> float:
        """Returns the epsilon of a client against the server and all others after ``uses``."""
        return self.cost.epsilon(uses, self.noise.multiplier)

    def text(self, uses: int) -> str:
        """Returns one line on the account after ``uses`` participations."""
        others = f"{self.noise.colluding:,} colluding client"
        if self.noise.colluding != 1:
            others += "s"
        return (
            f"epsilon {rounded_up(self.epsilon_at(uses))} at delta = "
            f"{rounded_up(self.cost.delta, 3)} for one client against the server and up to "
            f"{others} (relation {self.relation})"
        )

    @property
    def digest(self) -> str:
        """Returns a digest of the account and the noise, by which two sides see that they have the
        same."""
        text = json.dumps(self.header(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def header(self) -> dict[str, Any]:
        """Returns the facts of the account for the header of a ledger, JSON-ready."""
        noise = self.noise
        return {
            "account": "noise shares",
            "release": [self.release.name, self.release.dimension],
            "clip_norm": self.release.bound,
            "relation": self.relation,
            "sensitivity": noise.sensitivity,
            "colluding": noise.colluding,
            "missing": noise.missing,
            "bits": noise.bits,
            "most": noise.max_roster,
            "kinds": [
                {
                    "price": self.cost.to_dict(),
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
    prior: Mapping[str, Any] | None = None,
) -> SecureCalibration:
    """Calibrates the noise of secure sums.

    Args:
        privacy: settings, with noise and an aggregation.
        plans: the one release of a round.
        sampler: who takes part.
        steps: planned rounds.
        prior: header of the ledger that is resumed: its noise is used as it stands. None without
            one.

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
    stored = (prior or {}).get("kinds", ())
    # A resumed run keeps the noise it began with, to the last bit.
    if len(stored) == 1:
        cost = PrivacyCost.from_dict(stored[0]["price"])
    # A fixed point. z sets the width g of the grid, and the slack, and so z, depends on the cells
    # z S / g that the cost assumes. If the grid has fewer, these are assumed and z is calibrated
    # again; the number only falls, so this ends.
    while True:
        if len(stored) == 1:
            multiplier = float(stored[0]["multiplier"])
            affordable = stored[0]["cap"] or uses
        else:
            demand = Demand(cost, privacy.epsilon, privacy.noise_multiplier, uses)
            multiplier, affordable = demand.met()
        release = bind_releases(plans, sampler, privacy, multiplier)[plan.name]
        shares = _shares(privacy, release, multiplier)
        if shares.cells >= cost.cells:
            if sampler.per_participation:
                sampler = sampler.with_cap(affordable)
            release = replace(release, sampling=sampler, shares=shares)
            return SecureCalibration(release, cost, affordable)
        cost = replace(cost, cells=shares.cells)


def _shares(privacy: ClientPrivacy, release: Release, multiplier: float) -> DistributedGaussian:
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
