"""The activations of a schedule, in order: of independent clients, or of rounds.

The activations depend on no data, so the draws are those of a simulation: addressed by (seed,
purpose, replicate, client, index). A replicate does not depend on the others, a client keeps its
times when others join, and a window of a run does not depend on the windows before.
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

_BLOCK = 256  # activations of a block at most
_CHUNK = 1 << 16  # activations that are computed at once
_TABLE = 1 << 20  # activations of all replicates that are made at once at least


@dataclass(eq=False)
class BoundSchedule:
    """A schedule for n given clients.

    Requested activations are kept as a table, with about twice as many for later windows: 12 bytes
    for an activation of a replicate.

    Attributes:
        description: of the clients' behaviour, for reports.
        law: of the gaps.
        scale: float64 (n,), factors of the gaps.
        caps: int64 (n,), the most activations of each client in a run; 0 never acts.
        names: of the clients.
        keys: int64 (n,), their addresses in random draws.
        purpose: name of the stream of random numbers.
        max_activations: of a run; None if the clients' caps end it.
        waits: True if the server waits for the slowest client of every round.
        dropouts: absences of clients; None if they are never away.
        initial: number of activations before all others, at time 0: every client that ever acts
            acts once, in the order of the data. They are part of ``caps`` and
            ``max_activations``.
        measured: True if the gaps are those of a trace, which may tell something about the data.
        clients: n.
        steps: the most activations of a run. Fewer clients may be left to act in the end (absences
            without return); a table is then filled up with -1.

    Example:
        >>> from fedmtl import PoissonClocks
        >>> schedule = PoissonClocks(per_client=2).bind(3)
        >>> block = schedule.activations(seed=0, start=0, stop=6)
        >>> sorted(block.client[0].tolist())  # each client acts twice
        [0, 0, 1, 1, 2, 2]
    """

    description: str
    law: Law
    scale: Array
    caps: Ints
    names: Sequence[str]
    keys: Tensor
    purpose: str
    max_activations: int | None
    waits: bool = False
    dropouts: Dropouts | None = None
    initial: int = 0
    measured: bool = False

    def __post_init__(self) -> None:
        if not self.caps.any():
            needed = "at least one client needs a rate and a cap above 0"
            raise ConfigError(f"{self.description}: no client ever acts; {needed}.")
        self.clients = len(self.caps)
        self.steps = ENDLESS
        if self.caps.max() < ENDLESS:
            self.steps = int(self.caps.sum())
        if self.max_activations is not None:
            self.steps = min(self.steps, self.max_activations)
        self.caps = np.minimum(self.caps, self.steps)
        # (seed, replicates), times (R, S) and clients (R, S)
        none = torch.empty(0, 0)
        self._table: tuple[tuple[int, int], Tensor, Tensor] = ((0, 0), none, none)

    def describe(self) -> str:
        """Returns one phrase for the report."""
        low = int(self.caps.min())
        high = int(self.caps.max())
        most = f"{high}"
        if low < high:
            most = f"{low} to {high}"
        behaviour = self.description
        if self.initial:
            behaviour = f"each acts once before all others, then {behaviour}"
        return f"{self.clients} clients, {behaviour}, at most {most} activations of one client"

    def with_initial_activations(self) -> BoundSchedule:
        """Returns this schedule after one activation of every client that ever acts, in the order
        of the data."""
        acts = self.caps > 0
        initial = int(acts.sum())
        limit = self.max_activations
        if limit is not None:
            limit += initial
        return replace(self, caps=self.caps + acts, max_activations=limit, initial=initial)

    def activations(self, seed: int, start: int, stop: int, *, replicates: int = 1) -> Block:
        """Returns activations ``start`` to ``stop - 1``.

        A replicate whose clients have all finished is filled up with client -1 at the time of its
        last activation.

        Args:
            seed: of the run.
            start: the first activation, at least 0.
            stop: one past the last, at least ``start`` and at most ``steps``.
            replicates: R.

        Raises:
            ConfigError: the window is not inside the run, or there is no replicate.
        """
        if not 0 <= start <= stop <= self.steps:
            within = f"a window must be within [0, {self.steps}]"
            raise ConfigError(f"activations {start} to {stop} were asked for; {within}.")
        positive_int("activations", replicates=replicates)
        key, time, client = self._table
        before = 0
        if key == (seed, replicates):
            before = time.shape[1]
        if before < stop or key != (seed, replicates):
            size = min(self.steps, max(1, stop, 2 * before, _TABLE // replicates))
            time, client = self._made(seed, replicates, size)
            self._table = ((seed, replicates), time, client)
        return Block(start, time[:, start:stop], client[:, start:stop, None].long())

    def _made(self, seed: int, replicates: int, size: int) -> tuple[Tensor, Tensor]:
        """Makes the first ``size`` activations: times float64 (R, S) and clients int32 (R, S)."""
        time = torch.zeros(replicates, size, dtype=torch.float64)
        client = torch.full((replicates, size), -1, dtype=torch.int32)
        for replicate in range(replicates):
            times, clients = self._activations(seed, replicate, size)
            count = len(times)
            time[replicate, :count] = torch.from_numpy(times)
            client[replicate, :count] = torch.from_numpy(clients).int()
            if count:
                time[replicate, count:] = float(times[-1])
        return time, client

    def blocks(
        self, seed: int, start: int, stop: int, *, cuts: Sequence[int] = (), replicates: int = 1
    ) -> Iterator[Block]:
        """Yields activations ``start`` to ``stop - 1`` in blocks.

        No block reaches over a multiple of one of ``cuts``: the ends of blocks do not depend on the
        first activation.

        Args:
            seed: of the run.
            start: the first activation.
            stop: one past the last.
            cuts: numbers of activations.
            replicates: R.
        """
        while start < stop:
            ends = [start - start % cut + cut for cut in (_BLOCK, *cuts)]
            end = min(stop, *ends)
            yield self.activations(seed, start, end, replicates=replicates)
            start = end

    def draws(self, seed: int, replicate: int = 0) -> tuple[Gaps, Absences | None]:
        """Returns a function from clients and the numbers of their activations to the latencies of
        a replicate, and a new record of absences; None without dropouts.

        Args:
            seed: of the run.
            replicate: its number.
        """

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

        absences = None
        if self.dropouts is not None:
            absences = Absences(self.dropouts, self.names, departures)
        return gaps, absences

    def _activations(self, seed: int, replicate: int, count: int) -> tuple[Array, Ints]:
        """Returns times and clients of the first ``count`` activations of a replicate.

        They are fewer if all clients have finished.
        """
        gaps, absences = self.draws(seed, replicate)
        activations = _merged
        if self.waits:
            activations = _rounds
        if not self.initial:
            return activations(self.caps, gaps, absences, count)
        initial = np.flatnonzero(self.caps > 0)[:count]
        start = np.zeros(len(initial))
        if len(initial) == count:
            return start, initial
        caps = self.caps - (self.caps > 0)
        time, client = activations(caps, gaps, absences, count - len(initial))
        return np.concatenate([start, time]), np.concatenate([initial, client])


def _merged(caps: Ints, gaps: Gaps, absences: Absences | None, count: int) -> tuple[Array, Ints]:
    """Returns the first ``count`` activations of independent clients, by (time, client).

    Each client's times are a running sum of its gaps. First, all clients get a little more than an
    even share of the activations. Then clients that may still act before the last of the first
    ``count`` get more.
    """
    last = np.zeros(len(caps))  # time of each client's last activation so far
    first = 0  # number of activations of each client so far
    end = np.inf  # no activation after it is among the first ``count``
    share = -(-count // int(np.count_nonzero(caps)))
    width = share + 3 * math.isqrt(share) + 4
    time = np.empty(0)
    client = np.empty(0, np.int32)
    going = np.flatnonzero(caps > 0)
    while len(going):
        pieces = [(time, client)]
        width = min(width, _CHUNK)
        # as many clients at once as fit into a chunk
        for some in np.array_split(going, -(-len(going) * width // _CHUNK)):
            index = np.tile(first + np.arange(width), (len(some), 1))
            times = _times(last[some], gaps(some, index), some, absences)
            real = (index < caps[some, None]) & (times < np.inf)
            last[some] = times[:, -1]
            acting = np.broadcast_to(some[:, None], real.shape)[real]
            pieces.append((times[real], acting.astype(np.int32)))
        time, client = (np.concatenate(column) for column in zip(*pieces, strict=True))
        if len(time) >= count:
            end = np.partition(time, count - 1)[count - 1]
            early = time <= end
            time = time[early]
            client = client[early]
        first += width
        width = 1 + first // 4
        going = np.flatnonzero((caps > first) & (last <= end) & (last < np.inf))
    order = np.lexsort((client, time))[:count]
    return time[order], client[order].astype(np.int64)


def _times(now: Array, gaps: Array, clients: Ints, absences: Absences | None) -> Array:
    """Returns the times of activations (k, count), from the last ones (k,) and the gaps."""
    if absences is None:
        sums = np.cumsum(np.concatenate([now[:, None], gaps], axis=1), axis=1)
        return sums[:, 1:]
    times = np.empty_like(gaps)
    for step, gap in enumerate(gaps.T):
        now = absences.arrive(clients, now + gap)
        times[:, step] = now
    return times


def _rounds(caps: Ints, gaps: Gaps, absences: Absences | None, count: int) -> tuple[Array, Ints]:
    """Returns the first ``count`` activations of rounds that end with the slowest client.

    All clients act once in a round. A client with fewer activations than others leaves after its
    last. The run ends if the slowest never comes back.
    """
    now = 0.0
    first = 0  # rounds so far
    made = 0  # activations so far
    time = [np.empty(0)]
    client = [np.empty(0, np.int64)]
    members = np.flatnonzero(caps > first)
    while made < count and now < np.inf and len(members):
        fitting = max(1, min(count - made, _CHUNK) // len(members))
        width = min(int(caps.max()) - first, fitting)
        index = np.tile(first + np.arange(width), (len(members), 1))
        acts = index < caps[members, None]
        gap = gaps(members, index)
        ends = np.empty(width)  # of the rounds
        for step in range(width):
            due = now + gap[:, step]
            if absences is not None:
                due = absences.arrive(members, due)
            now = max(now, float(due[acts[:, step]].max()))
            ends[step] = now
        over, place = np.nonzero((acts & (ends < np.inf)).T)
        time.append(ends[over])
        client.append(members[place])
        first += width
        made += len(over)
        members = np.flatnonzero(caps > first)
    return np.concatenate(time)[:count], np.concatenate(client)[:count]
