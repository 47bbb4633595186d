"""Symmetric matrices as vectors: noise on a sum of ``w w^T``, ||w||_2 <= K, is noise on a vector
under an isometry.

The vectorization :func:`svec` keeps the Frobenius inner product, so the L2 sensitivity of the
vector is the Frobenius sensitivity of the matrix, and both the law and the accounting are those of
a vector of d(d+1)/2 coordinates. An off-diagonal entry then has 1/sqrt(2) of the noise of a
diagonal one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ConfigError
from .laws import Norm

if TYPE_CHECKING:
    from ..samplers import Relation


def svec(matrix: Tensor) -> Tensor:
    """Returns the upper triangle by rows, off-diagonal entries times sqrt(2): ``svec(A) . svec(B) =
    tr(A B)``.

    Args:
        matrix: (..., d, d) symmetric, float.

    Returns:
        (..., d(d+1)/2), the dtype and device of ``matrix``.

    Raises:
        ConfigError: the last two sizes differ, or there are fewer than two.
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ConfigError(f"svec takes symmetric matrices (..., d, d), not {tuple(matrix.shape)}.")
    rows, columns = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    return matrix[..., rows, columns] * _weights(rows, columns, matrix.dtype)


def smat(vector: Tensor) -> Tensor:
    """Returns the matrix of a vector: the inverse of :func:`svec`.

    Args:
        vector: (..., d(d+1)/2), float.

    Returns:
        (..., d, d) exactly symmetric, the dtype and device of ``vector``.

    Raises:
        ConfigError: the last size is no d(d+1)/2.
    """
    size = vector.shape[-1]
    d = (math.isqrt(8 * size + 1) - 1) // 2
    if d * (d + 1) // 2 != size:
        raise ConfigError(f"smat takes vectors of d(d+1)/2 coordinates, not of {size}.")
    rows, columns = torch.triu_indices(d, d, device=vector.device)
    entries = vector / _weights(rows, columns, vector.dtype)
    matrix = vector.new_empty(*vector.shape[:-1], d, d)
    matrix[..., rows, columns] = entries
    matrix[..., columns, rows] = entries
    return matrix


def _weights(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    weights = torch.full(rows.shape, math.sqrt(2.0), dtype=dtype, device=rows.device)
    weights[rows == columns] = 1.0
    return weights


def outer_sensitivity(clip_norm: float, relation: Relation, *, diagonal_norm: Norm = "l2") -> float:
    """Returns the most that a sum of ``w w^T`` moves between neighbours.

    In the Frobenius norm it is K^2 for add/remove and sqrt(2) K^2 for replace-one (two orthogonal
    vectors of norm K):
    ||u u^T - v v^T||_F^2 = ||u||^4 + ||v||^4 - 2 (u.v)^2. The diagonal moves as much in the L2
    norm. In the L1 norm, ||w * w||_1 = ||w||_2^2, it moves by K^2, or 2 K^2 for replace-one (two
    vectors with disjoint support).

    Args:
        clip_norm: K, bound on ``||w||_2``.
        relation: the neighbour relation.
        diagonal_norm: ``"l2"`` for the whole matrix, or the diagonal in that norm; ``"l1"`` only
            for the diagonal.
    """
    farther = 2.0
    if diagonal_norm != "l1":
        farther = math.sqrt(2.0)
    return clip_norm**2 * (farther if relation == "replace" else 1.0)
