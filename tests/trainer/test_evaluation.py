"""Evaluation against one client at a time in float64, and summaries against NumPy."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedmtl.trainer.constants as constants
import fedmtl.trainer.engine as engine
import fedmtl.trainer.evaluation as evaluation
from fedmtl import ClientPrivacy, Execution, FedAvg, LocalSGD, models
from fedmtl._rounding import number_text
from fedmtl.local import Layout
from fedmtl.trainer.constants import constant_loss, own_constants
from fedmtl.trainer.evaluation import evaluate_each, evaluate_models
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from tests.helpers import ragged_classification, regression

from .settings import DATA, SOLVER, trainer


def problem_of(data, *, loss="auto", model=None, execution=None):
    model = models.mlp(hidden=5, dropout=0.5) if model is None else model
    return build_problem(
        data,
        model,
        ProblemSettings(loss=loss, execution=execution or Execution(), rounds=1, dtype="float64"),
    )


def plain_loop(data, module, row, client):
    """One client: its own model, its own rows, torch's losses."""
    part = data.subset([data.ids[client]]).test
    x, y = part.x, part.y
    outputs = Layout.of(module).load(copy.deepcopy(module), row).eval()(x)
    if data.classes is None:
        error = F.mse_loss(outputs[:, 0], y.double()).item()
        return error, error
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).double().mean().item()


def random_rows(problem, k, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, problem.dimension, generator=generator, dtype=torch.float64)


def check_scores(data, module, found, rows, clients):
    """Check that losses and scores are those of the plain loop."""
    expected = [
        plain_loop(data, module, row, int(client))
        for row, client in zip(rows, clients, strict=True)
    ]
    assert found.loss.dtype == found.score.dtype == torch.float64
    np.testing.assert_allclose(found.loss, [loss for loss, _ in expected], rtol=1e-10)
    np.testing.assert_allclose(found.score, [score for _, score in expected], rtol=1e-10)


@pytest.mark.parametrize("execution", [Execution(), Execution(3)], ids=["stacked", "chunks"])
@pytest.mark.parametrize("make", [ragged_classification, regression])
def test_each_model_on_its_own_client(monkeypatch, make, execution):
    monkeypatch.setattr(evaluation, "_EXAMPLES", 4)  # several batches a client
    monkeypatch.setattr(evaluation, "max_clients", lambda dimension: 3)  # and two blocks of clients
    data = make(7)
    problem = problem_of(data, execution=execution)
    clients = torch.tensor([5, 0, 3, 6, 2])
    rows = random_rows(problem, len(clients))
    found = evaluate_each(
        problem, lambda own: rows[[clients.tolist().index(c) for c in own]], clients
    )
    check_scores(data, problem.module, found, rows, clients)


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("make", [ragged_classification, regression])
@pytest.mark.parametrize("common", [True, False], ids=["one model for all", "their own"])
def test_models_of_several_runs_on_every_client(monkeypatch, make, count, common):
    monkeypatch.setattr(evaluation, "_FLAT", 7)  # batches that cut clients apart
    data = make(7)
    problem = problem_of(data)
    models = torch.stack([random_rows(problem, 7, seed) for seed in range(count)])
    if common:
        models = models[:, :1].expand(-1, 7, -1)
    for found, rows in zip(evaluate_models(problem, models), models, strict=True):
        check_scores(data, problem.module, found, rows, range(7))


class Doubled(FedAvg):
    """Clients use twice the shared model, and keep nothing of their own."""

    def personal_models(self, c):
        return 2 * super().personal_models(c)


@pytest.mark.parametrize("evaluate", [None, 4])
def test_the_models_that_are_returned_are_those_that_are_scored(evaluate):
    result = trainer(algorithm=Doubled(local=SOLVER), rounds=2, evaluate_clients=evaluate).fit()
    ids = result.evaluated or DATA.ids
    for row, client in zip(result.personal, ids, strict=True):
        assert torch.equal(row, 2 * result.shared)
        loss, score = plain_loop(DATA, result.module, row, DATA.ids.index(client))
        assert result.by_client["loss"][client] == pytest.approx(loss)
        assert result.personal_accuracy[client] == pytest.approx(score)
    losses = list(result.by_client["loss"].values())
    assert result.final["loss"] == pytest.approx(np.mean(losses))
    assert result.by_client["loss"] != result.shared_by_client["loss"]


