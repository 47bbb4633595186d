"""FedAvg, FedProx, server optimizers and Local against hand-written rounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.algorithms import FedAvg, FedProx, Local, ServerOptimizer, apply_update
from fedmtl.local import LocalSGD
from fedmtl.privacy import PoissonSampling
from tests.algorithms.harness import everyone, problem_of, run
from tests.algorithms.test_pmtl import blocks
from tests.helpers import regression

SOLVER = LocalSGD(lr=0.05, steps=3, batch_size=None)


def local_steps(x, y, w, mu=0.0, decay=0.0):
    anchor, w = w, w.copy()
    for _ in range(3):
        w = w - 0.05 * (2 / len(x) * x.T @ (x @ w - y) + mu * (w - anchor) + decay * w)
    return w


@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_rounds_by_hand(mu):
    data = regression(clients=5)
    algorithm = FedProx(mu=mu, local=SOLVER) if mu else FedAvg(local=SOLVER)
    state = run(algorithm, problem_of(data, rounds=3))
    w = np.zeros(4)
    for _ in range(3):
        w = w + np.mean([local_steps(x, y, w, mu) - w for x, y in blocks(data)], axis=0)
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("Adam", {}), ("Adagrad", {}), ("SGD", {"weight_decay": 0.1})],
)
def test_server_optimizer_equals_torch_on_the_mean_update(name, options):
    data = regression(clients=5)
    algorithm = FedAvg(
        local=SOLVER, server_optimizer=ServerOptimizer(optimizer_name=name, lr=0.3, options=options)
    )
    state = run(algorithm, problem_of(data, rounds=4))
    w = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = getattr(torch.optim, name)([w], lr=0.3, **options)
    for _ in range(4):
        now = w.detach().numpy()
        update = np.mean([local_steps(x, y, now) - now for x, y in blocks(data)], axis=0)
        w.grad = -torch.from_numpy(update)
        optimizer.step()
    torch.testing.assert_close(state.public["global"], w.detach(), rtol=1e-10, atol=1e-12)


def test_local_is_every_client_alone():
    data = regression(clients=5)
    algorithm, problem = Local(local=replace(SOLVER, weight_decay=0.4)), problem_of(data, rounds=8)
    state = run(algorithm, problem, sampler=PoissonSampling(cohort=2))
    personal = everyone(problem, algorithm, state).numpy()
    assert state.public == {}
    for client, (x, y) in enumerate(blocks(data)):
        trail = [np.zeros(4)]
        for _ in range(9):
            trail.append(local_steps(x, y, trail[-1], decay=0.4))
        gaps = [np.abs(personal[client] - w).max() for w in trail[1:]]
        assert (
            min(gaps) < 1e-12
        )  # some whole number of participations, at least one through personalize


def test_the_server_adds_in_float64_and_rounds_once():
    """1 + 2^-24 + 2^-50 is above the middle between two float32 numbers; its update alone rounds to the middle."""
    public = {"global": torch.ones(1)}
    update = torch.tensor([2.0**-24 + 2.0**-50], dtype=torch.float64)
    moved = apply_update(public, "global", update, lr=1.0, optimizer=None)
    assert moved["global"].item() == 1 + 2.0**-23


def test_the_step_size_of_the_server_scales_the_update_of_its_optimizer():
    public = {"global": torch.zeros(2)}
    update = torch.tensor([1.0, -2.0], dtype=torch.float64)
    moved = apply_update(public, "global", update, lr=0.5, optimizer=ServerOptimizer(lr=0.1))
    assert moved["global"].tolist() == pytest.approx([0.05, -0.1])
