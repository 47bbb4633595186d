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

from .._check import given, positive
from ..errors import ConfigError

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Dropouts:
    """When clients are away: a message due while its client is away arrives at the moment of its
    return.

    The client's next latency counts from that moment. Give either ``intervals`` or ``rate`` with
    ``duration``.

    Args:
        intervals: for each client's name, the intervals [from, to) in which it is away, in order,
            not touching; ``to`` may be infinite: the client never comes back. Clients that are not
            named never leave.
        rate: departures per unit of time of a client that is present (exponential times between).
        duration: mean time away, exponential.
    """

    intervals: Mapping[Any, Sequence[Sequence[float]]] | None = None
    rate: float | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        drawn = given(rate=self.rate, duration=self.duration)
        if len(drawn) != (2 if self.intervals is None else 0):
            raise ConfigError("Dropouts needs intervals, or both rate and duration; give one of the two.")
        if self.intervals is None:
            positive(self, **drawn)
            return
        names = [str(name) for name in self.intervals]
        for name, pairs in self.intervals.items():
            if names.count(str(name)) > 1:
                raise ConfigError(f"Dropouts.intervals names client {str(name)!r} twice, as a number and as a text.")
            _check_intervals(name, pairs)

    def check(self, names: Sequence[str]) -> None:
        """Raises :class:`ConfigError` for an interval of a client that is not among ``names``."""
        for name in sorted({str(name) for name in self.intervals or {}} - set(names)):
            raise ConfigError(f"Dropouts.intervals names client {name!r}, which is not in the data.")


class Absences:
    """The intervals of every client in one replicate, and how far each client has passed them.

    Clients ask for non-decreasing times; random intervals are drawn as far as they are needed.

    Args:
        settings: fixed intervals, or the law of random ones.
        names: of the n clients.
        uniform: numbers ``index`` (k,) of every client's stream, (n, k) in [0, 1).
    """

    def __init__(self, settings: Dropouts, names: Sequence[str], uniform: Callable[[NDArray[np.int64]], Array]) -> None:
        self._settings, self._uniform = settings, uniform
        self._passed = np.zeros(len(names), np.int64)
        if settings.intervals is None:
            self._draw(8)
        else:
            fixed = {str(name): pairs for name, pairs in settings.intervals.items()}
            edges = np.full((2, len(names), 1 + max(map(len, fixed.values()), default=0)), np.inf)
            for client, name in enumerate(names):
                for place, pair in enumerate(fixed.get(name, ())):
                    edges[:, client, place] = pair
            self._starts, self._ends = edges

    def arrive(self, clients: NDArray[np.int64], time: Array) -> Array:
        """Returns when messages due at ``time`` arrive: at the return of those clients that are away then."""
        while (passed := (self._ends[clients, self._passed[clients]] <= time) & (time < np.inf)).any():
            self._passed[clients[passed]] += 1
            if self._settings.intervals is None and self._passed.max() >= self._ends.shape[1]:
                self._draw(2 * self._ends.shape[1])
        place = self._passed[clients]
        return np.where(self._starts[clients, place] <= time, self._ends[clients, place], time)

    def _draw(self, count: int) -> None:
        """Draws the first ``count`` intervals of every client; those drawn before come out the same."""
        assert self._settings.rate is not None
        assert self._settings.duration is not None
        draws = -np.log1p(-self._uniform(np.arange(2 * count)))
        draws[:, 0::2] /= self._settings.rate
        draws[:, 1::2] *= self._settings.duration
        edges = np.cumsum(draws, axis=1)
        self._starts, self._ends = edges[:, 0::2], edges[:, 1::2]


def _check_intervals(name: object, pairs: Sequence[Sequence[float]]) -> None:
    edges = [edge for pair in pairs for edge in pair]
    real = all(len(pair) == 2 for pair in pairs) and all(isinstance(edge, numbers.Real) for edge in edges)
    if not real or not all(0 <= before < after for before, after in pairwise(edges)) or math.inf in edges[:-1]:
        raise ConfigError(
            f"Dropouts.intervals of client {name!r} are {pairs!r}; an interval is (from, to), 0 <= from < to, and "
            f"intervals must be in order and must not touch."
        )
