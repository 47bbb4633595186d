"""The wake-ups of peer-to-peer learning on the arrays of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.blas import dtrsm
from torch import Tensor

from ...privacy import Channel
from ...schedules import Block
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
    def system(self) -> Array | None:
        """Return the rows A_i of a dense graph: agents move by -(A_i Theta + alpha mu c (grad + eta))."""
        if self.network.dense is None:
            return None
        keep, share, _ = self.coefficients
        return np.diag(1.0 - keep) - share[:, None] * self.network.dense

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

    def bounds(self, block: Block, *, apart: bool) -> Ints:
        """Return bounds (T + 1, R) of runs of events that are computed together, with no departure inside.

        Args:
            block: of activations.
            apart: whether those of a repetition are as long as they can be, whatever those of others are.
        """
        if self.presence is None and self.arrivals is None:
            each = self.network.runs(block.client, apart=apart)
            bounds = np.full((max(map(len, each)), len(block.client)), len(block))
            for r, own in enumerate(each):
                bounds[: len(own), r] = own
            return bounds
        cuts = self.network.cuts(block)
        if self.presence is not None:
            left = self.presence.left(block.time.numpy())  # (R, S)
            changes = np.flatnonzero((np.diff(left, axis=1) > 0).any(0)) + 1
            cuts = sorted({*cuts, *changes.tolist()})
        return np.repeat(np.array(cuts)[:, None], len(block.client), 1)


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
        self.dense = work.system if self.fixed else None
        self.message = work.records.gradients_at(self.models)

    def run(self, block: Block, channel: Channel) -> None:
        """Compute all of the block's activations; ``channel`` has begun the block.

        Those of one repetition are in order, but computed together in runs in which no agent waits for another one's
        gradient. Repetitions do not wait for one another either.
        """
        answered = channel.answering(len(block)).T
        for begin in range(0, len(block), stretch := channel.apart or len(block)):
            part = block.window(begin, min(len(block), begin + stretch))
            self._run(part, answered[:, begin : begin + len(part)], channel)

    def _run(self, block: Block, answered: NDArray[np.bool_], channel: Channel) -> None:
        counts = np.diff(self.work.bounds(block, apart=channel.apart > 0), axis=0)  # (T, R), of events in each run
        run = np.repeat(np.tile(np.arange(len(counts)), counts.shape[1]), counts.T.ravel())
        order = np.argsort(run, kind="stable")  # by run, then by repetition
        where, steps = np.divmod(order, len(block))
        agents, times = block.client.numpy().ravel()[order], block.time.numpy().ravel()[order]
        some = answered.ravel()[order]
        ends, everybody = counts.sum(1).cumsum().tolist(), bool((agents >= 0).all())
        for start, stop, each in zip([0, *ends], ends, counts, strict=False):
            part = slice(start, stop)
            if not self.fixed:
                self.arrive(agents[part], where[part], times[part])
            answers = channel.release_runs(self.message, each)
            if everybody:
                self.update(agents[part], where[part], block.first + steps[part], answers, some[part])
            else:
                acts = np.flatnonzero(agents[part] >= 0)
                own = start + acts
                self.update(agents[own], where[own], block.first + steps[own], answers[acts], some[own])

    def arrive(self, agents: Ints, where: Ints, times: Array) -> None:
        """Note departures up to now, and start agents who act for the first time from their neighbours' mean.

        Args:
            agents: (k,) who acts; those of one repetition are not neighbours of one another; -1 is nobody.
            where: (k,) the repetitions, which rise.
            times: (k,); nobody leaves between those of a repetition.
        """
        presence = self.work.presence
        if presence is None or self.left is None or self.counted is None or self.known is None:
            return
        now = np.zeros(len(self.left))
        now[where[::-1]] = times[::-1]  # of the first of each repetition
        for r, left in enumerate(presence.left(now).tolist()):
            if left > self.left[r]:
                if self.work.forgets:
                    self.counted[r, presence.leavers(int(self.left[r]), left)] = False
                self.left[r] = left
        acts = agents >= 0
        agents, where, times = agents[acts], where[acts], times[acts]
        presence.check(agents, times)
        fresh = ~self.known[where, agents]
        means = self.network.means(self.theta, where[fresh], agents[fresh], self.counted)
        self.theta[where[fresh], agents[fresh]] = means
        np.add.at(self.sent, where[fresh], self._neighbours(agents[fresh], where[fresh]))  # what they start from

    def models(self, agent: int | Ints, where: Ints) -> Array:
        """Return Theta_i of an agent, or of those of k, in repetitions ``where`` (k,): (k, D)."""
        if self.single and not isinstance(agent, int):
            return self.theta[0].take(agent, 0)
        models: Array = self.theta[where, agent]
        return models

    def update(self, agents: Ints, where: Ints, steps: Ints, answers: Array, answered: NDArray[np.bool_]) -> None:
        """Apply equation (6) for ``agents`` (k,) in repetitions ``where`` (k,), which rise.

        Args:
            agents: those of one repetition are different, in the order in which they act; a later one's mean has the
                models of those before.
            where: see above.
            steps: (k,) the activations.
            answers: (k, D) what they release.
            answered: (k,) which of them release something.
        """
        answers = self.remembered(agents, where, answers, answered)
        if self.dense is not None:
            self._move_in_turn(self.dense, agents, where, answers)
        else:
            keep, share, push = self.work.factors(agents, steps)
            new = self.models(agents, where) * keep
            means = self.network.means(self.theta, where, agents, self.counted)
            new += np.multiply(means, share, out=means)
            new -= np.multiply(answers, push, out=means)
            self.theta[where, agents] = new
        np.add.at(self.sent, where, self._neighbours(agents, where))
        if self.counted is not None and self.known is not None:
            self.counted[where, agents] = True
            self.known[where, agents] = True

    def _move_in_turn(self, system: Array, agents: Ints, where: Ints, answers: Array) -> None:
        """Apply equation (6) on a dense graph for agents that may be neighbours, each after those before it.

        Without them agents would move by -(A Theta + alpha mu c (grad + eta)), with rows of A, ``system``. With them,
        the moves m of a repetition solve a unit triangular system: m_s + sum_{t < s} A_st m_t is that.
        """
        push = self.work.coefficients[2].take(agents)[:, None]
        bounds = [0, len(agents)] if self.single else np.searchsorted(where, np.arange(len(self.theta) + 1)).tolist()
        for theta, start, stop in zip(self.theta, bounds[:-1], bounds[1:], strict=True):
            if start == stop:
                continue
            who = agents[start:stop]
            rows = system.take(who, 0)
            moves = rows.dot(theta)
            moves += answers[start:stop] * push[start:stop]
            among = rows.take(who, 1)  # of which the lower triangle counts, and the diagonal is 1
            theta[who] += dtrsm(-1.0, among.T, moves.T, side=1, diag=1, overwrite_b=1).T

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
