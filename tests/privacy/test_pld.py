"""Loss laws on a grid against direct sums, and against the library at the same grid."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_pmf
from scipy import optimize, stats

from fedmtl.privacy.accounting import composition, pld
from fedmtl.privacy.accounting.composition import epsilon
from fedmtl.privacy.accounting.knorm import KNormDpEvent
from fedmtl.privacy.accounting.loss_laws import PureDpEvent
from fedmtl.privacy.accounting.pld import LossLaw, LossPair
from fedmtl.privacy.accounting.subsampling import sampled_atoms
from tests.helpers import delta_at

H = 0.05


def law(size: int, first: int, infinity: float = 0.0) -> LossLaw:
    """The same of the same arguments, whichever tests ran before."""
    masses = np.random.default_rng([3, size, abs(first)]).random(size) ** 4
    return LossLaw(H, first, masses / masses.sum() * (1 - infinity), infinity)


def slow_delta(value: LossLaw, eps: float) -> float:
    finite = sum(
        m * (1 - math.exp(eps - loss))
        for m, loss in zip(value.masses, value.losses, strict=True)
        if loss > eps
    )
    return value.infinity + finite


def test_composition_is_the_direct_sum_of_losses() -> None:
    a, b = law(40, -17, 1e-9), law(25, 3, 1e-8)
    direct = np.ones(1)
    for masses in (a.masses, a.masses, a.masses, b.masses, b.masses):
        direct = np.convolve(direct, masses)
    infinity = 1 - (1 - 1e-9) ** 3 * (1 - 1e-8) ** 2
    for composed in (pld.compose([(a, 3), (b, 2)]), pld.compose_exactly([(a, 3), (b, 2)])):
        assert composed.first == 3 * -17 + 2 * 3
        np.testing.assert_allclose(composed.masses, direct, atol=1e-15)
        assert composed.infinity == pytest.approx(infinity, rel=1e-6)


@pytest.mark.parametrize(("size", "times"), [(600, 300), (40, 20_000)])
def test_a_long_composition_agrees_with_the_library(size: int, times: int) -> None:
    """Both give up a tail of 1e-15; here the window is far shorter than the full range of losses."""
    value = law(size, -size // 2)
    centred = LossLaw(H / 100, value.first, value.masses)
    library = pld_pmf.DensePLDPmf(H / 100, value.first, value.masses, 0.0, True).self_compose(times)
    composed = pld.compose([(centred, times)])
    assert composed.masses.size < size * times / 3
    assert pld.compose([(centred, times)], 1e-9).infinity == pytest.approx(
        1e-9
    )  # the tail given up
    centre = float(composed.losses @ composed.masses)
    for eps in (centre - 1, centre, centre + 1, centre + 3):
        assert delta_at(composed, eps) == pytest.approx(
            library.get_delta_for_epsilon(eps), rel=1e-8, abs=1e-12
        )


def test_the_window_loses_no_more_than_its_tail() -> None:
    """The mass outside, known exactly for a binomial, is at most what is added at infinity."""
    times, probability = 20_000, 0.3
    for tail in (1e-15, 1e-6):
        low, high, _ = pld._window(
            [(LossLaw(H, 0, np.array([1 - probability, probability])), times)], tail
        )
        outside = stats.binom.cdf(low - 1, times, probability) + stats.binom.sf(
            high, times, probability
        )
        assert 0 < outside <= tail
        assert high - low < times / 10


def test_delta_and_epsilon_invert_each_other() -> None:
    value = law(80, -30, 1e-7)
    for eps in (0.0, 0.02, H, 0.33, 1.7, 2.4):
        delta = delta_at(value, eps)
        assert delta == pytest.approx(slow_delta(value, eps), rel=1e-12)
        assert pld.epsilon_at(value, delta) == pytest.approx(eps, abs=1e-9)
    for delta in (0.1, 1e-3, 2e-7):
        root = optimize.brentq(lambda e, d=delta: slow_delta(value, e) - d, 0, 5)
        assert pld.epsilon_at(value, delta) == pytest.approx(root, abs=1e-9)
    assert pld.epsilon_at(value, 0.99) == 0.0
    assert pld.epsilon_at(value, 5e-8) == math.inf
    assert pld.epsilon_at(law(5, -30), 1e-9) == 0.0
    assert pld.epsilon_at(LossLaw(H, 4, np.ones(1)), 1 - math.exp(-0.1)) == pytest.approx(0.1)
    high = law(12, 10**6, 1e-7)
    for eps in (1e6 * H - 0.3, 1e6 * H + 0.23):
        assert pld.epsilon_at(high, delta_at(high, eps)) == pytest.approx(eps, abs=1e-9)
    assert pld.epsilon_at(high, 1.0) == 0.0
    rounded = LossLaw(H, 10**6, np.array([0.7, 0.3 + 2.0**-52]))
    assert rounded.masses.sum() > 1.0  # as a sum of masses may round
    assert pld.epsilon_at(rounded, 1.0) == 0.0


def test_placing_atoms_keeps_the_probabilities_of_both_hypotheses_and_dominates() -> None:
    rng = np.random.default_rng(3)
    losses, masses = rng.normal(size=200), rng.random(200)
    masses /= masses.sum()
    placed = pld.on_grid(losses, masses, H, 1e-6)
    assert placed.masses.sum() == pytest.approx(masses.sum(), rel=1e-13)
    assert placed.masses @ np.exp(-placed.losses) == pytest.approx(
        masses @ np.exp(-losses), rel=1e-12
    )
    exact = [
        float(masses @ np.maximum(0, -np.expm1(eps - losses))) + 1e-6
        for eps in np.linspace(-2, 2, 81)
    ]
    bounds = [delta_at(placed, eps) for eps in np.linspace(-2, 2, 81)]
    assert all(b >= e * (1 - 1e-12) for b, e in zip(bounds, exact, strict=True))
    assert max(b - e for b, e in zip(bounds, exact, strict=True)) < H / 4


def test_sampling_a_discrete_mechanism_is_its_mixture() -> None:
    """P and Q on four outcomes; one outcome only Q has, one only P has."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.5, 0.0, 0.3])
    remove = pld.on_grid(np.log(p[:2] / q[:2]), p[:2], 1e-4, 0.2)
    add = pld.on_grid(np.log(q[:2] / p[:2]), q[:2], 1e-4, 0.3)
    rate = 0.4
    mixed = (1 - rate) * q + rate * p
    down, up = (
        pld.on_grid(*atoms[:2], 1e-4, atoms[2])
        for atoms in sampled_atoms(LossPair(remove, add), rate)
    )
    for eps in (-0.6, -0.4, 0.0, 0.1, 0.4):  # the first one below log(1 - q)
        exact = np.maximum(mixed - math.exp(eps) * q, 0).sum()
        assert delta_at(down, eps) == pytest.approx(exact, abs=1e-4)
        exact = np.maximum(q - math.exp(eps) * mixed, 0).sum()
        assert delta_at(up, eps) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("rate", [0.5, 0.01])
