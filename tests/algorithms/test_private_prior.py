"""The private prior against plain NumPy, SciPy's densities, Monte Carlo, and the limits of its parameters."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedmtl import ClientPrivacy, PoissonSampling, PriorLayers, PrivatePrior, models
from fedmtl.algorithms import ClientBatch, Problem
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.algorithms.linear.evidence import FACTORS, own_ridges
from fedmtl.algorithms.linear.stack import TaskStack
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.contrib.private_prior import entry_signal, excess_of, matrix_signal, mean_signal
from fedmtl.data.synthetic.tasks import true_weights
from fedmtl.errors import ConfigError

from .harness import everyone, linear_tasks, problem_of, repeated, run

TASKS, D, RIDGE, FLOOR = 40, 5, 0.05, 0.05


def linear(
    kind: str = "regression", bias: bool = False, tasks: int = TASKS, **options: Any
) -> Problem:
    sizes = {"features": D, "train_examples": 9, "test_examples": 6, "rank": 1, "seed": 1} | options
    return linear_tasks(tasks, kind, bias=bias, **sizes)


def prior(**settings: Any) -> PrivatePrior:
    return PrivatePrior(
        **({"ridge": RIDGE, "own_ridge": False, "scale": 1.0, "feature_norm": 1.0} | settings)
    )


def symmetric_signal(moments: np.ndarray, n: int) -> np.ndarray:
    """What stands out of the noise of a symmetric matrix of second moments of n clients, shrunk."""
    d, signal = len(moments), np.zeros_like(moments)
    var = 2 / n / d**2
    for y, v in zip(*(part.T for part in np.linalg.eigh(moments)), strict=True):
        if y > 1.05 * math.sqrt(2 * d * var):
            below = (y + math.sqrt(y * y - 2 * d * var)) / 2
            signal += below * (1 - d * var / (2 * below**2)) * np.outer(v, v)
    return signal


def excess_in_numpy(signal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues and eigenvectors of a signal, whose trace is made 0 by those that are 0."""
    values, vectors = np.linalg.eigh(signal)
    known = np.abs(values) > 1e-12
    assert 0 < known.sum() < len(values)
    values[~known] = -values[known].sum() / (~known).sum()
    return values, vectors


