"""Averages of models against refits without each record."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from fedmtl import Average, FedAvg, FederatedDataset, LocalSGD, Trainer, models
from fedmtl.algorithms.linear.classes import fit_classes
from fedmtl.contrib.average import (
    PARTS,
    Candidates,
    ClassCandidates,
    average_numbers,
    noise_at,
    prior_of_local,
)
from fedmtl.errors import ConfigError
from fedmtl.privacy import FullParticipation
from tests.algorithms.harness import problem_of
from tests.helpers import regression

RIDGES = (0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300, np.inf)
INTERCEPTS = {0: 0.3, 0.03: 0.2, 0.3: 0.2, 3: 0.2, np.inf: 0.1}


def rows(n: int, d: int, seed: int = 0):
    random = np.random.default_rng(seed)
    return random.uniform(-1, 1, (n, d)), random.uniform(-1, 1, n), 0.3 * random.normal(size=d + 1)


def ridge(z, r, kappa: float, lam: float):
    """The intercept and the slopes by the normal equations; infinite penalties leave them out."""
    intercept, slopes = bool(np.isfinite(kappa)), bool(np.isfinite(lam))
    design = np.concatenate([np.ones((len(z), int(intercept))), z if slopes else z[:, :0]], 1)
    penalties = np.diag([*[kappa] * intercept, *[lam] * (z.shape[1] * slopes)])
    solution = np.linalg.solve(design.T @ design + penalties, design.T @ r)
    return (solution[0] if intercept else 0.0), (
        solution[int(intercept) :] if slopes else np.zeros(z.shape[1])
    )


@pytest.mark.parametrize("noise", [0.0, 1.5])
@pytest.mark.parametrize("n", [2, 3, 9, 30])
def test_the_average_is_that_of_refits_without_each_record(n: int, noise: float) -> None:
    d, limit = 4, 0.8
    x, y, shared = rows(n, d)
    center, spread = x.mean(0), np.sqrt((n * x.var(0) + 10 * 0.4**2) / (n + 10))
    z = (x - center) / spread
    found, errors, shares, parts = [], [], [], []

    def add(base, kappa: float, lam: float, share: float, part: int) -> None:
        residual = y - x @ base[:d] - base[d]
        left_out = []
        for i in range(n):
            a, v = ridge(np.delete(z, i, 0), np.delete(residual, i), kappa, lam)
            left_out.append(y[i] - np.clip(y[i] - residual[i] + a + z[i] @ v, -limit, limit))
        a, v = ridge(z, residual, kappa, lam)
        found.append([*(base[:d] + v / spread), base[d] + a - (v / spread) @ center])
        errors.append(np.mean(np.square(left_out)))
        shares.append(share)
        parts.append(part)

    for lam in RIDGES:
        add(np.zeros(d + 1), 0, lam, 0.1, 0)
    means = [y[i] - np.clip(np.delete(y, i).mean(), -limit, limit) for i in range(n)]
    own_noise = noise * max(1, 0.3 / np.sqrt(np.mean(np.square(means))))
    odds = 0.5 * (1 + (own_noise / 4) ** 2 * max(n / (d + 1), 1))
    shares = [odds / (1 + odds) * share for share in shares]
    for kappa, share in INTERCEPTS.items():
        for lam in RIDGES:
            part = 3
            if lam == np.inf:
                part = 1 if kappa == np.inf else 2
            add(shared, kappa, lam, share / len(RIDGES) / (1 + odds), part)
    floor = min(errors[: len(RIDGES)]) / n
    weights = np.array(shares) * (np.array(errors) + floor) ** (-n / 4)
    weights /= weights.sum()
    model, found_shares = average_numbers(x, y, shared, True, noise, limit)
    np.testing.assert_allclose(model, weights @ np.array(found), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found_shares, np.bincount(parts, weights), rtol=1e-8, atol=1e-10)


def test_a_range_that_is_too_wide_hides_no_noise() -> None:
    """The weight of a client's own models at a target spread over a tenth of its range is that of ten times nu."""
    random = np.random.default_rng(4)
    x, y = random.uniform(-1, 1, (12, 3)), 0.2 * random.normal(size=12)
    shared = np.array([0.2, -0.1, 0.1, 0.0])
    wide, ten = (
        average_numbers(x, y / ratio, shared / ratio, True, nu, np.inf)[1]
        for ratio, nu in ((10, 1), (1, 10))
    )
    exact = average_numbers(x, y, shared, True, 1, np.inf)[1]
    assert wide[0] == pytest.approx(ten[0])
    assert wide[0] > exact[0]


