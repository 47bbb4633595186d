"""The composition theorem of Kairouz, Oh and Viswanath: published figures, and its three bounds written out."""

import math

import numpy as np
import pytest
from scipy import special

from fedmtl.contrib.published.p2p import composed


def optimum(e: float, uses: int, delta: float) -> float:
    """Theorem 3.3: the least (k - 2 i) e at which k randomized responses have a divergence of at most ``delta``."""
    lies = np.arange(uses + 1)
    log_p = np.log(special.comb(uses, lies)) + (uses - lies) * e - uses * np.logaddexp(0.0, e)
    log_q = log_p - (uses - 2 * lies) * e
    levels = e * np.arange(uses % 2, uses + 1, 2)
    return next(
        eps for eps in levels if np.maximum(np.exp(log_p) - np.exp(eps + log_q), 0.0).sum() <= delta
    )


def test_published_figures() -> None:
    assert composed([0.1] * 100, 1e-5) == pytest.approx(5.298110, abs=5e-7)  # the third bound
    assert composed([0.02] * 1000, 1e-5) == pytest.approx(3.173856, abs=5e-7)  # the second bound
    assert composed([0.1, 0.2], 1e-5) == pytest.approx(0.3)  # the first bound
    assert composed([0.1] * 100, 0.0) == pytest.approx(10.0)
    assert composed([], 1e-5) == composed([0.0, 0.0], 1e-5) == 0.0


def test_the_three_bounds_written_out() -> None:
    for epsilons, delta in (
        ([0.1] * 100, 1e-5),
        ([0.02] * 1000, 1e-5),
        ([0.5, 0.01, 1.0] * 20, 1e-6),
        ([1.0], 0.1),
    ):
        mean = sum(e * (math.exp(e) - 1) / (math.exp(e) + 1) for e in epsilons)
        squares = sum(e * e for e in epsilons)
        bounds = (
            sum(epsilons),
            mean + math.sqrt(2 * squares * math.log(math.exp(1) + math.sqrt(squares) / delta)),
            mean + math.sqrt(2 * squares * math.log(1 / delta)),
        )
        assert composed(epsilons, delta) == pytest.approx(min(bounds), rel=1e-12)
    assert optimum(0.1, 100, 1e-5) <= composed([0.1] * 100, 1e-5)
