"""FedSGD in learned ranges: counts of records, the ranges by them, descent in their units, sensitivity and cost."""

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmtl import (
    Average,
    ClientPrivacy,
    FedSGD,
    FullParticipation,
    RangedSGD,
    RecordPrivacy,
    Result,
    SecureAggregation,
    ServerOptimizer,
    Trainer,
    models,
)
from fedmtl.contrib import ranged_sgd
from fedmtl.contrib.average import average_numbers
from fedmtl.contrib.units import BINS, Units, learned_range, places
from fedmtl.data import Domain, FederatedDataset
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import open_channel
from tests.algorithms.harness import problem_of
from tests.helpers import ragged_classification

ROUNDS, COUNTS, CLIP = 9, 2, 0.7
SOME = SecureAggregation(colluding=1, bits=64)
LITTLE = RecordPrivacy(clip_norm=CLIP, noise_multiplier=1e-6, delta=1e-5, aggregation=SOME)
OPTIMIZER = ServerOptimizer(
    optimizer_name="AdamNorm", lr=0.05, options={"betas": (0.9, 0.99), "eps": 1e-8}
)


@cache
def table(clients: int = 6, count: int = 15, wide: float = 10.0, seed: int = 0) -> FederatedDataset:
    """Rows of a common linear model with levels of the clients, whose values lie in a part of the declared ranges."""
    rng = np.random.default_rng(seed)
    found = {}
    for client in range(clients):
        x = rng.uniform(-1, 1, (count, 3))
        y = x @ [0.3, -0.2, 0.1] + 0.1 * rng.normal() + 0.03 * rng.normal(size=count)
        moved = np.array([0.4, 0.0, -0.7]) * (1 - 1 / wide)
        found[f"client-{client}"] = (moved + x / wide, (y + 1) / wide - 1)
    return FederatedDataset.from_tensors(
        found, classes=None, domain=Domain(l1=3.0, l2=3**0.5, target=1.0), seed=seed
    )


def trainer(privacy: Any = LITTLE, **options: Any) -> Trainer:
    usual: dict[str, Any] = {
        "algorithm": RangedSGD(range_rounds=COUNTS, averaged=True, server_optimizer=OPTIMIZER),
        "data": table(),
        "model": models.linear_regression(),
        "loss": "half_mse",
        "schedule": FullParticipation(),
        "privacy": privacy,
        "rounds": ROUNDS,
        "seed": 2,
        "dtype": "float64",
        "baselines": (),
        "progress": False,
    }
    return Trainer(**{**usual, **options})


def rows_of(data: FederatedDataset) -> tuple[np.ndarray, np.ndarray]:
    return data.train.x.double().numpy(), data.train.y.double().numpy()


def public_after(
    monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Result, dict[str, Tensor]]:
    """A run, and the public state after its last round."""
    states = []
    original = RangedSGD.server_update

    def watched(self, problem, public, released):
        states.append(original(self, problem, public, released))
        return states[-1]

    monkeypatch.setattr(RangedSGD, "server_update", watched)
    result = trainer(**options).fit()
    return result, states[-1]


# Ranges


def shortest_by_hand(shares: np.ndarray) -> tuple[float, float]:
    """All intervals, one after the other: the least width, and of that width the most records."""
    shares = shares - (shares.sum() - 1) / BINS
    inside = {
        (last - first, -sum(shares[first:last].tolist())): (first, last)
        for first, last in itertools.combinations(range(BINS + 1), 2)
        if sum(shares[first:last].tolist()) >= 0.95
    }
    first, last = inside[min(inside)]
    middle, half = (first + last) / BINS - 1, 2 * (last - first) / BINS
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    return (low + high) / 2, (high - low) / 2


