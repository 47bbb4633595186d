"""What one use costs: its releases together, the secret subset of records, and every release's own size."""

import numpy as np
import pytest
from dp_accounting import dp_event, gaussian_mechanism
from scipy import integrate, optimize, stats

from fedmtl.errors import PrivacyError
from fedmtl.privacy import PrivacyCost
from tests.helpers import library_accountant


@pytest.mark.parametrize("sampled", [1.0, 0.2])
@pytest.mark.parametrize("releases", [2, 3])
def test_releases_of_one_use_are_one_gaussian_release_under_one_coin(
    sampled: float, releases: int
) -> None:
    """Of sqrt(k) times the sensitivity, whatever their sizes are."""
    multiplier = 2.5
    event: dp_event.DpEvent = dp_event.GaussianDpEvent(multiplier / np.sqrt(releases))
    if sampled < 1:
        event = dp_event.PoissonSampledDpEvent(sampled, event)
    expected = library_accountant().compose(event, 6).get_epsilon(1e-5)
    cost = PrivacyCost(
        law="gaussian", sizes=tuple(range(1, releases + 1)), delta=1e-5, sampled=sampled
    )
    assert cost.epsilon(6, multiplier) == pytest.approx(expected, rel=2e-3)


def test_every_release_of_a_use_costs_by_its_own_size() -> None:
    """Noise of a length that grows with the size: a release of one number is not one of fifty, whichever is first."""
    first, second, short, long = (
        PrivacyCost(law="l2_laplace", sizes=sizes, delta=1e-5).epsilon(3, 4.0)
        for sizes in ((1, 50), (50, 1), (1, 1), (50, 50))
    )
    assert first == pytest.approx(second, rel=1e-6)
    least, most = sorted((short, long))
    assert least * 1.001 < first < most / 1.001


@pytest.mark.parametrize("rate", [0.2, 0.6])
def test_a_record_that_is_replaced_in_a_secret_subset_costs_what_the_integral_says(
    rate: float,
) -> None:
    """Both of its values are C long and opposite, and the noise is z times their distance."""
    multiplier = 1.5
    delta = 1e-3
    x = np.linspace(-20.0, 20.0, 40_001)
    absent = stats.norm.pdf(x, 0.0, multiplier)
    one, other = (
        (1 - rate) * absent + rate * stats.norm.pdf(x, place, multiplier) for place in (0.5, -0.5)
    )

    def excess(epsilon: float) -> float:
        return float(integrate.trapezoid(np.maximum(one - np.exp(epsilon) * other, 0.0), x)) - delta

    expected = optimize.brentq(excess, 0.0, 5.0)
    cost = PrivacyCost(law="gaussian", sizes=(4,), delta=delta, sampled=rate, replaced=True)
    assert cost.epsilon(1, multiplier) == pytest.approx(expected, rel=2e-3)
    removed = PrivacyCost(law="gaussian", sizes=(4,), delta=delta, sampled=rate).epsilon(
        1, multiplier
    )
    assert removed != pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("limit", [{"max_uses": 3}, {"weights": (0.5, 1.0, 1.5)}])
def test_no_more_uses_than_the_budget_is_allocated_to(limit: dict) -> None:
    cost = PrivacyCost(law="gaussian", sizes=(4,), delta=1e-5, **limit)
    cost.after(3, 2.0)
    with pytest.raises(PrivacyError, match=r"4 uses were charged.*allocated to 3"):
        cost.after(4, 2.0)
    assert cost.affordable(1e6, 2.0) == 3


@pytest.mark.parametrize("weights", [None, (0.5, 1.0, 1.5)])
def test_each_of_the_sums_of_a_use_costs(weights: tuple[float, ...] | None) -> None:
    """Five Gaussian ones in each of three uses, of even or of uneven noise: against the closed form."""
    cost = PrivacyCost(law="gaussian", sizes=(4,), delta=1e-5, sums=5, weights=weights)
    squares = np.square(weights or (1.0,) * 3)
    expected = gaussian_mechanism.get_epsilon_gaussian(4.0 / np.sqrt(5 * squares.sum()), 1e-5)
    assert cost.epsilon(3, 4.0) == pytest.approx(expected, rel=1e-6)
