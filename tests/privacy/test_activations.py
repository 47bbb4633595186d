"""Releases of clients who act one at a time: clip, noise, caps, charges, replicates, weights of answers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import (
    GradientPlan,
    PublishedClaim,
    RecordPrivacy,
    ReleasePlan,
    SeededSource,
    activation_channel,
    open_channel,
)
from fedmtl.privacy.accounting.composition import epsilon
from fedmtl.privacy.records import GRADIENT
from tests.privacy.activations import COUNTS, IDS, PURE, D, door, nothing, open_activations, rows

WEIGHTS = [np.array([1.0, 2.0, 3.0, 10.0]), np.ones(4), np.array([5.0, 5.0, 1.0, 1.0])]
PLAIN: dict[str, Any] = {"ids": IDS, "caps": (4, 4, 4), "seed": 0}


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
        norms = torch.linalg.vector_norm(
            gradients, ord=1 if mechanism == "laplace" else 2, dim=1, keepdim=True
        )
        expected = (gradients * torch.clamp(0.5 / norms.clamp(min=1e-300), max=1.0)).mean(0)
        assert torch.allclose(moved[0], expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize(
    ("mechanism", "square"),
    [("gaussian", 1.0), ("laplace", 2.0), ("l2_laplace", D + 1.0)],  # of a coordinate, at scale 1
)
def test_the_noise_has_the_size_of_the_sensitivity(
    mechanism: Any, square: float, source: Any
) -> None:
    """One record replaces another, so a sum moves by 2 C, and the mean by 2 C / n."""
    uses, clip, multiplier = 1500, 0.5, 3.0
    privacy = RecordPrivacy(
        clip_norm=clip, noise_multiplier=multiplier, mechanism=mechanism, delta=1e-5, source=source
    )
    channel = door(privacy, caps=(uses, 1, 1))
    channel.begin(0, torch.zeros(1, uses, dtype=torch.int64))
    drawn = np.concatenate([channel.release(nothing) for _ in range(uses)])
    expected = math.sqrt(square) * 2 * clip * multiplier / COUNTS[0]
    assert math.sqrt(np.square(drawn).mean()) == pytest.approx(expected, rel=0.06)
    assert float(channel.noise_std()[0]) == pytest.approx(expected, rel=1e-9)


def test_caps_are_hard_and_nothing_is_charged_beyond_them() -> None:
    channel = door(caps=(2, 4, 4))
    channel.begin(0, torch.tensor([[0, 1, 0]]))
    for _ in range(3):
        channel.release(nothing)
    with pytest.raises(
        BudgetExhausted, match="client 0 would take part 3 times, above its cap of 2"
    ):
        channel.begin(3, torch.tensor([[1, 0]]))
    assert channel.accountant.uses.tolist() == [[2, 1, 0]]
    channel.begin(3, torch.tensor([[1, -1]]))
    assert bool(channel.release(nothing).any())
    assert not channel.release(nothing).any(), "nobody acts, nothing is released"


def test_pure_epsilons_add_up_to_each_clients_budget() -> None:
    budgets = {"a": 0.5, "b": 1.0, "c": 4.0}
    channel = door(
        RecordPrivacy(clip_norm=0.5, epsilon=budgets, mechanism="laplace", delta=0.0),
        caps=(2, 5, 8),
    )
    assert channel.noise_multipliers == pytest.approx(
        np.array([2 / 0.5, 5 / 1.0, 8 / 4.0]), rel=1e-4
    )
    channel.begin(0, torch.tensor([[0, 0, 1, 1, 1, 1, 1, *[2] * 8]]))
    assert channel.accountant.epsilons()[0] == pytest.approx(np.array([0.5, 1.0, 4.0]), rel=1e-4)
    assert (channel.accountant.epsilons() <= np.array([0.5, 1.0, 4.0])).all()
    report = channel.report
    assert (report.unit, report.relation, report.delta) == ("record", "replace", 0.0)
    assert report.releases == 15
    assert "Poisson" not in report.text()


def test_a_fixed_multiplier_and_a_budget_give_the_cap() -> None:
    privacy = RecordPrivacy(
        clip_norm=0.5, noise_multiplier=10.0, epsilon=0.55, mechanism="laplace", delta=0.0
    )
    assert door(privacy, caps=(3, 9, 9)).caps.tolist() == [
        3,
        5,
        5,
    ]  # 5 x 0.1 fits, 6 x 0.1 does not


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_a_client_that_acts_in_several_replicates_is_asked_once(mechanism: str) -> None:
    """Replicates by chance, some without a client; the releases of each are those of its client alone."""
    rng, replicates, counts = np.random.default_rng(0), 7, (5, 2, 6)
    privacy = replace(PURE, mechanism=mechanism, delta=0.0 if mechanism == "laplace" else 1e-5)
    clients = torch.from_numpy(rng.integers(-1, 3, (replicates, 30)))
    table = rng.standard_normal((3, replicates, max(counts))) * 10.0 ** rng.integers(
        -3, 4, max(counts)
    )
    table[:, :, 1], table[:, 0, 0] = math.nan, math.inf
    given = torch.from_numpy(table)
    channel, silent = (
        door(privacy, caps=(30,) * 3, counts=counts, replicates=replicates) for _ in range(2)
    )
    channel.begin(0, clients)
    silent.begin(0, clients)
    for acting in clients.T.tolist():
        assert [client for client, _ in channel.acting] == sorted(
            {client for client in acting if client >= 0}
        )
        found = channel.release(lambda k, runs: given[k, runs, : counts[k]])
        found -= silent.release(lambda k, runs: torch.zeros(len(runs), counts[k]).double())
        for run, client in enumerate(acting):
            expected = np.zeros(D)
            if client >= 0:
                expected = (
                    channel.records.of_factors(client, table[client, [run], : counts[client]])[0]
                    / counts[client]
                )
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
    first.accountant.ledger._file.close()  # killed
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["cohorts"] for line in lines if line["kind"] == "charge"] == [
        [[0], [1], [2]],
        [[2], [2], [1]],
    ]
    second = opened()
    second.start(2)  # a checkpoint after two activations; the next block is cut elsewhere
    assert second.accountant.uses.tolist() == [[1, 1, 0]]
    second.begin(2, torch.tensor([[2, 2, 2, 1, 0]]))
    assert torch.equal(second.release(ones), values[2])
    assert second.accountant.uses.tolist() == [[2, 2, 3]]
    second.close()
    third = opened()
    third.start(2)
    assert third.accountant.uses.tolist() == [[1, 1, 0]]
    assert third.report.epsilon == pytest.approx(
        2.0 / 9 * 3
    )  # seven answers were seen, three of them client 2's
    assert third.report.releases == 7
    assert third.report.by_client == pytest.approx((2.0 / 9 * 2, 2.0 / 9 * 2, 2.0 / 9 * 3))
    third.close()
    with pytest.raises(ResumeError, match="step 7 is not charged"):
        opened().start(9)


@pytest.mark.parametrize(("row", "factor"), [(math.inf, 1.0), (math.nan, 1.0), (1e-200, 1e210)])
def test_no_row_escapes_the_clip(row: float, factor: float) -> None:
    """Rows that are not finite, and rows so small that their norm underflows."""
    x, privacy = rows(), RecordPrivacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-5)
    released = []
    for value in (row, 0.0):
        x[1][0] = value
        channel = open_activations(privacy, x, ids=IDS, caps=np.array([4, 4, 4]), seed=0)
        channel.begin(0, torch.tensor([[1]]))
        released.append(
            channel.release(
                lambda k, where: torch.full((1, COUNTS[k]), factor, dtype=torch.float64)
            )
        )
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
    for first in (1, 3):
        with pytest.raises(PrivacyError, match="does not follow"):
            channel.begin(first, torch.tensor([[0]]))
    with pytest.raises(ConfigError, match="simulation"):
        door(replicates=2, ledger_path=Path("x"))
    with pytest.raises(ConfigError, match="delta"):
        RecordPrivacy(clip_norm=1.0, epsilon=1.0, delta=0.0)


def test_a_sum_of_gradients_is_the_same_in_any_order_of_the_records() -> None:
    """Also where it is near the number of records times the clip norm, beside which the last bits of one are small."""
    client, count = 2, COUNTS[2]
    channel = door(replace(PURE, clip_norm=1.0))
    generator = torch.Generator().manual_seed(3)
    gradients = torch.zeros(1, count, D, dtype=torch.float64)
    gradients[:, :, 0] = 0.6 + 0.3 * torch.rand(count, generator=generator, dtype=torch.float64)
    there = channel.records.of_gradients(client, gradients)
    for shift in (1, 17, 40):
        again = channel.records.of_gradients(client, gradients.roll(shift, 1))
        np.testing.assert_array_equal(again, there)


def test_the_steps_before_a_client_passes_its_cap_are_counted() -> None:
    channel = door(caps=(2, 3, 0))
    blocks = torch.tensor([[0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 2]])
    for block, fitting in zip(blocks[:, None, :, None].numpy(), (4, 3, 5), strict=True):
        assert channel.accountant.fitting(block).tolist() == [fitting]
        assert channel.accountant.fitting(block[:, :2]).tolist() == [2], "none of them passes it"


def test_activations_of_the_wrong_shape_or_number_are_refused() -> None:
    for wrong in ([[3]], [[-2]], [[0, 0], [1, 1]]):
        with pytest.raises(PrivacyError, match="from 0 to 2 or -1"):
            door().begin(0, torch.tensor(wrong))
    with pytest.raises(PrivacyError, match="shape \\(2, S\\)"):
        door(replicates=2).begin(0, torch.tensor([[0, 0]]))


def test_plans_that_activations_do_not_follow_are_refused() -> None:
    plan = GradientPlan(ids=IDS, counts=np.array(COUNTS), dimension=D, caps=np.array([4, 4, 4]))
    for unused in (
        {"steps": np.zeros(3, dtype=np.int64)},
        {"batch_size": 2},
    ):  # by the former nothing would be charged
        with pytest.raises(
            PrivacyError, match=f"{next(iter(unused))}.*not for clients that act one at a time"
        ):
            open_channel(PURE, (replace(plan, **unused),), "a schedule", seed=0)
    with pytest.raises(PrivacyError, match="caps"):
        open_channel(PURE, (replace(plan, caps=None),), "a schedule", seed=0)
    rows_of = ReleasePlan(name="update", dimension=D)
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
    assert torch.allclose(
        channel.release(lambda k, where: 100 * ones(k, where))[0], 100 * x[1].mean(0)
    )
    assert channel.epsilon == math.inf
    assert channel.report.text() == "not private: epsilon = inf, no clip, no noise"


def test_composition_at_delta_zero_is_the_sum_of_pure_epsilons() -> None:
    assert epsilon(dp_event.LaplaceDpEvent(4.0), 10, 0.0) == 2.5
    assert epsilon(dp_event.GaussianDpEvent(4.0), 10, 0.0) == math.inf


def test_what_a_published_accounting_charged_stays_refuted(tmp_path: Path) -> None:
    path, published = (
        tmp_path / "ledger.jsonl",
        PublishedClaim(lambda z: 1.0 / z, "a private state is not protected"),
    )
    privacy = RecordPrivacy(clip_norm=1.0, epsilon=1.0, source="secure")
    door(privacy, ledger_path=path, published=published).close()
    door(privacy, ledger_path=path, published=published, resume=True).close()
    with pytest.raises(ResumeError, match="refuted"):
        door(privacy, ledger_path=path, resume=True)


def test_a_report_has_the_multipliers_of_all_clients_that_may_act() -> None:
    budgets = {"a": 0.1, "b": 10.0, "c": 1.0}
    channel = door(RecordPrivacy(clip_norm=1.0, epsilon=budgets, delta=1e-5))
    z = channel.noise_multipliers
    assert z.argmin() == 1
    assert f"of multipliers {z.min():.5g} to {z.max():.5g} by client" in channel.report.text()
    assert (
        "multipliers" not in door(RecordPrivacy(clip_norm=1.0, noise_multiplier=2.0)).report.text()
    )


def test_a_published_accounting_is_printed_beside_an_infinite_epsilon() -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=4.0, mechanism="l2_laplace", delta=1e-5)
    channel = door(
        privacy,
        published=PublishedClaim(lambda z: 1.0 / z + 0.5, "a private state is not protected"),
    )
    assert channel.epsilon == 0.0
    channel.begin(0, torch.tensor([[0]]))
    report = channel.report
    assert (channel.epsilon, report.epsilon, report.by_client) == (math.inf, math.inf, None)
    assert report.claimed == 0.75
    assert report.refuted == "a private state is not protected"
    assert report.headline.startswith("not private")
    assert channel.caps.tolist() == [4, 4, 4], "caps hold as ever"
    assert door(privacy).report.claimed is None


def test_noise_is_the_same_however_much_is_drawn_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, made = torch.tensor([[0, 1, -1, 1, 0, 0, 2, 1]]), []
    for ahead in (1 << 20, 2 * D):
        monkeypatch.setattr(activation_channel, "_DRAWN", ahead)
        channel = door()
        channel.begin(0, clients)
        made.append([channel.release(ones) for _ in clients[0]])
    assert torch.equal(*map(torch.stack, made))
    assert not made[0][2].any()


def test_infinite_factors_are_clipped_whatever_the_others_are() -> None:
    """Otherwise a record that is not a number would take the others out of the sum."""
    channel = door(replace(PURE, epsilon=math.inf))

    def released(first: float) -> torch.Tensor:
        factors = torch.full((1, COUNTS[0]), math.inf, dtype=torch.float64)
        factors[0, 0] = first
        return channel.release(lambda client, where: factors)[0]

    channel.begin(0, torch.tensor([[0, 0]]))
    assert released(math.nan).equal(released(0.0))


def test_releases_have_the_same_bits_when_they_are_recorded_or_tapped() -> None:
    clients = torch.tensor([[0, 1, -1, 1, 0, 0, 2, 1], [2, 1, 0, 1, -1, 0, 0, 2]])

    def run(**watched: Any) -> torch.Tensor:
        channel, made = door(replicates=2), [torch.full((2, D), 0.1)]
        for name, value in watched.items():
            setattr(channel, name, value)
        channel.begin(0, clients)
        for _ in range(8):
            made.append(channel.release(lambda k, runs: (1 + made[-1].sum()) * ones(k, runs)))
        return torch.stack(made[1:])

    plain = run()
    assert torch.equal(run(record=[]), plain)
    assert torch.equal(run(tap=lambda *_: None), plain)


# Weights of answers


def test_pure_budgets_are_divided_in_proportion_to_the_weights() -> None:
    channel = door(allocation=WEIGHTS)
    assert channel.noise_multipliers == pytest.approx(
        np.full(3, 4 / 2.0), rel=1e-4
    )  # mean weight 1: z = cap / epsilon
    channel.begin(0, torch.tensor([[0, 0, 2]]))
    assert channel.accountant.epsilons()[0] == pytest.approx([2 * 3 / 16, 0, 2 * 5 / 12], rel=1e-4)
    for _ in range(3):
        channel.release(nothing)
    channel.begin(3, torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2]]))
    assert channel.accountant.epsilons()[0] == pytest.approx([2.0] * 3, rel=1e-4)
    assert (channel.accountant.epsilons() <= 2.0).all()


def test_equal_weights_are_no_weights() -> None:
    plain, weighted = door(), door(allocation=[np.full(4, 7.0)] * 3)
    assert np.array_equal(plain.noise_multipliers, weighted.noise_multipliers)
    assert {cost.weights for cost in weighted.costs.kinds} == {None}


def test_a_fixed_multiplier_caps_by_the_weights_in_order() -> None:
    privacy = RecordPrivacy(
        clip_norm=0.5, noise_multiplier=10.0, epsilon=0.16, mechanism="laplace", delta=0.0
    )
    channel = door(
        privacy, allocation=WEIGHTS
    )  # epsilons .025 .05 .075 .25; .1 x 4; .167 .167 .033 .033
    assert channel.caps.tolist() == [3, 1, 0]


# Gradients of any model


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_any_model_are_clipped_one_by_one(mechanism: str, dtype: torch.dtype) -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=3.0, mechanism=mechanism, delta=1e-5)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(2, n, D, generator=generator).to(dtype) for n in COUNTS]
    gradients[1][0, 3] = math.nan
    gradients[1][1, 4] = 1e30
    options = {"counts": np.array(COUNTS), "dimension": D, "replicates": 2}
    channel, silent = (open_activations(privacy, None, **PLAIN, **options) for _ in range(2))
    clients = torch.tensor([[1, 0, 1], [1, 2, 1]])
    channel.begin(0, clients)
    silent.begin(0, clients)
    for s in range(2):
        found = channel.release(lambda k, where: gradients[k][where])
        noise = silent.release(lambda k, where: torch.zeros(len(where), COUNTS[k], D))
        for r in range(2):
            rows = gradients[clients[r, s]][r].double().nan_to_num(0.0)
            norms = torch.linalg.vector_norm(
                rows, ord=1 if mechanism == "laplace" else 2, dim=1, keepdim=True
            )
            expected = (rows * torch.clamp(0.5 / norms.clamp(min=1e-300), max=1.0)).mean(0)
            assert torch.allclose(found[r] - noise[r], expected, rtol=1e-5, atol=1e-9)
    with pytest.raises(ConfigError, match=r"of shape \(2, 20, 3\); needed: \(2, 20, 4\)"):
        channel.release(lambda k, where: gradients[k][where][..., :3])
    with pytest.raises(ConfigError, match="opened without rows"):
        channel.release(nothing)


# What a plan has


def test_clients_without_data_are_nobody() -> None:
    channel = door(counts=(5, 0, 60))
    channel.begin(0, torch.tensor([[1, 0, 1]]))
    assert [bool(channel.release(ones).any()) for _ in range(3)] == [False, True, False]
    assert channel.accountant.uses.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"allocation": [np.ones(4), np.ones(3), np.ones(4)]},
            r"allocation of client 1 has shape \(3,\); it may act 4",
        ),
        ({"allocation": [np.array([1.0, 0.0, 1.0, 1.0]), *WEIGHTS[1:]]}, "positive finite weights"),
        ({"allocation": WEIGHTS[:2]}, "weights for 2 clients, there are 3"),
        ({"caps": (4, 4)}, r"caps has shape \(2,\).*each of 3 clients"),
        ({"caps": (4, -1, 4)}, "caps .*whole number of at least 0"),
        ({"caps": (4, 2.5, 4)}, "caps .*dtype float64"),
        ({"rate": np.array([0.5, 0.5])}, "rate is .*each of 3 clients"),
        ({"rate": "all"}, "rate is 'all'"),
        *(({"rate": rate}, "rate is") for rate in (0.0, 1.1, math.nan)),
        *(
            ({"x": x}, r"x must have rows \(n_i, 4\) of each of 3 clients")
            for x in ([], [torch.zeros(4)] * 3)
        ),
        (
            {"x": [*rows()[:2], torch.zeros(5, 3)]},
            r"x must have rows \(n_i, 4\) of each of 3 clients",
        ),
        ({"x": None, "counts": np.ones(3, dtype=int), "dimension": 0}, "dimension is 0"),
        ({"x": None, "counts": np.ones(2, dtype=int), "dimension": 3}, "counts has shape"),
    ],
)
def test_plans_of_wrong_values_are_refused(options: dict, match: str) -> None:
    given = {"x": rows(), **PLAIN} | options
    with pytest.raises(ConfigError, match=match):
        open_activations(PURE, given.pop("x"), **given | {"caps": np.array(given["caps"])})


@pytest.mark.parametrize("before", [[], [-1], [-1, 0]])
def test_the_last_secure_value_has_its_own_number_and_grid(before: list[int]) -> None:
    """The grid is that of its client's noise, whoever else acts, or does not, in the block."""
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=3.0, delta=1e-5, source="secure")
    alone, among = door(privacy), door(privacy)
    alone.begin(0, torch.tensor([[2]]))
    alone.release(nothing)
    among.begin(0, torch.tensor([[*before, 2]]))
    for _ in before:
        among.release(nothing)
    released = among.release(nothing)
    found, expected = (each.records.on_grid[GRADIENT] for each in (among, alone))
    assert found.step == len(before)
    assert found.width == expected.width
    assert found.off_grid == 0
    assert torch.equal(found.value, released[0])
