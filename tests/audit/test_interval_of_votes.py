"""Canaries in the rounds in which clients vote on models: they take part, and see too little noise."""

import math
from itertools import count
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fedmtl import (
    Average,
    ClientPrivacy,
    FullParticipation,
    Interval,
    ProximalPoint,
    Trainer,
    models,
)
from fedmtl.audit.canaries import Canaries
from fedmtl.data import load_synthetic_tasks
from fedmtl.privacy import Release
from fedmtl.privacy.noise.grid import IndependentNoise

ROUNDS, VOTES, FEATURES, CANDIDATES = 20, 2, 70, 51
CANARIES = FEATURES + 1 + CANDIDATES  # one for each coordinate of a row
TASKS = load_synthetic_tasks(
    tasks=8, train_examples=8, test_examples=4, features=FEATURES, problem="regression"
)


def audited(patch: pytest.MonkeyPatch, noise: float) -> tuple[dict[str, Any], Tensor, float]:
    """The certificate of a run whose votes have a share of their noise, what each canary scored in each round, less
    the mean of its law, (rounds, canaries), and the standard deviation of that law."""
    drawn = count()
    original = IndependentNoise.at
    observe = Canaries.observe
    scores = []
    levels = []

    def at(self: IndependentNoise, step: int) -> tuple[Tensor, float | None]:
        values, width = original(self, step)
        if next(drawn) >= ROUNDS - VOTES:
            values = values * noise
        return values, width

    def observed(canaries: Canaries, release: Release, step: int, members: Tensor, rest: Tensor):
        before = canaries.scores.clone()
        observe(canaries, release, step, members, rest)
        assert (step, release.dimension) == (len(scores), CANARIES)
        assert bool((canaries.uses == step + 1).all())
        level = release.bound / (release.noise_std * release.denominator)
        sign = torch.where(canaries.coins, 1.0, -1.0)
        scores.append(canaries.scores - before - sign * level**2 / 2)
        levels.append(level)

    patch.setattr(IndependentNoise, "at", at)
    patch.setattr(Canaries, "observe", observed)
    result = Trainer(
        algorithm=ProximalPoint(averaged=True, vote_rounds=VOTES),
        data=TASKS,
        model=models.linear_regression(),
        schedule=FullParticipation(),
        privacy=ClientPrivacy(clip_norm=0.3, epsilon=8.0, delta=1e-3),
        rounds=ROUNDS,
        finetune=Average(),
        audit=Interval(canaries=CANARIES),
        progress=False,
    ).fit()
    assert result.finetuned is not None
    assert len(result.finetuned.settings.votes) == CANDIDATES
    assert len(set(levels)) == 1
    return result.privacy.interval, torch.stack(scores), levels[0]


def test_canaries_take_part_in_every_round_of_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round the scores have the law of two normal laws mu apart, 1 / mu the noise over the sensitivity."""
    found, scores, mu = audited(monkeypatch, 1.0)
    assert (len(scores), found["uses"], found["canaries"]) == (ROUNDS, ROUNDS, CANARIES)
    for rounds in (scores[:-VOTES], scores[-VOTES:]):
        assert stats.kstest(rounds.reshape(-1).numpy() / mu, "norm").pvalue > 1e-3
    assert 0 < found["measured"] < found["claimed"]
    # mu-GDP of all rounds together, which the claim covers
    total = mu * math.sqrt(ROUNDS)
    epsilon = found["claimed"]
    delta = stats.norm.cdf(total / 2 - epsilon / total)
    delta -= math.exp(epsilon) * stats.norm.cdf(-total / 2 - epsilon / total)
    assert delta == pytest.approx(1e-3, rel=0.05)


def test_half_of_the_noise_of_votes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of their rounds have half of the deviation, and those before have all of it."""
    _, scores, mu = audited(monkeypatch, 0.5)
    assert stats.kstest(scores[:-VOTES].reshape(-1).numpy() / mu, "norm").pvalue > 1e-3
    of_votes = scores[-VOTES:].reshape(-1).numpy() / mu
    assert stats.chi2.cdf((of_votes**2).sum(), len(of_votes)) < 1e-9


def test_votes_with_little_noise_are_measured_above_the_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _, _ = audited(monkeypatch, 0.02)
    assert found["measured"] > found["claimed"]
