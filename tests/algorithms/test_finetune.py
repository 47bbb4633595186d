"""Finetuning against steps written out by hand, at the ends of lambda, and client by client."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl import Average, Finetune, LocalSGD, models
from fedmtl.algorithms import ClientBatch
from fedmtl.algorithms.own_gradients import FINETUNE_ROUND
from fedmtl.audit.other_clients import replaced_client
from fedmtl.errors import ConfigError
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from tests.algorithms.harness import problem_of
from tests.algorithms.test_pmtl import blocks
from tests.helpers import ragged_classification, regression

KINDS = ("vanilla", "mean", "kl", "ewc")
STEPS = LocalSGD(lr=0.05, steps=4, batch_size=None)
START = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)


def classification(clients: int = 9):
    return problem_of(ragged_classification(clients), model=models.mlp(hidden=5), loss="auto")


def everybody(problem) -> torch.Tensor:
    return torch.arange(problem.clients)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_by_hand(kind: str) -> None:
    """Full gradients of the mean squared error; the pull of "ewc" by its proximal step."""
    problem, lam, w0 = problem_of(regression(clients=5)), 0.7, START.numpy()
    found = Finetune(kind=kind, lam=lam, local=STEPS).train(problem, START, everybody(problem))
    for k, (x, y) in enumerate(blocks(problem.data)):
        w = w0.copy()
        fisher = np.mean((2 * (x @ w0 - y)[:, None] * x) ** 2, axis=0)
        for _ in range(4):
            gradient = 2 / len(x) * x.T @ (x @ w - y)
            if kind == "mean":
                gradient = gradient + lam * (w - w0)
            if kind == "kl":  # of normal laws of variance 1: lam * mean (x w - x w0)^2
                gradient = gradient + 2 * lam / len(x) * x.T @ (x @ (w - w0))
            w = w - 0.05 * gradient
            if kind == "ewc":
                w = (w + 0.05 * lam * fisher * w0) / (1 + 0.05 * lam * fisher)
        np.testing.assert_allclose(found[k].numpy(), w, rtol=1e-10)


def test_without_a_pull_it_is_local_training() -> None:
    problem, solver = classification(), LocalSGD(lr=0.2, epochs=2, batch_size=4, proximal=True)
    alone = ClientBatch(problem, everybody(problem), round=FINETUNE_ROUND).train(
        solver, problem.initial
    )
    found = Finetune(kind="vanilla", local=solver).train(
        problem, problem.initial, everybody(problem)
    )
    assert torch.equal(found, alone)


METHODS = {
    kind: Finetune(kind=kind, lam=0.3, local=LocalSGD(lr=0.2, epochs=2, batch_size=4))
    for kind in KINDS
}
METHODS |= {
    "average": Average(noise=math.inf),
    "average, softmax": Average(),
    "average, numbers": Average(),
}


def setting(name: str, dtype: str = "float64"):
    """A method, a problem of eleven clients and a start; of averages, which fit every client apart, of five."""
    model = {
        "average, softmax": models.softmax_regression(),
        "average, numbers": models.linear_regression(),
    }
    clients = 5 if name.startswith("average") else 11
    data = regression(clients) if name == "average, numbers" else ragged_classification(clients)
    given = model.get(name, models.mlp(hidden=5))
    problem = build_problem(data, given, ProblemSettings(rounds=1, dtype=dtype))
    return METHODS[name], problem, problem.initial + 0.05


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_client_notices_the_data_of_another(name: str, dtype: str) -> None:
    """To the last bit, though the other one has other values and another number of records."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        method, problem, start = setting(name, dtype)
        first = method.personalize(problem, start, everybody(problem))
        for records in (1, 70):
            other = replace(problem, data=replaced_client(problem.data, 2, records, 0), prepared={})
            again = method.personalize(other, start, everybody(problem))
            others = everybody(problem) != 2
            assert torch.equal(first[others], again[others])
            assert not torch.equal(first[2], again[2])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", METHODS)
def test_a_client_alone_finetunes_as_in_a_stack(name: str) -> None:
    method, problem, start = setting(name)
    start = start + 0.1 * torch.arange(problem.clients, dtype=torch.float64)[:, None]
    stacked = method.personalize(problem, start, everybody(problem))
    for k, client in enumerate(problem.data.ids):
        alone = replace(problem, data=problem.data.subset([client]), prepared={})
        found = method.personalize(alone, start[k : k + 1], torch.tensor([0]))
        torch.testing.assert_close(found[0], stacked[k], rtol=1e-10, atol=1e-12)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="no shared model"):
        Finetune(start="shared").origin(None, torch.zeros(2, 3))
    problem = problem_of(
        regression(), loss=lambda outputs, targets: (outputs[:, 0] - targets).abs()
    )
    with pytest.raises(ConfigError, match="lambda"):
        Finetune(kind="kl").train(problem, START, everybody(problem))
