"""The claim about one release and the law of its noise, from the cost that is charged.

A claim is read off the cost, which is data, and public facts: the scale of the noise on a sum of
rows is z S / m, on a sum of gradients of single records z S / (q n_i). z and q are of the cost, S
follows from the clip norm of the settings and from how neighbours differ, and n_i is the client's
number of records at the time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from dp_accounting import dp_event

from ..privacy.accounting.knorm import KNormDpEvent
from ..privacy.accounting.loss_laws import ReplacedPoissonDpEvent
from ..privacy.cost import PrivacyCost
from ..privacy.quantile import QuantileClip
from ..privacy.release import Form
from ..privacy.samplers import BoundSampler, Relation
from ..secure.roster import honest_rows, least_roster

GRADIENTS = "gradients"
ROWS = "rows of "


@dataclass(frozen=True)
class Shares:
    """The shares of the noise of a secure sum, as the settings state them.

    Attributes:
        cohort: n, clients of a cohort, each of which adds a share.
        colluding: t of them, whose shares count as nothing.
        missing: d of them, which may drop out.
        bits: of a number of a sum.
        units: the most vectors in a sum, if clients have several; None: one of each client.
    """

    cohort: int
    colluding: int
    missing: int
    bits: int
    units: int | None = None

    def deviation(self, std: float, width: float, cohort: int | None = None) -> int:
        """Returns the deviation of a share in cells, of which h make at least ``std``.

        Args:
            std: of the noise that is charged, z S.
            width: of the grid.
            cohort: of another size than the largest.
        """
        counted = honest_rows(cohort or self.cohort, self.colluding, self.missing)
        square = (Fraction(std) / Fraction(width)) ** 2 / counted
        root = math.isqrt(math.ceil(square))
        if root**2 < square:
            root += 1
        return root

    def width(self, std: float, bound: float) -> float:
        """Returns the smallest power of two on whose grid sums fit their words, and doubles.

        Args:
            std: of the noise that is charged, z S.
            bound: C.
        """
        width = 2.0 ** (math.floor(math.log2(bound)) - 50)
        most = min(2 ** (self.bits - 1), 2**53)
        smallest = least_roster(self.colluding, self.missing)
        sums = [most]
        while max(sums) >= most:
            width *= 2
            sums = [
                (self.units or rows) * math.ceil(Fraction(bound) / Fraction(width))
                + math.ceil(
                    Fraction(25, 2) * self.deviation(std, width, rows) * (math.isqrt(rows) + 1)
                )
                for rows in (self.cohort, smallest)
            ]
        return width


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The law, the scale and the sensitivity of a release as its cost states them, without the
    arithmetic of the channel.

    Attributes:
        law: name of the law of the noise.
        multiplier: scale of the noise over the sensitivity.
        bound: C, the clip norm in the settings (of the first step, if it adapts).
        relation: the neighbour relation of the rows: ``"replace"`` for random cohorts of a fixed
            size, and for zero-out if clients without data send rows.
        norm: of the sensitivity that this law needs.
        form: the released function of the rows: a sum of vectors, or of matrices.
        size: noised coordinates.
        denominator: m, the public constant that divides the sum; of gradients q n_i.
        sampled: probability of a Poisson-sampled cost, else None.
        bands: of noise that is correlated over rounds, C w is independent noise of this multiplier;
            empty if noise is independent as it is.
        shares: of noise that the clients add in a secure sum; None if the server adds it.

    Example:
        >>> from fedmtl.audit import Claim
        >>> claim = Claim(
        ...     law="gaussian",
        ...     multiplier=1.5,
        ...     bound=2.0,
        ...     relation="replace",
        ...     norm="l2",
        ...     size=3,
        ...     denominator=10.0,
        ... )
        >>> claim.sensitivity, round(claim.scale, 6)  # 2 * 2, and 1.5 * 4 / 10
        (4.0, 0.6)
    """

    law: str
    multiplier: float
    bound: float
    relation: Relation
    norm: Literal["l1", "l2"]
    form: Form = "vector"
    size: int
    denominator: float
    sampled: float | None = None
    bands: tuple[float, ...] = ()
    shares: Shares | None = None

    @property
    def sensitivity(self) -> float:
        """Returns S, from the clip norm and the relation: C, doubled for replace-one. For outer
        products w w^T it is C^2; for replace-one the farthest are orthogonal, at sqrt(2) C^2 in
        the L2 norm and 2 C^2 in the L1 norm."""
        if self.form == "vector":
            return self.bound * (2.0 if self.relation == "replace" else 1.0)
        farther = 2.0
        if self.norm != "l1":
            farther = math.sqrt(2.0)
        return self.bound**2 * (farther if self.relation == "replace" else 1.0)

    @property
    def scale(self) -> float:
        """Returns the scale of the noise on the released mean: the standard deviation, for the
        Gaussian."""
        if self.shares is not None:
            return self.std / self.denominator
        return self.multiplier * self.sensitivity / self.denominator

    @property
    def std(self) -> float:
        """Returns the root mean square of a coordinate of the noise on the sum."""
        if self.shares is not None:
            share = self.shares.deviation(self.multiplier * self.sensitivity, self.width)
            return math.sqrt(self.shares.cohort) * share * self.width
        # of a symmetric matrix with as many coordinates
        side = (math.sqrt(8 * self.size + 1) - 1) / 2
        units = {
            "gaussian": 1.0,
            "laplace": math.sqrt(2),
            "l2_laplace": math.sqrt(self.size + 1),
            "wishart": math.sqrt(side + 1),  # of the published MP-MTL, its mean included
        }
        unit = units[self.law]
        return unit * self.multiplier * self.sensitivity

    @property
    def width(self) -> float:
        """Returns the public width of the grid of the noised sum, in secure mode and of shares."""
        if self.shares is not None:
            return self.shares.width(self.multiplier * self.sensitivity, self.bound)
        if self.form == "vector":
            bound = self.bound
        else:
            bound = self.bound**2
        std = self.std
        if self.bands:
            bound = bound / (2 * len(self.bands))
            std = std / self.bands[0]
        return width_of(
            bound, self.norm, self.size, std * (2.0**-40 if self.law == "gaussian" else 2.0**-20)
        )

    @property
    def cells(self) -> int:
        """Returns the deviation of the noise that is charged in cells of the grid, rounded down."""
        charged = Fraction(self.multiplier) * Fraction(self.sensitivity)
        return math.floor(charged / Fraction(self.width))


