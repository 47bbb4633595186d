"""What the releases of owners are made of: noise by kind of owner, calibrated to hard caps, and what they cost.

Owners with equal budgets, caps and so on are of one kind, which is calibrated once and costs the same. The answers of
an owner have positive public weights of mean 1: the k-th has the noise multiplier z / w_k, so a larger weight is more
budget and less noise. A first release has a weight of its own, and one z is found for the composition of everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting import dp_event

from .._rounding import rounded_up
from ..errors import ConfigError
from .account import Cost, Uses, together
from .accounting.calibration import calibrate_multiplier
from .accounting.composition import StepEvent, largest_uses
from .accounting.losses import ReplacedPoissonDpEvent
from .allocation import normalized
from .noise.laws import L2LaplaceNoise, NoiseLaw
from .noise.registry import LAWS
from .settings import RecordPrivacy


def first_law(privacy: RecordPrivacy) -> type[NoiseLaw]:
    """The law of the noise of first releases, whose sensitivity is in the L2 norm."""
    return L2LaplaceNoise if (law := LAWS[privacy.mechanism]).norm == "l1" else law


@dataclass(frozen=True)
class AccountKind:
    """Owners of one kind.

    Attributes:
        cap: most answers.
        weights: of the answers, one for each, of mean 1; None where all are 1.
        first: weight of the first release; 0 without one.
        rate: probability that a record takes part in an answer.
        multiplier: z, scale of the noise over the sensitivity at a weight of 1; 0 is no noise.
    """

    cap: int
    weights: tuple[float, ...] | None = None
    first: float = 0.0
    rate: float = 1.0
    multiplier: float = 0.0

    def events(self, privacy: RecordPrivacy, dimension: int) -> Uses:
        """The event of an answer, or those of the first release and of every answer, in order."""
        made: dict[float, StepEvent] = {}
        for weight in self.weights or (1.0,):
            if weight not in made:
                made[weight] = self._event(LAWS[privacy.mechanism], weight, self.rate, privacy, dimension)
        if self.weights is None and self.first == 0:
            return made[1.0]
        answers = tuple(made[weight] for weight in self.weights or (1.0,) * self.cap)
        if self.first == 0:
            return answers
        return (self._event(first_law(privacy), self.first, 1.0, privacy, dimension), *answers)

    def _event(
        self, law: type[NoiseLaw], weight: float, rate: float, privacy: RecordPrivacy, dimension: int
    ) -> StepEvent:
        if self.multiplier == 0:
            return StepEvent(dp_event.NonPrivateDpEvent(), privacy.accountant)
        event = law(self.multiplier / weight).event(dimension)
        return StepEvent(event if rate == 1 else ReplacedPoissonDpEvent(rate, event), privacy.accountant)


@dataclass(frozen=True, eq=False)
class OwnerTerms:
    """The kinds of all owners, and which owner is of which.

    Attributes:
        privacy: settings of all repetitions, or of each.
        dimension: D.
        delta: of every epsilon.
        kinds: distinct ones.
        kind: (P, n) int64, the kind of every owner; P is 1, or R where repetitions have settings of their own.
    """

    privacy: tuple[RecordPrivacy, ...]
    dimension: int
    delta: float
    kinds: tuple[AccountKind, ...]
    kind: np.ndarray

    @cached_property
    def multipliers(self) -> np.ndarray:
        """(P, n) float64: z."""
        return np.array([kind.multiplier for kind in self.kinds])[self.kind]

    @property
    def caps(self) -> np.ndarray:
        """(n,) int64."""
        return np.array([kind.cap for kind in self.kinds], dtype=np.int64)[self.kind[0]]

    @cached_property
    def weighted(self) -> bool:
        """Whether answers differ in weight."""
        return any(kind.weights is not None for kind in self.kinds)

    @cached_property
    def firsts(self) -> np.ndarray:
        """(n,) float64: weights of first releases; 0 without one."""
        return np.array([kind.first for kind in self.kinds])[self.kind[0]]

    def noise(self, owners: np.ndarray, uses: np.ndarray) -> np.ndarray:
        """Noise multipliers of the answers ``uses`` (from 0) of ``owners``, both (R, S): (R, S) float64; 0 of nobody's,
        -1."""
        rows = np.arange(len(owners))[:, None] if len(self.kind) > 1 else 0
        multipliers = np.where(owners >= 0, self.multipliers[rows, owners], 0.0)
        if not self.weighted:
            return multipliers
        start, flat = self._flat
        first = start[self.kind[0][owners]]
        some = (owners >= 0) & (first >= 0)
        return np.where(some, multipliers / flat[np.where(some, first + uses, 0)], multipliers)

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray]:
        start, flat = np.full(len(self.kinds), -1), [1.0]
        for k, kind in enumerate(self.kinds):
            if kind.weights:
                start[k] = len(flat)
                flat += kind.weights
        return start, np.array(flat)

    def events(self, owner: int, replicate: int = 0) -> Uses:
        """The event of an answer of an owner, or those of its first release and of every answer, in order."""
        return self._events[self.kind[replicate if len(self.kind) > 1 else 0, owner]]

    def answer(self, owner: int, use: int = 0, replicate: int = 0) -> StepEvent:
        """The event of answer ``use`` (from 0) of an owner."""
        events = self.events(owner, replicate)
        return events[use + int(self.firsts[owner] > 0)] if isinstance(events, tuple) else events

    @cached_property
    def _events(self) -> tuple[Uses, ...]:
        return tuple(kind.events(self.privacy[0], self.dimension) for kind in self.kinds)

    def epsilons(self, uses: np.ndarray, *, first: bool) -> np.ndarray:
        """Epsilon of every owner after ``uses`` (R, n) answers, and first releases if ``first``: (R, n) float64.

        What is asked twice is composed once.
        """
        charges = uses + (self.firsts > 0) if first else uses
        base = int(charges.max(initial=0)) + 1
        asked, index = np.unique(self.kind * base + charges, return_inverse=True)
        cost = Cost(self.delta, tuple(self._events[k] for k in (asked // base).tolist()))
        return cost.epsilons(asked % base)[index.ravel()].reshape(uses.shape)

    def header(self) -> dict[str, Any]:
        """JSON for a ledger: one entry for every kind, and the kind of every owner where there are several."""
        kinds = [asdict(kind) | {"weights": list(kind.weights) if kind.weights else None} for kind in self.kinds]
        return {"kinds": kinds} | ({"kind_of": self.kind[0].tolist()} if len(kinds) > 1 else {})


def owner_terms(
    privacy: Sequence[RecordPrivacy],
    ids: tuple[str, ...],
    caps: np.ndarray,
    dimension: int,
    delta: float,
    *,
    allocation: Sequence[np.ndarray] | None = None,
    shares: np.ndarray | None = None,
    rates: np.ndarray | None = None,
    header: Mapping[str, Any] | None = None,
) -> OwnerTerms:
    """Calibrate the noise of every kind of owner.

    Args:
        privacy: settings of all repetitions, or of each.
        ids: of the owners.
        caps: (n,) int64.
        dimension: D.
        delta: of every epsilon.
        allocation: (caps[i],) positive weights of the answers of every owner, of any mean.
        shares: (n,) in [0, 1), the part of the sum of an owner's weights that its first release has.
        rates: (n,) in (0, 1], probability that a record takes part in an answer.
        header: of the ledger that the run goes on with: its noise and caps are taken, and the ledger refuses it if the
            rest differs.

    Raises:
        ConfigError: a budget that cannot be met, or weights that do not fit.
    """
    weights = _weights(allocation, caps)
    places: dict[tuple[Any, ...], int] = {}
    asked: list[tuple[RecordPrivacy, AccountKind, float | None]] = []
    kind = np.empty((len(privacy), len(ids)), dtype=np.int64)
    for row, settings in enumerate(privacy):
        if len(privacy) > 1 and settings.epsilon is not None and settings.noise_multiplier is not None:
            raise ConfigError(
                "Repetitions with settings of their own have the caps of all; give epsilon or noise_multiplier."
            )
        for owner, (budget, cap) in enumerate(zip(settings.budgets(ids), caps.tolist(), strict=True)):
            share = 0.0 if shares is None else float(shares[owner])
            first = 0.0 if share == 0 else share / (1 - share) * cap if cap else 1.0
            own = weights[owner] if weights else None  # equal ones are the same object
            rate = 1.0 if rates is None else float(rates[owner])
            key = (budget, settings.noise_multiplier, cap, id(own), first, rate)
            if key not in places:
                places[key] = len(asked)
                asked.append((settings, AccountKind(cap, own, first, rate), budget))
            kind[row, owner] = places[key]
    known = (header or {}).get("kinds", ())
    if len(known) == len(asked):
        kinds = [
            replace(new, cap=row["cap"], multiplier=row["multiplier"])
            for (_, new, _), row in zip(asked, known, strict=True)
        ]
    else:
        kinds = [_calibrated(*one, dimension, delta) for one in asked]
    return OwnerTerms(tuple(privacy), dimension, delta, tuple(kinds), kind)


def _weights(allocation: Sequence[np.ndarray] | None, caps: np.ndarray) -> list[tuple[float, ...] | None]:
    """Normalized weights by owner, equal ones as the same object; None where all are equal."""
    if allocation is None:
        return []
    if len(allocation) != caps.size:
        raise ConfigError(f"The allocation has weights for {len(allocation)} owners, there are {caps.size}.")
    made: dict[bytes, tuple[float, ...] | None] = {}
    found = []
    for owner, (given, cap) in enumerate(zip(allocation, caps.tolist(), strict=True)):
        array = np.asarray(given, dtype=np.float64)
        if array.shape != (cap,):
            raise ConfigError(f"The allocation of owner {owner} has shape {array.shape}; it may answer {cap} times.")
        key = array.tobytes()
        if key not in made:
            equal = cap == 0 or bool((array == array[0]).all() and 0 < array[0] < math.inf)
            made[key] = None if equal else normalized(array.tolist())
        found.append(made[key])
    return found


def _calibrated(
    privacy: RecordPrivacy, kind: AccountKind, budget: float | None, dimension: int, delta: float
) -> AccountKind:
    """With its noise multiplier and its hard cap."""

    def whole(multiplier: float) -> StepEvent:
        events = replace(kind, multiplier=multiplier).events(privacy, dimension)
        return together(events) if isinstance(events, tuple) else events

    if budget == math.inf:
        return kind
    if privacy.noise_multiplier is None:
        assert budget is not None
        uses = 1 if kind.weights is not None or kind.first else max(1, kind.cap)
        z = calibrate_multiplier(whole, target=budget, delta=delta, uses=uses)
        return replace(kind, multiplier=z)
    kind = replace(kind, multiplier=float(privacy.noise_multiplier))
    return kind if budget is None else replace(kind, cap=_fitting(privacy, kind, budget, dimension, delta))


def _fitting(privacy: RecordPrivacy, kind: AccountKind, budget: float, dimension: int, delta: float) -> int:
    """The most answers up to the cap that the budget allows at a fixed noise multiplier."""
    events = kind.events(privacy, dimension)
    if isinstance(events, StepEvent):
        return min(kind.cap, largest_uses(events.event, budget, delta, accountant=events.accountant))
    cost, extra = Cost(delta, (events,)), int(kind.first > 0)
    if extra and cost.epsilon(1) > budget:
        raise ConfigError(
            f"epsilon = {rounded_up(budget, 6)} does not even allow the first release at noise_multiplier = "
            f"{kind.multiplier:g}; ask for more of either, or for a smaller share."
        )
    low, high = 0, kind.cap + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost.epsilon(middle + extra) <= budget else (low, middle)
    return low
