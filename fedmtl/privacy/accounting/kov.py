"""Composition theorems of Kairouz, Oh and Viswanath, "The composition theorem for differential privacy" (ICML 2015).

For reproduction of published figures only: a privacy loss distribution (:func:`~fedmtl.privacy.epsilon`) is never
looser for a given mechanism, and usually much tighter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from ..._check import non_negative, positive, positive_int
from ...errors import ConfigError


def kov_homogeneous(epsilon: float, uses: int, delta: float) -> float:
    """Theorem 3.3: optimal composition of ``uses`` mechanisms that are ``epsilon``-DP and nothing more is known of.

    Args:
        epsilon: pure epsilon of each, above 0.
        uses: their number k.
        delta: at least 0 and below 1.

    Returns:
        The smallest ``(k - 2 i) epsilon``, i = 0 .. floor(k / 2), with
        ``sum_{l < i} C(k, l) (exp((k - l) epsilon) - exp((k - 2 i + l) epsilon)) / (1 + exp(epsilon))^k <= delta``.
    """
    positive("kov_homogeneous", epsilon=epsilon)
    positive_int("kov_homogeneous", uses=uses)
    _check_delta("kov_homogeneous", delta)
    whole = np.arange(uses // 2 + 1)
    log_weight = special.gammaln(uses + 1) - special.gammaln(whole + 1) - special.gammaln(uses - whole + 1)
    log_weight = log_weight - uses * np.logaddexp(0.0, epsilon)
    best = uses
    for i in range(1, uses // 2 + 1):
        below = whole[:i]
        terms = np.exp(log_weight[:i] + (uses - below) * epsilon) * -np.expm1((2 * below - 2 * i) * epsilon)
        if float(terms.sum()) > delta:
            break
        best = uses - 2 * i
    return best * epsilon


def kov_heterogeneous(epsilons: Sequence[float], delta: float) -> float:
    """Theorem 3.5 for pure mechanisms: the least of three bounds.

    With ``A = sum e (exp(e) - 1) / (exp(e) + 1)`` and ``S = sum e^2`` they are ``sum e``,
    ``A + sqrt(2 S log(exp(1) + sqrt(S) / delta))`` and ``A + sqrt(2 S log(1 / delta))``.

    Args:
        epsilons: pure epsilons of the steps, none below 0.
        delta: the slack of the theorem, at least 0 and below 1.
    """
    for value in epsilons:
        non_negative("kov_heterogeneous", epsilon=value)
    _check_delta("kov_heterogeneous", delta)
    total = math.fsum(epsilons)
    squares = math.fsum(e * e for e in epsilons)
    if delta == 0 or squares == 0:
        return total
    mean = math.fsum(e * math.tanh(e / 2) for e in epsilons)
    tail = min(math.log(math.e + math.sqrt(squares) / delta), math.log(1 / delta))
    return min(total, mean + math.sqrt(2 * squares * tail))


def _check_delta(owner: str, delta: float) -> None:
    if not 0 <= delta < 1:
        raise ConfigError(f"{owner}.delta is {delta!r}; it must be at least 0 and below 1.")
