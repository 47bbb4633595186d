"""Private hyper-parameter search against the paper's formulas, the library and SciPy's laws."""

import math

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    dp_event,
)
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy import stats

from fedmtl.errors import ConfigError
from fedmtl.privacy import SecureSource
from fedmtl.privacy.accounting.multipliers import calibrate_selection, selection_epsilon
from fedmtl.privacy.accounting.selection import (
    draw_repetitions,
    halting_probability,
    selection_curve,
)

CANDIDATE = ComposedDpEvent(
    [
        SelfComposedDpEvent(PoissonSampledDpEvent(0.05, GaussianDpEvent(1.2)), 100),
        GaussianDpEvent(10.0),
    ]
)
ORDERS = np.array([1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 32.0, 64.0])


def law(mean: float, shape: float):
    """SciPy's distribution of K."""
    if math.isinf(shape):
        return stats.poisson(mean)
    gamma = halting_probability(mean, shape)
    return stats.logser(1 - gamma) if shape == 0 else stats.nbinom(shape, gamma)


def pmf(mean: float, shape: float, ks: np.ndarray) -> np.ndarray:
    probabilities = law(mean, shape).pmf(ks)
    return (
        probabilities
        if math.isinf(shape) or shape == 0
        else probabilities / -math.expm1(law(mean, shape).logpmf(0))
    )


@pytest.mark.parametrize(("shape", "gamma"), [(0.5, 0.05), (1.0, 0.1), (3.0, 0.2), (0.0, 0.02)])
def test_theorem_2_by_hand(shape: float, gamma: float) -> None:
    """Gaussian candidates, e(a) = a / (2 z^2), every pair of orders."""
    z = 3.0
    mean = (
        (1 / gamma - 1) / math.log(1 / gamma)
        if shape == 0
        else shape * (1 - gamma) / gamma / (1 - gamma**shape)
    )
    assert halting_probability(mean, shape) == pytest.approx(gamma, rel=1e-9)
    curve = selection_curve(ORDERS, ORDERS / (2 * z * z), mean=mean, shape=shape)
    for order, value in zip(ORDERS, curve, strict=True):
        best = min(
            order / (2 * z * z)
            + (1 + shape) * (1 - 1 / other) * other / (2 * z * z)
            + (1 + shape) * math.log(1 / gamma) / other
            + math.log(mean) / (order - 1)
            for other in ORDERS
        )
        assert value == pytest.approx(best, rel=1e-9)


def test_theorem_6_by_hand() -> None:
    """Poisson: the candidate's delta at log(1 + 1 / (a - 1)), from its Renyi curve."""
    z, mean = 4.0, 12.0
    curve = selection_curve(ORDERS, ORDERS / (2 * z * z), mean=mean, shape=math.inf)
    for order, value in zip(ORDERS, curve, strict=True):
        eps = math.log(1 + 1 / (order - 1))
        deltas = [
            math.exp((b - 1) * (b / (2 * z * z) - eps) + (b - 1) * math.log(1 - 1 / b)) / b
            for b in ORDERS
        ] + [math.sqrt(1 - math.exp(-ORDERS[0] / (2 * z * z)))]
        assert value == pytest.approx(
            order / (2 * z * z) + mean * min(1.0, *deltas) + math.log(mean) / (order - 1), rel=1e-9
        )


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 4.0, math.inf])
def test_the_whole_search_is_the_library_s(shape: float) -> None:
    for mean in (1.0, 10.0, 300.0):
        library = RdpAccountant()
        library.compose(dp_event.RepeatAndSelectDpEvent(CANDIDATE, mean, shape))
        expected = library.get_epsilon(1e-6)
        assert selection_epsilon(CANDIDATE, 1e-6, mean=mean, shape=shape) == pytest.approx(
            expected, rel=1e-6
        )


@pytest.mark.parametrize(("mean", "shape"), [(1.0, 1.0), (10.0, 0.0), (300.0, math.inf)])
def test_with_fewer_orders_the_search_costs_no_less_and_hardly_more(
    mean: float, shape: float
) -> None:
    whole = selection_epsilon(CANDIDATE, 1e-6, mean=mean, shape=shape)
    for coarsen in (2.0, 8.0):
        coarse = selection_epsilon(CANDIDATE, 1e-6, mean=mean, shape=shape, coarsen=coarsen)
        assert whole <= coarse <= 1.05 * whole


def exact_deltas(mu: float, mean: float, shape: float, eps: float) -> tuple[float, float]:
    """Delta at ``eps`` of a search over scores N(0, 1) against N(mu, 1), the larger of both directions, by summing
    densities: of the best score alone, and of the best score with the number of the repetition that has it.

    Of K repetitions the i-th (i <= K) is the best, at score s, with density f(s) F(s)^(K - 1).
    """
    scores, width = np.linspace(-12.0, 14.0, 4001, retstep=True)
    ks = np.arange(1, 60 * int(mean))
    probabilities = pmf(mean, shape, ks)

    def densities(centre: float) -> np.ndarray:
        terms = stats.norm.cdf(scores, centre) ** (ks[:, None] - 1) * stats.norm.pdf(scores, centre)
        return np.cumsum((probabilities[:, None] * terms)[::-1], axis=0)[::-1]  # (numbers, scores)

    def delta(p: np.ndarray, q: np.ndarray) -> float:
        return float(np.maximum(p - math.exp(eps) * q, 0.0).sum() * width)

    one, other = densities(0.0), densities(mu)
    assert one.sum() * width == pytest.approx(probabilities.sum(), abs=1e-9)
    hidden, told = (one.sum(0), other.sum(0)), (one, other)
    return max(delta(*hidden), delta(*hidden[::-1])), max(delta(*told), delta(*told[::-1]))


