"""Loss laws of the mechanisms against the library's and against simulated mixtures."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from fedmtl.errors import PrivacyError
from fedmtl.privacy import epsilon
from fedmtl.privacy.accounting import losses as laws
from fedmtl.privacy.accounting import pld
from fedmtl.privacy.accounting.composition import elementary, renyi_curve
from fedmtl.privacy.accounting.knorm import KNormDpEvent
from tests.helpers import delta_at, renyi_epsilon


def library_epsilon(event: dp_accounting.DpEvent, uses: int, delta: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=2e-4)
    accountant.compose(event, uses)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(
    ("event", "uses", "delta"),
    [
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
    assert epsilon(event, uses, delta) == pytest.approx(library_epsilon(event, uses, delta), rel=6e-4)


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.1), (0.5, 0.01), (3.0, 0.7), (2.0, 1.0), (0.2, 0.5)])
def test_the_gaussian_pair_dominates_closely(z: float, q: float) -> None:
    """Both directions against the closed form of the hockey-stick divergence of the mixture."""
    from scipy import stats

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
    from scipy import optimize, stats

    q, z, uses, delta = 1e-5, 0.5, 1000, 1e-9

    def single(eps: float) -> float:
        x = z * z * math.log((math.exp(eps) - 1 + q) / q) + 0.5
        return float(q * stats.norm.sf((x - 1) / z) - (math.exp(eps) - 1 + q) * stats.norm.sf(x / z))

    root = optimize.brentq(lambda eps: uses * single(eps) - delta, 0.1, 5)
    value = epsilon(PoissonSampledDpEvent(q, GaussianDpEvent(z)), uses, delta)
    assert value == pytest.approx(root, rel=5e-3)


@pytest.mark.parametrize("q", [0.05, 0.4])
def test_sampled_l2_laplace_noise_against_its_simulated_mixture(q: float) -> None:
    """Both directions; the loss under either hypothesis from noise vectors in three dimensions."""
    beta, dimension, count = 2.0, 3, 400_000
    rng = np.random.default_rng(0)
    direction = rng.standard_normal((count, dimension))
    noise = direction / np.linalg.norm(direction, axis=1, keepdims=True) * rng.gamma(dimension, 1 / beta, (count, 1))
    shift = np.array([1.0, 0.0, 0.0])

    def loss(output: np.ndarray) -> np.ndarray:
        ratio = beta * (np.linalg.norm(output, axis=1) - np.linalg.norm(output - shift, axis=1))
        return np.log1p(q * np.expm1(ratio))

    drawn = rng.random((count, 1)) < q
    event = PoissonSampledDpEvent(q, KNormDpEvent(beta, dimension))
    pair = laws.step_pair(event, 1e-3)
    assert pair is not None
    for law, losses in ((pair.remove, loss(noise + drawn * shift)), (pair.add, -loss(noise))):
        for eps in (0.0, 0.03, 0.1, 0.3):
            terms = np.maximum(0.0, -np.expm1(eps - losses))
            error = 5 * terms.std() / math.sqrt(count) + 1e-9
            assert terms.mean() - error <= delta_at(law, eps) <= terms.mean() * 1.001 + error


def test_tight_amplification_is_below_that_of_pure_epsilon() -> None:
    for dimension, e, q in ((1, 1.0, 0.1), (10, 1.0, 0.1), (100, 2.0, 0.3)):
        amplified = math.log1p(q * math.expm1(e))
        bound = epsilon(LaplaceDpEvent(1 / amplified), 50, 1e-6)
        value = epsilon(PoissonSampledDpEvent(q, KNormDpEvent(e, dimension)), 50, 1e-6)
        assert value < (0.75 if dimension > 1 else 1.0) * bound
        assert epsilon(PoissonSampledDpEvent(q, KNormDpEvent(e, dimension)), 1, 1e-9) <= amplified
    laplace = epsilon(PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)), 50, 1e-6)
    assert epsilon(PoissonSampledDpEvent(0.1, KNormDpEvent(1.0, 1)), 50, 1e-6) == laplace


def test_releases_that_share_a_coin() -> None:
    together = PoissonSampledDpEvent(0.2, ComposedDpEvent([GaussianDpEvent(2.0), GaussianDpEvent(3.0)]))
    joint = PoissonSampledDpEvent(0.2, GaussianDpEvent((1 / 4 + 1 / 9) ** -0.5))
    assert epsilon(together, 9, 1e-5) == epsilon(joint, 9, 1e-5)
    assert np.array_equal(renyi_curve(together, (2.0, 8.0)), renyi_curve(joint, (2.0, 8.0)))
    pair = PoissonSampledDpEvent(0.2, SelfComposedDpEvent(LaplaceDpEvent(2.0), 2))
    apart = SelfComposedDpEvent(PoissonSampledDpEvent(0.2, LaplaceDpEvent(2.0)), 2)
    assert epsilon(pair, 20, 1e-5) > epsilon(apart, 20, 1e-5)
    # two Laplace releases on one coin, in the open: the loss of the pair, then the mixture
    step = laws.step_pair(LaplaceDpEvent(2.0), 1e-3)
    assert step is not None
    twice = pld.compose_exactly([(step.remove, 2)])
    without = twice.masses * np.exp(-twice.losses)
    loss = np.log1p(0.2 * np.expm1(twice.losses))
    exact = float((0.8 * without + 0.2 * twice.masses) @ np.maximum(0, -np.expm1(0.05 - loss)))
    atoms = laws.step_pair(elementary(pair)[0][0], 1e-3)
    assert atoms is not None
    assert delta_at(atoms.remove, 0.05) == pytest.approx(exact, rel=1e-3)


def test_events_are_flattened_and_joined() -> None:
    gauss, laplace = GaussianDpEvent(2.0), LaplaceDpEvent(3.0)
    event = ComposedDpEvent(
        [laplace, SelfComposedDpEvent(ComposedDpEvent([gauss, laplace]), 4), dp_accounting.NoOpDpEvent(), gauss]
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
    with pytest.raises(PrivacyError, match="at least 0"):
        epsilon(GaussianDpEvent(-1.0), 1, 1e-5)
    with pytest.raises(PrivacyError, match="sampling probability"):
        epsilon(PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)), 1, 1e-5)
    with pytest.raises(PrivacyError, match="not a dp_accounting event"):
        epsilon("gaussian", 1, 1e-5)
