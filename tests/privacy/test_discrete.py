"""Noise in whole numbers: the law of the sampler, what it costs, and what is released."""

import decimal
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import stats
from scipy.signal import fftconvolve

from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import (
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    ReleasePlan,
    epsilon,
    open_channel,
)
from fedmtl.privacy.accounting.composition import renyi_curve, total_variation
from fedmtl.privacy.accounting.losses import ApproximationDpEvent
from fedmtl.privacy.clip import sum_width
from fedmtl.privacy.noise import discrete
from fedmtl.privacy.noise.discrete import DiscreteGaussianNoise, discrete_gaussian, divergence, exponential
from fedmtl.privacy.noise.grid import sum_spacing, whole_width
from fedmtl.privacy.noise.sources import SecureSource, SeededSource

ALPHA = 1e-6
COUNT = 200_000
decimal.getcontext().prec = 60


# The law


def masses(deviation: float, width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The integers that matter and their probabilities, summed up by hand."""
    reach = width or math.ceil(12 * deviation) + 2
    k = np.arange(-reach, reach + 1)
    weights = np.exp(-(k**2) / (2 * deviation**2))
    return k, weights / weights.sum()


def law_p(sample: np.ndarray, deviation: float) -> float:
    """Chi-square of small integers against their exact probabilities, those that are rare together."""
    k, p = masses(deviation)
    seen = np.bincount(np.clip(sample, k[0], k[-1]) - k[0], minlength=len(k)).astype(float)
    rare = p * len(sample) < 10
    seen, p = np.append(seen[~rare], seen[rare].sum()), np.append(p[~rare], p[rare].sum())
    return float(stats.chisquare(seen, p / p.sum() * len(sample)).pvalue)


def words(step: int = 0) -> Callable[[int], np.ndarray]:
    return SeededSource(5).words("test", step)


@pytest.mark.parametrize("deviation", [Fraction(2, 5), 1, Fraction(37, 10), 20], ids=str)
def test_small_deviations_have_the_exact_probabilities(deviation):
    assert law_p(discrete_gaussian(words(), COUNT, deviation), float(deviation)) > ALPHA


def test_the_operating_system_gives_the_same_law():
    assert law_p(discrete_gaussian(SecureSource().words("noise", 0), COUNT, 3), 3.0) > ALPHA


@pytest.mark.parametrize("deviation", [1000, 2**39 + 12345, 2**50 - 1])
def test_large_deviations_have_the_moments_and_the_shape(deviation):
    units = discrete_gaussian(words(), COUNT, deviation) / deviation
    assert stats.kstest(units, stats.norm.cdf).pvalue > ALPHA
    for power, mean, square in ((1, 0, 1), (2, 1, 3), (3, 0, 15), (4, 3, 105)):  # moments, and of twice the power
        assert abs((units**power).mean() - mean) < 5 * math.sqrt((square - mean**2) / COUNT)


def test_the_last_bits_of_large_noise_are_uniform():
    drawn = discrete_gaussian(words(), COUNT, 2**39 + 12345)
    assert stats.chisquare(np.bincount(drawn & 63, minlength=64)).pvalue > ALPHA
    assert abs((drawn < 0).mean() - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


def rounded(count: int, deviation: float) -> np.ndarray:
    return np.rint(np.random.default_rng(0).normal(scale=deviation, size=count)).astype(np.int64)


BROKEN = {
    "a rounded Gaussian": lambda: rounded(COUNT, 1.0),
    "a deviation 2 % larger": lambda: discrete_gaussian(words(), COUNT, Fraction(102, 100)),
    "zero of both signs": lambda: _patched("size == 0", "size == -1"),
    "nothing is rejected": lambda: _patched("accepted = uniform + 2.0**-53 <= chance * (1 - margin)",
                                            "accepted = np.ones(count, dtype=bool)"),
    "no tail": lambda: _patched("run = _zeros(words)", "run = 0"),
    "a tail of the wrong height": lambda: _patched("height[place] *= 2.0 ** -(run + 1)", "height[place] *= 1.0"),
}  # fmt: skip


def _patched(old: str, new: str) -> np.ndarray:
    """Draw with one line of the sampler changed, which decides by doubles alone."""
    import inspect
    import textwrap

    text = textwrap.dedent(inspect.getsource(discrete._Stairs.trial))
    assert text.count(old) == 1
    space = vars(discrete) | {"Words": Callable}
    exec(text.replace(old, new), space)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discrete._Stairs, "trial", space["trial"])
        return discrete_gaussian(words(), COUNT, 1)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sampler_is_found(name):
    assert law_p(BROKEN[name](), 1.0) < ALPHA


# Exactness


@pytest.mark.parametrize("deviation", [Fraction(1, 3), 1, Fraction(37, 10), 1000, 2**39 + 7, 2**50 - 1], ids=str)
def test_doubles_decide_as_whole_numbers_do(deviation):
    """With a margin above 1 every trial is decided by whole numbers, of the same words."""
    lazy = discrete_gaussian(words(), 3000, deviation)
    assert np.array_equal(lazy, discrete_gaussian(words(), 3000, deviation, margin=3.0))
    assert np.array_equal(lazy, slow_sampler(words(), 3000, deviation))


def slow_sampler(source: Callable[[int], np.ndarray], size: int, deviation: int | Fraction) -> np.ndarray:
    """The sampler as its docstrings have it: one trial after another, probabilities with 60 digits."""
    stairs, found = discrete._stairs(Fraction(deviation)), []
    square = Decimal(Fraction(deviation).numerator) ** 2 / Decimal(Fraction(deviation).denominator) ** 2
    while len(found) < size:
        left = size - len(found)
        count = min(1 << 15, left + left // 16 + 16)
        one, two = source(2 * count).reshape(2, count).tolist()
        places = [int(stairs.block[word >> 48]) for word in one]
        tails = {}
        for place, block in enumerate(places):
            if block == len(stairs.slots) - 1:
                zeros = 0
                while not (word := int(source(1)[0])):
                    zeros += 64
                tails[place] = zeros + 64 - word.bit_length()
        for place, (first, second) in enumerate(zip(one, two, strict=True)):
            height = Decimal(int(stairs.slots[places[place]])) * Decimal(stairs.unit)
            block = places[place] + tails.get(place, 0)
            if place in tails:
                height /= 2 ** (tails[place] + 1)
            k = (block << stairs.bits) + (first & ((1 << stairs.bits) - 1))
            negative = first >> 47 & 1
            chance = (-(Decimal(k) ** 2) / (2 * square)).exp() / height
            assert chance <= 1  # the stairs are above the curve
            if Decimal(second) / 2**64 < chance and not (negative and k == 0):
                found.append(-k if negative else k)
    return np.array(found[:size])


@pytest.mark.parametrize("deviation", [Fraction(1, 3), 1, Fraction(37, 10), 1000, 2**39 + 7], ids=str)
def test_the_stairs_are_above_the_curve_and_as_many_as_there_are_slots(deviation):
    stairs = discrete._stairs(Fraction(deviation))
    assert stairs.slots.sum() == len(stairs.block) == 2**16
    assert stairs.slots.min() >= 1
    last, square = len(stairs.slots) - 1, Decimal(float(deviation)) ** 2
    for block in range(last + 100):
        chances = Decimal(int(stairs.slots[min(block, last)]))
        chances /= 2 ** (block - last + 1) if block >= last else 1
        curve = (-((Decimal(block) * 2**stairs.bits) ** 2) / (2 * square)).exp()
        assert curve <= chances * Decimal(stairs.unit)


@pytest.mark.parametrize(
    "gamma", [Fraction(0), Fraction(1, 10**9), Fraction(1, 3), Fraction(7, 2), Fraction(300)], ids=str
)
@pytest.mark.parametrize("precision", [10, 64, 150])
def test_bounds_on_exponentials(gamma, precision):
    low, high = exponential(gamma, precision)
    with decimal.localcontext(prec=250):
        exact = Fraction((-Decimal(gamma.numerator) / gamma.denominator).exp())
    assert low - Fraction(1, 10**190) <= exact <= high + Fraction(1, 10**190)
    assert high - low <= Fraction(1, 2**precision)


def test_bits_are_drawn_until_a_comparison_is_decided():
    """The first 64 bits of exp(-1) / 2 decide nothing; those after them do."""
    with decimal.localcontext(prec=100):
        bits = int((Decimal(-1).exp() / 2) * 2**192)
    first, second, third = bits >> 128, bits >> 64 & (2**64 - 1), bits & (2**64 - 1)
    for later, below in (
        ([second - 1], True),
        ([second + 1], False),
        ([second, third - 1], True),
        ([second, third + 1], False),
    ):
        stream = iter(later)
        assert (
            discrete._below(first, Fraction(1), Fraction(2), lambda _, s=stream: np.array([next(s)], np.uint64))
            is below
        )
        assert not list(stream)


def test_a_tail_that_no_word_ends_goes_on():
    stream = iter([0, 0, 1 << 60])
    assert discrete._zeros(lambda count: np.array([next(stream)], np.uint64)) == 128 + 3


@pytest.mark.parametrize("deviation", [0, -1, 2**50])
def test_deviations_out_of_range(deviation):
    with pytest.raises(PrivacyError, match="must be in"):
        discrete_gaussian(words(), 3, deviation)


def test_seeded_noise_is_addressed_and_secure_noise_is_fresh():
    law = DiscreteGaussianNoise(1.0)
    drawn = {
        (s, p, t): law.cells(SeededSource(s), p, t, 50, 2**39).tolist() for s in (0, 1) for p in "ab" for t in (0, 1)
    }
    assert len({tuple(one) for one in drawn.values()}) == 8
    assert drawn[0, "a", 0] == law.cells(SeededSource(0), "a", 0, 50, 2**39).tolist()
    assert (
        law.cells(SecureSource(), "a", 0, 50, 2**39).tolist() != law.cells(SecureSource(), "a", 0, 50, 2**39).tolist()
    )


# What it costs


def gaussian_masses(k: np.ndarray, deviation: float) -> np.ndarray:
    """Probabilities of a rounded Gaussian, by its lower tail on both sides."""
    upper = -np.abs(k)
    return stats.norm.cdf((upper + 0.5) / deviation) - stats.norm.cdf((upper - 0.5) / deviation)


@pytest.mark.parametrize("deviation", [1.0, 1.3, 2.0, 4.0])
def test_the_divergence_is_below_the_bound_and_the_bound_is_not_loose(deviation):
    k, p = masses(deviation, math.ceil(8 * deviation))
    q = gaussian_masses(k, deviation)
    exact = float((p * np.log(p / q)).sum())
    assert exact <= 1 / (319 * deviation**4) < divergence(1, 1 / deviation)
    assert divergence(1, 1 / deviation) < 3 * exact
    assert 0.5 * np.abs(p - q).sum() <= math.sqrt(divergence(1, 1 / deviation) / 2)
    both = np.abs(np.outer(p, p) - np.outer(q, q)).sum() / 2
    assert both <= math.sqrt(divergence(2, 1 / deviation) / 2)


def test_no_bound_below_one_cell():
    assert divergence(1, 1.01) == math.inf


def hockey_stick(p: np.ndarray, q: np.ndarray, value: float) -> float:
    return float(np.maximum(p - math.exp(value) * q, 0).sum())


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_epsilon_holds_for_discrete_noise_that_is_small_enough_to_sum_up(rate):
    """Two coordinates of deviation 30 cells, moved by 25 along one and 13 along the other, sampled or not."""
    deviation, delta = 30.0, 0.02
    shift = (25, 13)
    _, p = masses(deviation, 300)
    far = [np.roll(p, move) for move in shift]
    absent, present = np.outer(p, p), np.outer(*far)
    mixed = (1 - rate) * absent + rate * present
    event = dp_event.GaussianDpEvent(deviation / math.hypot(*shift))
    whole = dp_event.ComposedDpEvent(
        [
            dp_event.PoissonSampledDpEvent(rate, event) if rate < 1 else event,
            ApproximationDpEvent(divergence(2, 1 / deviation)),
        ]
    )
    found = epsilon(whole, 1, delta)
    assert 0.1 < found < 10
    assert max(hockey_stick(mixed, absent, found), hockey_stick(absent, mixed, found)) <= delta
    assert found >= epsilon(event if rate == 1 else whole.events[0], 1, delta)


def test_epsilon_of_composed_discrete_noise():
    """Four releases of one coordinate of deviation 40, moved by 25 cells each: losses are composed by convolution."""
    deviation, shift, uses, delta = 40.0, 25, 4, 0.05
    k, p = masses(deviation, 480)
    loss = (k**2 - (k - shift) ** 2) / (2 * deviation**2)  # log P(k - shift) / P(k), linear in k
    moved, total = np.roll(p, shift), np.ones(1)
    for _ in range(uses):
        total = fftconvolve(total, moved)
    sums = loss[0] * uses + (loss[1] - loss[0]) * np.arange(len(total))
    event = dp_event.ComposedDpEvent(
        [dp_event.GaussianDpEvent(deviation / shift), ApproximationDpEvent(divergence(1, 1 / deviation))]
    )
    found = epsilon(event, uses, delta)
    exact = float((total * np.maximum(1 - np.exp(found - sums), 0)).sum())
    assert exact <= delta
    assert exact > delta / 3  # and the figure is not far above what is needed
    assert total_variation(event, uses) == pytest.approx(math.sqrt(uses * divergence(1, 1 / deviation) / 2))


@pytest.mark.parametrize(
    "event", [dp_event.GaussianDpEvent(3.0), dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.0))]
)
def test_what_is_set_aside(event):
    """Nothing that is seen at the divergences of runs; the definition at large ones; no epsilon at all beyond."""
    plain = epsilon(event, 10, 1e-5)
    for apart in (0.0, 1e-47, 1e-40):
        assert (
            plain
            <= epsilon(dp_event.ComposedDpEvent([event, ApproximationDpEvent(apart)]), 10, 1e-5)
            <= plain * (1 + 3e-9)
        )
    found = epsilon(dp_event.ComposedDpEvent([event, ApproximationDpEvent(1e-17)]), 10, 1e-5)
    distance = math.sqrt(10 * 1e-17 / 2)
    assert found == pytest.approx(epsilon(event, 10, 1e-5 - (1 + math.exp(found)) * distance), rel=1e-6)
    assert found > plain * (1 + 1e-4)
    assert epsilon(dp_event.ComposedDpEvent([event, ApproximationDpEvent(1e-9)]), 10, 1e-5) == math.inf
    assert epsilon(dp_event.ComposedDpEvent([event, ApproximationDpEvent(1e-47)]), 10, 0.0) == math.inf


def test_renyi_divergences_are_not_those_of_gaussian_noise():
    with pytest.raises(PrivacyError, match="does not support"):
        renyi_curve(dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(1.0), ApproximationDpEvent(1e-9)]), (2.0,))


# The grid


def whole_spacing(n: int, multiplier: float) -> float:
    """What is charged for: a bound on the width of a cell over the deviation of the noise, for every clip norm."""
    return 2.0**-39 + sum_spacing(n) / multiplier


@pytest.mark.parametrize("clip", [1e-3, 0.5, 0.7, 60.0])
@pytest.mark.parametrize("n", [1, 2, 1000, 2**30])
@pytest.mark.parametrize("multiplier", [1e-2, 1.0, 1e6])
def test_sums_and_noise_fit_and_the_spacing_is_bounded(clip, n, multiplier):
    g, scale = sum_width(clip, n), multiplier * clip
    width = whole_width(g, scale)
    assert math.frexp(width)[0] == 0.5
    assert width >= g
    assert math.floor(scale / width) + 1 <= 2**40
    assert n * (clip // width) <= 2**53
    assert width / scale <= whole_spacing(n, multiplier)
    assert whole_spacing(n, multiplier) <= 2 * max(2.0**-39, 2 * g / scale)


# Releases


def opened(privacy: ClientPrivacy, plans, schedule, steps: int = 4, **options):
    return open_channel(privacy, plans, schedule, seed=options.pop("seed", 7), steps=steps, **options)


def plan(dimension: int = 50, steps: int = 4, **options) -> ReleasePlan:
    return ReleasePlan(**{"name": "update", "dimension": dimension, "uses": steps} | options)


WHOLE = ClientPrivacy(clip_norm=0.7, noise_multiplier=1.3, delta=1e-5, mechanism="discrete_gaussian")


@pytest.mark.parametrize(
    "schedule", [FullParticipation(), FixedCohort(cohort=5), CyclicCohorts(cohort=5), PoissonSampling(cohort=5)]
)
def test_a_release_is_whole_numbers_from_the_rows_to_the_noise(schedule):
    """Against sums of Python's integers, to the last cell."""
    channel = opened(WHOLE, [plan()], schedule.bind(9))
    relation = 2 if isinstance(schedule, FixedCohort) else 1
    scale = Fraction(1.3 * relation * 0.7)
    width = 2.0 ** (math.floor(math.log2(scale)) - 39)
    deviation = math.floor(scale / Fraction(width)) + 1
    for step in range(4):
        who = channel.draw(step)
        channel.begin(step, who)
        rows = torch.randn(len(who), 50, generator=torch.Generator().manual_seed(step), dtype=torch.float64) * 0.03
        norms = rows.norm(dim=1, keepdim=True)
        rows = torch.where(norms > 0.7 * (1 - 2**-20), rows * (0.5 / norms), rows)
        value = channel.release("update", rows, who)
        exact = [sum(int(Fraction(x) / Fraction(width)) for x in column) for column in rows.T.tolist()]
        noise = discrete_gaussian(SeededSource(7).words("noise/update", step), 50, deviation).tolist()
        expected = [float(a + b) * width / channel.denominator for a, b in zip(exact, noise, strict=True)]
        assert value.tolist() == expected
        assert max(map(abs, exact)) > 2**20


def test_secure_releases_lie_on_the_grid_that_is_stated():
    channel = opened(replace(WHOLE, source="secure"), [plan(2000)], FullParticipation().bind(12))
    channel.begin(0, channel.draw(0))
    value = channel.release("update", torch.zeros(1, 2000), torch.tensor([3]))
    kept = channel.on_grid["update"]
    assert kept.off_grid == 0
    assert kept.width == whole_width(sum_width(0.7, 12), 1.3 * 0.7)
    assert float(value.std()) == pytest.approx(1.3 * 0.7 / 12, rel=0.1)
    assert "whole numbers" in channel.report.numerics
    assert not any("precision" in text for text in channel.report.outside)


def test_the_figure_is_that_of_gaussian_noise_but_for_a_part_of_delta_that_is_stated():
    both = []
    for mechanism in ("gaussian", "discrete_gaussian"):
        privacy = ClientPrivacy(clip_norm=0.7, epsilon=4.0, delta=1e-5, mechanism=mechanism)
        both.append(opened(privacy, [plan(10**6, 40)], PoissonSampling(cohort=50).bind(1000), 40))
    ordinary, whole = both
    assert whole.noise_multiplier == pytest.approx(ordinary.noise_multiplier, rel=1e-5)
    for step in range(3):
        whole.begin(step, whole.draw(step))
    report = whole.report
    distance = math.sqrt(3 * 10**6 * whole_spacing(1000, whole.noise_multiplier) ** 4 / 600)
    stated = float(report.numerics.split("of delta ")[1].split()[0])
    assert stated == pytest.approx((1 + math.exp(report.epsilon)) * distance, rel=0.02)


def test_noise_so_small_that_no_bound_is_left_says_why():
    channel = opened(replace(WHOLE, noise_multiplier=0.1), [plan()], FullParticipation().bind(9))
    channel.begin(0, channel.draw(0))
    assert channel.report.epsilon == math.inf
    assert channel.report.numerics.endswith("so little noise leaves nothing of delta for what the law differs from "
                                            "Gaussian noise: no bound")  # fmt: skip


def test_several_releases_of_a_step_and_weights():
    weights = (0.4, 0.8, 1.2, 1.6)
    plans = [plan(50, allocation=weights), plan(30, name="other", allocation=weights)]
    privacy = replace(WHOLE, noise_multiplier=None, epsilon=3.0)
    channel = opened(privacy, plans, FullParticipation().bind(9))
    plain = opened(replace(privacy, mechanism="gaussian"), plans, FullParticipation().bind(9))
    assert channel.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-5)
    for step in range(4):
        channel.begin(step, channel.draw(step))
        for one in plans:
            value = channel.release(one.name, torch.zeros(0, one.dimension), torch.zeros(0, dtype=torch.int64))
            assert float(value.std() / channel.noise_std(one.name)) == pytest.approx(1, abs=0.5)
    assert channel.epsilon <= 3.0
    with pytest.raises(PrivacyError, match="'update' and 'other' have different allocations"):
        opened(privacy, [plans[0], plan(30, name="other")], FullParticipation().bind(9))


