"""The exact privacy loss of L2-Laplace noise (the K-norm mechanism with the Euclidean norm).

The mechanism adds v in R^d with density proportional to ``exp(-beta |v|)``, |.| the Euclidean norm,
to a vector that one unit moves by at most 1 (multiples of the sensitivity S; beta = epsilon). It is
beta-DP.

*Worst pair.* Let the unit move the vector by u, |u| = s <= 1. P (around 0) and Q (around u) have
the same marginal law of the component orthogonal to u, and on every line parallel to u both have
one log-concave density g, shifted by s. For log-concave g the ratio g(x) / g(x - s) falls in x, so
the hockey-stick divergence on that line is sup_c G(c) - a G(c - s), which grows with s. Hence |u| =
1 is the worst case, for every a and so for composition too (Zhu, Dong, Wang 2022, Theorem 10), and
by rotation every direction is alike. The reflection v -> u - v exchanges P and Q: one law serves a
unit added and a unit removed.

*Its loss.* With radii r = |v| and r' = |v - u|, the loss under P is beta (r' - r); with t = -cos of
the angle between v and u it is beta (sqrt(r^2 + 2 r t + 1) - r), where r ~ Gamma(d, 1 / beta) and
(t + 1) / 2 ~ Beta((d - 1) / 2, (d - 1) / 2) are independent. In elliptic coordinates a = r + r' >=
1, b = r' - r in [-1, 1] the volume element is proportional to (a^2 - b^2) ((a^2 - 1) (1 - b^2))^((d
- 3) / 2) da db and the density of P to exp(-beta (a - b) / 2). The loss beta b depends only on b,
  and a integrates out: for d >= 2 the density of b is proportional to

    exp(beta b / 2) (1 - b^2)^((d - 3) / 2) (kappa - b^2),

    kappa = 1 + (2 (d - 1) / beta) K_{d/2}(beta / 2) / K_{d/2 - 1}(beta / 2),

K being modified Bessel functions (the integrals over a are K_{d/2 - 1}(beta / 2) and its second
derivative, reduced by parts). It is a one-dimensional law, smooth in asin(b); Gauss-Legendre nodes
in every cell of the grid give the probabilities of the cells, and the split of :mod:`.pld` an upper
bound with an error of second order. d = 1 is the Laplace mechanism: P(loss <= l) = exp((l - beta) /
2) / 2 for l in [-beta, beta), and 1/2 at beta.
"""

from __future__ import annotations

import math
from functools import lru_cache

import attr
import numpy as np
from scipy import optimize, special

from ..._check import positive, positive_int
from ..events import dp_event
from .pld import LossLaw, from_cells, from_shares

_DROP = 90.0  # mass below exp(-90) of the highest density counts as an infinite loss
_OUTSIDE = 1e-30
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class KNormDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """One release with L2-Laplace noise: density proportional to ``exp(-(epsilon / S) |v|_2)``.

    Attributes:
        epsilon: pure epsilon of one release, above 0; the noise multiplier is its inverse.
        dimension: number d of coordinates, at least 1.

    Example:
        >>> from fedmtl.privacy import KNormDpEvent, epsilon
        >>> epsilon(KNormDpEvent(epsilon=0.5, dimension=10), 3, 1e-6) < 1.5
        True
    """

    epsilon: float
    dimension: int

    def __attrs_post_init__(self) -> None:
        positive(self, epsilon=self.epsilon)
        positive_int(self, dimension=self.dimension)


def loss_law(epsilon: float, dimension: int, width: float) -> LossLaw:
    """Returns the loss of one release as an upper bound on a grid.

    Args:
        epsilon: pure epsilon of one release.
        dimension: d >= 1.
        width: grid width.
    """
    if dimension == 1:
        return _laplace_law(epsilon, width)
    low, high = _support(epsilon, dimension)
    first = math.floor(epsilon * low / width)
    last = math.ceil(epsilon * high / width)
    edges = np.clip(width * np.arange(first, last + 1) / epsilon, low, high)
    losses, masses = _nodes(epsilon, dimension, edges)
    left = (width * np.arange(first, last))[:, None]
    shares = masses * np.expm1(left - losses) / math.expm1(-width)
    law = from_shares(width, first, masses.sum(axis=1), shares.sum(axis=1))
    if low > -1 or high < 1:
        return LossLaw(width, law.first, law.masses * (1 - _OUTSIDE), _OUTSIDE)
    return law


