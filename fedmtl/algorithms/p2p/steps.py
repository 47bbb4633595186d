"""The wake-ups of peer-to-peer learning on the arrays of its state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...privacy import OwnerChannel
from ...schedules import EventTable
from .availability import Availability
from .model import Records
from .network import Network

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GraphData:
    """All that wake-ups need besides the state; a function of the settings and the data.

    Attributes:
        network: graph and public constants.
        records: gradients of the agents' records.
        presence: when agents are away, or None.
        arrivals: int64 (m_i,) of each agent, the event from which each record is there; None: all from the start.
        forgets: whether the models of agents that have left no longer count.
    """

    network: Network
    records: Records
    presence: Availability | None
    arrivals: tuple[Ints, ...] | None
    forgets: bool

    @cached_property
    def coefficients(self) -> tuple[Array, Array, Array]:
        """Of :meth:`Network.coefficients`, for everyone with all records: (n,) each."""
        return self.network.coefficients(self.network.counts)

    @cached_property
    def _sorted(self) -> dict[int, Ints]:
        return {}

    def counts(self, agents: Ints, steps: Ints) -> Ints:
        """m_i of ``agents`` (k,) at events ``steps`` (k,)."""
        if self.arrivals is None:
            return self.network.counts[agents]
        found = np.empty(len(agents), dtype=np.int64)
        for place, agent in enumerate(agents.tolist()):
            if agent not in self._sorted:
                self._sorted[agent] = np.sort(self.arrivals[agent])
            found[place] = np.searchsorted(self._sorted[agent], steps[place], side="right")
        return found

    def factors(self, agents: Ints, steps: Ints) -> tuple[Array, Array, Array]:
        """(k, 1) factors of the own model, of the neighbours' mean and of the answer."""
        if self.arrivals is None:
            keep, share, push = (values[agents] for values in self.coefficients)
        else:
            keep, share, push = self.network.coefficients(self.counts(agents, steps))
        return keep[:, None], share[:, None], push[:, None]

    def public_state(self, start: Tensor) -> dict[str, Tensor]:
        """Of models ``start`` (R, n, D): themselves, the vectors sent (R,), and where agents come and go ``counted``
        and ``known`` bool (R, n), whose model counts and who has ever been there, and ``left`` int64 (R,), the
        departures so far."""
        count = torch.zeros(len(start), dtype=torch.int64)
        public = {"theta": start, "sent": count}
        if self.presence is not None:
            there = torch.from_numpy(self.presence.joined).repeat(len(start), 1)
            public |= {"counted": there, "known": there.clone(), "left": count.clone()}
        return public

    def cuts(self, block: EventTable) -> list[int]:
        """Bounds of runs of events that are computed together: of agents that are not neighbours, with no departure
        inside."""
        cuts = self.network.cuts(block)
        if self.presence is None:
            return cuts
        left = self.presence.left(block.time.numpy())  # (R, S)
        changes = np.flatnonzero((np.diff(left, axis=1) > 0).any(0)) + 1
        return sorted({*cuts, *changes.tolist()})