@pytest.mark.parametrize("level", [0.0, 0.3])
def test_clients_with_three_records_keep_to_their_level(level: float) -> None:
    """As on panels of few records: if clients differ by their level alone, the error comes near that of the level's
    posterior mean, and is never above that of the clients' own models.
    """
    random = np.random.default_rng(5)
    shared = np.array([0.3, -0.2, 0.0])
    squares = {name: [] for name in ("average", "local", "exact")}
    for _ in range(400):
        x, own = random.uniform(-1, 1, (203, 2)), level * random.normal()
        y = x @ shared[:2] + own + 0.05 * random.normal(size=203)
        residual = y[:3] - x[:3] @ shared[:2]
        kappa = np.inf if level == 0 else (0.05 / level) ** 2
        exact = np.append(shared[:2], residual.sum() / (3 + kappa))
        models_of = {
            "average": average_numbers(x[:3], y[:3], shared, True, 0.0, np.inf)[0],
            "local": average_numbers(x[:3], y[:3], np.zeros(3), True, np.inf, np.inf)[0],
            "exact": exact,
        }
        for name, model in models_of.items():
            squares[name].append(np.mean((y[3:] - x[3:] @ model[:2] - model[2]) ** 2))
    average, local, exact = (np.mean(squares[name]) for name in ("average", "local", "exact"))
    assert exact < average < 0.5 * local


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
    good, bad = (
        ClassCandidates.of(x, y, sign * truth, True, fold).average(0.2)[1] for sign in (1, -1)
    )
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
        model, shares = average_numbers(features, targets, shared, True, 0.0, np.inf)
        assert np.isfinite(model).all()
        assert shares.sum() == pytest.approx(1.0)


def test_noise_and_records_weigh_the_models_of_a_client() -> None:
    """The square of the noise, over the error p / n of a model of n records, raises odds of 1 to 9."""
    assert Average().resolved(3.0).noise == 3.0
    assert Average(noise=0.2).resolved(9.0).noise == 0.2
    odds = {
        (nu, n): 1 / (1 / prior_of_local(nu, n, 10, 1 / 9) - 1)
        for nu in (0, 4, 8)
        for n in (5, 10, 30)
    }
    assert [odds[0, n] for n in (5, 10, 30)] == pytest.approx([1 / 9] * 3)
    assert [odds[4, n] for n in (5, 10, 30)] == pytest.approx([2 / 9, 2 / 9, 4 / 9])
    assert odds[8, 30] == pytest.approx(13 / 9)
    assert prior_of_local(math.inf, 5, 10, 1 / 2) == 1
    assert [noise_at(*given) for given in ((2.0, 0.6), (2.0, 0.03), (0.0, 0.0))] == pytest.approx(
        [2.0, 20.0, 0.0]
    )
    assert noise_at(2.0, 0.0) == math.inf


def test_where_the_noise_is_loud_a_client_with_many_records_keeps_to_them() -> None:
    problem = problem_of(regression(clients=3, examples=40), model=models.linear_regression())
    start = torch.zeros(problem.dimension, dtype=torch.float64)
    quiet, loud = (
        Average(noise=nu).personalize(problem, start, torch.arange(3))[:, problem.dimension]
        for nu in (0.0, 30.0)
    )
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


def test_a_single_record_feels_the_noise_by_its_distance_to_the_shared_model() -> None:
    x = np.array([[0.3, -0.2]])
    shared = np.array([0.0, 0.0, -0.93])
    assert Candidates.of(x, np.array([-0.95]), shared, True, 1.0).spread == pytest.approx(0.02)
    # the models of local predict 0 for the record that is left out, and all others -.93
    _, parts = average_numbers(x, np.array([-0.95]), shared, True, 2.0, 1.0)
    odds = 0.5 * (1 + (2.0 * 0.3 / 0.02 / 4) ** 2)
    odds *= ((0.02**2 + 0.95**2) / (0.95**2 + 0.95**2)) ** (1 / 4)
    assert parts[0] == pytest.approx(odds / (1 + odds), rel=1e-6)
    # a shared model that is far away is no measure, and two records have a mean without either
    far = Candidates.of(x, np.array([-0.1]), shared, True, 1.0)
    assert far.spread == pytest.approx(0.1)
    pair = Candidates.of(np.repeat(x, 2, 0), np.array([-0.95, -0.75]), shared, True, 1.0)
    assert pair.spread == pytest.approx(0.2)