def test_repetitions_of_other_budgets_have_grids_of_their_own():
    settings = [replace(WHOLE, noise_multiplier=z) for z in (0.5, 300.0)]
    channel = opened(settings, [plan(400)], FullParticipation().bind(9), replicates=2)
    channel.begin(0, channel.draw(0))
    value = channel.release("update", torch.zeros(2, 9, 400), torch.arange(9))
    for r, z in enumerate((0.5, 300.0)):
        width = whole_width(sum_width(0.7, 9), z * 0.7)
        cells = value[r] * 9 / width
        assert float((cells - cells.round()).abs().max()) < 1e-2
        noise = discrete_gaussian(SeededSource(7, r).words("noise/update", 0), 400, math.floor(z * 0.7 / width) + 1)
        assert np.array_equal(cells.round().numpy(), noise)


def test_a_client_apart_sends_what_the_server_counts():
    """Truncated to the finer grid of exact sums, then to that of the noise: as in one step."""
    channel = opened(replace(WHOLE, noise_multiplier=500.0), [plan()], FullParticipation().bind(3))
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sent = torch.cat([channel.counted("update", row[None]) for row in rows])
    values = []
    for one in (rows, sent):
        channel = opened(replace(WHOLE, noise_multiplier=500.0), [plan()], FullParticipation().bind(3))
        channel.begin(0, channel.draw(0))
        values.append(channel.release("update", one, torch.arange(3)))
    assert torch.equal(*values)


