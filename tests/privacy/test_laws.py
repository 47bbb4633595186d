"""Loss laws of the mechanisms against the library's and against simulated mixtures."""

import math

import attr
import dp_accounting
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from scipy import integrate, optimize, special, stats

from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import epsilon
from fedmtl.privacy.accounting import library, pld
from fedmtl.privacy.accounting import loss_laws as laws
from fedmtl.privacy.accounting.composition import elementary, renyi_curve
from fedmtl.privacy.accounting.knorm import KNormDpEvent, bessel_ratio, loss_law, loss_scale
from tests.helpers import delta_at, l2_laplace_losses, renyi_epsilon


def library_epsilon(
    event: dp_accounting.DpEvent, uses: int, delta: float, width: float = 1e-3
) -> float:
    """Return the library's epsilon; on losses in steps of 1e-3 it is within 2.2e-4 of that in steps of 1e-4."""
    accountant = PLDAccountant(value_discretization_interval=width)
    accountant.compose(event, uses)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(
    ("event", "uses", "delta"),
    [
        (PoissonSampledDpEvent(0.1, GaussianDpEvent(1.03)), 100, 1e-5),
        (PoissonSampledDpEvent(0.01, GaussianDpEvent(0.6)), 1000, 1e-6),
        (PoissonSampledDpEvent(0.3, GaussianDpEvent(0.3)), 10, 1e-5),
        (PoissonSampledDpEvent(0.5, GaussianDpEvent(5.0)), 40, 1e-5),
        (PoissonSampledDpEvent(1e-4, GaussianDpEvent(0.5361)), 1000, 2.5e-7),
        (LaplaceDpEvent(10.0), 100, 1e-5),
        (PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)), 100, 1e-5),
        (PoissonSampledDpEvent(0.01, LaplaceDpEvent(0.2)), 100, 1e-5),
        (PoissonSampledDpEvent(0.5, LaplaceDpEvent(20.0)), 1000, 1e-6),
        (ComposedDpEvent([GaussianDpEvent(4.0), LaplaceDpEvent(3.0)]), 10, 1e-5),
        (
            ComposedDpEvent(
                [
                    SelfComposedDpEvent(GaussianDpEvent(30.0), 100),
                    SelfComposedDpEvent(LaplaceDpEvent(50.0), 30),
                    PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)),
                ]
            ),
            3,
            1e-6,
        ),
    ],
)
def test_epsilon_is_the_library_s(event: dp_accounting.DpEvent, uses: int, delta: float) -> None:
    claim = epsilon(event, uses, delta)
    assert claim == pytest.approx(library_epsilon(event, uses, delta), rel=6e-4)
    for near in (claim, claim / 2):
        assert library.library_epsilon([(event, uses)], delta, near) == pytest.approx(
            claim, rel=library.TOLERANCE / 2
        )


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.1), (0.5, 0.01), (3.0, 0.7), (2.0, 1.0), (0.2, 0.5)])
def test_the_gaussian_pair_dominates_closely(z: float, q: float) -> None:
    """Both directions against the closed form of the hockey-stick divergence of the mixture."""
    width = 0.01
    pair = laws.gaussian_pair(z, q, width)
    for eps in np.linspace(-0.05, 3, 23):
        level = (math.exp(eps) - 1 + q) / q
        if level > 0:
            x = z * z * math.log(level) + 0.5
            exact = q * stats.norm.sf((x - 1) / z) - (math.exp(eps) - 1 + q) * stats.norm.sf(x / z)
            assert exact * (1 - 1e-9) - 1e-15 <= delta_at(pair.remove, eps) <= exact + width * width
        level = (math.exp(-eps) - 1 + q) / q
        x = z * z * math.log(level) + 0.5 if level > 0 else -math.inf
        exact = stats.norm.cdf(x / z) - math.exp(eps) * (
            (1 - q) * stats.norm.cdf(x / z) + q * stats.norm.cdf((x - 1) / z)
        )
        assert exact * (1 - 1e-9) - 1e-15 <= delta_at(pair.add, eps) <= exact + width * width


@pytest.mark.parametrize("uses", [10, 1000, 100_000])
def test_a_tiny_delta_survives_the_rounding_of_many_steps(uses: int) -> None:
    """Composed on the grid against the closed form; without the tilt 1e5 steps fall below it at 1e-10 and 1e-12."""
    z = math.sqrt(uses) / 0.8
    parts = [(laws.gaussian_pair(z, 1.0, 0.03 / z).remove, uses)]
    for delta in (1e-5, 1e-10, 1e-12):
        exact = epsilon(GaussianDpEvent(0.8**-1), 1, delta)
        value = pld.composed_epsilon(parts, delta, min(1e-15, 1e-3 * delta))
        assert exact <= value <= exact * (1 + 2e-4)


