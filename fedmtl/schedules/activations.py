"""The activations of one replicate in order: clients that act independently, and rounds that wait for the slowest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..random import derive_key, keyed_uniform
from .dropouts import Absences, Dropouts
from .latency import Law

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Gaps = Callable[[Ints, Ints], Array]
"""Clients (k,) and the numbers of their activations (k, count) to the latencies (k, count)."""

_CHUNK = 1 << 16  # activations that are computed at once


@dataclass(frozen=True, eq=False)
class Clients:
    """What the n clients of a schedule do.

    Attributes:
        names: of the clients.
        keys: int64 (n,), their addresses in random draws.
        law: of the gaps.
        scale: float64 (n,), factors of the gaps.
        caps: int64 (n,), the most activations of each client; 0 never acts.
        purpose: name of the stream of random numbers.
        waits: whether the server waits for the slowest client of every round.
        dropouts: when clients are away; None if they never are.
    """

    names: Sequence[str]
    keys: Tensor
    law: Law
    scale: Array
    caps: Ints
    purpose: str
    waits: bool = False
    dropouts: Dropouts | None = None

    def uniform(self, purpose: str, seed: int, replicate: int, clients: Ints, index: Ints) -> Array:
        """Return numbers ``index`` (k, count) of the streams of ``clients`` (k,), in [0, 1)."""
        key = derive_key(seed, f"schedule/{purpose}", replicate)
        return keyed_uniform(key, self.keys[clients][:, None], 0, torch.from_numpy(index)).numpy()

    def activations(self, seed: int, replicate: int, count: int) -> tuple[Array, Ints]:
        """Return time and client of the first ``count`` activations of a replicate; fewer where all have finished."""

        def gaps(clients: Ints, index: Ints) -> Array:
            drawn = self.uniform(self.purpose, seed, replicate, clients, index)
            return self.law(drawn, clients[:, None], index) * self.scale[clients, None]

        def uniform(index: Ints) -> Array:
            everyone = np.arange(len(self.caps))
            return self.uniform("dropouts", seed, replicate, everyone, np.tile(index, (len(everyone), 1)))

        absences = None if self.dropouts is None else Absences(self.dropouts, self.names, uniform)
        return (_rounds if self.waits else _merged)(self.caps, gaps, absences, count)


def _merged(caps: Ints, gaps: Gaps, absences: Absences | None, count: int) -> tuple[Array, Ints]:
    """Return the first ``count`` activations of independent clients, in the order of (time, client).

    Each client's times are a running sum of its gaps. All clients have a little more than an even share of the
    activations first; then those have more that may still act before the last of the first ``count``.
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
    """Return when clients act, (k, count), from their last times (k,) and their gaps (k, count)."""
    if absences is None:
        return np.cumsum(np.concatenate([now[:, None], gaps], axis=1), axis=1)[:, 1:]
    times = np.empty_like(gaps)
    for step, gap in enumerate(gaps.T):
        times[:, step] = now = absences.arrive(clients, now + gap)
    return times


def _rounds(caps: Ints, gaps: Gaps, absences: Absences | None, count: int) -> tuple[Array, Ints]:
    """Return the first ``count`` activations of rounds in which all clients act once, at the time of the slowest.

    A client with fewer activations than others leaves after its last. If the slowest never comes back the run ends.
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
