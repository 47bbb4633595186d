import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedmtl.errors import ConfigError
from fedmtl.privacy import clip as module
from fedmtl.privacy import sums as sums_module
from fedmtl.privacy.clip import (
    Clip,
    add_clipped,
    clip_factors,
    clip_rows,
    clipped_sum,
    largest_norm,
    sum_width,
)
from fedmtl.privacy.gradients import GradientPlan
from fedmtl.privacy.records import Records
from fedmtl.privacy.sums import clipped_segment_sums

CLIPS = [Clip(2.5, "l1"), Clip(0.3), None]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
LIMIT = 1 - 2.0**-20
BAD = (math.nan, math.inf, -math.inf)


@pytest.fixture(params=["blocks", "one by one"])
def both_ways(request, monkeypatch):
    """Sum rows in blocks, and one by one as long ones are."""
    monkeypatch.setattr(module, "_LONG", 1 << 40 if request.param == "blocks" else 0)


def norm_of(row: list[float], clip) -> float:
    if clip is not None and clip.norm == "l1":
        return math.fsum(abs(value) for value in row)
    return math.hypot(*row)


def slow_clip(row: torch.Tensor, clip) -> np.ndarray:
    """One row clipped, number by number."""
    values = row.double().tolist()
    if not all(math.isfinite(value) for value in values):
        return np.zeros(len(values))
    norm = norm_of(values, clip)
    factor = 1.0 if clip is None or norm <= clip.bound * LIMIT else clip.bound * LIMIT / norm
    return np.array(values) * factor


def slow_sums(rows, client, count, clip) -> np.ndarray:
    sums = np.zeros((count, rows.shape[1]))
    for row, k in zip(rows, client.tolist(), strict=True):
        sums[k] += slow_clip(row, clip)
    return sums


