"""FedAvg, FedProx, server optimizers and Local against hand-written rounds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.algorithms import FedAvg, FedProx, Local, ServerOptimizer, apply_update
from fedmtl.errors import ConfigError
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


def test_adam_norm_takes_one_size_of_gradients_for_all_coordinates():
    data = regression(clients=5)
    optimizer = ServerOptimizer(optimizer_name="AdamNorm", lr=0.3, options={"betas": (0.8, 0.95)})
    algorithm = FedAvg(local=SOLVER, server_optimizer=optimizer)
    state = run(algorithm, problem_of(data, rounds=4))
    w, mean, square = np.zeros(4), np.zeros(4), 0.0
    for step in range(1, 5):
        gradient = -np.mean([local_steps(x, y, w) - w for x, y in blocks(data)], axis=0)
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.95 * square + 0.05 * np.mean(gradient**2)
        w = w - 0.3 * mean / (1 - 0.8**step) / np.sqrt(square / (1 - 0.95**step))
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-6)


def test_adam_norm_moves_little_along_coordinates_of_noise_alone():
    """Adam moves each coordinate by its own size; of one size the signal takes most of the way."""
    random = torch.Generator().manual_seed(0)
    ends = {}
    for name in ("Adam", "AdamNorm"):
        optimizer = ServerOptimizer(optimizer_name=name, lr=0.02, options={"betas": (0.9, 0.99)})
        public = {"w": torch.zeros(2000)}
        for _ in range(50):
            update = 0.02 * torch.randn(2000, generator=random)
            update[0] = 1.0
            public = optimizer.step(public, "w", update)
        ends[name] = float(public["w"][1:].norm() / public["w"][0])
    # what the release of each step adds to the model, if all have the same size
    shares = [sum(0.1 * 0.9 ** (t - s) / (1 - 0.9**t) for t in range(s, 51)) for s in range(1, 51)]
    expected = 0.02 * math.sqrt(1999) * math.hypot(*shares) / sum(shares)
    assert ends["AdamNorm"] == pytest.approx(expected, rel=0.05)
    assert ends["Adam"] > 5 * ends["AdamNorm"]


def test_adam_norm_refuses_a_decay_of_one():
    with pytest.raises(ConfigError, match=r"AdamNorm does not take: betas are"):
        ServerOptimizer(optimizer_name="AdamNorm", options={"betas": (0.9, 1.0)})


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
