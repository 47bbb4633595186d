"""Clients with a single record, which cannot leave one out: they cast no vote, and follow those of others or none."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from fedmtl import Average, ClientPrivacy, FullParticipation, ProximalPoint, Trainer, models
from fedmtl.contrib.average import Candidates, LocalAverage, vote_size
from fedmtl.contrib.average.candidates import choice_by_votes
from fedmtl.data import Domain, FederatedDataset
from tests.algorithms.harness import problem_of, run
from tests.algorithms.test_average import RIDGES, rows

CANDIDATES = 51
NOISY = ClientPrivacy(clip_norm=0.2, noise_multiplier=0.8, delta=1e-5)
CLIPPED = ClientPrivacy(clip_norm=0.2, epsilon=math.inf)


def table(records: list[int], level: float = 0.0, seed: int = 0) -> FederatedDataset:
    """Clients with so many training records and two test records each, of one common model whose targets are noisy,
    or of levels of their own that hardly change."""
    random = np.random.default_rng(seed)
    train, test = {}, {}
    for client, count in enumerate(records):
        x = random.uniform(-1, 1, (count + 2, 2))
        own = level * random.normal()
        noise = 0.02 if level else 0.3
        y = np.clip(own + 0.3 * x[:, 0] * (not level) + noise * random.normal(size=len(x)), -1, 1)
        train[f"c{client}"] = x[:count], y[:count]
        test[f"c{client}"] = x[count:], y[count:]
    domain = Domain(2.0, 2**0.5, 1.0)
    data = FederatedDataset.from_tensors(train, test=test, classes=None, domain=domain)
    return replace(data, limit=1.0)


def averages(data: FederatedDataset, shared: torch.Tensor, settings: Average) -> torch.Tensor:
    problem = problem_of(data, model=models.linear_regression(), rounds=20)
    return settings.personalize(problem, shared, torch.arange(len(data)))


def test_without_others_one_record_is_the_model_to_the_digit() -> None:
    """Its model is its target, whatever the features, without any share of another; two records average as ever."""
    data = table([1, 2, 1])
    shared = torch.tensor([0.3, -0.2, 0.1])
    votes = (0.7, *[-0.1] * (CANDIDATES - 1))
    usual = Average(noise=0.5, votes=votes)
    found = averages(data, shared, replace(usual, average_single=False))
    as_ever = averages(data, shared, usual)
    alone = averages(data, shared, Average(noise=math.inf))
    assert torch.equal(found[1], as_ever[1])
    for client, y in ((0, data.train.y[0]), (2, data.train.y[3])):
        assert torch.equal(found[client], alone[client])
        torch.testing.assert_close(found[client, :3], torch.tensor([0.0, 0.0, float(y)]))
        assert not torch.allclose(as_ever[client], alone[client])


@pytest.mark.parametrize("noise", [0.001, 1 / 30, 0.4, 3.0])
def test_noise_alone_chooses_another_model_in_one_of_740_runs_at_most(noise: float) -> None:
    """By a simulation of many votes of nobody, and at a level that is too low by a factor of ten."""
    votes = noise * np.random.default_rng(5).normal(size=(40000, CANDIDATES))
    chosen = sum(choice_by_votes(row, noise) > 0 for row in votes)
    # a binomial count of 54 at most, and three standard deviations
    assert 10 < chosen <= 40000 / 740 + 3 * math.sqrt(40000 / 740)
    too_low = sum(choice_by_votes(row, noise / 1.5) > 0 for row in votes)
    assert too_low > 40000 / 740 + 3 * math.sqrt(40000 / 740)


def test_the_largest_vote_chooses_if_it_is_above_that_for_local_by_more_than_noise() -> None:
    votes = np.zeros(CANDIDATES)
    assert choice_by_votes(votes, 0.0) == 0
    votes[7] = 0.1
    level = norm.ppf(1 - 1 / 740 / (CANDIDATES - 1)) * math.sqrt(2)
    for noise, chosen in ((0.0, 7), (0.0999 / level, 7), (0.1001 / level, 0)):
        assert choice_by_votes(votes, noise) == chosen
        public = {"votes": torch.from_numpy(votes), "vote_noise": torch.tensor([noise])}
        assert Average(noise=0.5).informed(public).choice == chosen
    votes[0] = 0.2
    assert choice_by_votes(votes, 0.0) == 0
    assert Average(noise=0.5).informed({"global": torch.zeros(2)}).choice is None


def test_a_choice_of_the_votes_is_one_model_and_one_of_the_user_stands() -> None:
    data = table([1, 2])
    shared = torch.tensor([0.3, -0.2, 0.1])
    x, y = data.train.x[:1].double().numpy(), data.train.y[:1].double().numpy()
    base = shared.double().numpy()
    candidates = Candidates.of(x, y, base, True, 1.0)
    usual = Average(noise=0.5)
    as_ever = averages(data, shared, usual)
    for choice in (1, 23, CANDIDATES - 1):
        found = averages(data, shared, replace(usual, choice=choice))
        np.testing.assert_allclose(
            found[0, :3], candidates.models[len(RIDGES) + choice - 1], atol=1e-6
        )
        assert torch.equal(found[1], as_ever[1])
        kept = averages(data, shared, replace(usual, choice=choice, average_single=True))
        assert torch.equal(kept, as_ever)
        local = averages(data, shared, replace(usual, choice=choice, average_single=False))
        assert torch.equal(local[0], averages(data, shared, replace(usual, choice=0))[0])
    last = averages(data, shared, replace(usual, choice=CANDIDATES - 1))
    torch.testing.assert_close(last[0, :3], shared)  # the shared model as it is


def seen_by(data: FederatedDataset, seed: int, privacy: ClientPrivacy) -> dict[str, torch.Tensor]:
    problem = problem_of(data, model=models.linear_regression(), rounds=20)
    algorithm = ProximalPoint(averaged=True, vote_rounds=2)
    return run(algorithm, replace(problem, seed=seed), privacy=privacy).public


def deviations_of(data: FederatedDataset, runs: int) -> np.ndarray:
    """Votes on ``local`` over the standard deviation that is stated for their noise, of several runs."""
    found = [seen_by(data, seed, NOISY) for seed in range(runs)]
    return np.array([float(one["votes"][0] / one["vote_noise"]) for one in found])


def vote_all_the_same(self: Candidates, records: int) -> np.ndarray:
    """The vote that counts the target of a single record as the error of its own model."""
    errors = np.append(self.errors[:1], self.errors[len(RIDGES) :])
    gains = errors.mean() - errors
    return gains / np.linalg.norm(gains)


def test_votes_of_clients_with_a_single_record_are_noise_alone(monkeypatch) -> None:
    """The release has a normal law around 0, as if nobody took part; a client that votes all the same is caught."""
    data = table([1] * 8)
    data = replace(data, train=replace(data.train, y=0.5 + 0 * data.train.y), verify=False)
    assert not seen_by(data, 0, CLIPPED)["votes"].any()
    assert kstest(deviations_of(data, 12), "norm").pvalue > 1e-3
    monkeypatch.setattr(Candidates, "vote", vote_all_the_same)
    assert seen_by(data, 0, CLIPPED)["votes"].norm() > 0.1
    assert kstest(deviations_of(data, 12), "norm").pvalue < 1e-3


def test_a_single_record_moves_no_vote_and_a_further_client_the_sum_by_one() -> None:
    """By brute force, without noise: the sum over eight clients of votes of length 1."""
    alone = seen_by(table([1] * 7), 0, CLIPPED)["votes"]
    with_another = seen_by(table([*[1] * 7, 3]), 0, CLIPPED)["votes"]
    assert not alone.any()
    assert float(8 * with_another.norm()) == pytest.approx(1.0, rel=1e-5)


def fitted(data: FederatedDataset, privacy: ClientPrivacy | None):
    return Trainer(data=data, privacy=privacy, baselines=(), progress=False).fit()


@pytest.mark.parametrize("privacy", [None, ClientPrivacy(epsilon=3.0), ClientPrivacy(epsilon=100)])
def test_automatic_settings_are_local_to_the_digit_where_nobody_can_tell(privacy) -> None:
    data = table([1] * 30, level=0.5)
    own = Trainer(
        algorithm=LocalAverage(), data=data, model=models.linear_regression(), privacy=None,
        schedule=FullParticipation(), rounds=1, baselines=(), finetune=None, progress=False,
    ).fit()  # fmt: skip
    torch.testing.assert_close(fitted(data, privacy).personal, own.personal, rtol=0, atol=0)


def test_votes_of_others_let_a_single_record_share_or_keep_to_itself() -> None:
    """A common model and loud targets: the others vote for sharing. Levels that repeat: they vote against it."""
    counts = [1] * 20 + [2] * 60
    for level in (0.0, 0.5):
        data = table(counts, level=level)
        result = fitted(data, ClientPrivacy(epsilon=10.0))
        own = np.array([float(data.train.y[client]) for client in range(20)])
        distance = np.abs(result.personal[:20, -1].numpy() - own).max()
        if level:
            assert distance < 1e-6  # a model is float32
        else:
            assert distance > 0.1
            errors = list(result.by_client["mse"].values())[:20]
            tests = data.test.y[:40].reshape(20, 2).numpy()
            assert np.mean(errors) < 0.8 * np.mean((tests - own[:, None]) ** 2)


def test_without_an_intercept_there_are_eleven_candidates() -> None:
    assert vote_size(False) == 1 + len(RIDGES)
    x, y, shared = rows(1, 4)
    assert not Candidates.of(x, y, shared[:4], False, 1.0).vote(1).any()