def weighted(cost: PrivacyCost, multiplier: float, use: int) -> float:
    """Returns the noise multiplier of a use, of the last one beyond an allocation."""
    if cost.weights is None:
        return multiplier
    return multiplier / cost.weights[min(use, len(cost.weights) - 1)]


def composition(cost: PrivacyCost, multiplier: float, uses: int) -> list[tuple[Any, int]]:
    """Returns the events of ``uses``, with their numbers; uses beyond an allocation are taken for
    the last one."""
    if cost.weights is None:
        return [(event_of(cost, multiplier), uses * cost.sums)]
    return [(event_of(cost, weighted(cost, multiplier, use)), cost.sums) for use in range(uses)]


def event_of(cost: PrivacyCost, multiplier: float) -> Any:
    """Returns the ``dp_accounting`` event of one noised sum with noise of ``multiplier``, of all
    its releases; a multiplier of 0 is no noise."""
    if multiplier == 0:
        return dp_event.NonPrivateDpEvent()
    events: list[Any] = [dp_event.LaplaceDpEvent(multiplier) for _ in cost.sizes]
    if cost.law == "gaussian":  # of the concatenated vector
        events = [dp_event.GaussianDpEvent(sum(multiplier**-2.0 for _ in cost.sizes) ** -0.5)]
    elif cost.law == "l2_laplace":
        events = [KNormDpEvent(1 / multiplier, size) for size in cost.sizes]
    if len(events) == 1:
        event = events[0]
    else:
        event = dp_event.ComposedDpEvent(events)
    if cost.sampled == 1:
        return event
    return (ReplacedPoissonDpEvent if cost.replaced else dp_event.PoissonSampledDpEvent)(
        cost.sampled, event
    )


def width_of(bound: float, norm: str, size: int, max_width: float) -> float:
    """Returns the largest power of two that is at most C 2^-21 over the spread of a cell, and at
    most ``max_width``."""
    if norm == "l1":
        spread = float(size)
    else:
        spread = math.sqrt(size)
    return 2.0 ** math.floor(math.log2(min(bound / spread * 2.0**-21, max_width)))


def expected_cohort(sampler: BoundSampler) -> float:
    """Returns m, from the setting and not from the sampler's own property."""
    cohort = getattr(sampler, "cohort", None)
    return float(sampler.n if cohort is None else cohort)


def count_std(adaptive: QuantileClip, sampler: BoundSampler) -> float:
    """Returns the standard deviation of the noise on the count of unclipped clients: as set, or m /
    20."""
    if adaptive.count_noise is None:
        return expected_cohort(sampler) / 20
    return adaptive.count_noise