def test_a_long_thin_tail_is_not_tilted_away() -> None:
    """Rarely sampled with little noise: the total is nearly the sum of the deltas of single steps."""
    q, z, uses, delta = 1e-5, 0.5, 1000, 1e-9

    def single(eps: float) -> float:
        x = z * z * math.log((math.exp(eps) - 1 + q) / q) + 0.5
        return float(
            q * stats.norm.sf((x - 1) / z) - (math.exp(eps) - 1 + q) * stats.norm.sf(x / z)
        )

    root = optimize.brentq(lambda eps: uses * single(eps) - delta, 0.1, 5)
    value = epsilon(PoissonSampledDpEvent(q, GaussianDpEvent(z)), uses, delta)
    assert value == pytest.approx(root, rel=5e-3)


@pytest.mark.parametrize("q", [0.05, 0.4])
def test_sampled_l2_laplace_noise_against_its_simulated_mixture(q: float) -> None:
    """Both directions; the loss under either hypothesis from noise vectors in three dimensions."""
    beta, dimension, count = 2.0, 3, 400_000
    rng = np.random.default_rng(0)
    direction = rng.standard_normal((count, dimension))
    noise = (
        direction
        / np.linalg.norm(direction, axis=1, keepdims=True)
        * rng.gamma(dimension, 1 / beta, (count, 1))
    )
    shift = np.array([1.0, 0.0, 0.0])

    def loss(output: np.ndarray) -> np.ndarray:
        ratio = beta * (np.linalg.norm(output, axis=1) - np.linalg.norm(output - shift, axis=1))
        return np.log1p(q * np.expm1(ratio))

    drawn = rng.random((count, 1)) < q
    event = PoissonSampledDpEvent(q, KNormDpEvent(beta, dimension))
    pair = laws.step_pair(event, 1e-3)
    for law, losses in ((pair.remove, loss(noise + drawn * shift)), (pair.add, -loss(noise))):
        for eps in (0.0, 0.03, 0.1, 0.3):
            terms = np.maximum(0.0, -np.expm1(eps - losses))
            error = 5 * terms.std() / math.sqrt(count) + 1e-9
            assert terms.mean() - error <= delta_at(law, eps) <= terms.mean() * 1.001 + error


def test_releases_that_share_a_coin() -> None:
    inner = ComposedDpEvent([GaussianDpEvent(2.0), SelfComposedDpEvent(GaussianDpEvent(4.0), 2)])
    together, joint = (
        PoissonSampledDpEvent(0.2, event)
        for event in (inner, GaussianDpEvent((1 / 4 + 2 / 16) ** -0.5))
    )
    claim = epsilon(together, 9, 1e-5)
    assert claim == epsilon(joint, 9, 1e-5)
    assert library.library_epsilon([(together, 9)], 1e-5, claim) == pytest.approx(
        claim, rel=library.TOLERANCE / 2
    )
    assert np.array_equal(renyi_curve(together, (2.0, 8.0)), renyi_curve(joint, (2.0, 8.0)))
    pair = PoissonSampledDpEvent(0.2, SelfComposedDpEvent(LaplaceDpEvent(2.0), 2))
    apart = SelfComposedDpEvent(PoissonSampledDpEvent(0.2, LaplaceDpEvent(2.0)), 2)
    assert epsilon(pair, 20, 1e-5) > epsilon(apart, 20, 1e-5)
    # two Laplace releases on one coin, in the open: the loss of the pair, then the mixture
    step = laws.step_pair(LaplaceDpEvent(2.0), 1e-3)
    twice = pld.compose_exactly([(step.remove, 2)])
    without = twice.masses * np.exp(-twice.losses)
    loss = np.log1p(0.2 * np.expm1(twice.losses))
    exact = float((0.8 * without + 0.2 * twice.masses) @ np.maximum(0, -np.expm1(0.05 - loss)))
    atoms = laws.step_pair(elementary(pair)[0][0], 1e-3)
    assert delta_at(atoms.remove, 0.05) == pytest.approx(exact, rel=1e-3)


