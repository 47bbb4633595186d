"""From epsilon to noise and back."""

from __future__ import annotations

import time

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from fedmtl.errors import ConfigError
from fedmtl.privacy import (
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    calibrate_noise,
    epsilon,
    step_event,
)


def cost(sampler, z: float, delta: float, uses: int, releases: int = 1) -> float:
    law = sampler.law(stateful=True, observer="clients")
    step = step_event((z,) * releases, sampler, law, "pld")
    return epsilon(step.event, uses, delta)


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
    law = sampler.law(stateful=True, observer="clients")
    z = calibrate_noise(sampler, law, target=target, delta=delta, uses=uses, releases=releases)
    assert cost(sampler, z, delta, uses, releases) <= target
    assert cost(sampler, z * (1 - 1e-4), delta, uses, releases) > target


def test_the_library_confirms_the_main_case() -> None:
    sampler = PoissonSampling(100).bind(1000)
    z = calibrate_noise(sampler, sampler.law(stateful=True, observer="clients"), target=4.0, delta=1e-5, uses=100)
    library = PLDAccountant()
    library.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(z)), 100)
    assert library.get_epsilon(1e-5) == pytest.approx(4.0, rel=5e-4)


def test_noise_is_monotone_in_everything() -> None:
    def z(target: float = 2.0, delta: float = 1e-5, uses: int = 100, cohort: float = 50) -> float:
        sampler = PoissonSampling(cohort).bind(1000)
        law = sampler.law(stateful=True, observer="clients")
        return calibrate_noise(sampler, law, target=target, delta=delta, uses=uses)

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
        calibrate_noise(sampler, sampler.law(stateful=True, observer="clients"), target=1e-7, delta=1e-12, uses=10**6)


def test_calibration_and_twenty_evaluations_are_quick() -> None:
    sampler = PoissonSampling(100).bind(1001)
    law = sampler.law(stateful=True, observer="clients")
    began = time.process_time()
    z = calibrate_noise(sampler, law, target=4.0, delta=1e-5, uses=100)
    for uses in range(5, 101, 5):
        cost(sampler, z, 1e-5, uses)
    assert time.process_time() - began < 2.0  # about 0.3 s
