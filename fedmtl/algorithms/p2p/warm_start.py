"""The private warm start of peer-to-peer learning (Bellet et al. 2018, Remark 3 and supplement).

Every agent releases its own model Theta_i^loc with noise, and all of them start from the fixed
point of

    Theta_i <- (1 / (1 + mu c_i)) (sum_j (W_ij / D_ii) Theta_j + mu c_i Theta_i^loc)

that is, the solution of (D + mu D C - W) Theta = mu D C Theta^loc, with C the diagonal matrix of
the c_i. It is a function of the released models.

Theta_i^loc minimizes F = (1/m) sum_j l_j + lambda ||.||^2. The gradient of every l_j is clipped at
L in the L2 norm, so l_j is convex with linear tails. Sensitivity: let F' have one
record replaced, and theta and theta' be the minimizers. The gradient of F at theta' is (1/m) (grad
l - grad l')(theta') and no longer than 2 L / m, and F is 2 lambda-strongly convex. Hence ||theta -
theta'||_2 <= L / (m lambda).

The release is the mean of the records' clipped gradients at Theta_i^loc, which is -2 lambda
Theta_i^loc. Its sum over the m records moves by 2 L at most, like that of the gradients of any
wake-up, so the channel clips, noises and charges both alike. The noise on Theta_i^loc has the scale
z L / (m lambda), with z the multiplier of the release. With lambda = 1 / m that is z L for every m,
and the model may be L m / 2 long: much noise for agents with few records. The bound is in the L2
norm, and needs a law of the noise for that norm.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.sparse import diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import splu

from ...errors import ConfigError
from ...privacy.clip import MARGIN, Clip
from ...privacy.noise.laws import ORDERS
from ..linear.data import LinearLoss
from ..linear.solve import Objective, accelerated, newton
from .network import Array, Network

_STEPS = 100_000  # the most gradient steps after Newton's method
_EXACT = 1e-10
_SHARE = 0.25  # of the margin of the clip, for the error of a sum: two neighbours have one each


def mean_at_minimizer(loss: LinearLoss, x: Array, y: Array, lam: float, clip: Clip | None) -> Array:
    """Returns the mean of the clipped gradients of an agent's records at its own model.

    It is -2 lambda Theta^loc.

    Args:
        loss: squared or logistic.
        x: (m, D) float64, finite, m at least 1.
        y: (m,) float64, finite.
        lam: lambda, above 0.
        clip: of a record's gradient; None for none.

    Returns:
        (D,) float64.
    """
    limits = None
    goal = _EXACT
    if clip is not None:
        # the gradient s x of a record is within the bound if abs(s) <= bound / ||x||
        bound = clip.bound * (1 - MARGIN)
        norms = np.linalg.norm(x, ORDERS[clip.norm], axis=1)
        limits = bound / np.maximum(norms, 1e-300)
        goal = accuracy(clip.bound, len(x))
    with np.errstate(all="ignore"):
        problem = Objective(loss, x, y, 2 * lam, limits=limits)
        minimum = newton(problem, np.zeros(x.shape[1]), math.inf, min(_EXACT, goal / 10))
        theta = minimum.theta
        # if rounding has ended Newton's method too early, smaller steps go on
        if not math.sqrt(4 * lam * minimum.gap) <= goal:
            longest = float(np.linalg.norm(x, axis=1).max())
            rate = 1.0 / (loss.smoothness(longest) + 2 * lam)

            def step(points: Array) -> Array:
                _, gradient, _ = problem.at(points[0])
                return points - rate * gradient

            theta = accelerated(step, theta[None], _STEPS, rate * goal)[0]
    mean: Array = -2 * lam * theta
    return mean


def accuracy(bound: float, records: int) -> float:
    """Returns the longest gradient of F at which a fit may end.

    The error of the sum is ``records`` times that.
    """
    return _SHARE * MARGIN * bound / records


def check_accuracy(network: Network, dimension: int) -> None:
    """Refuses agents with models that double precision cannot give exactly enough.

    The margin of the clip sets the accuracy. The check reads public constants alone.

    Args:
        network: of the agents.
        dimension: D.

    Raises:
        ConfigError: an agent has too many records, or lambda is too small.
    """
    m = np.maximum(network.counts, 1)
    curvature = network.curvature
    # of the records' margins x . theta, with ||theta|| <= L / (2 lambda), and of adding up on the
    # grid of sums
    of_margins = curvature / (2 * network.ridge)
    of_sums = 2 * m * math.sqrt(dimension)
    rounding = 2.0**-52 * m * np.maximum(of_margins, of_sums)
    worst = int(rounding.argmax())
    if rounding[worst] > _SHARE * MARGIN:
        raise ConfigError(
            f"PeerToPeer.warm_start: agent {network.graph.ids[worst]!r} has {int(m[worst]):,} "
            f"records and lambda = {network.ridge[worst]:g}, beside a curvature of "
            f"{curvature[worst]:g}: its own model cannot be computed exactly enough for the noise "
            "to cover its error. Give a larger lam, fewer records, or no warm start."
        )


def spread(network: Network, local: Array, released: np.ndarray) -> Array:
    """Returns the initial models of all agents, from the released ones.

    An agent that released nothing has mu c_i = 0: its model is the mean of its neighbours'.

    Args:
        network: graph, mu and confidences.
        local: (n, K), the released models, of K numbers for each agent.
        released: bool (n,), True for the agents that released one.

    Returns:
        (n, K); zero in connected parts of the graph without a released model.
    """
    degree = network.graph.normalization
    anchor = degree * np.where(released, network.mu * network.confidence, 0.0)
    _, part = connected_components(network.graph.weights, directed=False)
    rows = np.flatnonzero(np.isin(part, part[released]))
    start = np.zeros_like(local)
    if len(rows):
        # D + mu D C - W of these agents
        weights = network.graph.weights[rows][:, rows]
        matrix = (diags_array((degree + anchor)[rows]) - weights).tocsc()
        start[rows] = splu(matrix).solve(anchor[rows, None] * local[rows])
    return start


def as_gradients(mean: Array, replicates: int, records: int) -> torch.Tensor:
    """Returns the gradients (R, m, D) of ``records`` records whose mean is (D,)."""
    return torch.from_numpy(mean).expand(replicates, records, len(mean))
