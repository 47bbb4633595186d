"""The public constants of a peer-to-peer run: graph, confidence, curvature, step sizes; and sums over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...graphs import Graph
from ...schedules import Adjacency, Block, Conflicts, block_bounds, bounds_of_each

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
_DENSE_AGENTS, _DENSE_SHARE = 2048, 0.25
"""A graph of at most so many agents, of which an agent has at least that share as neighbours, is also kept dense."""
_DENSE_RUN, _RUN = 32, 1 << 11
"""The most events of a run on such a graph, and edges of those of a run elsewhere."""
_EDGES = 1 << 14


@dataclass(frozen=True, eq=False)
class Network:
    """What the update needs besides models and records; numbers of records and the graph are public.

    Attributes:
        graph: of the n agents, in the order of the data.
        counts: m_i, int64 (n,).
        most: max_j m_j, at least 1.
        mu: the weight of the local losses.
        lam: lambda of every agent, or None for 1 / m_i (1 for an agent without data).
        smoothness: Lipschitz constant of the gradient of one record's loss, of the domain.
        idle: confidence of an agent without data.
        power: k of c_i = (m_i / max_j m_j)^k.
    """

    graph: Graph
    counts: Ints
    most: int
    mu: float
    lam: float | None
    smoothness: float
    idle: float
    power: float = 1.0

    def confidence(self, counts: Ints) -> Array:
        """Return c_i = (m_i / max_j m_j)^power, and a small constant for agents without data."""
        return np.where(counts > 0, (counts / self.most) ** self.power, self.idle)

    def ridge(self, counts: Ints) -> Array:
        """Return lambda_i."""
        return np.full(len(counts), self.lam) if self.lam is not None else 1.0 / np.maximum(counts, 1)

    def curvature(self, counts: Ints) -> Array:
        """Return L_i^loc: ``smoothness + 2 lambda_i``; without data only the second term is left."""
        return np.where(counts > 0, self.smoothness, 0.0) + 2 * self.ridge(counts)

    def coefficients(self, counts: Ints) -> tuple[Array, Array, Array]:
        """Return the coefficients of Theta_i, of its neighbours' mean and of the data gradient in equations (4) and
        (6), for agents with ``counts`` (k,) records.

        With alpha = 1 / (1 + mu c_i L_i^loc): ``1 - alpha - 2 alpha mu c_i lambda_i``, ``alpha`` and
        ``alpha mu c_i``, 0 where there is no record.
        """
        pull = self.mu * self.confidence(counts)
        alpha = 1.0 / (1.0 + pull * self.curvature(counts))
        keep = 1.0 - alpha - 2 * alpha * pull * self.ridge(counts)
        return keep, alpha, np.where(counts > 0, alpha * pull, 0.0)

    @property
    def convexity(self) -> float:
        """Return sigma, the bound mu min_i D_ii c_i 2 lambda_i of the paper, by public constants."""
        least = self.graph.normalization * self.confidence(self.counts) * 2 * self.ridge(self.counts)
        return float(self.mu * least[self.graph.normalization > 0].min(initial=np.inf))

    @property
    def largest_curvature(self) -> float:
        """Return L_max = max_i D_ii (1 + mu c_i L_i^loc)."""
        pulled = self.mu * self.confidence(self.counts) * self.curvature(self.counts)
        return float((self.graph.normalization * (1 + pulled)).max())

    # Neighbours

    @cached_property
    def indptr(self) -> Ints:
        return self.graph.weights.indptr.astype(np.int64)

    @cached_property
    def indices(self) -> Ints:
        return self.graph.weights.indices.astype(np.int64)

    @cached_property
    def shares(self) -> Array:
        """Return W_ij / D_ii of every stored weight."""
        return self.graph.weights.data / np.repeat(self.graph.normalization, self.graph.degrees)

    @cached_property
    def dense(self) -> Array | None:
        """Return W_ij / D_ii (n, n), where most agents are neighbours; else None."""
        n = len(self.graph)
        if n > _DENSE_AGENTS or self.graph.weights.nnz < _DENSE_SHARE * n * n:
            return None
        full = np.zeros((n, n))
        full[np.repeat(np.arange(n), self.graph.degrees), self.indices] = self.shares
        return full

    @cached_property
    def adjacency(self) -> Adjacency:
        return Adjacency.of(self.graph.weights)

    def cuts(self, block: Block) -> list[int]:
        """Return bounds of runs of events of agents that are not neighbours, which commute."""
        everyone = self.dense is not None  # then hardly two events in a row commute
        found: Tensor = block_bounds(block.client, "all" if everyone else self.adjacency, max(1, len(block)))
        return [int(bound) for bound in found]

    def runs(self, clients: Tensor, *, apart: bool) -> list[Ints]:
        """Return bounds of runs of events, of each repetition or of all; ``clients`` are (R, S).

        On a dense graph a run has different agents, elsewhere ones that are not neighbours either.
        """
        limit = _DENSE_RUN if self.dense is not None else max(1, _RUN // max(1, int(self.graph.degrees.mean())))
        conflicts: Conflicts = "none" if self.dense is not None else self.adjacency
        if apart:
            return bounds_of_each(clients, conflicts, limit)
        return [block_bounds(clients, conflicts, limit).numpy()] * len(clients)

    def entries(self, agents: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the stored weights of ``agents`` (k,): their places (m,), the agent of each (m,) in 0 .. k - 1, and
        where each agent's begin (k,)."""
        first, count = self.indptr[agents], self.graph.degrees[agents]
        begin = np.cumsum(count) - count
        owner = np.repeat(np.arange(len(agents)), count)
        return np.repeat(first - begin, count) + np.arange(len(owner)), owner, begin

    def means(self, theta: Array, where: Ints, agents: Ints, counted: NDArray[np.bool_] | None = None) -> Array:
        """Return sum_j (W_ij / D_ii) Theta_j of ``agents`` (k,) in repetitions ``where`` (k,).

        Args:
            theta: (R, n, D).
            where, agents: (k,), the repetitions rising.
            counted: bool (R, n), whose models count; D_ii is then the sum over those, and an agent with none of them
                has its own model for a mean.

        Returns:
            (k, D). The work is that of the agents' neighbours, whatever n is.
        """
        if counted is None and self.dense is not None:
            if len(theta) == 1:
                return self.dense[agents].dot(theta[0])
            shares, means = self.dense[agents], np.empty((len(agents), theta.shape[2]))
            bounds = np.searchsorted(where, np.arange(len(theta) + 1)).tolist()
            for models, start, stop in zip(theta, bounds, bounds[1:], strict=False):
                if start < stop:
                    shares[start:stop].dot(models, out=means[start:stop])
            return means
        place, owner, begin = self.entries(agents)
        share, column = self.shares[place], self.indices[place]
        if counted is not None:
            share = share * counted[where[owner], column]
        rows = theta[where[owner], column] if len(theta) > 1 else theta[0][column]
        rows *= share[:, None]  # a copy
        some = self.graph.degrees[agents] > 0
        sums = np.zeros((len(agents), theta.shape[2]))
        if some.any():
            sums[some] = np.add.reduceat(rows, begin[some], axis=0)
        if counted is not None:
            total = np.bincount(owner, share, len(agents))
            alone = total == 0
            sums = np.where(alone[:, None], theta[where, agents], sums / np.where(alone, 1.0, total)[:, None])
        return sums

    def roughness(self, theta: Array) -> float:
        """Return 1/2 sum_{i<j} W_ij ||Theta_i - Theta_j||^2 of theta (n, D), the first term of equation (2)."""
        owner = np.repeat(np.arange(len(self.graph)), self.graph.degrees)
        upper = np.flatnonzero(owner < self.indices)
        total = 0.0
        for part in np.split(upper, range(_EDGES, len(upper), _EDGES)):
            apart = theta[owner[part]] - theta[self.indices[part]]
            total += float(self.graph.weights.data[part] @ np.einsum("kd,kd->k", apart, apart))
        return total / 2
