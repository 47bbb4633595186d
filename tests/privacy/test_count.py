"""The count of rows within an adaptive clip norm: how far neighbours move it, and what is charged for that."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from dp_accounting import dp_event

from fedmtl import (
    ClientPrivacy,
    CyclicCohorts,
    FedAvg,
    FixedCohort,
    FullParticipation,
    QuantileClip,
)
from fedmtl.audit.verification import verify
from fedmtl.privacy import Receipt, ReleasePlan, epsilon, open_channel
from fedmtl.privacy.noise.grid import IndependentNoise
from fedmtl.privacy.quantile import count_rows, count_sensitivity

from ..trainer.settings import DELTA, SOLVER, trainer

NORM = 1.0
ROWS = (
    0.0,
    0.5,
    1.0,
    1.5,
    float("inf"),
)  # norms of what clients send: nothing, within the clip norm, beyond it
ABSENT = None
Cohort = tuple[float | None, ...]


def count(cohort: Cohort) -> float:
    """The sum of b - 1/2 over the rows that are there."""
    norms = torch.tensor([norm for norm in cohort if norm is not ABSENT], dtype=torch.float64)
    return float(count_rows(norms, NORM).sum())


def add_remove(first: float) -> Iterator[float | None]:
    yield ABSENT


def replace(first: float) -> Iterator[float | None]:
    yield from ROWS


def zero_out(first: float) -> Iterator[float | None]:
    """Of a client that sends no row without data."""
    yield ABSENT


def zero_out_of_rows(first: float) -> Iterator[float | None]:
    """Of a client that sends a row without data, whatever it is: zero, or what the public model makes of nothing."""
    yield from ROWS


NEIGHBOURS = {
    "add_remove": (add_remove, False, "add_remove"),
    "replace": (replace, False, "replace"),
    "zero_out": (zero_out, False, "zero_out"),
    "zero_out, clients without data send rows": (zero_out_of_rows, True, "zero_out"),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_the_sensitivity_is_the_largest_distance_of_neighbours(name: str) -> None:
    """Of all cohorts of up to three clients, and all neighbours that differ in the first of them."""
    others_of, without_data, relation = NEIGHBOURS[name]
    plan = ReleasePlan(name="update", dimension=1, without_data=without_data)
    largest = max(
        abs(count((own, *others)) - count((other, *others)))
        for size in range(3)
        for others in product(ROWS, repeat=size)
        for own in ROWS
        for other in others_of(own)
    )
    assert count_sensitivity(plan.relation_of_rows(relation)) == largest


SCHEDULES = {
    "add_remove": (FullParticipation(), False, 0.5, 1.0),
    "replace": (FixedCohort(4), False, 1.0, 2.0),
    "zero_out": (CyclicCohorts(4), False, 0.5, 1.0),
    "zero_out of rows": (CyclicCohorts(4), True, 1.0, 2.0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_noise_of_the_count_and_the_update_are_charged_at_these_sensitivities(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are what the one Gaussian release of the cost is split into; rows move by C, or by 2 C."""
    schedule, without_data, count_moves, row_moves = SCHEDULES[name]
    clip = QuantileClip(initial=NORM, count_noise=3.0)
    privacy = ClientPrivacy(clip_norm=clip, noise_multiplier=1.5, delta=1e-5)
    plan = ReleasePlan(name="update", dimension=3, without_data=without_data)
    channel = open_channel(privacy, (plan,), schedule.bind(8), seed=3, steps=4)
    drawn = {}
    made = IndependentNoise.__init__

    def spied(self, law, source, key, *arguments, sensitivity, **options):
        drawn[key] = law.multiplier * sensitivity, sensitivity
        made(self, law, source, key, *arguments, sensitivity=sensitivity, **options)

    monkeypatch.setattr(IndependentNoise, "__init__", spied)
    cohort = channel.draw(0)
    channel.begin(0, cohort)
    channel.release("update", torch.zeros(len(cohort), 3), cohort)
    (row_std, moved), (count_std, counted) = drawn["noise/update"], drawn["noise/update/count"]
    assert count_std == pytest.approx(3.0, rel=1e-12)
    assert (moved, counted) == (row_moves * NORM, count_moves)
    both = dp_event.ComposedDpEvent(
        [
            dp_event.GaussianDpEvent(row_std / (row_moves * NORM)),
            dp_event.GaussianDpEvent(count_std / count_moves),
        ]
    )
    assert channel.epsilon == pytest.approx(epsilon(both, 1, 1e-5), rel=1e-9)


class Accepting(FedAvg):
    """Clients without data send a row of zeros."""

    accepts_empty_clients = True


def test_a_run_whose_algorithm_accepts_clients_without_data_has_the_noise_of_a_replacement(
    tmp_path: Path,
) -> None:
    stds = []
    for kind in (FedAvg, Accepting):
        privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=1.5, delta=DELTA, source="secure")
        folder = tmp_path / kind.__name__
        settings = {"schedule": CyclicCohorts(4), "privacy": privacy, "rounds": 2}
        report = trainer(algorithm=kind(local=SOLVER), folder=folder, **settings).fit().privacy
        assert report.relation == "zero_out"
        stds.append(report.noise_std)
        assert verify(folder).fits
    assert stds == pytest.approx([1.5 * 0.7 / 4, 2 * 1.5 * 0.7 / 4], rel=1e-12)


def test_rows_that_nodes_send_are_counted_as_the_rows_they_were() -> None:
    """A node clips what it sends, and who is above the clip norm must still be seen, to follow the quantile."""
    rows = torch.tensor([[0.5, 0.0], [0.0, -1.5], [3.0, 4.0], [0.6, 0.7]], dtype=torch.float64)
    privacy = ClientPrivacy(clip_norm=QuantileClip(1.0), noise_multiplier=0.3, delta=1e-5)
    plan = ReleasePlan(name="update", dimension=2)
    ends = []
    for nodes in (False, True):
        channel = open_channel(privacy, (plan,), FullParticipation().bind(4), seed=0, steps=2)
        everybody = channel.draw(0)
        channel.begin(0, everybody)
        sent = rows
        if nodes:
            receipts = [Receipt(0, 0, torch.tensor([k])) for k in range(4)]
            each = zip(rows.split(1), receipts, strict=True)
            sent = torch.cat([channel.row_to_send("update", row, receipt) for row, receipt in each])
            assert float(sent.norm(dim=1).max()) <= 2.0
        ends.append((channel.release("update", sent, everybody), channel.norms()["update"]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)
