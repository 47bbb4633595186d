"""Gaussian noise of secure mode, in whole numbers: the law of the sampler, what it costs, and what is released."""

import decimal
import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import stats
from scipy.signal import fftconvolve

import fedmtl.contrib.published.mp_mtl  # noqa: F401  (registers its law)
from fedmtl.errors import PrivacyError
from fedmtl.privacy import (
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    GradientPlan,
    PoissonSampling,
    PrivacyCost,
    RecordPrivacy,
    ReleasePlan,
    epsilon,
    open_channel,
)
from fedmtl.privacy.noise import discrete
from fedmtl.privacy.noise.discrete import discrete_gaussian, exponential, slack
from fedmtl.privacy.noise.laws import LAWS
from fedmtl.privacy.noise.sources import SecureSource, SeededSource
from tests.mutation import edit

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


@pytest.mark.parametrize("deviation", [1000, 2**39 + 12345, 2**47 - 1])
def test_large_deviations_have_the_moments_and_the_shape(deviation):
    units = discrete_gaussian(words(), COUNT, deviation) / deviation
    assert stats.kstest(units, stats.norm.cdf).pvalue > ALPHA
    for power, mean, square in (
        (1, 0, 1),
        (2, 1, 3),
        (3, 0, 15),
        (4, 3, 105),
    ):  # moments, and of twice the power
        assert abs((units**power).mean() - mean) < 5 * math.sqrt((square - mean**2) / COUNT)


