"""The loss of L2-Laplace noise against simulated noise vectors, the Laplace mechanism and integrals."""

import math

import attr
import dp_accounting
import numpy as np
import pytest
from scipy import integrate, special, stats

from fedmtl.errors import ConfigError
from fedmtl.privacy import epsilon
from fedmtl.privacy.accounting.composition import renyi_curve
from fedmtl.privacy.accounting.knorm import KNormDpEvent, bessel_ratio, loss_law, loss_scale
from tests.helpers import delta_at

CASES = [(2, 1.0), (3, 2.0), (4, 0.1), (10, 0.1), (10, 20.0), (100, 5.0), (465, 0.5), (5000, 2.0)]


def vectors(beta: float, dimension: int, count: int, seed: int) -> np.ndarray:
    """Noise vectors with density proportional to exp(-beta |v|)."""
    rng = np.random.default_rng(seed)
    direction = rng.standard_normal((count, dimension))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return direction * rng.gamma(dimension, 1 / beta, (count, 1))


def losses(beta: float, dimension: int, count: int, seed: int) -> np.ndarray:
    """The loss from radius and angle alone, as the module's docstring has it."""
    rng = np.random.default_rng(seed)
    radius = rng.gamma(dimension, 1 / beta, count)
    if dimension == 1:
        cosine = rng.choice([-1.0, 1.0], count)
    else:
        cosine = 2 * rng.beta((dimension - 1) / 2, (dimension - 1) / 2, count) - 1
    return beta * (np.sqrt(radius**2 + 2 * radius * cosine + 1) - radius)


@pytest.mark.parametrize(("dimension", "beta"), CASES)
def test_the_law_is_that_of_the_simulated_loss(dimension: int, beta: float) -> None:
    value = loss_law(beta, dimension, loss_scale(beta, dimension)[0] / 100)
    sample = losses(beta, dimension, 200_000, dimension)
    cumulative = np.cumsum(value.masses)
    at = np.quantile(sample, [0.001, 0.05, 0.3, 0.5, 0.8, 0.99, 0.9999])
    empirical = np.array([np.mean(sample <= x) for x in at])
    index = np.clip(np.round(at / value.width).astype(int) - value.first, 2, cumulative.size - 2)
    assert np.all(empirical > cumulative[index - 2] - 0.005)
    assert np.all(empirical < cumulative[index + 1] + 0.005)
    for eps in (0.0, *at[3:]):
        terms = np.maximum(0.0, -np.expm1(max(eps, 0.0) - sample))
        error = 5 * terms.std() / math.sqrt(sample.size) + 1e-5
        assert abs(delta_at(value, max(eps, 0.0)) - terms.mean()) < error + 2e-3 * terms.mean()
    assert value.masses.sum() + value.infinity == pytest.approx(1, abs=1e-13)
    assert value.masses @ np.exp(-value.losses) == pytest.approx(1, abs=1e-12)  # nothing is lost under Q


@pytest.mark.parametrize(("dimension", "beta"), [(2, 1.0), (7, 3.0)])
def test_the_loss_of_noise_vectors_themselves(dimension: int, beta: float) -> None:
    noise = vectors(beta, dimension, 200_000, 1)
    shift = np.zeros(dimension)
    shift[0] = 1.0
    sample = beta * (np.linalg.norm(noise - shift, axis=1) - np.linalg.norm(noise, axis=1))
    assert stats.ks_2samp(sample, losses(beta, dimension, 200_000, 2)).pvalue > 1e-4


@pytest.mark.parametrize(("dimension", "beta"), [(2, 1.0), (3, 4.0), (10, 0.5)])
def test_the_full_shift_is_the_worst_case(dimension: int, beta: float) -> None:
    """Hockey-stick divergences of shorter shifts, from the same noise vectors, stay below."""
    noise = vectors(beta, dimension, 100_000, 4)
    value = loss_law(beta, dimension, loss_scale(beta, dimension)[0] / 100)
    for eps in (0.0, beta / 4):
        previous = 0.0
        for length in (0.3, 0.7, 1.0):
            shift = np.zeros(dimension)
            shift[-1] = length
            sample = beta * (np.linalg.norm(noise - shift, axis=1) - np.linalg.norm(noise, axis=1))
            delta = float(np.maximum(0, -np.expm1(eps - sample)).mean())
            assert previous <= delta <= delta_at(value, eps) + 0.005
            previous = delta


