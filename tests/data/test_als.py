"""Item features by alternating least squares, against plain loops and the gradient of the objective."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from fedmtl.data.readers import als
from fedmtl.data.readers.als import als_features, ridge_rows
from fedmtl.errors import ConfigError, DataError


def some_ratings(users=30, items=12, seed=0):
    """A rank-2 matrix with noise, 60% of it known; item 5 and user 7 have no entry, and one stored entry is 0."""
    rng = np.random.default_rng(seed)
    full = rng.normal(size=(users, 2)) @ rng.normal(size=(2, items)) + 0.1 * rng.normal(
        size=(users, items)
    )
    known = rng.random((users, items)) < 0.6
    known[:, 5] = known[7] = False
    known[0, 0], full[0, 0] = True, 0.0
    row, column = np.nonzero(known)
    return csr_array((full[row, column], (row, column)), shape=(users, items)), full, known


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_every_row_is_a_ridge_regression_on_its_own_entries(monkeypatch, block):
    monkeypatch.setattr(als, "_BLOCK", block)
    ratings, full, known = some_ratings()
    v = np.random.default_rng(1).normal(size=(12, 3))
    expected = np.zeros((30, 3))
    for i in range(30):
        own = v[known[i]]  # the stored 0 is an equation of its own
        expected[i] = np.linalg.solve(own.T @ own + 0.7 * np.eye(3), own.T @ full[i, known[i]])
    np.testing.assert_allclose(ridge_rows(ratings, v, 0.7), expected, rtol=1e-10, atol=1e-12)
    assert (expected[7] == 0).all()


def test_sweeps_end_at_a_stationary_point_and_entries_have_deviation_one():
    ratings, full, known = some_ratings()
    features = als_features(ratings, 2, reg=0.5, sweeps=400, seed=3)
    assert (features[5] == 0).all()
    rated = np.delete(features, 5, axis=0)
    assert rated.std() == pytest.approx(1)

    # at a stationary point ||U||_F = ||V||_F, which gives back the factor that was divided out
    def misfit(log_scale):
        v = features * np.exp(log_scale)
        return np.linalg.norm(ridge_rows(ratings, v, 0.5)) - np.linalg.norm(v)

    from scipy.optimize import brentq

    v = features * np.exp(brentq(misfit, -6, 6, xtol=1e-13))
    u = ridge_rows(ratings, v, 0.5)
    residual = np.where(known, u @ v.T - full, 0)
    assert np.abs(residual.T @ u + 0.5 * v).max() < 1e-6 * np.abs(v).max()
    assert np.sqrt((residual[known] ** 2).mean()) < 0.2  # the noise is 0.1, and the ridge is small


def test_the_same_features_whatever_the_number_of_items_that_nobody_rated():
    ratings, _, _ = some_ratings()
    wider = csr_array((ratings.data, ratings.indices, ratings.indptr), shape=(30, 20))
    np.testing.assert_allclose(als_features(wider, 2)[:12], als_features(ratings, 2), rtol=1e-9)
    assert not np.allclose(als_features(ratings, 2, seed=1), als_features(ratings, 2, seed=0))


def test_impossible_settings_are_refused():
    ratings, _, _ = some_ratings()
    with pytest.raises(ConfigError, match=r"als_features\.reg is 0"):
        als_features(ratings, 2, reg=0)
    with pytest.raises(ConfigError, match=r"als_features\.dimension is 0"):
        als_features(ratings, 0)
    with pytest.raises(DataError, match="all 0 after centring"):
        als_features(csr_array((np.zeros(2), ([0, 1], [0, 1])), shape=(2, 2)), 1)
    ratings.data[0] = np.nan
    with pytest.raises(DataError, match="not a finite number"):
        als_features(ratings, 2)
