"""Epsilon against two other accountants: an oracle from below, itself tested against closed forms, simulations and
published numbers, and dp-accounting."""

import math
from collections import Counter

import numpy as np
import pytest
from dp_accounting import dp_event
from scipy import special

from fedmtl.privacy.accounting.composition import epsilon
from fedmtl.privacy.accounting.knorm import KNormDpEvent
from fedmtl.privacy.accounting.library import TOLERANCE, library_epsilon
from fedmtl.privacy.accounting.loss_laws import ReplacedPoissonDpEvent
from tests.helpers import gaussian_epsilon, l2_laplace_losses
from tests.oracles.accountant import least_epsilon

Gauss, Laplace, Poisson = (
    dp_event.GaussianDpEvent,
    dp_event.LaplaceDpEvent,
    dp_event.PoissonSampledDpEvent,
)


@pytest.mark.parametrize(
    ("sigma", "uses", "delta"), [(2.0, 1, 1e-5), (4.0, 16, 1e-6), (9.0, 50, 1e-3)]
)
def test_gaussian_releases_are_just_below_the_closed_form(
    sigma: float, uses: int, delta: float
) -> None:
    exact = gaussian_epsilon(math.sqrt(uses) / sigma, delta)
    least = least_epsilon([(Gauss(sigma), uses)], delta, exact)
    assert 0.99 * exact < least <= exact


@pytest.mark.parametrize(("noise", "budget"), [(2.086, 1.0), (0.682, 8.0)])
def test_sampled_gaussian_releases_of_published_figures(noise: float, budget: float) -> None:
    """3,400 clients, cohorts of 100, 500 rounds at delta = 1 / 3400."""
    least = least_epsilon([(Poisson(100 / 3400, Gauss(noise)), 500)], 1 / 3400, budget)
    assert 0.98 * budget < least < 1.001 * budget


@pytest.mark.parametrize(
    ("beta", "dimension", "uses", "delta"), [(1.0, 3, 1, 1e-2), (0.5, 20, 8, 1e-2)]
)
def test_the_k_norm_mechanism_against_a_simulation(
    beta: float, dimension: int, uses: int, delta: float
) -> None:
    trials = 400_000
    loss = sum(l2_laplace_losses(beta, dimension, trials, seed=use) for use in range(uses))
    least = least_epsilon([(KNormDpEvent(beta, dimension), uses)], delta, 1.0)
    simulated = np.maximum(0.0, 1 - np.exp(least - loss))
    # the delta at this epsilon is at least what was asked for, and not much more
    assert simulated.mean() + 5 * simulated.std() / math.sqrt(trials) > delta
    assert simulated.mean() - 5 * simulated.std() / math.sqrt(trials) < 1.1 * delta


@pytest.mark.parametrize("noise", [Gauss(1.5), Laplace(1.5), KNormDpEvent(0.7, 5)])
def test_a_record_replaced_in_a_subsample_against_a_simulation(noise) -> None:
    q, delta, trials = 0.3, 5e-3, 400_000
    coins = np.random.default_rng(2)
    if isinstance(noise, KNormDpEvent):
        x = coins.standard_normal((trials, noise.dimension))
        x *= (coins.gamma(noise.dimension, 1 / noise.epsilon, trials) / np.linalg.norm(x, axis=1))[
            :, None
        ]
    else:
        draw = coins.standard_normal if isinstance(noise, Gauss) else coins.laplace
        x = noise.noise_multiplier * draw(size=(trials, 1))

    def density(centre: float, at: np.ndarray) -> np.ndarray:
        moved = at.copy()
        moved[:, 0] -= centre
        length = np.linalg.norm(moved, axis=1)
        if isinstance(noise, Gauss):
            return np.exp(-(length**2) / 2 / noise.noise_multiplier**2)
        return np.exp(
            -length
            * (noise.epsilon if isinstance(noise, KNormDpEvent) else 1 / noise.noise_multiplier)
        )

    x[:, 0] += 0.5 * (coins.random(trials) < q)
    with_record = (1 - q) * density(0.0, x) + q * density(0.5, x)
    other = (1 - q) * density(0.0, x) + q * density(-0.5, x)
    least = least_epsilon([(ReplacedPoissonDpEvent(q, noise), 1)], delta, 0.3)
    assert least > 0
    shares = np.maximum(0.0, 1 - np.exp(least) * other / with_record)
    assert shares.mean() + 5 * shares.std() / math.sqrt(trials) > delta
    assert shares.mean() - 5 * shares.std() / math.sqrt(trials) < 1.1 * delta
    assert least <= epsilon(ReplacedPoissonDpEvent(q, noise), 1, delta)


