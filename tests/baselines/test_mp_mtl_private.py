"""DP-AGGR and DP-MTRL: sensitivities against real neighbours, noise against its law, and what they minimize."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.linear_model import Ridge

from benchmarks.baselines.mp_mtl import bounded_tasks
from benchmarks.baselines.mp_mtl_private import DPMTRL, DPAggr, TaskBudget, ball_ridge, moments_of
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.privacy import SeededSource
from tests.baselines.test_mp_mtl import COUNTS, tasks

ALPHA = 1e-6
FREE = TaskBudget(epsilon=math.inf)


def sources(count):
    return [SeededSource(7, replicate) for replicate in range(count)]


def neighbours(data, rng, unit, target):
    """Data with a record, or all records, of a random task replaced by hostile ones."""
    i = int(rng.integers(len(data.x)))
    x, y = data.x[i].clone(), data.y[i].clone()
    row = torch.from_numpy(rng.normal(size=x.shape[1])) * 10
    if rng.random() < 0.5:
        row = x[0] * 10
    place = slice(0, 1) if unit == "record_group" else slice(None)
    x[place], y[place] = row, target * rng.choice([-1.0, 1.0])
    return i, LinearData(
        (*data.x[:i], x, *data.x[i + 1 :]), (*data.y[:i], y, *data.y[i + 1 :]), False
    )


@pytest.mark.parametrize("unit", ["record_group", "task"])
@pytest.mark.parametrize(
    "settings",
    [
        DPAggr(reg=0.02),
        DPAggr(reg=0.5),
        DPAggr(reg=0.1, radius=0.3),
        DPAggr(reg=2.0, feature_norm=0.7, target=3.0),
    ],
    ids=repr,
)
def test_no_neighbour_moves_the_average_by_more_than_its_sensitivity(settings, unit):
    data = tasks(counts=(1, 3, 9, 4))
    budget, rng = TaskBudget(epsilon=1.0, unit=unit), np.random.default_rng(1)
    bound = settings.sensitivity(data.counts, budget)
    target = 5 * settings.target
    base, moved = settings.local(data).mean(0), []
    for _ in range(60):
        _, other = neighbours(data, rng, unit, target)
        moved.append(float((settings.local(other).mean(0) - base).norm()))
    assert max(moved) <= bound
    assert max(moved) >= 0.1 * bound  # it says something


def test_the_sensitivity_of_the_average_is_reached():
    """reg large, one record a task: w = x y / (reg + ||x||^2), moved by 2 / (reg + 1); the bound is 2 (1 + B) / reg."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    one, two = (
        LinearData((x, x), (torch.tensor([s]).double(), torch.ones(1).double()), False)
        for s in (1.0, -1.0)
    )
    settings = DPAggr(reg=100.0)
    moved = float((settings.local(one).mean(0) - settings.local(two).mean(0)).norm())
    bound = settings.sensitivity(one.counts, TaskBudget(epsilon=1.0))
    assert moved <= bound <= 1.15 * moved
    by_hand = 2 * (1 + 1 / math.sqrt(100)) / 100 / 2
    assert bound == pytest.approx(by_hand, rel=1e-12)
    ragged = torch.tensor([4, 9])
    assert settings.sensitivity(ragged, TaskBudget(epsilon=1.0)) == pytest.approx(
        by_hand / 4, rel=1e-12
    )
    assert settings.sensitivity(ragged, TaskBudget(epsilon=1.0, unit="task")) == pytest.approx(
        by_hand, rel=1e-12
    )


def test_local_models_of_the_average_are_those_of_scikit_learn():
    data = tasks()
    found = DPAggr(reg=0.05, target=100.0).local(data)
    for i, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
        model = Ridge(alpha=0.05 * len(y), fit_intercept=False).fit(x, y)
        np.testing.assert_allclose(found[i], model.coef_, rtol=1e-8)
    released = DPAggr(reg=0.05, target=100.0).fit(data, FREE, sources(3))
    torch.testing.assert_close(released, found.mean(0).expand(3, 5, 4), rtol=1e-12, atol=1e-14)
    small = DPAggr(reg=0.05, radius=0.2).local(data)
    assert float(small.norm(dim=1).max()) <= 0.2


@pytest.mark.parametrize("unit", ["record_group", "task"])
def test_noise_of_the_average_follows_its_law(unit):
    data, epsilon = tasks(), 3.0
    settings, mean = DPAggr(reg=0.5), DPAggr(reg=0.5).local(data).mean(0)
    budget = TaskBudget(epsilon=epsilon, delta=1e-12, unit=unit)  # pure epsilon; delta hardly helps
    noise = settings.fit(data, budget, sources(300))[:, 0] - mean
    share = epsilon / max(COUNTS) if unit == "record_group" else epsilon
    scale = settings.sensitivity(data.counts, budget) / share
    assert scipy.stats.kstest(noise.norm(dim=1) / scale, scipy.stats.gamma(4).cdf).pvalue > ALPHA
    assert abs(float((noise / noise.norm(dim=1, keepdim=True)).mean(0).norm())) < 0.25


def test_record_level_budgets_compose_to_that_of_the_task():
    epsilon, delta = TaskBudget(epsilon=2.0, delta=1e-5).record_level(30)
    assert 30 * epsilon == pytest.approx(2.0)
    assert 30 * math.exp(30 * epsilon) * delta == pytest.approx(1e-5)


