"""What the study of the cost of privacy computes: psi, choices by simulation, slopes, and weights of owners."""

import math

import numpy as np
import pytest
import torch
from collaboration import Collaboration, log_log_slope
from hinge import minimize_hinge
from scipy import optimize
from simulate import KAPPAS, fitness_by_kappa, simulate
from sklearn.linear_model import Ridge
from weighted import Weighted

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.privacy import RecordPrivacy


def owners(count: int, n: int, *, p: int = 3, seed: int = 0) -> LinearData:
    rng = np.random.default_rng(seed)
    truth = rng.uniform(-0.5, 0.5, p)
    x = [torch.from_numpy(rng.uniform(-1, 1, (n, p))) for _ in range(count)]
    y = [v @ torch.from_numpy(truth) + torch.from_numpy(rng.uniform(-1, 1, n)) for v in x]
    return LinearData(tuple(x), tuple(y), False)


def fitness(loss: str, x: np.ndarray, y: np.ndarray, reg: float, theta: np.ndarray) -> float:
    m = x @ theta
    losses = {"squared": (y - m) ** 2, "hinge": np.maximum(0, 1 - y * m)}[loss]
    return float(losses.mean() + reg * theta @ theta)


@pytest.mark.parametrize("loss", ["squared", "hinge"])
def test_psi_is_the_relative_fitness(loss: str) -> None:
    data = owners(2, 60)
    if loss == "hinge":
        data = LinearData(data.x, tuple(y.sign() for y in data.y), False)
    together = Collaboration(AsyncLearner(loss=loss, reg=1e-3, theta_max=5.0), data)
    theta = torch.randn(6, 3, dtype=torch.float64)
    x, y = (part.numpy() for part in data.pooled())
    expected = [
        fitness(loss, x, y, 1e-3, own) / together.optimum.value - 1 for own in theta.numpy()
    ]
    assert np.allclose(together.psi(theta).numpy(), expected, rtol=1e-12)
    best = torch.from_numpy(together.optimum.theta)
    assert float(together.psi(best[None])) == pytest.approx(0, abs=1e-12)
    assert float(together.psi(best + 1e-3 * torch.randn(20, 3, dtype=torch.float64)).min()) > -1e-9
    second = LinearData(data.x[1:], data.y[1:], False)
    assert together.alone(1).value == Collaboration(together.learner, second).optimum.value


def test_kappa_is_chosen_by_noisy_simulation_on_public_rows() -> None:
    public = owners(1, 500, seed=1)
    learner = AsyncLearner(reg=1e-3, theta_max=2.0)
    rng = np.random.default_rng(0)
    clients = torch.from_numpy(
        np.stack([rng.permutation(np.repeat(np.arange(3), 10)) for _ in range(40)])
    )

    def choice(epsilon: float) -> dict[float, float]:
        privacy = RecordPrivacy(clip_norm=5.0, epsilon=epsilon, delta=0.0, mechanism="laplace")
        return fitness_by_kappa(
            learner, public, counts=(200, 200, 200), privacy=privacy, clients=clients
        )

    strict, loose = choice(0.3), choice(300.0)
    assert set(strict) == set(loose) == set(KAPPAS)
    assert min(strict, key=strict.__getitem__) < min(loose, key=loose.__getitem__), (
        "more noise, smaller steps"
    )
    x, y = (part.numpy() for part in public.pooled())
    theta = Ridge(alpha=1e-3 * len(y), fit_intercept=False).fit(x, y).coef_
    assert min(loose.values()) < 1.1 * fitness("squared", x, y, 1e-3, theta)


def test_slopes_are_those_of_power_laws() -> None:
    x = [1.0, 3.0, 10.0, 30.0]
    exact = log_log_slope(x, [5 * v**-2 for v in x])
    assert (exact.slope, exact.low, exact.high) == (pytest.approx(-2),) * 3
    hits, rng = 0, np.random.default_rng(0)
    for _ in range(300):
        found = log_log_slope(x, [5 * v**-2 * math.exp(0.2 * rng.normal()) for v in x])
        hits += found.low <= -2 <= found.high
    assert 300 * 0.95 - 6 * math.sqrt(300 * 0.95 * 0.05) < hits < 300


LIMIT = (
    2 * (5.0 * 3.0 + 3.0) * 3.0
)  # of every gradient: rows and targets are within 3, the model within 5


