"""Epsilon of one Gaussian release and the noise of an epsilon, in closed form.

Balle and Wang: "Improving the Gaussian Mechanism for Differential Privacy: Analytical Calibration
and Optimal Denoising", ICML 2018, equation (6). ``dp_accounting.gaussian_mechanism`` computes the
same, by the same steps; to import it takes half a second, for accountants that are not needed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, special

_TOLERANCE = 1e-12


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Returns the smallest epsilon of one Gaussian release.

    Args:
        multiplier: standard deviation of the noise over the sensitivity, at least 0.
        delta: from 0 to 1.

    Returns:
        Epsilon, infinite without noise or at delta 0.

    Example:
        >>> from fedmtl.privacy.accounting.gaussian import gaussian_epsilon, gaussian_multiplier
        >>> round(gaussian_epsilon(gaussian_multiplier(2.0, 1e-5), 1e-5), 9)
        2.0
    """
    if delta == 1 or math.isinf(multiplier):
        return 0.0
    if multiplier == 0 or delta == 0:
        return math.inf
    log_delta = np.log(delta)
    if _log_delta(multiplier, 0.0) < log_delta:
        return 0.0

    def excess(epsilon: float) -> float:
        return float(_log_delta(multiplier, epsilon) - log_delta)

    low = 0.0
    high = 1.0
    while excess(high) > 0:
        low = high
        high *= 10
    return _root(excess, low, high)


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier of one Gaussian release.

    Args:
        epsilon: at least 0.
        delta: above 0 and at most 1.

    Returns:
        The standard deviation of the noise over the sensitivity.
    """
    if delta == 1 or math.isinf(epsilon):
        return 0.0
    log_delta = np.log(delta)

    def excess(multiplier: float) -> float:
        return float(_log_delta(multiplier, epsilon) - log_delta)

    low = 0.1
    high = 1.0
    while excess(low) < 0:
        high = low
        low = low / 10
    while excess(high) > 0:
        low = high
        high = high * 10
    return _root(excess, low, high)


def _log_delta(multiplier: float, epsilon: float) -> float:
    """Returns the logarithm of the smallest delta, equation (6)."""
    away = epsilon * multiplier + 1 / (2 * multiplier)
    x = special.log_ndtr(1 / multiplier - away)
    y = epsilon + special.log_ndtr(-away)
    # Rounding may give a negative delta where it is as good as 0.
    if y > x:
        return -math.inf
    with np.errstate(divide="ignore"):
        return float(x + np.log1p(-np.exp(y - x)))


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.brentq(excess, low, high, xtol=_TOLERANCE))
