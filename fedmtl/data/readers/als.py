"""Features of items by alternating least squares on ratings."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array

from ..._check import Count, Positive, check_arguments
from ...errors import DataError
from ...random import keyed_generator

_BLOCK = 1 << 22  # numbers in the normal matrices of a block of rows


@check_arguments
def als_features(
    ratings: csr_array,
    dimension: Count = 20,
    *,
    reg: Positive = 0.5,
    sweeps: Count = 20,
    seed: int = 0,
) -> np.ndarray:
    """Learns features of items by alternating least squares.

    They are scaled so that the entries of all items with ratings have standard deviation 1.

        min_{U, V} sum over stored (i, j) of (r_ij - u_i . v_j)^2 + reg (||U||_F^2 + ||V||_F^2)

    Zhou, Wilkinson, Schreiber, Pan: "Large-scale parallel collaborative filtering for the Netflix
    prize", AAIM 2008, with a ridge that does not depend on the number of ratings. The users'
    factors are not returned. An item without ratings has features 0.

    Args:
        ratings: (users, items), float64, centred; a stored 0 is a rating.
        dimension: p, columns of U and V.
        reg: ridge, above 0.
        sweeps: updates of U and of V.
        seed: of the items' first factors, N(0, 1 / p), drawn item by item.

    Returns:
        (items, p) float64.

    Raises:
        DataError: values that are not finite, or ratings that are all 0.
    """
    if not np.isfinite(ratings.data).all():
        raise DataError("als_features: ratings holds a value that is not a finite number.")
    users = csr_array(ratings)
    items = csr_array(ratings.T)
    rated = items.indptr[1:] > items.indptr[:-1]
    generator = keyed_generator(seed, "als")
    v = generator.standard_normal((ratings.shape[1], dimension)) / np.sqrt(dimension)
    for _ in range(sweeps):
        v = ridge_rows(items, ridge_rows(users, v, reg), reg)
    scale = 0.0
    if rated.any():
        scale = float(v[rated].std())
    if scale < 1e-100:
        raise DataError(
            "als_features: the ratings are all 0 after centring, so there are no features to learn."
        )
    return v / scale


def ridge_rows(ratings: csr_array, factors: np.ndarray, reg: float) -> np.ndarray:
    """Returns the factors of every row, given those of the columns: one ridge regression a row.

        argmin_{u_i} sum over stored j of (r_ij - u_i . v_j)^2 + reg ||u_i||^2

    Args:
        ratings: (n, m).
        factors: (m, p).
        reg: above 0.

    Returns:
        (n, p) float64; 0 for a row without entries.
    """
    p = factors.shape[1]
    rows = ratings.shape[0]
    # v_j v_j^T of every item once: a sparse product then adds up the normal matrices of all rows
    products = (factors[:, :, None] * factors[:, None, :]).reshape(len(factors), p * p)
    stored = csr_array(
        (np.ones(len(ratings.data)), ratings.indices, ratings.indptr), shape=ratings.shape
    )
    right = ratings @ factors
    ridge = reg * np.eye(p)
    solved = np.zeros((rows, p))
    # the normal matrices of all rows at once would not fit in memory
    block = max(1, _BLOCK // (p * p))
    for first in range(0, rows, block):
        part = slice(first, min(rows, first + block))
        normal = (stored[part] @ products).reshape(-1, p, p) + ridge
        solved[part] = np.linalg.solve(normal, right[part, :, None])[:, :, 0]
    return solved
