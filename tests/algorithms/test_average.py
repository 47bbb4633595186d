"""Averages of models against refits without each record."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from fedmtl import Average, FedAvg, FederatedDataset, LocalSGD, Trainer, models
from fedmtl.algorithms.average import PARTS, average_classes, average_numbers, prior_of_local
from fedmtl.algorithms.linear.classes import fit_classes
from fedmtl.errors import ConfigError
from fedmtl.privacy import FullParticipation
from tests.algorithms.harness import problem_of
from tests.helpers import regression

RIDGES = (0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300, np.inf)
INTERCEPTS = (0, 1, 3, 10, 30, 100, np.inf)


def rows(n: int, d: int, seed: int = 0):
    random = np.random.default_rng(seed)
    return random.uniform(-1, 1, (n, d)), random.uniform(-1, 1, n), 0.3 * random.normal(size=d + 1)


def ridge(z, r, kappa: float, lam: float):
    """The intercept and the slopes by the normal equations; infinite penalties leave them out."""
    intercept, slopes = bool(np.isfinite(kappa)), bool(np.isfinite(lam))
    design = np.concatenate([np.ones((len(z), int(intercept))), z if slopes else z[:, :0]], 1)
    penalties = np.diag([*[kappa] * intercept, *[lam] * (z.shape[1] * slopes)])
    solution = np.linalg.solve(design.T @ design + penalties, design.T @ r)
    return (solution[0] if intercept else 0.0), (solution[int(intercept) :] if slopes else np.zeros(z.shape[1]))


@pytest.mark.parametrize("n", [2, 3, 9, 30])
def test_the_average_is_that_of_refits_without_each_record(n: int) -> None:
    d, limit = 4, 0.8
    x, y, shared = rows(n, d)
    center, spread = x.mean(0), np.sqrt((n * x.var(0) + 10 * 0.4**2) / (n + 10))
    z, found, logs, parts = (x - center) / spread, [], [], []
    for base, kappas in ((np.zeros(d + 1), [0]), (shared, INTERCEPTS)):
        residual = y - x @ base[:d] - base[d]
        for kappa in kappas:
            for lam in RIDGES:
                errors = []
                for i in range(n):
                    a, v = ridge(np.delete(z, i, 0), np.delete(residual, i), kappa, lam)
                    errors.append(y[i] - np.clip(y[i] - residual[i] + a + z[i] @ v, -limit, limit))
                a, v = ridge(z, residual, kappa, lam)
                found.append([*(base[:d] + v / spread), base[d] + a - (v / spread) @ center])
                logs.append(np.mean(np.square(errors)))
                shared_slopes = 1 if kappa == np.inf else 2
                parts.append(0 if base is not shared else shared_slopes if lam == np.inf else 3)
    prior = np.array([0.3, 0.7 * 5 / 9, 0.7 * 2 / 9, 0.7 * 2 / 9]) / np.bincount(parts)
    floor = min(logs[: len(RIDGES)]) / n  # of the models of its own
    weights = prior[parts] * (np.array(logs) + floor) ** (-n / 4)
    weights /= weights.sum()
    model, shares = average_numbers(x, y, shared, True, 0.3, limit)
    np.testing.assert_allclose(model, weights @ np.array(found), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(shares, np.bincount(parts, weights), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_accelerated_steps_reach_the_minimum(outputs: int, rows: int) -> None:
    """Of fewer records than dimensions, too, of which some may be equal."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(rows, 4)), random.integers(0, max(2, outputs), rows)
    x[-1] = x[0]
    base, pull = random.normal(size=(outputs, 4)), 0.3

    def objective(flat):
        w = flat.reshape(outputs, 4)
        margins = x @ w.T if outputs > 1 else np.concatenate([np.zeros((rows, 1)), x @ w.T], 1)
        loss = -log_softmax(margins, 1)[np.arange(rows), y].mean()
        return loss + pull / 2 * np.square(w - base).sum()

    expected = minimize(objective, base.ravel(), options={"gtol": 1e-10}).x
    found = fit_classes(x, y, base[None], np.array([pull]), 300)
    np.testing.assert_allclose(found.ravel(), expected, atol=1e-6)


def test_classes_weigh_by_held_out_hits() -> None:
    """A shared model that predicts all labels gets the weight; one that predicts none loses it to the client's own."""
    random = np.random.default_rng(2)
    x = random.normal(size=(60, 3))
    truth = np.array([4.0, 0.0, 0.0, 0.0])
    y, fold = (x @ truth[:3] > 0).astype(int), np.arange(60) % 5
    good, bad = (average_classes(x, y, sign * truth, True, 0.2, fold)[1] for sign in (1, -1))
    assert good[PARTS.index("local")] < 0.2
    assert bad[PARTS.index("shared")] < 1e-6
    assert good.sum() == pytest.approx(1.0)