# Refusals


@pytest.mark.parametrize("form", ["symmetric", "diagonal"])
def test_matrices_are_refused(form):
    with pytest.raises(
        PrivacyError, match=f"'discrete_gaussian' is noise on exact sums of vectors, and this is a {form}"
    ):
        opened(WHOLE, [plan(5, form=form)], FullParticipation().bind(9))


def test_settings_that_are_refused():
    with pytest.raises(ConfigError, match="no noise for the count of clients"):
        replace(WHOLE, clip_norm=QuantileClip(0.5))
    with pytest.raises(ConfigError, match="bands correlates Gaussian noise"):
        replace(WHOLE, bands=2)
    with pytest.raises(ConfigError, match="gradients of records are no whole numbers"):
        RecordPrivacy(clip_norm=1.0, noise_multiplier=1.0, mechanism="discrete_gaussian")


def test_a_population_too_large_for_so_little_noise():
    """The sums of a million clients leave 33 bits below the clip norm. Those of 2**50 leave three, and noise of less
    than a cell has no epsilon."""
    channel = opened(replace(WHOLE, noise_multiplier=3.0), [plan()], FullParticipation().bind(2**20))
    plain = opened(
        replace(WHOLE, noise_multiplier=3.0, mechanism="gaussian"), [plan()], FullParticipation().bind(2**20)
    )
    assert plain.epsilon_at(4) <= channel.epsilon_at(4) <= plain.epsilon_at(4) * (1 + 1e-8)
    assert divergence(50, whole_spacing(2**50, 0.05)) == math.inf


def test_a_budget_that_the_least_noise_does_not_spend():
    """exp(epsilon) of the distance of the laws must stay below delta: no budget beyond that buys less noise."""
    within, beyond, far = (
        opened(replace(WHOLE, noise_multiplier=None, epsilon=e), [plan()], FullParticipation().bind(9))
        for e in (8.0, 60.0, 200.0)
    )
    assert within.epsilon_at(4) == pytest.approx(8.0, rel=1e-3)
    assert beyond.multipliers == pytest.approx(far.multipliers, rel=1e-4)
    distance = math.sqrt(4 * divergence(50, whole_spacing(9, far.multipliers[0])) / 2)
    assert 1e-7 < math.exp(far.epsilon_at(4)) * distance < 1e-5


@pytest.mark.parametrize("refused", ["draw", "draw_rows"])
def test_noise_without_a_grid_is_refused(refused):
    law = DiscreteGaussianNoise(1.0)
    with pytest.raises(PrivacyError, match="Discrete Gaussian noise"):
        law.draw(SeededSource(0), "noise", 0, 3) if refused == "draw" else law.draw_rows(
            SeededSource(0), "noise", 0, torch.arange(2), 3
        )
