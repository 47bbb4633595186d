"""Secret Poisson subsamples of a client's records: their law, what they are charged, and by which noise."""

import itertools
import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import integrate, stats

from fedmtl.errors import PrivacyError
from fedmtl.privacy import RecordPrivacy, selection_epsilon
from fedmtl.privacy.accounting.composition import epsilon
from fedmtl.privacy.accounting.knorm import KNormDpEvent
from fedmtl.privacy.accounting.loss_laws import ReplacedPoissonDpEvent, step_pair
from tests.helpers import delta_at
from tests.privacy.activations import COUNTS, D, door

Q = 0.3


def event(noise: dp_event.DpEvent, q: float = Q) -> ReplacedPoissonDpEvent:
    return ReplacedPoissonDpEvent(q, noise)


# The accounting, against exact enumeration of a mechanism on three records


def subset_mixture(data: tuple[float, ...], q: float, density, x: np.ndarray) -> np.ndarray:
    """Density at ``x`` of the sum over a Poisson subsample of ``data`` plus noise."""
    total = np.zeros_like(x)
    for included in itertools.product((0, 1), repeat=len(data)):
        share = math.prod(q if one else 1 - q for one in included)
        total += share * density(
            x - sum(value for value, one in zip(data, included, strict=True) if one)
        )
    return total


