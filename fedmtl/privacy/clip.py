"""Clipping: the only thing that bounds what one client can do to a sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._check import positive
from .mechanisms import Norm

MARGIN = 2.0**-20
"""Relative slack below the clip norm: it absorbs rounding in float64 and, in secure mode, to a grid."""

_BLOCK_ELEMENTS = 1 << 18  # in float64 a block stays in the cache, and needs no fresh pages


@dataclass(frozen=True)
class L2Clip:
    """One L2 norm over the whole vector, scaled down to ``bound * (1 - 2**-20)``.

    Args:
        bound: C, above 0, in units of the vectors.
    """

    bound: float

    def __post_init__(self) -> None:
        positive(self, bound=self.bound)

    @property
    def norm(self) -> Norm:
        """The norm that is bounded."""
        return "l2"


def clip_factors(norms: Tensor, clip: L2Clip | None) -> Tensor:
    """Factor of each row: ``min(1, C (1 - 2**-20) / norm)``, 0 where the norm is not finite, 1 without a
    clip.

    Args:
        norms: (k,) float64 L2 norms.
        clip: the bound, or None.
    """
    finite = torch.isfinite(norms)
    if clip is None:
        return finite.to(norms.dtype)
    limit = clip.bound * (1 - MARGIN)
    factors = torch.clamp(limit / torch.clamp(norms, min=limit), max=1.0)
    return torch.where(finite, factors, torch.zeros_like(norms))


def clip_rows(rows: Tensor, clip: L2Clip | None) -> Tensor:
    """Every row clipped, in its dtype: what a client that keeps an account of what it sent must add.

    Rows that are cut end a further 2**-22 below the limit, so that a float32 result is not cut again.

    Args:
        rows: (k, D), any float dtype and device.
        clip: the bound, or None to only zero the rows that are not finite.

    Returns:
        (k, D), the dtype and device of ``rows``.
    """
    out = torch.empty_like(rows)
    block = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
    for target, chunk in zip(out.split(block), rows.detach().split(block), strict=True):
        wide, norms = _with_norms(chunk)
        factors = clip_factors(norms, clip)
        factors = torch.where(factors < 1, factors * (1 - 2.0**-22), factors)
        target.copy_(wide * factors[:, None])
    return out


def clipped_sum(rows: Tensor, clip: L2Clip | None) -> Tensor:
    """Sum of clipped rows, in float64, without a float64 copy of the whole matrix.

    A row with a NaN or an infinity (or whose norm overflows float64) counts as zero.

    Args:
        rows: (k, D), any float dtype and device; k may be 0.
        clip: the bound, or None for no clipping.

    Returns:
        (D,) float64 on the CPU.
    """
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    block = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
    for chunk in rows.detach().split(block):
        wide, norms = _with_norms(chunk)
        total += (clip_factors(norms, clip) @ wide).cpu()
    return total


def _with_norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float64, those that are not finite as zeros, and their L2 norms before that, (k,) float64."""
    wide = rows.cpu().double() if rows.device.type == "mps" else rows.double()
    norms = torch.linalg.vector_norm(wide, dim=1)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        wide = torch.where(finite[:, None], wide, torch.zeros_like(wide))
    return wide, norms
