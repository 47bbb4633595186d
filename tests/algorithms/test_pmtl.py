"""PMTL against the closed-form optimum, and rounds computed by hand (Hu et al. 2023)."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.algorithms import PMTL
from fedmtl.errors import ConfigError
from fedmtl.local import LocalSGD
from fedmtl.privacy import ClientPrivacy, PoissonSampling, SeededSource
from tests.algorithms.harness import everyone, problem_of, run
from tests.helpers import regression


def blocks(data):
    """X_k, y_k of every client as NumPy arrays."""
    offsets = data.train.offsets.tolist()
    pairs = itertools.pairwise(offsets)
    return [(data.train.x[a:b].numpy(), data.train.y[a:b].numpy()) for a, b in pairs]


def smoothness(data) -> float:
    """Largest eigenvalue of any client's Hessian (2 / n) X'X."""
    return max(np.linalg.eigvalsh(2 / len(x) * x.T @ x)[-1] for x, _ in blocks(data))


def normal_equations(data, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """The stationarity of (1/K) sum_k [ (1/n_k) ||X_k w_k - y_k||^2 + (lam/2) ||w_k - wbar||^2 ]: A vec(W) = b."""
    parts = blocks(data)
    k, d = len(parts), parts[0][0].shape[1]
    system, right = np.zeros((k * d, k * d)), np.zeros(k * d)
    for i, (x, y) in enumerate(parts):
        here = slice(i * d, (i + 1) * d)
        system[here, here] += 2 / len(x) * x.T @ x + lam * np.eye(d)
        right[here] = 2 / len(x) * x.T @ y
        for j in range(k):
            system[here, j * d : (j + 1) * d] -= lam / k * np.eye(d)
    return system, right


def optimum(data, lam: float) -> np.ndarray:
    """The unique minimizer on well-conditioned data: (K, d)."""
    return np.linalg.solve(*normal_equations(data, lam)).reshape(len(data), -1)


def exact(data, lam: float, **options) -> PMTL:
    solver = LocalSGD(lr=1 / (smoothness(data) + lam), steps=10, batch_size=None)
    return PMTL(lam=lam, local=solver, **options)


@pytest.mark.parametrize(("lam", "reference"), [(0.1, "global"), (1.0, "global"), (1.0, "local")])
def test_reaches_the_closed_form_optimum(lam, reference):
    data = regression(examples=60)
    problem = problem_of(data, rounds={0.1: 60, 1.0: 100}[lam])
    algorithm = exact(data, lam, reference=reference)
    state = run(algorithm, problem)
    best = optimum(data, lam)
    assert np.abs(everyone(problem, algorithm, state).numpy() - best).max() < 1e-12
    assert np.abs(state.public["global"].numpy() - best.mean(0)).max() < 1e-12


@pytest.mark.parametrize("reference", ["global", "local"])
def test_two_rounds_by_hand(reference):
    """The published steps in NumPy: local gradient steps, whole-vector clip, sum, noise, fixed denominator."""
    data, lam, lr, clip, z, seed = regression(clients=5), 0.5, 0.05, 0.3, 0.7, 3
    algorithm = PMTL(lam=lam, local=LocalSGD(lr=lr, steps=3, batch_size=None), reference=reference)
    problem = problem_of(data, rounds=2, seed=seed)
    privacy = ClientPrivacy(clip_norm=clip, noise_multiplier=z)
    sampler = PoissonSampling(cohort=3)
    cohorts = []
    states = []
    state = run(
        algorithm,
        problem,
        sampler=sampler,
        privacy=privacy,
        watch=lambda step, s: (
            states.append(s.public["global"].clone()),
            cohorts.append(s.private.gather("seen", torch.arange(5))),
        ),
    )
    mean, personal, seen, sent = np.zeros(4), np.zeros((5, 4)), np.zeros(5, bool), np.zeros((5, 4))
    source = SeededSource(seed)
    bound = sampler.bind(5)
    order = torch.argsort(data.keys, stable=True).numpy()
    for step in range(2):
        total = np.zeros(4)
        for client in order[bound.draw(step, source.coins("cohort", step)).numpy()]:
            x, y = blocks(data)[client]
            w = personal[client].copy() if seen[client] else mean.copy()
            for _ in range(3):
                w -= lr * (2 / len(x) * x.T @ (x @ w - y) + lam * (w - mean))
            g = w - (mean if reference == "global" else sent[client])
            g *= min(1.0, clip * (1 - 2.0**-20) / np.linalg.norm(g))
            sent[client] += g
            total += g
            personal[client], seen[client] = w, True
        noise = z * clip * source.normal("noise/update", step, 4)
        mean = mean + (1.0 if reference == "global" else 3 / 5) * (total + noise) / 3
        np.testing.assert_allclose(
            states[step + 1].numpy(), mean, rtol=1e-6 if reference == "local" else 1e-10, atol=1e-12
        )
    np.testing.assert_allclose(
        state.private.gather("model", torch.from_numpy(seen.nonzero()[0])).numpy(),
        personal[seen],
        rtol=1e-6,
    )
    assert seen.any()
    assert not np.allclose(mean, 0)


@pytest.mark.parametrize("server_lr", [1.0, 0.5, 0.2])
def test_running_mean_needs_its_own_server_step(server_lr):
    data = regression(clients=6)
    algorithm = PMTL(local=LocalSGD(lr=0.05), reference="local", server_lr=server_lr)
    with pytest.raises(ConfigError, match="m / K = 2 / 6"):
        run(algorithm, problem_of(data), sampler=PoissonSampling(cohort=2))
    right = PMTL(local=LocalSGD(lr=0.05), reference="local", server_lr=2 / 6)
    run(right, problem_of(data, rounds=2), sampler=PoissonSampling(cohort=2))


def test_a_client_that_diverges_keeps_its_model_and_sends_nothing():
    calm = regression(clients=4)
    x, wild = calm.train.x.clone(), slice(*calm.train.offsets[2:4].tolist())
    x[wild] *= 1e200
    problem = problem_of(replace(calm, train=replace(calm.train, x=x)), rounds=1)
    algorithm = PMTL(lam=1.0, local=LocalSGD(lr=0.05, steps=3, batch_size=None))
    state = run(algorithm, problem)
    models_now = everyone(problem, algorithm, state)
    assert torch.equal(models_now[2], problem.initial)
    assert torch.isfinite(models_now).all()
    # the other three alone, divided by the same public denominator of 4
    expected = (models_now[[0, 1, 3]] - problem.initial).sum(0) / 4
    torch.testing.assert_close(state.public["global"], expected, rtol=1e-12, atol=1e-14)
