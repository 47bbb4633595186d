"""Where peer-to-peer learning starts from: models of each agent alone, released once and spread over the graph.

The warm start of the supplement of Bellet et al. 2018: every agent releases a noised copy of the exact minimizer of its
own loss, and all of them go on with

    Theta_i <- (1 / (1 + mu c_i)) ( sum_j (W_ij / D_ii) Theta_j + mu c_i Theta_i^loc )

to convergence: the solution of (D + mu D C - W) Theta = mu D C Theta^loc, a function of what was released.

Sensitivity. Let F = (1/m) sum_j l_j + lambda ||.||^2 with convex l_j, and F' the same with one record replaced; theta
and theta' are their minimizers. grad F(theta') = grad F(theta') - grad F'(theta') = (1/m) (grad l - grad l')(theta'),
of norm at most 2 L / m if every record's gradient is within L. F is 2 lambda-strongly convex, so
2 lambda ||theta - theta'|| <= ||grad F(theta')||, and ||theta - theta'|| <= L / (m lambda), in the L2 norm.

L is not that of the raw loss: (theta.x - y)^2 has none. Each record's gradient is clipped at C, and what is minimized
is the convex function that has the clipped gradients (of a linear model a loss with linear tails, Huber's for the
squared loss), for which L = min(C, bound of the domain). With lambda = 1/m the sensitivity is L whatever m is, while
the minimizer itself is at most L m / 2 long: a large noise for agents with few records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import diags_array
from scipy.sparse.linalg import LinearOperator, cg, splu
from torch import Tensor

from ...errors import ConfigError
from ...privacy import Channel, ClientVectors
from ...privacy.channel import FIRST
from ..linear.data import LinearData, LinearLoss
from ..linear.solve import Array, minimize
from .network import Network

Ints = NDArray[np.int64]
_EXACT = 2.0**-20
"""Relative room in the sensitivity for the solver's error."""
_FACTORED, _RESIDUAL = 5000, 1e-12
_WORST = 1e9
"""The largest condition number of a local fit."""


def minimizer_sensitivity(bound: float, records: Ints, lam: Array, condition: float | Array = 1.0) -> Array:
    """Return the L2 sensitivity L / (m lambda) of the minimizer of (1/m) sum l + lambda ||.||^2 under replace-one.

    Args:
        bound: L, on the L2 norm of one record's gradient.
        records: m, (n,).
        lam: lambda, above 0, (n,).
        condition: the largest condition number of the problem over the domain, a number or (n,).

    Returns:
        (n,), with room for the solver's error: 2^-20 of it, or 2^-46 m ``condition`` where rounding may be more.
    """
    return bound / (records * lam) * (1 + np.maximum(_EXACT, 2.0**-46 * records * condition))


def local_minimizer(loss: LinearLoss, x: Array, y: Array, lam: float, clip: float = math.inf) -> Array:
    """Return argmin (1/m) sum_j l_clip(theta . x_j, y_j) + lam ||theta||^2, for all finite records.

    Args:
        loss: squared or logistic.
        x, y: (m, D) and (m,), finite, m at least 1.
        lam: above 0.
        clip: C, on the L2 norm of a record's gradient; infinite for the loss itself.

    Returns:
        (D,) float64, finite; within ``2**-21 C / (m lam)`` of the minimizer where ``clip`` is finite.
    """
    accuracy = None if math.isinf(clip) else _EXACT / len(y) * min(clip, 1.0)
    return minimize(loss, x, y, 2 * lam, clip=clip, accuracy=accuracy).theta


