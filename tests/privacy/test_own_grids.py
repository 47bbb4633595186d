"""In secure mode every release lies on the grid of its own bound and noise, and its noise is not below what it is
charged for."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism

from fedmtl.privacy import (
    ClientPrivacy,
    CyclicCohorts,
    GaussianNoise,
    RecordPrivacy,
    ReleasePlan,
    SecureSource,
    SeededSource,
    open_channel,
)
from fedmtl.privacy.cost import PrivacyCost
from fedmtl.privacy.noise import laws

from .activations import D, nothing, open_activations, rows

LOUD = 2.0**20  # a multiplier at which the bound decides on the grid, not the noise


def power_of_two(most: float) -> float:
    """The largest one that is not above ``most``."""
    return 2.0 ** math.floor(math.log2(most))


@pytest.mark.parametrize(
    "options", [{"epsilon": {"a": 0.1, "b": 1.0, "c": 50.0}}, {"noise_multiplier": LOUD}]
)
def test_a_sum_of_records_lies_on_the_grid_of_its_own_client(options: dict) -> None:
    """At most 2^-40 of the noise wide, 2 C z, and in all D coordinates together, of L2 norm, half of the clip's margin
    2^-20 C. Noise of three scales is drawn at once."""
    privacy = RecordPrivacy(clip_norm=0.7, delta=1e-5, source="secure", **options)
    channel = open_activations(
        privacy, rows(), ids=("a", "b", "c"), caps=np.array([2, 2, 2]), seed=0
    )
    of_clip = 0.7 * 2.0**-21 / math.sqrt(D)
    of_noise = 2 * 0.7 * channel.noise_multipliers * 2.0**-40
    expected = [power_of_two(min(of_clip, one)) for one in of_noise]
    assert len(set(expected)) == (1 if "noise_multiplier" in options else 3)
    clients = [2, 0, 1, 1, 0, 2]
    channel.begin(0, torch.tensor([clients]))
    for client in clients:
        channel.release(nothing)
        assert channel.on_grid["gradient"].width == expected[client]
        assert channel.on_grid["gradient"].off_grid == 0


@pytest.mark.parametrize(("bands", "times"), [(None, 1), (4, 8)])
def test_correlated_noise_has_a_grid_for_the_noise_of_all_its_rounds(
    bands: int | None, times: int
) -> None:
    """A clip norm 2 b times smaller: the part of earlier rounds is rounded, too."""
    privacy = ClientPrivacy(
        clip_norm=1.0, noise_multiplier=LOUD, delta=1e-5, bands=bands, source="secure"
    )
    plan = ReleasePlan(name="update", dimension=4)
    channel = open_channel(privacy, (plan,), CyclicCohorts(2).bind(8), seed=0, steps=4)
    for step in range(4):
        cohort = channel.draw(step)
        channel.begin(step, cohort)
        channel.release("update", torch.ones(2, 4), cohort)
        assert channel.on_grid["update"].width == 2.0**-21 / 2 / times
        assert channel.on_grid["update"].off_grid == 0


def test_whole_noise_is_never_below_the_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def noted(words, size, deviation):
        drawn.append(deviation)
        return np.zeros(size, dtype=np.int64)

    monkeypatch.setattr(laws, "discrete_gaussian", noted)
    for multiplier in (1.7, 3.0, 1e3 / 7):
        for cells in (2.0**40, 2.0**41 + 0.3, 1e12 / 3):
            GaussianNoise(multiplier).whole(SecureSource(), "noise", 0, (2,), cells)
            least = Fraction(multiplier) * Fraction(cells)
            assert least <= Fraction(drawn[-1]) <= least + 2


@pytest.mark.parametrize("count", [None, 3])
def test_two_releases_of_a_round_have_noise_of_their_own(count: int | None) -> None:
    """Independent in every round, or correlated over three: C w = z, by the inverse of C."""
    steps = 5
    plans = tuple(ReleasePlan(name=name, dimension=4) for name in ("a", "b"))
    privacy = ClientPrivacy(clip_norm=1.5, noise_multiplier=2.0, bands=count)
    channel = open_channel(privacy, plans, CyclicCohorts(2).bind(6), seed=4, steps=steps)
    found = {"a": [], "b": []}
    for step in range(steps):
        cohort = channel.draw(step)
        channel.begin(step, cohort)
        for name, values in found.items():
            values.append(channel.release(name, torch.zeros(2, 4), cohort).numpy())
    bands = [1.0]
    if count is not None:
        raw = np.array([1.0, 1 / 2, 3 / 8])  # (1 - x)^(-1/2)
        bands = (raw / np.linalg.norm(raw)).tolist()
    matrix = sum(c * np.eye(steps, k=-lag) for lag, c in enumerate(bands))
    for name, values in found.items():
        z = [SeededSource(4).normal(f"noise/{name}", step, 4) for step in range(steps)]
        expected = np.linalg.solve(matrix, np.stack(z)) * 2.0 * 1.5 / 2
        np.testing.assert_allclose(np.stack(values), expected, rtol=1e-9)


def test_what_whole_noise_costs_is_in_epsilon_and_in_delta() -> None:
    """(N / s^2 + R^2 / s^4) / 24 more for the N numbers of all sums, with a count and a score beside each, and delta
    exp(half of that of epsilon = 0): of so many numbers of s = 2^40 cells that it can be seen."""
    cost = PrivacyCost(law="gaussian", sizes=(2**56,), delta=1e-5, sums=4, bands=8)
    uses = 2**20
    numbers = 3 * 2**56 * 4 * 8 * uses
    root = math.sqrt(numbers)

    def added(epsilon: float) -> float:
        reach = 2.0**40 * (root + math.sqrt(2 * (epsilon + 1000))) + root / 2
        return (numbers * 2.0**-80 + reach**2 * 2.0**-160) / 24

    assert added(0.0) > 0.4
    whole = 1e-5 * math.exp(-added(0.0) / 2)
    plain = gaussian_mechanism.get_epsilon_gaussian(2.0**12 / math.sqrt(4 * uses), whole)
    assert cost.epsilon(uses, 2.0**12) == pytest.approx(plain + added(plain), rel=1e-9)