def test_sampled_laplace_noise_of_any_size_has_its_closed_form(rate: float) -> None:
    """H_a(P, Q) = 1 - sqrt(a exp(-1 / z)) of one release; sampling makes it q H_a' with a' = 1 + (a - 1) / q."""
    for multiplier in (1.0, 1e3, 1e8, 1e10, 1e100):
        delta = rate / (8 * multiplier)
        exact = math.log1p(rate * math.expm1(1 / multiplier + 2 * math.log1p(-delta / rate)))
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.LaplaceDpEvent(multiplier))
        value = epsilon(event, 1, delta)
        assert exact <= value <= 1.03 * exact
        assert epsilon(event, 1000, 1e-5) <= 1000 * rate * math.expm1(1 / multiplier) * 1.001


@pytest.mark.parametrize("multiplier", [1e8, 1e10, 1e100])
def test_sampled_l2_laplace_noise_of_any_size_has_its_limit(multiplier: float) -> None:
    """Its losses fall as 1 / z, and so does the epsilon at a delta that falls as 1 / z."""

    def scaled(z: float) -> float:
        event = dp_event.PoissonSampledDpEvent(0.5, KNormDpEvent(1 / z, 40))
        return z * epsilon(event, 1, 0.01 / z)

    event = dp_event.PoissonSampledDpEvent(0.5, KNormDpEvent(1 / multiplier, 40))
    assert epsilon(event, 1000, 1e-5) <= 500 / multiplier * 1.001
    if multiplier < 1e20:  # else delta is below the mass that is counted at infinity
        assert 0.05 < scaled(multiplier) == pytest.approx(scaled(1e4), rel=1e-2)


def test_renyi_divergence_of_a_discrete_law() -> None:
    value = law(30, -10, 0.01)
    for order in (1.5, 4.0, 60.0):
        direct = math.log(
            sum(
                m * math.exp((order - 1) * x)
                for m, x in zip(value.masses, value.losses, strict=True)
            )
            + 0.01 * math.exp((order - 1) * 3.0)
        ) / (order - 1)
        assert pld.renyi(value, np.array([order]), 3.0)[0] == pytest.approx(direct, rel=1e-12)


def test_losses_beyond_float64_are_rounded_up() -> None:
    """exp(800) is no double; a law whose whole mass lies at a loss just below 800.1 must not sink to 800."""
    value = pld.from_cells(0.1, 8000, np.array([0.75]), np.array([0.0]), below=0.25)
    assert value.masses @ (value.losses > 800.05) == pytest.approx(0.75)


@pytest.mark.parametrize("loss", [10.0, 1400.0, 1500.0, 1e5])
def test_a_pure_loss_of_any_size_composes_to_its_multiples(loss: float) -> None:
    for uses in (1, 3):
        assert epsilon(PureDpEvent(loss), uses, 1e-5) == pytest.approx(uses * loss, rel=1e-6)


def test_the_worse_of_both_directions_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit removed, or one added: whichever has the larger losses."""
    event = dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(1.37))
    small, large = law(40, -20), law(40, 10)
    for pair in (LossPair(small, large), LossPair(large, small)):
        monkeypatch.setattr(composition, "_loss_pairs", lambda *_, pair=pair: [(pair, 1)])
        value = composition._pld_epsilon(((event, 1),), 1, 1e-3, 1.0)
        assert value == pytest.approx(pld.epsilon_at(large, 1e-3), rel=1e-6)
        assert value > 2 * pld.epsilon_at(small, 1e-3)