def test_events_are_flattened_and_joined() -> None:
    gauss, laplace = GaussianDpEvent(2.0), LaplaceDpEvent(3.0)
    event = ComposedDpEvent(
        [
            laplace,
            SelfComposedDpEvent(ComposedDpEvent([gauss, laplace]), 4),
            dp_accounting.NoOpDpEvent(),
            gauss,
        ]
    )
    assert dict(elementary(event)) == {laplace: 5, GaussianDpEvent((5 / 4) ** -0.5): 1}
    assert elementary(dp_accounting.NoOpDpEvent()) == ()
    assert elementary(SelfComposedDpEvent(gauss, 0)) == ()
    assert elementary(PoissonSampledDpEvent(0.0, gauss)) == ()
    assert elementary(PoissonSampledDpEvent(1.0, gauss)) == elementary(gauss)
    nested = epsilon(ComposedDpEvent((SelfComposedDpEvent(event, 2),)), 1, 1e-5)
    assert epsilon(event, 2, 1e-5) == pytest.approx(nested, rel=1e-9)


def test_nothing_released_costs_nothing_and_no_noise_costs_everything() -> None:
    def cost(event: dp_accounting.DpEvent) -> float:
        return epsilon(event, 3, 1e-5)

    assert cost(dp_accounting.NoOpDpEvent()) == 0.0
    gauss = GaussianDpEvent(2.0)
    assert cost(ComposedDpEvent([gauss, dp_accounting.NoOpDpEvent()])) == cost(gauss)
    for event in (
        dp_accounting.NonPrivateDpEvent(),
        GaussianDpEvent(0.0),
        LaplaceDpEvent(0.0),
        ComposedDpEvent([gauss, dp_accounting.NonPrivateDpEvent()]),
        PoissonSampledDpEvent(0.1, dp_accounting.NonPrivateDpEvent()),
    ):
        assert cost(event) == math.inf


def test_renyi_accounting_of_mixed_steps_is_above_pld() -> None:
    event = ComposedDpEvent([GaussianDpEvent(5.0), LaplaceDpEvent(4.0), KNormDpEvent(0.5, 30)])
    tight, loose = epsilon(event, 10, 1e-5), renyi_epsilon(event, 10, 1e-5)
    assert tight < loose < 1.2 * tight
    sampled = PoissonSampledDpEvent(0.1, KNormDpEvent(1.0, 10))
    assert epsilon(sampled, 100, 1e-5) < renyi_epsilon(sampled, 100, 1e-5)
    orders = (2.0, 8.0)
    np.testing.assert_allclose(
        renyi_curve(event, orders),
        sum(renyi_curve(part, orders) for part in event.events),
    )
    np.testing.assert_allclose(renyi_curve(GaussianDpEvent(5.0), orders), np.array(orders) / 50)


def test_what_no_accountant_covers_is_refused_by_name() -> None:
    fixed = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, GaussianDpEvent(2.0))
    with pytest.raises(PrivacyError, match=r"does not support SampledWithoutReplacement"):
        epsilon(ComposedDpEvent([GaussianDpEvent(2.0), fixed]), 1, 1e-5)
    with pytest.raises(PrivacyError, match="does not support SampledWithoutReplacement"):
        epsilon(PoissonSampledDpEvent(0.1, fixed), 1, 1e-5)
    with pytest.raises(PrivacyError, match="does not support Unsupported"):
        renyi_curve(dp_accounting.UnsupportedDpEvent(), (2.0,))
    with pytest.raises(PrivacyError, match="at least 0"):
        epsilon(GaussianDpEvent(-1.0), 1, 1e-5)
    with pytest.raises(PrivacyError, match="sampling probability"):
        epsilon(PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)), 1, 1e-5)
    with pytest.raises(PrivacyError, match="not a dp_accounting event"):
        epsilon("gaussian", 1, 1e-5)


# L2-Laplace noise: its loss against simulated noise vectors, the Laplace mechanism and integrals


DIMENSIONS = [
    (2, 1.0),
    (3, 2.0),
    (4, 0.1),
    (10, 0.1),
    (10, 20.0),
    (100, 5.0),
    (465, 0.5),
    (5000, 2.0),
]


def losses(beta: float, dimension: int, count: int, seed: int) -> np.ndarray:
    """The loss from radius and angle alone, as the module's docstring has it."""
    rng = np.random.default_rng(seed)
    radius = rng.gamma(dimension, 1 / beta, count)
    if dimension == 1:
        cosine = rng.choice([-1.0, 1.0], count)
    else:
        cosine = 2 * rng.beta((dimension - 1) / 2, (dimension - 1) / 2, count) - 1
    return beta * (np.sqrt(radius**2 + 2 * radius * cosine + 1) - radius)


