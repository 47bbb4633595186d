"""Votes of clients on the models of classes that they average."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from fedmtl import Average, ClientPrivacy, ProximalPoint, models
from fedmtl.algorithms import Problem
from fedmtl.contrib import proximal_point
from fedmtl.contrib.average import ClassCandidates
from fedmtl.contrib.average.classes import CLASS_VOTES, PULLS, fold_of
from fedmtl.privacy import FullParticipation, RoundChannel, clipped_sum
from fedmtl.privacy.clip import sum_width
from tests.algorithms.harness import problem_of, run
from tests.helpers import ragged_classification

CLIPPED = ClientPrivacy(clip_norm=0.2, epsilon=math.inf)


def problem(clients: int = 4) -> Problem:
    data = ragged_classification(clients)
    return problem_of(data, model=models.softmax_regression(), loss="auto", rounds=20)


def scores_of(x, y, fold, base, classes: int) -> list[float]:
    """Hits + .1 log likelihood of the records of each fold, by SciPy's fits without them."""
    rows = np.append(x, np.ones((len(x), 1)), 1)
    shape = (classes, rows.shape[1])

    def fit(kept, start, pull: float):
        def objective(w) -> float:
            logs = log_softmax(rows[kept] @ w.reshape(shape).T, 1)
            distance = ((w - start.ravel()) ** 2).sum()
            return -logs[np.arange(kept.sum()), y[kept]].mean() + pull / 2 * distance

        return minimize(objective, start.ravel(), options={"gtol": 1e-9}).x.reshape(shape)

    found = []
    for start, pull in (
        *((np.zeros(shape), pull) for pull in PULLS),
        *((base, pull) for pull in PULLS),
        (base, math.inf),
    ):
        score = 0.0
        for held in range(5):
            out = fold == held
            if not out.any():
                continue
            w = start
            if pull < math.inf and (~out).any():
                w = fit(~out, start, pull)
            logs = log_softmax(rows[out] @ w.T, 1)
            score += (logs.argmax(1) == y[out]).sum() + 0.1 * logs[
                np.arange(out.sum()), y[out]
            ].sum()
        found.append(score)
    return found


def vote_by_hand(scores, n: int) -> np.ndarray:
    """The distance of each mean error below their mean; that of ``local`` has the mean weight of its models."""
    own = len(PULLS)
    local = math.log(sum(math.exp(score) for score in scores[:own]) / own)
    errors = [1 - score / n for score in (local, *scores[own:])]
    gains = [sum(errors) / len(errors) - error for error in errors]
    length = math.sqrt(sum(gain**2 for gain in gains))
    return np.array([gain / length for gain in gains])


def test_a_vote_is_how_far_each_mean_score_lies_above_the_mean() -> None:
    """With steps enough for the pulled minima; the two weakest pulls have none within the steps of a fit."""
    random = np.random.default_rng(3)
    x = random.normal(size=(12, 2))
    y = random.integers(0, 3, 12)
    base = random.normal(size=(3, 3))
    fold = np.arange(12) % 5
    shared = np.concatenate([base[:, :2].ravel(), base[:, 2]])
    candidates = ClassCandidates.of(x, y, shared, True, fold)
    scores = scores_of(x, y, fold, base, 3)
    np.testing.assert_allclose(candidates.scores, scores, atol=0.02)
    np.testing.assert_allclose(
        candidates.vote(12), vote_by_hand(candidates.scores, 12), rtol=1e-9, atol=1e-12
    )
    assert not ClassCandidates.of(x[:1], y[:1], shared, True, fold[:1]).vote(1).any()
    assert not ClassCandidates.of(x, y, shared + np.nan, True, fold).vote(12).any()


def test_votes_weigh_as_evidence() -> None:
    random = np.random.default_rng(4)
    x, y, shared = random.normal(size=(9, 2)), random.integers(0, 2, 9), random.normal(size=3)
    candidates = ClassCandidates.of(x, y, shared, True, np.arange(9) % 5)
    model, shares = candidates.average(0.3)
    same, _ = candidates.average(0.3, np.zeros(CLASS_VOTES))
    np.testing.assert_array_equal(same, model)
    votes = np.append(0.0, np.full(CLASS_VOTES - 1, -math.log(2)))
    _, halved = candidates.average(0.3, votes)  # all but ``local`` are half as likely
    assert halved[0] / (1 - halved[0]) == pytest.approx(2 * shares[0] / (1 - shares[0]))
    alone, _ = candidates.average(0.3, np.append(np.zeros(CLASS_VOTES - 1), 500.0))
    np.testing.assert_allclose(alone, shared)


def test_the_last_rounds_release_the_mean_vote_and_clients_average_by_it() -> None:
    whole = problem()
    algorithm = ProximalPoint(averaged=True, vote_rounds=2)
    width = whole.dimension + CLASS_VOTES
    assert algorithm.plan(whole, FullParticipation().bind(4))[0].dimension == width
    public = run(algorithm, whole, privacy=None).public
    shared = public["mean"].double().numpy()

    def candidates(client: int) -> tuple[ClassCandidates, int]:
        first, last = whole.data.train.offsets[client : client + 2].tolist()
        x = whole.data.train.x[first:last].double().flatten(1).numpy()
        y = whole.data.train.y[first:last].numpy()
        fold = fold_of(whole, client, last - first)
        return ClassCandidates.of(x, y, shared, True, fold), last - first

    expected = np.mean([own.vote(n) for own, n in map(candidates, range(4))], 0)
    np.testing.assert_allclose(public["votes"], expected, rtol=1e-6, atol=1e-9)
    informed = Average(noise=0.0).informed(public)
    np.testing.assert_allclose(informed.votes, 15 * expected, rtol=1e-6, atol=1e-9)
    found = informed.personalize(whole, public["mean"], torch.arange(4))
    own, _ = candidates(2)
    model, _ = own.average(0.1, informed.votes)  # the prior without noise, odds of 1 to 9
    np.testing.assert_allclose(found[2, : whole.dimension], model, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("broken", [False, True])
def test_one_client_moves_the_sum_of_votes_by_the_clip_norm_at_most(
    monkeypatch, broken: bool
) -> None:
    """A sum without the clip fails the same comparison."""
    moved = []
    opened = RoundChannel.release

    def release(self, name, message, clients):
        if self._receipt.step == 19:
            clip = self.releases[name].clip
            away = message.clone()
            away[2] = 0
            if broken:
                moved.append(float((message.sum(0) - away.sum(0)).norm()))
            else:
                width = sum_width(clip.bound, len(clients))
                difference = clipped_sum(message, clip, width) - clipped_sum(away, clip, width)
                moved.append(float(difference.norm()))
        return opened(self, name, message, clients)

    monkeypatch.setattr(RoundChannel, "release", release)
    run(ProximalPoint(averaged=True, vote_rounds=2), problem(), privacy=CLIPPED)
    if broken:
        assert moved[0] == pytest.approx(proximal_point._FAR, rel=1e-6)
        return
    assert moved[0] == pytest.approx(0.2, rel=1e-6)
