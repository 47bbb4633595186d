"""Votes of clients on the models that they average: a release of the last rounds."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl import (
    Average,
    ClientPrivacy,
    Finetune,
    FullParticipation,
    ProximalPoint,
    RecordPrivacy,
    Result,
    Trainer,
    models,
)
from fedmtl.contrib import proximal_point
from fedmtl.contrib.automatic import automatic
from fedmtl.contrib.average import Candidates, average_numbers
from fedmtl.data import Domain, FederatedDataset
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import RoundChannel, clipped_sum, open_channel
from fedmtl.privacy.channel_report import signal_to_noise
from fedmtl.privacy.clip import sum_width
from tests.algorithms.harness import problem_of, run
from tests.algorithms.test_average import INTERCEPTS, RIDGES, ridge, rows
from tests.helpers import ragged_classification

CANDIDATES = 51
CLIPPED = ClientPrivacy(clip_norm=0.2, epsilon=math.inf)
NOISY = ClientPrivacy(clip_norm=0.2, noise_multiplier=0.8, delta=1e-5)


def vote(x, y, shared, bias: bool, limit: float) -> np.ndarray:
    """The vote of a client with these records."""
    return Candidates.of(x, y, shared, bias, limit).vote(len(x))


def errors_left_out(x, y, shared, limit: float) -> tuple[list[float], list[float]]:
    """Mean squares of residuals by refits without each record, of the models of ``local`` and of the others."""
    n, d = x.shape
    spread = np.sqrt((n * x.var(0) + 10 * 0.4**2) / (n + 10))
    z = (x - x.mean(0)) / spread

    def error(base, kappa: float, lam: float) -> float:
        residual = y - x @ base[:d] - base[d]
        total = 0.0
        for i in range(n):
            a, v = ridge(np.delete(z, i, 0), np.delete(residual, i), kappa, lam)
            predicted = min(limit, max(-limit, y[i] - residual[i] + a + z[i] @ v))
            total += (y[i] - predicted) ** 2 / n
        return total

    own = [error(np.zeros(d + 1), 0, lam) for lam in RIDGES]
    others = [error(shared, kappa, lam) for kappa, lam in itertools.product(INTERCEPTS, RIDGES)]
    floor = min(own) / n
    return [each + floor for each in own], [each + floor for each in others]


@pytest.mark.parametrize("n", [2, 3, 9])
def test_a_vote_is_how_far_each_error_lies_below_the_mean(n: int) -> None:
    x, y, shared = rows(n, 4)
    own, others = errors_left_out(x, y, shared, 0.8)
    # the error whose likelihood is the mean of those of the ten models
    local = (sum(each ** (-n / 4) for each in own) / len(own)) ** (-4 / n)
    errors = [local, *others]
    gains = [sum(errors) / CANDIDATES - each for each in errors]
    length = math.sqrt(sum(gain**2 for gain in gains))
    found = vote(x, y, shared, True, 0.8)
    np.testing.assert_allclose(found, [gain / length for gain in gains], rtol=1e-7, atol=1e-9)


def test_votes_weigh_as_evidence() -> None:
    """Of many clients that vote for one candidate it takes the average; votes of zero are none."""
    x, y, shared = rows(9, 4)
    model, shares = average_numbers(x, y, shared, True, 0.5, 0.8)
    votes = np.zeros(CANDIDATES)
    same, same_shares = average_numbers(x, y, shared, True, 0.5, 0.8, votes)
    np.testing.assert_array_equal(same, model)
    np.testing.assert_array_equal(same_shares, shares)
    votes[1:] -= math.log(2)  # all but local are half as likely: odds of local are twice as large
    _, halved = average_numbers(x, y, shared, True, 0.5, 0.8, votes)
    odds = shares[0] / (1 - shares[0])
    assert halved[0] / (1 - halved[0]) == pytest.approx(2 * odds)
    votes[-1] = 300  # the shared model as it is
    best, _ = average_numbers(x, y, shared, True, 0.5, 0.8, votes)
    np.testing.assert_allclose(best, shared)


@pytest.mark.parametrize(
    ("noise", "weight"), [(0.0, 15.0), (1 / 60, 15.0), (0.1, 5.0), (2.0, 0.25)]
)
def test_the_weight_of_votes_by_their_noise(noise: float, weight: float) -> None:
    """The noise moves a log weight by a standard deviation of a half at most."""
    public = {"votes": torch.tensor([0.5, -0.25]), "vote_noise": torch.tensor([noise])}
    informed = Average(noise=1.0).informed(public)
    assert informed.votes == pytest.approx((weight * 0.5, weight * -0.25), rel=1e-6)
    assert weight * noise <= 0.5 + 1e-12
    assert Average(noise=1.0).informed({"global": torch.zeros(2)}) == Average(noise=1.0)


def tables(clients: int = 6, seed: int = 0) -> FederatedDataset:
    random = np.random.default_rng(seed)
    parts = {}
    for client in range(clients):
        x = random.uniform(-1, 1, (4, 2))
        y = 0.4 * x[:, 0] - 0.3 * x[:, 1] + 0.2 * random.normal() + 0.05 * random.normal(size=4)
        parts[f"c{client}"] = x, np.clip(y, -1, 1)
    data = FederatedDataset.from_tensors(parts, classes=None, domain=Domain(2.0, 2**0.5, 1.0))
    return replace(data, limit=1.0)


def problem(data: FederatedDataset, rounds: int = 20):
    return problem_of(data, model=models.linear_regression(), rounds=rounds)


def own_vote(data: FederatedDataset, client: int, shared) -> np.ndarray:
    first, last = data.train.offsets[client : client + 2].tolist()
    x, y = (part[first:last].double().numpy() for part in (data.train.x, data.train.y))
    return vote(x, y, shared, True, 1.0)


@pytest.mark.parametrize("privacy", [None, CLIPPED])
def test_without_noise_the_votes_are_the_mean_of_those_of_the_clients(privacy) -> None:
    """On the released model, the mean of the last half, which the rounds of votes leave as it is."""
    data = tables()
    seen = []
    algorithm = ProximalPoint(averaged=True, intercept_rounds=4, vote_rounds=2)
    run(algorithm, problem(data), privacy=privacy, watch=lambda _, state: seen.append(state.public))
    models_of = [public["mean"] for public in seen[1:]]
    assert torch.equal(models_of[17], models_of[19])
    assert not torch.equal(models_of[16], models_of[17])
    assert not seen[18]["votes"].any()
    shared = models_of[17].double().numpy()
    expected = np.mean([own_vote(data, client, shared) for client in range(6)], 0)
    for public in seen[19:]:
        np.testing.assert_allclose(public["votes"], expected, rtol=1e-6, atol=1e-9)
        assert float(public["vote_noise"]) == 0.0


def votes_of(data: FederatedDataset, seed: int, privacy: ClientPrivacy) -> dict[str, torch.Tensor]:
    algorithm = ProximalPoint(averaged=True, vote_rounds=2)
    state = run(algorithm, replace(problem(data), seed=seed), privacy=privacy)
    return state.public


def test_votes_have_the_noise_that_is_stated() -> None:
    """Of many runs: votes less their mean, over the standard deviation of two noised means."""
    data = tables()
    found = [votes_of(data, seed, NOISY) for seed in range(10)]
    stated = float(found[0]["vote_noise"])
    # zero-out: C is the sensitivity, and a mean over six clients is in units of C
    assert stated == pytest.approx(0.8 / 6 / math.sqrt(2), rel=1e-6)
    values = torch.stack([public["votes"] for public in found]).double()
    measured = float(values.var(0).mean().sqrt())
    # the released model, and with it a vote, differs a little from run to run
    assert measured == pytest.approx(stated, rel=0.2)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_one_client_moves_the_sum_of_votes_by_no_more_than_the_sensitivity(
    monkeypatch, relation: str
) -> None:
    """By brute force: the clipped sum without a client's vote, and with that of any other records."""
    sums = []
    opened = RoundChannel.release

    def release(self, name, message, clients):
        if self._receipt.step == 19:
            clip = self.releases[name].clip
            width = sum_width(clip.bound, len(clients))
            away = message.clone()
            away[2] = 0
            sums.append(clipped_sum(message, clip, width))
            sums.append(clipped_sum(away, clip, width))
        return opened(self, name, message, clients)

    monkeypatch.setattr(RoundChannel, "release", release)
    # the model is that of all neighbours, so that the vote of one client alone differs
    monkeypatch.setattr(ProximalPoint, "_change", lambda self, problem, x, y, w, bias: 0 * w)
    base = tables()
    algorithm = ProximalPoint(averaged=True, vote_rounds=2)
    run(algorithm, problem(base), privacy=CLIPPED)
    whole, away = sums
    if relation == "zero-out":
        assert float((whole - away).norm()) == pytest.approx(0.2, rel=1e-6)
        return
    moved = []
    for seed in range(6):
        random = torch.Generator().manual_seed(seed)
        x, y = base.train.x.clone(), base.train.y.clone()
        first, last = base.train.offsets[2:4].tolist()
        if seed < 3:
            x[first:last] = 2 * torch.rand(x[first:last].shape, generator=random) - 1
        y[first:last] = 2 * torch.rand(y[first:last].shape, generator=random) - 1
        other = replace(base, train=replace(base.train, x=x, y=y), verify=False)
        run(algorithm, problem(other), privacy=CLIPPED)
        moved.append(float((sums[-2] - whole).norm()))
    assert max(moved) <= 2 * 0.2 * (1 + 1e-6)
    assert max(moved) > 0.2  # more than C: the noise of replace-one is twice as large


