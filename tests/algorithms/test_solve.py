"""The solver of regularized linear models against scikit-learn, SciPy, quadrature and optimality conditions."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize

from fedmtl.algorithms.linear import solve
from fedmtl.algorithms.linear.data import LinearLoss
from fedmtl.algorithms.linear.solve import Objective, fit_own, minimize, solve_regularized
from fedmtl.errors import ConfigError

from .p2p_harness import mean_gradient

Array = NDArray[np.float64]


def records(loss: str, n: int = 120, p: int = 4, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) * np.linspace(0.3, 2, p)
    y = x @ rng.normal(size=p) + rng.normal(size=n)
    return x, y if loss == "squared" else np.where(y > 0, 1.0, -1.0)


def fitness(loss: str, x: Array, y: Array, reg: float, theta: Array) -> float:
    m = x @ theta
    each = {"squared": (y - m) ** 2, "logistic": np.logaddexp(0, -y * m)}[loss]
    return float(each.mean() + reg * theta @ theta)


# The whole loss


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("theta_max", [0.05, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_minimizers_at_the_box_are_those_of_scipy(loss, theta_max, seed) -> None:
    x, y = records(loss, seed=seed)
    found = minimize(LinearLoss(loss), x, y, 2 * 1e-3, box=theta_max)
    theta = found.theta
    assert found.value == pytest.approx(fitness(loss, x, y, 1e-3, theta), rel=1e-12)
    assert np.abs(theta).max() <= theta_max
    assert found.gap <= 1e-12
    if loss == "squared":
        rows = np.vstack([x / math.sqrt(len(y)), math.sqrt(1e-3) * np.eye(4)])
        right = np.concatenate([y / math.sqrt(len(y)), np.zeros(4)])
        other = optimize.lsq_linear(
            rows, right, (-theta_max, theta_max), method="bvls", tol=1e-14
        ).x
    else:
        other = optimize.minimize(
            lambda t: (
                fitness(loss, x, y, 1e-3, t),
                2e-3 * t - x.T @ (y / (1 + np.exp(y * (x @ t)))) / len(y),
            ),
            np.zeros(4),
            jac=True,
            bounds=[(-theta_max, theta_max)] * 4,
            method="L-BFGS-B",
            options={"gtol": 1e-12, "ftol": 1e-16, "maxiter": 5000},
        ).x
    assert np.allclose(theta, other, rtol=1e-8 if loss == "squared" else 1e-5, atol=1e-9)
    assert found.value <= fitness(loss, x, y, 1e-3, other) + 1e-12


@pytest.mark.parametrize("bound", [0.1, 0.6, 9.0, math.inf])
def test_the_gap_bounds_what_is_missing_at_every_iteration(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    reg = 0.15
    for seed in range(5):
        x, y = records("logistic", n=20, p=5, seed=seed)
        x = 3 * x
        bounds = None if bound == math.inf else [(-bound, bound)] * 5
        least = optimize.minimize(
            lambda t, x=x, y=y: fitness("logistic", x, y, reg, t),
            np.zeros(5),
            bounds=bounds,
            method="L-BFGS-B",
            tol=1e-15,
        ).fun
        gaps = []
        for steps in (0, 1, 2, 50):
            monkeypatch.setattr(solve, "_STEPS", steps)
            found = minimize(LinearLoss("logistic"), x, y, 2 * reg, box=bound)
            assert found.gap >= found.value - least - 1e-12
            gaps.append(float(found.gap))
        assert gaps[0] > 1e-3
        assert gaps[-1] < 1e-12


def test_hard_problems_are_certified_too() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3))
    x = np.concatenate([x, x[:, :1] + 1e-9 * x[:, 1:2]], 1)  # collinear
    y = np.sign(x[:, 0] + 0.3)  # separable
    for loss in ("squared", "logistic"):
        for box in (1.0, 100.0):
            found = minimize(LinearLoss(loss), x, y, 2e-5, box=box)
            assert found.gap <= 1e-8 * (1 + found.value), (loss, box)
    one = minimize(LinearLoss("squared"), x[:1], y[:1], 2.0, box=9.0)
    np.testing.assert_allclose(one.theta, x[0] * y[0] / (1 + x[0] @ x[0]), rtol=1e-12)
    with pytest.raises(ConfigError, match="not finite"):
        minimize(LinearLoss("squared"), x * math.nan, y, 2.0)
    with pytest.raises(ConfigError, match="n >= 1"):
        minimize(LinearLoss("squared"), x[:0], y[:0], 2.0)
    with pytest.raises(
        ConfigError,
        match=r"minimize\.loss is 'hinge'; accepted: 'squared', 'half_squared', 'logistic'",
    ):
        minimize(LinearLoss("hinge"), x, y, 1.0)
    with pytest.raises(ConfigError, match=r"minimize\.ridge is 0"):
        minimize(LinearLoss("squared"), x, y, 0.0)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("box", [1.0, math.inf])
def test_no_finite_records_make_it_raise_or_end_in_numbers_that_are_not_finite(
    loss: str, box: float
) -> None:
    rng = np.random.default_rng(0)
    for size in (0.0, 1e-200, 1e15, 1e100, 1e200, 1.7e308):
        for rows in (
            rng.choice([-1.0, 1.0], (6, 3)),
            np.ones((6, 3)),
            np.ones((1, 3)),
            np.eye(6, 3),
        ):
            for y in (
                np.ones(len(rows)),
                rng.choice([-1.0, 1.0], len(rows)) * (size if loss == "squared" else 1.0),
            ):
                for ridge in (1e-12, 1.0):
                    found = minimize(LinearLoss(loss), size * rows, y, ridge, box=box)
                    assert np.isfinite(found.theta).all()
                    assert np.abs(found.theta).max() <= box


@pytest.mark.parametrize(
    "shape", [(30, 4), (3, 9)]
)  # of (3, 9) the minimizer is sought in the span of the rows
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_several_bases_on_the_same_records_are_each_alone(
    loss: str, shape: tuple[int, int]
) -> None:
    x, y = records(loss, *shape)
    bases, tau = np.random.default_rng(1).normal(size=(5, shape[1])), 0.3
    own = fit_own(
        LinearLoss(loss),
        torch.from_numpy(x),
        torch.from_numpy(y),
        torch.from_numpy(bases),
        tau,
        "frobenius",
    )
    for k, base in enumerate(bases):
        alone = minimize(LinearLoss(loss), x, y, tau, base=base)
        np.testing.assert_array_equal(own[k].numpy(), alone.theta)
        if loss == "squared":
            exact = np.linalg.solve(
                2 * x.T @ x / len(x) + tau * np.eye(shape[1]), 2 * x.T @ (y - x @ base) / len(x)
            )
            np.testing.assert_allclose(alone.theta, exact, atol=1e-10)
        left = mean_gradient(loss, x, y, base + alone.theta) + tau * alone.theta
        assert np.linalg.norm(left) < 1e-9
        assert float(alone.value) == pytest.approx(
            fitness(loss, x, y, 0.0, base + alone.theta) + tau / 2 * alone.theta @ alone.theta
        )


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_second_derivatives_are_those_of_the_slopes(loss: str) -> None:
    m, y = np.array([-2.3, -0.4, 0.31, 0.96, 4.0]), np.array([1.0, -1.0, 1.0, 1.0, -1.0])
    at = Objective(LinearLoss(loss), np.ones((5, 1)), y, ridge=0.0).losses
    (low, slope_low, _), (high, slope_high, _), step = at(m - 1e-6), at(m + 1e-6), 2e-6
    np.testing.assert_allclose((high - low) / step, at(m)[1], atol=1e-6)
    np.testing.assert_allclose((slope_high - slope_low) / step, at(m)[2], atol=1e-6)


# Linear systems


def test_systems_that_rounding_makes_singular_have_the_solution_zero():
    ones = torch.ones(2, 2, dtype=torch.float64)
    good = torch.eye(2, dtype=torch.float64) * 4
    found = solve_regularized(torch.stack([ones, good]), torch.ones(2, 2, dtype=torch.float64))
    assert torch.equal(found, torch.tensor([[0.0, 0.0], [0.25, 0.25]], dtype=torch.float64))
    assert torch.equal(
        solve_regularized(ones, torch.ones(2, 1, dtype=torch.float64)), torch.zeros(2, 1).double()
    )
    assert torch.equal(
        solve_regularized(good, torch.ones(2, dtype=torch.float64)), torch.full((2,), 0.25).double()
    )


# A norm as the penalty


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("tau", [1e-3, 0.1, 50.0])
@pytest.mark.parametrize("apart", [False, True])
def test_a_fit_in_the_norm_meets_the_conditions_of_its_minimum(
    loss: str, tau: float, apart: bool, monkeypatch
) -> None:
    """The gradient of the loss is -tau q / ||q||, or no longer than tau at q = 0; few gradients are computed, also
    where a plane separates the records."""
    x, y = records(loss)
    if apart and loss == "logistic":
        y = np.where(x[:, 0] > 0, 1.0, -1.0)
    base, computed, whole = np.array([0.3, -0.2, 0.1, 0.0]), [], Objective.at

    def counted(self, theta):
        computed.append(theta)
        return whole(self, theta)

    monkeypatch.setattr(Objective, "at", counted)
    arrays = (torch.from_numpy(each) for each in (x, y, base))
    q = fit_own(LinearLoss(loss), *arrays, tau, "l2").numpy()
    assert len(computed) < 400
    factors = (
        2 * (x @ (base + q) - y) if loss == "squared" else -y / (1 + np.exp(y * (x @ (base + q))))
    )
    gradient, length = factors @ x / len(y), np.linalg.norm(q)
    if tau == 50.0:
        assert length == 0
        assert np.linalg.norm(gradient) <= tau
    else:
        assert np.linalg.norm(gradient + tau * q / length) < 1e-9
