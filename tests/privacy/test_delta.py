"""Very small deltas, down to the least that settings take, and deltas that promise nothing."""

import logging
import math
from dataclasses import replace

import pytest
from dp_accounting import dp_event
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedmtl import ClientPrivacy, FedAvg, RecordPrivacy
from fedmtl.errors import ConfigError
from fedmtl.privacy import epsilon
from fedmtl.privacy.accounting.library import library_epsilon
from fedmtl.privacy.settings import LEAST_DELTA

from ..trainer.settings import DATA, SOLVER, trainer

DELTAS = (1e-5, 1e-12, LEAST_DELTA)


def gaussian(multiplier: float, delta: float) -> float:
    """Epsilon of one Gaussian release: delta = Phi(1/2z - ez) - exp(e) Phi(-1/2z - ez), in logarithms."""

    def excess(e: float) -> float:
        left = log_ndtr(0.5 / multiplier - e * multiplier)
        right = e + log_ndtr(-0.5 / multiplier - e * multiplier)
        return left + math.log(-math.expm1(right - left)) - math.log(delta)

    return brentq(excess, 1e-9, 1e4, xtol=1e-12)


def sampled(q: float, multiplier: float, delta: float) -> float:
    """Epsilon of one Poisson-sampled release, from which a removal gives away more than an addition: by advanced joint
    convexity exp(e') - 1 = q (exp(e) - 1) at delta' = q delta."""
    return math.log1p(q * math.expm1(gaussian(multiplier, delta / q)))


@pytest.mark.parametrize("delta", [*DELTAS, 1e-100, 1e-300])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 20.0])
def test_gaussian_releases_have_the_epsilon_of_the_closed_form(
    multiplier: float, delta: float
) -> None:
    event = dp_event.GaussianDpEvent(multiplier)
    assert epsilon(event, 4, delta) == pytest.approx(gaussian(multiplier / 2, delta), rel=1e-9)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(("q", "multiplier"), [(0.1, 1.0), (0.001, 0.7), (0.5, 3.0)])
def test_one_sampled_release_has_the_epsilon_of_its_closed_form(
    q: float, multiplier: float, delta: float
) -> None:
    event = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(multiplier))
    expected = sampled(q, multiplier, delta)
    assert expected * (1 - 1e-9) <= epsilon(event, 1, delta) <= expected * (1 + 2e-3)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(("steps", "multiplier"), [(1000, 30.0), (100_000, 300.0)])
def test_many_steps_that_hardly_sample_have_the_epsilon_of_gaussian_ones(
    steps: int, multiplier: float, delta: float
) -> None:
    """By privacy loss distributions and transforms, whose rounding errors are 1e-16 a step, far above the delta."""
    event = dp_event.PoissonSampledDpEvent(1 - 1e-9, dp_event.GaussianDpEvent(multiplier))
    expected = gaussian(multiplier / math.sqrt(steps), delta)
    assert expected * (1 - 1e-6) <= epsilon(event, steps, delta) <= expected * (1 + 2e-3)


def test_beyond_the_tails_of_the_grid_epsilon_is_infinite_and_never_too_small() -> None:
    event = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.0))
    assert epsilon(event, 100, 1e-40) == math.inf


@pytest.mark.parametrize("kind", [ClientPrivacy, RecordPrivacy])
def test_settings_refuse_a_smaller_delta_with_the_limit(kind: type) -> None:
    with pytest.raises(
        ConfigError, match=r"^\w+\.delta is 9e-19; the accountant .* 1e-18, the least\.$"
    ):
        kind(clip_norm=1.0, epsilon=1.0, delta=9e-19)
    assert kind(clip_norm=1.0, epsilon=1.0, delta=LEAST_DELTA).delta == 1e-18
    assert RecordPrivacy(clip_norm=1.0, epsilon=1.0, delta=0.0, mechanism="laplace").delta == 0


def test_a_delta_above_one_over_the_number_of_units_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The twelve clients of the run, and in the other one their records, beside a baseline."""
    clients, records = len(DATA), int(DATA.train.counts.sum())
    kinds = {"clients": (ClientPrivacy, clients), "records": (RecordPrivacy, records)}
    for name, (kind, units) in kinds.items():
        privacy = kind(clip_norm=0.7, noise_multiplier=1.5, delta=1.01 / units)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="fedmtl"):
            trainer(
                algorithm=FedAvg(local=SOLVER), privacy=privacy, rounds=1, baselines=("pmtl",)
            ).fit()
        told = [each.message for each in caplog.records if "delta" in each.message]
        assert len(told) == 1
        assert f"is above 1 / {units:,}, one over the number of {name}" in told[0]
        assert replace(privacy, delta=1 / units).loose_delta(units) is None
        assert replace(privacy, delta=None).loose_delta(units) is None
    assert ClientPrivacy(clip_norm=1.0, epsilon=math.inf, delta=0.5).loose_delta(10) is None


@pytest.mark.parametrize("uses", [1, 2, 5])
def test_the_library_is_not_taken_for_more_than_the_pure_epsilon_of_laplace_noise(
    uses: int,
) -> None:
    """At a delta where pure epsilons are all but tight: 1 - exp(-eps) of the largest loss is above it."""
    events = [(dp_event.LaplaceDpEvent(1.5), uses)]
    exact = uses / 1.5
    assert library_epsilon(events, 1e-12, exact) == pytest.approx(exact, rel=1e-9)
