"""Clipping: the only thing that bounds what one client, or one record, can do to a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._check import positive
from ..errors import ConfigError
from .noise.laws import Norm
from .noise.symmetric import svec

if TYPE_CHECKING:
    from .release import Form

MARGIN = 2.0**-20
"""Relative slack below the clip norm: it absorbs rounding in float64 and, in secure mode, to a grid."""

_BLOCK_ELEMENTS = 1 << 18  # in float64 a block stays in the cache, and needs no fresh pages
_DEVICE_BLOCK_ELEMENTS = 1 << 24  # off the CPU: few kernels, and 128 MiB of float64
_MATRIX_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Clip:
    """Bounds one norm over the whole vector, which is scaled down to ``bound * (1 - 2**-20)``.

    Args:
        bound: C, above 0, in units of the vectors.

    Attributes:
        norm: the norm that is bounded.
    """

    bound: float
    norm: ClassVar[Norm]

    def __post_init__(self) -> None:
        positive(self, bound=self.bound)


@dataclass(frozen=True)
class L2Clip(Clip):
    """Bounds the L2 norm."""

    norm = "l2"


@dataclass(frozen=True)
class L1Clip(Clip):
    """Bounds the L1 norm."""

    norm = "l1"


CLIPS: dict[Norm, type[L1Clip] | type[L2Clip]] = {"l1": L1Clip, "l2": L2Clip}
"""The clip in a norm."""


def clip_factors(norms: Tensor, clip: Clip | None) -> Tensor:
    """Return the factor of each row: ``min(1, C (1 - 2**-20) / norm)``, 0 where the norm is not finite, 1 without a
    clip.

    Args:
        norms: (k,) float64 norms, L1 or L2 as the clip needs.
        clip: the bound, or None.
    """
    finite = torch.isfinite(norms)
    if clip is None:
        return finite.to(norms.dtype)
    limit = clip.bound * (1 - MARGIN)
    factors = torch.clamp(limit / torch.clamp(norms, min=limit), max=1.0)
    return torch.where(finite, factors, torch.zeros_like(norms))


def clip_rows(rows: Tensor, clip: Clip | None) -> Tensor:
    """Return every row clipped, in its dtype: what a client that keeps an account of what it sent must add.

    Rows that are cut end a further 2**-22 below the limit, so that a float32 result is not cut again.

    Args:
        rows: (k, D), any float dtype and device.
        clip: the bound, or None to only zero the rows that are not finite.

    Returns:
        (k, D), the dtype and device of ``rows``.
    """
    out = torch.empty_like(rows)
    block = _block_rows(rows)
    for target, chunk in zip(out.split(block), rows.detach().split(block), strict=True):
        wide, norms = _with_norms(chunk, clip)
        factors = clip_factors(norms, clip)
        factors = torch.where(factors < 1, factors * (1 - 2.0**-22), factors)
        target.copy_(wide * factors[:, None])
    return out


def row_norms(rows: Tensor, clip: Clip | None) -> Tensor:
    """Return the norm of each row before clipping, in the norm of ``clip`` (L2 without one): (k,) float64."""
    parts = [_with_norms(chunk, clip)[1] for chunk in rows.detach().split(_block_rows(rows))]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def not_finite(rows: Tensor) -> int:
    """Return how many rows (..., D) have a NaN or an infinity, and would count as zero in a sum."""
    if bool(torch.isfinite(rows.sum())):
        return 0
    return int((~torch.isfinite(rows).all(-1)).sum())


def clipped_sum(rows: Tensor, clip: Clip | None) -> Tensor:
    """Sum of clipped rows, in float64, without a float64 copy of the whole matrix.

    A row with a NaN or an infinity (or whose norm overflows float64) counts as zero.

    Args:
        rows: (k, D), any float dtype and device; k may be 0.
        clip: the bound, or None for no clipping.

    Returns:
        (D,) float64 on the CPU.
    """
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for chunk in rows.detach().split(_block_rows(rows)):
        wide, norms = _with_norms(chunk, clip)
        total += (clip_factors(norms, clip) @ wide).cpu()
    return total


def contributions(rows: Tensor, clip: Clip | None, form: Form) -> Tensor:
    """Return the clipped sum of rows, of their outer products or of the diagonals of these, as it is noised.

    Args:
        rows: (..., k, d), any float dtype and device; rows that are not finite count as zero.
        clip: the bound on one row, or None.
        form: see :class:`~fedmtl.privacy.ReleasePlan`.

    Returns:
        float64 on the CPU: (..., d), or (..., d (d + 1) / 2) for ``"symmetric"``, in the isometric coordinates of
        :func:`~fedmtl.privacy.noise.symmetric.svec`.
    """
    if form == "vector":
        if rows.ndim == 2:
            return clipped_sum(rows, clip)
        return torch.stack([contributions(one, clip, form) for one in rows])
    wide = rows.detach().cpu().double()
    if wide.ndim == 3 and len(wide) > 1 and wide.numel() > _MATRIX_ELEMENTS:  # a few matrices at a time, in the cache
        parts = wide.split(max(1, _MATRIX_ELEMENTS // wide[0].numel()))
        return torch.cat([contributions(part, clip, form) for part in parts])
    clipped = clip_rows(wide.reshape(-1, wide.shape[-1]), clip).reshape(wide.shape)
    if form == "diagonal":
        return (clipped * clipped).sum(-2)
    values = clipped.numpy()  # of small matrices numpy's products are faster than torch's
    return svec(torch.from_numpy(values.swapaxes(-1, -2) @ values))


def clipped_segment_sums(rows: Tensor, client: Tensor, count: int, clip: Clip | None) -> Tensor:
    """Return sums of clipped rows by client: per-example clipping of many clients' examples at once.

    A row with a NaN or an infinity (or whose norm overflows float64) counts as zero. The rows of a client are
    added in the order in which they come, whatever stands between them.

    Args:
        rows: (N, D), any float dtype and device; N may be 0.
        client: (N,) int64 on the same device, each in [0, count).
        count: k, number of clients.
        clip: the bound on one row, or None for no clipping.

    Returns:
        (k, D) float64 on the device of ``rows`` (float32 on mps, which has no float64), zero for clients
        without rows.

    Raises:
        ConfigError: ``client`` does not give one client to each row.
    """
    if rows.ndim != 2 or client.shape != rows.shape[:1] or client.dtype != torch.int64:
        raise ConfigError(
            f"clipped_segment_sums takes rows (N, D) and client (N,) int64, not {tuple(rows.shape)} and "
            f"{tuple(client.shape)} {client.dtype}."
        )
    mps = rows.device.type == "mps"
    client = client.cpu() if mps else client
    totals = torch.zeros(count, rows.shape[1], dtype=torch.float64, device="cpu" if mps else rows.device)
    block = _block_rows(rows)
    for chunk, chunk_clients in zip(rows.detach().split(block), client.split(block), strict=True):
        wide, norms = _with_norms(chunk, clip)
        clipped = wide * clip_factors(norms, clip)[:, None]
        if totals.device.type == "cpu":
            totals.index_add_(0, chunk_clients, clipped)
        else:
            totals += _sums_in_order(clipped, chunk_clients, count)
    return totals.to(rows.device, torch.float32) if mps else totals


def _sums_in_order(rows: Tensor, client: Tensor, count: int) -> Tensor:
    """Return sums by client without atomic additions, so that the same rows give the same bits."""
    order = torch.argsort(client, stable=True)
    lengths = torch.bincount(client, minlength=count)
    return torch.segment_reduce(rows[order], "sum", lengths=lengths, axis=0)


def _block_rows(rows: Tensor) -> int:
    elements = _BLOCK_ELEMENTS if rows.device.type in ("cpu", "mps") else _DEVICE_BLOCK_ELEMENTS
    return max(1, elements // max(1, rows.shape[1]))


def _with_norms(rows: Tensor, clip: Clip | None) -> tuple[Tensor, Tensor]:
    """Return rows in float64, those that are not finite as zeros, and their norms before that, (k,) float64."""
    wide = rows.cpu().double() if rows.device.type == "mps" else rows.double()
    norms = torch.linalg.vector_norm(wide, ord=1 if clip is not None and clip.norm == "l1" else 2, dim=1)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        wide = torch.where(finite[:, None], wide, torch.zeros_like(wide))
    return wide, norms
