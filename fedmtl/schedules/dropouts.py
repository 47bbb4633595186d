"""Clients that leave and come back."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._check import Checked, Positive, given
from ..errors import ConfigError

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Dropouts(Checked):
    """Absences of clients.

    A message that is due during its client's absence arrives at the moment of the return. The
    client's next latency counts from that moment. Give either ``intervals`` or ``rate`` with
    ``duration``.

    Args:
        intervals: the absences [from, to) by the client's name, in order and not touching; ``to``
            may be infinite: the client never comes back. Clients that are not named never leave.
        rate: departures per unit of time of a client that is present (exponential times between).
        duration: mean time away, exponential.

    Example:
        >>> from fedmtl import Latencies
        >>> from fedmtl.schedules import Dropouts, TraceLatency
        >>> away = Dropouts(intervals={"0": [(0.0, 5.0)]})
        >>> schedule = Latencies(latency=TraceLatency([[1.0], [2.0]]), dropouts=away, activations=4)
        >>> block = schedule.bind(2).activations(seed=0, start=0, stop=4)
        >>> block.time[0].tolist(), block.client[0].tolist()  # client 0 answers at its return
        ([2.0, 4.0, 5.0, 6.0], [1, 1, 0, 0])
    """

    intervals: Mapping[Any, Sequence[Sequence[float]]] | None = None
    rate: Positive | None = None
    duration: Positive | None = None

    def __post_init__(self) -> None:
        drawn = given(rate=self.rate, duration=self.duration)
        needed = 0
        if self.intervals is None:
            needed = 2
        if len(drawn) != needed:
            settings = "intervals, or both rate and duration"
            raise ConfigError(f"Dropouts needs {settings}; give one of the two.")
        if self.intervals is None:
            return
        # names are texts in the data
        names = [str(name) for name in self.intervals]
        for name, pairs in self.intervals.items():
            if names.count(str(name)) > 1:
                twice = f"names client {str(name)!r} twice, as a number and as a text"
                raise ConfigError(f"Dropouts.intervals {twice}.")
            _check_intervals(name, pairs)

    def check(self, names: Sequence[str]) -> None:
        """Refuses intervals of clients that are not in the data.

        Args:
            names: ids of the clients.

        Raises:
            ConfigError: names such a client.
        """
        own = {str(name) for name in self.intervals or {}}
        unknown = sorted(own - set(names))
        if unknown:
            named = f"names client {unknown[0]!r}, which is not in the data"
            raise ConfigError(f"Dropouts.intervals {named}.")


class Absences:
    """The absences of every client in one replicate, with the number that each has passed.

    Clients ask for non-decreasing times; random intervals are drawn as far as they are needed.

    Args:
        settings: fixed intervals, or the law of random ones.
        names: of the n clients.
        uniform: numbers ``index`` (k,) of every client's stream, (n, k) in [0, 1).
    """

    def __init__(
        self,
        settings: Dropouts,
        names: Sequence[str],
        uniform: Callable[[NDArray[np.int64]], Array],
    ) -> None:
        self._settings = settings
        self._uniform = uniform
        self._passed = np.zeros(len(names), np.int64)
        if settings.intervals is None:
            self._draw(8)
            return
        fixed = {str(name): pairs for name, pairs in settings.intervals.items()}
        # the last interval of every client begins at infinity
        most = 1 + max(map(len, fixed.values()), default=0)
        edges = np.full((2, len(names), most), np.inf)
        for client, name in enumerate(names):
            for place, pair in enumerate(fixed.get(name, ())):
                edges[:, client, place] = pair
        self._starts, self._ends = edges

    def arrive(self, clients: NDArray[np.int64], time: Array) -> Array:
        """Returns the arrivals of messages due at ``time``: a client that is away returns first.

        Args:
            clients: int64 (k,).
            time: float64 (k,).
        """
        passed = self._has_passed(clients, time)
        while passed.any():
            self._passed[clients[passed]] += 1
            if self._settings.intervals is None and self._passed.max() >= self._ends.shape[1]:
                self._draw(2 * self._ends.shape[1])
            passed = self._has_passed(clients, time)
        place = self._passed[clients]
        is_away = self._starts[clients, place] <= time
        return np.where(is_away, self._ends[clients, place], time)

    def _has_passed(self, clients: NDArray[np.int64], time: Array) -> NDArray[np.bool_]:
        """Returns a mask of the clients whose current interval ends by ``time``."""
        ends = self._ends[clients, self._passed[clients]]
        return (ends <= time) & (time < np.inf)

    def _draw(self, count: int) -> None:
        """Draws the first ``count`` intervals of every client.

        Those drawn before come out the same.
        """
        assert self._settings.rate is not None
        assert self._settings.duration is not None
        # exponential times of mean 1, two for each interval
        draws = -np.log1p(-self._uniform(np.arange(2 * count)))
        draws[:, 0::2] /= self._settings.rate
        draws[:, 1::2] *= self._settings.duration
        # presence and absence take turns
        edges = np.cumsum(draws, axis=1)
        self._starts = edges[:, 0::2]
        self._ends = edges[:, 1::2]


def _check_intervals(name: object, pairs: Sequence[Sequence[float]]) -> None:
    if not _are_intervals(pairs):
        raise ConfigError(
            f"Dropouts.intervals of client {name!r} are {pairs!r}; an interval is (from, to), "
            "0 <= from < to, and intervals must be in order and must not touch."
        )


def _are_intervals(pairs: Sequence[Sequence[float]]) -> bool:
    edges = [edge for pair in pairs for edge in pair]
    if not all(len(pair) == 2 for pair in pairs):
        return False
    if not all(isinstance(edge, numbers.Real) for edge in edges):
        return False
    if not all(0 <= before < after for before, after in pairwise(edges)):
        return False
    return math.inf not in edges[:-1]
