"""Laws of the cohorts, against exact enumerations and scipy."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.errors import BudgetExhausted, ConfigError
from fedmtl.privacy import (
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
    SecureSource,
    SeededSource,
    distinct_numbers,
    open_channel,
    privacy_report,
)
from fedmtl.privacy.single_client import BoundSingleClient
from fedmtl.random import binomial_quantile
from tests.helpers import gaussian_epsilon


@pytest.mark.parametrize("source", [SeededSource(3), SecureSource()])
def test_subsets_are_uniform(source) -> None:
    for size in (0, 1, 2, 3, 5):
        subsets = dict.fromkeys(itertools.combinations(range(5), size), 0)
        draws = 1000
        for step in range(draws):
            subsets[tuple(distinct_numbers(5, size, source.coins("cohort", step)))] += 1
        if len(subsets) > 1:
            assert stats.chisquare(list(subsets.values())).pvalue > 1e-6


@pytest.mark.parametrize("source", [SeededSource(0), SecureSource()])
def test_poisson_cohorts_have_binomial_sizes_and_every_client_as_likely(source) -> None:
    bound, rounds = PoissonSampling(3).bind(10), 2000
    cohorts = [bound.draw(step, source.coins("cohort", step)).numpy() for step in range(rounds)]
    taken = np.bincount(np.concatenate(cohorts), minlength=10)
    assert stats.chi2.sf(((taken - 0.3 * rounds) ** 2).sum() / (0.21 * rounds), 10) > 1e-6
    sizes = np.array(list(map(len, cohorts)))
    expected = stats.binom.pmf(np.arange(11), 10, 0.3) * len(sizes)
    observed = np.bincount(sizes, minlength=11)
    expected, observed = (
        np.append(counts[:7], counts[7:].sum()) for counts in (expected, observed)
    )
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize(
    ("n", "q"), [(1, 0.5), (3, 1e-9), (50, 1.0), (206, 0.25), (1000, 0.1), (10**6, 1e-4)]
)
def test_cohort_sizes_are_quantiles_of_the_binomial_law(n: int, q: float) -> None:
    coins = np.concatenate(
        [np.random.default_rng(0).random(500), [0.0, 2.0**-53, 1e-12, 1 - 1e-12]]
    )
    expected = np.maximum(stats.binom.ppf(coins, n, q), 0)
    assert [binomial_quantile(float(coin), n, q) for coin in coins] == expected.tolist()


def test_a_large_population_costs_what_the_cohort_costs() -> None:
    bound = PoissonSampling(50).bind(10**12)
    ranks = bound.draw(0, SeededSource(1).coins("cohort", 0))
    assert 10 < len(ranks) < 120
    assert ranks.dtype == torch.int64
    assert torch.equal(ranks, torch.unique(ranks))
    assert int(ranks.max()) < 10**12


def test_public_denominators_and_probabilities() -> None:
    for sampler, denominator in (
        (PoissonSampling(2.5), 2.5),
        (FixedCohort(4), 4.0),
        (FullParticipation(), 10.0),
    ):
        bound = sampler.bind(10)
        assert bound.denominator == denominator
        assert bound.probability == pytest.approx(denominator / 10)
    for sampler in (PoissonSampling(11), FixedCohort(11)):
        with pytest.raises(ConfigError, match="only 10 clients"):
            sampler.bind(10)


def fixed(steps: int, *, max_uses: int | None = None, **privacy):
    plan = ReleasePlan(name="update", dimension=3)
    settings = ClientPrivacy(**{"clip_norm": 1.0, "noise_multiplier": 5.0, **privacy})
    return open_channel(settings, (plan,), FixedCohort(4, max_uses).bind(10), seed=0, steps=steps)


def play(door, steps: int) -> np.ndarray:
    uses = np.zeros(10, dtype=int)
    for step in range(steps):
        ranks = door.draw(step)
        door.begin(step, ranks)
        door.release("update", torch.zeros(len(ranks), 3), ranks)
        uses[ranks.numpy()] += 1
    return uses


def test_fixed_cohorts_charge_participations_under_a_cap() -> None:
    door = fixed(5)
    assert door.sampler.max_uses == 3  # 5 x 4 / 10 = 2 on average, one more at most
    uses = play(door, 5)
    assert uses.max() == int(door.accountant.uses.max()) <= 3
    assert door.epsilon == pytest.approx(gaussian_epsilon(uses.max() ** 0.5 / 5.0, 1e-5), rel=1e-6)
    assert "not amplified" in privacy_report(door).sampler
    assert privacy_report(door).relation == "replace"


def test_nobody_passes_the_cap() -> None:
    door = fixed(8, max_uses=2)  # 20 places in all: five full cohorts at the very most
    with pytest.raises(BudgetExhausted, match="fewer than 2 times"):
        play(door, 8)
    assert 3 * 4 <= int(door.accountant.participations.sum()) <= 5 * 4
    assert int(door.accountant.uses.max()) <= 2
    assert door.epsilon <= door.epsilon_at(2)


def test_turns_are_public_and_charged_to_those_whose_turn_it_is() -> None:
    plan = ReleasePlan(name="update", dimension=3)
    settings = ClientPrivacy(clip_norm=1.0, epsilon=2.0)
    door = open_channel(settings, (plan,), CyclicCohorts(4).bind(10), seed=0, steps=7)
    assert door.draw(0).tolist() == [0, 1, 2, 3]
    assert door.draw(2).tolist() == [0, 1, 8, 9]
    uses = play(door, 7)
    assert uses.sum() == 28
    assert set(uses) == {2, 3}  # 7 x 4 / 10 = 2.8
    assert door.sampler.cap == uses.max() == int(door.accountant.uses.max())
    report = privacy_report(door)
    assert report.relation == "zero_out"
    assert door.releases["update"].sensitivity == 1.0
    assert "not amplified" in report.sampler
    z = door.noise_multiplier
    assert door.epsilon == pytest.approx(gaussian_epsilon(3**0.5 / z, report.delta), rel=1e-6)
    assert door.epsilon <= 2.0
    # the turns of clients 8, 9, 0 and 1, of whom the last two have had three
    assert door.draw(7).tolist() == [8, 9]
    door.begin(7, door.draw(7))
    assert set(door.accountant.participations[0]) == {3}
    with pytest.raises(BudgetExhausted, match=r"Step 8: all its clients .* 3 each"):
        door.draw(8)


def test_only_secret_coins_amplify() -> None:
    """A cohort of everybody hides nobody."""
    found = {
        type(sampler).__name__: sampler.bind(8).facts["amplified"]
        for sampler in (PoissonSampling(2), FixedCohort(2), FullParticipation(), CyclicCohorts(2))
    }
    assert [name for name, amplified in found.items() if amplified] == ["PoissonSampling"]


def test_a_client_that_is_asked_is_charged_for_each_time_and_nothing_is_amplified() -> None:
    bound = BoundSingleClient(1, 1, "Poisson, 2 of 8 clients", max_uses=3)
    assert bound.facts == {"relation": "zero_out", "amplified": False, "per_participation": True}
    assert bound.draw(5, SeededSource(0).coins("cohort", 5)).tolist() == [0]
    assert (bound.denominator, bound.probability, bound.cap, bound.capped(10).cap) == (
        1.0,
        1.0,
        3,
        3,
    )
    assert (
        bound.describe()
        == "one client, when a server asks it (Poisson, 2 of 8 clients), at most 3 times"
    )