def hard_rows(count: int, dimension: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all sizes, some of them zero, huge, or not finite."""
    generator = torch.Generator().manual_seed(dimension)
    rows = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    rows = (rows * torch.logspace(-4, 3, count, dtype=torch.float64)[:, None]).to(dtype)
    rows[1] = 0
    rows[2, 0], rows[3, -1], rows[4] = BAD
    rows[5], rows[6, 0] = 3e38, -3e38
    return rows


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip", CLIPS)
def test_sums_are_the_slow_loop(clip, dtype, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 64)
    rows = hard_rows(60, 23, dtype)
    if clip is None:  # or the huge ones leave nothing of the others
        rows[5], rows[6, 0] = 0, 0
    client = torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(0))
    client[client == 4] = 5
    sums = clipped_segment_sums(rows, client, 10, clip)
    assert sums.dtype == torch.float64
    assert sums.shape == (10, 23)
    assert sums.device == rows.device
    np.testing.assert_allclose(sums, slow_sums(rows, client, 10, clip), rtol=1e-10, atol=1e-12)
    assert not sums[4].any()
    assert not sums[9].any()
    whole = clipped_sum(rows, clip)
    np.testing.assert_allclose(
        whole, sum(slow_clip(row, clip) for row in rows), rtol=1e-10, atol=1e-12
    )


def test_the_sums_of_accelerators_are_those_of_the_cpu():
    rows = hard_rows(60, 23, torch.float64)
    rows = torch.where(torch.isfinite(rows), rows, 0.0).clamp(-10, 10)
    client = torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(0)) % 7
    sums = sums_module._sums_in_order(rows, client, 10)
    assert sums.shape == (10, 23)
    assert torch.equal(sums, clipped_segment_sums(rows, client, 10, None))


def test_the_order_of_clients_does_not_matter_and_rows_stay_as_they_were():
    rows = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    client = torch.arange(40) % 7
    kept = rows.clone()
    mixed = clipped_segment_sums(rows, client, 7, Clip(1.0))
    order = torch.argsort(client, stable=True)
    assert torch.equal(mixed, clipped_segment_sums(rows[order], client[order], 7, Clip(1.0)))
    assert torch.equal(rows, kept)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("clip", CLIPS)
def test_nothing_to_sum(clip):
    empty = torch.zeros(0, 3)
    sums = clipped_segment_sums(empty, torch.zeros(0, dtype=torch.int64), 2, clip)
    assert torch.equal(sums, torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(clipped_sum(empty, clip), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    "client",
    [torch.zeros(3, dtype=torch.int64), torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64)],
)
def test_one_client_a_row(client):
    with pytest.raises(ConfigError, match="client"):
        clipped_segment_sums(torch.zeros(4, 2), client, 2, Clip(1.0))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", CLIPS[:2])
def test_clipped_rows_are_what_the_sum_counts(clip, dtype, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 64)
    rows = hard_rows(60, 23, dtype)
    once = clip_rows(rows, clip)
    assert once.dtype == dtype
    expected = np.stack([slow_clip(row, clip) for row in rows])
    np.testing.assert_allclose(once, expected, rtol=5e-7, atol=1e-30)
    norms = [norm_of(row.double().tolist(), clip) for row in once]
    assert max(norms) <= clip.bound * LIMIT
    assert max(norms) > clip.bound * (1 - 2.0**-18)
    small = torch.tensor([norm_of(row.double().tolist(), clip) < 0.99 * clip.bound for row in rows])
    assert 10 < int(small.sum()) < 50
    assert torch.equal(once[small], rows[small])
    assert torch.equal(clip_rows(once, clip), once)
    assert torch.equal(clipped_sum(once, clip), clipped_sum(once, None))


def exact_sum(
    rows: torch.Tensor, clip, width: float
) -> tuple[list[Fraction], list[list[Fraction]]]:
    """The sum in rational numbers, and the truncated rows."""
    cells = [
        [math.trunc(Fraction(float(x)) / Fraction(width)) for x in slow_clip(row, clip)]
        for row in rows
    ]
    truncated = [[cell * Fraction(width) for cell in row] for row in cells]
    return [sum(column) for column in zip(*truncated, strict=True)], truncated


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_exact_and_the_same_in_any_order_and_any_parts(clip, dtype, monkeypatch):
    rows = hard_rows(60, 23, dtype)
    if clip is None:
        rows[5], rows[6, 0] = 0, 0
    width = sum_width(largest_norm(rows) if clip is None else clip.bound, 100)
    total = clipped_sum(rows, clip, width)
    expected, truncated = exact_sum(rows, clip, width)
    off = [
        abs(Fraction(float(x)) - y) / Fraction(width) for x, y in zip(total, expected, strict=True)
    ]
    assert all(
        cells.denominator == 1 for cells in off
    )  # on the grid; a factor may round in the last bit, so
    assert sum(off) <= (0 if clip is None else len(rows))
    for row, cut in zip(rows, truncated, strict=True):
        assert all(
            abs(y) <= abs(Fraction(float(x)))
            for x, y in zip(slow_clip(row, clip), cut, strict=True)
        )
    order = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(module, "_BLOCK_ELEMENTS", size)
        assert torch.equal(clipped_sum(rows[order], clip, width), total)
    for parts in ([20, 40], [1, 2, 57], [0, 60]):
        each = [clipped_sum(part, clip, width) for part in rows[order].split(parts)]
        assert torch.equal(torch.stack(each).sum(0), total)
        assert torch.equal(torch.stack(each[::-1]).sum(0), total)
    assert (
        not torch.equal(rows[order].double().sum(0), rows.double().sum(0)) or clip is not None
    )  # it is no accident


def test_the_grid_is_the_finest_on_which_nothing_is_rounded():
    for rows in (1, 2, 3, 1000, 1024, 1025, 10**7):
        for bound in (1e-300, 0.3, 0.5, 1.0, 1.1, 1e30):
            width = sum_width(bound, rows)
            assert math.frexp(width)[0] == 0.5
            most = 2 ** math.ceil(math.log2(rows)) * Fraction(2) ** (
                math.frexp(bound)[1] - (math.frexp(bound)[0] == 0.5)
            )
            assert most >= rows * Fraction(bound)
            assert most / Fraction(width) == 2**53 or (
                bound == 1e-300 and most / Fraction(width) < 2**53
            )


@pytest.mark.usefixtures("both_ways")
def test_a_row_is_never_longer_than_it_was():
    rows = torch.randn(50, 4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    width = 2.0**-12  # so coarse that rounding to the nearest multiple would be seen
    for clip in (Clip(3.0, "l1"), Clip(1.0)):
        whole = [norm_of(clipped_sum(row[None], clip, width).tolist(), clip) for row in rows]
        assert max(whole) <= clip.bound * LIMIT
        nearest = [
            norm_of((torch.round(clip_rows(row[None], clip) / width) * width)[0].tolist(), clip)
            for row in rows
        ]
        assert max(nearest) > clip.bound


@pytest.mark.parametrize("clip", CLIPS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_moves_a_sum_by_more_than_the_bound(clip, dtype):
    others = torch.randn(5, 23, generator=torch.Generator().manual_seed(1)).to(dtype)
    reached = []
    for row in hard_rows(60, 23, dtype):
        with_it = clipped_segment_sums(
            torch.cat([others, row[None]]), torch.zeros(6, dtype=torch.int64), 1, clip
        )
        without = clipped_segment_sums(others, torch.zeros(5, dtype=torch.int64), 1, clip)
        assert bool(torch.isfinite(with_it).all())
        reached.append(norm_of((with_it - without)[0].tolist(), clip))
    assert clip.bound * (1 - 2.0**-19) < max(reached) <= clip.bound


def test_factors():
    norms = torch.tensor([0.0, 1.0, 2.0, 8.0, math.inf, math.nan], dtype=torch.float64)
    for clip in (Clip(2.0, "l1"), Clip(2.0)):
        assert clip_factors(norms, clip).tolist() == [1.0, 1.0, LIMIT, LIMIT / 4, 0.0, 0.0]
    assert clip_factors(norms, None).tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("bound", [1e-101, 1e101])
def test_bounds_beyond_which_squares_and_sums_are_no_numbers(bound):
    with pytest.raises(ConfigError, match="between 1e-100 and 1e"):
        Clip(bound)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("clip", [Clip(1e-15, "l1"), Clip(1e-100, "l1"), Clip(1e-100), Clip(1e100)])
def test_the_longest_and_the_shortest_rows_are_within_the_bound(clip):
    """Factors below the normal numbers have few digits, and squares of small numbers none."""
    one = (
        torch.logspace(-3, 1, 60, dtype=torch.float64)[:, None]
        * clip.bound
        * torch.full((1, 9), 1 / 3.0)
    )
    rows = torch.cat(
        [
            one.double(),
            torch.linspace(1e307, 1.9e307, 60, dtype=torch.float64)[:, None].expand(-1, 9),
        ]
    )
    plan = GradientPlan(ids=("a",), counts=np.array([120]), dimension=9, x=[rows])
    law = "laplace" if clip.norm == "l1" else "gaussian"
    records = Records(plan, (), None, bound=clip.bound, law=law)
    for place, row in enumerate(rows):
        found = [
            clipped_sum(row[None], clip, sum_width(clip.bound, 3)),
            clip_rows(row[None], clip)[0],
        ]
        found.append(clipped_segment_sums(row[None], torch.zeros(1, dtype=torch.int64), 1, clip)[0])
        factors = np.zeros((1, 120))
        factors[0, place] = 1.0
        found.append(torch.from_numpy(records.of_factors(0, factors)[0]))
        for value in found:
            assert norm_of((value / clip.bound).tolist(), clip) <= 1


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("clip", CLIPS[:2])
def test_a_row_that_is_clipped_stays_as_it_is(clip):
    """What a node has clipped the server clips again; of few clients and coordinates, rounding alone is beyond C."""
    for clients, dimension in itertools.product((1, 2, 8), (1, 2, 5)):
        width = sum_width(clip.bound, clients)
        rows = (
            torch.randn(
                300,
                dimension,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(dimension),
            )
            * 9
        )
        for row in rows:
            once = clipped_sum(row[None], clip, width)
            assert torch.equal(clipped_sum(once[None], clip, width), once)


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_a_long_row_counts_the_same_whatever_the_number_of_threads(order) -> None:
    rows = torch.randn(6, 1 << 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        cells = torch.zeros(6, rows.shape[1], dtype=torch.float64)
        for row, own in zip(rows, cells, strict=True):
            # so fine that every bit of the factor shows
            add_clipped(own, row, 1.0, order, 2.0**-200, torch.empty_like(own))
        found.append(cells)
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# Automatic clipping


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_automatic_clipping_scales_every_row_to_the_norm(norm) -> None:
    """C w / (norm(w) + gamma), row by row in whole fractions of Python."""
    clip = Clip(2.0, norm, stability=0.01)
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    rows *= torch.logspace(-6, 6, 6, dtype=torch.float64)[:, None]
    found = clipped_segment_sums(rows, torch.arange(6), 6, clip)
    for row, own in zip(rows.tolist(), found.tolist(), strict=True):
        length = math.fsum(map(abs, row)) if norm == "l1" else math.hypot(*row)
        expected = [2.0 * (1 - 2.0**-20) * value / (length + 0.01) for value in row]
        assert own == pytest.approx(expected, rel=1e-12)
        of_own = math.fsum(map(abs, own)) if norm == "l1" else math.hypot(*own)
        assert of_own < 2.0


def test_automatic_clipping_counts_rows_that_are_not_finite_as_zero() -> None:
    clip = Clip(1.0, stability=0.01)
    rows = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0], [3e38, -3e38], [1e-30, 0.0]])
    found = clipped_segment_sums(rows, torch.arange(5), 5, clip)
    assert found[:3].tolist() == [[0.0, 0.0]] * 3
    assert found[3].norm().item() == pytest.approx(1.0, rel=1e-5)
    assert found[4].tolist() == pytest.approx([1e-28, 0.0], rel=1e-5)


def test_a_stability_that_is_no_positive_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Clip\.stability is 0"):
        Clip(1.0, stability=0.0)