@lru_cache(maxsize=1024)
def loss_scale(epsilon: float, dimension: int) -> tuple[float, float]:
    """Returns (standard deviation of the loss of one release, length of the interval that holds
    it)."""
    if dimension == 1:
        return min(epsilon, 1.0), 2 * epsilon
    low, high = _support(epsilon, dimension)
    losses, masses = _nodes(
        epsilon, dimension, np.sin(np.linspace(math.asin(low), math.asin(high), 401))
    )
    mean = float((masses * losses).sum())
    return math.sqrt(float((masses * (losses - mean) ** 2).sum())), epsilon * (high - low)


def bessel_ratio(order: float, z: float) -> float:
    """Returns K_{order + 1}(z) / K_order(z) for order = -1/2, 0, 1/2, ... and z > 0, by upward
    recurrence (stable)."""
    at = 0.0
    if order != round(order):
        at = -0.5
    if at < 0:
        ratio = 1.0
    else:
        ratio = float(special.k1e(z) / special.k0e(z))
    # from a bound on an earlier one: the recurrence contracts its error, which is small already
    if order > 1e5:
        at = order - 1000
        ratio = (at + 0.5 + math.hypot(at + 0.5, z)) / z
    while at < order - 0.25:
        at += 1
        ratio = 2 * at / z + 1 / ratio
    return ratio


def _laplace_law(epsilon: float, width: float) -> LossLaw:
    last = math.ceil(epsilon / width)
    edges = np.clip(width * np.arange(-last, last + 1), -epsilon, epsilon)
    p = 0.5 * np.exp((edges[1:] - epsilon) / 2) * -np.expm1(-np.diff(edges) / 2)
    p[0] += 0.5 * math.exp(-epsilon)
    p[-1] += 0.5
    return from_cells(width, -last, p, p[::-1])


def _log_density(b: np.ndarray, epsilon: float, dimension: int, curvature: float) -> np.ndarray:
    """Returns the logarithm of the density of b with respect to asin(b), up to a constant;
    ``curvature`` is kappa - 1."""
    rest = np.maximum((1 - b) * (1 + b), 1e-300)
    density: np.ndarray = (
        (dimension - 2) / 2 * np.log(rest) + epsilon * b / 2 + np.log(curvature + rest)
    )
    return density


@lru_cache(maxsize=1024)
def _curvature(epsilon: float, dimension: int) -> float:
    return 2 * (dimension - 1) / epsilon * bessel_ratio(dimension / 2 - 1, epsilon / 2)


@lru_cache(maxsize=1024)
def _support(epsilon: float, dimension: int) -> tuple[float, float]:
    """Returns the interval of b outside which nothing counts; the density (in asin b, d > 2) has
    one peak."""
    if dimension < 3:
        return -1.0, 1.0
    curvature = _curvature(epsilon, dimension)

    def log_density(b: float) -> float:
        return float(_log_density(np.array(b), epsilon, dimension, curvature))

    def negative(b: float) -> float:
        return -log_density(b)

    peak = optimize.minimize_scalar(
        negative, bounds=(-1, 1), method="bounded", options={"xatol": 1e-9}
    )
    level = log_density(peak.x) - _DROP

    def edge(end: float) -> float:
        if log_density(end * (1 - 1e-15)) > level:
            return end
        return float(optimize.brentq(lambda b: log_density(b) - level, peak.x, end, xtol=1e-12))

    return edge(-1.0), edge(1.0)


def _nodes(epsilon: float, dimension: int, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses and probabilities (n, 8) of the Gauss-Legendre nodes of the n cells of b
    between the ``edges``."""
    points = _POINTS
    weights = _WEIGHTS
    angles = np.arcsin(edges)
    half = np.diff(angles)[:, None] / 2
    b = np.sin(angles[:-1, None] + half * (1 + points))
    log_masses = _log_density(b, epsilon, dimension, _curvature(epsilon, dimension))
    masses = np.exp(log_masses - log_masses.max()) * weights * half
    return epsilon * b, masses / masses.sum()