@pytest.mark.parametrize(("dimension", "beta"), DIMENSIONS)
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
    assert value.masses @ np.exp(-value.losses) == pytest.approx(
        1, abs=1e-12
    )  # nothing is lost under Q


@pytest.mark.parametrize(("dimension", "beta"), [(2, 1.0), (7, 3.0)])
def test_the_loss_of_noise_vectors_themselves(dimension: int, beta: float) -> None:
    sample = l2_laplace_losses(beta, dimension, 200_000, seed=1)
    assert stats.ks_2samp(sample, losses(beta, dimension, 200_000, 2)).pvalue > 1e-4


def test_tails_against_the_exact_integral() -> None:
    """P(loss <= l) = E F(x - (1 - x^2) / (2 r)), F the law of the cosine, x = l / beta: far into both tails."""
    dimension, beta = 10, 4.0
    value = loss_law(beta, dimension, 0.001)
    cumulative = np.cumsum(value.masses)
    for x in (-0.97, -0.9, 0.0, 0.5):

        def integrand(r: float, x: float = x) -> float:
            cosine = x - (1 - x * x) / (2 * r)
            return float(
                stats.beta.cdf((cosine + 1) / 2, 4.5, 4.5)
                * stats.gamma.pdf(r, dimension, scale=1 / beta)
            )

        exact = integrate.quad(integrand, 0, 40, epsabs=1e-16, epsrel=1e-10, limit=500)[0]
        index = round(x * beta / value.width) - value.first
        assert 0.5 * (cumulative[index - 1] + cumulative[index]) == pytest.approx(exact, rel=2e-3)


def test_one_coordinate_is_the_laplace_mechanism() -> None:
    for e, uses in ((0.1, 100), (1.0, 10), (3.0, 2)):
        exact = library_epsilon(LaplaceDpEvent(1 / e), uses, 1e-5, width=1e-4)
        value = epsilon(KNormDpEvent(e, 1), uses, 1e-5)
        assert value == epsilon(LaplaceDpEvent(1 / e), uses, 1e-5)
        sampled = [
            PoissonSampledDpEvent(0.1, event)
            for event in (LaplaceDpEvent(1 / e), KNormDpEvent(e, 1))
        ]
        assert epsilon(sampled[0], uses, 1e-5) == epsilon(sampled[1], uses, 1e-5)
        assert exact * (1 - 1e-4) <= value <= exact * (1 + 1.1e-3)


@pytest.mark.parametrize(
    ("dimension", "beta", "uses"), [(1, 0.3, 20), (2, 0.5, 20), (10, 1.0, 10), (100, 3.0, 8)]
)
def test_simulated_compositions_confirm_the_bound_from_below(
    dimension: int, beta: float, uses: int
) -> None:
    total = losses(beta, dimension, 100_000 * uses, 9).reshape(uses, -1).sum(axis=0)
    for delta in (1e-2, 1e-3):
        eps = epsilon(KNormDpEvent(beta, dimension), uses, delta)
        terms = np.maximum(0.0, -np.expm1(eps - total))
        error = terms.std() / math.sqrt(terms.size)
        assert terms.mean() - 5 * error <= delta <= 1.02 * terms.mean() + 5 * error
        # a claim of 5% less would be refuted
        assert np.maximum(0.0, -np.expm1(0.95 * eps - total)).mean() - 5 * error > delta


def test_monotone_in_dimension_epsilon_uses_and_delta() -> None:
    by_dimension = [
        epsilon(KNormDpEvent(0.5, d), 30, 1e-6)
        for d in (1, 2, 3, 5, 20, 21, 465, 5000, 100_000, 10**7)
    ]
    assert by_dimension == sorted(by_dimension, reverse=True)
    by_epsilon = [
        epsilon(KNormDpEvent(e, 12), 30, 1e-6) for e in (1e-6, 1e-3, 0.1, 1.0, 30.0, 1e3, 1e5)
    ]
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
    for order, z in (
        (-0.5, 2.0),
        (0.0, 0.3),
        (0.5, 2.0),
        (4.0, 0.05),
        (49.0, 0.05),
        (120.5, 500.0),
        (231.5, 90.0),
    ):
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
        event.epsilon = 1.0
    assert dp_accounting.DpEvent.from_named_tuple(event.to_named_tuple()) == event
    for bad in ((0.0, 3), (-1.0, 3), (math.nan, 3), (1.0, 0), (1.0, 2.5)):
        with pytest.raises(ConfigError, match="KNormDpEvent"):
            KNormDpEvent(*bad)
