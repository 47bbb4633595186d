"""Stopping by what was released: an adversary breaks the plain running epsilon, not the odometer nor the filter."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError
from fedmtl.privacy import epsilon
from fedmtl.privacy.filters import Odometer, PrivacyFilter
from fedmtl.privacy.knorm import KNormDpEvent

Z, STEPS, PATHS, DELTA = 12.0, 512, 30_000, 0.02


@pytest.fixture(scope="module")
def paths() -> np.ndarray:
    """(PATHS, STEPS) running losses of Gaussian noise under P: each step adds N(1 / (2 z^2), 1 / z^2)."""
    steps = np.random.default_rng(8).normal(0.5 / Z**2, 1 / Z, (PATHS, STEPS))
    return np.cumsum(steps, axis=1, out=steps)


def stopped(paths: np.ndarray, readings: np.ndarray, margin: float) -> tuple[float, float]:
    """P(S) - E_Q[1_S exp(reading at tau)], and its standard error.

    The adversary stops, and S is that it stopped, as soon as the loss exceeds the reading by ``margin``. Under Q the
    same paths have the weight exp(-loss), so the difference is E_P[1_S (1 - exp(reading - loss))].
    """
    crossed = paths > readings + margin
    first = np.argmax(crossed, axis=1)
    gap = readings[first] - paths[np.arange(len(paths)), first]
    gains = np.where(crossed.any(axis=1), -np.expm1(np.minimum(gap, 0.0)), 0.0)
    return float(gains.mean()), float(gains.std() / math.sqrt(len(paths)))


def test_an_adversary_breaks_the_plain_running_epsilon_but_not_the_odometer(paths: np.ndarray) -> None:
    event = GaussianDpEvent(Z)
    plain = np.array([epsilon(event, uses, DELTA) for uses in range(1, STEPS + 1)])
    odometer = Odometer(event, DELTA)
    readings = np.array([odometer.epsilon(uses) for uses in range(1, STEPS + 1)])
    broken = False
    for margin in (0.0, 0.1, 0.2, 0.4, 0.7):
        delta, error = stopped(paths, plain, margin)
        broken |= delta - 6 * error > 1.5 * DELTA
        delta, error = stopped(paths, readings, margin)
        assert delta - 5 * error <= DELTA
    assert broken
    # a fixed stop does what the plain figure says: the attack, not the simulation, is what breaks it
    gains = np.maximum(0.0, -np.expm1(plain[-1] - paths[:, -1]))
    assert abs(gains.mean() - DELTA) < 5 * gains.std() / math.sqrt(PATHS)


EVENTS = [GaussianDpEvent(20.0), PoissonSampledDpEvent(0.1, GaussianDpEvent(1.5)), KNormDpEvent(0.1, 10)]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_odometer_is_between_the_plain_figures(event: dp_accounting.DpEvent, accountant: str) -> None:
    odometer = Odometer(event, 1e-5, accountant)  # type: ignore[arg-type]
    assert odometer.epsilon(0) == 0.0
    previous = 0.0
    for uses in (1, 2, 3, 4, 5, 31, 32, 33, 500):
        value = odometer.epsilon(uses)
        share = 1e-5 * 6 / (math.pi * (math.ceil(math.log2(uses)) + 1)) ** 2
        assert previous <= value
        assert epsilon(event, uses, 1e-5, accountant=accountant) <= value  # type: ignore[arg-type]
        assert value <= epsilon(event, 2 * uses, share, accountant=accountant)  # type: ignore[arg-type]
        previous = value


def test_the_shares_of_delta_sum_to_delta_and_the_grid_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, float] = {}

    def spy(event: object, uses: int, delta: float, *, accountant: str) -> float:
        asked[uses] = delta
        return float(uses)

    monkeypatch.setattr("fedmtl.privacy.filters.epsilon", spy)
    odometer = Odometer(GaussianDpEvent(1.0), 1e-3, first=100, growth=1.5)
    assert [odometer.epsilon(uses) for uses in (1, 100, 101, 150, 151)] == [100.0, 100.0, 150.0, 150.0, 225.0]
    odometer.epsilon(10**6)
    assert sum(asked.values()) <= 1e-3
    assert sum(6 / (math.pi * (j + 1)) ** 2 for j in range(10**5)) == pytest.approx(1, abs=1e-4)
    assert all(b / a <= 1.5 for a, b in zip(sorted(asked), sorted(asked)[1:], strict=False))
    small = Odometer(GaussianDpEvent(1.0), 1e-3, growth=1.01)
    assert [small.epsilon(uses) for uses in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_the_largest_number_of_steps_within_a_budget() -> None:
    odometer = Odometer(GaussianDpEvent(20.0), 1e-5, first=10, growth=1.3)
    most = odometer.largest_uses(2.0)
    assert odometer.epsilon(most) <= 2.0 < odometer.epsilon(most + 1)
    assert odometer.largest_uses(1e-3) == 0


def test_the_filter_admits_what_its_order_allows() -> None:
    """Gaussian noise: a / (2 z^2) a step, so floor(B / cost) steps, and the library agrees with the total."""
    budget, delta, z = 3.0, 1e-6, 15.0
    filter_ = PrivacyFilter(budget, delta)
    order = filter_.order
    capacity = budget - math.log((order - 1) / order) + (math.log(delta) + math.log(order)) / (order - 1)
    assert filter_.capacity == pytest.approx(capacity, rel=1e-12)
    steps = 0
    while filter_.admits(GaussianDpEvent(z)):
        filter_.spend(GaussianDpEvent(z))
        steps += 1
    assert steps == math.floor(capacity / (order / (2 * z * z)))
    with pytest.raises(BudgetExhausted, match="Renyi order"):
        filter_.spend(GaussianDpEvent(z))
    accountant = RdpAccountant(orders=[order])
    accountant.compose(GaussianDpEvent(z), steps)
    assert accountant.get_epsilon(delta) <= budget
    assert filter_.epsilon_bound == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
    accountant.compose(GaussianDpEvent(z))
    assert accountant.get_epsilon(delta) > budget
    filter_.spend(GaussianDpEvent(1e4))  # a smaller step still fits


def test_the_filter_takes_steps_of_every_kind() -> None:
    filter_ = PrivacyFilter(4.0, 1e-5)
    events = [
        GaussianDpEvent(8.0),
        LaplaceDpEvent(10.0),
        PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)),
        PoissonSampledDpEvent(0.1, KNormDpEvent(0.3, 5)),
        KNormDpEvent(0.2, 40),
        ComposedDpEvent([GaussianDpEvent(30.0), LaplaceDpEvent(30.0)]),
    ]
    spent = [0.0]
    for event in events:
        filter_.spend(event)
        assert filter_.spent > spent[-1]
        spent.append(filter_.spent)
    assert epsilon(ComposedDpEvent(events), 1, 1e-5) <= filter_.epsilon_bound <= 4.0
    filter_.spend(dp_accounting.NoOpDpEvent())
    assert filter_.spent == spent[-1]
    assert not filter_.admits(dp_accounting.NonPrivateDpEvent())
    with pytest.raises(PrivacyError, match="both relations"):
        filter_.admits(dp_accounting.SampledWithoutReplacementDpEvent(100, 5, GaussianDpEvent(30.0)))
    with pytest.raises(PrivacyError, match="does not support"):
        filter_.spend(dp_accounting.UnsupportedDpEvent())


def test_the_planned_event_chooses_an_order_that_admits_more() -> None:
    event = PoissonSampledDpEvent(0.01, GaussianDpEvent(0.8))

    def admitted(filter_: PrivacyFilter) -> int:
        count = 0
        while filter_.admits(event):
            filter_.spend(event)
            count += 1
        return count

    planned = admitted(PrivacyFilter(3.0, 1e-6, planned=event))
    assert planned >= admitted(PrivacyFilter(3.0, 1e-6))
    assert planned == max(
        admitted(PrivacyFilter(3.0, 1e-6, order=order)) for order in (6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 16.0)
    )


def test_an_adversary_that_chooses_its_noise_cannot_break_the_filter() -> None:
    """Double or nothing: after a large loss the rest of the budget goes into one step, else into small ones.

    The total is measured at the claimed epsilon by E_P[(1 - exp(epsilon - loss))+].
    """
    budget, delta = 1.0, 0.01
    reference = PrivacyFilter(budget, delta)
    order, capacity = reference.order, reference.capacity
    rng = np.random.default_rng(2)
    loss, left = np.zeros(200_000), np.full(200_000, capacity)
    for step in range(12):
        # variance v = 1 / z^2 costs order v / 2
        variance = np.where((loss > 0.4 * budget) | (step == 11), 2 * left / order, 2 * left / order / 6)
        loss += rng.normal(variance / 2, np.sqrt(variance))
        left = np.maximum(left - order * variance / 2, 0.0)
    gains = np.maximum(0.0, -np.expm1(budget - loss))
    assert 0 < gains.mean() + 5 * gains.std() / math.sqrt(len(loss)) <= delta


def test_errors() -> None:
    for call in (
        lambda: PrivacyFilter(0.0, 1e-5),
        lambda: PrivacyFilter(1.0, 0.0),
        lambda: PrivacyFilter(1.0, 1e-5, order=1.0),
        lambda: PrivacyFilter(1.0, 1e-5, order=3.0, planned=GaussianDpEvent(1.0)),
        lambda: PrivacyFilter(1.0, 1e-5, order=2.0),
        lambda: Odometer(GaussianDpEvent(1.0), 1.0),
        lambda: Odometer(GaussianDpEvent(1.0), 1e-5, growth=1.0),
        lambda: Odometer(GaussianDpEvent(1.0), 1e-5, first=0),
    ):
        with pytest.raises(ConfigError, match=r"PrivacyFilter|Odometer"):
            call()