def test_records_too_large_for_float64_leave_the_released_model() -> None:
    data = regression(clients=4)
    x = data.train.x.double()
    x[: data.train.offsets[1]] = torch.tensor([1.7e308, -1.7e308, 0.0]).repeat(99)[: x.shape[1]]
    x[0] *= -1
    huge = replace(data, train=replace(data.train, x=x, y=data.train.y.double()), verify=False)
    problem = problem_of(huge, model=models.linear_regression(), loss="auto")
    start = torch.linspace(-1, 1, problem.dimension).to(problem.initial)
    found = Average().train(problem, start, torch.arange(4))
    assert torch.equal(found[0], start)
    assert bool(torch.isfinite(found).all())


def test_one_record_and_records_all_alike() -> None:
    x, y, shared = rows(1, 3)
    for features, targets in ((x, y), (np.ones((5, 3)), np.zeros(5))):
        model, shares = average_numbers(features, targets, shared, True, 0.1, np.inf)
        assert np.isfinite(model).all()
        assert shares.sum() == pytest.approx(1.0)


def test_noise_and_records_weigh_the_models_of_a_client() -> None:
    """The square of the noise, over the error p / n of a model of n records, raises odds of 1 to 9."""
    assert Average().resolved(3.0).noise == 3.0
    assert Average(noise=0.2).resolved(9.0).noise == 0.2
    odds = {(nu, n): 1 / (1 / prior_of_local(nu, n, 10) - 1) for nu in (0, 4, 8) for n in (5, 10, 30)}
    assert [odds[0, n] for n in (5, 10, 30)] == pytest.approx([1 / 9] * 3)
    assert [odds[4, n] for n in (5, 10, 30)] == pytest.approx([2 / 9, 2 / 9, 4 / 9])
    assert odds[8, 30] == pytest.approx(13 / 9)
    assert prior_of_local(math.inf, 5, 10) == 1


def test_where_the_noise_is_loud_a_client_with_many_records_keeps_to_them() -> None:
    problem = problem_of(regression(clients=3, examples=40), model=models.linear_regression())
    start = torch.zeros(problem.dimension, dtype=torch.float64)
    quiet, loud = (Average(noise=nu).reach(problem, start, torch.arange(3))[:, problem.dimension] for nu in (0.0, 30.0))
    assert (loud > quiet).all()


def test_a_network_of_numbers_is_refused_before_anything_is_charged() -> None:
    problem = problem_of(regression(clients=3), model=models.mlp(hidden=5))
    with pytest.raises(ConfigError, match="finetune is 'average', but"):
        Average().check(problem)


def bounded_run(tmp_path=None):
    """Targets within [-1, 1], and slopes that lead far beyond."""
    random = np.random.default_rng(3)
    x = random.uniform(-1, 1, (8, 20, 2))
    y = np.clip(3 * x.sum(2), -1, 1)
    clients = {f"c{i}": (torch.tensor(x[i]).float(), torch.tensor(y[i]).float()) for i in range(8)}
    data = replace(FederatedDataset.from_tensors(clients, classes=None), limit=1.0)
    return data, Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.3, epochs=5)), data=data, model="linear_regression", privacy=None,
        schedule=FullParticipation(), rounds=3, finetune=Average(), progress=False, folder=tmp_path,
    ).fit()  # fmt: skip


def test_predictions_are_cut_off_at_the_public_bound(tmp_path) -> None:
    data, result = bounded_run(tmp_path / "run")
    loaded = type(result).load(tmp_path / "run")
    far = torch.tensor([[9.0, 9.0], [-9.0, -9.0]])
    for one in (result, loaded):
        assert one.model_for("c0")(far).flatten().tolist() == [1.0, -1.0]
        assert one.shared_model()(far).abs().max() == 1
    x, y = data.gather("test", torch.arange(*data.test.offsets[:2].tolist()))
    with torch.no_grad():
        error = (result.model_for("c0")(x).flatten() - y).square().mean()
    assert result.by_client["mse"]["c0"] == pytest.approx(float(error), rel=1e-5)
    assert "weights, mean over clients: local" in result.summary()
    new = result.adapt(data.subset(["c1", "c2"]))
    assert torch.equal(new.personal, result.personal[1:3])
    assert new.model_for("c1")(far).abs().max() == 1
    assert sum(new.finetuned.weights.values()) == pytest.approx(1.0)