@pytest.mark.parametrize("noise", [1e-6, 0.002, 0.05, 1.0])
def test_a_range_is_the_shortest_interval_of_a_loop_over_all(noise: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(4):
        values = rng.normal(rng.uniform(-0.8, 0.8), 0.1, size=500)
        shares = np.bincount(places(values), minlength=BINS) / len(values)
        shares = shares + noise * rng.normal(size=BINS)
        np.testing.assert_allclose(learned_range(shares), shortest_by_hand(shares), atol=1e-12)


def test_a_range_of_exact_counts_is_twice_the_shortest_window_of_records() -> None:
    """The window of sorted records, in whole bins."""
    rng = np.random.default_rng(4)
    values = np.sort(0.1 * rng.exponential(size=2000) - 0.9)
    kept = math.ceil(0.95 * len(values))
    lengths = values[kept - 1 :] - values[: len(values) - kept + 1]
    first = int(lengths.argmin())
    middle, half = learned_range(np.bincount(places(values), minlength=BINS) / len(values))
    assert middle - half == -1.0  # cut at the low end of the declared range
    end = values[first] + 1.5 * lengths[first]
    assert abs(middle + half - end) < 4 / BINS


def test_bins_are_those_of_a_histogram_and_take_what_is_outside() -> None:
    values = np.append(np.random.default_rng(0).uniform(-1, 1, 300), [-1.0, 1.0, 0.0])
    counted = np.bincount(places(values), minlength=BINS)
    np.testing.assert_array_equal(counted, np.histogram(values, bins=BINS, range=(-1, 1))[0])
    assert places(np.array([-7.0, 1e300])).tolist() == [0, BINS - 1]


def test_a_model_predicts_the_same_in_all_units() -> None:
    rng = np.random.default_rng(1)
    units = Units.of(np.append(rng.uniform(-1, 1, 4), rng.uniform(0.1, 1, 4)))
    x, y, model = rng.normal(size=(9, 3)), rng.normal(size=9), rng.normal(size=4)
    moved, targets = units.records(x, y)
    inside = units.inside(model)
    np.testing.assert_allclose(
        (moved @ inside[:3] + inside[3] - targets) * units.half[-1],
        x @ model[:3] + model[3] - y,
        rtol=1e-10,
    )
    np.testing.assert_allclose(units.declared(inside), model, rtol=1e-10)
    edge = abs(0.8 - units.middle[-1]) / units.half[-1]
    assert units.limit(0.8) >= edge


# Rounds


@pytest.mark.parametrize("privacy", [None, LITTLE])
def test_the_released_counts_are_those_of_a_histogram(monkeypatch, privacy) -> None:
    _, public = public_after(monkeypatch, privacy=privacy)
    x, y = rows_of(table())
    for shares, values in zip(public["shares"].numpy(), [*x.T, y], strict=True):
        counted = np.histogram(values, bins=BINS, range=(-1, 1))[0]
        np.testing.assert_allclose(shares, counted / len(y), atol=1e-4)
    for (middle, half), values in zip(public["units"].T.tolist(), [*x.T, y], strict=True):
        inside = np.abs(values - middle) <= half + 1e-9
        assert inside.mean() >= 0.95
        assert half <= 0.25  # of values that are ten times as narrow as declared


def test_the_model_is_that_of_descent_in_the_learned_units(monkeypatch) -> None:
    """A loop over the rounds and the records, with next to no noise."""
    result, public = public_after(monkeypatch)
    middle, half = public["units"].numpy()
    x, y = rows_of(table())
    x = np.append((x - middle[:-1]) / half[:-1], np.ones((len(y), 1)), 1)
    y = (y - middle[-1]) / half[-1]
    w, mean, square, found = np.zeros(4), np.zeros(4), 0.0, []
    for t in range(1, ROUNDS - COUNTS + 1):
        gradient = np.zeros(4)
        for row, target in zip(x, y, strict=True):
            of_record = (row @ w - target) * row
            gradient += of_record * min(1.0, CLIP / np.linalg.norm(of_record)) / len(y)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * np.mean(gradient**2)
        w = w - 0.05 * (mean / (1 - 0.9**t)) / math.sqrt(square / (1 - 0.99**t))
        found.append(w)
    # the rounds 5 to 9 of nine are the last half
    w = np.mean(found[-(ROUNDS - ROUNDS // 2) :], 0)
    slopes = w[:3] * half[-1] / half[:-1]
    level = middle[-1] + half[-1] * w[3] - slopes @ middle[:-1]
    np.testing.assert_allclose(result.shared.numpy(), np.append(slopes, level), atol=1e-4)


def test_clients_average_in_the_learned_units(monkeypatch) -> None:
    finetune = Average(noise=0.3)
    result, public = public_after(monkeypatch, finetune=finetune)
    numbers = tuple(public["units"].flatten().tolist())
    units, data = Units.of(numbers), table()
    for client in range(2):
        first, end = data.train.offsets[client : client + 2].tolist()
        x, y = (part[first:end] for part in rows_of(data))
        inside, targets = units.records(x, y)
        base = units.inside(result.shared.numpy())
        limit = (1 + abs(units.middle[-1])) / units.half[-1]
        own, _ = average_numbers(inside, targets, base, True, 0.3, limit)
        np.testing.assert_allclose(result.personal[client], units.declared(own), rtol=1e-6)


def test_ranges_that_are_ten_times_too_wide_gain_much() -> None:
    """Automatic settings at epsilon 3, beside the same without rounds of counts."""
    privacy = RecordPrivacy(epsilon=3.0, aggregation=SecureAggregation())
    chosen = Trainer(data=table(80, 5), privacy=privacy, progress=False)
    assert isinstance(chosen.algorithm, RangedSGD)
    optimizer = chosen.algorithm.server_optimizer
    plain = FedSGD(rate=1.0, averaged=True, server_optimizer=optimizer)
    before = replace(chosen, algorithm=plain)
    assert chosen.fit().metrics["mse"] < 0.8 * before.fit().metrics["mse"]


# Privacy


def sums_of(data: FederatedDataset, round: int, public: dict[str, Tensor], channel: Any) -> Tensor:
    """The sums that the clients of a round send, and that a secure sum adds up."""
    made = trainer(data=data)
    problem = made.problem()
    cohort = ranged_sgd.ClientBatch(
        problem,
        torch.arange(len(data)),
        public,
        round=round,
        charged_steps=channel.local,
    )
    rows, _ = made.algorithm.client_update(cohort)
    return rows["gradient_sum"]


def opened(data: FederatedDataset) -> Any:
    made = trainer(data=data)
    problem = made.problem()
    plans = [*made.algorithm.plan(problem, None), made.algorithm.gradient_plan(problem, 1)]
    channel = open_channel(LITTLE, plans, FullParticipation().bind(len(data)), seed=0, steps=ROUNDS)
    channel.begin(0, channel.draw(0))
    return channel


def given(rows: dict[str, tuple[Tensor, Tensor]]) -> FederatedDataset:
    return FederatedDataset.from_tensors(rows, test=rows, classes=None)


def largest_move(round: int) -> float:
    """The most that one record moves the sum of all clients, of records within and far beyond the ranges."""
    made, most = torch.Generator().manual_seed(0), 0.0
    rows = {
        name: (torch.rand(6, 3, generator=made).double(), torch.rand(6, generator=made).double())
        for name in "abc"
    }
    without = given(rows)
    public = trainer(data=without).algorithm.init(trainer(data=without).problem()).public
    public["units"][1] = 1 / 32  # the least half length, in whose units values are largest
    before = sums_of(without, round, public, opened(without))
    for scale in (0.1, 1.0, 1e3, 1e30):
        x, y = rows["b"]
        added = scale * torch.randn(1, 3, generator=made).double()
        more = given(rows | {"b": (torch.cat([x, added]), torch.cat([y, y.new_full((1,), scale)]))})
        moved = sums_of(more, round, public, opened(more)) - before
        assert not moved[[0, 2]].any()  # of its client alone
        most = max(most, float(moved.norm()))
    return most


@pytest.mark.parametrize("round", [0, COUNTS])
def test_a_record_moves_the_sum_by_the_clip_norm_at_most(round: int, monkeypatch) -> None:
    most = largest_move(round)
    assert 0.9 * CLIP < most <= CLIP
    # without the clip of the vectors the same attack succeeds
    monkeypatch.setattr("fedmtl.privacy.records.clipped_segment_sums", _not_clipped)
    assert largest_move(round) > 2 * CLIP


def _not_clipped(rows, client, count, clip, onto=None, width=None):
    totals = torch.zeros(count, rows.shape[1], dtype=torch.float64) if onto is None else onto
    return totals.index_add_(0, client, torch.nan_to_num(rows, 0.0, 0.0, 0.0))


def test_a_count_has_the_share_of_its_column_in_the_clip_norm() -> None:
    """Four columns of three features and a target: each has C / 2 in one bin, whatever the values."""
    data = table(3, 6, 10.0)
    public = trainer(data=data).algorithm.init(trainer(data=data).problem()).public
    sums = sums_of(data, 0, public, opened(data))
    counted = sums[:, 4:].reshape(3, 4, BINS).sum(2)
    counts = data.train.counts.double()[:, None].expand(3, 4)
    np.testing.assert_allclose(counted, counts * CLIP / 2, rtol=1e-4)
    assert not sums[:, :4].any()


def test_vectors_are_made_for_so_many_records_as_have_so_many_numbers(monkeypatch) -> None:
    """A vector has 65 numbers for each column, so that the records of a wide table come in more pieces."""
    monkeypatch.setattr(ranged_sgd, "_NUMBERS", 1000)  # of three vectors of 260 numbers
    made, original = [], ranged_sgd._sums

    def watched(c, chunks):
        def each():
            for vectors, place in chunks:
                made.append(len(vectors))
                yield vectors, place

        return original(c, each())

    monkeypatch.setattr(ranged_sgd, "_sums", watched)
    few = trainer(rounds=3).fit()
    assert max(made) == 3
    monkeypatch.undo()
    assert torch.equal(few.shared, trainer(rounds=3).fit().shared)


def test_sums_that_are_not_the_clipped_ones_are_refused(monkeypatch) -> None:
    original = RangedSGD.client_update
    monkeypatch.setattr(
        RangedSGD,
        "client_update",
        lambda self, c: ({"gradient_sum": 2 * original(self, c)[0]["gradient_sum"]}, c.states),
    )
    with pytest.raises(PrivacyError, match="takes the rows that ClientBatch"):
        trainer().fit()


def test_rounds_of_counts_cost_as_any_round(tmp_path) -> None:
    privacy = RecordPrivacy(clip_norm=CLIP, epsilon=3.0, delta=1e-5, aggregation=SOME)
    reports = {}
    for algorithm in (
        RangedSGD(range_rounds=COUNTS),
        FedSGD(rate=1.0),
    ):
        folder = tmp_path / algorithm.name
        reports[algorithm.name] = trainer(privacy, algorithm=algorithm, folder=folder).fit().privacy
        lines = (folder / "private/ledger.jsonl").read_text(encoding="utf-8").splitlines()
        reports[algorithm.name + " lines"] = len(lines)
    ranged, plain = reports["ranged_sgd"], reports["fedsgd"]
    assert ranged.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-6)
    assert 2.9 < ranged.epsilon <= 3.0
    assert reports["ranged_sgd lines"] == reports["fedsgd lines"]


# Wrong input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": models.linear_regression(bias=False)}, "for a linear model with a bias"),
        ({"loss": "huber:1"}, "RangedSGD learns the ranges of features and of a real target"),
        (
            {"privacy": replace(LITTLE, aggregation=None)},
            "RangedSGD counts single records in a secure sum: set privacy=secure_records",
        ),
        ({"privacy": ClientPrivacy(epsilon=3.0, clip_norm=1.0)}, "or fedavg for whole clients"),
        ({"algorithm": RangedSGD(range_rounds=9)}, "range_rounds is 9, and the run has 9 rounds"),
    ],
)
def test_what_has_no_use_for_ranges_is_refused(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**changes).fit()


def test_classes_have_no_range() -> None:
    with pytest.raises(ConfigError, match="of a real target"):
        trainer(
            data=ragged_classification(4), model=models.softmax_regression(), loss="cross_entropy"
        ).fit()


@pytest.mark.parametrize("units", [(0.0,), (0.0, 0.0), (0.0, math.nan), (0.0, math.inf)])
def test_units_of_no_length_are_refused(units) -> None:
    with pytest.raises(ConfigError, match=r"Average\.units is .*half lengths above 0"):
        Average(units=units)


def test_units_of_other_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Average\.units has 4 numbers"):
        Average(units=(0.0, 0.0, 1.0, 1.0)).check(problem_of(table(), loss="half_mse"))