LAWS = {
    "gaussian": Gauss(3.0),
    "sampled gaussian": Poisson(0.2, Gauss(1.1)),
    "laplace": Laplace(5.0),
    "sampled laplace": Poisson(0.2, Laplace(2.0)),
    "k-norm": KNormDpEvent(0.4, 12),
    "sampled k-norm": Poisson(0.2, KNormDpEvent(0.6, 12)),
    "replaced gaussian": ReplacedPoissonDpEvent(0.4, Gauss(2.0)),
    "replaced laplace": ReplacedPoissonDpEvent(0.4, Laplace(3.0)),
    "replaced k-norm": ReplacedPoissonDpEvent(0.4, KNormDpEvent(0.6, 12)),
    "together": Poisson(0.2, dp_event.SelfComposedDpEvent(Gauss(2.0), 2)),
    "mixed": dp_event.ComposedDpEvent([Laplace(8.0), KNormDpEvent(0.1, 12), Gauss(12.0)]),
}


@pytest.mark.parametrize("name", LAWS)
def test_epsilon_of_every_law_is_just_above_the_oracle(name: str) -> None:
    event, uses, delta = LAWS[name], 12, 1e-4
    claim = epsilon(event, uses, delta)
    least = least_epsilon([(event, uses)], delta, claim)
    assert 0.9 * claim < least <= claim * (1 + 1e-5)  # that of a replaced record is not tight


@pytest.mark.parametrize("uses", [100, 10_000, 100_000])
def test_dp_accounting_agrees_over_many_uses(uses: int) -> None:
    for event in (Poisson(0.01, Gauss(2.0)), Laplace(4 * math.sqrt(uses))):
        claim = epsilon(event, uses, 1e-5)
        assert library_epsilon([(event, uses)], 1e-5, claim) == pytest.approx(
            claim, rel=TOLERANCE / 2
        )


def test_dp_accounting_says_what_it_lacks() -> None:
    for event in (KNormDpEvent(0.4, 12), ReplacedPoissonDpEvent(0.4, Gauss(2.0)), LAWS["mixed"]):
        assert library_epsilon([(event, 3)], 1e-4, 1.0) is None
    assert library_epsilon([(Gauss(0.01), 1)], 1e-4, 5000.0) is None
    assert library_epsilon([], 1e-4, 0.0) == 0.0
    assert library_epsilon([(Laplace(4.0), 3), (Laplace(2.0), 1)], 0.0, 1.0) == 1.25


def test_hundreds_of_different_laws_are_composed() -> None:
    multipliers = np.linspace(20.0, 60.0, 300)
    whole = epsilon(dp_event.ComposedDpEvent([Laplace(float(b)) for b in multipliers]), 1, 1e-5)
    noisier = Counter(np.ceil(multipliers).tolist())
    least = least_epsilon([(Laplace(b), count) for b, count in noisier.items()], 1e-5, whole)
    assert 0.9 * whole < least <= whole


@pytest.mark.parametrize("noise", [0.03, 0.025])
def test_epsilons_where_exponentials_overflow(noise: float) -> None:
    """The loss is N(1 / (2 z^2), 1 / z^2) and its 1 - delta quantile is above epsilon."""
    for event in (Gauss(noise), Poisson(0.5, Gauss(noise))):
        assert 600 <= epsilon(event, 1, 1e-5) <= 1 / (2 * noise**2) - special.ndtri(1e-5) / noise


@pytest.mark.parametrize(
    ("event", "uses", "near"),
    [
        (dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.3)), 300, 1e-3),
        (dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(0.2)), 60, 0.01),
    ],
)
def test_a_claim_far_below_is_refuted_on_a_coarse_grid(event, uses: int, near: float) -> None:
    """The grid that the claim asks for would take minutes; the figure of a coarser one is a lower bound."""
    bound = library_epsilon([(event, uses)], 1e-5, near)
    assert near < bound <= epsilon(event, uses, 1e-5) * (1 + 1e-6)


def test_more_uses_than_the_library_composes_in_a_minute_are_left_open() -> None:
    sampled = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.3))
    assert library_epsilon([(sampled, 10**9)], 1e-5, 4.0) is None
