"""Settings and terms of secure sums: who may collude or be missing, and the noise that follows.

Under :class:`~fedmtl.privacy.ClientPrivacy` with a trusted server the server adds the noise. In a
secure sum (:mod:`.secure_sum`) the clients do, and epsilon holds against the server, too. The
server knows who takes part: against it every participation is charged in full, and sampling
amplifies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from .._check import Checked, Whole
from .._rounding import rounded_up
from ..errors import PrivacyError
from .cost import PrivacyCost
from .costs import Demand
from .noise.shares import ShareNoise
from .quantile import QuantileClip
from .release import Release, ReleasePlan, bind_releases, step_cost
from .samplers import SHIFTS, BoundSampler, Relation
from .settings import ClientPrivacy


@dataclass(frozen=True, kw_only=True)
class SecureAggregation(Checked):
    """Settings of a secure sum: clients need not trust the server with their rows.

    Args:
        colluding: clients of a roster that may tell the server all they have; nobody can measure
            it. A third of the cohort is a careful choice.
        missing: clients of a roster that may be lost after it is fixed. Those that are away before
            cost nothing.
        bits: of a number of a sum.

    Raises:
        ConfigError: a value out of range.
    """

    colluding: Whole
    missing: Whole = 0
    bits: Literal[32, 64] = 32


@dataclass(frozen=True)
class SecureTerms:
    """The terms of a run of secure sums.

    Attributes:
        release: with its clip and the noise of the sum.
        noise: that of the sum, as shares.
        relation: of neighbours, for which the noise is made.
        cost: of one account, for each participation.
        uses: planned participations of one client.
    """

    release: Release
    noise: ShareNoise
    relation: Relation
    cost: PrivacyCost
    uses: int

    def epsilon_at(self, uses: int) -> float:
        """Returns the epsilon of a client against the server and all others after ``uses``."""
        return self.cost.epsilon(uses, self.noise.multiplier)

    def text(self, uses: int) -> str:
        """Returns one line on the account after ``uses`` participations."""
        return (
            f"epsilon {rounded_up(self.epsilon_at(uses))} at delta = "
            f"{rounded_up(self.cost.delta, 3)} for one client against the server and up to "
            f"{self.noise.colluding:,} colluding clients (relation {self.relation})"
        )

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
            "most": noise.most,
            "kinds": [
                {
                    "price": self.cost.to_dict(),
                    "multiplier": noise.multiplier,
                    "cap": self.uses,
                }
            ],
        }


def secure_terms(
    privacy: ClientPrivacy,
    aggregation: SecureAggregation,
    plan: ReleasePlan,
    sampler: BoundSampler,
    steps: int,
) -> SecureTerms:
    """Calibrates the noise of secure sums.

    Args:
        privacy: settings, with noise.
        aggregation: settings of the sums.
        plan: of the one release of a round.
        sampler: who takes part.
        steps: planned rounds.

    Raises:
        PrivacyError: settings that a secure sum does not support, or that protect nobody.
        ConfigError: a budget that cannot be met.
    """
    _check_supported(privacy, plan, sampler)
    sampler = sampler.capped(steps)
    uses = steps
    if sampler.cap is not None:
        uses = sampler.cap
    cost = step_cost((plan,), sampler, privacy, delta=privacy.resolved_delta(sampler.n))
    cells = cost.cells
    relation = _known_roster(plan, sampler)
    # The grid follows from the noise, and the noise, by the slack, a little from the grid. A
    # coarser grid needs more noise, so cells fall until the noise has as many as are charged for.
    while True:
        cost = replace(cost, cells=cells)
        demand = Demand(cost, privacy.epsilon, privacy.noise_multiplier, uses)
        multiplier, affordable = demand.met()
        release = bind_releases((plan,), sampler, privacy, multiplier)[plan.name]
        noise = ShareNoise(
            multiplier=multiplier,
            sensitivity=release.contribution_bound * SHIFTS[relation],
            bound=release.bound,
            most=int(sampler.cohort),
            colluding=aggregation.colluding,
            missing=aggregation.missing,
            bits=aggregation.bits,
        )
        if noise.cells >= cells:
            return SecureTerms(release, noise, relation, cost, affordable)
        cells = noise.cells


def _known_roster(plan: ReleasePlan, sampler: BoundSampler) -> Relation:
    """Returns the relation of neighbours against a server that knows who takes part."""
    relation = sampler.relation
    # A client that is added or removed would be seen by its keys: only its data can be hidden.
    if relation == "add_remove":
        relation = "zero_out"
    return plan.relation_of_rows(relation)


def _check_supported(privacy: ClientPrivacy, plan: ReleasePlan, sampler: BoundSampler) -> None:
    """Raises PrivacyError for settings that a secure sum does not support."""
    if sampler.amplified:
        raise PrivacyError(
            "Secure aggregation: the server knows who takes part, so sampling amplifies nothing "
            "against it; take CyclicCohorts."
        )
    if sampler.weighted:
        raise PrivacyError(
            f"Secure aggregation has no weights of rows, and {sampler.describe()} gives them; take "
            "FullParticipation or CyclicCohorts."
        )
    if privacy.noiseless or privacy.mechanism != "gaussian":
        raise PrivacyError(
            "Secure aggregation adds shares of Gaussian noise; take mechanism='gaussian' and a "
            "finite epsilon."
        )
    if privacy.bands is not None:
        raise PrivacyError(
            "Secure aggregation has noise that is new in every round; leave bands out."
        )
    if isinstance(privacy.clip_norm, QuantileClip):
        raise PrivacyError(
            "Secure aggregation takes a number as clip_norm: the count of a QuantileClip needs "
            "shares of its own, which it does not have yet."
        )
    if plan.form != "vector" or plan.rows is not None or plan.allocation is not None:
        raise PrivacyError(
            f"Secure aggregation adds up rows with equal noise in every round; release "
            f"{plan.name!r} is of products, has noise of its own on rows, or an allocation."
        )
