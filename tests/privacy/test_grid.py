import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.errors import PrivacyError
from fedmtl.privacy.clip import Clip, clipped_sum
from fedmtl.privacy.noise.grid import check_drawable, grid_width, noised
from fedmtl.privacy.noise.laws import GaussianNoise, L2LaplaceNoise, LaplaceNoise
from fedmtl.privacy.noise.sources import SecureSource, SeededSource
from tests.privacy.test_mechanisms import Given

ALPHA = 1e-6
COUNT = 200_000


# The width


@pytest.mark.parametrize("law", [LaplaceNoise, L2LaplaceNoise, GaussianNoise])
def test_a_width_is_the_largest_power_of_two_that_the_margin_allows(law):
    for dimension in (1, 10, 1000, 10**6):
        for clip_bound in (1e-3, 0.7, 1.0, 50.0):
            width = grid_width(law, clip_bound, dimension, 1e12)
            assert math.frexp(width)[0] == 0.5
            spread = dimension if law.norm == "l1" else math.sqrt(dimension)
            assert width * spread <= clip_bound * 2.0**-21 * (1 + 1e-12)
            assert 2 * width * spread > clip_bound * 2.0**-21
            scale = width / 5
            fine = grid_width(law, clip_bound, dimension, scale)
            assert math.frexp(fine)[0] == 0.5
            assert fine <= scale * (2.0**-40 if law is GaussianNoise else 2.0**-20) < 2 * fine


def worst_move(clip, dimension: int, width: float) -> float:
    """Distance between the rounded sums of neighbours, made as large as rounding can make it.

    The client's row is at the limit of the clip and, but for one coordinate, a hair above a whole number of cells; the
    others' sum is half a hair below the middle of a cell. So it rounds down, and with the client added it rounds up.
    """
    hair, limit = 2.0**-10, clip.bound * (1 - 2.0**-20)
    power = 1 if clip.norm == "l1" else 2
    share = math.floor(limit / dimension ** (1 / power) / width)
    cells = np.full(dimension, share + hair)
    cells[0] = 0.0
    cells[0] = ((limit / width) ** power - math.fsum(cells**power)) ** (1 / power) * (1 - 1e-14)
    row = torch.from_numpy(cells * width)[None]
    moved = clipped_sum(row, clip)
    assert torch.allclose(moved, row[0], rtol=1e-13)
    others = (1000.5 - torch.remainder(moved / width, 1.0) / 2) * width
    zero = torch.zeros_like(others)
    move = noised(others + moved, zero, width) - noised(others, zero, width)
    return math.fsum((move.abs() ** power).tolist()) ** (1 / power)


@pytest.mark.parametrize("clip", [Clip(1.3, "l1"), Clip(1.3)])
@pytest.mark.parametrize("dimension", [2, 64, 4000])
def test_the_margin_covers_the_rounding_of_both_neighbours(clip, dimension):
    width = grid_width(
        LaplaceNoise if clip.norm == "l1" else L2LaplaceNoise, clip.bound, dimension, 1.0
    )
    assert clip.bound * (1 - 2.0**-20) < worst_move(clip, dimension, width) <= clip.bound
    assert worst_move(clip, dimension, 8 * width) > clip.bound


@pytest.mark.parametrize("clip_norm", [1.0, 3.0])
def test_noise_of_more_than_2_47_widths_of_the_grid_is_refused(clip_norm):
    """The bound on a contribution decides on the width: the power of two at or below 2**-21 of it."""
    most = 2.0**47 * 2.0 ** (math.floor(math.log2(clip_norm)) - 21)
    given = {"sensitivity": 1.0, "bound": clip_norm}
    check_drawable(GaussianNoise(0.99 * most), SecureSource(), 1, **given)
    check_drawable(GaussianNoise(100 * most), SeededSource(0), 1, **given)
    with pytest.raises(PrivacyError, match="too large to be drawn exactly"):
        check_drawable(GaussianNoise(1.01 * most), SecureSource(), 1, **given)


def test_dither_takes_noise_to_either_side_in_proportion():
    source = Given(np.ones(COUNT), np.full(COUNT, 0.5 * math.exp(-3.7)))
    cells = LaplaceNoise(1.0).whole(source, "noise", 0, (COUNT,), 1.0)
    assert set(cells.tolist()) == {-4.0, -3.0}
    assert stats.binomtest(int((cells == -3).sum()), COUNT, 0.3).pvalue > ALPHA


# The attack on the least significant bits (Mironov 2012): a release of 0 or 1 with Laplace noise of epsilon 1


def uniform_cells(dtype: type, cells: np.ndarray) -> np.ndarray:
    """Laplace noise as it is often written: ``log`` of a uniform number with as many bits as the type gives."""
    bits = 23 if dtype is np.float32 else 52
    return np.log(cells.astype(dtype) * dtype(2.0**-bits))


