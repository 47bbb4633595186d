"""Runs that the study simulates without a trainer."""

import math

import numpy as np
import pytest
import torch
from simulate import KAPPAS, fitness_by_kappa, simulate
from sklearn.linear_model import Ridge

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.errors import BudgetExhausted
from fedmtl.privacy import RecordPrivacy


def owners(count: int, n: int, *, p: int = 3, seed: int = 0) -> LinearData:
    rng = np.random.default_rng(seed)
    truth = rng.uniform(-0.5, 0.5, p)
    x = [torch.from_numpy(rng.uniform(-1, 1, (n, p))) for _ in range(count)]
    y = [v @ torch.from_numpy(truth) + torch.from_numpy(rng.uniform(-1, 1, n)) for v in x]
    return LinearData(tuple(x), tuple(y), False)


def test_kappa_is_chosen_by_noisy_simulation_on_public_rows() -> None:
    public = owners(1, 500, seed=1)
    learner = AsyncLearner(reg=1e-3, theta_max=2.0)
    rng = np.random.default_rng(0)
    clients = torch.from_numpy(np.stack([rng.permutation(np.repeat(np.arange(3), 10)) for _ in range(40)]))

    def choice(epsilon: float):
        privacy = RecordPrivacy(clip_norm=5.0, epsilon=epsilon, delta=0.0, mechanism="laplace")
        return fitness_by_kappa(learner, public, counts=(200, 200, 200), privacy=privacy, clients=clients)

    strict, loose = choice(0.3), choice(300.0)
    assert set(strict) == set(loose) == set(KAPPAS)
    assert min(strict, key=strict.get) < min(loose, key=loose.get), "more noise, smaller steps"
    x, y = (part.numpy() for part in public.pooled())
    theta = Ridge(alpha=1e-3 * len(y), fit_intercept=False).fit(x, y).coef_
    best = float(((x @ theta - y) ** 2).mean() + 1e-3 * theta @ theta)
    assert min(loose.values()) < 1.1 * best


def test_simulations_respect_caps() -> None:
    data, clients = owners(3, 20), torch.zeros(2, 5, dtype=torch.int64)
    privacy = RecordPrivacy(clip_norm=5.0, epsilon=1.0, delta=0.0, mechanism="laplace")
    assert simulate(AsyncLearner(), data, privacy, clients).shape == (2, 3)
    with pytest.raises(BudgetExhausted):
        simulate(AsyncLearner(), data, privacy, clients, caps=np.array([4, 9, 9]))
    caps = np.array([3, 3, 3])
    clients = torch.tensor([[0, 1, 0, 0, 0, 1], [2, 1, 0, 1, 2, 0]])  # the first repetition ends before its last 0
    ended = torch.tensor([[0, 1, 0, 0, -1, -1], [2, 1, 0, 1, 2, 0]])
    short = simulate(AsyncLearner(), data, privacy, clients, caps=caps, shorten=True)
    assert torch.equal(short, simulate(AsyncLearner(), data, privacy, ended, caps=caps))


def test_kappa_is_chosen_where_the_budget_ends_a_run() -> None:
    """A fixed noise and a budget: fewer answers than the schedule has."""
    data, clients = owners(3, 20), torch.arange(12)[None] % 3
    privacy = RecordPrivacy(clip_norm=5.0, epsilon=3.0, noise_multiplier=3.0, delta=1e-5)
    found = fitness_by_kappa(
        AsyncLearner(), data, counts=(9, 9, 9), privacy=privacy, clients=clients.expand(2, -1), caps=np.full(3, 9)
    )
    assert all(math.isfinite(value) for value in found.values())
