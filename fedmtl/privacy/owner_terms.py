"""What the releases of owners are made of: noise by kind of owner, calibrated to hard caps, and what they cost.

Owners with equal budgets, caps and so on are of one kind, which is calibrated once and costs the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ConfigError
from .account import Cost
from .calibration import calibrate_multiplier
from .composition import largest_uses
from .release import LAWS, StepEvent
from .settings import RecordPrivacy


@dataclass(frozen=True)
class Kind:
    """Owners of one kind.

    Attributes:
        cap: most answers.
        multiplier: z, scale of the noise of an answer over its sensitivity; 0 is none.
    """

    cap: int
    multiplier: float = 0.0

    def events(self, privacy: RecordPrivacy, dimension: int) -> StepEvent:
        """The event of an answer."""
        from dp_accounting import dp_event

        if self.multiplier == 0:
            return StepEvent(dp_event.NonPrivateDpEvent(), privacy.accountant)
        return StepEvent(LAWS[privacy.mechanism](self.multiplier).event(dimension), privacy.accountant)


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
    kinds: tuple[Kind, ...]
    kind: np.ndarray

    @property
    def multipliers(self) -> np.ndarray:
        """(P, n) float64."""
        return np.array([kind.multiplier for kind in self.kinds])[self.kind]

    @property
    def caps(self) -> np.ndarray:
        """(n,) int64."""
        return np.array([kind.cap for kind in self.kinds], dtype=np.int64)[self.kind[0]]

    def events(self, owner: int, replicate: int = 0) -> StepEvent:
        """The event of an answer of an owner."""
        return self._events[self.kind[replicate if len(self.kind) > 1 else 0, owner]]

    @property
    def _events(self) -> tuple[StepEvent, ...]:
        return tuple(kind.events(self.privacy[0], self.dimension) for kind in self.kinds)

    def epsilons(self, uses: np.ndarray) -> np.ndarray:
        """Epsilon of every owner after ``uses`` (R, n): (R, n) float64. What is asked twice is composed once."""
        events, base = self._events, int(uses.max(initial=0)) + 1
        asked, index = np.unique(self.kind * base + uses, return_inverse=True)
        cost = Cost(self.delta, tuple(events[k] for k in (asked // base).tolist()))
        return cost.epsilons(asked % base)[index.ravel()].reshape(uses.shape)

    def header(self) -> dict[str, Any]:
        """JSON for a ledger: one entry for every kind, and the kind of every owner where there are several."""
        rows: dict[str, Any] = {"kinds": [vars(kind) for kind in self.kinds]}
        if len(self.kinds) > 1:
            rows["kind"] = self.kind[0].tolist()
        return rows


def owner_terms(
    privacy: Sequence[RecordPrivacy],
    ids: tuple[str, ...],
    caps: np.ndarray,
    dimension: int,
    delta: float,
    header: Mapping[str, Any] | None = None,
) -> OwnerTerms:
    """Calibrate the noise of every kind of owner.

    Args:
        privacy: settings of all repetitions, or of each.
        ids: of the owners.
        caps: (n,) int64.
        dimension: D.
        delta: of every epsilon.
        header: of the ledger that the run goes on with: its noise and caps are taken, and the ledger refuses it if the
            rest differs.

    Raises:
        ConfigError: a budget that cannot be met.
    """
    places: dict[tuple[Any, ...], int] = {}
    asked: list[tuple[RecordPrivacy, Kind, float | None]] = []
    kind = np.empty((len(privacy), len(ids)), dtype=np.int64)
    for row, settings in enumerate(privacy):
        if len(privacy) > 1 and settings.epsilon is not None and settings.noise_multiplier is not None:
            raise ConfigError(
                "Repetitions with settings of their own have the caps of all; give epsilon or noise_multiplier."
            )
        for owner, (budget, cap) in enumerate(zip(settings.budgets(ids), caps.tolist(), strict=True)):
            key = (budget, settings.noise_multiplier, cap)
            if key not in places:
                places[key] = len(asked)
                asked.append((settings, Kind(cap), budget))
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


def _calibrated(privacy: RecordPrivacy, kind: Kind, budget: float | None, dimension: int, delta: float) -> Kind:
    """With its noise multiplier and its hard cap."""

    def step(multiplier: float) -> StepEvent:
        return replace(kind, multiplier=multiplier).events(privacy, dimension)

    if budget == math.inf:
        return kind
    if privacy.noise_multiplier is None:
        assert budget is not None
        z = calibrate_multiplier(step, target=budget, delta=delta, uses=max(1, kind.cap))
        return replace(kind, multiplier=z)
    z = float(privacy.noise_multiplier)
    if budget is None:
        return replace(kind, multiplier=z)
    fitting = largest_uses(step(z).event, budget, delta, accountant=privacy.accountant)
    return replace(kind, multiplier=z, cap=min(kind.cap, fitting))