def naive_release(value: int, dtype: type, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    cells = generator.integers(1, 2 ** (23 if dtype is np.float32 else 52), COUNT, endpoint=True)
    sign = generator.choice([-1, 1], COUNT).astype(dtype)
    return dtype(value) + sign * uniform_cells(dtype, cells)


def reachable(released: np.ndarray, value: int) -> np.ndarray:
    """Whether some uniform number leads from ``value`` to what was released."""
    dtype = released.dtype.type
    top = 2 ** (23 if dtype is np.float32 else 52)
    noise = released.astype(np.float64) - value
    nearest = np.rint(np.exp(-np.abs(noise)) * top).astype(np.int64)
    found = np.zeros(released.shape, dtype=bool)
    for offset in range(-8, 9):
        cells = np.clip(nearest + offset, 1, top)
        for sign in (dtype(-1), dtype(1)):
            found |= dtype(value) + sign * uniform_cells(dtype, cells) == released
    return found


def grid_release(value: int) -> np.ndarray:
    """Release of the sum of one clipped contribution or none, through the clip, the secure source and the grid."""
    total = clipped_sum(torch.full((1, 1), float(value)), Clip(1.0, "l1")).repeat(COUNT)
    width = grid_width(LaplaceNoise, 1.0, 1, LaplaceNoise(1.0).std(1.0))
    noise = (
        torch.from_numpy(LaplaceNoise(1.0).whole(SecureSource(), "noise", 0, (COUNT,), 1 / width))
        * width
    )
    return noised(total, noise, width).numpy()


def lower_bound(hits: int, others: int, count: int) -> float:
    """Lower bound on epsilon from one event under two inputs, Clopper-Pearson at ALPHA on either side."""
    low = stats.beta.ppf(ALPHA, hits, count - hits + 1) if hits else 0.0
    high = stats.beta.isf(ALPHA, others + 1, count - others) if others < count else 1.0
    return math.log(low / high) if low > 0 else -math.inf


def lowest_bit(released: np.ndarray) -> np.ndarray:
    """Exponent of the least significant bit that is set."""
    fraction, exponent = np.frexp(released.astype(np.float64))
    whole = np.abs(fraction * 2.0**53).astype(np.int64)
    return exponent - 53 + np.log2(np.maximum(whole & -whole, 1)).astype(np.int64)


def learned_attack(zeros: np.ndarray, ones: np.ndarray) -> float:
    """Best bound from events in (lowest bit, size): chosen on one half of the releases, measured on the other."""
    edges = np.quantile(np.concatenate([zeros, ones]), np.linspace(0, 1, 13)[1:-1])
    kinds = [
        (lowest_bit(y) + 200).clip(0, 399) * 13 + np.searchsorted(edges, y) for y in (zeros, ones)
    ]
    half, best = COUNT // 2, -math.inf
    for a, b in (kinds, kinds[::-1]):
        seen, other = (np.bincount(kind[:half], minlength=400 * 13) for kind in (a, b))
        order = np.argsort(-(seen + 0.5) / (other + 1.5))
        gained, lost = np.cumsum(seen[order]), np.cumsum(other[order])
        sizes = np.unique(np.geomspace(1, len(order), 60).astype(int)) - 1
        size = max(sizes, key=lambda i: lower_bound(int(gained[i]), int(lost[i]), half))
        event = np.isin(np.arange(400 * 13), order[: size + 1])
        best = max(best, lower_bound(int(event[a[half:]].sum()), int(event[b[half:]].sum()), half))
    return best


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_naive_release_gives_itself_away(dtype):
    zeros, ones = naive_release(0, dtype, 0), naive_release(1, dtype, 1)
    assert reachable(zeros, 0).all()
    assert reachable(ones, 1).all()
    hits, others = (int((reachable(y, 0) & ~reachable(y, 1)).sum()) for y in (zeros, ones))
    assert others == 0
    assert lower_bound(hits, others, COUNT) > 1.6
    assert learned_attack(zeros, ones) > 1.6


def test_the_secure_release_on_the_grid_does_not():
    zeros, ones = grid_release(0), grid_release(1)
    width = grid_width(LaplaceNoise, 1.0, 1, LaplaceNoise(1.0).std(1.0))
    for released in (zeros, ones):
        assert np.array_equal(released / width, np.rint(released / width))
    bound = learned_attack(zeros, ones)
    assert 0.8 < bound <= 1.0


def test_it_is_the_grid_that_helps():
    """Full significands and secret bits alone do not: the same noise without the grid gives the input away."""
    noise = [LaplaceNoise(1.0).draw(SecureSource(), "noise", 0, COUNT) for _ in range(2)]
    assert learned_attack(noise[0], 1.0 + noise[1]) > 1.6


def test_either_input_reaches_every_cell():
    width = grid_width(LaplaceNoise, 1.0, 1, LaplaceNoise(1.0).std(1.0))
    one = clipped_sum(torch.ones(1, 1), Clip(1.0, "l1"))
    targets = np.random.default_rng(0).integers(-int(30 / width), int(30 / width), 2000)
    for total in (torch.zeros(2000, dtype=torch.float64), one.repeat(2000)):
        noise = targets * width - torch.round(total / width).numpy() * width
        source = Given(-np.sign(noise), 0.5 * np.exp(-np.abs(noise)))
        drawn = (
            torch.from_numpy(np.rint(LaplaceNoise(1.0).draw(source, "noise", 0, 2000) / width))
            * width
        )
        assert np.array_equal(noised(total, drawn, width).numpy(), targets * width)
