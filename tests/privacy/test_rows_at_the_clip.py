"""Rows that are a little longer than the clip norm end within its margin, by every program that clips; and how far
one of them moves a release."""

import math

import numpy as np
import pytest
import torch

from fedmtl.privacy import (
    ClientPrivacy,
    Clip,
    FixedCohort,
    FullParticipation,
    ReleasePlan,
    open_channel,
)
from fedmtl.privacy.clip import RowTotal, clip_rows, clipped_sum, sum_width
from fedmtl.privacy.sums import clipped_segment_sums, outer_product_sum

BOUND = 0.7
MOST = BOUND * (1 - 2.0**-21)  # half of the margin is left for rounding


@pytest.mark.parametrize("dimension", [3, 1 << 14])  # of which long rows are added one by one
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_no_row_is_left_beyond_the_margin(norm: str, dimension: int) -> None:
    """From twice the norm down to 2^-40 of it above the norm."""
    order = 1 if norm == "l1" else 2
    clip = Clip(BOUND, norm)
    row = np.random.default_rng(0).standard_normal(dimension)
    row *= BOUND / np.linalg.norm(row, ord=order)
    width = sum_width(BOUND, 1)
    for power in range(0, 41, 2):
        longer = torch.from_numpy(row * (1 + 2.0**-power))[None]
        total = RowTotal(dimension, clip, width)
        total.add(torch.tensor([0]), longer)
        of_records = clipped_segment_sums(
            longer, torch.tensor([0]), 1, clip, width=torch.tensor([width], dtype=torch.float64)
        )
        for made in (clipped_sum(longer, clip), total.sum(), of_records, clip_rows(longer, clip)):
            length = np.linalg.norm(made.numpy().ravel(), ord=order)
            assert BOUND * (1 - 2.0**-19) < length <= MOST
            assert (np.abs(made.numpy().ravel()) <= np.abs(longer.numpy().ravel())).all()
    if norm == "l2" and dimension < 10:
        square = outer_product_sum(100 * longer, clip, diagonal=False)
        assert np.linalg.norm(square.numpy()) <= BOUND * MOST


def test_a_client_that_is_added_twice_is_named_twice() -> None:
    """So that a release finds it."""
    total = RowTotal(2, Clip(BOUND), sum_width(BOUND, 3))
    for client in (2, 0, 2):
        total.add(torch.tensor([client]), torch.ones(1, 2))
    assert total.clients == [0, 2, 2]


def test_a_coordinate_never_grows_on_the_grid() -> None:
    """A width of 1/8 leaves nothing of 0.1: rounded to the nearest multiple it would be 0.125."""
    row = torch.tensor([[0.1, -0.1]], dtype=torch.float64)
    width = 0.125
    total = RowTotal(2, Clip(BOUND), width)
    total.add(torch.tensor([0]), row)
    of_records = clipped_segment_sums(
        row, torch.tensor([0]), 1, Clip(BOUND), width=torch.tensor([width], dtype=torch.float64)
    )
    for made in (clipped_sum(row, Clip(BOUND), width), total.sum(), of_records):
        assert not made.any()


MOVES = {  # of u u^T for another v v^T, both of length K: K^2 sqrt(2), and in the L1 norm of the diagonal 2 K^2
    ("vector", "l2_laplace"): (BOUND, 2 * BOUND),
    ("symmetric", "gaussian"): (BOUND**2, math.sqrt(2) * BOUND**2),
    ("diagonal", "gaussian"): (BOUND**2, math.sqrt(2) * BOUND**2),
    ("diagonal", "laplace"): (BOUND**2, 2 * BOUND**2),
}


@pytest.mark.parametrize(("form", "law"), MOVES)
def test_a_release_is_noised_for_what_its_schedule_makes_neighbours(form: str, law: str) -> None:
    """Clients are added or removed, or in a cohort of fixed size replaced."""
    privacy = ClientPrivacy(clip_norm=BOUND, noise_multiplier=2.0, mechanism=law, delta=1e-5)
    plan = ReleasePlan(name="c", dimension=3, form=form)
    schedules = FullParticipation(), FixedCohort(3)
    for schedule, moved in zip(schedules, MOVES[form, law], strict=True):
        channel = open_channel(privacy, (plan,), schedule.bind(6), seed=0, steps=2)
        assert channel.releases["c"].sensitivity == pytest.approx(moved, rel=1e-12)
