"""Prices: what the uses of an account cost at a noise multiplier, and which multiplier a budget
affords.

A use is a round, or what a client does when it takes part: an activation, or all its local steps.
Everything that is said about epsilon (calibration, the budget of a run, its report, its ledger, a
search and the audit) is composed from a :class:`Price`, which is plain data and stands as JSON in
the header of the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .._rounding import rounded_up
from ..errors import ConfigError, PrivacyError
from .accounting.calibration import smallest_multiplier
from .accounting.composition import epsilon
from .accounting.losses import ReplacedPoissonDpEvent
from .events import dp_event
from .noise.discrete import slack
from .noise.laws import LAWS


@dataclass(frozen=True, kw_only=True)
class Price:
    """What the uses of one account cost, as a function of the noise multiplier z (scale of the
    noise over the sensitivity).

    Several releases of one use share the coin of each client, so Gaussian ones are one Gaussian
    release of the concatenated vector with multiplier ``sum(z ** -2) ** -0.5``, sampled once;
    composing them as independently sampled would understate epsilon. Releases with other noise are
    composed where nothing is sampled, and refused elsewhere.

    Args:
        mechanism: name of the law of the noise.
        sizes: noised coordinates of each release of one use.
        delta: of every epsilon, in [0, 1).
        sampled: q, the probability that the protected unit takes part, by a secret coin for each
            sum; 1 without sampling.
        replaced: whether neighbours differ by a unit that is replaced by another one, where units
            are sampled.
        sums: noised sums of one use: the local steps of one participation.
        weights: of the uses, with mean 1: use t has the multiplier z / w_t. None: all are alike.
        most: the largest number of uses; None without a limit. With weights it is their number.
        bands: rounds whose noise one use meets, where it is correlated over rounds; 1 elsewhere.

    Raises:
        PrivacyError: several releases of other than Gaussian noise under one sampled cohort.
    """

    mechanism: str
    sizes: tuple[int, ...]
    delta: float
    sampled: float = 1.0
    replaced: bool = False
    sums: int = 1
    weights: tuple[float, ...] | None = None
    most: int | None = None
    bands: int = 1

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "most", len(self.weights))
        if len(self.sizes) > 1 and self.sampled < 1 and not LAWS[self.mechanism].joint:
            raise PrivacyError(
                f"{len(self.sizes)} releases with mechanism={self.mechanism!r} under one sampled "
                "cohort are not supported: they share its coins. Use mechanism='gaussian', or a "
                "schedule without sampling."
            )

    def event(self, multiplier: float, use: int = 0) -> Any:
        """Return the ``dp_accounting`` event of one noised sum in use number ``use``, from 0, whose
        cost is finite: of all its releases. A multiplier of 0 is no noise."""
        if multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        z = multiplier / (1.0 if self.weights is None else self.weights[use])
        law = LAWS[self.mechanism]
        if law.joint:
            event: Any = dp_event.GaussianDpEvent(sum(z**-2.0 for _ in self.sizes) ** -0.5)
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
        """Returns the part of the privacy loss that ``epsilon`` after ``uses`` uses leaves out.
        In secure mode Gaussian noise is drawn as whole numbers, see :mod:`.noise.discrete`.
        Other noise has none."""
        # at least, with a count and a score beside it
        numbers = 3 * sum(self.sizes) * uses * self.sums * self.bands
        if LAWS[self.mechanism].joint:
            return slack(numbers, epsilon)
        return 0.0

    def after(self, uses: int, multiplier: float) -> Any:
        """Return the event of the first ``uses`` uses.

        Raises:
            PrivacyError: more uses than there are.
        """
        event, count = self._composed(uses, multiplier)
        return dp_event.SelfComposedDpEvent(event, count)

    def epsilon(self, uses: int, multiplier: float, *, coarsen: float = 1.0) -> float:
        """Return an upper bound on epsilon after ``uses`` uses; infinite without noise, 0 of no
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
        value = epsilon(event, count, self.delta / (1 + self.slack(uses, 0.0)), coarsen=coarsen)
        if math.isinf(value):
            return value
        return value + self.slack(uses, value)

    def affordable(self, budget: float, multiplier: float, most: int | None = None) -> int:
        """Return the largest number of uses, up to ``most``, whose epsilon is at most
        ``budget``."""
        limits = [limit for limit in (most, self.most) if limit is not None]
        if limits:
            top = min(limits)
        else:
            top = 1 << 40
        low = 0
        high = 1
        while high <= top and self.epsilon(high, multiplier) <= budget:
            low = high
            high = 2 * high
        high = min(high, top + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.epsilon(middle, multiplier) <= budget else (low, middle)
            )
        return low

    def multiplier(self, budget: float, uses: int) -> float:
        """Return the noise multiplier whose ``uses`` uses cost at most ``budget``, within 1e-5
        relative of the smallest one; cached.

        Raises:
            ConfigError: a budget that cannot be met, or that needs no noise.
        """
        return _multiplier(self, float(budget), uses)

    def calibrated(
        self, budget: float | None, multiplier: float | None, uses: int, *, of: str = ""
    ) -> tuple[float, int]:
        """Return the noise multiplier that settings ask for, and how many of ``uses`` planned uses
        the budget affords: all of them unless both ``budget`` and ``multiplier`` are given.

        Args:
            budget: epsilon; infinite for no noise (a multiplier of 0), None for no limit.
            multiplier: z; None for what :meth:`multiplier` returns.
            uses: at least 0.
            of: whose budget it is, for errors.

        Raises:
            ConfigError: no noise meets the budget; or one use with ``multiplier`` exceeds it,
                unless neighbours replace rows.
        """
        if budget == math.inf:
            return 0.0, uses
        if multiplier is None:
            assert budget is not None
            return replace(self, sums=max(1, self.sums)).multiplier(budget, max(1, uses)), uses
        if budget is None:
            fitting = uses
        else:
            fitting = self.affordable(budget, multiplier, uses)
        if budget is not None and fitting < min(uses, 1) and not self.replaced:
            raise ConfigError(
                f"noise_multiplier {multiplier:g} spends more than epsilon = "
                f"{rounded_up(budget, 6)}{of} in one round at delta = {rounded_up(self.delta, 6)}. "
                "Raise noise_multiplier or epsilon, or leave the former out."
            )
        return float(multiplier), fitting

    def to_dict(self) -> dict[str, Any]:
        """Return JSON."""
        values = asdict(self)
        return values | {key: list(each) for key, each in values.items() if isinstance(each, tuple)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Price:
        """Return the price that :meth:`to_dict` wrote.

        Raises:
            TypeError, KeyError: values that are no price.
        """
        own: dict[str, Any] = {
            key: tuple(each) if isinstance(each, list) else each for key, each in values.items()
        }
        return cls(**own)

    def _composed(self, uses: int, multiplier: float) -> tuple[Any, int]:
        """Return an event and how often it happens in ``uses`` uses."""
        if self.most is not None and uses > self.most:
            raise PrivacyError(
                f"{uses} uses were charged, but the budget is allocated to {self.most}."
            )
        if self.weights is None:
            return self.event(multiplier), uses * self.sums
        return dp_event.ComposedDpEvent(
            [self.event(multiplier, use) for use in range(uses)]
        ), self.sums


@lru_cache(maxsize=1024)
def _multiplier(price: Price, budget: float, uses: int) -> float:
    def cost(multiplier: float, coarsen: float) -> float:
        return price.epsilon(uses, multiplier, coarsen=coarsen)

    return smallest_multiplier(
        cost, target=budget, delta=price.delta, what=f"{uses * price.sums} steps"
    )


@dataclass(frozen=True, eq=False)
class Prices:
    """The prices of all accounts of a run: those of one kind have the same price and noise
    multiplier.

    One account means that everybody is charged for every step, n accounts that every client has its
    own.

    Attributes:
        kinds: distinct prices.
        multipliers: z of each kind, at a weight of 1; 0 is no noise.
        kind: int64 (P, m), the kind of every account; P is 1, or R where repetitions have settings
            of their own.
        refuted: why the published accounting, which the events are, does not hold; epsilon is then
            infinite.
    """

    kinds: tuple[Price, ...]
    multipliers: tuple[float, ...]
    kind: np.ndarray
    refuted: str | None = None

    @property
    def delta(self) -> float:
        """Return the delta of every epsilon."""
        return self.kinds[0].delta

    @property
    def most(self) -> int | None:
        """Return the largest number of uses of the first account; None without a limit."""
        return self.kinds[self.kind[0, 0]].most

    def event(self, account: int = 0, use: int = 0, replicate: int = 0) -> Any:
        """Return the event of one noised sum in use number ``use`` (from 0) of ``account``."""
        kind = self.kind[replicate if len(self.kind) > 1 else 0, account]
        return self.kinds[kind].event(self.multipliers[kind], use)

    def epsilons(self, uses: np.ndarray | int) -> np.ndarray:
        """Return float64 (R, m), the epsilon of every account after ``uses``, (R, m), (m,) or one
        for all: that of the events, also where these are refuted. R is P at least."""
        kind, charges = np.broadcast_arrays(self.kind, np.asarray(uses))
        base = int(charges.max(initial=0)) + 1
        asked, index = np.unique(kind * base + charges, return_inverse=True)
        pairs = [divmod(int(item), base) for item in asked]
        each = np.array(
            [self.kinds[k].epsilon(u, self.multipliers[k]) for k, u in pairs], dtype=np.float64
        )
        return each[index.reshape(kind.shape)]

    def epsilon(self, uses: np.ndarray | int) -> float:
        """Return the largest epsilon after ``uses``, as for :meth:`epsilons`; of one account the
        most uses count."""
        return float(self.epsilons(uses).max())

    def affordable(self, budget: float) -> int:
        """Return the largest number of uses of the first account whose epsilon is at most
        ``budget``."""
        kind = self.kind[0, 0]
        return self.kinds[kind].affordable(budget, self.multipliers[kind])

    def header(self, caps: np.ndarray | None) -> dict[str, Any]:
        """Return JSON for a ledger: the number of accounts; one entry for every kind of them, with
        the cap on its uses of ``caps`` (m,), or None; and the kind of every account where there are
        several."""
        most = [
            None if caps is None else int(caps[self.kind[0] == k].max(initial=0))
            for k in range(len(self.kinds))
        ]
        kinds = [
            {"price": price.to_dict(), "multiplier": z, "cap": cap}
            for price, z, cap in zip(self.kinds, self.multipliers, most, strict=True)
        ]
        if len(kinds) > 1:
            several = {"kind_of": self.kind[0].tolist()}
        else:
            several = {}
        return {"accounts": self.kind.shape[1], "kinds": kinds, **several}

    @cached_property
    def by_account(self) -> np.ndarray:
        """Return z of each account at a weight of 1, (P, m) float64."""
        return np.array(self.multipliers)[self.kind]

    def of_uses(self, accounts: np.ndarray, uses: np.ndarray) -> np.ndarray:
        """Return the noise multipliers of the uses ``uses`` (from 0) of ``accounts``, both (R, S):
        (R, S) float64; 0 of account -1."""
        rows: int | np.ndarray = 0
        if len(self.kind) > 1:
            rows = np.arange(len(accounts))[:, None]
        multipliers = np.where(accounts >= 0, self.by_account[rows, accounts], 0.0)
        if all(price.weights is None for price in self.kinds):
            return multipliers
        start, weights = self._weights
        first = start[self.kind[0][accounts]]
        some = (accounts >= 0) & (first >= 0)
        return np.where(some, multipliers / weights[np.where(some, first + uses, 0)], multipliers)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights of all kinds one after another, and where each kind's begin: -1 where
        it has none."""
        start = np.full(len(self.kinds), -1)
        weights = [1.0]
        for k, price in enumerate(self.kinds):
            if price.weights:
                start[k] = len(weights)
                weights += price.weights
        return start, np.array(weights)


def calibrated(
    asked: Sequence[Sequence[tuple[Price, float | None, float | None, int]]],
    header: Mapping[str, Any],
    *,
    ids: Sequence[str] = (),
    refuted: str | None = None,
) -> tuple[Prices, np.ndarray]:
    """Calibrate the noise of every kind of account.

    Args:
        asked: of each of m accounts, in each repetition with settings of its own: the price, and
            the arguments of :meth:`Price.calibrated`. Accounts of which the same is asked are of
            one kind.
        header: of the ledger that is resumed: its noise and caps are taken, and the ledger refuses
            it if the rest differs.
        ids: of the accounts, for errors.
        refuted: see :class:`Prices`.

    Returns:
        The prices, and int64 (m,), how many uses of each account its budget affords.

    Raises:
        ConfigError: a budget that cannot be met.
    """
    kinds: dict[tuple[Price, float | None, float | None, int], int] = {}
    kind = np.array(
        [[kinds.setdefault(each, len(kinds)) for each in row] for row in asked], dtype=np.int64
    )
    noise = [(float(each["multiplier"]), each["cap"] or 0) for each in header.get("kinds", ())]
    if len(noise) != len(kinds):
        names = [
            f" of client {ids[(kind == k).any(0).argmax()]!r}" if ids else ""
            for k in kinds.values()
        ]
        noise = [
            p.calibrated(budget, z, uses, of=of)
            for (p, budget, z, uses), of in zip(kinds, names, strict=True)
        ]
    prices = Prices(tuple(price for price, *_ in kinds), tuple(z for z, _ in noise), kind, refuted)
    return prices, np.array([uses for _, uses in noise], dtype=np.int64)[kind[0]]


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights over their mean: an allocation.

    Raises:
        ConfigError: no weights, or one that is not positive and finite.
    """
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"An allocation has positive finite weights, not {list(weights)[:5]}.")
    mean = math.fsum(weights) / len(weights)
    return tuple(float(weight) / mean for weight in weights)
