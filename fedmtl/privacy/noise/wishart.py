"""Wishart noise on covariances: kept to reproduce a paper, and not private.

Liang et al. add E ~ W_d(d + 1, (K^2 / (2 epsilon)) I) to a sum of ``w w^T``, ``||w||_2 <= K``, and claim pure
epsilon. E is positive definite, so an output O rules out every sum A' with O - A' not positive definite. Take
neighbours A and A' = A + v v^T with ||v||_2 = K: an output A + E is impossible under A' when ``v^T E^-1 v > 1``. By
Muirhead, "Aspects of Multivariate Statistical Theory" (1982), Theorem 3.2.12, ``(2 epsilon / K^2) ||v||^2 / (v^T
E^-1 v)`` is chi-square with 2 degrees of freedom, so this happens with probability ``1 - exp(-epsilon)`` in every
dimension. No (epsilon', delta) with delta below that holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import PrivacyError
from ..accounting.losses import PureDpEvent
from .laws import NoiseLaw
from .symmetric import svec

if TYPE_CHECKING:
    from .sources import NoiseSource


REFUTED = "a neighbour makes an output of Wishart noise impossible with probability 1 - exp(-epsilon), in every step"


@dataclass(frozen=True)
class WishartNoise(NoiseLaw):
    """W_d(d + 1, (K^2 / (2 epsilon)) I) in the coordinates of ``svec``, with the event that the paper claims.

    Only the full matrix has it; its epsilon is that of the paper, not a guarantee.

    Args:
        multiplier: 1 / epsilon of the claim, above 0.
    """

    name = "wishart"
    norm = "l2"
    refuted = REFUTED

    def event(self, dimension: int) -> Any:
        """Return what the paper claims: pure epsilon 1 / ``multiplier`` and nothing more."""
        return PureDpEvent(1.0 / self.multiplier)

    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Return the root mean square of a coordinate: b S sqrt(d + 1), its mean included, for d (d + 1) / 2
        coordinates."""
        return self.multiplier * sensitivity * math.sqrt(_side(dimension) + 1.0)

    def draw(self, source: NoiseSource, purpose: str, step: int, size: int) -> np.ndarray:
        """Return (size,) float64 noise at K = 1, size = d (d + 1) / 2: of a positive definite matrix."""
        d = _side(size)
        normals = source.normal(purpose, step, d * (d + 1)).reshape(d, d + 1)
        return svec(torch.from_numpy(normals @ normals.T / (2.0 / self.multiplier))).numpy()

    def draw_rows(self, source: NoiseSource, purpose: str, step: int | Tensor, keys: Tensor, size: int) -> np.ndarray:
        """Refuse: no published method releases Wishart noise by client."""
        raise PrivacyError("Wishart noise by client is not supported.")

    def _invert(self, sign: np.ndarray, tail: np.ndarray) -> np.ndarray:
        raise PrivacyError("Wishart noise is not made by inversion.")


def _side(size: int) -> int:
    """Return d of d (d + 1) / 2 coordinates."""
    return (math.isqrt(8 * size + 1) - 1) // 2