def in_numpy(problem: Problem, share: float, form: str = "symmetric") -> np.ndarray:
    """The models (n, D) of a run without noise, one task after the other, squared loss."""
    rows = LinearData.of(problem)
    d, n, first, second, kept = D, len(rows.x), 0.0, 0.0, []
    for x, y in zip((x.numpy() for x in rows.x), (y.numpy() for y in rows.y), strict=True):
        gram, eye = x.T @ x / len(y), np.eye(x.shape[1])
        w = np.linalg.solve(gram + RIDGE * eye, x.T @ y / len(y))
        b = (np.linalg.inv(gram + RIDGE * eye) @ gram)[:d, :d]
        u = w[:d] / np.linalg.norm(w[:d])
        first = first + u / n
        second = second + (np.outer(u, u) - b / np.trace(b)) / n
        kept.append((x, y, gram, np.trace(b) / d))
    signal = np.zeros((d, d))
    if share > 0:
        square, var = first @ first, 1 / (d * n)
        if square > var * (d + 2 * math.sqrt(2 * d)):
            signal += ((square - d * var) / square) ** 2 * np.outer(first, first)
    if share < 1:
        if form == "symmetric":
            signal = signal + symmetric_signal(second - signal, n)
        else:
            limit = 1.05 * math.sqrt(2 / n / d**2 * 2 * math.log(2 * d))
            for j, y in enumerate(np.diag(second - signal)):
                signal[j, j] += y - limit**2 / y if y > limit else 0.0
    values, vectors = excess_in_numpy(signal)
    found = []
    for x, y, gram, b in kept:
        precision = RIDGE * np.eye(x.shape[1])
        variances = np.clip(1 + d * values / b, FLOOR, d / FLOOR)
        precision[:d, :d] = vectors @ np.diag(RIDGE / variances) @ vectors.T
        found.append(np.linalg.solve(gram + precision, x.T @ y / len(y)))
    return np.stack(found)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("share", "form"),
    [(0.0, "symmetric"), (0.4, "symmetric"), (1.0, "symmetric"), (0.0, "diagonal")],
)
def test_without_noise_it_is_the_formula(bias: bool, share: float, form: str) -> None:
    structure = "clustered" if share else "group_sparse" if form == "diagonal" else "low_rank"
    problem = linear(bias=bias, structure=structure)
    if share:  # centres up to a sign, which the mean does not show: tasks that are alike
        problem = linear(bias=bias, structure="group_sparse", rank=1)
        x, y = problem.data.train.x, problem.data.train.y
        problem = problem_of(
            replace(problem.data, train=replace(problem.data.train, y=x.sum(1) + 0.3 * y)),
            rounds=1, model=models.linear_regression(bias=bias), loss="half_mse",
        )  # fmt: skip
    algorithm = prior(share=share, form=form)
    found = everyone(problem, algorithm, run(algorithm, problem)).numpy()
    np.testing.assert_allclose(found, in_numpy(problem, share, form), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("form", ["symmetric", "diagonal"])
@pytest.mark.parametrize(("kind", "own_ridge"), [("regression", True), ("classification", False)])
def test_what_drowns_in_noise_leaves_every_task_alone(
    share: float, form: Any, kind: str, own_ridge: bool
) -> None:
    problem = linear(kind)
    loss: Any = "squared" if kind == "regression" else "logistic"
    algorithm = prior(share=share, form=form, own_ridge=own_ridge, loss=loss)
    privacy = [ClientPrivacy(clip_norm=1.0, noise_multiplier=TASKS * 1.5, delta=1e-5)] * 20
    state = repeated(algorithm, problem, privacy, 20)
    alone = everyone(problem, LocalFit(), run(algorithm.local_baseline(), problem))
    assert torch.equal(state.private.whole("model"), alone[:, None].expand(-1, 20, -1))
    assert not bool(state.public["excess"].any())


# What is released


def rows_of(algorithm: PrivatePrior | PriorLayers, problem: Problem) -> Tensor:
    """What all clients hand to the release."""
    state, clients = algorithm.init(problem), torch.arange(problem.clients)
    own = state.private.gather_all(clients)
    (rows,) = algorithm.client_update(ClientBatch(problem, clients, state.public, own, round=0))[
        0
    ].values()
    return rows


def test_the_row_of_a_task() -> None:
    """Its length, its trace, and both parts of the budget; a task without a model sends nothing."""
    problem, algorithm = linear(tasks=6), prior(share=0.3, scale=2.5)
    row = rows_of(algorithm, problem) / 2.5
    torch.testing.assert_close(
        row[:, :D].norm(dim=1), torch.full((6,), 0.3**0.5, dtype=torch.float64)
    )
    diagonal = torch.tensor([0, 5, 9, 12, 14])
    assert float(row[:, D:][:, diagonal].sum(1).abs().max()) < 1e-12
    assert float(row.norm(dim=1).max()) <= 1.0
    train = replace(problem.data.train, y=torch.zeros_like(problem.data.train.y))
    nothing = problem_of(replace(problem.data, train=train), rounds=1, loss="half_mse")
    assert not bool(rows_of(algorithm, nothing).any())


# What the server makes of it


@pytest.mark.parametrize("size", [0.35, 0.5, 0.8])
def test_a_direction_in_noise_is_shrunk_to_what_it_says(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On average the kept eigenvalue is <v, A v> of the hidden matrix A along the eigenvector v that was released."""
    monkeypatch.setattr("fedmtl.contrib.spectrum.EDGE", 1.0)
    d, draws, noise = 120, 60, 0.03
    generator = torch.Generator().manual_seed(0)
    hidden = torch.zeros(d, d, dtype=torch.float64)
    hidden[3, 3] = size
    kept, true = [], []
    for _ in range(draws):
        matrix = torch.randn(d, d, generator=generator, dtype=torch.float64) * noise
        matrix = (matrix + matrix.T) / 2 + hidden
        values, vectors = torch.linalg.eigh(matrix)
        found = matrix_signal(matrix, noise)
        kept.append(float(torch.trace(found)))
        true.append(float(vectors[:, -1] @ hidden @ vectors[:, -1]))
    assert np.mean(kept) == pytest.approx(np.mean(true), rel=0.05)
    quiet = matrix_signal(matrix, 0.0)
    values, vectors = torch.linalg.eigh(matrix)
    torch.testing.assert_close(quiet, (vectors * values.clamp_min(0.0)) @ vectors.T)


def test_the_mean_is_shrunk_by_its_noise() -> None:
    generator = torch.Generator().manual_seed(2)
    mean = torch.zeros(50, dtype=torch.float64)
    mean[:4] = 0.3  # of length 0.6
    drawn = [
        mean + 0.05 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(200)
    ]
    kept = np.mean([float(torch.trace(mean_signal(one, 0.05))) for one in drawn])
    along = np.mean([float((one @ mean) ** 2 / one.square().sum()) for one in drawn])
    assert kept == pytest.approx(along, rel=0.05)
    torch.testing.assert_close(mean_signal(mean, 0.0), torch.outer(mean, mean))
    edge = (
        mean / mean.norm() * 0.05 * math.sqrt(50 + 2 * math.sqrt(2 * 50))
    )  # two standard deviations of pure noise
    assert [bool(mean_signal(factor * edge, 0.05).any()) for factor in (0.99, 1.01)] == [
        False,
        True,
    ]


def test_the_excess_has_trace_zero() -> None:
    signal = torch.diag(torch.tensor([0.3, 0.0, 0.0, 0.1], dtype=torch.float64))
    values, vectors = excess_of(signal)
    expected = torch.diag(torch.tensor([0.3, -0.2, -0.2, 0.1], dtype=torch.float64))
    torch.testing.assert_close((vectors * values) @ vectors.T, expected)
    assert not bool(excess_of(torch.zeros(4, 4, dtype=torch.float64))[0].any())
    assert float(excess_of(torch.eye(3, dtype=torch.float64))[0].abs().max()) == 0.0


# The ridge of a task


def stack(loss: str, n: int = 12, p: int = 3, count: int = 4) -> TaskStack:
    generator = torch.Generator().manual_seed(4)
    x = tuple(torch.randn(n, p, generator=generator, dtype=torch.float64) for _ in range(count))
    y = tuple(
        one @ torch.ones(p, dtype=torch.float64) + torch.randn(n, generator=generator) for one in x
    )
    y = y if loss == "squared" else tuple(torch.sign(one) for one in y)
    return TaskStack.of(LinearData(x, y, False), loss)  # type: ignore[arg-type]


def test_the_ridge_of_the_largest_evidence() -> None:
    """SciPy's Gaussian density of the records, the variance of their noise on a grid."""
    tasks, ridge = stack("squared"), 0.3
    scale = torch.diag(torch.tensor([2.0, 1.0, 0.3], dtype=torch.float64))
    found = own_ridges(tasks, ridge, scale.expand(4, 3, 3))
    for i in range(4):
        rows = (tasks.data.x[i] @ scale).numpy()
        values = []
        for factor in FACTORS:
            covariance = np.eye(12) + rows @ rows.T / (12 * ridge * factor)
            laws = (
                stats.multivariate_normal(cov=v * covariance) for v in np.geomspace(0.01, 100, 100)
            )
            best = max(law.logpdf(tasks.data.y[i].numpy()) for law in laws)
            values.append(best - math.log(factor) ** 2 / 2)
        assert float(found[i]) == pytest.approx(ridge * FACTORS[int(np.argmax(values))])


def test_the_ridge_of_the_largest_evidence_with_two_classes() -> None:
    """Many records: the evidence by sums over a grid of models."""
    tasks, ridge = stack("logistic", n=60, p=1), 0.02
    grid = np.linspace(-8, 8, 4001)
    for i, found in enumerate(own_ridges(tasks, ridge).tolist()):
        x, y = tasks.data.x[i].numpy()[:, 0], tasks.data.y[i].numpy()
        fits = -np.logaddexp(0.0, -np.outer(grid, x) * y).sum(1)
        values = []
        for factor in FACTORS:
            density = stats.norm.logpdf(grid, scale=(60 * ridge * factor) ** -0.5)
            values.append(np.logaddexp.reduce(fits + density) - math.log(factor) ** 2 / 2)
        best = int(np.argmax(values))
        assert (
            abs(math.log2(found / (ridge * FACTORS[best]))) <= 1 + 1e-9
        )  # at most the next one of the grid


# As a method


def test_what_is_refused() -> None:
    problem = linear()
    with pytest.raises(ConfigError, match="all clients take part"):
        run(prior(), problem, sampler=PoissonSampling(3))
    with pytest.raises(ConfigError, match="rounds must be 1, not 3"):
        run(prior(), replace(problem, rounds=3))
    with pytest.raises(ConfigError, match="scale is 'auto'"):
        run(PrivatePrior(feature_norm=1.0), problem)
    with pytest.raises(ConfigError, match="at most 512 features"):
        run(prior(), linear(features=513, tasks=2))


def test_pure_noise_rarely_stands_out() -> None:
    generator = torch.Generator().manual_seed(1)
    found = np.zeros(3)
    for _ in range(300):
        matrix = torch.randn(30, 30, generator=generator, dtype=torch.float64)
        vector = torch.randn(30, generator=generator, dtype=torch.float64)
        found += [
            bool(matrix_signal(0.1 * (matrix + matrix.T) / 2, 0.1).any()),
            bool(entry_signal(0.1 * vector, 0.1).any()),
            bool(mean_signal(0.1 * vector, 0.1).any()),
        ]
    assert (found / 300 < [0.1, 0.1, 0.06]).all()


def test_many_alike_tasks_teach_the_true_covariance() -> None:
    """With many tasks of many records the excess over learning alone is that of the models themselves."""
    problem = linear(tasks=3000, train_examples=60, rank=2, noise=0.05)
    state = run(prior(ridge=1e-4), problem)
    directions, excess = state.public["directions"][0], state.public["excess"][0]
    true = true_weights(problem.data.ids, D, rank=2, seed=1)
    unit = true / true.norm(dim=0)
    expected = unit @ unit.T / 3000 - torch.eye(D) / D
    torch.testing.assert_close((directions * excess) @ directions.T, expected, rtol=0.0, atol=0.02)