def test_tails_against_the_exact_integral() -> None:
    """P(loss <= l) = E F(x - (1 - x^2) / (2 r)), F the law of the cosine, x = l / beta: far into both tails."""
    dimension, beta = 10, 4.0
    value = loss_law(beta, dimension, 0.001)
    cumulative = np.cumsum(value.masses)
    for x in (-0.97, -0.9, 0.0, 0.5):

        def integrand(r: float, x: float = x) -> float:
            cosine = x - (1 - x * x) / (2 * r)
            return float(stats.beta.cdf((cosine + 1) / 2, 4.5, 4.5) * stats.gamma.pdf(r, dimension, scale=1 / beta))

        exact = integrate.quad(integrand, 0, 40, epsabs=1e-16, epsrel=1e-10, limit=500)[0]
        index = round(x * beta / value.width) - value.first
        assert 0.5 * (cumulative[index - 1] + cumulative[index]) == pytest.approx(exact, rel=2e-3)


def test_one_coordinate_is_the_laplace_mechanism() -> None:
    for e, uses in ((0.1, 100), (1.0, 10), (3.0, 2)):
        library = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
        library.compose(dp_accounting.LaplaceDpEvent(1 / e), uses)
        exact = library.get_epsilon(1e-5)
        value = epsilon(KNormDpEvent(e, 1), uses, 1e-5)
        assert value == epsilon(dp_accounting.LaplaceDpEvent(1 / e), uses, 1e-5)
        assert exact * (1 - 1e-4) <= value <= exact * (1 + 1.1e-3)


def test_expected_figures_after_a_hundred_steps() -> None:
    """Basic composition gives 10."""
    assert epsilon(KNormDpEvent(0.1, 1), 100, 1e-5) == pytest.approx(4.22, abs=0.015)
    assert 1.15 < epsilon(KNormDpEvent(0.1, 10), 100, 1e-5) <= 1.21
    assert 0.32 < epsilon(KNormDpEvent(0.1, 100), 100, 1e-5) <= 0.35


@pytest.mark.parametrize(("dimension", "beta", "uses"), [(1, 0.3, 20), (2, 0.5, 20), (10, 1.0, 10), (100, 3.0, 8)])
def test_simulated_compositions_confirm_the_bound_from_below(dimension: int, beta: float, uses: int) -> None:
    total = losses(beta, dimension, 100_000 * uses, 9).reshape(uses, -1).sum(axis=0)
    for delta in (1e-2, 1e-3):
        eps = epsilon(KNormDpEvent(beta, dimension), uses, delta)
        terms = np.maximum(0.0, -np.expm1(eps - total))
        error = terms.std() / math.sqrt(terms.size)
        assert terms.mean() - 5 * error <= delta <= 1.02 * terms.mean() + 5 * error
        # a claim of 5% less would be refuted
        assert np.maximum(0.0, -np.expm1(0.95 * eps - total)).mean() - 5 * error > delta


def test_a_finer_grid_only_tightens() -> None:
    event = KNormDpEvent(0.5, 20)
    values = [epsilon(event, 200, 1e-6, coarsen=coarsen) for coarsen in (0.1, 0.5, 1.0, 4.0, 16.0)]
    assert values == sorted(values)
    assert values[2] == pytest.approx(values[0], rel=1e-3)