def test_the_last_bits_of_large_noise_are_uniform():
    drawn = discrete_gaussian(words(), COUNT, 2**39 + 12345)
    assert stats.chisquare(np.bincount(drawn & 63, minlength=64)).pvalue > ALPHA
    assert abs((drawn < 0).mean() - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


def rounded(count: int, deviation: float) -> np.ndarray:
    return np.rint(np.random.default_rng(0).normal(scale=deviation, size=count)).astype(np.int64)


STAIRS = discrete._Stairs
BROKEN = {
    "a rounded Gaussian": lambda: rounded(COUNT, 1.0),
    "a deviation 2 % larger": lambda: discrete_gaussian(words(), COUNT, Fraction(102, 100)),
    "zero of both signs": lambda: _patched(STAIRS.trial, "size == 0", "size == -1"),
    "nothing is rejected": lambda: _patched(STAIRS._accepted, "accepted = uniform + 2.0**-53 <= chance * (1 - margin)",
                                            "accepted = np.ones(len(size), dtype=bool)"),
    "no tail": lambda: _patched(STAIRS._blocks, "run = _zeros(words)", "run = 0"),
    "a tail of the wrong height": lambda: _patched(STAIRS._accepted, "-halvings)", "0 * halvings)"),
}  # fmt: skip


def _patched(function: Callable[..., np.ndarray], old: str, new: str) -> np.ndarray:
    """Draw with one line of the sampler changed, which decides by doubles alone."""
    with pytest.MonkeyPatch.context() as patch:
        edit(function, old, new)(patch)
        return discrete_gaussian(words(), COUNT, 1)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sampler_is_found(name):
    assert law_p(BROKEN[name](), 1.0) < ALPHA


# Exactness


@pytest.mark.parametrize(
    "deviation", [Fraction(1, 3), 1, Fraction(37, 10), 1000, 2**39 + 7, 2**47 - 1], ids=str
)
def test_doubles_decide_as_whole_numbers_do(deviation):
    """With a margin above 1 every trial is decided by whole numbers, of the same words."""
    lazy = discrete_gaussian(words(), 3000, deviation)
    assert np.array_equal(lazy, discrete_gaussian(words(), 3000, deviation, margin=3.0))
    assert np.array_equal(lazy, slow_sampler(words(), 3000, deviation))


def slow_sampler(
    source: Callable[[int], np.ndarray], size: int, deviation: int | Fraction
) -> np.ndarray:
    """The sampler as its docstrings have it: one trial after another, probabilities with 60 digits."""
    stairs, found = discrete._stairs(Fraction(deviation)), []
    square = (
        Decimal(Fraction(deviation).numerator) ** 2 / Decimal(Fraction(deviation).denominator) ** 2
    )
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


@pytest.mark.parametrize(
    "deviation", [Fraction(1, 3), 1, Fraction(37, 10), 1000, 2**39 + 7], ids=str
)
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


@pytest.mark.parametrize("precision", [10, 64, 150])
def test_bounds_on_exponentials(precision):
    for gamma in (Fraction(0), Fraction(1, 10**9), Fraction(1, 3), Fraction(7, 2), Fraction(300)):
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
    for later in ([second - 1], [second + 1], [second, third - 1], [second, third + 1]):
        stream = iter(later)
        below = discrete._below(
            first, Fraction(1), Fraction(2), lambda _, s=stream: np.array([next(s)], np.uint64)
        )
        assert below == (later[-1] in (second - 1, third - 1))
        assert not list(stream)


def test_a_tail_that_no_word_ends_goes_on():
    stream = iter([0, 0, 1 << 60])
    assert discrete._zeros(lambda count: np.array([next(stream)], np.uint64)) == 128 + 3


@pytest.mark.parametrize("deviation", [0, -1, 2**47])
def test_deviations_out_of_range(deviation):
    with pytest.raises(PrivacyError, match="must be in"):
        discrete_gaussian(words(), 3, deviation)


# What it costs


@pytest.mark.parametrize("deviation", [2, 5, 20])
def test_the_two_laws_are_as_near_as_is_proved(deviation):
    """Every number out to 30 deviations, with 60 digits: the discrete law and the rounded normal one."""
    with mpmath.workdps(60):
        s, square = mpmath.mpf(deviation), mpmath.mpf(deviation) ** 2
        constant = mpmath.nsum(
            lambda k: mpmath.exp(-(k**2) / (2 * square)), [-mpmath.inf, mpmath.inf]
        )
        rest = mpmath.mpf("2.1") * mpmath.exp(-2 * mpmath.pi**2 * square)
        for k in range(30 * deviation):
            p = mpmath.exp(-(k**2) / (2 * square)) / constant
            q = mpmath.ncdf((k + mpmath.mpf(1) / 2) / s) - mpmath.ncdf((k - mpmath.mpf(1) / 2) / s)
            if k > 0:  # of the far tail, where the difference of two numbers near 1 has no digits
                q = mpmath.ncdf(-(k - mpmath.mpf(1) / 2) / s) - mpmath.ncdf(
                    -(k + mpmath.mpf(1) / 2) / s
                )
            loss = mpmath.log(p / q)
            assert loss <= 1 / (24 * square)
            assert -loss <= k**2 / (24 * square**2) + rest


@pytest.mark.parametrize("numbers", [1, 30, 10**4, 10**8])
def test_the_squares_of_normal_numbers_add_up_to_no_more(numbers):
    for t in (1.0, 20.0, 300.0, 1001.0):
        assert stats.chi2.logsf((math.sqrt(numbers) + math.sqrt(2 * t)) ** 2, numbers) <= -t


@pytest.mark.parametrize("numbers", [1, 10**6, 10**12])
@pytest.mark.parametrize("deviation", [2**16, 2**20, 2**40])
def test_the_slack_is_that_of_the_proof(numbers, deviation):
    for value in (1e-3, 1.0, 50.0, 1e6):
        assert slack(numbers, value, deviation) == pytest.approx(
            proved(numbers, deviation, value + 1000), rel=1e-12
        )
    assert slack(numbers, math.inf, deviation) == math.inf
    assert slack(numbers, 1.0) == slack(numbers, 1.0, 2**40)


def proved(numbers: int, deviation: float, t: float) -> float:
    reach = deviation * (math.sqrt(numbers) + math.sqrt(2 * t)) + math.sqrt(numbers) / 2
    return numbers / (24 * deviation**2) + reach**2 / (24 * deviation**4)


def hockey_stick(p: np.ndarray, q: np.ndarray, value: float) -> float:
    """The larger of both directions."""
    return max(float(np.maximum(a - math.exp(value) * b, 0).sum()) for a, b in ((p, q), (q, p)))


def with_slack(value: float, numbers: int, deviation: float) -> float:
    """With numbers beyond in 2e-9 of all cases, which is nothing beside the deltas here."""
    return value + proved(numbers, deviation, 20.0)


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
    found = epsilon(event if rate == 1 else dp_event.PoissonSampledDpEvent(rate, event), 1, delta)
    larger = with_slack(found, 2, deviation)
    assert larger < found + 0.02
    assert hockey_stick(mixed, absent, larger) <= delta
    assert hockey_stick(mixed, absent, found) > delta * 0.98


def test_epsilon_of_composed_discrete_noise():
    """Four releases of one coordinate of deviation 40, moved by 25 cells each: losses are composed by convolution."""
    deviation, shift, uses, delta = 40.0, 25, 4, 0.05
    k, p = masses(deviation, 480)
    loss = (k**2 - (k - shift) ** 2) / (2 * deviation**2)  # log P(k - shift) / P(k), linear in k
    moved, total = np.roll(p, shift), np.ones(1)
    for _ in range(uses):
        total = fftconvolve(total, moved)
    sums = loss[0] * uses + (loss[1] - loss[0]) * np.arange(len(total))
    found = epsilon(dp_event.GaussianDpEvent(deviation / shift), uses, delta)
    larger = with_slack(found, uses, deviation)
    exact = float((total * np.maximum(1 - np.exp(larger - sums), 0)).sum())
    assert delta * 0.95 < exact <= delta


def test_what_is_charged_is_gaussian_noise_and_the_slack():
    cost = PrivacyCost(law="gaussian", sizes=(10**6, 100), delta=1e-5, sampled=0.1)
    plain = epsilon(cost.event(2.0), 50, 1e-5)
    assert cost.epsilon(50, 2.0) >= plain + slack(3 * 50 * 1_000_100, plain)
    assert plain <= cost.epsilon(50, 2.0) < plain + 1e-11
    coarse = replace(cost, cells=2**20)
    for one in (cost, coarse):
        added = slack(3 * 50 * 1_000_100, plain, one.cells)
        assert plain + added <= one.epsilon(50, 2.0) <= plain + added * (1 + 1e-6) + 1e-15 + added
    assert coarse.epsilon(50, 2.0) > plain + 1e-5
    assert PrivacyCost.from_dict(coarse.to_dict()) == coarse
    assert cost.to_dict()["cells"] == cost.cells
    assert cost.epsilon(0, 2.0) == 0
    assert cost.epsilon(50, 0.0) == math.inf
    other = replace(cost, law="laplace", sizes=(10**6,))
    assert other.epsilon(50, 2.0) == epsilon(other.event(2.0), 50, 1e-5)


# Releases


def opened(privacy: ClientPrivacy, plans, schedule, steps: int = 4, **options):
    return open_channel(privacy, plans, schedule, seed=7, steps=steps, **options)


def plan(dimension: int = 50, **options) -> ReleasePlan:
    return ReleasePlan(**{"name": "update", "dimension": dimension} | options)


SECURE = ClientPrivacy(clip_norm=0.7, noise_multiplier=1.3, delta=1e-5, source="secure")


@pytest.mark.parametrize(
    "schedule",
    [
        FullParticipation(),
        FixedCohort(cohort=5),
        CyclicCohorts(cohort=5),
        PoissonSampling(cohort=5),
    ],
)
def test_a_release_is_the_rounded_sum_and_whole_noise(schedule, monkeypatch):
    """Against sums of Python's integers, to the last cell."""
    monkeypatch.setattr(
        SecureSource, "words", lambda self, purpose, step: SeededSource(7).words(purpose, step)
    )
    channel = opened(SECURE, [plan()], schedule.bind(9))
    scale = 1.3 * (2 if isinstance(schedule, FixedCohort) else 1) * 0.7
    width = 2.0 ** math.floor(math.log2(min(0.7 / math.sqrt(50) * 2.0**-21, scale * 2.0**-40)))
    deviation = math.floor(Fraction(1.3) * Fraction(scale / 1.3) / Fraction(width)) + 1
    for step in range(4):
        who = channel.draw(step)
        channel.begin(step, who)
        rows = (
            torch.randn(
                len(who), 50, generator=torch.Generator().manual_seed(step), dtype=torch.float64
            )
            * 0.03
        )
        value = channel.release("update", rows, who)
        assert bool((rows.norm(dim=1) < 0.7).all())  # also of nobody, who may be drawn
        fine = Fraction(
            2.0 ** (math.floor(math.log2(0.7)) + 1 + 4 - 53)
        )  # of sums of 9 <= 2**4 rows
        exact = [
            round(sum(int(Fraction(x) / fine) for x in column) * fine / Fraction(width))
            for column in rows.T.tolist()
        ]
        noise = discrete_gaussian(
            SeededSource(7).words("noise/update", step), 50, deviation
        ).tolist()
        expected = [
            float(a + b) * width / channel.denominator for a, b in zip(exact, noise, strict=True)
        ]
        assert value.tolist() == expected


def test_a_simulation_has_the_price_of_the_secure_run():
    both = [opened(replace(SECURE, noise_multiplier=None, epsilon=4.0, source=source), [plan()],
                   PoissonSampling(cohort=5).bind(100)) for source in ("seeded", "secure")]  # fmt: skip
    assert both[0].noise_multiplier == both[1].noise_multiplier
    assert both[0].epsilon_at(4) == both[1].epsilon_at(4) <= 4


def test_every_law_has_noise_in_secure_mode():
    for name, law in LAWS.items():
        size = 6 if law.matrices else 5  # a symmetric matrix of three rows
        noise = law(30.0).whole(SecureSource(), "noise", 0, (size,), 2.0**20)
        assert noise.shape == (size,), name
        assert np.array_equal(noise, np.rint(noise))
        assert noise.any()


# Refusals


@pytest.mark.parametrize(
    ("options", "schedule", "dimension"),
    [
        ({"noise_multiplier": 1e9}, FullParticipation().bind(9), 50),
        ({"noise_multiplier": 969.0, "bands": "auto"}, CyclicCohorts(cohort=2).bind(128), 200_000),
    ],
    ids=["large", "bands"],
)
def test_noise_too_large_for_whole_numbers_is_refused_before_a_charge(
    options, schedule, dimension, tmp_path
):
    path = tmp_path / "ledger.jsonl"
    privacy = replace(SECURE, **options)
    with pytest.raises(PrivacyError, match="too large to be drawn exactly in secure mode"):
        opened(privacy, [plan(dimension)], schedule, 64, ledger_path=path)
    assert not path.exists()
    opened(replace(privacy, source="seeded"), [plan(dimension)], schedule, 64)


def test_records_whose_noise_is_too_large_are_refused():
    records = GradientPlan(ids=("a",), counts=np.array([5]), dimension=4, caps=np.array([3]))
    privacy = RecordPrivacy(clip_norm=1.0, noise_multiplier=1e9, delta=1e-5, source="secure")
    with pytest.raises(PrivacyError, match="too large to be drawn exactly"):
        open_channel(privacy, [records], "in turn", seed=0)
    # one number: at most 2**26 of noise, and a record that replaces another moves the sum by 2
    single = replace(records, dimension=1)
    open_channel(replace(privacy, noise_multiplier=0.99 * 2**25), [single], "in turn", seed=0)
    with pytest.raises(PrivacyError, match="too large to be drawn exactly"):
        open_channel(replace(privacy, noise_multiplier=1.01 * 2**25), [single], "in turn", seed=0)


def test_bands_and_small_releases_have_all_their_numbers_counted():
    """A use meets the noise of as many rounds as there are bands; a count, and the score of a search, are beside it."""
    privacy = replace(SECURE, bands=4)
    cost = opened(privacy, [plan(50)], CyclicCohorts(cohort=2).bind(8), 8).costs.kinds[0]
    assert cost.bands == 4
    assert cost.slack(3, 1.0) == slack(3 * 50 * 3 * 4, 1.0)
    least = PrivacyCost(law="gaussian", sizes=(1,), delta=1e-5)
    assert least.slack(1, 0.0) >= slack(3, 0.0)
