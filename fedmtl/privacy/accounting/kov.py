"""The composition theorem for unequal steps of Kairouz, Oh and Viswanath, "The composition theorem for differential
privacy" (ICML 2015).

For reproduction of published figures only: a privacy loss distribution (:func:`~fedmtl.privacy.epsilon`) is never
looser for a given mechanism, and usually much tighter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..._check import non_negative
from ...errors import ConfigError


def kov_heterogeneous(epsilons: Sequence[float], delta: float) -> float:
    """Return the least of the three bounds of Theorem 3.5 for pure mechanisms.

    With ``A = sum e (exp(e) - 1) / (exp(e) + 1)`` and ``S = sum e^2`` they are ``sum e``,
    ``A + sqrt(2 S log(exp(1) + sqrt(S) / delta))`` and ``A + sqrt(2 S log(1 / delta))``.

    Args:
        epsilons: pure epsilons of the steps, none below 0.
        delta: the slack of the theorem, at least 0 and below 1.
    """
    for value in epsilons:
        non_negative("kov_heterogeneous", epsilon=value)
    if not 0 <= delta < 1:
        raise ConfigError(f"kov_heterogeneous.delta is {delta!r}; it must be at least 0 and below 1.")
    total = math.fsum(epsilons)
    squares = math.fsum(e * e for e in epsilons)
    if delta == 0 or squares == 0:
        return total
    mean = math.fsum(e * math.tanh(e / 2) for e in epsilons)
    tail = min(math.log(math.e + math.sqrt(squares) / delta), math.log(1 / delta))
    return min(total, mean + math.sqrt(2 * squares * tail))