def test_a_model_that_everybody_has_is_scored_once(monkeypatch):
    monkeypatch.setattr(engine, "evaluate_each", None)
    result = trainer(algorithm=FedAvg(local=SOLVER), rounds=1).fit()
    assert result.by_client == result.shared_by_client


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy", "mse", "half_mse"])
def test_the_best_constant_is_that_of_a_search(monkeypatch, loss):
    monkeypatch.setattr(constants, "_CHUNK", 7)
    data = (
        regression(7)
        if "mse" in loss
        else ragged_classification(7, classes=2 if "binary" in loss else 3)
    )
    outputs = 3 if loss == "cross_entropy" else 1
    problem = problem_of(data, loss=loss, model=torch.nn.Linear(data.spec.shape[0], outputs))
    found = constant_loss(problem)
    constant = torch.zeros(outputs, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [constant], max_iter=100, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def mean():
        search.zero_grad()
        each = [problem.loss(constant.expand(len(y), -1), y if data.classes else y.double()).mean() for y in
                data.test.y.split(data.test.counts.tolist()) if len(y)]  # fmt: skip
        value = torch.stack(each).mean()
        value.backward()
        return value

    search.step(mean)
    assert found == pytest.approx(mean().item(), rel=1e-6)


def test_a_loss_of_the_callers_own_has_no_constant():
    assert constant_loss(problem_of(DATA, loss=torch.nn.CrossEntropyLoss(reduction="none"))) is None


@pytest.mark.parametrize("noise", [0.0, 30.0])
@pytest.mark.parametrize("data", [DATA, regression(12)], ids=["classes", "number"])
def test_models_worse_than_a_constant_have_a_warning(noise, data):
    privacy = ClientPrivacy(clip_norm=5.0, noise_multiplier=noise, delta=1e-5) if noise else None
    solver = LocalSGD(lr=0.02, epochs=5, batch_size=4)
    found = trainer(
        algorithm=FedAvg(local=solver), data=data, privacy=privacy, rounds=20, baselines=["local"]
    ).fit()
    lines = [
        line
        for line in found.summary().splitlines()
        if "worse than predicting a constant: " in line
    ]
    if not noise:
        assert not any("fedavg" in line for line in lines)
        return
    assert "nMSE" not in lines[0]
    if data.classes is None:
        worse = [
            found.by_client["mse"][name] > error for name, error in found.records.constants.items()
        ]
        expected = f"fedavg (for {np.mean(worse):.0%} of the clients, than the mean of their own training targets)"
        assert np.mean(worse) > 0.5
    else:
        expected = f"fedavg (loss {number_text(found.final['loss'])}, above"
        assert found.final["loss"] > found.records.constant
    assert f"  warning: worse than predicting a constant: {expected}" in lines[0]


def test_one_client_of_little_variance_makes_no_warning():
    """Its nMSE is far above 1, as that of every model that was not trained on its test targets, and so is the mean over
    clients; the median is printed."""
    data = regression(12)
    y = data.test.y.clone()
    y[: int(data.test.counts[0])] = y[0] + 1e-4 * torch.arange(int(data.test.counts[0]))
    data = replace(data, test=replace(data.test, y=y))
    found = trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.02, epochs=5, batch_size=4)), data=data, rounds=20
    ).fit()
    scores = list(found.by_client["nmse"].values())
    assert np.mean(scores) > 1 > np.median(scores)
    assert "worse than predicting a constant" not in found.summary()
    assert f"  nMSE {number_text(np.median(scores))}, median over clients" in found.summary()


def test_the_constant_of_a_client_is_the_mean_of_its_own_training_targets():
    data = replace(regression(5), target_range=(10.0, 30.0))
    found = own_constants(problem_of(data))
    for name in data.ids:
        own = data.subset([name])
        train, test = (20 + 10 * part.y.numpy().astype(float) for part in (own.train, own.test))
        assert found[name] == pytest.approx(np.mean((test - np.mean(train)) ** 2))
    assert own_constants(problem_of(DATA)) == {}