def test_rounds_of_votes_are_charged_like_any_other() -> None:
    privacy = ClientPrivacy(epsilon=3.0)
    algorithm = ProximalPoint(averaged=True, vote_rounds=2)
    made = {}
    for name, method in {"votes": algorithm, "none": replace(algorithm, vote_rounds=0)}.items():
        made[name] = Trainer(
            algorithm=method,
            data=tables(30),
            model=models.linear_regression(),
            schedule=FullParticipation(),
            privacy=replace(privacy, clip_norm=0.2),
            rounds=20,
            finetune=Average(),
            baselines=(),
            progress=False,
        ).fit()
    reports = [result.privacy for result in made.values()]
    assert [report.releases for report in reports] == [20, 20]
    assert reports[0].epsilon == pytest.approx(reports[1].epsilon, rel=1e-9)
    # a vote in a round that was not charged is refused
    data = tables(6)
    opened = RoundChannel.begin

    def begin(self, step, clients):
        if step < 18:
            opened(self, step, clients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundChannel, "begin", begin)
        with pytest.raises(PrivacyError, match="already"):
            run(algorithm, problem(data), privacy=NOISY)


def test_a_client_learns_of_others_by_noised_votes_alone(monkeypatch) -> None:
    """With the releases of one run its models are those of that run, whatever the others have."""
    one = tables()
    x, y = one.train.x.clone(), one.train.y.clone()
    last = int(one.train.offsets[1])
    y[last:] = -y[last:]  # of all but the first client
    other = replace(one, train=replace(one.train, x=x, y=y), verify=False)
    noised = []
    opened = RoundChannel.release

    def note(self, name, message, clients):
        noised.append(opened(self, name, message, clients))
        return noised[-1]

    def settings(data):
        return Trainer(
            algorithm=ProximalPoint(averaged=True, vote_rounds=2),
            data=data,
            model=models.linear_regression(),
            schedule=FullParticipation(),
            privacy=NOISY,
            rounds=20,
            finetune=Average(),
            baselines=(),
            progress=False,
        )

    monkeypatch.setattr(RoundChannel, "release", note)
    first = settings(one).fit()
    replayed = iter(list(noised))

    def again(self, name, message, clients):
        opened(self, name, message, clients)
        return next(replayed)

    monkeypatch.setattr(RoundChannel, "release", again)
    second = settings(other).fit()
    torch.testing.assert_close(second.shared, first.shared, rtol=0, atol=0)
    torch.testing.assert_close(second.personal[0], first.personal[0], rtol=0, atol=0)
    assert not torch.equal(second.personal[1], first.personal[1])


