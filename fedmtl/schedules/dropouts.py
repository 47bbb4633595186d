"""Clients that leave and come back."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._check import positive
from ..errors import ConfigError
from .draws import KeyedDraws

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Dropouts:
    """When clients are away: a message due while its client is away arrives at the moment of its return.

    The client's next latency counts from that moment. Give either ``intervals`` or ``rate`` with ``duration``.

    Args:
        intervals: for each client's name, the intervals [from, to) in which it is away, in order, not touching;
            ``to`` may be infinite: the client never comes back. Clients that are not named never leave.
        rate: departures per unit of time of a client that is present (exponential times between).
        duration: mean time away, exponential.
    """

    intervals: Mapping[Any, Sequence[Sequence[float]]] | None = None
    rate: float | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.intervals is not None and (self.rate is not None or self.duration is not None):
            raise ConfigError("Dropouts has both intervals and rate or duration; give one of the two.")
        if self.intervals is None:
            if self.rate is None or self.duration is None:
                raise ConfigError("Dropouts needs intervals, or both rate and duration.")
            positive(self, rate=self.rate, duration=self.duration)
            return
        names = [str(name) for name in self.intervals]
        for name, pairs in self.intervals.items():
            if names.count(str(name)) > 1:
                raise ConfigError(f"Dropouts.intervals names client {str(name)!r} twice, as a number and as a text.")
            _check_intervals(name, pairs)

    def check(self, names: Sequence[str]) -> None:
        """Raise :class:`ConfigError` for an interval of a client that is not among ``names``."""
        for name in sorted({str(name) for name in self.intervals or {}} - set(names)):
            raise ConfigError(f"Dropouts.intervals names client {name!r}, which is not in the data.")


class Absences:
    """The intervals of every row, and how far each row has passed them.

    Rows ask for non-decreasing times; random intervals are drawn as far as they are needed.
    """

    def __init__(self, settings: Dropouts, rows: KeyedDraws, names: Sequence[str]) -> None:
        self._settings, self._rows = settings, rows
        self._passed = np.zeros(len(rows.client), np.int64)
        self._starts, self._ends = np.empty((2, len(rows.client), 0))
        if settings.intervals is None:
            self._grow(8)
        else:
            self._starts, self._ends = _fixed({str(k): v for k, v in settings.intervals.items()}, rows, names)

    def next_start(self, rows: NDArray[np.int64], time: Array) -> Array:
        """Start of the first interval of each row that ends after its ``time``."""
        self._pass(rows, time)
        return self._starts[rows, self._passed[rows]]

    def arrive(self, rows: NDArray[np.int64], time: Array) -> Array:
        """Return when messages due at ``time`` arrive: at the return of those clients that are away then."""
        away = self.next_start(rows, time) <= time
        return np.where(away, self._ends[rows, self._passed[rows]], time)

    def _pass(self, rows: NDArray[np.int64], time: Array) -> None:
        while True:
            passed = (self._ends[rows, self._passed[rows]] <= time) & (time < np.inf)
            if not passed.any():
                return
            self._passed[rows[passed]] += 1
            if self._settings.intervals is None and self._passed.max() >= self._ends.shape[1]:
                self._grow(2 * self._ends.shape[1])

    def _grow(self, count: int) -> None:
        """Draw the first ``count`` intervals of every row; those drawn before come out the same."""
        assert self._settings.rate is not None
        assert self._settings.duration is not None
        every = np.arange(len(self._rows.client))
        draws = -np.log1p(-self._rows.uniform("dropouts", every, np.zeros_like(every), 2 * count))
        draws[:, 0::2] /= self._settings.rate
        draws[:, 1::2] *= self._settings.duration
        edges = np.cumsum(draws, axis=1)
        self._starts, self._ends = edges[:, 0::2], edges[:, 1::2]


def _fixed(
    intervals: Mapping[str, Sequence[Sequence[float]]], rows: KeyedDraws, names: Sequence[str]
) -> tuple[Array, Array]:
    """Return starts and ends (rows, m + 1), filled up with infinity."""
    most = max((len(pairs) for pairs in intervals.values()), default=0)
    edges = np.full((2, len(names), most + 1), np.inf)
    for position, name in enumerate(names):
        for j, (start, end) in enumerate(intervals.get(name, ())):
            edges[:, position, j] = start, end
    return edges[0][rows.client], edges[1][rows.client]


def _check_intervals(name: object, pairs: Sequence[Sequence[float]]) -> None:
    before = -math.inf
    for pair in pairs:
        numbers_only = len(pair) == 2 and all(isinstance(v, numbers.Real) and not math.isnan(v) for v in pair)
        if not numbers_only or not 0 <= pair[0] < pair[1] or math.isinf(pair[0]):
            raise ConfigError(
                f"Dropouts.intervals of client {name!r} has {tuple(pair)!r}; an interval is (from, to), 0 <= from < to."
            )
        if pair[0] <= before:
            raise ConfigError(
                f"Dropouts.intervals of client {name!r}: {tuple(pair)!r} starts before or when the interval before it "
                f"ends ({before}); intervals must be in order and apart."
            )
        before = pair[1]
