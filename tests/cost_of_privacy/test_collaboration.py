"""What the study of the cost of privacy computes: psi, its forecast, slopes, and weights of owners."""

import math

import numpy as np
import pytest
import torch
from collaboration import Collaboration, Fitness, fit_forecast, log_log_slope, spread, triangle
from hinge import Hinges, minimize_hinge
from scipy import optimize
from simulate import simulate
from sklearn.linear_model import Ridge
from weighted import Weighted

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.errors import ConfigError
from fedmtl.privacy import RecordPrivacy
from tests.cost_of_privacy.test_simulate import owners


def records(loss: str, n: int = 120, p: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) * np.linspace(0.3, 2, p)
    y = x @ rng.normal(size=p) + rng.normal(size=n)
    return torch.from_numpy(x), torch.from_numpy(y if loss == "squared" else np.where(y > 0, 1.0, -1.0))


def fitness(loss: str, x: np.ndarray, y: np.ndarray, reg: float, theta: np.ndarray) -> float:
    m = x @ theta
    losses = {"squared": (y - m) ** 2, "hinge": np.maximum(0, 1 - y * m), "logistic": np.logaddexp(0, -y * m)}[loss]
    return float(losses.mean() + reg * theta @ theta)


def test_a_triangle_keeps_every_sum_of_squares() -> None:
    x, y = (v.numpy() for v in records("squared", n=50))
    a, b = triangle(x, y)
    assert a.shape == (5, 4)
    for theta in np.random.default_rng(0).normal(size=(5, 4)):
        assert ((a @ theta - b) ** 2).sum() == pytest.approx(((x @ theta - y) ** 2).sum(), rel=1e-12)


@pytest.mark.parametrize("loss", ["squared", "hinge", "logistic"])
def test_psi_is_the_relative_fitness(loss: str) -> None:
    x, y = records(loss)
    f = Fitness(x, y, LinearLoss(loss), 1e-3, 5.0)
    theta = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = [[fitness(loss, x.numpy(), y.numpy(), 1e-3, t) for t in row] for row in theta.numpy()]
    assert np.allclose(f(theta).numpy(), expected, rtol=1e-12)
    assert np.allclose(f.psi(theta).numpy(), np.array(expected) / f.optimum.fitness - 1, rtol=1e-12)
    assert float(f.psi(f.optimum.theta)) == pytest.approx(0, abs=1e-12)
    near = f.optimum.theta + 1e-3 * torch.randn(20, 4, dtype=torch.float64)
    assert float(f.psi(near).min()) > -1e-9


def test_psi_needs_a_fitness_above_zero() -> None:
    nothing = Fitness(torch.ones(3, 1).double(), torch.zeros(3).double(), LinearLoss("squared"), 1.0, 1.0)
    with pytest.raises(ConfigError, match="is 0"):
        nothing.psi(torch.zeros(1, dtype=torch.float64))


def test_the_forecast_recovers_its_constants() -> None:
    rng, c1, c2 = np.random.default_rng(0), 30.0, 5e5
    settings = [(n, [e] * owners) for n in (300, 3000, 30000) for e in (0.3, 3.0, 30.0) for owners in (2, 10)]
    law = np.array(
        [c1 / n * math.sqrt(sum(1 / e**2 for e in es)) + c2 / n**2 * sum(1 / e**2 for e in es) for n, es in settings]
    )
    n, epsilons = zip(*settings, strict=True)
    fitted = fit_forecast(n, epsilons, law)
    assert (fitted.c1, fitted.c2) == (pytest.approx(c1, rel=1e-9), pytest.approx(c2, rel=1e-9))
    assert fitted.error < 1e-12
    assert fitted(500, [1.0, 2.0]) == pytest.approx(c1 / 500 * math.sqrt(1.25) + c2 / 500**2 * 1.25)
    assert fitted(500, [1.0, math.inf]) == pytest.approx(c1 / 500 + c2 / 500**2)
    noisy = fit_forecast(n, epsilons, law * np.exp(0.05 * rng.normal(size=law.size)))
    assert noisy.c1 == pytest.approx(c1, rel=0.15)
    assert noisy.c2 == pytest.approx(c2, rel=0.15)
    assert 0.02 < noisy.error < 0.1
    square = fit_forecast(n, epsilons, [5.0 * spread(a, b) ** 2 for a, b in settings])
    assert (square.c1, square.c2) == (pytest.approx(0, abs=1e-9), pytest.approx(5.0))
    # the minimum of the relative errors, by a general solver
    values = law * np.exp(rng.normal(size=law.size))
    u = np.array([spread(*s) for s in settings])

    def relative(c):
        return np.sum(((c[0] ** 2 * u + c[1] ** 2 * u**2 * 1e4) / values - 1) ** 2)

    general = optimize.minimize(
        relative, [3.0, 3.0], method="Nelder-Mead", options={"maxiter": 9999, "xatol": 1e-10, "fatol": 1e-12}
    )
    fitted = fit_forecast(n, epsilons, values)
    assert fitted.error**2 * law.size == pytest.approx(general.fun, rel=1e-6)
    for wrong in (([1], [[1.0]], [1.0]), ([1, 2], [[1.0], [1.0]], [0.0, 1.0]), ([1, 2], [[1.0], [0.0]], [1.0, 1.0])):
        with pytest.raises(ConfigError):
            fit_forecast(*wrong)
    with pytest.raises(ConfigError, match="infinite"):
        fit_forecast([1, 2], [[math.inf], [math.inf]], [1.0, 1.0])


