"""The cost of privacy, its forecast, and the value of collaboration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from sklearn.linear_model import Ridge

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.async_learner.collaboration import (
    Collaboration,
    Fitness,
    Forecast,
    choose_kappa,
    fit_forecast,
    log_log_slope,
    simulate,
    spread,
)
from fedmtl.algorithms.async_learner.fitness import triangle
from fedmtl.algorithms.linear.data import DomainBound, LinearData, LinearLoss
from fedmtl.errors import BudgetExhausted, ConfigError, DataError
from fedmtl.privacy import RecordPrivacy


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


def owners(count: int, n: int, *, p: int = 3, seed: int = 0) -> LinearData:
    rng = np.random.default_rng(seed)
    truth = rng.uniform(-0.5, 0.5, p)
    x = [torch.from_numpy(rng.uniform(-1, 1, (n, p))) for _ in range(count)]
    y = [v @ torch.from_numpy(truth) + torch.from_numpy(rng.uniform(-1, 1, n)) for v in x]
    return LinearData(tuple(x), tuple(y), False)


DOMAIN = DomainBound(3.0, y=3.0)


def mean_psi(data: LinearData, epsilon: float, kappa: float = 3.0) -> float:
    learner = AsyncLearner(reg=1e-3, theta_max=5.0, kappa=kappa, bound="domain", domain=DOMAIN)
    privacy = RecordPrivacy(clip_norm=learner.xi, epsilon=epsilon, delta=0.0, mechanism="laplace")
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


def test_collaboration_is_worth_it_where_its_forecast_beats_the_own_model() -> None:
    rng = np.random.default_rng(0)
    sizes, truth = (8, 400), np.array([0.5, -0.5, 0.2])
    x = [torch.from_numpy(rng.uniform(-1, 1, (n, 3))) for n in sizes]
    y = [v @ torch.from_numpy(truth) + torch.from_numpy(0.5 * rng.normal(size=len(v))) for v in x]
    group = Collaboration(AsyncLearner(reg=1e-3), LinearData(tuple(x), tuple(y), False))
    pooled = Ridge(alpha=1e-3 * 408, fit_intercept=False).fit(torch.cat(x).numpy(), torch.cat(y).numpy()).coef_
    all_x, all_y = torch.cat(x).numpy(), torch.cat(y).numpy()
    forecast = Forecast(0.0, 10.0)
    worths = []
    for owner, n in enumerate(sizes):
        own = Ridge(alpha=1e-3 * n, fit_intercept=False).fit(x[owner].numpy(), y[owner].numpy()).coef_
        expected = fitness("squared", all_x, all_y, 1e-3, own) / fitness("squared", all_x, all_y, 1e-3, pooled) - 1
        worth = group.is_collaboration_worth(owner, forecast, [0.1, 0.2])
        assert worth.alone == pytest.approx(expected, rel=1e-6)
        assert worth.together == pytest.approx(10 / 408**2 * (100 + 25))
        worths.append(worth.worth)
    assert worths == [True, False]
    assert not group.is_collaboration_worth(0, forecast, [1e-3, 0.2]).worth
    with pytest.raises(ConfigError, match=r"0 \.\. 1"):
        group.is_collaboration_worth(2, forecast, [1.0, 1.0])
    with pytest.raises(ConfigError, match="3 epsilons"):
        group.is_collaboration_worth(0, forecast, [1.0, 1.0, 1.0])
    with pytest.raises(DataError, match="two classes"):
        Collaboration(AsyncLearner(loss="hinge"), group.data).together  # noqa: B018


def test_kappa_is_chosen_by_noisy_simulation_on_public_rows() -> None:
    public = owners(1, 500, seed=1)
    learner = AsyncLearner(reg=1e-3, theta_max=2.0)
    rng = np.random.default_rng(0)
    clients = torch.from_numpy(np.stack([rng.permutation(np.repeat(np.arange(3), 10)) for _ in range(40)]))

    def choice(epsilon: float):
        privacy = RecordPrivacy(clip_norm=5.0, epsilon=epsilon, delta=0.0, mechanism="laplace")
        return choose_kappa(learner, public, counts=(200, 200, 200), privacy=privacy, clients=clients)

    strict, loose = choice(0.3), choice(300.0)
    for found in (strict, loose):
        assert set(found.psi) == {1.0, 2.0, 5.0, 10.0, 20.0, 40.0}
        assert found.psi[found.kappa] == min(found.psi.values())
    assert strict.kappa < loose.kappa, "more noise, smaller steps"
    assert loose.psi[loose.kappa] < 0.05
    with pytest.raises(ConfigError, match="candidate"):
        choose_kappa(learner, public, counts=(2,), privacy=None, clients=clients, kappas=())
    with pytest.raises(ConfigError, match="counts"):
        choose_kappa(learner, public, counts=(2, 0, 1), privacy=None, clients=clients)


def test_simulations_respect_caps() -> None:
    data, clients = owners(3, 20), torch.zeros(2, 5, dtype=torch.int64)
    privacy = RecordPrivacy(clip_norm=5.0, epsilon=1.0, delta=0.0, mechanism="laplace")
    assert simulate(AsyncLearner(), data, privacy, clients).shape == (2, 3)
    with pytest.raises(BudgetExhausted):
        simulate(AsyncLearner(cap=4), data, privacy, clients)
    with pytest.raises(BudgetExhausted):
        simulate(AsyncLearner(), data, privacy, clients, caps=np.array([4, 9, 9]))
    caps = np.array([3, 3, 3])
    clients = torch.tensor([[0, 1, 0, 0, 0, 1], [2, 1, 0, 1, 2, 0]])  # the first repetition ends before its last 0
    ended = torch.tensor([[0, 1, 0, 0, -1, -1], [2, 1, 0, 1, 2, 0]])
    short = simulate(AsyncLearner(), data, privacy, clients, caps=caps, shorten=True)
    assert torch.equal(short, simulate(AsyncLearner(), data, privacy, ended, caps=caps))


def test_kappa_is_chosen_where_the_budget_ends_a_run() -> None:
    """A fixed noise and a budget: fewer answers than the schedule has."""
    data, clients = owners(3, 20), torch.arange(12)[None] % 3
    privacy = RecordPrivacy(clip_norm=5.0, epsilon=3.0, noise_multiplier=3.0, delta=1e-5)
    chosen = choose_kappa(
        AsyncLearner(), data, counts=(9, 9, 9), privacy=privacy, clients=clients.expand(2, -1), caps=np.full(3, 9)
    )
    assert all(math.isfinite(psi) for psi in chosen.psi.values())
