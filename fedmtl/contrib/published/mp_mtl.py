"""MP-MTL with the noise and the projection of the paper, for reproduction (Liang et al. 2020).

Liang et al. add E ~ W_d(d + 1, (K^2 / (2 epsilon)) I) to a sum of ``w w^T``, ``||w||_2 <= K``, and
claim pure epsilon. E is positive definite, so an output O rules out every sum A' with O - A' not
positive definite. Take neighbours A and A' = A + v v^T with ||v||_2 = K: an output A + E is
impossible under A' when ``v^T E^-1 v > 1``. By Muirhead, "Aspects of Multivariate Statistical
Theory" (1982), Theorem 3.2.12, ``(2 epsilon / K^2) ||v||^2 / (v^T E^-1 v)`` is chi-square with 2
degrees of freedom, so this happens with probability ``1 - exp(-epsilon)`` in every dimension. No
(epsilon', delta) with delta below that holds.

A task projects its clipped model, as printed in Algorithm 2, step 9, and not its own; and no shift
is added to the covariance, since the noise is positive definite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..._check import NonNegative
from ...algorithms.base import Problem
from ...algorithms.client_batch import ClientBatch
from ...algorithms.mp_mtl.algorithm import MPMTL, RELEASE
from ...algorithms.mp_mtl.sharing import Momentum
from ...errors import PrivacyError
from ...privacy import PureDpEvent
from ...privacy.noise.laws import LAWS, NoiseLaw
from ...privacy.noise.symmetric import svec

if TYPE_CHECKING:
    from ...privacy import NoiseSource

REASON = (
    "a neighbour makes an output of Wishart noise impossible "
    # whatever the dimension, see the head of this module
    "with probability 1 - exp(-epsilon), in every step"
)


@dataclass(frozen=True, kw_only=True)
class PublishedMPMTL(MPMTL):
    """MP-MTL as printed, with Wishart noise, ``mechanism="wishart"``.

    The settings are those of :class:`MPMTL`, some with other defaults.

    Args:
        lam: for tasks with much noise.
        momentum: the acceleration of Algorithm 2.
        rho: no shift.
    """

    lam: NonNegative = 0.4
    momentum: Momentum = "nesterov"
    rho: NonNegative = 0.0

    name = "mp_mtl_published"
    title = "MP-MTL, published"

    def resolve_auto(
        self, problem: Problem, schedule: Any, privacy: Sequence[Any]
    ) -> PublishedMPMTL:
        """Fills in the ``"auto"`` settings, see :class:`MPMTL`.

        Raises:
            PrivacyError: the noise has another law.
        """
        for settings in privacy:
            if settings is None or settings.noiseless:
                continue
            if settings.mechanism != WishartNoise.name:
                accepted = "adds Wishart noise, privacy.mechanism=wishart"
                raise PrivacyError(f"mp_mtl_published {accepted}, not {settings.mechanism!r}.")
        return super().resolve_auto(problem, schedule, privacy)

    def projected_rows(self, c: ClientBatch) -> Tensor:
        """Returns the clipped models without a bias, (R, k, d), as the paper projects them."""
        clipped = c.clip(RELEASE, self.sent_rows(c))
        return clipped.reshape(super().projected_rows(c).shape)


@dataclass(frozen=True)
class WishartNoise(NoiseLaw):
    """W_d(d + 1, (K^2 / (2 epsilon)) I) in the coordinates of ``svec``, for whole matrices.

    Its epsilon is the claim of the paper and no guarantee.

    Args:
        multiplier: 1 / epsilon of the claim, above 0.
    """

    name = "wishart"
    norm = "l2"
    matrices = True
    refuted = REASON

    def event(self, dimension: int) -> Any:
        """Returns the claim of the paper: pure epsilon 1 / ``multiplier``."""
        return PureDpEvent(1.0 / self.multiplier)

    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Returns the root mean square of a coordinate, b S sqrt(d + 1), its mean included.

        Args:
            sensitivity: S.
            dimension: d (d + 1) / 2, the number of coordinates.
        """
        return self.multiplier * sensitivity * math.sqrt(_side(dimension) + 1.0)

    def draw(self, source: NoiseSource, purpose: str, step: int, size: int) -> np.ndarray:
        """Returns noise (size,) float64 at K = 1, of a positive definite matrix.

        Args:
            source: of the normal numbers.
            purpose: addresses them.
            step: addresses them.
            size: d (d + 1) / 2.
        """
        d = _side(size)
        # W = N N^T with d + 1 normal columns has the Wishart law
        normals = source.normal(purpose, step, d * (d + 1)).reshape(d, d + 1)
        matrix = normals @ normals.T / (2.0 / self.multiplier)
        return svec(torch.from_numpy(matrix)).numpy()

    def _invert(self, sign: np.ndarray, tail: np.ndarray) -> np.ndarray:
        whole = "Wishart noise is of whole matrices"
        raise PrivacyError(f"{whole}; no published method releases it by client.")


def _side(size: int) -> int:
    """Returns d of d (d + 1) / 2 coordinates."""
    return (math.isqrt(8 * size + 1) - 1) // 2


LAWS[WishartNoise.name] = WishartNoise
