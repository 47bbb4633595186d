"""STL against scikit-learn, MTL against optimality conditions and another solver."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from sklearn.linear_model import Ridge, RidgeCV

from benchmarks.baselines.mp_mtl import (
    _folds,
    bounded_tasks,
    choose_multi_task,
    multi_task,
    single_task,
)
from fedmtl.algorithms.linear.data import LinearData

COUNTS = (9, 4, 14, 6, 11)


def tasks(loss="squared", seed=0, p=4, noise=0.5, counts=COUNTS) -> LinearData:
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(p, 2))
    xs, ys = [], []
    for n in counts:
        x = rng.normal(size=(n, p))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        y = x @ (shared @ rng.normal(size=2)) + noise * rng.normal(size=n)
        xs.append(torch.from_numpy(x))
        ys.append(torch.from_numpy(y if loss == "squared" else np.where(y > 0, 1.0, -1.0)))
    return LinearData(tuple(xs), tuple(ys), False, "tasks")


def loss_of(loss, x, y, w):
    m = x @ w
    return float(np.mean((m - y) ** 2 / 2 if loss == "squared" else np.logaddexp(0, -y * m)))


def objective(data, loss, lam, penalty, models):
    w = models.T
    value = (
        np.linalg.svd(w, compute_uv=False).sum()
        if penalty == "nuclear"
        else np.linalg.norm(w, axis=1).sum()
    )
    losses = [
        loss_of(loss, x.numpy(), y.numpy(), m)
        for x, y, m in zip(data.x, data.y, models, strict=True)
    ]
    return sum(losses) + lam * value


def test_ridge_and_its_choice_are_those_of_scikit_learn():
    data, candidates = tasks(counts=(9, 14, 30, 11)), (1e-3, 1e-2, 0.1, 1.0)
    found = single_task(data, reg=candidates)
    fixed = single_task(data, reg=0.03)
    assert len(set(found.reg.tolist())) > 1
    for i, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
        own = RidgeCV(alphas=[len(y) * c for c in candidates], fit_intercept=False).fit(x, y)
        assert float(found.reg[i]) == pytest.approx(own.alpha_ / len(y))
        np.testing.assert_allclose(found.models[i], own.coef_, rtol=1e-8)
        ridge = Ridge(alpha=0.03 * len(y), fit_intercept=False).fit(x, y)
        np.testing.assert_allclose(fixed.models[i], ridge.coef_, rtol=1e-8)


def test_folds_are_a_partition_and_logistic_tasks_choose_by_them():
    data, candidates = tasks("logistic", counts=(9, 1, 14, 6, 11)), (1e-3, 0.03, 1.0)
    pairs = _folds(data, 3, 5)
    found = single_task(data, loss="logistic", reg=candidates, folds=3, seed=5)
    assert all((len(train.y[1]), len(held.y[1])) == (1, 0) for train, held in pairs)
    for i in (0, 2, 3, 4):
        held_out = [row.tolist() for _, held in pairs for row in held.x[i]]
        assert sorted(held_out) == sorted(data.x[i].tolist())
        scores = []
        for reg in candidates:
            score = 0.0
            for train, held in pairs:
                assert len(train.y[i]) + len(held.y[i]) == len(data.y[i])
                x, y = train.x[i].numpy(), train.y[i].numpy()

                def value(w, x=x, y=y, reg=reg):
                    return loss_of("logistic", x, y, w) + reg / 2 * w @ w

                w = optimize.minimize(value, np.zeros(4), method="BFGS", options={"gtol": 1e-8}).x
                score += loss_of("logistic", held.x[i].numpy(), held.y[i].numpy(), w) * len(
                    held.y[i]
                )
            scores.append(score)
        assert float(found.reg[i]) == pytest.approx(candidates[int(np.argmin(scores))])
        x, y, own = data.x[i].numpy(), data.y[i].numpy(), float(found.reg[i])
        left = (
            -y / (1 + np.exp(y * (x @ found.models[i].numpy()))) @ x / len(y)
            + own * found.models[i].numpy()
        )
        assert np.linalg.norm(left) < 1e-8


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_mtl_meets_the_optimality_conditions(loss):
    """-G is lam times a subgradient of the norm at W: ||G|| <= lam in the dual norm, and <-G, W> = lam g(W)."""
    data, levels = tasks(loss), [0.02, 0.1, 0.3]
    for penalty in ("nuclear", "rows"):
        found = multi_task(
            data, levels, penalty=penalty, loss=loss, tolerance=1e-10, iterations=100_000
        )
        assert found.residual <= 1e-10
        for r, lam in enumerate(levels):
            w = found.models[r].T.numpy()
            g = np.stack(
                [x.T.numpy() @ (slope / len(slope)) for x, slope in slopes(data, loss, w)], axis=1
            )
            dual = np.linalg.norm(g, 2) if penalty == "nuclear" else np.linalg.norm(g, axis=1).max()
            value = objective(data, loss, lam, penalty, w.T)
            size = (value - objective(data, loss, 0, penalty, w.T)) / lam
            assert dual <= lam * (1 + 1e-7)
            assert -(g * w).sum() == pytest.approx(lam * size, rel=1e-6, abs=1e-9)
            assert float(found.objective[r]) == pytest.approx(value, rel=1e-10)
        rank = np.linalg.matrix_rank(found.models[2].numpy(), tol=1e-6)
        assert penalty == "rows" or rank < 4


def slopes(data, loss, w):
    for i, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
        m = x.numpy() @ w[:, i]
        yield x, m - y.numpy() if loss == "squared" else -y.numpy() / (1 + np.exp(y.numpy() * m))


def test_mtl_is_chosen_by_cross_validation():
    data, levels = tasks(counts=(8,) * 12, noise=1.0), (0.001, 0.1, 0.3, 10.0)
    scores = np.zeros(4)
    for train, held in _folds(data, 4, 2):
        models = multi_task(train, levels, tolerance=1e-7, iterations=20_000).models.numpy()
        for r in range(4):
            for x, y, model in zip(held.x, held.y, models[r], strict=True):
                scores[r] += loss_of("squared", x.numpy(), y.numpy(), model) * len(y)
    assert 0 < scores.argmin() < 3
    assert choose_multi_task(data, levels, folds=4, seed=2) == levels[scores.argmin()]


def test_records_are_forced_into_the_domain():
    x = torch.tensor(
        [[3.0, 4.0, 1.0], [0.0, 0.1, 0.2], [math.nan, 0.0, 1.0], [0.0, 1.0, 0.0]],
        dtype=torch.float64,
    )
    y = torch.tensor([9.0, -9.0, 1.0, math.inf], dtype=torch.float64)
    found = bounded_tasks(LinearData((x,), (y,), True), feature_norm=0.5, target=2.0)
    norms = found.x[0].norm(dim=1)
    assert (norms <= 0.5).all()
    torch.testing.assert_close(found.x[0][0], x[0] * 0.5 / x[0].norm(), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.x[0][1], x[1])
    assert (found.x[0][2:] == 0).all()
    assert found.y[0].tolist() == [2.0, -2.0, 0.0, 0.0]
