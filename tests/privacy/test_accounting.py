"""Composition against the libraries' own figures, closed forms and exact integrals."""

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant

from fedmtl.errors import ConfigError
from fedmtl.privacy import (
    ClientPrivacy,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
    epsilon,
    open_channel,
)
from fedmtl.privacy.accounting import composition
from fedmtl.privacy.accounting.composition import renyi_curve
from fedmtl.privacy.accounting.multipliers import smallest_multiplier
from fedmtl.privacy.cost import PrivacyCost
from tests.helpers import gaussian_epsilon, price_of

Gaussian, Poisson = dp_accounting.GaussianDpEvent, dp_accounting.PoissonSampledDpEvent


POISSON_TABLE = [
    (1 / 3400, (2.086, 1.299, 0.903, 0.682)),
    (1e-5, (2.624, 1.549, 1.025, 0.753)),
]


@pytest.mark.parametrize(("delta", "expected"), POISSON_TABLE)
def test_poisson_table(delta: float, expected: tuple[float, ...]) -> None:
    sampler = PoissonSampling(100).bind(3400)
    for target, std in zip((1.0, 2.0, 4.0, 8.0), expected, strict=True):
        z = price_of(sampler, delta).multiplier(target, 500)
        assert z == pytest.approx(std, rel=3e-3)


def test_opacus_prv_agrees_within_one_percent() -> None:
    from opacus.accountants import PRVAccountant

    for z, delta in ((2.624, 1e-5), (1.025, 1e-5), (0.903, 1 / 3400)):
        prv = PRVAccountant()
        prv.history = [(z, 100 / 3400, 500)]
        other = prv.get_epsilon(delta=delta, eps_error=0.005)
        assert epsilon(Poisson(100 / 3400, Gaussian(z)), 500, delta) == pytest.approx(
            other, rel=0.01
        )


@pytest.mark.parametrize(("q", "z"), [(0.02, 1.1), (0.3, 4.0), (1.0, 2.0)])
def test_opacus_renyi_divergences_are_ours_at_equal_orders(q: float, z: float) -> None:
    """Equal at whole orders; between them the library interpolates, from above."""
    from opacus.accountants.analysis import rdp

    whole, broken = (2.0, 5.0, 8.0, 32.0, 64.0), (1.5, 5.5)
    event = Poisson(q, Gaussian(z))
    theirs = [
        rdp.compute_rdp(q=q, noise_multiplier=z, steps=1, orders=orders)
        for orders in (whole, broken)
    ]
    np.testing.assert_allclose(renyi_curve(event, whole), theirs[0], rtol=1e-9)
    assert np.all(renyi_curve(event, broken) >= theirs[1] * (1 - 1e-9))


@pytest.mark.parametrize(
    ("z", "uses", "delta"), [(4.0, 1, 1e-5), (20.0, 100, 1e-6), (1.0, 3, 1e-5), (300.0, 7, 1e-7)]
)
def test_gaussian_composition_is_the_closed_form(z: float, uses: int, delta: float) -> None:
    exact = gaussian_epsilon(math.sqrt(uses) / z, delta)
    value = epsilon(Gaussian(z), uses, delta)
    assert exact <= value * (1 + 1e-9)
    assert value == pytest.approx(exact, rel=2e-3)


def test_a_coarser_grid_is_an_upper_bound() -> None:
    event = Poisson(0.03, Gaussian(1.0))
    values = [epsilon(event, 500, 1e-5, coarsen=coarsen) for coarsen in (0.5, 1.0, 4.0, 16.0)]
    assert values == sorted(values)


def test_pld_is_below_the_library_s_rdp_and_monotone() -> None:
    event = Poisson(0.05, Gaussian(1.1))
    by_rounds = [epsilon(event, uses, 1e-5) for uses in range(0, 400, 7)]
    assert by_rounds[0] == 0.0
    assert by_rounds == sorted(by_rounds)
    by_q = [epsilon(Poisson(q, Gaussian(1.1)), 100, 1e-5) for q in (0.01, 0.03, 0.1, 0.3, 0.9)]
    assert by_q == sorted(by_q)
    by_z = [epsilon(Poisson(0.05, Gaussian(z)), 100, 1e-5) for z in (4.0, 2.0, 1.0, 0.7, 0.5)]
    assert by_z == sorted(by_z)
    for uses in (1, 30, 300):
        assert epsilon(event, uses, 1e-5) <= RdpAccountant().compose(event, uses).get_epsilon(1e-5)


def test_the_affordable_uses_are_all_that_fit() -> None:
    cost, event = price_of(PoissonSampling(10).bind(100), 1e-5), Poisson(0.1, Gaussian(1.5))
    most = cost.affordable(3.0, 1.5)
    assert epsilon(event, most, 1e-5) <= 3.0 < epsilon(event, most + 1, 1e-5)
    limits = (0, 1, most - 1, most, most + 9)
    assert [cost.affordable(3.0, 1.5, limit) for limit in limits] == [
        min(most, limit) for limit in limits
    ]
    assert cost.affordable(1e-3, 1.5) == 0


# Exact two-step hockey-stick divergences on a grid: the arguments of the samplers' docstring, in numbers.

Q, SIGMA, EPS = 0.3, 1.2, 0.8
Y = np.linspace(-12, 13, 1001)
CELL = (Y[1] - Y[0]) ** 2


