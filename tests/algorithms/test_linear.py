"""Linear models: rows, losses, domain bounds."""

import gc
import math
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fedmtl import models
from fedmtl.algorithms.base import Problem
from fedmtl.algorithms.linear.data import LinearData, LinearLoss, prepared, probe_linear
from fedmtl.data import FederatedDataset, RowBound
from fedmtl.errors import DataError, ModelError

from .harness import problem_of


def dataset(*, classes=None, counts=(3, 5), shape=(2, 2), seed=0) -> FederatedDataset:
    rng = np.random.default_rng(seed)
    clients = {}
    for k, n in enumerate(counts):
        y = rng.integers(0, classes, n) if classes else rng.normal(size=n)
        clients[f"c{k}"] = (rng.normal(size=(n, *shape)), y)
    return FederatedDataset.from_tensors(clients, test=clients, classes=classes)


@pytest.mark.parametrize("bias", [False, True])
def test_predictions_of_the_model_are_products_with_the_rows(bias: bool) -> None:
    problem = problem_of(dataset(), model=models.linear_regression(bias=bias))
    rows = LinearData.of(problem)
    assert (rows.dimension, rows.bias, rows.counts.tolist()) == (4 + bias, bias, [3, 5])
    theta = torch.randn(rows.dimension, dtype=torch.float64)
    model = problem.layout.load(problem.module, theta)
    for k, part in enumerate(problem.data.train.offsets[:-1].tolist()):
        own = torch.arange(part, part + len(rows.y[k]))
        x, y = problem.data.gather("train", own, dtype=torch.float64)
        assert torch.allclose(model(x).reshape(-1), rows.x[k] @ theta, rtol=1e-12)
        assert torch.equal(rows.y[k], y)


def test_two_classes_become_signs_and_other_data_are_refused() -> None:
    data = dataset(classes=2)
    rows = LinearData.of(
        problem_of(data, model=models.linear_regression(), loss="binary_cross_entropy")
    )
    assert torch.equal(torch.cat(rows.y), 2.0 * data.train.y - 1)
    for name in ("hinge", "logistic"):
        LinearLoss(name).check_targets(rows.y, "d")
        with pytest.raises(DataError, match=r"client 0 is .*two classes"):
            LinearLoss(name).check_targets(LinearData.of(problem_of(dataset())).y, "d")
    LinearLoss("squared").check_targets(LinearData.of(problem_of(dataset())).y, "d")
    with pytest.raises(DataError, match="3 classes"):
        LinearData.of(
            problem_of(
                dataset(classes=3), model=models.linear_regression(), loss="binary_cross_entropy"
            )
        )


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.weight + self.bias


class Shifted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)) + 1.0


def test_only_linear_models_pass_the_probe() -> None:
    assert probe_linear(nn.Linear(4, 1), (4,))
    assert not probe_linear(nn.Linear(4, 1, bias=False), (4,))
    for module in (Swapped(), Shifted(4, 1), nn.Sequential(nn.Linear(4, 1), nn.Tanh())):
        with pytest.raises(ModelError, match=r"not theta \. x"):
            probe_linear(module, (4,))
    with pytest.raises(ModelError, match="10 parameters"):
        probe_linear(nn.Linear(4, 2), (4,))


@pytest.mark.parametrize("name", ["squared", "hinge", "logistic"])
def test_scales_are_the_derivatives_of_the_values(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    loss = LinearLoss(name)
    theta = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    y = torch.tensor([1, -1, 1, 1, -1, -1], dtype=torch.float64)
    values = loss.value(theta, x, y)
    margins = (theta @ x.T).detach().numpy()
    closed = {
        "squared": (margins - y.numpy()) ** 2,
        "hinge": np.maximum(0, 1 - margins * y.numpy()),
        "logistic": np.log1p(np.exp(-margins * y.numpy())),
    }[name]
    assert np.allclose(values.detach().numpy(), closed, rtol=1e-12)
    for k in range(3):
        for j in range(6):
            (gradient,) = torch.autograd.grad(values[k, j], theta, retain_graph=True)
            scale = loss.factors_of(theta.detach(), x, y)
            assert torch.allclose(gradient[k], scale[k, j] * x[j], rtol=1e-10, atol=1e-14)


def test_logistic_losses_do_not_overflow() -> None:
    loss, one = LinearLoss("logistic"), torch.ones(1, 1, dtype=torch.float64)
    big = torch.tensor([[-1e4], [1e4]], dtype=torch.float64)
    assert loss.value(big, one, one[0]).flatten().tolist() == [1e4, 0.0]
    assert loss.factors_of(big, one, one[0]).flatten().tolist() == [-1.0, 0.0]


def test_records_inside_the_domain_stay_and_bad_ones_count_as_nothing() -> None:
    """The 1 of a bias stays."""
    x = torch.tensor(
        [[0.5, -0.25, 1.0], [4.0, 4.0, 1.0], [math.inf, 0.0, 1.0], [0.1, 0.1, 1.0]],
        dtype=torch.float64,
    )
    y = torch.tensor([0.5, 9.0, 1.0, math.nan], dtype=torch.float64)
    rows = LinearData((x,), (y,), True).bounded(RowBound(1.0, "l1"), 2.0)
    expected = torch.tensor(
        [[0.5, -0.25, 1], [0.5, 0.5, 1], [0, 0, 1], [0, 0, 1]], dtype=torch.float64
    )
    assert torch.allclose(rows.x[0], expected, rtol=1e-11)
    assert rows.y[0].tolist() == [0.5, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("holds_problem", [False, True])
def test_what_is_prepared_dies_with_its_problem(holds_problem: bool) -> None:
    class Big:
        def __init__(self, problem: Problem | None = None) -> None:
            self.problem = problem

    problem = problem_of(dataset())
    built = prepared(problem, "big", partial(Big, problem if holds_problem else None))
    assert prepared(replace(problem, rounds=problem.rounds + 1), "big", Big) is built
    assert prepared(problem, "other", Big) is not built
    assert (
        prepared(replace(problem, data=problem.data.subset(problem.data.ids[:1])), "big", Big)
        is not built
    )
    alive = [weakref.ref(one) for one in (built, problem.data, problem.module)]
    del built, problem
    gc.collect()
    assert [one() for one in alive] == [None] * 3
