"""Stopping a run because of what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._check import non_negative, one_of, positive_int


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when a number of the history has not improved for a while.

    The history is computed on private data, so whether a run goes on depends on them. The run is therefore charged
    as if it had made all its planned rounds: it saves time, not budget.

    Args:
        patience: evaluations without an improvement after which the run stops.
        metric: a column of the history; ``"loss"`` and ``"mse"`` are better when smaller, the others when larger.
        min_delta: the least change that counts as an improvement.
    """

    patience: int = 3
    metric: str = "loss"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        positive_int(self, patience=self.patience)
        non_negative(self, min_delta=self.min_delta)
        one_of(self, ("loss", "accuracy", "mse", "worst_tenth"), metric=self.metric)

    def stops(self, history: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a run with this history stops: a pure function of it, so a resumed run decides the same."""
        sign = -1.0 if self.metric in ("loss", "mse") else 1.0
        values = [sign * float(row[self.metric]) for row in history if self.metric in row]
        if len(values) <= self.patience:
            return False
        best = max((value for value in values[: -self.patience] if value == value), default=-float("inf"))
        return not any(value > best + self.min_delta for value in values[-self.patience :])
