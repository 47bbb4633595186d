"""Asynchronous gossip ADMM: the peer-to-peer method that coordinate descent is compared with, without privacy.

Vanhaesebrouck, Bellet, Tommasi: "Decentralized collaborative learning of personalized models over networks", AISTATS
2017, section 4.2, for the objective (2) of Bellet et al. 2018 (see :mod:`benchmarks.baselines.p2p`). Agent i
holds its own model Theta_i and a copy Theta_i^j of each neighbour's; the objective is split into

    Q^i = 1/4 sum_{j in N_i} W_ij ||Theta_i - Theta_i^j||^2 + mu D_ii c_i L_i(Theta_i)

and an edge e = (i, j) has the variables Z_e^i and Z_e^j, on which both ends must agree, with a multiplier for each end
and each of the two. When agent i wakes and takes a neighbour j at random, both of them

1. minimize their part of the augmented Lagrangian, the copies exactly and Theta_i by a few gradient steps;
2. send each other, for each of the two models, ``theta + multiplier / rho``: 4 vectors in all; the two Z_e become the
   means of what the two ends sent;
3. move the multipliers of the edge by ``rho (theta - Z)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmtl._check import positive, positive_int

from .p2p import PeerProblem

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
VECTORS_A_STEP = 4
"""p-dimensional vectors that cross the edge at one activation, in both directions together."""


@dataclass(frozen=True, kw_only=True)
class GossipADMM:
    """Settings of the gossip.

    Args:
        rho: penalty, above 0; relative to W_ij.
        gradient_steps: on Theta_i at an activation, each of size 1 / Lipschitz constant.

    Raises:
        ConfigError: an impossible value.
    """

    rho: float = 1.0
    gradient_steps: int = 10

    def __post_init__(self) -> None:
        positive(self, rho=self.rho)
        positive_int(self, gradient_steps=self.gradient_steps)


class GossipState:
    """A run of gossip ADMM; :meth:`step` is one activation.

    Attributes:
        theta: (n, p), the agents' models.
        vectors: p-dimensional vectors sent so far; every agent's first model is sent to each of its neighbours.
    """

    def __init__(self, problem: PeerProblem, settings: GossipADMM, start: Array) -> None:
        """From models ``start`` (n, p), which the neighbours know, and multipliers 0."""
        graph = problem.network.graph
        self._problem, self._settings = problem, settings
        self._pointer, self._column = graph.weights.indptr, graph.weights.indices
        owner = np.repeat(np.arange(len(graph)), graph.degrees)
        self._reverse = np.lexsort((owner, self._column))  # arc (i, j) -> arc (j, i)
        self._rho = settings.rho * graph.weights.data  # of each arc, the same in both directions
        half = graph.weights.data / 2
        self._copy_pull = half / (half + self._rho)  # of Theta_i in its copy of Theta_j
        self._hold = self._rho + half * self._rho / (
            half + self._rho
        )  # of all terms of arc (i, j) in Theta_i
        smooth = problem.pull * problem.network.curvature
        total = smooth + np.add.reduceat(self._hold, self._pointer[:-1])
        self._size = 1.0 / total
        self.theta = start.copy()
        self._copy = start[self._column].copy()  # Theta_i^j at arc (i, j)
        self._z = start[owner].copy()  # Z_e^i at arc (i, j)
        self._own, self._other = (
            np.zeros_like(self._z),
            np.zeros_like(self._z),
        )  # multipliers over rho
        self.vectors = len(self._column)

    def step(self, agent: int, neighbour: int) -> None:
        """Agent ``agent`` wakes and gossips with its ``neighbour``, its n-th one counted from 0."""
        arc = int(self._pointer[agent]) + neighbour
        back = int(self._reverse[arc])
        for i in (agent, int(self._column[arc])):
            self._minimize(i)
        i, j = agent, int(self._column[arc])
        sent_i = (
            self.theta[i] + self._own[arc],
            self._copy[back] + self._other[back],
        )  # of Theta_i, by i and by j
        sent_j = self.theta[j] + self._own[back], self._copy[arc] + self._other[arc]
        self._z[arc], self._z[back] = sum(sent_i) / 2, sum(sent_j) / 2
        self._own[arc] += self.theta[i] - self._z[arc]
        self._other[arc] += self._copy[arc] - self._z[back]
        self._own[back] += self.theta[j] - self._z[back]
        self._other[back] += self._copy[back] - self._z[arc]
        self.vectors += VECTORS_A_STEP

    def _minimize(self, agent: int) -> None:
        """The agent's part of the augmented Lagrangian: gradient steps on Theta_i with the copies at their minimum."""
        part = slice(self._pointer[agent], self._pointer[agent + 1])
        own = self._z[part] - self._own[part]
        other = self._z[self._reverse[part]] - self._other[part]  # where the copies are held
        rho, share = self._rho[part], self._copy_pull[part]
        target = rho @ own + (rho * share) @ other  # rho share = (W/2) rho / (W/2 + rho)
        hold, pull, size = (
            float(self._hold[part].sum()),
            self._problem.pull[agent],
            self._size[agent],
        )
        theta = self.theta[agent]
        for _ in range(self._settings.gradient_steps):
            theta = theta - size * (
                hold * theta - target + pull * self._problem.gradient_of(agent, theta)
            )
        self.theta[agent] = theta
        self._copy[part] = share[:, None] * theta + (1 - share)[:, None] * other


def random_neighbours(problem: PeerProblem, agents: Ints, uniform: Array) -> Ints:
    """The neighbour that each of ``agents`` (k,) takes, uniform among its own, from ``uniform`` (k,) in [0, 1)."""
    degrees = problem.network.graph.degrees[agents]
    return np.minimum((uniform * degrees).astype(np.int64), degrees - 1)
