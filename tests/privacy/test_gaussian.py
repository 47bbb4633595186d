"""Gaussian releases in closed form, against dp-accounting and the definition of the privacy profile."""

import math

import numpy as np
import pytest
from dp_accounting import gaussian_mechanism
from scipy.stats import norm

from fedmtl.privacy.accounting.gaussian import gaussian_epsilon, gaussian_multiplier

EPSILONS = [0.0, 1e-6, 0.01, 0.3, 1.0, 8.0, 77.0, 1e3, 1e6]
DELTAS = [1e-300, 1e-30, 1e-12, 1e-5, 0.01, 0.5, 1.0]


@pytest.mark.parametrize("delta", DELTAS)
def test_noise_and_epsilon_are_those_of_dp_accounting_to_the_bit(delta) -> None:
    for epsilon in EPSILONS:
        expected = gaussian_mechanism.get_sigma_gaussian(epsilon, delta)
        assert gaussian_multiplier(epsilon, delta) == expected
    for multiplier in np.geomspace(1e-6, 1e8, 57):
        with np.errstate(divide="ignore"):
            expected = gaussian_mechanism.get_epsilon_gaussian(multiplier, delta)
        assert gaussian_epsilon(multiplier, delta) == expected


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 5.0])
def test_epsilon_is_where_the_profile_crosses_delta(multiplier) -> None:
    epsilon = gaussian_epsilon(multiplier, 1e-5)
    half = 1 / (2 * multiplier)
    first = norm.cdf(half - epsilon * multiplier)
    second = math.exp(epsilon) * norm.cdf(-half - epsilon * multiplier)
    assert first - second == pytest.approx(1e-5, rel=1e-6)


def test_no_noise_has_no_epsilon_and_endless_noise_costs_nothing() -> None:
    assert gaussian_epsilon(0.0, 1e-5) == math.inf
    assert gaussian_epsilon(1.0, 0.0) == math.inf
    assert gaussian_epsilon(math.inf, 0.0) == 0.0
    assert gaussian_multiplier(math.inf, 1e-5) == 0.0
