"""Averages of own models for the losses of Huber, of a quantile and of counts: fits of other programs, and refits."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import QuantileRegressor

from fedmtl.contrib.average import average_numbers
from fedmtl.contrib.average.fits import LossRecords
from fedmtl.contrib.average.fits import minimize as fitted
from fedmtl.contrib.average.losses import average_of_loss
from fedmtl.contrib.average.numbers import SLOPE_RIDGES, Records
from fedmtl.local.losses import Huber, Poisson, Quantile

HIGH = 30.0


def rows(n: int, d: int, seed: int = 0):
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (n, d))
    return x, 0.5 + x @ random.normal(size=d) * 0.4 + 0.2 * random.standard_t(2, n), random


def value(loss, outputs, y):
    """The loss of records, by hand."""
    if isinstance(loss, Huber):
        errors = np.abs(outputs - y)
        corner = loss.delta
        return np.where(errors < corner, errors**2 / 2, corner * (errors - corner / 2)).sum()
    if isinstance(loss, Quantile):
        return np.where(
            y > outputs, loss.level * (y - outputs), (1 - loss.level) * (outputs - y)
        ).sum()
    return (np.exp(outputs) - y * outputs).sum()


@pytest.mark.parametrize(("n", "d"), [(3, 4), (5, 2), (1, 3), (4, 8)])
def test_a_huber_loss_without_outliers_is_the_squared_error(n, d):
    # up to five records, so that five folds leave one record out at a time
    x, y, _ = rows(n, d)
    found = average_of_loss(x, y, Huber(1e6), True, np.arange(n) % 5, limit=1.0)
    expected, _ = average_numbers(x, y, np.zeros(d + 1), True, np.inf, 1.0)
    np.testing.assert_allclose(found, expected, atol=1e-8)


@pytest.mark.parametrize("loss", [Huber(0.1), Poisson(), Poisson(mapped=True)])
def test_fits_are_the_least_of_the_objective(loss):
    x, y, random = rows(40, 4)
    counts = random.poisson(np.exp(y.clip(-1, 2))).astype(float)
    stored, targets = y, y
    if isinstance(loss, Poisson):
        stored = targets = counts
        if loss.mapped:
            stored, targets = 2 * counts / HIGH - 1, counts / HIGH
    own = LossRecords.of(Records.of(x, stored, True, np.inf), loss, HIGH)
    found = fitted(own, np.ones((1, 40), bool), own.penalties(0.0), np.zeros(40))[0]
    for model, ridge in zip(found[:-1], SLOPE_RIDGES[:-1], strict=True):

        def objective(point, ridge=ridge):
            return value(loss, own.z @ point, targets) + ridge / 2 * (point[:-1] ** 2).sum()

        least = minimize(objective, np.zeros(5), method="BFGS").fun
        assert objective(model) == pytest.approx(least, abs=2e-5)


def test_a_quantile_is_that_of_linear_programs():
    x, y, _ = rows(60, 3)
    own = LossRecords.of(Records.of(x, y, True, np.inf), Quantile(0.8), HIGH)
    found = fitted(own, np.ones((1, 60), bool), own.penalties(0.0), np.zeros(60))[0, 0]
    program = QuantileRegressor(quantile=0.8, alpha=0.0).fit(own.z[:, :-1], y)
    least = value(Quantile(0.8), program.predict(own.z[:, :-1]), y)
    assert value(Quantile(0.8), own.z @ found, y) == pytest.approx(least, rel=5e-3)


@pytest.mark.parametrize("loss", [Huber(0.1), Quantile(0.7), Poisson()])
def test_slopes_that_explain_the_target_are_kept_and_noise_is_not(loss):
    random = np.random.default_rng(1)
    x = random.uniform(-1, 1, (40, 3))
    y = 1.5 * x[:, 0]
    other = random.permutation(y)
    if isinstance(loss, Poisson):
        y, other = (random.poisson(np.exp(1 + v)).astype(float) for v in (y, other))
    fold = np.arange(40) % 5
    kept, none = (average_of_loss(x, target, loss, True, fold) for target in (y, other))
    assert abs(kept[0]) > 1.2
    assert np.abs(none[:3]).max() < 0.4


def test_clients_without_a_count_have_half_a_one():
    x, _, _ = rows(4, 3)
    found = average_of_loss(x, np.zeros(4), Poisson(), True, np.arange(4))
    np.testing.assert_allclose(found, [0, 0, 0, np.log(0.5 / 4)], atol=1e-6)
    mapped = average_of_loss(x, -np.ones(4), Poisson(mapped=True), True, np.arange(4), high=HIGH)
    np.testing.assert_allclose(mapped[-1], np.log(0.5 / 4 / HIGH), atol=1e-6)