@dataclass(frozen=True, eq=False)
class LocalFits:
    """Every agent's exact fit of its own records.

    Attributes:
        loss: squared or logistic.
        data: the records.
        ridge: lambda of each agent, (n,).
        bound: L, on the L2 norm of a record's gradient: larger ones are clipped.
        curvature: of one record's loss, the most over the domain.
    """

    loss: LinearLoss
    data: LinearData
    ridge: Array
    bound: float
    curvature: float

    @property
    def sensitivities(self) -> Array:
        """Return (n,), of the fits; of agents without records that of one.

        Raises:
            ConfigError: a lambda so small that no fit is exact enough in double precision, whatever the records are.
        """
        condition = 1 + self.curvature / (2 * self.ridge)
        if float(condition.max()) > _WORST:
            raise ConfigError(
                f"PeerToPeer.warm_start fits every agent alone with lambda = {self.ridge.min():g}, which is too small "
                f"beside a curvature of {self.curvature:g}; give warm_lam of at least {self.curvature / _WORST:.1g}."
            )
        return minimizer_sensitivity(self.bound, np.maximum(self.data.counts.numpy(), 1), self.ridge, condition)

    def of(self, agent: int) -> Tensor:
        """Return the fit of an agent, (D,) float64."""
        x, y = self.data.x[agent].numpy(), self.data.y[agent].numpy()
        return torch.from_numpy(local_minimizer(self.loss, x, y, float(self.ridge[agent]), self.bound))

    def all(self) -> Tensor:
        """Return the fits of all agents, (n, D); zero without records."""
        zero = torch.zeros(self.data.dimension, dtype=torch.float64)
        return torch.stack([self.of(i) if len(y) else zero for i, y in enumerate(self.data.y)])


def make_warm_start(network: Network, fits: LocalFits, public: dict[str, Tensor], channel: Channel) -> None:
    """Release the local fits and start all models, ``public["theta"]``, from what they say of one another."""
    released = channel.release(FIRST, ClientVectors(fits.of))  # (R, n, D)
    replicates, n, dimension = released.shape
    local, start = (values.permute(1, 0, 2).reshape(n, -1).numpy() for values in (released, public["theta"]))
    theta = spread(network, local, network.counts > 0, start)
    public["theta"].copy_(torch.from_numpy(theta).view(n, replicates, dimension).permute(1, 0, 2))
    public["sent"] += int(network.graph.degrees[network.counts > 0].sum())
    public["warm"].fill_(1)


def spread(network: Network, local: Array, released: NDArray[np.bool_], start: Array) -> Array:
    """Return the fixed point of the supplement's iteration.

    Agents that released nothing have no local model: theirs is the mean of their neighbours' (mu c_i = 0). Where
    nobody in a connected part of the graph released anything, models stay as they are.

    Args:
        network: graph, mu and confidences.
        local: (n, K), the released models Theta^loc, of K numbers an agent.
        released: bool (n,), who released one.
        start: (n, K).

    Returns:
        (n, K).
    """
    graph = network.graph
    pull = np.where(released, network.mu * network.confidence(network.counts), 0.0)
    reached = np.isin(graph.components, graph.components[released])
    connected = reached & (graph.normalization > 0)
    result = start.copy()
    alone = reached & ~connected
    result[alone] = local[alone]
    rows = np.flatnonzero(connected)
    if not len(rows):
        return result
    degree, anchor = graph.normalization[rows], (graph.normalization * pull)[rows]
    matrix = (diags_array(degree + anchor) - graph.weights[rows][:, rows]).tocsc()
    right = anchor[:, None] * local[rows]
    if len(rows) <= _FACTORED:
        result[rows] = splu(matrix).solve(right)
        return result
    scale = 1.0 / (degree + anchor)
    precondition = LinearOperator(matrix.shape, matvec=lambda v: scale * v.ravel(), dtype=np.float64)
    matrix = matrix.tocsr()
    for k in range(right.shape[1]):
        found, failed = cg(matrix, right[:, k], rtol=_RESIDUAL, atol=0.0, M=precondition, maxiter=100_000)
        if failed:
            raise ConfigError("The warm start did not converge over the graph; give a larger mu.")
        result[rows, k] = found
    return result
