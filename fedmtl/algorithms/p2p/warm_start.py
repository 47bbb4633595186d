"""The private warm start of peer-to-peer learning (Bellet et al. 2018, Remark 3 and supplement).

Every agent releases its own model with noise, and all of them start from what these say of one
another: the fixed point of

    Theta_i <- (1 / (1 + mu c_i)) (sum_j (W_ij / D_ii) Theta_j + mu c_i Theta_i^loc)

that is, the solution of (D + mu D C - W) Theta = mu D C Theta^loc, with C the diagonal matrix of
the c_i: a function of what was released.

Theta_i^loc minimizes F = (1/m) sum_j l_j + lambda ||.||^2, where the gradient of every l_j is
clipped at L in the L2 norm, so that l_j is convex with linear tails. Sensitivity: let F' have one
record replaced, and theta and theta' be the minimizers. The gradient of F at theta' is (1/m) (grad
l - grad l')(theta') and no longer than 2 L / m, and F is 2 lambda-strongly convex. Hence ||theta -
theta'||_2 <= L / (m lambda).

What is released is the mean of the records' clipped gradients at Theta_i^loc, which is -2 lambda
Theta_i^loc. Its sum over the m records moves by 2 L at most, as that of the gradients of any
wake-up does, so the channel clips, noises and charges both alike. The noise on Theta_i^loc has the
scale z L / (m lambda), with z the multiplier of the release. With lambda = 1 / m that is z L,
whatever m is, for a model that may be L m / 2 long: much noise for agents with few records. The
bound is in the L2 norm, and needs a law of the noise for that norm.
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
from ..linear.data import LinearLoss
from ..linear.solve import Objective, accelerated, newton
from .network import Array, Network

_STEPS, _EXACT = 100_000, 1e-10
_SHARE = 0.25  # of the margin of the clip, for the error of a sum: two neighbours have one each


def mean_at_minimizer(loss: LinearLoss, x: Array, y: Array, lam: float, clip: Clip | None) -> Array:
    """Returns the mean of the clipped gradients of an agent's records at its own model, -2 lambda
    Theta^loc.

    Args:
        loss: squared or logistic.
        x, y: (m, D) and (m,) float64, finite, m at least 1.
        lam: lambda, above 0.
        clip: of a record's gradient; None for none.

    Returns:
        (D,) float64.
    """
    m, bound, limits = len(x), math.inf, None
    if clip is not None:
        bound = clip.bound * (1 - MARGIN)
        norms = np.linalg.norm(x, 1 if clip.norm == "l1" else 2, axis=1)
        limits = bound / np.maximum(norms, 1e-300)
    goal = _EXACT if clip is None else accuracy(clip.bound, m)
    with np.errstate(all="ignore"):
        problem = Objective(loss, x, y, 2 * lam, limits=limits)
        minimum = newton(problem, np.zeros(x.shape[1]), math.inf, min(_EXACT, goal / 10))
        theta = minimum.theta
        if not math.sqrt(4 * lam * minimum.gap) <= goal:  # rounding has ended it: smaller steps go on
            rate = 1.0 / (loss.smoothness(float(np.linalg.norm(x, axis=1).max())) + 2 * lam)

            def step(points: Array) -> Array:
                return points - rate * problem.at(points[0])[1]

            theta = accelerated(step, theta[None], _STEPS, rate * goal)[0]
    mean: Array = -2 * lam * theta
    return mean


def accuracy(bound: float, records: int) -> float:
    """Returns the longest gradient of F at which a fit may end: the error of the sum is ``records`` times that."""
    return _SHARE * MARGIN * bound / records


def check_accuracy(network: Network, dimension: int) -> None:
    """Refuses agents whose models double precision cannot give as exactly as the margin of the clip
    asks, whatever their records are; all of this is public.

    Raises:
        ConfigError: too many records, or too small a lambda.
    """
    m, curvature = np.maximum(network.counts, 1), network.curvature
    # of the records' margins x . theta, with ||theta|| <= L / (2 lambda), and of adding up on the
    # grid of sums
    rounding = 2.0**-52 * m * np.maximum(curvature / (2 * network.ridge), 2 * m * math.sqrt(dimension))
    worst = int(rounding.argmax())
    if rounding[worst] > _SHARE * MARGIN:
        raise ConfigError(
            f"PeerToPeer.warm_start: agent {network.graph.ids[worst]!r} has {int(m[worst]):,} records and lambda = "
            f"{network.ridge[worst]:g}, beside a curvature of {curvature[worst]:g}: its own model cannot be computed "
            f"exactly enough for the noise to cover its error. Give a larger lam, fewer records, or no warm start."
        )


def spread(network: Network, local: Array, released: np.ndarray) -> Array:
    """Returns where all agents start, given the models that were released.

    An agent that released nothing has mu c_i = 0: its model is the mean of its neighbours'.

    Args:
        network: graph, mu and confidences.
        local: (n, K), the released models, of K numbers an agent.
        released: bool (n,), who released one.

    Returns:
        (n, K); zero where nobody in a connected part of the graph released anything.
    """
    degree = network.graph.normalization
    anchor = degree * np.where(released, network.mu * network.confidence, 0.0)
    _, part = connected_components(network.graph.weights, directed=False)
    rows = np.flatnonzero(np.isin(part, part[released]))
    start = np.zeros_like(local)
    if len(rows):
        matrix = (diags_array((degree + anchor)[rows]) - network.graph.weights[rows][:, rows]).tocsc()
        start[rows] = splu(matrix).solve(anchor[rows, None] * local[rows])
    return start


def as_gradients(mean: Array, replicates: int, records: int) -> torch.Tensor:
    """Returns the gradients (R, m, D) of ``records`` records whose mean is (D,)."""
    return torch.from_numpy(mean).expand(replicates, records, len(mean))
