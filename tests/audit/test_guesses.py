"""Lower bounds on epsilon from one run, against closed forms, linear programs and mechanisms counted out in full."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from fedmtl.audit.guesses import SHARE, Guesses, guess, lower_bound, refuted
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy.accounting.composition import trade_off
from fedmtl.privacy.accounting.loss_laws import PureDpEvent
from fedmtl.privacy.accounting.trade_off import TradeOff
from fedmtl.privacy.cost import PrivacyCost
from fedmtl.privacy.events import dp_event

GAUSSIAN = PrivacyCost(law="gaussian", sizes=(10,), delta=1e-5)


def gaussian_scores(multiplier, m, rng):
    coins = rng.random(m) < 0.5
    return (coins - 0.5) + multiplier * rng.standard_normal(m), coins


def lower_bounds(scores, coins):
    """The bound for independent canaries, all guessed, and the one for any, of which the surest are guessed."""
    return (
        lower_bound(guess(scores, coins), GAUSSIAN, 1, independent=True),
        lower_bound(guess(scores, coins, SHARE), GAUSSIAN, 1),
    )


def most_likely(guesses, curve):
    """The largest P(N >= right) under the inequalities of the module, by a linear program over the law of N."""
    r, m, count = guesses.made, guesses.canaries, np.arange(guesses.made + 1)
    slopes = np.diff(curve.y) / np.maximum(np.diff(curve.x), 1e-300)
    lines = [(1.0, 0.0)]
    lines += [
        (y - s * x, s) for x, y, s in zip(curve.x, curve.y, slopes, strict=False) if 1e-6 < s < 1e6
    ]
    rows, limits = [], []
    for v in range(r):
        for intercept, slope in lines:
            rows.append(count * (count > v) / m - slope * (r - count) * (count >= v) / m)
            limits.append(intercept)
    answer = optimize.linprog(
        -(count >= guesses.right).astype(float),
        A_ub=rows,
        b_ub=limits,
        A_eq=[np.ones(r + 1)],
        b_eq=[1.0],
    )
    return -answer.fun


class TestTradeOff:
    @pytest.mark.parametrize(("multiplier", "uses"), [(0.4, 1), (3.73, 1), (30.0, 500), (1e4, 1)])
    def test_gaussian(self, multiplier, uses):
        curve = trade_off(dp_event.GaussianDpEvent(multiplier), uses)
        mu = math.sqrt(uses) / multiplier
        x = np.concatenate([10.0 ** np.arange(-9, -1), np.linspace(0.05, 1, 30)])
        exact = stats.norm.cdf(stats.norm.ppf(x) + mu)
        values = np.interp(x, curve.x, curve.y)
        assert (values >= exact - 1e-12).all()
        np.testing.assert_allclose(values, exact, rtol=2e-3)
        assert curve.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-6)

    def test_laplace(self):
        curve = trade_off(
            dp_event.LaplaceDpEvent(1.0), 1
        )  # F(x) = e x, 1 - 1 / (4 e x) or 1 - (1 - x) / e
        x = np.array([0.01, 0.1, math.exp(-1) / 2, 0.25, 0.4, 0.5, 0.9])
        middle = 1 - 1 / (4 * math.e * x)
        exact = np.where(
            x <= math.exp(-1) / 2, math.e * x, np.where(x < 0.5, middle, 1 - (1 - x) / math.e)
        )
        values = np.interp(x, curve.x, curve.y)
        assert (values >= exact - 1e-12).all()
        np.testing.assert_allclose(
            values, exact, rtol=0.03
        )  # the largest loss lies between two points of the grid
        assert curve.advantage == pytest.approx(1 - math.exp(-0.5), rel=1e-4)

    @pytest.mark.parametrize("q", [0.05, 0.5])
    def test_poisson_sampling_is_the_larger_of_both_directions(self, q):
        z, t = 0.8, np.linspace(-8, 9, 4001)
        plain, shifted = stats.norm.sf(t / z), stats.norm.sf((t - 1) / z)
        mixed = (1 - q) * plain + q * shifted
        curve = trade_off(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), 1)
        for x, y in [(plain, mixed), (1 - mixed, 1 - plain)]:
            values = np.interp(x, curve.x, curve.y)
            assert (values >= y - 1e-12).all()
            assert np.abs(values - y).min() < 1e-4
        assert curve.advantage == pytest.approx((mixed - plain).max(), rel=1e-5)

    def test_no_use_and_no_noise(self):
        assert trade_off(dp_event.GaussianDpEvent(1.0), 0).advantage == 0
        assert trade_off(dp_event.NonPrivateDpEvent(), 1).advantage == 1

    def test_epsilon_is_the_curve_of_randomized_response(self):
        curve, exact = trade_off(PureDpEvent(1.3), 1), TradeOff.of_epsilon(1.3, 0.0)
        x = np.linspace(0, 1, 50)
        values, least = (np.interp(x, one.x, one.y) for one in (curve, exact))
        assert (values >= least - 1e-12).all()
        np.testing.assert_allclose(values, least, rtol=0.03)


class TestAnyCanaries:
    @pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
    @pytest.mark.parametrize(("made", "canaries"), [(100, 100), (100, 700), (1000, 1000), (1, 1)])
    def test_pure_epsilon_is_nearly_the_binomial_law(self, epsilon, made, canaries):
        """The test never refutes below the number of right guesses that the binomial law needs, which independent
        guesses attain, and at most one above."""
        curve, law = (
            TradeOff.of_epsilon(epsilon, 0.0),
            stats.binom(made, 1 / (1 + math.exp(-epsilon))),
        )
        needed = int(law.isf(0.05)) + 1
        assert not refuted(Guesses(needed - 1, made, canaries), curve)
        assert needed >= made or refuted(Guesses(needed + 1, made, canaries), curve)

    @pytest.mark.parametrize(
        "curve", [trade_off(dp_event.GaussianDpEvent(1.2), 1), TradeOff.of_epsilon(0.7, 0.05)]
    )
    @pytest.mark.parametrize(
        ("right", "made", "canaries"), [(7, 8, 8), (6, 8, 20), (8, 8, 8), (5, 9, 9)]
    )
    def test_linear_program(self, curve, right, made, canaries):
        keep = np.unique(np.linspace(0, len(curve.x) - 1, 40).astype(int))
        curve = TradeOff(curve.x[keep], curve.y[keep])
        guesses = Guesses(right, made, canaries)
        largest = most_likely(guesses, curve)
        assert refuted(guesses, curve, 1 - largest * 1.01) or largest * 1.01 >= 1
        assert not refuted(guesses, curve, 1 - largest * 0.99)

    @pytest.mark.parametrize("made", [2, 4])
    def test_mechanisms_that_correlate_their_canaries(self, made):
        """Randomized response that, for all canaries at once, is truthful with probability delta, or strong or weak:
        the chance of so many right guesses is never above the level at which they refute the claim."""
        m = 4
        for hidden, (weak, strong) in itertools.product(
            [0.02, 0.2], [(0.5, 1.0), (0.6, 1.0), (0.55, 0.9)]
        ):
            # the outputs of one canary: (strong or weak, guess); P under its coin, Q under the other one
            p = np.array(
                [
                    hidden * strong,
                    hidden * (1 - strong),
                    (1 - hidden) * weak,
                    (1 - hidden) * (1 - weak),
                ]
            )
            q = p[[1, 0, 3, 2]]
            order = np.argsort(-p / np.maximum(q, 1e-300), kind="stable")
            curve = TradeOff(
                np.append(0.0, np.cumsum(q[order])), np.append(0.0, np.cumsum(p[order]))
            )
            for right in range(made + 1):
                chance = hidden * stats.binom.sf(right - 1, made, strong)
                chance += (1 - hidden) * stats.binom.sf(right - 1, made, weak)
                assert not refuted(Guesses(right, made, m), curve, 1 - chance * 0.999), (
                    hidden,
                    weak,
                    strong,
                    right,
                )

    def test_a_mechanism_that_reveals_everything_at_times(self):
        epsilon, delta, m = 0.5, 0.1, 12
        accuracy, curve = 1 / (1 + math.exp(-epsilon)), TradeOff.of_epsilon(epsilon, delta)
        for right in range(m + 1):
            chance = delta + (1 - delta) * stats.binom.sf(right - 1, m, accuracy)
            assert not refuted(Guesses(right, m, m), curve, 1 - chance * 0.999)
        # all right with probability delta and more cannot be refuted at a level below delta
        assert not refuted(Guesses(m, m, m), curve, 1 - delta)

    @pytest.mark.parametrize(
        ("right", "made", "canaries", "epsilon"),
        [
            (650, 1000, 1000, 0.9675),
            (90, 100, 1000, 2.4564),
            (150, 200, 200, 1.7348),
            (850, 1000, 10_000, 2.1801),
            (990, 1000, 10_000, 5.9196),
            (19, 20, 50, 2.5620),
        ],
    )
    def test_the_auditor_of_jax_privacy(self, right, made, canaries, epsilon):
        """``_epsilon_one_run_fdp(0, canaries, made, right, 0.05, 1e-5)`` of jax_privacy 2.0.0, Gaussian noise."""
        bound = lower_bound(Guesses(right, made, canaries), GAUSSIAN, 1)
        assert epsilon * (1 - 1e-3) < bound < epsilon + 1e-4


class TestIndependentCanaries:
    @pytest.mark.parametrize(("right", "canaries"), [(620, 1000), (150, 200), (200, 200)])
    @pytest.mark.parametrize("confidence", [0.95, 0.999])
    def test_gaussian_by_clopper_and_pearson(self, right, canaries, confidence):
        accuracy = stats.beta.ppf(1 - confidence, right, canaries - right + 1)
        mu = 2 * stats.norm.ppf(accuracy)
        bound = lower_bound(
            Guesses(right, canaries, canaries), GAUSSIAN, 7, confidence=confidence, independent=True
        )
        assert bound == pytest.approx(GAUSSIAN.epsilon(7, math.sqrt(7) / mu), rel=1e-3)

    def test_randomized_response(self):
        """The exact law of the number of right guesses at the epsilon that the bound names has the level's mass."""
        bound = lower_bound(
            Guesses(90, 120, 120),
            PrivacyCost(law="laplace", sizes=(1,), delta=0.0),
            1,
            independent=True,
        )
        accuracy = (
            1 - math.exp(-bound / 2) / 2
        )  # the sign of Laplace noise about a threshold in the middle
        assert stats.binom.sf(89, 120, accuracy) == pytest.approx(0.05, rel=2e-3)

    def test_every_canary_is_guessed(self):
        with pytest.raises(ConfigError, match="a guess about each of the 10"):
            lower_bound(Guesses(5, 5, 10), GAUSSIAN, 1, independent=True)