def test_votes_go_with_the_result_to_new_clients(tmp_path) -> None:
    data = tables(30)
    result = Trainer(
        data=data, privacy=ClientPrivacy(epsilon=8.0), folder=tmp_path / "run", progress=False
    ).fit()
    votes = result.finetuned.settings.votes
    assert len(votes) == CANDIDATES
    assert any(votes)
    new = tables(2, seed=5)
    adapted = result.adapt(new)
    assert adapted.finetuned.settings.votes == votes
    loaded = Result.load(tmp_path / "run").adapt(new)
    np.testing.assert_allclose(loaded.personal, adapted.personal, rtol=1e-6)
    plain = result.adapt(new, finetune=replace(result.finetuned.settings, votes=()))
    assert not torch.allclose(plain.personal, adapted.personal, rtol=1e-6)


def test_releases_of_a_run_fill_what_is_not_set() -> None:
    of_run = Average(noise=0.4, votes=(1.0, 2.0), units=(0.0, 1.0), average_single=False, choice=2)
    assert Average().with_releases_of(of_run) == of_run
    own = Average(noise=0.0, votes=(3.0,), units=(0.5, 0.5), average_single=True, choice=0)
    assert own.with_releases_of(of_run) == own
    assert own.with_releases_of(None) == own
    assert Finetune(kind="kl").with_releases_of(of_run) == Finetune(kind="kl")


