"""The wake-ups of peer-to-peer learning on the arrays of its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...privacy import Channel
from ...schedules import Block
from .availability import Availability
from .model import Records
from .network import Network

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
_TOGETHER = 16
"""Activations of a dense graph, for whose means the models are read once."""


@dataclass(frozen=True, eq=False)
class GraphData:
    """All that wake-ups need besides the state; a function of the settings and the data.

    Attributes:
        network: graph and public constants.
        records: gradients of the agents' records.
        presence: when agents are away, or None.
        arrivals: int64 (m_i,) of each agent, the event from which each record is there; None: all from the start.
        forgets: whether the models of agents that have left no longer count.
        remembers: whether agents go on from what they have released when they release no more.
    """

    network: Network
    records: Records
    presence: Availability | None
    arrivals: tuple[Ints, ...] | None
    forgets: bool
    remembers: bool = False

    @cached_property
    def coefficients(self) -> tuple[Array, Array, Array]:
        """Return :meth:`Network.coefficients` for everyone with all records: (n,) each."""
        return self.network.coefficients(self.network.counts)

    @cached_property
    def _sorted(self) -> dict[int, Ints]:
        return {}

    def counts(self, agents: Ints, steps: Ints) -> Ints:
        """Return m_i of ``agents`` (k,) at events ``steps`` (k,)."""
        if self.arrivals is None:
            return self.network.counts[agents]
        found = np.empty(len(agents), dtype=np.int64)
        for place, agent in enumerate(agents.tolist()):
            if agent not in self._sorted:
                self._sorted[agent] = np.sort(self.arrivals[agent])
            found[place] = np.searchsorted(self._sorted[agent], steps[place], side="right")
        return found

    def factors(self, agents: Ints, steps: Ints) -> tuple[Array, Array, Array]:
        """Return (k, 1) factors of the own model, of the neighbours' mean and of the answer."""
        if self.arrivals is None:
            keep, share, push = (values[agents] for values in self.coefficients)
        else:
            keep, share, push = self.network.coefficients(self.counts(agents, steps))
        return keep[:, None], share[:, None], push[:, None]

    def public_state(self, start: Tensor) -> dict[str, Tensor]:
        """Return the state of models ``start`` (R, n, D): themselves, the vectors sent (R,), and where agents come and
        go ``counted`` and ``known`` bool (R, n), whose model counts and who has ever been there, and ``left`` int64
        (R,), the departures so far; where releases are remembered ``slope`` (R, n, D), the mean of g - h Theta_i over
        an agent's releases g, h being the smoothness, and ``told`` int64 (R, n), how many they are."""
        count = torch.zeros(len(start), dtype=torch.int64)
        public = {"theta": start, "sent": count}
        if self.remembers:
            public |= {"slope": torch.zeros_like(start), "told": torch.zeros(start.shape[:2], dtype=torch.int64)}
        if self.presence is not None:
            there = torch.from_numpy(self.presence.joined).repeat(len(start), 1)
            public |= {"counted": there, "known": there.clone(), "left": count.clone()}
        return public

    def cuts(self, block: Block) -> list[int]:
        """Return bounds of runs of events that are computed together: of agents that are not neighbours, with no
        departure inside."""
        cuts = self.network.cuts(block)
        if self.presence is None:
            return cuts
        left = self.presence.left(block.time.numpy())  # (R, S)
        changes = np.flatnonzero((np.diff(left, axis=1) > 0).any(0)) + 1
        return sorted({*cuts, *changes.tolist()})


