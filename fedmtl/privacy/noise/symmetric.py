"""Noise on symmetric matrices: vector laws under an isometry.

One client's contribution is ``w w^T`` with ``||w||_2 <= K``. The vectorization :func:`svec` keeps the Frobenius
inner product, so the L2 sensitivity of the vector is the Frobenius sensitivity of the matrix, and both the law
and the accounting are those of a vector of d(d+1)/2 coordinates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..._check import positive
from ...errors import ConfigError
from .laws import GaussianNoise, L2LaplaceNoise, LaplaceNoise, NoiseLaw

if TYPE_CHECKING:
    from ..samplers import Relation
    from .sources import NoiseSource


def svec(matrix: Tensor) -> Tensor:
    """The upper triangle by rows, off-diagonal entries times sqrt(2): ``svec(A) . svec(B) = tr(A B)``.

    Args:
        matrix: (..., d, d) symmetric, float.

    Returns:
        (..., d(d+1)/2), the dtype and device of ``matrix``.
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ConfigError(f"svec takes symmetric matrices (..., d, d), not {tuple(matrix.shape)}.")
    rows, columns = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    return matrix[..., rows, columns] * _weights(rows, columns, matrix.dtype)


def smat(vector: Tensor) -> Tensor:
    """The inverse of :func:`svec`.

    Args:
        vector: (..., d(d+1)/2), float.

    Returns:
        (..., d, d) exactly symmetric, the dtype and device of ``vector``.
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


@dataclass(frozen=True)
class SymmetricNoise(ABC):
    """Noise on a symmetric d x d matrix, isotropic in the Frobenius norm.

    Args:
        multiplier: scale of the noise in units of the Frobenius sensitivity, above 0.
    """

    multiplier: float

    def __post_init__(self) -> None:
        positive(self, multiplier=self.multiplier)

    @property
    @abstractmethod
    def vector(self) -> NoiseLaw:
        """The law of ``svec`` of the noise."""

    def event(self, dimension: int) -> Any:
        """The event of one release of a (dimension, dimension) matrix."""
        return self.vector.event(dimension * (dimension + 1) // 2)

    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Root mean square of a diagonal entry; off the diagonal it is 1/sqrt(2) of that."""
        return self.vector.std(sensitivity, dimension * (dimension + 1) // 2)

    def draw(self, source: NoiseSource, purpose: str, step: int, dimension: int) -> np.ndarray:
        """(dimension, dimension) float64 symmetric noise at sensitivity 1."""
        entries = self.vector.draw(source, purpose, step, dimension * (dimension + 1) // 2)
        return smat(torch.from_numpy(entries)).numpy()

    @staticmethod
    def sensitivity(clip_norm: float, relation: Relation) -> float:
        """Most that the sum of ``w w^T`` moves in the Frobenius norm: K^2 for add/remove, sqrt(2) K^2 for
        replace-one (two orthogonal vectors of norm K).

        Args:
            clip_norm: K, bound on ``||w||_2``.
            relation: how neighbours differ.
        """
        return clip_norm**2 * (math.sqrt(2.0) if relation == "replace" else 1.0)


@dataclass(frozen=True)
class SymmetricGaussian(SymmetricNoise):
    """Symmetric Gaussian noise: standard deviation z S on the diagonal, z S / sqrt(2) off it."""

    @property
    def vector(self) -> GaussianNoise:
        """Gaussian noise on d(d+1)/2 coordinates."""
        return GaussianNoise(self.multiplier)


@dataclass(frozen=True)
class SymmetricKNorm(SymmetricNoise):
    """Symmetric noise of density proportional to exp(-||E||_F / (b S)): pure epsilon 1/b."""

    @property
    def vector(self) -> L2LaplaceNoise:
        """L2-Laplace noise on d(d+1)/2 coordinates."""
        return L2LaplaceNoise(self.multiplier)


@dataclass(frozen=True)
class DiagonalLaplace:
    """Laplace noise on the d diagonal entries, where nothing else of the matrix is released.

    Args:
        multiplier: scale in units of the L1 sensitivity of the diagonal, above 0.
    """

    multiplier: float

    def __post_init__(self) -> None:
        positive(self, multiplier=self.multiplier)

    @property
    def vector(self) -> LaplaceNoise:
        """Laplace noise on d coordinates."""
        return LaplaceNoise(self.multiplier)

    def event(self, dimension: int) -> Any:
        """The event of one release of ``dimension`` diagonal entries."""
        return self.vector.event(dimension)

    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Standard deviation of an entry."""
        return self.vector.std(sensitivity, dimension)

    def draw(self, source: NoiseSource, purpose: str, step: int, dimension: int) -> np.ndarray:
        """(dimension,) float64 noise at sensitivity 1."""
        return self.vector.draw(source, purpose, step, dimension)

    @staticmethod
    def sensitivity(clip_norm: float, relation: Relation) -> float:
        """Most that the diagonal of the sum of ``w w^T`` moves in the L1 norm: ``||w * w||_1 = ||w||_2^2``, so
        K^2 for add/remove, 2 K^2 for replace-one (two vectors of norm K with disjoint support).

        Args:
            clip_norm: K, bound on ``||w||_2``.
            relation: how neighbours differ.
        """
        return clip_norm**2 * (2.0 if relation == "replace" else 1.0)