class TestLowerBounds:
    @pytest.mark.parametrize("independent", [True, False])
    def test_monotone_in_right_guesses_and_confidence(self, independent):
        epsilons = [
            lower_bound(Guesses(right, 100, 100), GAUSSIAN, 3, independent=independent)
            for right in (0, 50, 65, 80, 95, 100)
        ]
        assert epsilons[:2] == [0.0, 0.0]
        assert 0 < epsilons[2] < epsilons[3] < epsilons[4] < epsilons[5] < math.inf
        surer = lower_bound(
            Guesses(80, 100, 100), GAUSSIAN, 3, confidence=0.999, independent=independent
        )
        assert 0 < surer < epsilons[3]

    @pytest.mark.parametrize(
        ("cost", "uses"),
        [
            (GAUSSIAN, 20),
            (PrivacyCost(law="gaussian", sizes=(10, 3), delta=1e-5, sampled=0.1), 100),
            (
                PrivacyCost(law="gaussian", sizes=(10,), delta=1e-5, sampled=0.1, replaced=True),
                100,
            ),
            (PrivacyCost(law="laplace", sizes=(10,), delta=1e-6), 5),
            (PrivacyCost(law="l2_laplace", sizes=(10,), delta=1e-6, sampled=0.2, sums=3), 5),
            (PrivacyCost(law="gaussian", sizes=(10,), delta=1e-5, weights=(0.5, 1.5)), 2),
        ],
    )
    def test_costs(self, cost, uses):
        """The bound is the epsilon of a multiplier, on whose two sides the guesses are refuted and are not."""
        guesses = Guesses(70, 100, 100)
        for independent in (True, False):
            bound = lower_bound(guesses, cost, uses, independent=independent)
            for multiplier, refutes in [
                (cost.multiplier(bound * 0.99, uses), True),
                (cost.multiplier(bound * 1.01, uses), False),
            ]:
                curve = trade_off(cost.after(uses, multiplier), 1)
                assert refuted(guesses, curve, 0.95, independent) == refutes

    def test_tight_where_the_field_can_be(self):
        """10,000 canaries of one Gaussian sum: at least 80% of epsilon on average."""
        rng = np.random.default_rng(1)
        for epsilon in (1.0, 8.0):
            multiplier = GAUSSIAN.multiplier(epsilon, 1)
            bounds = [lower_bounds(*gaussian_scores(multiplier, 10_000, rng)) for _ in range(10)]
            assert np.mean([pair[0] for pair in bounds]) > 0.8 * epsilon
            assert np.mean([pair[1] for pair in bounds]) > 0.5 * epsilon

    def test_coverage(self):
        """In 300 sound runs the bounds exceed epsilon in no more than 5%, by an exact test; with half the noise always
        for independent canaries."""
        rng, multiplier = np.random.default_rng(2), GAUSSIAN.multiplier(2.0, 1)
        exact = GAUSSIAN.epsilon(1, multiplier)
        sound = np.array(
            [
                [bound > exact for bound in lower_bounds(*gaussian_scores(multiplier, 500, rng))]
                for _ in range(300)
            ]
        )
        assert (stats.binom.sf(sound.sum(0) - 1, 300, 0.05) > 0.001).all()
        assert sound[:, 0].any()  # it would be useless otherwise
        for _ in range(5):
            assert lower_bounds(*gaussian_scores(multiplier / 2, 1000, rng))[0] > exact

    def test_no_use_is_worth_nothing(self):
        assert lower_bound(Guesses(100, 100, 100), GAUSSIAN, 0, independent=True) == 0

    @pytest.mark.parametrize("independent", [True, False])
    def test_as_many_right_guesses_as_chance_gives_bound_nothing(self, independent):
        assert lower_bound(Guesses(50, 100, 100), GAUSSIAN, 3, independent=independent) == 0

    def test_more_uses_than_the_cost_has(self):
        cost = PrivacyCost(law="gaussian", sizes=(1,), delta=1e-5, max_uses=3)
        with pytest.raises(PrivacyError, match="4 uses were charged"):
            lower_bound(Guesses(90, 100, 100), cost, 4)


