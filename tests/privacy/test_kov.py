"""The composition theorems of Kairouz, Oh and Viswanath against brute force and published figures."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import pytest

from fedmtl.errors import ConfigError
from fedmtl.privacy import epsilon
from fedmtl.privacy.accounting.kov import kov_heterogeneous, kov_homogeneous


def randomized_response_delta(epsilons: list[float], eps: float) -> float:
    """Hockey-stick divergence of composed binary randomized response, outcome by outcome."""
    total = 0.0
    for truths in itertools.product((True, False), repeat=len(epsilons)):
        signed = [e if t else -e for t, e in zip(truths, epsilons, strict=True)]
        p, q = (math.prod(1 / (1 + math.exp(-sign * e)) for e in signed) for sign in (1, -1))
        total += max(0.0, p - math.exp(eps) * q)
    return total


@pytest.mark.parametrize(("e", "uses"), [(0.1, 9), (0.7, 8), (2.0, 5)])
@pytest.mark.parametrize("delta", [0.0, 1e-4, 1e-2, 0.1])
def test_homogeneous_composition_is_optimal(e: float, uses: int, delta: float) -> None:
    value = kov_homogeneous(e, uses, delta)
    steps = round(value / e)
    assert steps % 2 == uses % 2
    assert randomized_response_delta([e] * uses, value) <= delta + 1e-15
    if steps >= 2:
        assert randomized_response_delta([e] * uses, value - 2 * e) > delta


def test_published_figures() -> None:
    assert kov_heterogeneous([0.1] * 100, 1e-5) == pytest.approx(5.298110, abs=5e-7)  # the third bound
    assert kov_heterogeneous([0.02] * 1000, 1e-5) == pytest.approx(3.173856, abs=5e-7)  # the second bound
    assert kov_heterogeneous([0.1, 0.2], 1e-5) == pytest.approx(0.3)  # the first bound


def test_the_three_bounds_written_out() -> None:
    for epsilons, delta in (([0.1] * 100, 1e-5), ([0.02] * 1000, 1e-5), ([0.5, 0.01, 1.0] * 20, 1e-6), ([1.0], 0.1)):
        mean = sum(e * (math.exp(e) - 1) / (math.exp(e) + 1) for e in epsilons)
        squares = sum(e * e for e in epsilons)
        bounds = (
            sum(epsilons),
            mean + math.sqrt(2 * squares * math.log(math.exp(1) + math.sqrt(squares) / delta)),
            mean + math.sqrt(2 * squares * math.log(1 / delta)),
        )
        assert kov_heterogeneous(epsilons, delta) == pytest.approx(min(bounds), rel=1e-12)
        # not the root of the ratio, which would be below what randomized response costs somewhere
        wrong = mean + math.sqrt(2 * squares * math.log(math.exp(1) + math.sqrt(squares / delta)))
        assert kov_heterogeneous(epsilons, delta) != pytest.approx(wrong, rel=1e-3)


def test_the_general_bound_is_above_the_optimum_and_that_above_pld() -> None:
    for e, uses in ((0.1, 100), (0.02, 1000), (0.5, 30)):
        loose, optimal = kov_heterogeneous([e] * uses, 1e-5), kov_homogeneous(e, uses, 1e-5)
        laplace = epsilon(dp_accounting.LaplaceDpEvent(1 / e), uses, 1e-5)
        assert laplace * (1 - 1e-3) <= optimal <= loose
    assert randomized_response_delta([0.3, 0.1, 0.5, 0.2], kov_heterogeneous([0.3, 0.1, 0.5, 0.2], 0.05)) <= 0.05


def test_limits_and_errors() -> None:
    assert kov_heterogeneous([], 1e-5) == 0.0
    assert kov_heterogeneous([0.0, 0.0], 1e-5) == 0.0
    assert kov_heterogeneous([0.1] * 100, 0.0) == pytest.approx(10.0)
    assert kov_homogeneous(0.1, 100, 0.0) == pytest.approx(10.0)
    assert kov_homogeneous(0.5, 20_000, 1e-5) < 10_000  # no overflow
    for call in (
        lambda: kov_heterogeneous([-0.1], 1e-5),
        lambda: kov_heterogeneous([0.1], 1.0),
        lambda: kov_homogeneous(0.0, 3, 1e-5),
        lambda: kov_homogeneous(0.1, 0, 1e-5),
    ):
        with pytest.raises(ConfigError, match="kov_"):
            call()