def test_slopes_are_those_of_power_laws() -> None:
    x = [1.0, 3.0, 10.0, 30.0]
    exact = log_log_slope(x, [5 * v**-2 for v in x])
    assert (exact.slope, exact.low, exact.high) == (pytest.approx(-2),) * 3
    hits, rng = 0, np.random.default_rng(0)
    for _ in range(300):
        found = log_log_slope(x, [5 * v**-2 * math.exp(0.2 * rng.normal()) for v in x])
        hits += found.low <= -2 <= found.high
    assert 300 * 0.95 - 6 * math.sqrt(300 * 0.95 * 0.05) < hits < 300
    with pytest.raises(ConfigError, match="3 pairs"):
        log_log_slope([1, 2], [1, 2])


LIMIT = 2 * (5.0 * 3.0 + 3.0) * 3.0  # of every gradient: rows and targets are within 3, the model within 5


def mean_psi(data: LinearData, epsilon: float, kappa: float = 3.0) -> float:
    learner = AsyncLearner(reg=1e-3, theta_max=5.0, kappa=kappa, row_norm=3.0, target=3.0)
    privacy = RecordPrivacy(clip_norm=LIMIT, epsilon=epsilon, delta=0.0, mechanism="laplace")
    rng = np.random.default_rng(0)
    ticks = np.repeat(np.arange(len(data.x)), 8)
    clients = torch.from_numpy(np.stack([rng.permutation(ticks) for _ in range(300)]))
    theta = simulate(learner, data, privacy, clients)
    assert float(theta.abs().max()) < 4.9, "the box is not reached"
    floor = simulate(learner, data, None, clients)
    together = Collaboration(learner, data).together
    moved = together.optimum.theta + theta - floor  # what noise alone does, at the minimizer
    return float(together.psi(moved).mean())


def test_the_cost_of_privacy_falls_with_the_squares_of_budgets_and_of_records() -> None:
    budgets = [20.0, 40.0, 80.0]
    slope = log_log_slope(budgets, [mean_psi(owners(3, 200), e) for e in budgets]).slope
    assert slope == pytest.approx(-2, abs=1e-3)  # the same noise, scaled: the updates are linear
    sizes = [100, 300, 900]
    slope = log_log_slope(sizes, [mean_psi(owners(3, n), 20.0) for n in sizes]).slope
    assert slope == pytest.approx(-2, abs=0.1)


@pytest.mark.parametrize("frequencies", [(6.0, 1.0, 1.0, 1.0), None])
def test_weights_correct_what_owners_who_answer_often_do(frequencies) -> None:
    reg, data = 0.5, owners(4, 12)
    x, y = (part.numpy() for part in data.pooled())
    expected = Ridge(alpha=reg * len(y), fit_intercept=False, solver="cholesky").fit(x, y).coef_
    rng = np.random.default_rng(0)
    round_of = np.array([0, 0, 0, 0, 0, 0, 1, 2, 3])
    clients = torch.from_numpy(np.concatenate([rng.permutation(round_of) for _ in range(2000)]))[None]
    gaps = []
    for kind in (AsyncLearner, Weighted):
        extra = {"frequencies": frequencies} if kind is Weighted else {}
        end = simulate(kind(reg=reg, step_size=0.002, **extra), data, None, clients)[0].numpy()
        gaps.append(np.linalg.norm(end - expected) / np.linalg.norm(expected))
    assert gaps[1] < 0.04
    assert gaps[0] > 3 * gaps[1]


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
            frequency = (events[i] + 1) / (events.sum() + n) if frequencies is None else frequencies[i] / 3.5
            answer = 2 * x.T @ (x @ tbar - y) / len(y) / (n * frequency)
            own[i] = tbar - a * n * (2 * reg * tbar / (2 * n) + answer / n)
            central = tbar - a / 2 * 2 * reg * tbar
        assert np.allclose(run, central, rtol=1e-10)


@pytest.mark.parametrize("theta_max", [0.1, 0.7, 20.0])
@pytest.mark.parametrize("reg", [5e-6, 1e-2])
def test_minimizers_of_hinges_are_those_of_a_quadratic_program(theta_max: float, reg: float) -> None:
    x, y = (part.numpy() for part in records("hinge", n=60))
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


def test_hard_hinges_are_certified_and_no_finite_records_end_in_numbers_that_are_not_finite() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3))
    x = np.concatenate([x, x[:, :1] + 1e-9 * x[:, 1:2]], 1)  # collinear
    y = np.sign(x[:, 0] + 0.3)  # separable
    for box in (1.0, 100.0):
        found = minimize_hinge(x, y, 2e-5, box)
        assert found.gap <= 1e-8 * (1 + found.value)


def test_second_derivatives_of_smoothed_hinges_are_those_of_the_slopes() -> None:
    m, y = np.array([-2.3, -0.4, 0.31, 0.96, 4.0]), np.array([1.0, -1.0, 1.0, 1.0, -1.0])
    smooth = Hinges(LinearLoss("hinge"), np.zeros((5, 1)), y, 0.0, width=0.2)
    (low, slope_low, _), (high, slope_high, _), step = *map(smooth.losses, (m - 1e-6, m + 1e-6)), 2e-6
    _, slope, bend = smooth.losses(m)
    np.testing.assert_allclose((high - low) / step, slope, atol=1e-6)
    np.testing.assert_allclose((slope_high - slope_low) / step, bend, atol=1e-6)
