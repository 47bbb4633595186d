"""Clients' answers of unequal weight, gradients of any model, and clients without records."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats

from fedmtl.errors import ConfigError
from fedmtl.privacy import RecordPrivacy
from fedmtl.privacy.accounting.composition import epsilon
from fedmtl.privacy.accounting.knorm import KNormDpEvent
from tests.privacy.activations import COUNTS, IDS, PURE, D, door, nothing, open_activations, rows

WEIGHTS = [np.array([1.0, 2.0, 3.0, 10.0]), np.ones(4), np.array([5.0, 5.0, 1.0, 1.0])]


# Weights of answers


def test_pure_budgets_are_divided_in_proportion_to_the_weights() -> None:
    channel = door(allocation=WEIGHTS)
    assert channel.noise_multipliers == pytest.approx(np.full(3, 4 / 2.0), rel=1e-4)  # mean weight 1: z = cap / epsilon
    channel.begin(0, torch.tensor([[0, 0, 2]]))
    assert channel.account.epsilons()[0] == pytest.approx([2 * 3 / 16, 0, 2 * 5 / 12], rel=1e-4)
    for _ in range(3):
        channel.release(nothing)
    channel.begin(3, torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2]]))
    assert channel.account.epsilons()[0] == pytest.approx([2.0] * 3, rel=1e-4)
    assert (channel.account.epsilons() <= 2.0).all()


def test_gaussian_answers_of_unequal_weight_are_one_of_the_joint_precision() -> None:
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=1.5, delta=1e-5)
    channel = door(privacy, allocation=WEIGHTS)
    for client, weights in enumerate(WEIGHTS):
        w = weights / weights.mean()
        joint = channel.noise_multipliers[client] / math.sqrt((w**2).sum())
        found = PLDAccountant().compose(dp_event.GaussianDpEvent(joint)).get_epsilon(1e-5)
        assert found == pytest.approx(1.5, rel=2e-3)
    channel.begin(0, torch.tensor([[0, 0, 0]]))
    z = channel.noise_multipliers[0] / math.sqrt((1 + 4 + 9) / 16)  # weights 1, 2, 3 over their mean 4
    expected = PLDAccountant().compose(dp_event.GaussianDpEvent(z)).get_epsilon(1e-5)
    assert channel.account.epsilons()[0, 0] == pytest.approx(expected, rel=2e-3)


def test_l2_laplace_answers_of_unequal_weight_are_composed_one_by_one() -> None:
    channel = door(RecordPrivacy(clip_norm=0.5, epsilon=3.0, delta=1e-5, mechanism="l2_laplace"), allocation=WEIGHTS)
    z, w = channel.noise_multipliers[0], WEIGHTS[0] / 4
    events = [KNormDpEvent(float(one) / z, D) for one in w]
    assert epsilon(dp_event.ComposedDpEvent(events), 1, 1e-5) == pytest.approx(3.0, rel=1e-4)
    channel.begin(0, torch.tensor([[0, 0]]))
    expected = epsilon(dp_event.ComposedDpEvent(events[:2]), 1, 1e-5)
    assert channel.account.epsilons()[0, 0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "l2_laplace"])
def test_noise_falls_with_the_weight_of_the_answer(mechanism: str) -> None:
    wide = 3000
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=3.0, mechanism=mechanism, delta=1e-5)
    channel = door(privacy, dimension=wide, allocation=WEIGHTS, replicates=2)
    clients = np.array([[2, 0, 0, -1, 2, 2, 1], [0, 2, 2, 2, 0, 0, 2]])
    values, uses, at = [], np.zeros((2, 3), dtype=int), 0
    for block in (3, 4):  # the count of answers goes on from block to block
        channel.begin(at, torch.from_numpy(clients[:, at : at + block]))
        values.append(channel.release_run(block, nothing).numpy())
        at += block
    law = "norm" if mechanism == "gaussian" else "laplace"
    for s, value in enumerate(np.concatenate(values)):
        for r, client in enumerate(clients[:, s]):
            if client < 0:
                assert not value[r].any()
                continue
            weight = (WEIGHTS[client] / WEIGHTS[client].mean())[uses[r, client]]
            uses[r, client] += 1
            noise = value[r] / (3.0 / weight * 2 * 0.5 / COUNTS[client])
            if mechanism == "l2_laplace":
                assert stats.gamma(wide).ppf(1e-7) < np.linalg.norm(noise) < stats.gamma(wide).isf(1e-7)
            else:
                assert stats.kstest(noise, law).pvalue > 1e-7


def test_equal_weights_are_no_weights() -> None:
    plain, weighted = door(), door(allocation=[np.full(4, 7.0)] * 3)
    assert np.array_equal(plain.noise_multipliers, weighted.noise_multipliers)
    assert {price.weights for price in weighted.prices.kinds} == {None}


def test_a_fixed_multiplier_caps_by_the_weights_in_order() -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=10.0, epsilon=0.16, mechanism="laplace", delta=0.0)
    channel = door(privacy, allocation=WEIGHTS)  # epsilons .025 .05 .075 .25; .1 x 4; .167 .167 .033 .033
    assert channel.caps.tolist() == [3, 1, 0]


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"allocation of client 1 has shape \(3,\); it may act 4 times"):
        door(allocation=[np.ones(4), np.ones(3), np.ones(4)])
    with pytest.raises(ConfigError, match="positive finite weights"):
        door(allocation=[np.array([1.0, 0.0, 1.0, 1.0]), *WEIGHTS[1:]])
    with pytest.raises(ConfigError, match="weights for 2 clients, there are 3"):
        door(allocation=WEIGHTS[:2])


# Gradients of any model


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_any_model_are_clipped_one_by_one(mechanism: str, dtype: torch.dtype) -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=3.0, mechanism=mechanism, delta=1e-5)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(2, n, D, generator=generator).to(dtype) for n in COUNTS]
    gradients[1][0, 3] = math.nan
    gradients[1][1, 4] = 1e30
    options = {"ids": IDS, "caps": np.array([4] * 3), "seed": 0, "replicates": 2}
    channels = [open_activations(privacy, None, counts=np.array(COUNTS), dimension=D, **options) for _ in range(3)]
    clients = torch.tensor([[1, 0], [1, 2]])
    for channel in channels:
        channel.begin(0, clients)
    one, silent, many = channels
    found = [one.release_rows(lambda k, where: gradients[k][where]) for _ in range(2)]
    together = many.release_rows_run(2, lambda k, which, where: gradients[k][where])
    for s in range(2):
        noise = silent.release_rows(lambda k, where: torch.zeros(len(where), COUNTS[k], D))
        assert torch.allclose(together[s], found[s], rtol=1e-12, atol=1e-12)
        for r in range(2):
            rows = gradients[clients[r, s]][r].double().nan_to_num(0.0)
            norms = torch.linalg.vector_norm(rows, ord=1 if mechanism == "laplace" else 2, dim=1, keepdim=True)
            expected = (rows * torch.clamp(0.5 / norms.clamp(min=1e-300), max=1.0)).mean(0)
            assert torch.allclose(found[s][r] - noise[r], expected, rtol=1e-5, atol=1e-9)
    channel = open_activations(privacy, None, counts=np.array(COUNTS), dimension=D, **options)
    channel.begin(0, clients)
    with pytest.raises(ConfigError, match=r"of shape \(2, 20, 3\); needed: \(2, 20, 4\)"):
        channel.release_rows(lambda k, where: gradients[k][where][..., :3])
    with pytest.raises(ConfigError, match="opened without rows"):
        channel.release(nothing)


# Numbers of records


def test_clients_without_data_are_nobody() -> None:
    channel = door(counts=(5, 0, 60))
    channel.begin(0, torch.tensor([[1, 0, 1]]))
    values = channel.release_run(3, lambda k, which, where: torch.ones(len(which), (5, 0, 60)[k]).double())
    assert not values[0].any()
    assert not values[2].any()
    assert values[1].any()
    assert channel.account.uses.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"caps": (4, 4)}, r"caps has shape \(2,\).*each of 3 clients"),
        ({"caps": ((4, 4, 4),)}, r"caps has shape \(1, 3\)"),
        ({"caps": (4, -1, 4)}, "caps .*whole number of at least 0"),
        ({"caps": (4, 2.5, 4)}, "caps .*dtype float64"),
        ({"rate": np.array([0.5, 0.5])}, "rate is .*each of 3 clients"),
        ({"rate": "all"}, "rate is 'all'"),
    ],
)
def test_wrong_arrays_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        door(**options)


def test_wrong_rows_are_refused() -> None:
    options = {"ids": IDS, "caps": np.array([4] * 3), "seed": 0}
    for x in ([], rows()[:2], [*rows()[:2], torch.zeros(5, 3)], [torch.zeros(4)] * 3):
        with pytest.raises(ConfigError, match=r"x must have rows \(n_i, 4\) of each of 3 clients"):
            open_activations(PURE, x, **options)
    with pytest.raises(ConfigError, match="dimension is 0"):
        open_activations(PURE, None, counts=np.ones(3, dtype=int), dimension=0, **options)
    with pytest.raises(ConfigError, match="counts has shape"):
        open_activations(PURE, None, counts=np.ones(2, dtype=int), dimension=3, **options)
