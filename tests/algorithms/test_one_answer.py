"""A public start and noised moments, against generic Gaussian conditioning, loops over records, and limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize

from fedmtl import models
from fedmtl.contrib.one_answer import Moments, OneAnswer, PublicStart
from fedmtl.data import Examples, FederatedDataset
from fedmtl.errors import ConfigError
from fedmtl.privacy import RecordPrivacy
from tests.algorithms.harness import (
    block_of,
    noise_of,
    open_activations,
    problem_of,
    run_activations,
)

COUNTS, P, PUBLIC = (40, 25, 60), 3, 50
BUDGETS = {"a": 1.0, "b": 8.0, "c": 3.0}
NOISY = RecordPrivacy(clip_norm=2.5, epsilon=BUDGETS, mechanism="laplace", delta=0.0)
ONCE = torch.tensor([[2, 0, 1]])


def draw(rng: np.random.Generator, n: int, loss: str) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(n, P)) * [1.0, 0.7, 1.5]
    score = x @ [0.8, -0.5, 0.3] + 0.6 * rng.standard_t(4, size=n)
    return x, score if loss == "squared" else np.where(score > 0, 1.0, -1.0)


def rows(loss: str, seed: int = 0):
    """Rows of the owners, and the public ones."""
    rng = np.random.default_rng(seed)
    return [draw(rng, n, loss) for n in COUNTS], draw(rng, PUBLIC, loss)


def problem(loss: str = "squared", *, public: bool = True):
    owners, known = rows(loss)
    code = (
        (lambda y: torch.from_numpy(y))
        if loss == "squared"
        else (lambda y: torch.from_numpy((y > 0).astype(int)))
    )
    x, y = (np.concatenate([pair[k] for pair in owners]) for k in (0, 1))
    own = Examples(torch.from_numpy(x), code(y), torch.tensor([0, *np.cumsum(COUNTS)]))
    free = Examples(torch.from_numpy(known[0]), code(known[1]), torch.tensor([0, PUBLIC]))
    classes = None if loss == "squared" else 2
    data = FederatedDataset(
        own, own, tuple(BUDGETS), classes=classes, public=free if public else None
    )
    loss = "mse" if loss == "squared" else "binary_cross_entropy"
    return problem_of(data, model=models.linear_regression(bias=False), loss=loss, rounds=9)


def slopes(
    loss: str, x: np.ndarray, y: np.ndarray, theta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """First and second derivative of every record's loss by its prediction."""
    m = x @ theta
    if loss == "squared":
        return 2 * (m - y), np.full(len(y), 2.0)
    chance = 1 / (1 + np.exp(-m))
    return chance - (y > 0), chance * (1 - chance)


def clipped(gradients: np.ndarray, bound: float) -> np.ndarray:
    return gradients * np.minimum(1, bound / np.abs(gradients).sum(1))[:, None]


def fit(loss: str, x: np.ndarray, y: np.ndarray, reg: float) -> np.ndarray:
    """The minimizer of f on some rows, by SciPy."""

    def value(theta):
        m = x @ theta
        each = (m - y) ** 2 if loss == "squared" else np.logaddexp(0, -y * m)
        return each.mean() + reg * theta @ theta

    return optimize.minimize(value, np.zeros(P), method="BFGS", options={"gtol": 1e-10}).x


def answers(
    loss: str, noise: np.ndarray, theta: np.ndarray, who: list[int], bound: float
) -> list[np.ndarray]:
    owners, _ = rows(loss)
    told = []
    for k, i in enumerate(who):
        x, y = owners[i]
        told.append(clipped(slopes(loss, x, y, theta)[0][:, None] * x, bound).mean(0) + noise[k])
    return told


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("who", [[2, 0, 1], [1, 2], [0, 2, 0, 1, 0]])
def test_public_start_is_the_posterior_mean(loss: str, who: list[int]) -> None:
    """The joint Gaussian of theta and all answers, conditioned on the answers, for unequal budgets and sizes."""
    work, bound, reg = problem(loss), 2.5 if loss == "squared" else 0.8, 0.01
    privacy = replace(NOISY, clip_norm=bound)
    learner = PublicStart(loss=loss, reg=reg)
    clients = torch.tensor([who])
    caps = np.maximum(np.bincount(who, minlength=3), 1)
    state, _ = run_activations(learner, work, clients, privacy, pieces=2, caps=caps)
    noise = noise_of(learner, work, clients, privacy, caps=caps)[:, 0]
    x, y = rows(loss)[1]
    start = fit(loss, x, y, reg)
    first, second = slopes(loss, x, y, start)
    gradients = first[:, None] * x
    counted = clipped(gradients, bound)
    whole, free = np.abs(gradients).sum(1) <= bound, PUBLIC / (PUBLIC - P)
    inverse = np.linalg.inv((second[:, None] * x).T @ x / PUBLIC + 2 * reg * np.eye(P))
    prior = inverse @ np.cov(gradients.T, ddof=0) @ inverse * free / PUBLIC
    a = (second * whole)[:, None] * x
    a = a.T @ x / PUBLIC
    spread = np.cov(counted.T, ddof=0) * free
    told = np.array(answers(loss, noise, start, who, bound))
    acting = sorted(set(who))
    means = np.concatenate([told[[k for k, i in enumerate(who) if i == j]].mean(0) for j in acting])
    design = np.tile(-a, (len(acting), 1))
    covariance = design @ prior @ design.T
    for k, j in enumerate(acting):
        scale = (
            2 * bound * caps[j] / (COUNTS[j] * list(BUDGETS.values())[j])
        )  # of one of its answers
        part = slice(k * P, (k + 1) * P)
        covariance[part, part] += spread / COUNTS[j] + 2 * scale**2 / who.count(j) * np.eye(P)
    expected = start + prior @ design.T @ np.linalg.solve(
        covariance, means - np.tile(counted.mean(0), len(acting))
    )
    assert 0.05 < whole.mean() < 0.95
    np.testing.assert_allclose(state.public["theta_l"][0].numpy(), expected, rtol=1e-5, atol=1e-7)
    assert np.abs(expected - start).max() > 1e-3


