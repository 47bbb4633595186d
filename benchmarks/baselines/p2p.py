"""What peer-to-peer learning is compared with: the exact optimum of its objective, and purely local models.

Bellet, Guerraoui, Taziki, Tommasi: "Personalized and private peer-to-peer machine learning", AISTATS 2018:

    Q(Theta) = 1/2 sum_{i<j} W_ij ||Theta_i - Theta_j||^2 + mu sum_i D_ii c_i L_i(Theta_i)                    (2)
    L_i(theta) = (1/m_i) sum_j l(theta . x_ij, y_ij) + lambda_i ||theta||^2                                   (1)

Both need all records in one place (the optimum) or on each agent (local models); nothing here is private.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse.linalg import LinearOperator, cg

from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.algorithms.linear.solve import Array, Objective, minimize
from fedmtl.algorithms.p2p.network import Network
from fedmtl.errors import ConfigError

if TYPE_CHECKING:
    from fedmtl.algorithms.base import Problem
    from fedmtl.algorithms.p2p.algorithm import PeerToPeer

_NEWTON_STEPS = 50


@dataclass(frozen=True, eq=False)
class PeerProblem:
    """Objective (2) on the records of all agents.

    Args:
        network: graph, mu, lambda_i and c_i.
        data: the agents' records, in the order of the graph; an agent may have none.
        loss: ``"squared"`` or ``"logistic"``.

    Raises:
        ConfigError: the hinge loss, which has no gradient everywhere; numbers of records that are not the network's.
        DataError: targets that do not suit the loss.
    """

    network: Network
    data: LinearData
    loss: LinearLoss

    def __post_init__(self) -> None:
        if self.loss.name == "hinge":
            raise ConfigError("PeerProblem.loss is 'hinge'; accepted: 'squared', 'logistic'.")
        if not np.array_equal(self.data.counts.numpy(), self.network.counts):
            raise ConfigError(
                "PeerProblem: the numbers of records of data and of network.counts differ."
            )
        self.loss.check_targets(self.data.y, self.data.name)

    @classmethod
    def of(cls, algorithm: PeerToPeer, problem: Problem) -> PeerProblem:
        """What a peer-to-peer algorithm minimizes, on its records within the bound of the domain."""
        return cls(algorithm.network(problem), algorithm.data(problem), LinearLoss(algorithm.loss))

    @cached_property
    def records(self) -> list[tuple[Array, Array]]:
        """Rows (m_i, p) and targets (m_i,) of each agent."""
        return [(x.numpy(), y.numpy()) for x, y in zip(self.data.x, self.data.y, strict=True)]

    @cached_property
    def ridge(self) -> Array:
        """lambda_i, (n,)."""
        return self.network.ridge

    @cached_property
    def pull(self) -> Array:
        """mu D_ii c_i, (n,)."""
        n = self.network
        pull: Array = n.mu * n.graph.normalization * n.confidence
        return pull

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""
        return len(self.records), self.data.dimension

    def local_losses(self, theta: Array) -> Array:
        """L_i(Theta_i): theta (n, p) -> (n,)."""
        each = zip(self.records, theta, strict=True)
        values = [
            Objective(self.loss, x, y, 0.0).losses(x @ row)[0].mean() if len(x) else 0.0
            for (x, y), row in each
        ]
        return np.array(values) + self.ridge * (theta**2).sum(1)

    def local_gradients(self, theta: Array) -> Array:
        """grad L_i(Theta_i): theta (n, p) -> (n, p)."""
        return np.stack([self.gradient_of(i, row) for i, row in enumerate(theta)])

    def gradient_of(self, agent: int, theta: Array) -> Array:
        """grad L_i(theta) of one agent, theta (p,)."""
        x, y = self.records[agent]
        gradient = 2 * self.ridge[agent] * theta
        if len(x):
            gradient = gradient + Objective(self.loss, x, y, 0.0).losses(x @ theta)[1] @ x / len(x)
        return gradient

    def value(self, theta: Array) -> float:
        """Q(Theta) of theta (n, p)."""
        return self.network.roughness(theta) + float(self.pull @ self.local_losses(theta))

    def gradient(self, theta: Array) -> Array:
        """grad Q, equation (3), (n, p)."""
        graph = self.network.graph
        spread: Array = graph.normalization[:, None] * theta - graph.weights @ theta
        return spread + self.pull[:, None] * self.local_gradients(theta)

    def curvatures(self, theta: Array) -> Array:
        """Second derivatives of the L_i: theta (n, p) -> (n, p, p)."""
        n, p = self.shape
        found = np.zeros((n, p, p))
        for i, (x, y) in enumerate(self.records):
            if len(x):
                found[i] = (
                    (x.T * Objective(self.loss, x, y, 0.0).losses(x @ theta[i])[2]) @ x / len(x)
                )
        found[:, np.arange(p), np.arange(p)] += 2 * self.ridge[:, None]
        return found


@dataclass(frozen=True, eq=False)
class PeerOptimum:
    """The minimizer of objective (2).

    Attributes:
        theta: (n, p) float64.
        value: Q(theta).
        gap: an upper bound on Q(theta) - min Q, up to rounding; infinite where an agent has mu c_i lambda_i = 0.
    """

    theta: Array
    value: float
    gap: float


def optimum(problem: PeerProblem, *, tolerance: float = 1e-10) -> PeerOptimum:
    """The minimizer of Q by Newton's method with conjugate gradients; steps are halved until they descend.

    The squared loss takes one Newton step, a sparse linear system of n p unknowns; its blocks (p, p) of every agent
    are the preconditioner, and the memory is n p^2 numbers.

    Args:
        problem: the objective.
        tolerance: on ``gap``, relative to 1 + abs(value); it ends before where rounding does.
    """
    theta = np.zeros(problem.shape)
    best, least = theta, np.inf
    for _ in range(_NEWTON_STEPS):
        gradient, blocks, now = (
            problem.gradient(theta),
            problem.curvatures(theta),
            problem.value(theta),
        )
        gap = _certificate(problem, gradient, blocks)
        if gap < least:
            best, least = theta, gap
        elif np.isfinite(least):
            break
        if least <= tolerance * (1 + abs(now)) or not np.abs(gradient).any():
            break
        step = _newton_step(problem, blocks, gradient)
        promised, size = float((gradient * step).sum()), 1.0
        while size > 1e-3 and problem.value(theta + size * step) > now + 1e-4 * size * promised:
            size /= 2
        theta = theta + (size if size > 1e-3 else 1.0) * step  # no descent: rounding hides it
    return PeerOptimum(best, problem.value(best), least)


def _newton_step(problem: PeerProblem, blocks: Array, gradient: Array) -> Array:
    """-H^-1 gradient (n, p) for the Hessian H of Q, whose local parts are ``blocks`` (n, p, p)."""
    graph = problem.network.graph
    whole = problem.pull[:, None, None] * blocks + graph.normalization[:, None, None] * np.eye(
        problem.shape[1]
    )
    inverse = np.linalg.pinv(
        whole, hermitian=True
    )  # an isolated agent without a pull has a block of zeros

    def product(flat: Array) -> Array:
        theta = flat.reshape(problem.shape)
        moved: Array = (whole @ theta[:, :, None])[:, :, 0] - graph.weights @ theta
        return moved.ravel()

    def precondition(flat: Array) -> Array:
        moved: Array = (inverse @ flat.reshape(*problem.shape, 1)).ravel()
        return moved

    size = gradient.size
    system = LinearOperator((size, size), matvec=product, dtype=np.float64)
    first = LinearOperator((size, size), matvec=precondition, dtype=np.float64)
    step, _ = cg(system, -gradient.ravel(), rtol=1e-12, atol=0.0, M=first, maxiter=20 * size)
    return step.reshape(problem.shape)


def local_models(problem: PeerProblem) -> Array:
    """The minimizer of every L_i by itself, (n, p); 0 for an agent without data. No weight of the graph is read.

    Raises:
        ConfigError: an agent with data and lambda_i = 0: its minimizer need not exist.
    """
    if (problem.ridge[problem.network.counts > 0] <= 0).any():
        raise ConfigError(
            "local_models: lambda is 0; every agent's own minimizer needs it above 0."
        )
    theta = np.zeros(problem.shape)
    for i, (x, y) in enumerate(problem.records):
        if len(x):
            theta[i] = minimize(problem.loss, x, y, 2 * problem.ridge[i]).theta
    return theta


def _certificate(problem: PeerProblem, gradient: Array, blocks: Array) -> float:
    """A bound on Q minus its minimum, where the Hessian is everywhere at least that of the local losses: ``blocks`` for
    the squared loss, whose second derivatives are constant, else 2 lambda_i I."""
    moving = np.abs(gradient).sum(1) > 0
    g, scale, ridge = gradient[moving], problem.pull[moving], problem.ridge[moving]
    if (scale * ridge <= 0).any():
        return float("inf")
    if problem.loss.name == "squared":
        solved = np.linalg.solve(blocks[moving], g[:, :, None])[:, :, 0]
        return float(((g * solved).sum(1) / scale).sum()) / 2
    return float(((g**2).sum(1) / (2 * ridge * scale)).sum()) / 2