@pytest.mark.parametrize(
    ("mean", "shape", "mu", "told"),
    [(4.0, 1.0, 0.54, 9.5e-5), (10.0, 1.0, 0.46, 2.87e-4), (10.0, 1.0, 1.0, 3.2e-3)],
)
def test_the_bound_holds_exactly_where_the_number_of_the_winner_is_hidden(
    mean: float, shape: float, mu: float, told: float
) -> None:
    """The true delta at the claimed epsilon: within 1e-5 for the best score, and beyond it with the number."""
    claimed = selection_epsilon(GaussianDpEvent(1 / mu), 1e-5, mean=mean, shape=shape)
    hidden, shown = exact_deltas(mu, mean, shape, claimed)
    assert hidden <= 1e-5
    assert shown == pytest.approx(told, rel=0.02)
    assert shown > 1e-5


@pytest.mark.parametrize(("mean", "shape"), [(6.0, 0.0), (6.0, 3.0), (6.0, math.inf)])
@pytest.mark.parametrize("mu", [0.3, 0.6, 1.2])
def test_the_bound_holds_exactly_under_every_law(mean: float, shape: float, mu: float) -> None:
    """Under Poisson also an empty search is an output, equally likely with either neighbour: it adds nothing."""
    claimed = selection_epsilon(GaussianDpEvent(1 / mu), 1e-5, mean=mean, shape=shape)
    assert exact_deltas(mu, mean, shape, claimed)[0] <= 1e-5
    assert exact_deltas(mu, mean, shape, 0.5 * mu)[0] > 1e-5  # the sum can tell


def test_calibration_meets_the_target_tightly() -> None:
    def candidate(z: float) -> ComposedDpEvent:
        return ComposedDpEvent(
            [SelfComposedDpEvent(GaussianDpEvent(z), 40), GaussianDpEvent(3 * z)]
        )

    for mean, shape in ((10.0, 0.0), (30.0, math.inf)):
        z = calibrate_selection(candidate, target=3.0, delta=1e-6, mean=mean, shape=shape)
        assert selection_epsilon(candidate(z), 1e-6, mean=mean, shape=shape) <= 3.0
        assert selection_epsilon(candidate(z * (1 - 1e-4)), 1e-6, mean=mean, shape=shape) > 3.0
    with pytest.raises(
        ConfigError, match=r"cannot be reached .* a search of 1e\+06 expected repetitions"
    ):
        calibrate_selection(candidate, target=1e-3, delta=1e-6, mean=1e6, shape=1.0)


@pytest.mark.parametrize(
    ("mean", "shape"),
    [(8.0, 0.0), (8.0, 1.0), (5.0, 0.3), (20.0, 6.0), (7.5, math.inf), (300.0, 0.5), (40.0, 2e4)],
)
def test_repetitions_follow_their_law(mean: float, shape: float) -> None:
    """Chi-square against SciPy's probabilities, cells of at least 25 expected draws."""
    count = 20_000
    rng = np.random.default_rng(5)
    draws = np.array([draw_repetitions(rng, mean, shape) for _ in range(count)])
    ks = np.arange(0, int(draws.max()) + 10_000)
    probabilities = pmf(mean, shape, ks)
    if not math.isinf(shape):
        probabilities[0] = 0.0
        assert draws.min() >= 1
    assert probabilities @ ks == pytest.approx(mean, rel=1e-6)
    edges, running = [0], 0.0
    for k, probability in enumerate(probabilities):
        running += probability
        if running * count >= 25:
            edges.append(k + 1)
            running = 0.0
    expected = np.add.reduceat(probabilities, edges[:-1]) * count
    observed = np.histogram(draws, bins=[*edges[:-1], ks[-1] + 1])[0].astype(float)
    expected[-1] = count - expected[:-1].sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_privacy_coins_are_accepted() -> None:
    draws = [draw_repetitions(SecureSource().coins("search", 0), 4.0, 1.0) for _ in range(300)]
    assert 2.0 < np.mean(draws) < 8.0
    assert draw_repetitions(SecureSource().coins("search", 0), 1.0, 0.0) == 1

    class Largest:
        def uniform(self, count: int) -> np.ndarray:
            return np.full(count, 1 - 2.0**-53)

    assert draw_repetitions(Largest(), 4.0, 1.0) > 50


def test_errors() -> None:
    for mean, shape in ((0.5, 1.0), (math.inf, 1.0), (3.0, -0.1), (3.0, math.nan)):
        with pytest.raises(ConfigError, match=r"PrivateSearch\.(mean|shape)"):
            selection_epsilon(CANDIDATE, 1e-6, mean=mean, shape=shape)
    assert selection_epsilon(dp_event.NonPrivateDpEvent(), 1e-6, mean=3.0, shape=1.0) == math.inf
    assert rdp.DEFAULT_RDP_ORDERS[0] > 1  # the formulas divide by a - 1
