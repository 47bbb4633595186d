"""Stopping a run by its releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._check import Checked, Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Checked):
    """Stops a run whose shared model no longer moves away from its start.

    The rule looks at ``distance``, the L2 norm of the released shared model minus the public start,
    at every evaluation. It is a function of the releases only, so a stopped run is post-processing
    of the run that continues, and is charged as that: it saves time, not budget. A rule that looked
    at accuracies or losses would publish something about private data with every round that it lets
    pass, which no epsilon here would cover; there is none.

    Args:
        patience: evaluations without an increase after which the run stops.
        min_delta: the least increase that counts, relative to the largest distance before.

    Example:
        >>> from fedmtl import EarlyStopping
        >>> rule = EarlyStopping(patience=2)
        >>> rule.stops([{"distance": distance} for distance in (1.0, 0.9)])
        False
        >>> rule.stops([{"distance": distance} for distance in (1.0, 0.9, 0.8)])
        True
    """

    patience: Count = 3
    min_delta: NonNegative = 0.0

    def stops(self, history: Sequence[Mapping[str, Any]]) -> bool:
        """Returns True if a run stops.

        It is a pure function of the history, so a resumed run decides the same.

        Args:
            history: the rows of the evaluations so far.
        """
        # A diverged model has the distance NaN, which is no best, and never an increase.
        values = [float(row["distance"]) for row in history]
        if len(values) <= self.patience:
            return False
        best = max((value for value in values[: -self.patience] if value == value), default=0.0)
        return not any(value > best * (1 + self.min_delta) for value in values[-self.patience :])