class GraphState:
    """Activations on the arrays of the public state.

    Args:
        work: of the run.
        public: its state, which :meth:`update` changes in place.
    """

    def __init__(self, work: GraphData, public: Mapping[str, Tensor]) -> None:
        self.work, self.network = work, work.network
        self.theta, self.sent = public["theta"].numpy(), public["sent"].numpy()
        self.single = len(self.theta) == 1
        self.counted = self.known = self.left = self.slope = self.told = None
        if work.remembers:
            self.slope, self.told = public["slope"].numpy(), public["told"].numpy()
        if work.presence is not None:
            self.counted, self.known = public["counted"].numpy(), public["known"].numpy()
            self.left = public["left"].numpy()
        self.fixed = work.presence is None and work.arrivals is None
        self.message = work.records.gradients_at(self.models)

    def run(self, block: Block, channel: Channel) -> None:
        """Compute all of the block's activations, in order; ``channel`` has begun the block."""
        clients, times = block.client.numpy().T, block.time.numpy().T  # (S, R)
        answered = channel.answering(len(block))
        if self.single and self.fixed:
            active = zip(clients[:, 0].tolist(), answered[:, 0].tolist(), channel.answers(self.message), strict=True)
            for agent, released, answer in active:
                if agent >= 0:
                    self.update_one(agent, answer[0], released)
            return
        if self.fixed and self.network.dense is not None:
            coming = channel.answers(self.message)
            for begin in range(0, len(block), _TOGETHER):
                part = slice(begin, begin + _TOGETHER)
                self._run_dense(self.network.dense, clients[part], answered[part], coming)
            return
        for start, stop in pairwise(self.work.cuts(block)):
            part, first = clients[start:stop], block.first + start
            self.arrive(part, times[start:stop])
            answers = channel.release_gradients(self.message, stop - start)
            self.update(part, answers, first, answered[start:stop])

    def _run_dense(self, shares: Array, clients: Ints, answered: NDArray[np.bool_], answers: Iterator[Array]) -> None:
        """Compute activations ``clients`` (S, R) of R repetitions on a dense graph that does not change.

        All of Theta (R, n, D) does not fit the cache, so it is read once for the S means of each repetition: first
        those of the models before, to which every activation adds its share of the moves that were made since.

        Args:
            shares: W_ij / D_ii, (n, n).
            clients: who acts; -1 is nobody.
            answered: (S, R) which of them release something.
            answers: what they release, (R, D) each.
        """
        every, acts, agents = np.arange(len(self.theta)), clients >= 0, np.maximum(clients, 0)
        rows = shares[agents.T]  # (R, S, n)
        means = np.matmul(rows, self.theta)
        between = np.take_along_axis(rows, agents.T[:, None, :], 2)  # (R, S, S): weights of those who act
        keep, share, push = (
            np.where(acts, factor[agents], of_nobody)[:, :, None]
            for factor, of_nobody in zip(self.work.coefficients, (1.0, 0.0, 0.0), strict=True)
        )
        moves = np.empty_like(means)
        for s, who in enumerate(agents):
            answer, mean, own = next(answers), means[:, s], self.theta[every, who]
            if self.slope is not None:
                some = np.flatnonzero(acts[s])
                answer[some] = self.remembered(who[some], some, answer[some], answered[s, some])
            if s:
                mean += np.matmul(between[:, s, None, :s], moves[:, :s])[:, 0]
            new = own * keep[s]
            new += np.multiply(mean, share[s], out=mean)
            new -= np.multiply(answer, push[s], out=mean)
            np.subtract(new, own, out=moves[:, s])
            self.theta[every, who] = new
        self.sent += np.where(acts, self.network.graph.degrees[agents], 0).sum(0)

    def arrive(self, part: Ints, times: Array) -> None:
        """Note departures up to now, and start those who act for the first time from their neighbours' mean.

        Args:
            part: (S, R), who acts; agents that are not neighbours of one another; -1 is nobody.
            times: (S, R).
        """
        presence = self.work.presence
        if presence is None or self.left is None or self.counted is None or self.known is None:
            return
        which, where = np.nonzero(part >= 0)
        agents = part[which, where]
        presence.check(agents, times[which, where])
        for r, now in enumerate(presence.left(times[0]).tolist()):
            if now > self.left[r]:
                if self.work.forgets:
                    self.counted[r, presence.leavers(int(self.left[r]), now)] = False
                self.left[r] = now
        fresh = ~self.known[where, agents]
        means = self.network.means(self.theta, where[fresh], agents[fresh], self.counted)
        self.theta[where[fresh], agents[fresh]] = means
        np.add.at(self.sent, where[fresh], self._neighbours(agents[fresh], where[fresh]))  # what they start from

    def models(self, agent: int, where: Ints) -> Array:
        """Return Theta_i in repetitions ``where``, (k, D)."""
        models: Array = self.theta[:, agent] if self.single else self.theta[where, agent]
        return models

    def update_one(self, agent: int, answer: Array, answered: bool = True) -> None:
        """Compute one activation of a single run on a graph that does not change."""
        if self.slope is not None:
            one = np.zeros(1, dtype=np.int64)
            answer = self.remembered(one + agent, one, answer[None], np.array([answered]))[0]
        keep, share, push = self.work.coefficients
        mean = self.network.mean_of(self.theta[0], agent)
        row = self.theta[0, agent]
        row *= keep[agent]
        mean *= share[agent]
        row += mean
        row -= push[agent] * answer
        self.sent[0] += self.network.graph.degrees[agent]

    def update(self, part: Ints, answers: Array, first: int, answered: NDArray[np.bool_]) -> None:
        """Apply equation (6) for agents ``part`` (S, R), from what they release, (S, R, D); ``first`` is the
        activation, ``answered`` (S, R) which of them release something."""
        which, where = np.nonzero(part >= 0)
        agents = part[which, where]
        steps = self.remembered(agents, where, answers[which, where], answered[which, where])
        means = self.network.means(self.theta, where, agents, self.counted)
        keep, share, push = self.work.factors(agents, first + which)
        self.theta[where, agents] = keep * self.theta[where, agents] + share * means - push * steps
        np.add.at(self.sent, where, self._neighbours(agents, where))
        if self.counted is not None and self.known is not None:
            self.counted[where, agents] = True
            self.known[where, agents] = True

    def remembered(self, agents: Ints, where: Ints, answers: Array, answered: NDArray[np.bool_]) -> Array:
        """Return the data gradients (k, D) that ``agents`` (k,) step along in repetitions ``where`` (k,).

        It is the released one, ``answers`` (k, D), of those who ``answered`` (k,). The others, whose budget is spent,
        take the mean of what they have released to their present model by the public curvature h: of releases g_1,
        ..., g_K at Theta_i(1), ..., Theta_i(K) it is (1/K) sum_k (g_k + h (Theta_i - Theta_i(k))). This is
        post-processing and reads no record.
        """
        if self.slope is None or self.told is None:
            return answers
        bend = self.network.smoothness * self.theta[where, agents]
        mean, told = self.slope[where, agents], self.told[where, agents] + answered
        mean += np.where(answered, 1.0 / np.maximum(told, 1), 0.0)[:, None] * (answers - bend - mean)
        self.slope[where, agents], self.told[where, agents] = mean, told
        from_releases = np.where(told[:, None] > 0, mean + bend, 0.0)
        return np.where(answered[:, None], answers, from_releases)

    def _neighbours(self, agents: Ints, where: Ints) -> Ints:
        """Return (k,): how many neighbours a broadcast reaches."""
        if self.counted is None:
            return self.network.graph.degrees[agents]
        place, owner, _ = self.network.entries(agents)
        there = self.counted[where[owner], self.network.indices[place]]
        return np.bincount(owner, there, len(agents)).astype(np.int64)