def density(mean: float | np.ndarray) -> np.ndarray:
    return np.exp(-((Y - mean) ** 2) / (2 * SIGMA**2)) / (SIGMA * math.sqrt(2 * math.pi))


def hockey_stick(p: np.ndarray, q: np.ndarray) -> float:
    return float(
        max(np.maximum(p - math.exp(EPS) * q, 0).sum(), np.maximum(q - math.exp(EPS) * p, 0).sum())
        * CELL
    )


def composed_delta(multiplier: float, uses: int) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    step = pld.from_gaussian_mechanism(
        multiplier, sampling_prob=Q, value_discretization_interval=1e-3
    )
    return float(step.self_compose(uses).get_delta_for_epsilon(EPS))


STATEFUL = {
    "constant": lambda b, y: np.ones_like(y),
    "only after a participation": lambda b, y: np.full_like(y, float(b)),
    "only before one": lambda b, y: np.full_like(y, 1.0 - b),
    "opposite sign after one": lambda b, y: np.full_like(y, 1.0 - 2 * b),
    "follows the broadcast": lambda b, y: np.where(y > 0.5, 1.0, -1.0) * (1 if b else -1),
    "echoes its own first message": lambda b, y: np.clip(y - 0.5 + b, -1, 1),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_clients_cost_no_more_under_poisson_sampling(name: str) -> None:
    """y1 and y2 of a client whose second message depends on its own first coin and on y1; C = 1."""
    message = STATEFUL[name]
    joint = np.zeros((Y.size, Y.size))
    for b, weight in ((0, 1 - Q), (1, Q)):
        second = (1 - Q) * density(0.0)[None, :] + Q * np.stack([density(g) for g in message(b, Y)])
        joint += weight * density(float(b))[:, None] * second
    without = density(0.0)[:, None] * density(0.0)[None, :]
    delta, bound = hockey_stick(joint, without), composed_delta(SIGMA, 2)
    assert delta <= bound * (1 + 1e-5)
    if name == "constant":
        assert delta == pytest.approx(bound, rel=1e-2)


# From epsilon to noise and back


def cost(mechanism: str, size: int, delta: float, sampled: float = 1.0) -> PrivacyCost:
    return PrivacyCost(law=mechanism, sizes=(size,), delta=delta, sampled=sampled)


@pytest.mark.parametrize(
    ("cost", "target", "uses"),
    [
        (price_of(PoissonSampling(100).bind(1000), 1e-5), 4.0, 100),
        (price_of(PoissonSampling(20).bind(200), 1e-5), 0.1, 1000),
        (price_of(PoissonSampling(1).bind(10**6), 1e-7), 8.0, 10),
        (price_of(PoissonSampling(10).bind(10), 1e-5), 3.0, 20),
        (price_of(PoissonSampling(100).bind(1000), 1e-5, releases=3), 4.0, 100),
        (price_of(FullParticipation().bind(5), 1e-5), 2.0, 12),
        (price_of(FixedCohort(10).bind(100), 1e-5, releases=2), 2.0, 3),
        *(
            (cost(*law[:2], delta, *law[2:]), target, uses)
            for law in (("laplace", 1), ("l2_laplace", 465), ("l2_laplace", 20, 0.2))
            for target, delta, uses in ((1.0, 1e-5, 50), (6.0, 1e-3, 1), (0.05, 1e-9, 400))
        ),
    ],
)
def test_the_target_is_met_and_nothing_is_wasted(
    cost: PrivacyCost, target: float, uses: int
) -> None:
    z = cost.multiplier(target, uses)
    assert cost.epsilon(uses, z) <= target
    assert cost.epsilon(uses, z * (1 - 1e-4)) > target


def test_an_unreachable_target_is_refused() -> None:
    sampler = FullParticipation().bind(5)
    with pytest.raises(ConfigError, match="cannot be reached"):
        price_of(sampler, 1e-12).multiplier(1e-7, 10**6)


def test_calibration_takes_few_evaluations() -> None:
    sampler = PoissonSampling(100).bind(1003)
    cost = price_of(sampler, 1e-5)
    before = composition._epsilon.cache_info().misses
    z = cost.multiplier(4.0, 100)
    assert composition._epsilon.cache_info().misses - before <= 30
    before = composition._epsilon.cache_info().misses
    assert replace(cost).multiplier(4.0, 100) == z
    assert composition._epsilon.cache_info().misses == before


def test_a_target_that_needs_no_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs no noise"):
        smallest_multiplier(lambda z, coarsen: 0.0, target=1.0, delta=1e-5, uses="3 steps")


@pytest.mark.parametrize("multiplier", [1e-100, 1e100])
def test_the_least_and_the_most_noise(multiplier: float) -> None:
    plan = ReleasePlan(name="update", dimension=5)
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=multiplier, delta=1e-5)
    channel = open_channel(privacy, [plan], FullParticipation().bind(3), seed=0, steps=2)
    channel.begin(0, channel.draw(0))
    value = channel.release("update", torch.zeros(3, 5), torch.arange(3))
    assert bool(torch.isfinite(value).all())
    assert channel.epsilon < 1e-18 if multiplier > 1 else channel.epsilon > 1e100
