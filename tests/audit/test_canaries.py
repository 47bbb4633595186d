"""Canaries in the channel: what they send, and that their scores have the law that the mechanism gives them."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import fedmtl.privacy.round_channel
from fedmtl import (
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    SecureAggregation,
)
from fedmtl.audit.canaries import Canaries, CanaryRounds
from fedmtl.audit.guesses import guess, refuted
from fedmtl.audit.record_canaries import CanaryActivations, RecordCanaries
from fedmtl.errors import PrivacyError
from fedmtl.privacy import GradientPlan, ReleasePlan, open_channel
from fedmtl.privacy.accounting.composition import trade_off
from fedmtl.privacy.noise.laws import LAWS
from fedmtl.privacy.secure_sum import SecureSum
from tests.mutation import edit

CLIENTS, CANARIES, DIMENSION, STEPS, NOISE = 6, 1000, 2000, 3, 2.0


def played(
    schedule,
    *,
    clip=0.3,
    canaries=CANARIES,
    dimension=DIMENSION,
    form="vector",
    steps=STEPS,
    rows=1.0,
    **more,
):
    """The canaries of a channel of six clients that send rows of length ``rows`` after all its rounds, and the
    channel."""
    sampler = schedule.bind(CLIENTS + canaries)
    plan = ReleasePlan(name="update", dimension=dimension, form=form)
    privacy = ClientPrivacy(**{"clip_norm": clip, "noise_multiplier": NOISE, "delta": 1e-5} | more)
    channel = open_channel(
        privacy, [plan], sampler, seed=3, steps=steps, channel_class=CanaryRounds
    )
    channel.canaries = Canaries(canaries, CLIENTS, channel.sampler, seed=5)
    channel.canaries.check(channel.releases)
    directions = torch.nn.functional.normalize(
        torch.randn(CLIENTS, dimension, dtype=torch.float64), dim=1
    )
    for step in range(steps):
        clients = channel.draw(step)
        assert bool((clients < CLIENTS).all())
        channel.begin(step, clients)
        channel.release("update", rows * directions[clients], clients)
    return channel.canaries, channel


def gaussian_p(canaries, mu: float) -> float:
    """Of the law of mu-GDP: the logarithm of the likelihood ratio is N(+-mu^2 / 2, mu^2)."""
    centred = canaries.scores - torch.where(canaries.coins, 1.0, -1.0) * mu**2 / 2
    return stats.kstest(centred.numpy() / mu, "norm").pvalue


def right(canaries) -> float:
    """The share of coins that the sign of a score gives."""
    return float(((canaries.scores > 0) == canaries.coins).double().mean())


@pytest.mark.parametrize(
    ("form", "mechanism"), [("vector", "gaussian"), ("vector", "laplace"), ("diagonal", "gaussian")]
)
@pytest.mark.parametrize("canaries", [40, 100, 250])
def test_directions_have_length_one_and_are_orthogonal_where_they_fit(form, mechanism, canaries):
    found, channel = played(
        FullParticipation(),
        canaries=canaries,
        dimension=100,
        form=form,
        mechanism=mechanism,
        steps=1,
    )
    release = channel.releases["update"]
    places, values = found.directions(release, 0)
    dense = torch.zeros(canaries, 100, dtype=torch.float64).scatter_(1, places, values)
    order = 1 if mechanism == "laplace" else 2
    torch.testing.assert_close(
        torch.linalg.vector_norm(dense, order, dim=1), torch.ones(canaries, dtype=torch.float64)
    )
    if canaries <= 100:
        torch.testing.assert_close(dense @ dense.T, torch.eye(canaries, dtype=torch.float64))
    assert (found.dependence(channel.releases, adaptive=False) is None) == (canaries <= 100)


@pytest.mark.parametrize(
    ("schedule", "relation"), [(FullParticipation(), "add_remove"), (FixedCohort(1006), "replace")]
)
def test_scores_have_the_law_of_gaussian_likelihood_ratios(schedule, relation):
    canaries, channel = played(schedule)
    assert channel.sampler.relation == relation
    assert gaussian_p(canaries, math.sqrt(STEPS) / NOISE) > 1e-3
    assert bool((canaries.uses == STEPS).all())


def test_scores_against_a_server_that_opens_secure_sums() -> None:
    """It sees the noised sum of all shares: a little more noise than is charged, that of the clients that may collude."""
    one = SecureAggregation(colluding=300)
    canaries, channel = played(FullParticipation(), aggregation=one)
    assert channel.sampler.relation == "zero_out"
    # 1,006 shares, of which 706 are counted on
    assert channel.releases["update"].shares.excess(1006) == pytest.approx(math.sqrt(1006 / 706))
    assert gaussian_p(canaries, math.sqrt(STEPS * 706 / 1006) / NOISE) > 1e-3
    assert bool((canaries.uses == STEPS).all())


@pytest.mark.parametrize("broken", ["no noise of others", "half of all shares"])
def test_scores_of_broken_shares_are_beyond_the_claim(broken, monkeypatch) -> None:
    """An attack on sums whose noise is that of one share in twenty, or that are short of half, guesses too well."""
    left = {"no noise of others": 20, "half of all shares": 2}[broken]
    edit(SecureSum.noised_mean, "in senders.tolist()", f"in senders.tolist()[::{left}]")(
        monkeypatch
    )
    canaries, _ = played(FullParticipation(), aggregation=SecureAggregation(colluding=0))
    assert gaussian_p(canaries, math.sqrt(STEPS) / NOISE) < 1e-6


def test_the_rows_of_clients_change_no_score():
    torch.manual_seed(0)
    first, _ = played(FullParticipation(), rows=1.0)
    second, _ = played(FullParticipation(), rows=5.0)
    torch.testing.assert_close(first.scores, second.scores, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mechanism", "noise"), [("laplace", 2.0), ("l2_laplace", 0.05)])
def test_scores_of_pure_mechanisms_stay_within_epsilon(mechanism, noise):
    """High dimensions hide a row in L2-Laplace noise, so that one has little noise."""
    canaries, _ = played(
        FullParticipation(),
        mechanism=mechanism,
        canaries=200,
        dimension=200,
        noise_multiplier=noise,
    )
    assert float(canaries.scores.abs().max()) <= STEPS / noise + 1e-6
    assert right(canaries) > 0.5


def test_sampled_canaries_are_scored_as_a_mixture():
    """Every likelihood ratio has the mean 1 where the canary is out, and is at least (1 - q)^T."""
    canaries, channel = played(PoissonSampling(cohort=300), noise_multiplier=1.0)
    q = channel.sampler.probability
    ratios = canaries.scores.exp()
    assert float(ratios.min()) >= (1 - q) ** STEPS - 1e-9
    out = ratios[~canaries.coins]
    assert abs(float(out.mean()) - 1) < 5 * float(out.std()) / math.sqrt(len(out))
    assert float(ratios[canaries.coins].mean()) > 1.1
    torch.testing.assert_close(canaries.uses, torch.full_like(canaries.uses, q * STEPS))


def test_canaries_that_take_no_turn_have_no_score():
    canaries, _ = played(CyclicCohorts(cohort=100), steps=2)
    turns = canaries.uses > 0
    assert int(turns.sum()) == 200 - CLIENTS
    assert bool((canaries.scores[~turns] == 0).all())
    assert bool((canaries.scores[turns] != 0).all())


def test_a_symmetric_release_is_scored_by_its_outer_products():
    canaries, _ = played(
        FullParticipation(), form="symmetric", dimension=60, canaries=60, noise_multiplier=1.0
    )
    assert gaussian_p(canaries, math.sqrt(STEPS)) > 1e-3


def test_a_clip_that_fails_shows(monkeypatch):
    original = fedmtl.privacy.mechanism.clipped_sum
    sound, _ = played(FullParticipation())

    def unclipped(rows, clip, width=None):
        return original(rows, type(clip)(1e6), width)

    monkeypatch.setattr(fedmtl.privacy.mechanism, "clipped_sum", unclipped)
    monkeypatch.setattr(
        fedmtl.privacy.round_channel.RoundChannel, "new_total", lambda self, name: None
    )
    broken, _ = played(FullParticipation())

    assert right(sound) < 0.72
    assert right(broken) > 0.8


def test_a_long_sum_that_is_made_row_by_row_has_the_same_canaries():
    """The sum to which rows are added one by one is that of all rows."""
    sampler = FullParticipation().bind(CLIENTS + 8)
    plan = ReleasePlan(name="update", dimension=20_000)
    values = []
    for streamed in (False, True):
        privacy = ClientPrivacy(clip_norm=0.3, noise_multiplier=NOISE, delta=1e-5)
        channel = open_channel(
            privacy, [plan], sampler, seed=3, steps=1, channel_class=CanaryRounds
        )
        channel.canaries = Canaries(8, CLIENTS, channel.sampler, seed=5)
        clients = channel.draw(0)
        channel.begin(0, clients)
        rows = torch.linspace(-1, 1, CLIENTS * 20_000, dtype=torch.float64).view(CLIENTS, -1)
        message = rows
        if streamed:
            message = channel.new_total("update")
            message.add(clients, rows)
        values.append(
            (channel.release("update", message, clients), channel.canaries.state()["scores"])
        )
    assert torch.equal(values[0][0], values[1][0])
    assert torch.equal(values[0][1], values[1][1])


def test_a_long_sum_to_which_no_canary_adds_a_row():
    """All coins of these canaries fall on out."""
    sampler = FullParticipation().bind(CLIENTS + 1)
    privacy = ClientPrivacy(clip_norm=0.3, noise_multiplier=NOISE, delta=1e-5)
    plan = ReleasePlan(name="update", dimension=20_000)
    channel = open_channel(privacy, [plan], sampler, seed=3, steps=1, channel_class=CanaryRounds)
    channel.canaries = Canaries(1, CLIENTS, channel.sampler, seed=5)
    channel.canaries.coins[:] = False
    clients = channel.draw(0)
    channel.begin(0, clients)
    message = channel.new_total("update")
    message.add(clients, torch.ones(CLIENTS, 20_000, dtype=torch.float64))
    channel.release("update", message, clients)
    assert bool((channel.canaries.scores != 0).all())


def test_an_adaptive_clip_is_restored_beside_the_scores():
    clip = QuantileClip(quantile=0.5, initial=0.3)
    canaries, channel = played(FullParticipation(), clip=clip, canaries=50)
    state = channel.state()
    assert {name for name in state if not name.startswith("canaries.")} == {"update"}
    _, other = played(FullParticipation(), clip=clip, canaries=50, steps=1)
    other.restore(state)
    assert torch.equal(other.state()["update"], state["update"])
    assert torch.equal(other.canaries.scores, canaries.scores)


def test_matrices_whose_rows_have_no_negative_are_refused():
    with pytest.raises(PrivacyError, match="symmetric release need add-or-remove"):
        played(FixedCohort(cohort=10), form="symmetric", dimension=30, canaries=20)


def test_coins_are_fair_and_those_of_the_seed():
    sampler = FullParticipation().bind(10_000)
    one, same, other = (Canaries(9_000, 1_000, sampler, seed).coins for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert stats.binomtest(int(one.sum()), 9_000).pvalue > 1e-4
    assert np.isclose(float((one == other).double().mean()), 0.5, atol=0.05)


OWN = np.array([5, 7, 9])
ACTS = (0, 1, 2, 0, 1, 2, -1, 0, 1)


def activated(mechanism="gaussian", *, each=500, noise=NOISE, acts=ACTS, seed=0, **plan):
    """The canaries of a channel of three clients, two of which have ``each`` beside their records and act three times,
    after these activations; and the channel."""
    planned = GradientPlan(
        ids=("a", "b", "c"),
        counts=OWN + np.array([each, each, 0]),
        dimension=each,
        caps=np.array([3, 3, 2]),
        **plan,
    )
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=noise, mechanism=mechanism, delta=1e-5)
    channel = open_channel(
        privacy, (planned,), "a schedule", seed=seed, channel_class=CanaryActivations
    )
    law = LAWS[mechanism](1.0)
    canaries = channel.canaries = RecordCanaries(
        planned, torch.from_numpy(OWN), law, channel.bound, seed
    )
    channel.records.counts = OWN
    channel.begin(0, torch.tensor([acts]))
    for _ in acts:
        rows = [
            torch.randn(len(runs), int(OWN[client]), each, dtype=torch.float64)
            for client, runs in channel.acting
        ]
        channel.release(rows)
    return canaries, channel


@pytest.mark.parametrize("allocation", [None, (np.array([1.0, 2.0, 3.0]),) * 2 + (np.ones(2),)])
def test_scores_in_activations_have_the_law_of_gaussian_likelihood_ratios(allocation):
    canaries, _ = activated(allocation=allocation)
    weights = np.ones(3) if allocation is None else allocation[0] / 2
    assert gaussian_p(canaries, math.sqrt((weights**2).sum()) / NOISE) > 1e-3
    assert bool((canaries.uses == 3).all())


def test_activations_of_laplace_noise_score_within_epsilon():
    canaries, _ = activated("laplace")
    assert float(canaries.scores.abs().max()) <= 3 / NOISE + 1e-6
    assert right(canaries) > 0.55


def test_sampled_activations_are_scored_as_a_mixture():
    """Under replace-one the likelihood ratio of one value of the coin has the mean 1 under the other."""
    canaries, _ = activated(rate=0.3, noise=1.0)
    ratios = canaries.scores[~canaries.coins].exp()
    assert abs(float(ratios.mean()) - 1) < 5 * float(ratios.std()) / math.sqrt(len(ratios))
    assert float(canaries.scores[canaries.coins].exp().mean()) > 1.1


def test_silent_activations_add_nothing_to_scores():
    canaries, _ = activated(at_cap="silent", each=50)
    more, _ = activated(at_cap="silent", each=50, acts=(*ACTS, 0, 1, 0))
    torch.testing.assert_close(more.scores, canaries.scores, rtol=0, atol=1e-6)
    assert torch.equal(more.uses, canaries.uses)


@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_bounds_of_sound_activations_exceed_the_claim_as_rarely_as_stated(rate):
    """A bound exceeds the claim where the guesses refute the multiplier of the run."""
    above, runs = 0, 100
    for seed in range(runs):
        canaries, channel = activated(rate=rate, each=40, noise=1.0, seed=seed)
        assert canaries.dependence() is None
        curve = trade_off(channel.costs.kinds[0].after(3, 1.0), 1)
        above += refuted(
            guess(canaries.scores.numpy(), canaries.coins.numpy()), curve, independent=True
        )
    assert stats.binomtest(above, runs, 0.05, alternative="greater").pvalue > 1e-3
