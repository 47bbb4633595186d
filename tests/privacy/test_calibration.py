"""From epsilon to noise and back."""

from dataclasses import replace

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant

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
from fedmtl.privacy.accounting.calibration import smallest_multiplier
from fedmtl.privacy.accounting.knorm import KNormDpEvent
from tests.helpers import price_of

CASES = [
    (PoissonSampling(100).bind(1000), 4.0, 1e-5, 100, 1),
    (PoissonSampling(20).bind(200), 0.1, 1e-5, 1000, 1),
    (PoissonSampling(1).bind(10**6), 8.0, 1e-7, 10, 1),
    (PoissonSampling(10).bind(10), 3.0, 1e-5, 20, 1),
    (PoissonSampling(100).bind(1000), 4.0, 1e-5, 100, 3),
    (FullParticipation().bind(5), 2.0, 1e-5, 12, 1),
    (FixedCohort(10).bind(100), 2.0, 1e-5, 3, 2),
]


@pytest.mark.parametrize(("sampler", "target", "delta", "uses", "releases"), CASES)
def test_the_target_is_met_and_nothing_is_wasted(sampler, target, delta, uses, releases) -> None:
    price = price_of(sampler, delta, releases=releases)
    z = price.multiplier(target, uses)
    assert price.epsilon(uses, z) <= target
    assert price.epsilon(uses, z * (1 - 1e-4)) > target


def test_the_library_confirms_the_main_case() -> None:
    sampler = PoissonSampling(100).bind(1000)
    z = price_of(sampler, 1e-5).multiplier(4.0, 100)
    library = PLDAccountant()
    library.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(z)), 100)
    assert library.get_epsilon(1e-5) == pytest.approx(4.0, rel=5e-4)


def test_noise_is_monotone_in_everything() -> None:
    def z(target: float = 2.0, delta: float = 1e-5, uses: int = 100, cohort: float = 50) -> float:
        return price_of(PoissonSampling(cohort).bind(1000), delta).multiplier(target, uses)

    by_epsilon = [z(target=value) for value in (0.5, 2.0, 8.0)]
    assert by_epsilon == sorted(by_epsilon, reverse=True)
    by_delta = [z(delta=value) for value in (1e-8, 1e-6, 1e-4)]
    assert by_delta == sorted(by_delta, reverse=True)
    by_uses = [z(uses=value) for value in (1, 10, 200)]
    assert by_uses == sorted(by_uses)
    by_cohort = [z(cohort=value) for value in (10, 50, 200)]
    assert by_cohort == sorted(by_cohort)


def test_an_unreachable_target_is_refused() -> None:
    sampler = FullParticipation().bind(5)
    with pytest.raises(ConfigError, match="cannot be reached"):
        price_of(sampler, 1e-12).multiplier(1e-7, 10**6)


def test_calibration_takes_few_evaluations() -> None:
    sampler = PoissonSampling(100).bind(1003)
    price = price_of(sampler, 1e-5)
    before = composition._epsilon.cache_info().misses
    z = price.multiplier(4.0, 100)
    assert composition._epsilon.cache_info().misses - before <= 30
    before = composition._epsilon.cache_info().misses
    assert replace(price).multiplier(4.0, 100) == z
    assert composition._epsilon.cache_info().misses == before


LAWS = {
    "laplace": lambda z: dp_accounting.LaplaceDpEvent(z),
    "k-norm": lambda z: KNormDpEvent(1 / z, 465),
    "sampled k-norm": lambda z: dp_accounting.PoissonSampledDpEvent(0.2, KNormDpEvent(1 / z, 20)),
    "gaussian and laplace": lambda z: dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(z), dp_accounting.LaplaceDpEvent(2 * z)]
    ),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("target", "delta", "uses"), [(1.0, 1e-5, 50), (6.0, 1e-3, 1), (0.05, 1e-9, 400)])
def test_any_law_is_calibrated(name: str, target: float, delta: float, uses: int) -> None:
    z = smallest_multiplier(
        lambda value, coarsen: epsilon(LAWS[name](value), uses, delta, coarsen=coarsen),
        target=target,
        delta=delta,
        what=f"{uses} steps",
    )
    assert epsilon(LAWS[name](z), uses, delta) <= target
    assert epsilon(LAWS[name](z * (1 - 1e-4)), uses, delta) > target


def test_a_target_that_needs_no_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs no noise"):
        smallest_multiplier(lambda z, coarsen: 0.0, target=1.0, delta=1e-5, what="3 steps")


@pytest.mark.parametrize("multiplier", [1e-100, 1e100])
def test_the_least_and_the_most_noise(multiplier: float) -> None:
    plan = ReleasePlan(name="update", dimension=5, uses=2)
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=multiplier, delta=1e-5)
    channel = open_channel(privacy, [plan], FullParticipation().bind(3), seed=0, steps=2)
    channel.begin(0, channel.draw(0))
    value = channel.release("update", torch.zeros(3, 5), torch.arange(3))
    assert bool(torch.isfinite(value).all())
    assert channel.epsilon < 1e-18 if multiplier > 1 else channel.epsilon > 1e100
