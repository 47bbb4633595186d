"""Privacy cost: epsilon of the uses of an account at a noise multiplier, and the multiplier that a
budget affords.

A use is a round, or one participation of a client: an activation, or all its local steps. Every
statement on epsilon (calibration, the budget of a run, its report, its ledger, a search and the
audit) is composed from a :class:`PrivacyCost`, which is plain data and stands as JSON in the header
of the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from .._files import Json
from ..errors import ConfigError, PrivacyError
from .accounting.composition import epsilon
from .accounting.loss_laws import ReplacedPoissonDpEvent
from .accounting.multipliers import smallest_multiplier
from .events import DpEvent, dp_event
from .noise.discrete import LEAST, slack
from .noise.laws import LAWS

_MANY = 1 << 40  # uses that no run makes


@dataclass(frozen=True, kw_only=True)
class PrivacyCost:
    """The privacy cost of the uses of one account, as a function of the noise multiplier z (scale
    of the noise over the sensitivity).

    Several releases of one use share the coin of each client, so Gaussian ones are one Gaussian
    release of the concatenated vector with multiplier ``sum(z ** -2) ** -0.5``, sampled once;
    composing them as independently sampled would understate epsilon. Releases with other noise are
    composed if nothing is sampled, and refused elsewhere.

    Args:
        law: name of the law of the noise, of ``noise/laws.py``.
        sizes: noised coordinates of each release of one use.
        delta: of every epsilon, in [0, 1).
        sampled: q, the probability that the protected unit takes part, by a secret coin for each
            sum; 1 without sampling.
        replaced: True if neighbours differ by a unit that is replaced by another one, and units
            are sampled.
        sums: noised sums of one use: the local steps of one participation.
        weights: of the uses, with mean 1: use t has the multiplier z / w_t. None: all are alike.
        max_uses: the largest number of uses; None without a limit. With weights it is their number.
        bands: rounds whose noise one use meets, if it is correlated over rounds; 1 otherwise.
        cells: of the grid in a standard deviation of the noise on a sum, or less, in secure mode.

    Raises:
        PrivacyError: several releases of other than Gaussian noise under one sampled cohort.

    Example:
        >>> from fedmtl.privacy import PrivacyCost
        >>> cost = PrivacyCost(law="gaussian", sizes=(650,), delta=1e-5, sampled=0.1)
        >>> z = cost.multiplier(4.0, 100)  # the smallest for 100 rounds at epsilon 4
        >>> 3.99 < cost.epsilon(100, z) <= 4.0
        True
    """

    law: str
    sizes: tuple[int, ...]
    delta: float
    sampled: float = 1.0
    replaced: bool = False
    sums: int = 1
    weights: tuple[float, ...] | None = None
    max_uses: int | None = None
    bands: int = 1
    cells: int = LEAST

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "max_uses", len(self.weights))
        # Composed as independently sampled they would seem to cost less than they do.
        if len(self.sizes) > 1 and self.sampled < 1 and not LAWS[self.law].joint:
            raise PrivacyError(
                f"{len(self.sizes)} releases with mechanism={self.law!r} under one sampled "
                "cohort are not supported: they share its coins. Use mechanism='gaussian', or a "
                "schedule without sampling."
            )

    def event(self, multiplier: float, use: int = 0) -> DpEvent:
        """Returns the ``dp_accounting`` event of one noised sum, of all its releases.

        Args:
            multiplier: z, of a use of weight 1; 0 is no noise.
            use: number of the use, from 0, for its weight.
        """
        if multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        z = multiplier
        if self.weights is not None:
            z /= self.weights[use]
        law = LAWS[self.law]
        if law.joint:
            # One coin, one cohort: the concatenated vector is one release, with less noise than
            # each.
            event: DpEvent = dp_event.GaussianDpEvent(sum(z**-2.0 for _ in self.sizes) ** -0.5)
        else:
            events = [law(z).event(size) for size in self.sizes]
            if len(events) == 1:
                event = events[0]
            else:
                event = dp_event.ComposedDpEvent(events)
        if self.sampled < 1:
            if self.replaced:
                sampled = ReplacedPoissonDpEvent
            else:
                sampled = dp_event.PoissonSampledDpEvent
            event = sampled(self.sampled, event)
        return event

    def slack(self, uses: int, epsilon: float) -> float:
        """Returns the part of the privacy loss that is left out of an epsilon in secure mode.

        Gaussian noise is drawn there as whole numbers, see :mod:`.noise.discrete`. Other noise has
        none.

        Args:
            uses: number of uses, from 0.
            epsilon: after these uses.
        """
        # at least, with a count and a score beside it
        numbers = 3 * sum(self.sizes) * uses * self.sums * self.bands
        if LAWS[self.law].joint:
            return slack(numbers, epsilon, self.cells)
        return 0.0

    def after(self, uses: int, multiplier: float) -> DpEvent:
        """Returns the event of the first uses.

        Args:
            uses: number of uses, at most :attr:`max_uses`.
            multiplier: z, of a use of weight 1.

        Raises:
            PrivacyError: more uses than there are.
        """
        event, count = self._composed(uses, multiplier)
        return dp_event.SelfComposedDpEvent(event, count)

    def epsilon(self, uses: int, multiplier: float, *, coarsen: float = 1.0) -> float:
        """Returns an upper bound on epsilon after ``uses`` uses; infinite without noise, 0 of no
        use.

        Args:
            uses: at least 0.
            multiplier: z.
            coarsen: factor on the grid of the accountant; above 1 is faster and looser.

        Raises:
            PrivacyError: more uses than there are.
        """
        if uses == 0 or self.sums == 0:
            return 0.0
        event, count = self._composed(uses, multiplier)
        # A part of delta, and of epsilon, is kept for the discrete law of the noise.
        value = epsilon(
            event, count, self.delta * math.exp(-self.slack(uses, 0.0) / 2), coarsen=coarsen
        )
        if math.isinf(value):
            return value
        return value + self.slack(uses, value)

    def affordable(self, budget: float, multiplier: float, limit: int | None = None) -> int:
        """Returns the largest number of uses that a budget pays for.

        Args:
            budget: epsilon, at the delta of the cost.
            multiplier: z, of a use of weight 1.
            limit: upper bound on the number; None for none.
        """
        limits = [each for each in (limit, self.max_uses) if each is not None]
        top = min(limits, default=_MANY)
        # Doubling finds an interval [low, high) that the number is in, and bisection halves it.
        low = 0
        high = 1
        while high <= top and self.epsilon(high, multiplier) <= budget:
            low = high
            high = 2 * high
        high = min(high, top + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if self.epsilon(middle, multiplier) <= budget:
                low = middle
            else:
                high = middle
        return low

    def multiplier(self, budget: float, uses: int) -> float:
        """Returns the noise multiplier with which uses cost at most a budget; cached.

        Args:
            budget: epsilon above 0, at the delta of the cost.
            uses: number of uses, at least 1.

        Returns:
            z, within 1e-5 relative of the smallest one.

        Raises:
            ConfigError: a budget that cannot be met, or that needs no noise.
        """
        return _multiplier(self, float(budget), uses)

    def single(self) -> PrivacyCost:
        """Returns this cost, at least one sum a use."""
        return replace(self, sums=max(1, self.sums))

    def to_dict(self) -> dict[str, Json]:
        """Returns JSON."""
        values = asdict(self)
        return values | {key: list(each) for key, each in values.items() if isinstance(each, tuple)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyCost:
        """Returns the cost that :meth:`to_dict` wrote.

        Args:
            values: of :meth:`to_dict`, as a ledger or JSON has them.

        Raises:
            TypeError, KeyError: values that are no cost.
        """
        fields: dict[str, Any] = {
            key: tuple(each) if isinstance(each, list) else each for key, each in values.items()
        }
        return cls(**fields)

    def _composed(self, uses: int, multiplier: float) -> tuple[DpEvent, int]:
        """Returns an event and the number of its occurrences in ``uses`` uses."""
        if self.max_uses is not None and uses > self.max_uses:
            raise PrivacyError(
                f"{uses} uses were charged, but the budget is allocated to {self.max_uses}."
            )
        if self.weights is None:
            return self.event(multiplier), uses * self.sums
        return dp_event.ComposedDpEvent(
            [self.event(multiplier, use) for use in range(uses)]
            # The local steps of one use share its weight.
        ), self.sums


@lru_cache(maxsize=1024)
def _multiplier(cost: PrivacyCost, budget: float, uses: int) -> float:
    def spent(multiplier: float, coarsen: float) -> float:
        return cost.epsilon(uses, multiplier, coarsen=coarsen)

    return smallest_multiplier(
        spent, target=budget, delta=cost.delta, uses=f"{uses * cost.sums} steps"
    )


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Returns the weights over their mean: an allocation.

    Raises:
        ConfigError: no weights, or one that is not positive and finite.
    """
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"An allocation has positive finite weights, not {list(weights)[:5]}.")
    mean = math.fsum(weights) / len(weights)
    return tuple(float(weight) / mean for weight in weights)