class TestGuess:
    def test_sides_of_the_median_of_the_surest(self):
        scores, coins = np.array([3.0, -2.0, 1.0, -0.5]), np.array([True, True, True, False])
        assert guess(scores, coins) == Guesses(3, 4, 4)
        assert guess(scores, coins, 0.5) == Guesses(1, 2, 4)
        assert guess(scores, coins, 0.01) == Guesses(1, 1, 4)
        assert guess(scores - 100, coins) == Guesses(3, 4, 4)

    def test_less_noise_than_claimed_is_refuted_under_sampling(self):
        """The log likelihood ratio of the claim is then far below 0 for canaries that are in, too."""
        rate, rounds, rng = 0.2, 20, np.random.default_rng(0)
        cost = PrivacyCost(law="gaussian", sizes=(1,), delta=1e-5, sampled=rate)
        z, coins = cost.multiplier(4.0, rounds), rng.random(1000) < 0.5

        def scores(noise: float) -> np.ndarray:
            part = (rng.random((rounds, 1000)) < rate) * coins + rng.normal(
                0, noise, (rounds, 1000)
            )
            return np.logaddexp(np.log1p(-rate), np.log(rate) + (part - 0.5) / z**2).sum(0)

        bounds = [
            lower_bound(guess(scores(noise), coins), cost, rounds, independent=True)
            for noise in (z, z / 2)
        ]
        assert bounds[0] < 4.0 < bounds[1]

    def test_refusals(self):
        with pytest.raises(ConfigError, match="1 that are not finite"):
            guess(np.array([1.0, math.nan]), np.array([True, False]))
        with pytest.raises(ConfigError, match="share"):
            guess(np.ones(2), np.array([True, False]), 0.0)
        with pytest.raises(ConfigError, match="confidence"):
            lower_bound(Guesses(1, 1, 1), GAUSSIAN, 1, confidence=1.0)
        for right, made, canaries in [(-1, 2, 2), (3, 2, 2), (1, 3, 2), (0, 0, 0)]:
            with pytest.raises(ConfigError, match="impossible"):
                Guesses(right, made, canaries)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_more_right_guesses_than_sampling_explains_at_any_noise_are_refuted_down_to_the_least_noise(
    mechanism: str,
) -> None:
    """A canary that takes part with probability q in each of 3 rounds is guessed right with (1 + 1 - (1 - q)^3) / 2 at
    most, whatever the noise is: 120 of 200 refute all of it."""
    rate = 5 / 212
    assert stats.binom.sf(119, 200, 1 - (1 - rate) ** 3 / 2) < 0.05
    cost = PrivacyCost(law=mechanism, sizes=(10,), delta=1e-5, sampled=rate)
    for right in (120, 200):
        bound = lower_bound(Guesses(right, 200, 200), cost, 3, independent=True)
        assert bound == pytest.approx(cost.epsilon(3, 2.0**-5), rel=1e-3)