class GraphState:
    """The wake-ups of one block.

    Args:
        work: of the run.
        public: its state, which is changed in place.
        channel: has begun the block.
        clip: None; or a bound on the L2 norm of a record's gradient in the place of the channel's own clip, whose
            noise alone is then used (``guarantee="paper"``).
    """

    def __init__(self, work: GraphData, public: dict[str, Tensor], channel: OwnerChannel, clip: float | None) -> None:
        self.work, self.network, self.channel, self.clip = work, work.network, channel, clip
        self.points, self.theta, self.sent = public["theta"], public["theta"].numpy(), public["sent"].numpy()
        self.alone = len(self.theta) == 1
        self.counted = self.known = self.left = None
        if work.presence is not None:
            self.counted, self.known = public["counted"].numpy(), public["known"].numpy()
            self.left = public["left"].numpy()
        self.plain = self.alone and work.presence is None and work.arrivals is None and clip is None

    def run(self, block: EventTable) -> None:
        """All of the block's events, in order."""
        clients, bounds = block.client.numpy().T, self.work.cuts(block)  # (S, R)
        times, first = block.time.numpy().T, int(block.step[0]) if len(bounds) > 1 else 0
        for start, stop in pairwise(bounds):
            if self.plain and stop == start + 1 and clients[start, 0] >= 0:
                self.one(int(clients[start, 0]))
            else:
                self.together(clients[start:stop], times[start:stop], first + start)

    def one(self, agent: int) -> None:
        """One wake-up of a single run."""
        keep, share, push = self.work.coefficients
        answer = self.work.records.release_one(self.channel, self.models).numpy()[0]
        mean = self.network.mean_of(self.theta[0], agent)
        row = self.theta[0, agent]
        row *= keep[agent]
        mean *= share[agent]
        row += mean
        row -= push[agent] * answer
        self.sent[0] += self.network.graph.degrees[agent]

    def together(self, part: Ints, times: Array, first: int) -> None:
        """Wake-ups ``part`` (S, R) at ``times``, from event ``first`` on, of agents that are not neighbours of one
        another; -1 is nobody."""
        which, where = np.nonzero(part >= 0)
        agents = part[which, where]
        fresh = self._arrive(part, times, agents, which, where)
        means = self.network.means(self.theta, where, agents, self.counted)
        if fresh is not None:  # those who join start from their neighbours' mean
            self.theta[where[fresh], agents[fresh]] = means[fresh]
        answers = self._answers(part, which, where, agents, first)
        keep, share, push = self.work.factors(agents, first + which)
        self.theta[where, agents] = keep * self.theta[where, agents] + share * means - push * answers
        np.add.at(self.sent, where, self._neighbours(agents, where))
        if fresh is not None and self.counted is not None and self.known is not None:
            np.add.at(self.sent, where[fresh], self._neighbours(agents, where)[fresh])  # what they start from
            self.counted[where, agents] = True
            self.known[where, agents] = True

    def models(self, agent: int, where: Tensor) -> Tensor:
        """Theta_i in repetitions ``where``, (k, D)."""
        return self.points[:, agent] if self.alone else self.points[where, agent]

    def _answers(self, part: Ints, which: Ints, where: Ints, agents: Ints, first: int) -> Array:
        """(k, D): what the channel releases."""
        count, records = len(part), self.work.records
        if self.clip is None:
            answers: Array = records.release(self.channel, count, self.models).numpy()[which, where]
            return answers
        noise = self.channel.release_run(
            count, lambda i, _, w: torch.zeros(len(w), int(self.network.counts[i]), dtype=torch.float64)
        ).numpy()[which, where]
        for k, (agent, r) in enumerate(zip(agents.tolist(), where.tolist(), strict=True)):
            if self.network.counts[agent]:
                model = self.points[r, agent][None]
                noise[k] += records.clipped_means(agent, model, self.clip)[0].numpy()
        return noise

    def _arrive(self, part: Ints, times: Array, agents: Ints, which: Ints, where: Ints) -> NDArray[np.bool_] | None:
        """Note departures up to now; bool (k,), who wakes for the first time, or None where nobody comes and goes."""
        presence = self.work.presence
        if presence is None or self.left is None or self.counted is None or self.known is None:
            return None
        presence.check(agents, times[which, where])
        for r, now in enumerate(presence.left(times[0]).tolist()):
            if now > self.left[r]:
                if self.work.forgets:
                    self.counted[r, presence.leavers(int(self.left[r]), now)] = False
                self.left[r] = now
        return ~self.known[where, agents]

    def _neighbours(self, agents: Ints, where: Ints) -> Ints:
        """(k,): how many neighbours a broadcast reaches."""
        if self.counted is None:
            return self.network.graph.degrees[agents]
        place, owner, _ = self.network.entries(agents)
        there = self.counted[where[owner], self.network.indices[place]]
        return np.bincount(owner, there, len(agents)).astype(np.int64)
