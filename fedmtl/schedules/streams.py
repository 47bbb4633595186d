"""The order of events of many clients: independent clients merged by time, and rounds that wait for the slowest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .draws import KeyedDraws
from .dropouts import Absences
from .latency import Latency

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

_PAGE = 1 << 16
_WIDEST = 1 << 12


@dataclass(frozen=True)
class ClientRates:
    """What the clients of a schedule do, one entry a client.

    Attributes:
        latency: law of the gaps, resolved.
        scale: float64 (n,), factors of the gaps.
        caps: int64 (n,), the most answers of each client; 0 never acts.
        purpose: name of the stream of random numbers.
    """

    latency: Latency
    scale: Array
    caps: Ints
    purpose: str


class Stream(ABC):
    """Events of R replicates in order; :meth:`take` hands out the next ones, of a run of ``steps``."""

    def __init__(self, pace: ClientRates, rows: KeyedDraws, away: Absences | None, steps: int) -> None:
        self._pace, self._rows, self._away, self._steps = pace, rows, away, steps
        self._clients = len(pace.caps)
        self._replicates = len(rows.client) // self._clients
        self._ready = (np.empty(0), np.empty(0, np.int64))
        self._head, self._left = np.zeros((2, self._replicates), np.int64)  # of each replicate's part of what is ready
        self._clock = np.zeros(self._replicates)
        self.position = 0

    def take(self, count: int) -> tuple[Array, Ints]:
        """Return time and client of the next ``count`` events, each (R, count).

        A replicate whose clients have all finished is filled up with client -1 at the time of its last event.
        """
        while (need := count - self._left).max() > 0 and self._extend(need):
            pass
        time, row = self._ready
        given = np.minimum(self._left, count)
        there = np.arange(count) < given[:, None]
        place = (self._head[:, None] + np.arange(count))[there]
        out = np.repeat(self._clock[:, None], count, axis=1)
        client = np.full((self._replicates, count), -1, np.int64)
        out[there], client[there] = time[place], self._rows.client[row[place]]
        some = given > 0
        self._clock[some] = out[some, given[some] - 1]
        late = ~there & some[:, None]
        out[late] = np.repeat(self._clock[:, None], count, axis=1)[late]
        self._head += given
        self._left -= given
        self.position += count
        return out, client

    @abstractmethod
    def _extend(self, need: Ints) -> bool:
        """Make more events ready, about ``need`` (R,) of each replicate; False when there are no more."""

    def _push(self, time: Array, row: Ints) -> None:
        """Append events that are in order of time within each replicate and not before those that are ready."""
        left = np.arange(self._left.max(initial=0)) < self._left[:, None]
        kept = (self._head[:, None] + np.arange(left.shape[1]))[left]
        times, rows = (np.concatenate([old[kept], new]) for old, new in zip(self._ready, (time, row), strict=True))
        replicate = self._rows.replicate[rows]
        if self._replicates > 1:
            small = replicate.astype(np.uint16) if self._replicates <= 1 << 16 else replicate  # is sorted by its digits
            order = np.argsort(small, kind="stable")
            times, rows = times[order], rows[order]
        self._ready = (times, rows)
        self._left = np.bincount(replicate, minlength=self._replicates)
        self._head = np.cumsum(self._left) - self._left

    def _gaps(self, rows: Ints, first: Ints, count: int) -> Array:
        """Return latencies ``first`` to ``first + count - 1`` of each row: (rows, count)."""
        pace, client = self._pace, self._rows.client[rows]
        drawn = self._rows.uniform(pace.purpose, rows, first, count) if pace.latency.random else np.empty(0)
        gaps = pace.latency.gaps(drawn, client[:, None], first[:, None] + np.arange(count))
        return gaps * pace.scale[client, None]


class Merged(Stream):
    """Every client on its own: each answer one latency after the client's last; events in order of (time, client).

    Each client's times are a running sum, made a piece at a time up to a horizon; events before the earliest client
    that may still act before the horizon are final.
    """

    def __init__(self, pace: ClientRates, rows: KeyedDraws, away: Absences | None, steps: int) -> None:
        super().__init__(pace, rows, away, steps)
        self._caps = pace.caps[rows.client]
        self._rate = 1.0 / (pace.latency.typical(self._clients) * pace.scale)[rows.client]
        self._next = np.zeros(len(rows.client), np.int64)
        self._last = np.zeros(len(rows.client))
        self._pending: tuple[Array, Ints] = (np.empty(0), np.empty(0, np.int64))

    def _extend(self, need: Ints) -> bool:
        going = self._going()
        if not going.any():
            return False
        frontier = self._frontier(going)
        rate = np.bincount(self._rows.replicate, np.where(going, self._rate, 0.0), self._replicates)
        most = max(1, 8 * _PAGE // self._replicates)
        page = min(_PAGE // 2 // self._replicates + 1, most, self._steps - self.position)
        wanted = np.clip(np.maximum(need, page - self._left), 0, most)  # all replicates are topped up together
        wanted[rate == 0] = 0
        horizon = np.where(wanted > 0, frontier + 1.02 * wanted / np.where(rate > 0, rate, 1.0), -np.inf)
        pieces = [self._pending]
        short = np.flatnonzero(going & (self._last <= horizon[self._rows.replicate]))
        while len(short):
            pieces.extend(self._walk(short, horizon[self._rows.replicate[short]]))
            short = short[self._going()[short] & (self._last[short] <= horizon[self._rows.replicate[short]])]
        time, row = (np.concatenate(column) for column in zip(*pieces, strict=True))
        replicate = self._rows.replicate[row]
        final = time < self._frontier(self._going())[replicate]
        self._pending = (time[~final], row[~final])
        time, row = time[final], row[final]
        order = _by_time(time, row)
        self._push(time[order], row[order])
        return True

    def _going(self) -> NDArray[np.bool_]:
        return (self._next < self._caps) & (self._last < np.inf)

    def _frontier(self, going: NDArray[np.bool_]) -> Array:
        """Return (R,) the earliest last time of clients that go on; infinite if there are none."""
        return np.where(going, self._last, np.inf).reshape(self._replicates, self._clients).min(axis=1)

    def _walk(self, rows: Ints, horizon: Array) -> list[tuple[Array, Ints]]:
        """Carry ``rows`` on towards their horizons, rows with about as many answers to make at once."""
        expected = np.minimum((horizon - self._last[rows]) * self._rate[rows], _WIDEST)
        count = np.minimum(expected + np.sqrt(expected) + 1.0, self._caps[rows] - self._next[rows])
        size = np.ceil(np.log2(np.clip(count, 1, _WIDEST))).astype(np.int64)
        return [self._step(rows[size == s], 1 << int(s)) for s in np.unique(size)]

    def _step(self, rows: Ints, count: int) -> tuple[Array, Ints]:
        gaps = self._gaps(rows, self._next[rows], count)
        time = np.cumsum(np.concatenate([self._last[rows, None], gaps], axis=1), axis=1)[:, 1:]
        if self._away is not None:
            hit = np.flatnonzero(time[:, -1] >= self._away.next_start(rows, self._last[rows]))
            now = self._last[rows[hit]]
            for column in range(count if len(hit) else 0):
                now = self._away.arrive(rows[hit], now + gaps[hit, column])
                time[hit, column] = now
        activation = self._next[rows, None] + np.arange(count)
        real = (activation < self._caps[rows, None]) & (time < np.inf)
        done = np.minimum(count, self._caps[rows] - self._next[rows])
        self._next[rows] += done
        self._last[rows] = time[np.arange(len(rows)), done - 1]
        return time[real], np.broadcast_to(rows[:, None], real.shape)[real]


class Waiting(Stream):
    """Rounds: everyone answers once, and all answers count at the time of the slowest.

    A client with fewer answers than others leaves after its last. If the slowest never comes back the run ends.
    """

    def __init__(self, pace: ClientRates, rows: KeyedDraws, away: Absences | None, steps: int) -> None:
        super().__init__(pace, rows, away, steps)
        self._round = 0
        self._now = np.zeros(self._replicates)

    def _extend(self, need: Ints) -> bool:
        caps = self._pace.caps[self._rows.client]
        left = int(caps.max(initial=0)) - self._round
        if left <= 0 or np.isinf(self._now).all():
            return False
        members = int(np.count_nonzero(self._pace.caps > self._round))
        page = min(_PAGE // 8 // self._replicates, self._steps - self.position)
        rounds = -(-max(int(need.max()), page) // members)
        rounds = min(left, rounds, max(1, 16 * _PAGE // len(caps)))
        every = np.arange(len(caps))
        gaps = self._gaps(every, np.full(len(caps), self._round), rounds)
        acts = caps[:, None] > self._round + np.arange(rounds)
        ends = self._ends(gaps, acts)
        time = np.repeat(ends, self._clients, axis=0)
        row = np.broadcast_to(every[:, None], time.shape)
        shape = (self._replicates, self._clients, rounds)
        parts: list[NDArray[Any]] = [time, row, acts & (time < np.inf)]
        time, row, real = (part.reshape(shape).transpose(0, 2, 1).ravel() for part in parts)
        self._push(time[real], row[real])
        self._round += rounds
        self._now = ends[:, -1]
        return True

    def _ends(self, gaps: Array, acts: NDArray[np.bool_]) -> Array:
        """Return (R, rounds) when each round is over."""
        shape = (self._replicates, self._clients, gaps.shape[1])
        if self._away is None:
            longest = np.where(acts, gaps, 0.0).reshape(shape).max(axis=1)
            return np.cumsum(np.concatenate([self._now[:, None], longest], axis=1), axis=1)[:, 1:]
        ends, now = np.empty((self._replicates, gaps.shape[1])), self._now
        every = np.arange(len(gaps))
        for k in range(gaps.shape[1]):
            due = now[self._rows.replicate] + gaps[:, k]
            arrived = np.where(acts[:, k], self._away.arrive(every, due), 0.0)
            now = np.maximum(now, arrived.reshape(shape[:2]).max(axis=1))
            ends[:, k] = now
        return ends


def _by_time(time: Array, row: Ints) -> Ints:
    """Return the order of (time, row)."""
    order = np.argsort(time)
    ranked = time[order]
    return np.lexsort((row, time)) if bool((ranked[1:] == ranked[:-1]).any()) else order  # slower, for equal times
