"""Settings chosen from public rows and bounds: what they are, and that private records do not enter."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from fedmtl import PPDMTL, AsyncLearner, Latencies, PoissonClocks, RecordPrivacy, Trainer, models
from fedmtl.algorithms import Problem, cost_of_privacy
from fedmtl.algorithms.activations import simulated_objectives
from fedmtl.data import Domain, Examples, FederatedDataset
from fedmtl.errors import ConfigError
from tests import small
from tests.algorithms.harness import GivenCaps, block_of, problem_of

COUNTS, P = (30, 50, 40), 4


def rows(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (count, P))
    y = x @ [0.5, -0.4, 0.3, 0.1] + 0.3 * rng.standard_normal(count)
    return x.astype(np.float32), np.clip(y, -1.25, 1.25).astype(np.float32)


def dataset(seed: int = 0, *, public: bool = True, domain: bool = True) -> FederatedDataset:
    """Owners whose private records come from ``seed``; the public ones are always the same."""
    x, y = (torch.from_numpy(part) for part in rows(seed, sum(COUNTS)))
    offsets = torch.tensor([0, *np.cumsum(COUNTS)])
    own = Examples(x, y, offsets)
    known = Examples(*(torch.from_numpy(part) for part in rows(99, 60)), torch.tensor([0, 60]))
    bounds = Domain(l1=float(P), l2=2.0, target=1.3) if domain else None
    return FederatedDataset(own, own, ("a", "b", "c"), public=known if public else None, domain=bounds)


SETTINGS = {
    "model": models.linear_regression(bias=False),
    "schedule": PoissonClocks(per_client=8),
    "privacy": RecordPrivacy(clip_norm=1.0, epsilon=1.0, mechanism="laplace", delta=0.0),
    "rounds": 1000,
}


def trainer(data: FederatedDataset, algorithm: object, **settings) -> Trainer:
    return small.trainer(data=data, algorithm=algorithm, **SETTINGS | settings)


def resolved(run: Trainer):
    return run.resolved(replace(run.problem(), rounds=run.bound.steps)).algorithm


def test_private_records_do_not_enter():
    learner = AsyncLearner(row_norm="auto", target="auto")
    first, second = (resolved(trainer(dataset(seed), learner)) for seed in (1, 2))
    assert first == second
    assert (first.row_norm, first.target) == (float(P), 1.3)
    bias = resolved(trainer(dataset(), learner, model=models.linear_regression(bias=True)))
    assert (bias.row_norm, bias.target) == (float(P), 1.3)


def test_rows_of_pp_dmtl_are_within_the_stated_bound():
    run = trainer(
        dataset(), PPDMTL(loss="squared", row_norm="auto"),
        schedule=Latencies(latency=1.0, activations=2),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=5.0, mechanism="l2_laplace", delta=1e-5),
    )  # fmt: skip
    assert resolved(run).row_norm == 2.0
    run.fit()


def test_data_without_bounds_are_refused():
    with pytest.raises(ConfigError, match="row_norm is 'auto', and the data state no public bounds"):
        trainer(dataset(domain=False), PPDMTL(loss="squared")).fit()


def problem() -> Problem:
    return problem_of(dataset(), rounds=40)


def test_simulated_runs_end_where_the_budget_does():
    """A fixed noise and a budget: fewer answers than the schedule has."""
    work, clients = problem(), torch.arange(12)[None] % 3
    privacy = RecordPrivacy(clip_norm=5.0, epsilon=3.0, noise_multiplier=3.0, delta=1e-5)
    found = simulated_objectives(
        AsyncLearner(kappa=5.0), work, GivenCaps(np.full(3, 9)), block_of(clients.expand(2, -1)), privacy, seed=0
    )
    assert found.shape == (2, 2)
    assert torch.isfinite(found).all()
    caps, strict = GivenCaps(np.array([1, 9, 9])), replace(privacy, noise_multiplier=None, epsilon=1.0)
    clients = torch.tensor([[0, 1, 0, 1, 2], [2, 1, 1, 0, 2]])  # the first repetition ends before its second 0
    ended = torch.tensor([[0, 1, -1, -1, -1], [2, 1, 1, 0, 2]])
    short, expected = (
        simulated_objectives(AsyncLearner(), work, caps, block_of(each), strict, seed=0, parts=2)
        for each in (clients, ended)
    )
    assert torch.equal(short, expected)
    assert not work.prepared


def test_runs_a_forecast_and_whether_it_is_worth_it():
    """The example of :mod:`fedmtl.algorithms.async_learner.cost_of_privacy`, from runs of a trainer to a decision."""
    data, learner = dataset(domain=False), AsyncLearner(kappa=5.0)
    epsilons = (0.3, 1.0, 3.0)
    runs = trainer(data, learner, replicates=30, epsilons=epsilons).fit()
    simulated = {row["budget"]: row["objective"] for row in runs.bands}
    assert list(simulated.values()) == sorted(simulated.values(), reverse=True)
    every = (data.train.x.double().numpy(), data.train.y.double().numpy())
    offsets = [0, *np.cumsum(COUNTS)]
    parts = [every, *([part[a:b] for part in every] for a, b in pairwise(offsets))]
    best = [np.linalg.solve(x.T @ x / len(x) + 1e-5 * np.eye(P), x.T @ y / len(x)) for x, y in parts]
    f = [np.mean((every[0] @ theta - every[1]) ** 2) + 1e-5 * theta @ theta for theta in best]
    for epsilon in (0.01, 1e6):
        cost = cost_of_privacy(learner, data, simulated, [epsilon] * 3)
        assert cost.local == pytest.approx([own / f[0] - 1 for own in f[1:]], rel=1e-5)
        assert all(cost.shared < local for local in cost.local) == (epsilon == 1e6)