def test_least_squares_in_a_ball():
    rng = np.random.default_rng(0)
    values, rotated = (
        torch.from_numpy(rng.uniform(0, 1, (6, 5))),
        torch.from_numpy(rng.normal(size=(3, 6, 5))),
    )
    values[0, :2] = 0
    sigma = torch.from_numpy(rng.uniform(0.01, 0.5, (3, 6)))
    radius = torch.from_numpy(rng.uniform(0.1, 6, (3, 6)))
    radius[0, 0] = math.inf
    w = ball_ridge(values, rotated, sigma, radius)
    inside = 0
    for place in np.ndindex(3, 6):
        own, b = w[place], rotated[place]
        gradient = (values[place[1]] + sigma[place]) * own - b
        assert float(own.norm()) <= float(radius[place]) * (1 + 1e-15)
        if float(own.norm()) < float(radius[place]) * (1 - 1e-8):
            assert float(gradient.norm()) < 1e-12
            inside += 1
        else:  # the gradient points into the ball
            nu = -float(gradient @ own) / float(own @ own)
            assert nu >= 0
            assert float((gradient + nu * own).norm()) < 1e-9
    assert 2 <= inside <= 16


def dense_precision(models, jitter):
    """P from (n, p) with matrix square roots."""
    n = len(models)
    values, vectors = np.linalg.eigh(models @ models.T)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    return np.linalg.inv(n * root / np.trace(root) + jitter * np.eye(n))


def test_without_noise_relationship_learning_ends_at_a_stationary_point():
    data = tasks(counts=(9, 5, 14, 6, 11))
    settings = DPMTRL(lam1=0.1, lam2=0.02, radius=50.0, iterations=400, target=50.0)
    models = settings.fit(data, FREE, sources(1))[0].numpy()
    p = dense_precision(models, settings.jitter)
    for i, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
        x, y = x.numpy(), y.numpy()
        slope = x.T @ (x @ models[i] - y) / len(y) + 0.1 * models[i] + 0.02 * (p @ models)[i]
        assert np.abs(slope).max() < 1e-7
    one = DPMTRL(lam1=0.1, lam2=0.0, radius=50.0, iterations=1, target=50.0).fit(
        data, FREE, sources(1)
    )[0]
    np.testing.assert_allclose(one, DPAggr(reg=0.1, target=50.0).local(data), rtol=1e-9)


@pytest.mark.parametrize("unit", ["record_group", "task"])
@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_no_neighbour_moves_a_release_by_more_than_its_sensitivity(unit, radius):
    data, rng = tasks(counts=(1, 3, 9, 4)), np.random.default_rng(2)
    settings = DPMTRL(lam1=0.3, lam2=0.2, radius=radius)
    budget = TaskBudget(epsilon=1.0, unit=unit)
    released = torch.from_numpy(rng.normal(size=(2, 4, 4)))

    def solve(given):
        gram, moment = moments_of(bounded_tasks(given, feature_norm=1.0, target=1.0))
        values, vectors = torch.linalg.eigh(gram)
        return settings._solve(moment, values, vectors, released, given.counts, budget)

    base, bound = solve(data)
    ratios = []
    for _ in range(100):
        i, other = neighbours(data, rng, unit, 5.0)
        moved = (solve(other)[0] - base).norm(dim=2)
        assert (moved[:, torch.arange(4) != i] == 0).all()
        ratios.append(float((moved[:, i] / bound[:, i]).max()))
    assert 0.1 < max(ratios) <= 1
    diagonal, _ = settings.precision(released)
    share = 1 / data.counts if unit == "record_group" else 1.0
    expected = torch.minimum(
        2 * (radius + 1) * share / (0.3 + 0.2 * diagonal), torch.tensor(2 * radius).double()
    )
    torch.testing.assert_close(bound, expected)


def test_noise_of_the_models_follows_its_law_and_is_fresh():
    data, epsilon = tasks(), 3.0
    settings = DPMTRL(lam1=0.5, lam2=0.1, radius=2.0, iterations=1)
    budget = TaskBudget(epsilon=epsilon, delta=1e-12)
    noise = settings.fit(data, budget, sources(200)) - settings.fit(data, FREE, sources(1))
    sigma = torch.full((5,), 0.5 + 0.1 / 1.1, dtype=torch.float64)
    scale = settings.sensitivity(sigma, data.counts, budget) * max(COUNTS) / epsilon
    scaled = noise / scale[:, None]
    assert scipy.stats.kstest(scaled.norm(dim=2).ravel(), scipy.stats.gamma(4).cdf).pvalue > ALPHA
    rows = scaled.permute(1, 2, 0).reshape(20, 200)
    assert np.abs(np.corrcoef(rows) - np.eye(20)).max() < 0.4
    # with lam2 = 0 the solution of a round is the same: only the noise differs between rounds, of T uses
    alone = replace(settings, lam2=0.0)
    free = alone.fit(data, FREE, sources(1))
    one = alone.fit(data, budget, sources(200)) - free
    two = replace(alone, iterations=2).fit(data, budget, sources(200)) - free
    assert float(two.std() / one.std()) == pytest.approx(2, rel=0.1)  # pure epsilons add up
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.1


def test_an_own_model_has_no_noise_of_its_own():
    data, budget = tasks(), TaskBudget(epsilon=0.1)
    settings = DPMTRL(lam1=0.5, lam2=0.0, radius=20.0, output="own", target=20.0)
    found = settings.fit(data, budget, sources(2))
    expected = DPAggr(reg=0.5, target=20.0).local(data)
    torch.testing.assert_close(found, expected.expand(2, 5, 4), rtol=1e-9, atol=1e-12)
    related = replace(settings, lam2=0.1).fit(data, budget, sources(2))
    assert not torch.allclose(related[0], related[1])