def test_monotone_in_dimension_epsilon_uses_and_delta() -> None:
    by_dimension = [epsilon(KNormDpEvent(0.5, d), 30, 1e-6) for d in (1, 2, 3, 5, 20, 21, 465, 5000, 100_000, 10**7)]
    assert by_dimension == sorted(by_dimension, reverse=True)
    by_epsilon = [epsilon(KNormDpEvent(e, 12), 30, 1e-6) for e in (1e-6, 1e-3, 0.1, 1.0, 30.0, 1e3, 1e5)]
    assert by_epsilon == sorted(by_epsilon)
    by_uses = [epsilon(KNormDpEvent(0.2, 12), uses, 1e-6) for uses in (1, 2, 17, 100, 10_000)]
    assert by_uses == sorted(by_uses)
    by_delta = [epsilon(KNormDpEvent(0.2, 12), 30, delta) for delta in (1e-2, 1e-6, 1e-10, 1e-12)]
    assert by_delta == sorted(by_delta)
    for e, uses in ((0.2, 30), (5.0, 3), (1e3, 1)):
        assert epsilon(KNormDpEvent(e, 12), uses, 1e-12) <= uses * e


@pytest.mark.parametrize("dimension", [465, 5000, 100_000, 10**7])
def test_many_coordinates_approach_the_gaussian_law(dimension: int) -> None:
    """Per step the loss is nearly that of Gaussian noise with standard deviation sqrt(d) / beta a coordinate."""
    for beta in (1e-3 * math.sqrt(dimension), 0.2 * math.sqrt(dimension)):
        gaussian = epsilon(dp_accounting.GaussianDpEvent(math.sqrt(dimension) / beta), 20, 1e-6)
        value = epsilon(KNormDpEvent(beta, dimension), 20, 1e-6)
        assert value == pytest.approx(gaussian, rel=20 / math.sqrt(dimension))


def test_the_bessel_ratio() -> None:
    for order, z in ((-0.5, 2.0), (0.0, 0.3), (0.5, 2.0), (4.0, 0.05), (49.0, 0.05), (120.5, 500.0), (231.5, 90.0)):
        exact = special.kve(order + 1, z) / special.kve(order, z)
        assert bessel_ratio(order, z) == pytest.approx(exact, rel=1e-12)
    for order, z in ((2e5, 3.0), (2e5, 1e5), (2e5 + 0.5, 4e6)):
        low = (order + math.hypot(order, z)) / z  # Segura 2011, bounds on the ratio
        high = (order + 0.5 + math.hypot(order + 0.5, z)) / z
        assert low < bessel_ratio(order, z) <= high * (1 + 1e-12)


def test_renyi_divergence_against_quadrature() -> None:
    dimension, beta, orders = 3, 2.0, (1.5, 4.0, 32.0)
    curvature = 2 * (dimension - 1) / beta * special.kv(1.5, beta / 2) / special.kv(0.5, beta / 2)

    def moment(order: float) -> float:
        def integrand(b: float) -> float:
            return math.exp(beta * b / 2 + order * beta * b) * (curvature + 1 - b * b)

        return integrate.quad(integrand, -1, 1, epsrel=1e-12)[0]

    exact = [math.log(moment(a - 1) / moment(0)) / (a - 1) for a in orders]
    value = renyi_curve(KNormDpEvent(beta, dimension), orders)
    assert np.all(value >= np.array(exact) * (1 - 1e-12))
    np.testing.assert_allclose(value, exact, rtol=1e-3)
    assert np.all(renyi_curve(KNormDpEvent(0.1, 1), orders) <= 0.1)


def test_the_event() -> None:
    event = KNormDpEvent(0.5, 12)
    assert event == KNormDpEvent(0.5, 12)
    assert len({event, KNormDpEvent(0.5, 12), KNormDpEvent(0.5, 13)}) == 2
    with pytest.raises(attr.exceptions.FrozenInstanceError):
        event.epsilon = 1.0  # type: ignore[misc]
    assert dp_accounting.DpEvent.from_named_tuple(event.to_named_tuple()) == event
    for bad in ((0.0, 3), (-1.0, 3), (math.nan, 3), (1.0, 0), (1.0, 2.5)):
        with pytest.raises(ConfigError, match="KNormDpEvent"):
            KNormDpEvent(*bad)  # type: ignore[arg-type]