def test_limits_of_the_budget() -> None:
    """No information leaves the public fit; all of it gives the fit of all rows."""
    known, rng = rows("squared")[1], np.random.default_rng(4)
    free = Examples(*(torch.from_numpy(part) for part in known), torch.tensor([0, PUBLIC]))
    x = np.tile(known[0], (3, 1))  # the public features, with targets of their own
    y = np.tile(known[0] @ [0.2, 0.1, 0.9], 3) + rng.normal(size=3 * PUBLIC)
    own = Examples(torch.from_numpy(x), torch.from_numpy(y), torch.tensor([0, PUBLIC, 3 * PUBLIC]))
    data = FederatedDataset(own, own, ("a", "b"), public=free)
    work = problem_of(data, model=models.linear_regression(bias=False), loss="mse", rounds=2)

    def found(learner: OneAnswer, privacy: RecordPrivacy | None) -> np.ndarray:
        return run_activations(learner, work, [[1, 0]], privacy)[0].public["theta_l"][0].numpy()

    learner = PublicStart(reg=1e-9)
    every = np.concatenate([known[0], x]), np.concatenate([known[1], y])
    np.testing.assert_allclose(
        found(learner, None), np.linalg.lstsq(*every, rcond=None)[0], rtol=1e-6
    )
    start = np.linalg.lstsq(*known, rcond=None)[0]
    privacy = RecordPrivacy(clip_norm=4.0, epsilon=1e-6, mechanism="laplace", delta=0)
    np.testing.assert_allclose(found(learner, privacy), start, rtol=1e-6, atol=1e-6)
    ridge = np.linalg.solve(x.T @ x + 0.01 * len(y) * np.eye(P), x.T @ y)
    np.testing.assert_allclose(found(Moments(reg=0.01), None), ridge, rtol=1e-8)
    assert float(np.abs(found(Moments(reg=0.01), privacy)).max()) < 1.0


def adassp(
    owners, noise: np.ndarray, who: list[int], bound: float, budgets, reg: float
) -> np.ndarray:
    """Ridge regression from noised moments, one record at a time; ``noise`` on (upper triangle by rows, x y)."""
    pairs = [(i, j) for i in range(P) for j in range(i, P)]
    total, size = 0.0, len(pairs) + P
    matrix, vector, variance = np.zeros((P, P)), np.zeros(P), 0.0
    for k, i in enumerate(who):
        x, y = owners[i]
        mean = np.zeros(size)
        for row, target in zip(x, y, strict=True):
            told = [row[a] * row[b] * (1.0 if a == b else math.sqrt(2)) for a, b in pairs] + list(
                row * target
            )
            mean += np.array(told) * min(1.0, bound / np.abs(told).sum()) / len(y)
        mean += noise[k]
        v = 2 * (2 * bound / (len(y) * budgets[i])) ** 2
        weight = 1 / (bound**2 / (size * len(y)) + v)
        for value, (a, b) in zip(mean, pairs, strict=False):
            matrix[a, b] += weight * value / (1.0 if a == b else math.sqrt(2))
        vector += weight * mean[len(pairs) :]
        total, variance = total + weight, variance + weight**2 * v
    matrix = (np.triu(matrix) + np.triu(matrix, 1).T) / total
    edge = math.sqrt(2 * P * variance) / total
    ridge = max(0.0, edge - np.linalg.eigvalsh(matrix).min()) + reg
    return np.linalg.solve(matrix + ridge * np.eye(P), vector / total)


@pytest.mark.parametrize("who", [[2, 0, 1], [1, 2]])
def test_moments_are_adassp(who: list[int]) -> None:
    work, learner = problem(), Moments(reg=0.02)
    clients, caps = torch.tensor([who]), np.ones(3, dtype=int)
    state, _ = run_activations(learner, work, clients, NOISY, pieces=2, caps=caps)
    noise = noise_of(learner, work, clients, NOISY, caps=caps)[:, 0]
    expected = adassp(rows("squared")[0], noise, who, NOISY.clip_norm, list(BUDGETS.values()), 0.02)
    np.testing.assert_allclose(state.public["theta_l"][0].numpy(), expected, rtol=1e-5, atol=1e-8)


def test_private_rows_reach_nothing_but_the_answers() -> None:
    """The start and the prior are those of the public rows alone, and an owner that does not answer counts nothing."""
    learner, work = PublicStart(), problem()
    state = learner.init(work)
    x, y = rows("squared")[1]
    np.testing.assert_allclose(
        state.public["theta_l"][0].numpy(), fit("squared", x, y, 1e-5), atol=1e-6
    )
    nobody = torch.tensor([[-1, -1]])
    channel = open_activations(learner, work, nobody, NOISY)
    channel.begin(0, nobody)
    after = learner.step(work, learner.init(work), block_of(nobody), channel.channel)
    torch.testing.assert_close(after.public["theta_l"], state.public["theta_l"])


def test_public_rows_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"needs public rows, and .* has none"):
        PublicStart().init(problem(public=False))
