"""The public constants of a peer-to-peer run, and weighted means over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import triu

from ...graphs import Graph

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
_IDLE = 1e-3  # confidence of an agent without data, whose loss is lambda ||theta||^2


@dataclass(frozen=True, eq=False)
class Network:
    """The graph and the public constants of every agent.

    Numbers of records and the graph are public.

    Attributes:
        graph: of the n agents, in the order of the data.
        counts: m_i, int64 (n,).
        mu: the weight of the local losses.
        lam: lambda of every agent, or None for 1 / m_i (1 for an agent without data).
        smoothness: Lipschitz constant of the gradient of one record's loss, of the domain.
        power: k of c_i = (m_i / max_j m_j)^k.
    """

    graph: Graph
    counts: Ints
    mu: float
    lam: float | None
    smoothness: float
    power: float = 1.0

    @cached_property
    def confidence(self) -> Array:
        """Returns c_i = (m_i / max_j m_j)^power, and .001 for agents without data."""
        most = max(1, int(self.counts.max()))
        return np.where(self.counts > 0, (self.counts / most) ** self.power, _IDLE)

    @cached_property
    def ridge(self) -> Array:
        """Returns lambda_i."""
        if self.lam is None:
            return 1.0 / np.maximum(self.counts, 1)
        return np.full(len(self.counts), self.lam)

    @cached_property
    def curvature(self) -> Array:
        """Returns L_i^loc: ``smoothness + 2 lambda_i``, or 2 lambda_i without data."""
        return np.where(self.counts > 0, self.smoothness, 0.0) + 2 * self.ridge

    @cached_property
    def alpha(self) -> Array:
        """Returns alpha = 1 / (1 + mu c_i L_i^loc) of equation (4)."""
        return 1.0 / (1.0 + self.mu * self.confidence * self.curvature)

    @cached_property
    def step_columns(self) -> tuple[Array, Array, Array, Array]:
        """Returns alpha, 1 - alpha, mu c_i and 2 lambda_i of equation (4), (n, 1) each: NumPy takes
        the rows of an agent from them faster than it adds an axis."""
        numbers = (self.alpha, 1 - self.alpha, self.mu * self.confidence, 2 * self.ridge)
        alpha, rest, pull, ridge = (each[:, None] for each in numbers)
        return alpha, rest, pull, ridge

    @property
    def convexity(self) -> float:
        """Returns sigma, the bound mu min_i D_ii c_i 2 lambda_i of the paper."""
        least = self.graph.normalization * self.confidence * 2 * self.ridge
        return float(self.mu * least.min())

    @property
    def largest_curvature(self) -> float:
        """Returns L_max = max_i D_ii (1 + mu c_i L_i^loc)."""
        pulled = self.mu * self.confidence * self.curvature
        return float((self.graph.normalization * (1 + pulled)).max())

    # Neighbours

    @cached_property
    def neighbours(self) -> list[tuple[Ints, Array]]:
        """Returns the neighbours of every agent, and W_ij / D_ii of each."""
        weights = self.graph.weights
        shares: Array = weights.data / np.repeat(self.graph.normalization, self.graph.degrees)
        # the sparse rows of all agents stand one after another
        indices = weights.indices.astype(np.int64)
        ends = weights.indptr[1:-1]
        return list(zip(np.split(indices, ends), np.split(shares, ends), strict=True))

    def means(self, theta: Array, agents: Ints) -> Array:
        """Returns the weighted means sum_j (W_ij / D_ii) Theta_j over neighbours, of R runs.

        The work is that of the agents' neighbours, for all n.

        Args:
            theta: (R, n, D), the models of all agents.
            agents: int64 (R,), an agent of each run.

        Returns:
            (R, D) float64.
        """
        means = np.empty((len(agents), theta.shape[2]))
        for row, (models, agent) in enumerate(zip(theta, agents.tolist(), strict=True)):
            neighbours, shares = self.neighbours[agent]
            shares.dot(models.take(neighbours, 0), out=means[row])
        return means

    def roughness(self, theta: Array) -> float:
        """Returns 1/2 sum_{i<j} W_ij ||Theta_i - Theta_j||^2, the first term of equation (2).

        Args:
            theta: (n, D).
        """
        # each edge once
        edges = triu(self.graph.weights, format="csr").tocoo()
        difference = theta[edges.row] - theta[edges.col]
        return float(edges.data @ np.einsum("kd,kd->k", difference, difference)) / 2
