"""Clients' answers of unequal weight, gradients of any model, records that arrive, and a first release."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import RecordPrivacy, WarmStartRelease
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
    assert not weighted.terms.weighted


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


# Records that arrive


def test_an_answer_has_the_records_that_are_there() -> None:
    arrivals = [np.array([3, 0, 2, 2, 9]), np.full(20, 4), np.zeros(60, dtype=int)]
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=1e-9, mechanism="l2_laplace", delta=1e-5)
    channel, x = door(privacy, arrivals=arrivals, caps=(9, 9, 9)), rows()
    clients = torch.tensor([[0, 1, 0, 0, 1, 2]])
    scale = [torch.linspace(-3, 3, n, dtype=torch.float64) for n in COUNTS]
    channel.begin(0, clients[:, :4])
    values = [channel.release(lambda k, where: scale[k][None]) for _ in range(4)]
    channel.begin(4, clients[:, 4:])
    values += list(channel.release_run(2, lambda k, which, where: scale[k].expand(len(which), -1)))
    for t, client in enumerate(clients[0].tolist()):
        there = arrivals[client] <= t
        if not there.any():
            assert not values[t].any()
            continue
        gradients = scale[client][there, None] * x[client][there]
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        expected = (gradients * torch.clamp(0.5 / norms, max=1.0)).mean(0)
        assert torch.allclose(values[t][0], expected, rtol=1e-5, atol=1e-7)
    assert channel.account.uses.tolist() == [[3, 1, 1]], "nobody is charged for an answer without records"


def test_noise_is_for_the_number_of_records_that_are_there() -> None:
    wide, arrivals = 3000, [np.array([3, 0, 2, 2, 9]), np.zeros(20, dtype=int), np.zeros(60, dtype=int)]
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=3.0, delta=1e-5)
    channel = door(privacy, dimension=wide, arrivals=arrivals, caps=(9, 9, 9))
    channel.begin(0, torch.tensor([[0, 0, 0, 0]]))
    for n in (1, 1, 3, 4):
        noise = channel.release(nothing)[0].numpy() / (3.0 * 2 * 0.5 / n)
        assert stats.kstest(noise, "norm").pvalue > 1e-7


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
        ({"arrivals": [np.zeros(n, dtype=int) for n in (4, 20, 60)]}, r"arrivals\[0\] has shape \(4,\)"),
        ({"arrivals": [-np.ones(n, dtype=int) for n in COUNTS]}, r"arrivals\[0\].*whole number of at least 0"),
        ({"arrivals": [np.zeros(5, dtype=int)]}, "arrivals has 1 arrays"),
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


# The first release

SENSITIVITY = np.array([0.3, 0.1, 0.02])


def first(share: float = 0.25) -> WarmStartRelease:
    return WarmStartRelease(SENSITIVITY, share)


def zeros(client: int) -> torch.Tensor:
    return torch.zeros(D, dtype=torch.float64)


def test_the_first_release_has_its_share_of_the_budget() -> None:
    channel = door(first=first(), caps=(4, 6, 0))
    assert channel.epsilon == 0
    channel.release_first(zeros)
    # pure epsilons: share of 2 for the first, the rest in equal parts; a client that never answers spends it all
    assert channel.account.epsilons()[0] == pytest.approx([0.5, 0.5, 2.0], rel=1e-4)
    channel.begin(0, torch.tensor([[0] * 4 + [1] * 6]))
    assert channel.account.epsilons()[0] == pytest.approx([2.0] * 3, rel=1e-4)
    assert (channel.account.epsilons() <= 2.0).all()
    report = channel.report
    assert (report.releases, report.names) == (13, ("first", "gradient"))
    assert "first release" in report.text()


def test_gaussian_first_release_and_answers_are_one_of_the_joint_precision() -> None:
    channel = door(RecordPrivacy(clip_norm=0.5, epsilon=1.5, delta=1e-5), first=first(0.2), allocation=WEIGHTS)
    for client, weights in enumerate(WEIGHTS):
        w = np.append(weights / weights.mean(), 0.2 / 0.8 * 4)
        joint = channel.noise_multipliers[client] / math.sqrt((w**2).sum())
        found = PLDAccountant().compose(dp_event.GaussianDpEvent(joint)).get_epsilon(1e-5)
        assert found == pytest.approx(1.5, rel=2e-3)


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "l2_laplace"])
def test_first_releases_are_the_vectors_and_noise_of_their_sensitivity(mechanism: str, source: str) -> None:
    wide = 3000
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=2.0, mechanism=mechanism, delta=1e-5, source=source)
    channel = door(privacy, dimension=wide, first=first(), counts=(5, 0, 60))
    vector = torch.linspace(-1, 1, wide, dtype=torch.float64)
    value = channel.release_first(lambda client: (client + 1.0) * vector)
    assert value.shape == (1, 3, wide)
    assert not value[0, 1].any(), "a client without data"
    weight = 0.25 / 0.75 * 4
    drawn = []
    for client in (0, 2):
        noise = (value[0, client] - (client + 1.0) * vector).numpy()
        noise /= SENSITIVITY[client] * channel.noise_multipliers[client] / weight
        drawn.append(noise)
        if mechanism == "gaussian":
            assert stats.kstest(noise, "norm").pvalue > 1e-7
        else:
            assert stats.gamma(wide).ppf(1e-7) < np.linalg.norm(noise) < stats.gamma(wide).isf(1e-7)
    channel.begin(0, torch.tensor([[0]]))
    drawn.append(channel.release(lambda k, where: torch.zeros(1, 5).double())[0].numpy())
    assert np.abs(np.corrcoef(drawn)[np.triu_indices(3, 1)]).max() < 6 / math.sqrt(wide)


def test_repetitions_have_first_noise_of_their_own() -> None:
    privacy = [RecordPrivacy(clip_norm=0.5, epsilon=e, mechanism="laplace", delta=0.0) for e in (2.0, 1.0, math.inf)]
    channel = door(privacy, replicates=3, first=first(), dimension=3000)
    value = channel.release_first(lambda client: torch.zeros(3000)).numpy()
    assert not value[2].any()
    norms = np.linalg.norm(value, axis=2)
    assert norms[1] / norms[0] == pytest.approx(2.0, rel=0.2)
    assert np.abs(np.corrcoef(value[:2].reshape(-1, 3000))[np.triu_indices(6, 1)]).max() < 6 / math.sqrt(3000)
    assert channel.epsilons == pytest.approx([0.5, 0.25, math.inf], rel=1e-4)


def test_the_first_release_happens_once_and_before_any_answer() -> None:
    channel = door(first=first())
    channel.begin(0, torch.tensor([[0, 1]]))
    assert channel.account.epsilons()[0, 2] == pytest.approx(0.5, rel=1e-4), (
        "charged with the first block at the latest"
    )
    channel.release_first(zeros)
    for _ in range(2):
        with pytest.raises(PrivacyError, match="happens once, before any activation"):
            channel.release_first(zeros)
        channel.release(nothing)
    late = door(first=first())
    late.begin(0, torch.tensor([[0, 1]]))
    late.release(nothing)
    with pytest.raises(PrivacyError, match="happens once, before any activation"):
        late.release_first(zeros)
    with pytest.raises(PrivacyError, match="opened without a first release"):
        door().release_first(zeros)
    with pytest.raises(PrivacyError, match="first vector of client 0 has not 4 numbers"):
        door(first=first()).release_first(lambda client: torch.zeros(D + 1))
    broken = door(first=first())
    broken.record = []
    with pytest.raises(PrivacyError, match="is not finite, so no sensitivity bounds"):
        broken.release_first(lambda client: torch.full((D,), math.nan if client == 2 else 0.0))
    assert broken.record == []
    with pytest.raises(ConfigError, match=r"share is 1\.0"):
        first(1.0)
    with pytest.raises(ConfigError, match="positive finite number for each of 3 clients"):
        door(first=WarmStartRelease(np.array([1.0, 0.0, 1.0]), 0.5))


def test_the_first_release_is_on_the_disk_before_its_noise(tmp_path: Path) -> None:
    path = tmp_path / "ledger"

    def kinds() -> list[str]:
        return [json.loads(line)["kind"] for line in path.read_text().splitlines()]

    def vector(client: int) -> torch.Tensor:
        assert kinds() == ["header", "open", "first"]
        return zeros(client)

    channel = door(first=first(), ledger_path=path)
    value = channel.release_first(vector)
    channel.begin(0, torch.tensor([[0, 1]]))
    answer = channel.release(nothing)
    channel.account.ledger._file.close()  # killed
    again = door(first=first(), ledger_path=path, resume=True)
    again.start(0)
    assert torch.equal(again.release_first(zeros), value), "seeded: the same release, charged once"
    again.begin(0, torch.tensor([[0, 1]]))
    assert torch.equal(again.release(nothing), answer)
    again.release(nothing)
    again.close()
    assert kinds().count("first") == 1
    later = door(first=first(), ledger_path=path, resume=True)
    later.start(2)
    with pytest.raises(PrivacyError, match="before any activation"):
        later.release_first(zeros)
    later.begin(2, torch.tensor([[2]]))
    assert later.account.epsilons()[0] == pytest.approx([0.5 + 0.375] * 3, rel=1e-4)
    later.close()
    with pytest.raises(ResumeError, match="kinds"):
        door(ledger_path=path, resume=True)
    with pytest.raises(ResumeError, match="public"):
        door(first=WarmStartRelease(2 * SENSITIVITY, 0.25), ledger_path=path, resume=True)


def test_a_secure_first_release_that_a_crash_lost_is_not_made_again(tmp_path: Path) -> None:
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=2.0, mechanism="laplace", delta=0.0, source="secure")
    channel = door(privacy, first=first(), ledger_path=tmp_path / "l")
    channel.release_first(zeros)
    channel.begin(0, torch.tensor([[0, 1]]))
    channel.release(nothing)
    channel.account.ledger._file.close()
    again = door(privacy, first=first(), ledger_path=tmp_path / "l", resume=True)
    again.start(1)  # a checkpoint after it
    again.begin(1, torch.tensor([[1]]))
    assert again.account.epsilons()[0] == pytest.approx([0.5 + 0.375, 0.5 + 2 * 0.375, 0.5], rel=1e-4)
    again.account.ledger._file.close()
    lost = door(privacy, first=first(), ledger_path=tmp_path / "l", resume=True)
    lost.start(0)
    with pytest.raises(BudgetExhausted, match="first release was charged in an earlier session"):
        lost.begin(0, torch.tensor([[1]]))
    with pytest.raises(BudgetExhausted, match="first release was charged in an earlier session"):
        lost.release_first(zeros)


def test_a_run_that_stops_early_forfeits_the_first_release_too() -> None:
    channel = door(first=first())
    channel.charge_remaining(0)
    assert channel.account.epsilons()[0] == pytest.approx([2.0] * 3, rel=1e-4)
    assert channel.report.releases == 15


def test_checkpoints_of_repetitions_keep_what_was_charged() -> None:
    options = {"first": first(), "replicates": 2, "allocation": WEIGHTS}
    whole, before, after = (door(**options) for _ in range(3))
    clients = torch.tensor([[0, 1, 0, 2, 0], [2, 2, 2, 0, 0]])
    for channel in (whole, before):
        channel.release_first(zeros)
        channel.begin(0, clients[:, :3])
        values = list(channel.release_run(3, nothing))
    after.restore(before.state())
    after.start(3)
    for channel in (whole, after):
        channel.begin(3, clients[:, 3:])
        values.append(channel.release_run(2, nothing))
    assert torch.equal(values[-1], values[-2]), "weights go on where the earlier session stopped"
    assert np.array_equal(after.account.epsilons(), whole.account.epsilons())
    late = door(**options)
    late.start(3)
    with pytest.raises(ResumeError, match="comes after a first release, which was never charged"):
        late.begin(3, clients[:, 3:])


def test_a_recorded_first_release_is_replayed() -> None:
    channel = door(first=first())
    channel.record = []
    value = channel.release_first(zeros)
    channel.begin(0, torch.tensor([[1]]))
    answer = channel.release(nothing)
    assert [(step, name) for step, name, _ in channel.record] == [(-1, "first"), (0, "gradient")]
    again = door(first=first(), seed=9, replay=channel.record)
    assert torch.equal(again.release_first(lambda client: torch.ones(D)), value)
    again.begin(0, torch.tensor([[1]]))
    assert torch.equal(again.release(nothing), answer)