def test_automatic_settings_vote_where_clients_average() -> None:
    data = tables(30)
    privacy = ClientPrivacy(epsilon=2.0)
    assert automatic(data, privacy).algorithm.vote_rounds == 2
    for finetune, rounds in ((None, 0), (Average(), 2), ("auto", 2)):
        trainer = Trainer(data=data, privacy=privacy, finetune=finetune, progress=False)
        assert trainer.algorithm.vote_rounds == rounds
    plan = ProximalPoint(vote_rounds=2).plan
    bound = FullParticipation().bind(6)
    for rounds, size in ((9, 3), (10, 3 + CANDIDATES)):
        assert plan(problem(tables(), rounds), bound)[0].dimension == size
    # the noise on the model, in words, is that of its own coordinates
    channel = open_channel(
        NOISY, plan(problem(tables()), bound), bound, seed=0, steps=20, fingerprint="test"
    )
    assert signal_to_noise(channel).ratio == pytest.approx(0.8 / 6 * math.sqrt(3), rel=1e-6)
    without = problem_of(tables(), model=models.linear_regression(bias=False), rounds=20)
    assert plan(without, bound)[0].dimension == 2 + 1 + len(RIDGES)
    with pytest.raises(ConfigError, match=r"votes has 3 numbers, .* average 51 candidates"):
        Average(votes=(1.0, 2.0, 3.0)).check(problem(tables()))
    with pytest.raises(ConfigError, match=r"choice is 51, .* average 51 candidates"):
        Average(choice=51).check(problem(tables()))
    classes = ragged_classification(3)
    for asked, rounds in ((privacy, 2), (RecordPrivacy(epsilon=2.0), 0)):
        assert getattr(automatic(classes, asked).algorithm, "vote_rounds", 0) == rounds


def test_a_vote_of_what_is_no_number_is_none() -> None:
    x, y, shared = rows(3, 4)
    assert not vote(x, y, np.full(5, np.nan), True, 1.0).any()
    assert not vote(x, y, np.full(5, 1e200), True, np.inf).any()
    assert np.linalg.norm(vote(x[:2], y[:2], shared, True, 1.0)) == pytest.approx(1.0)
    assert proximal_point._FAR > 1e3  # above clip norms in use