def mean_psi(data: LinearData, epsilon: float, kappa: float = 3.0) -> float:
    learner = AsyncLearner(reg=1e-3, theta_max=5.0, kappa=kappa, feature_norm=3.0, target=3.0)
    privacy = RecordPrivacy(clip_norm=LIMIT, epsilon=epsilon, delta=0.0, mechanism="laplace")
    rng = np.random.default_rng(0)
    ticks = np.repeat(np.arange(len(data.x)), 8)
    clients = torch.from_numpy(np.stack([rng.permutation(ticks) for _ in range(300)]))
    theta = simulate(learner, data, privacy, clients)
    assert float(theta.abs().max()) < 4.9, "the box is not reached"
    floor = simulate(learner, data, None, clients)
    together = Collaboration(learner, data)
    moved = (
        torch.from_numpy(together.optimum.theta) + theta - floor
    )  # what noise alone does, at the minimizer
    return float(together.psi(moved).mean())


def test_the_cost_of_privacy_falls_with_the_squares_of_budgets_and_of_records() -> None:
    budgets = [20.0, 40.0, 80.0]
    slope = log_log_slope(budgets, [mean_psi(owners(3, 200), e) for e in budgets]).slope
    assert slope == pytest.approx(-2, abs=1e-3)  # the same noise, scaled: the updates are linear
    sizes = [100, 300, 900]
    slope = log_log_slope(sizes, [mean_psi(owners(3, n), 20.0) for n in sizes]).slope
    assert slope == pytest.approx(-2, abs=0.1)


@pytest.mark.parametrize("frequencies", [(1.0, 2.0, 0.5), None])
def test_weighted_answers_are_those_of_a_loop(frequencies) -> None:
    data, reg, a, n = owners(3, 7), 0.05, 0.08, 3
    clients = np.random.default_rng(1).integers(-1, n, (2, 30))
    learner = Weighted(reg=reg, step_size=a, frequencies=frequencies)
    found = simulate(learner, data, None, torch.from_numpy(clients)).numpy()
    for run, order in zip(found, clients.tolist(), strict=True):
        central, own, events = np.zeros(3), np.zeros((n, 3)), np.zeros(n)
        for i in order:
            if i < 0:
                continue
            events[i] += 1
            x, y = data.x[i].numpy(), data.y[i].numpy()
            tbar = (central + own[i]) / 2
            frequency = (
                (events[i] + 1) / (events.sum() + n)
                if frequencies is None
                else frequencies[i] / 3.5
            )
            answer = 2 * x.T @ (x @ tbar - y) / len(y) / (n * frequency)
            own[i] = tbar - a * n * (2 * reg * tbar / (2 * n) + answer / n)
            central = tbar - a / 2 * 2 * reg * tbar
        assert np.allclose(run, central, rtol=1e-10)


@pytest.mark.parametrize("theta_max", [0.1, 0.7, 20.0])
@pytest.mark.parametrize("reg", [5e-6, 1e-2])
def test_minimizers_of_hinges_are_those_of_a_quadratic_program(
    theta_max: float, reg: float
) -> None:
    data = owners(1, 60, p=4)
    x, y = data.x[0].numpy() * np.linspace(0.6, 4, 4), data.y[0].sign().numpy()
    found = minimize_hinge(x, y, 2 * reg, box=theta_max)
    n, p, signed = *x.shape, x * y[:, None]
    assert found.value == pytest.approx(fitness("hinge", x, y, reg, found.theta), rel=1e-12)
    assert 0 <= found.gap <= 1e-8
    assert np.abs(found.theta).max() <= theta_max
    # min reg |t|^2 + mean s with s >= 1 - signed t, s >= 0: lower bounds by linear programs with cuts of the square
    cuts = [np.zeros(p)]
    for _ in range(200):
        rows = [np.concatenate([-signed, -np.eye(n), np.zeros((n, 1))], axis=1)]
        rows += [np.concatenate([2 * c, np.zeros(n), [-1.0]])[None] for c in cuts]
        solved = optimize.linprog(
            np.concatenate([np.zeros(p), np.full(n, 1 / n), [reg]]),
            A_ub=np.vstack(rows),
            b_ub=np.concatenate([-np.ones(n), [c @ c for c in cuts]]),
            bounds=[(-theta_max, theta_max)] * p + [(0, None)] * (n + 1),
        )
        cuts.append(solved.x[:p])
        if fitness("hinge", x, y, reg, cuts[-1]) - solved.fun < 1e-8:
            break
    assert solved.fun - 1e-7 <= found.value <= solved.fun + 1e-7


def test_hard_hinges_are_certified_and_no_finite_records_end_in_numbers_that_are_not_finite() -> (
    None
):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3))
    x = np.concatenate([x, x[:, :1] + 1e-9 * x[:, 1:2]], 1)  # collinear
    y = np.sign(x[:, 0] + 0.3)  # separable
    for box in (1.0, 100.0):
        found = minimize_hinge(x, y, 2e-5, box)
        assert found.gap <= 1e-8 * (1 + found.value)