def neighbours() -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Three records within [-1, 1], the last of which is replaced."""
    others = ((0.0, 0.0), (0.4, -1.0), (1.0, 1.0))
    return [
        ((*other, a), (*other, b))
        for other in others
        for a in (-1.0, 0.3, 1.0)
        for b in (-1.0, 0.0, 1.0)
        if a != b
    ]


GRID = np.linspace(-50, 50, 5001)


def hockey_stick(p: np.ndarray, q: np.ndarray, eps: float) -> float:
    return float(integrate.trapezoid(np.maximum(p - math.exp(eps) * q, 0), GRID))


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize("q", [0.1, 0.6])
def test_the_law_of_a_subsampled_answer_bounds_every_pair_of_neighbours(
    noise: str, q: float
) -> None:
    scale = 2 * 1.3  # multiplier 1.3 of the sensitivity 2 C, C = 1
    density = (stats.laplace if noise == "laplace" else stats.norm)(scale=scale).pdf
    base = dp_event.LaplaceDpEvent(1.3) if noise == "laplace" else dp_event.GaussianDpEvent(1.3)
    law = step_pair(event(base, q), 1e-4)
    assert law.add is law.remove
    levels = (0.0, 0.05, 0.2, 0.4)
    claimed = [delta_at(law.remove, eps) for eps in levels]
    worst, largest = np.zeros(len(levels)), 0.0
    for one, other in neighbours():
        p, r = subset_mixture(one, q, density, GRID), subset_mixture(other, q, density, GRID)
        largest = max(largest, float(np.abs(np.log(p / r)).max()))
        worst = np.maximum(worst, [hockey_stick(p, r, eps) for eps in levels])
    assert (worst <= np.array(claimed) * (1 + 1e-4) + 1e-7).all()
    if noise == "gaussian":
        assert worst == pytest.approx(claimed, rel=1e-3, abs=1e-6), "a dominating pair is attained"
    else:
        assert largest <= math.log1p(q * math.expm1(1 / 1.3)) * (1 + 1e-9)
        assert largest > 0.5 * math.log1p(q * math.expm1(1 / 1.3))


def test_a_rate_of_one_is_no_sampling_and_small_rates_amplify() -> None:
    full = epsilon(dp_event.GaussianDpEvent(1.0), 10, 1e-5)
    assert epsilon(event(dp_event.GaussianDpEvent(1.0), 1 - 1e-9), 10, 1e-5) == pytest.approx(
        full, rel=5e-3
    )
    full = epsilon(KNormDpEvent(1.0, 5), 10, 1e-5)
    assert epsilon(event(KNormDpEvent(1.0, 5), 1 - 1e-9), 10, 1e-5) == pytest.approx(full, rel=5e-3)
    last = full
    for q in (0.5, 0.2, 0.05):
        value = epsilon(event(KNormDpEvent(1.0, 5), q), 10, 1e-5)
        assert value < last
        last = value
    assert epsilon(event(dp_event.LaplaceDpEvent(2.0)), 10, 0.0) == pytest.approx(
        10 * math.log1p(Q * math.expm1(0.5))
    )
    with pytest.raises(PrivacyError, match="Renyi divergences does not support"):
        selection_epsilon(event(dp_event.GaussianDpEvent(2.0)), 1e-5, mean=2.0, shape=1.0)


# The release


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_every_record_takes_part_with_its_probability_and_on_its_own(source: str) -> None:
    """Factors 2^j along one axis: the released sum spells the subsample."""
    axis = [torch.zeros(n, D, dtype=torch.float64) for n in COUNTS]
    for x in axis:
        x[:, 1] = 1.0
    privacy = RecordPrivacy(
        clip_norm=64.0, noise_multiplier=1e-12, mechanism="l2_laplace", delta=1e-5, source=source
    )
    channel = door(privacy, x=axis, rate=np.array([Q, 0.7, 1.0]), caps=(400,) * 3)
    factors = [2.0 ** (torch.arange(n, dtype=torch.float64) % 6) for n in COUNTS]
    answers = 400
    clients = torch.tensor([[0, 1, 2] * answers])
    channel.begin(0, clients)
    values = []
    for client in clients[0].tolist():
        asked = [channel.members(client, np.zeros(1, dtype=np.int64)) for _ in range(2)]
        values.append(channel.release(lambda k, where: factors[k][None].clone())[0])
        if client < 2:  # who asks before the release gets those who take part in it
            assert np.array_equal(*asked)
            spelled = float(factors[client] @ torch.from_numpy(asked[0][0]).double())
            assert spelled / channel.records.plan.expected[client] == pytest.approx(
                float(values[-1][1]), abs=1e-6
            )
    value = torch.stack(values)
    assert not value[:, [0, 2, 3]].abs().max() > 1e-6
    first = (value[0::3, 1] * Q * 5).numpy()
    assert np.allclose(first, np.round(first), atol=1e-5), "divided by the constant q n"
    taken = (np.round(first).astype(int)[:, None] >> np.arange(5)) & 1
    for j in range(5):
        assert stats.binomtest(int(taken[:, j].sum()), answers, Q).pvalue > 1e-6
        for i in range(j):
            assert (
                stats.binomtest(int((taken[:, j] & taken[:, i]).sum()), answers, Q * Q).pvalue
                > 1e-6
            )
        assert (
            stats.binomtest(int((taken[1:, j] & taken[:-1, j]).sum()), answers - 1, Q * Q).pvalue
            > 1e-6
        )
    second = (value[1::3, 1] * 0.7 * 20).numpy()  # the mean of a sum of 20 with 0.7 each
    mean = 0.7 * float(factors[1].sum())
    deviation = math.sqrt(0.7 * 0.3 * float((factors[1] ** 2).sum()) / answers)
    assert abs(second.mean() - mean) < 6 * deviation
    assert torch.allclose(value[2::3, 1], factors[2].mean().expand(answers), atol=1e-6), (
        "a rate of 1 takes all"
    )


def test_subsamples_of_repetitions_differ_and_are_those_of_the_single_runs() -> None:
    privacy = RecordPrivacy(
        clip_norm=64.0, noise_multiplier=1e-12, mechanism="l2_laplace", delta=1e-5
    )
    clients = torch.tensor([[1, 2, 1, 1]] * 2)
    together, alone = door(privacy, rate=Q, replicates=2), door(privacy, rate=Q)
    together.begin(0, clients)
    alone.begin(0, clients[:1])
    for _ in range(4):
        pair = together.release(lambda k, where: torch.ones(len(where), COUNTS[k]).double())
        one = alone.release(lambda k, where: torch.ones(len(where), COUNTS[k]).double())
        assert torch.allclose(pair[0], one[0], atol=1e-9)
        assert not torch.isclose(pair[1], one[0]).any()


def test_answers_are_charged_as_subsampled_and_calibrated_to_the_budget() -> None:
    for mechanism, delta in (("laplace", 0.0), ("gaussian", 1e-5), ("l2_laplace", 1e-5)):
        privacy = RecordPrivacy(clip_norm=0.5, epsilon=2.0, mechanism=mechanism, delta=delta)
        channel, full = (door(privacy, caps=(6, 6, 6), rate=rate) for rate in (Q, 1.0))
        assert (channel.noise_multipliers < full.noise_multipliers).all(), (
            "less noise for the same budget"
        )
        channel.begin(0, torch.tensor([[0] * 6 + [1]]))
        found = channel.accountant.epsilons()[0]
        assert 1.999 < found[0] <= 2.0
        if mechanism == "laplace":
            pure = math.log1p(Q * math.expm1(1 / channel.noise_multipliers[0]))
            assert found[:2] == pytest.approx([6 * pure, pure], rel=1e-9)
        assert "Poisson over the records of a client, q = 0.3" in channel.report.text()
