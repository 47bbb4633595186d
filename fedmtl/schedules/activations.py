"""The activations of a schedule, in order: clients that act independently, and rounds that wait for
the slowest.

Who acts when depends on no data, so the draws are those of a simulation: addressed by (seed,
purpose, replicate, client, index). A replicate does not depend on the others, a client keeps its
times when others join, and a window of a run is the same whatever was asked before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._check import positive_int
from ..errors import ConfigError
from ..random import derive_key, keyed_bits
from .block import Block
from .dropouts import Absences, Dropouts
from .latency import Law

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Gaps = Callable[[Ints, Ints], Array]
"""Clients (k,) and the numbers of their activations (k, count) to the latencies (k, count)."""

ENDLESS = 1 << 31
"""The cap of a client without one."""

_BLOCK = 256  # events of a block at most
_CHUNK = 1 << 16  # activations that are computed at once
_TABLE = 1 << 20  # activations of all replicates that are made at once at least


@dataclass(eq=False)
class BoundSchedule:
    """A schedule for n given clients.

    The activations that were asked for are kept as a table, with about twice as many for later
    windows: 12 bytes for an activation of a replicate.

    Attributes:
        kind: what the clients do, in words.
        law: of the gaps.
        scale: float64 (n,), factors of the gaps.
        caps: int64 (n,), the most activations of each client in a run; 0 never acts.
        names: of the clients.
        keys: int64 (n,), their addresses in random draws.
        purpose: name of the stream of random numbers.
        most: activations of a run; None if the clients' caps end it.
        waits: whether the server waits for the slowest client of every round.
        dropouts: when clients are away; None if they never are.
        opening: the activations before all others, at time 0: every client that ever acts acts
            once, in the order of the data. They are part of ``caps`` and ``most``.
        clients: n.
        steps: the most activations of a run. Fewer clients may be left to act in the end (absences
            without return); a table is then filled up with -1.
    """

    kind: str
    law: Law
    scale: Array
    caps: Ints
    names: Sequence[str]
    keys: Tensor
    purpose: str
    most: int | None
    waits: bool = False
    dropouts: Dropouts | None = None
    opening: int = 0

    def __post_init__(self) -> None:
        if not self.caps.any():
            raise ConfigError(f"{self.kind}: no client ever acts; at least one client needs a rate and a cap above 0.")
        self.clients = len(self.caps)
        total = int(self.caps.sum()) if self.caps.max() < ENDLESS else ENDLESS
        self.steps = total if self.most is None else min(total, self.most)
        self.caps = np.minimum(self.caps, self.steps)
        self._table: tuple[tuple[int, int], Tensor, Tensor] = (0, 0), torch.empty(0, 0), torch.empty(0, 0)

    def describe(self) -> str:
        """Returns one phrase for the report."""
        low, high = int(self.caps.min()), int(self.caps.max())
        most = f"{high}" if low == high else f"{low} to {high}"
        opening = "each acts once before all others, then " if self.opening else ""
        return f"{self.clients} clients, {opening}{self.kind}, at most {most} activations of one client"

    def with_opening(self) -> BoundSchedule:
        """Returns this schedule after an opening, in which every client that ever acts acts once,
        in the order of the data."""
        acts = self.caps > 0
        opening = int(acts.sum())
        return replace(
            self, caps=self.caps + acts, most=None if self.most is None else self.most + opening, opening=opening
        )

    def events(self, seed: int, start: int, stop: int, *, replicates: int = 1) -> Block:
        """Returns events ``start`` to ``stop - 1``.

        A replicate whose clients have all finished is filled up with client -1 at the time of its
        last activation.

        Args:
            seed: of the run.
            start, stop: 0 <= start <= stop <= ``steps``.
            replicates: R.

        Raises:
            ConfigError: the window is not inside the run, or there is no replicate.
        """
        if not 0 <= start <= stop <= self.steps:
            raise ConfigError(f"events {start} to {stop} were asked for; a window must be within [0, {self.steps}].")
        positive_int("events", replicates=replicates)
        key, time, client = self._table
        if key != (seed, replicates) or time.shape[1] < stop:
            before = time.shape[1] if key == (seed, replicates) else 0
            size = min(self.steps, max(1, stop, 2 * before, _TABLE // replicates))
            time = torch.zeros(replicates, size, dtype=torch.float64)
            client = torch.full((replicates, size), -1, dtype=torch.int32)
            for replicate in range(replicates):
                when, who = map(torch.from_numpy, self._activations(seed, replicate, size))
                time[replicate, : len(when)], client[replicate, : len(when)] = when, who.int()
                time[replicate, len(when) :] = when[-1] if len(when) else 0.0
            self._table = (seed, replicates), time, client
        return Block(start, time[:, start:stop], client[:, start:stop, None].long())

    def blocks(
        self, seed: int, start: int, stop: int, *, cuts: Sequence[int] = (), replicates: int = 1
    ) -> Iterator[Block]:
        """Yields events ``start`` to ``stop - 1`` in blocks, none of which reaches over a multiple
        of one of ``cuts``: where they end does not depend on where they start."""
        while start < stop:
            end = min(stop, *(start - start % cut + cut for cut in (_BLOCK, *cuts)))
            yield self.events(seed, start, end, replicates=replicates)
            start = end

    def _activations(self, seed: int, replicate: int, count: int) -> tuple[Array, Ints]:
        """Returns time and client of the first ``count`` activations of a replicate; fewer where all have finished."""

        def uniform(purpose: str, clients: Ints, index: Ints) -> Array:
            key = derive_key(seed, f"schedule/{purpose}", replicate)
            own = self.keys.numpy()[clients].view(np.uint64)[:, None]
            bits = keyed_bits(key, own, 0, index.view(np.uint64))
            return (bits >> 10).astype(np.float64) * 2.0**-53

        def gaps(clients: Ints, index: Ints) -> Array:
            drawn = uniform(self.purpose, clients, index)
            return self.law(drawn, clients[:, None], index) * self.scale[clients, None]

        def departures(index: Ints) -> Array:
            return uniform("dropouts", np.arange(self.clients), np.tile(index, (self.clients, 1)))

        absences = None if self.dropouts is None else Absences(self.dropouts, self.names, departures)
        activations = _rounds if self.waits else _merged
        if not self.opening:
            return activations(self.caps, gaps, absences, count)
        first = np.flatnonzero(self.caps > 0)[:count]
        if len(first) == count:
            return np.zeros(count), first
        time, client = activations(self.caps - (self.caps > 0), gaps, absences, count - len(first))
        return np.concatenate([np.zeros(len(first)), time]), np.concatenate([first, client])


def _merged(caps: Ints, gaps: Gaps, absences: Absences | None, count: int) -> tuple[Array, Ints]:
    """Returns the first ``count`` activations of independent clients, in the order of (time,
    client).

    Each client's times are a running sum of its gaps. All clients have a little more than an even
    share of the activations first; then those have more that may still act before the last of the
    first ``count``.
    """
    last, first, end = np.zeros(len(caps)), 0, np.inf
    share = -(-count // int(np.count_nonzero(caps)))
    width = share + 3 * math.isqrt(share) + 4
    time, client = np.empty(0), np.empty(0, np.int32)
    while len(going := np.flatnonzero((caps > first) & (last <= end) & (last < np.inf))):
        pieces = [(time, client)]
        width = min(width, _CHUNK)
        for some in np.array_split(going, -(-len(going) * width // _CHUNK)):
            index = np.tile(first + np.arange(width), (len(some), 1))
            times = _times(last[some], gaps(some, index), some, absences)
            real = (index < caps[some, None]) & (times < np.inf)
            last[some] = times[:, -1]
            pieces.append((times[real], np.broadcast_to(some[:, None], real.shape)[real].astype(np.int32)))
        time, client = (np.concatenate(column) for column in zip(*pieces, strict=True))
        if len(time) >= count:
            end = np.partition(time, count - 1)[count - 1]
            time, client = time[time <= end], client[time <= end]
        first, width = first + width, 1 + (first + width) // 4
    order = np.lexsort((client, time))[:count]
    return time[order], client[order].astype(np.int64)


def _times(now: Array, gaps: Array, clients: Ints, absences: Absences | None) -> Array:
    """Returns when clients act, (k, count), from their last times (k,) and their gaps (k, count)."""
    if absences is None:
        return np.cumsum(np.concatenate([now[:, None], gaps], axis=1), axis=1)[:, 1:]
    times = np.empty_like(gaps)
    for step, gap in enumerate(gaps.T):
        times[:, step] = now = absences.arrive(clients, now + gap)
    return times


def _rounds(caps: Ints, gaps: Gaps, absences: Absences | None, count: int) -> tuple[Array, Ints]:
    """Returns the first ``count`` activations of rounds in which all clients act once, at the time
    of the slowest.

    A client with fewer activations than others leaves after its last. If the slowest never comes
    back the run ends.
    """
    now, first, made = 0.0, 0, 0
    time, client = [np.empty(0)], [np.empty(0, np.int64)]
    while made < count and now < np.inf and len(members := np.flatnonzero(caps > first)):
        width = min(int(caps.max()) - first, max(1, min(count - made, _CHUNK) // len(members)))
        index = np.tile(first + np.arange(width), (len(members), 1))
        acts, gap, ends = index < caps[members, None], gaps(members, index), np.empty(width)
        for step in range(width):
            due = now + gap[:, step]
            due = due if absences is None else absences.arrive(members, due)
            ends[step] = now = max(now, float(due[acts[:, step]].max()))
        over, place = np.nonzero((acts & (ends < np.inf)).T)
        time.append(ends[over])
        client.append(members[place])
        first, made = first + width, made + len(over)
    return np.concatenate(time)[:count], np.concatenate(client)[:count]
