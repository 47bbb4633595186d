"""Releases of clients who act one at a time: clip, noise, caps, charges, repetitions."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import (
    Activations,
    GradientPlan,
    PublishedClaim,
    RecordPrivacy,
    ReleasePlan,
    SeededSource,
    open_channel,
)
from fedmtl.privacy.accounting.composition import epsilon
from tests.privacy.activations import COUNTS, IDS, PURE, D, door, nothing, open_activations, rows


def answered(channel: Activations, gradients: Callable[[int, np.ndarray], np.ndarray]) -> np.ndarray:
    return channel.release([gradients(client, runs) for client, runs in channel.acting])


def ones(client: int, where: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(where), COUNTS[client], dtype=torch.float64)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "l2_laplace"])
def test_a_release_is_the_mean_of_clipped_gradients_and_noise(mechanism: str) -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=3.0, mechanism=mechanism, delta=1e-5)
    channel, silent, x = door(privacy), door(privacy), rows()
    clients = torch.tensor([[1, 0, 2, 1]])
    channel.begin(0, clients)
    silent.begin(0, clients)
    for client in clients[0].tolist():
        scale = torch.linspace(-3, 3, COUNTS[client], dtype=torch.float64)[None]
        scale[0, 0] = math.nan
        moved = channel.release(lambda k, where, scale=scale: scale) - silent.release(nothing)
        gradients = scale[0, :, None].nan_to_num() * x[client]
        norms = torch.linalg.vector_norm(gradients, ord=1 if mechanism == "laplace" else 2, dim=1, keepdim=True)
        expected = (gradients * torch.clamp(0.5 / norms.clamp(min=1e-300), max=1.0)).mean(0)
        assert torch.allclose(moved[0], expected, rtol=1e-5, atol=1e-12)


def test_caps_are_hard_and_nothing_is_charged_beyond_them() -> None:
    channel = door(caps=(2, 4, 4))
    channel.begin(0, torch.tensor([[0, 1, 0]]))
    for _ in range(3):
        channel.release(nothing)
    with pytest.raises(BudgetExhausted, match="client 0 would take part 3 times, above its cap of 2"):
        channel.begin(3, torch.tensor([[1, 0]]))
    assert channel.account.uses.tolist() == [[2, 1, 0]]
    channel.begin(3, torch.tensor([[1, -1]]))
    assert bool(channel.release(nothing).any())
    assert not channel.release(nothing).any(), "nobody acts, nothing is released"


def test_pure_epsilons_add_up_to_each_clients_budget() -> None:
    budgets = {"a": 0.5, "b": 1.0, "c": 4.0}
    channel = door(RecordPrivacy(clip_norm=0.5, epsilon=budgets, mechanism="laplace", delta=0.0), caps=(2, 5, 8))
    assert channel.noise_multipliers == pytest.approx(np.array([2 / 0.5, 5 / 1.0, 8 / 4.0]), rel=1e-4)
    channel.begin(0, torch.tensor([[0, 0, 1, 1, 1, 1, 1, *[2] * 8]]))
    assert channel.account.epsilons()[0] == pytest.approx(np.array([0.5, 1.0, 4.0]), rel=1e-4)
    assert (channel.account.epsilons() <= np.array([0.5, 1.0, 4.0])).all()
    report = channel.report
    assert (report.unit, report.relation, report.delta) == ("record", "replace", 0.0)
    assert report.releases == 15
    assert "Poisson" not in report.text()


def test_approximate_epsilons_are_what_dp_accounting_says() -> None:
    channel = door(
        RecordPrivacy(clip_norm=0.5, noise_multiplier=6.0, mechanism="laplace", delta=1e-5), caps=(30, 30, 30)
    )
    channel.begin(0, torch.tensor([[1] * 30 + [2] * 5]))
    found = channel.account.epsilons()[0]
    assert found[0] == 0.0
    for client, uses in ((1, 30), (2, 5)):
        expected = PLDAccountant().compose(dp_event.LaplaceDpEvent(6.0), uses).get_epsilon(1e-5)
        assert found[client] == pytest.approx(expected, rel=1e-3)
    assert channel.epsilon == found.max()


def test_a_fixed_multiplier_and_a_budget_give_the_cap() -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=10.0, epsilon=0.55, mechanism="laplace", delta=0.0)
    assert door(privacy, caps=(3, 9, 9)).caps.tolist() == [3, 5, 5]  # 5 x 0.1 fits, 6 x 0.1 does not


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_a_client_that_acts_in_several_replicates_is_asked_once(mechanism: str) -> None:
    """Replicates by chance, some without a client; the releases of each are those of its client alone."""
    rng, replicates, counts = np.random.default_rng(0), 7, (5, 2, 6)
    privacy = replace(PURE, mechanism=mechanism, delta=0.0 if mechanism == "laplace" else 1e-5)
    clients = torch.from_numpy(rng.integers(-1, 3, (replicates, 30)))
    table = rng.standard_normal((3, replicates, max(counts))) * 10.0 ** rng.integers(-3, 4, max(counts))
    table[:, :, 1], table[:, 0, 0] = math.nan, math.inf
    asked: list[int] = []

    def factors(client: int, runs: np.ndarray) -> np.ndarray:
        asked.append(client)
        return table[client, runs, : counts[client]]

    channel = door(privacy, caps=(30, 30, 30), counts=counts, replicates=replicates).channel
    channel.begin(0, clients)
    silent = door(privacy, caps=(30, 30, 30), counts=counts, replicates=replicates).channel
    silent.begin(0, clients)
    for acting in clients.T.numpy():
        asked.clear()
        zeros = [np.zeros((len(runs), counts[client])) for client, runs in silent.acting]
        found = answered(channel, factors) - silent.release(zeros)
        assert asked == sorted(set(acting[acting >= 0].tolist()))
        for run, client in enumerate(acting.tolist()):
            expected = np.zeros(D)
            if client >= 0:
                sums = channel.sums.of_factors(client, table[client, [run], : counts[client]])
                expected = sums[0] / counts[client]
            np.testing.assert_allclose(found[run], expected, rtol=1e-9, atol=1e-9)


def test_ledger_and_crash_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    def opened(resume: bool = True, **options):
        return door(caps=(9, 9, 9), ledger_path=path, resume=resume, **options)

    first = opened(False)
    first.begin(0, torch.tensor([[0, 1, 2]]))
    values = [first.release(ones) for _ in range(3)]
    first.begin(3, torch.tensor([[2, 2, 1]]))
    first.release(ones)
    first.account.ledger._file.close()  # killed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["cohorts"] for line in lines if line["kind"] == "charge"] == [[[0], [1], [2]], [[2], [2], [1]]]
    second = opened()
    second.start(2)  # a checkpoint after two activations; the next block is cut elsewhere
    assert second.account.uses.tolist() == [[1, 1, 0]]
    second.begin(2, torch.tensor([[2, 2, 2, 1, 0]]))
    assert torch.equal(second.release(ones), values[2])
    assert second.account.uses.tolist() == [[2, 2, 3]]
    second.close()
    third = opened()
    third.start(2)
    assert third.account.uses.tolist() == [[1, 1, 0]]
    assert third.report.epsilon == pytest.approx(2.0 / 9 * 3)  # seven answers were seen, three of them client 2's
    assert third.report.releases == 7
    third.close()
    with pytest.raises(ResumeError, match="step 7 is not charged"):
        opened().start(9)


def test_a_run_that_stops_early_reports_what_it_forfeits() -> None:
    channel = door()
    channel.begin(0, torch.tensor([[0, 1]]))
    for _ in range(2):
        channel.release(ones)
    assert channel.report.epsilon == channel.epsilon == pytest.approx(0.5)
    channel.charge_remaining(2)
    assert channel.report.epsilon == channel.epsilon == pytest.approx(2.0)
    assert channel.report.by_client == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.parametrize(("row", "factor"), [(math.inf, 1.0), (math.nan, 1.0), (1e-200, 1e210)])
def test_no_row_escapes_the_clip(row: float, factor: float) -> None:
    """Rows that are not finite, and rows so small that their norm underflows."""
    x, privacy = rows(), RecordPrivacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-5)
    released = []
    for value in (row, 0.0):
        x[1][0] = value
        channel = open_activations(privacy, x, ids=IDS, caps=np.array([4, 4, 4]), seed=0)
        channel.begin(0, torch.tensor([[1]]))
        released.append(channel.release(lambda k, where: torch.full((1, COUNTS[k]), factor, dtype=torch.float64)))
    assert (released[0] - released[1]).norm() <= 0.5 / COUNTS[1]


def test_misuse_is_refused() -> None:
    channel = door()
    with pytest.raises(PrivacyError, match="No activation has begun"):
        channel.release(ones)
    channel.begin(0, torch.tensor([[0, 1]]))
    with pytest.raises(PrivacyError, match="1 clients act; gradients of 2"):
        channel.channel.release([np.zeros((1, COUNTS[0]))] * 2)
    with pytest.raises(PrivacyError, match="releases left"):
        channel.begin(2, torch.tensor([[0]]))
    channel.release(ones)
    channel.release(ones)
    with pytest.raises(PrivacyError, match="does not follow"):
        channel.begin(1, torch.tensor([[0]]))
    with pytest.raises(ConfigError, match="simulation"):
        door(replicates=2, ledger_path=Path("x"))
    with pytest.raises(ConfigError, match="delta"):
        RecordPrivacy(clip_norm=1.0, epsilon=1.0, delta=0.0)


def test_activations_of_the_wrong_shape_or_number_are_refused() -> None:
    for wrong in ([[3]], [[-2]], [[0, 0], [1, 1]]):
        with pytest.raises(PrivacyError, match="from 0 to 2 or -1"):
            door().begin(0, torch.tensor(wrong))
    with pytest.raises(PrivacyError, match="shape \\(2, S\\)"):
        door(replicates=2).begin(0, torch.tensor([[0, 0]]))
    channel = door()
    channel.begin(0, torch.tensor([[0, 1]]))
    channel.release(ones)


def test_plans_that_activations_do_not_follow_are_refused() -> None:
    plan = GradientPlan(ids=IDS, counts=np.array(COUNTS), dimension=D, caps=np.array([4, 4, 4]))
    for unused in (
        {"steps": np.zeros(3, dtype=np.int64)},  # nothing would be charged
        {"relation": "zero_out"},
        {"batch_size": 2},
    ):
        with pytest.raises(PrivacyError, match=f"{next(iter(unused))}.*not for clients that act one at a time"):
            open_channel(PURE, (replace(plan, **unused),), "a schedule", seed=0)
    with pytest.raises(PrivacyError, match="caps"):
        open_channel(PURE, (replace(plan, caps=None),), "a schedule", seed=0)
    rows_of = ReleasePlan(name="update", dimension=D, uses=4)
    with pytest.raises(PrivacyError, match="'update' is of rows"):
        open_channel(PURE, (plan, rows_of), "a schedule", seed=0)
    with pytest.raises(ConfigError, match="source"):
        open_channel(PURE, (plan,), "a schedule", seed=0, replicates=2, source=SeededSource(0))
    with pytest.raises(ConfigError, match="None"):
        open_channel([None, None], (plan,), "a schedule", seed=0, replicates=2)
    nobody = replace(plan, counts=np.zeros(3, dtype=np.int64))
    assert open_channel(replace(PURE, delta=None), (nobody,), "a schedule", seed=0).delta == 1e-5


def test_without_privacy_nothing_is_clipped_or_noised() -> None:
    channel, x = door(None), rows()
    channel.begin(0, torch.tensor([[1]]))
    assert torch.allclose(channel.release(lambda k, where: 100 * ones(k, where))[0], 100 * x[1].mean(0))
    assert channel.epsilon == math.inf
    assert channel.report.text() == "not private: epsilon = inf, no clip, no noise"


def test_composition_at_delta_zero_is_the_sum_of_pure_epsilons() -> None:
    assert epsilon(dp_event.LaplaceDpEvent(4.0), 10, 0.0) == 2.5
    assert epsilon(dp_event.GaussianDpEvent(4.0), 10, 0.0) == math.inf


def test_what_a_published_accounting_charged_stays_refuted(tmp_path: Path) -> None:
    path, published = tmp_path / "ledger.jsonl", PublishedClaim(lambda z: 1.0 / z, "a private state is not protected")
    privacy = RecordPrivacy(clip_norm=1.0, epsilon=1.0, source="secure")
    door(privacy, ledger_path=path, published=published).close()
    door(privacy, ledger_path=path, published=published, resume=True).close()
    with pytest.raises(ResumeError, match="refuted"):
        door(privacy, ledger_path=path, resume=True)


def test_a_report_has_the_multipliers_of_all_clients_that_may_act() -> None:
    budgets = {"a": 0.1, "b": 10.0, "c": 1.0}
    channel = door(RecordPrivacy(clip_norm=1.0, epsilon=budgets, delta=1e-5))
    z = channel.noise_multipliers
    assert z is not None
    assert z.argmin() == 1
    assert f"of multipliers {z.min():.5g} to {z.max():.5g} by client" in channel.report.text()
    assert "multipliers" not in door(RecordPrivacy(clip_norm=1.0, noise_multiplier=2.0)).report.text()


def test_a_published_accounting_is_printed_beside_an_infinite_epsilon() -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=4.0, mechanism="l2_laplace", delta=1e-5)
    channel = door(privacy, published=PublishedClaim(lambda z: 1.0 / z + 0.5, "a private state is not protected"))
    assert channel.epsilon == 0.0
    channel.begin(0, torch.tensor([[0]]))
    report = channel.report
    assert (channel.epsilon, report.epsilon, report.by_client) == (math.inf, math.inf, None)
    assert report.claimed == 0.75
    assert report.refuted == "a private state is not protected"
    assert report.headline.startswith("not private")
    assert channel.caps.tolist() == [4, 4, 4], "caps hold as ever"
    assert door(privacy).report.claimed is None


def test_noise_is_the_same_however_much_is_drawn_ahead() -> None:
    clients = torch.tensor([[0, 1, -1, 1, 0, 0, 2, 1]])
    doors = [door(dimension=4) for _ in range(2)]
    for one in doors:
        one.begin(0, clients)
    asked: list[int] = []

    def factors(client: int, runs: np.ndarray) -> np.ndarray:
        asked.append(client)
        return np.full((len(runs), COUNTS[client]), 0.01 * len(asked))

    def two_at_once(window, start: int) -> None:
        part = slice(start, start + 2)
        of = window.clients[part], window.uses[part], window.scales[part]
        window.noise, window.widths = doors[1].channel._units("noise/gradient", *of)
        window.drawn = start

    expected = [answered(doors[0].channel, factors) for _ in clients[0]]
    asked.clear()
    doors[1].channel._draw_noise = two_at_once
    found = [answered(doors[1].channel, factors) for _ in clients[0]]
    assert asked == [0, 1, 1, 0, 0, 2, 1]
    assert np.array_equal(np.stack(found), np.stack(expected))
    assert not found[2].any()
    with pytest.raises(PrivacyError, match="nothing is charged for another one"):
        answered(doors[1].channel, factors)


def test_infinite_factors_are_clipped_whatever_the_others_are() -> None:
    """Otherwise a record that is not a number would take the others out of the sum."""
    channel = door(replace(PURE, epsilon=math.inf))

    def released(first: float) -> torch.Tensor:
        factors = torch.full((1, COUNTS[0]), math.inf, dtype=torch.float64)
        factors[0, 0] = first
        return channel.release(lambda client, where: factors)[0]

    channel.begin(0, torch.tensor([[0, 0]]))
    assert released(math.nan).equal(released(0.0))


@pytest.mark.parametrize("watched", ["record", "tap"])
@pytest.mark.parametrize("replicates", [1, 3])
def test_releases_have_the_same_bits_when_they_are_recorded_or_tapped(watched: str, replicates: int) -> None:
    clients = torch.tensor([[0, 1, -1, 1, 0, 0, 2, 1], [2, 1, 0, 1, -1, 0, 0, 2], [1, 1, 1, 0, 0, 2, 2, 0]])[
        :replicates
    ]

    def run(way: str) -> np.ndarray:
        one, made = door(dimension=4, replicates=replicates).channel, []

        def factors(client: int, runs: np.ndarray) -> np.ndarray:
            shift = made[-1].sum() * 1e-3 if made else 0.1
            return np.linspace(-1, 1, COUNTS[client])[None] * np.ones((len(runs), 1)) + shift

        one.record = [] if way == "record" else None
        one.tap = (lambda *_: None) if way == "tap" else None
        one.begin(0, clients)
        for _ in range(8):
            made.append(answered(one, factors))
        return np.stack(made)

    assert np.array_equal(run(watched), run("plain"))
