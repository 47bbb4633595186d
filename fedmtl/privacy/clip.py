"""Clipping: the only thing that bounds what one client, or one record, can do to a sum.

Rows of clients are summed exactly. A clipped row is truncated to multiples of a public power of two g, each coordinate
toward zero; g is such that sums of all clients' rows are at most 2**53 g, which float64 adds without rounding. The sum
is then the same to the last bit in any order, and for any division of the clients over stacks, devices and processes.

Sensitivity. Write t(v) for the truncated vector: abs(t(v)_j) <= abs(v_j) for every coordinate j, so ||t(v)|| <= ||v||
<= C in the L1 and in the L2 norm, C being the bound of the clip. As the sum is exact, neighbours that differ in one row
v move it by t(v) itself where the row is added, removed or replaced by zero, so by at most C; and by t(v) - t(v') where
another row replaces it, by at most ||t(v)|| + ||t(v')|| <= 2 C. Both are what the clip gives without truncation, and
there is no further term. (Rounding to the nearest multiple would have one: it can make a row longer than C.)
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .._check import positive
from .._devices import known, waits
from ..errors import ConfigError
from .noise.laws import Norm
from .noise.symmetric import svec

if TYPE_CHECKING:
    from .release import Form

MARGIN = 2.0**-20
"""Relative slack below the clip norm: it absorbs rounding in float64 and, in secure mode, to a grid."""

LEAST, MOST = 1e-100, 1e100
"""Between them lies every bound: squares of smaller numbers underflow, and sums of larger ones overflow."""

_WITHIN = 1 + 2.0**-30  # a row that was clipped before is longer than the limit by rounding at most
_BLOCK_ELEMENTS = 1 << 18  # in float64 a block stays in the cache, and needs no fresh pages
_WORTH_THREADS = 1 << 20
_DEVICE_BLOCK_ELEMENTS = 1 << 24  # off the CPU: few kernels, and 128 MiB of float64
_MATRIX_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Clip:
    """Bounds one norm over the whole vector, which is scaled down to ``bound * (1 - 2**-20)``.

    Args:
        bound: C, from 1e-100 to 1e100, in units of the vectors.

    Attributes:
        norm: the norm that is bounded.

    Raises:
        ConfigError: a bound beyond these.
    """

    bound: float
    norm: ClassVar[Norm]

    def __post_init__(self) -> None:
        positive(self, bound=self.bound)
        if not LEAST <= self.bound <= MOST:
            raise ConfigError(f"The clip norm is {self.bound:g}; it must be between {LEAST:g} and {MOST:g}.")


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

    A row within the limit but for rounding (2**-30 of it) has the factor 1, so that a row that is clipped stays as it
    is; and one so long that its factor would lose digits (below 2**-1022) has the factor 0.

    Args:
        norms: (k,) float64 norms, L1 or L2 as the clip needs.
        clip: the bound, or None.
    """
    finite = torch.isfinite(norms)
    if clip is None:
        return finite.to(norms.dtype)
    limit = clip.bound * (1 - MARGIN)
    factors = (limit / norms.clamp(min=limit)).masked_fill_(norms <= limit * _WITHIN, 1.0)
    return factors.masked_fill_(~finite | (factors < torch.finfo(factors.dtype).tiny), 0.0)


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


def not_finite(rows: Tensor) -> int | Tensor:
    """Return how many rows (..., D) have a NaN or an infinity, and would count as zero in a sum: off the CPU a tensor,
    which nobody has waited for."""
    if known(torch.isfinite(rows.sum())):
        return 0
    lost = (~torch.isfinite(rows).all(-1)).sum()
    return lost if waits(rows.device) else int(lost)


def sum_width(bound: float, rows: int) -> float:
    """Return g, the width of the grid on which sums of clipped rows are exact: a power of two.

    A coordinate is at most ``bound`` <= 2**e, and a sum of ``rows`` <= 2**l of them at most 2**(e + l), so with
    g = 2**(e + l - 53) it is a multiple of g up to 2**53 g. For a thousand rows g is about ``bound * 2**-43``.

    Args:
        bound: on the absolute value of a coordinate; the clip's C, public.
        rows: most rows that are summed; the public number of clients, at least 1.
    """
    mantissa, exponent = math.frexp(bound)
    exponent += (rows - 1).bit_length() - 53 - int(mantissa == 0.5)
    return math.ldexp(1.0, max(exponent, -1021))  # no smaller than that its inverse is a double


def clipped_sum(rows: Tensor, clip: Clip | None, width: float | None = None, *, threads: int = 1) -> Tensor:
    """Return the sum of clipped rows on their grid, exactly, without a float64 copy of the whole matrix.

    A row with a NaN or an infinity (or whose norm overflows float64) counts as zero.

    Args:
        rows: (k, D), any float dtype and device; k may be 0.
        clip: the bound, or None for no clipping.
        width: g from :func:`sum_width`, the same for all parts of one sum; None for that of these rows alone, by the
            bound of the clip or, without one, by their largest norm.
        threads: that share many rows on the CPU; exact sums do not show how many there are.

    Returns:
        (D,) float64 on the CPU, whole multiples of g.
    """
    if width is None:
        width = sum_width(largest_norm(rows) if clip is None else clip.bound, max(1, len(rows)))
    rows, before = rows.detach(), torch.get_num_threads()
    if rows.device.type != "cpu" or threads == 1 or rows.numel() < _WORTH_THREADS:
        return _cells(rows, clip, width).mul_(width)
    # one thread for each part, and none that waits for another within an operation
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = list(pool.map(lambda part: _cells(part, clip, width), rows.tensor_split(threads)))
    torch.set_num_threads(before)
    return torch.stack(parts).sum(0).mul_(width)


def _cells(rows: Tensor, clip: Clip | None, width: float) -> Tensor:
    """Return the sum of clipped rows (k, D) in multiples of ``width``: float64 (D,) on the CPU."""
    place = "cpu" if rows.device.type == "mps" else rows.device
    cells = torch.zeros(rows.shape[1], dtype=torch.float64, device=place)
    block = _block_rows(rows)
    buffer = torch.empty(min(block, len(rows)), rows.shape[1], dtype=torch.float64, device=place)
    for chunk in rows.split(block):
        wide, norms = _with_norms(chunk, clip, buffer[: len(chunk)])
        wide.mul_((clip_factors(norms, clip) / width)[:, None]).trunc_()
        # a product of whole numbers with ones is as exact as their sum, and faster for few rows
        cells = torch.addmv(cells, wide.T, wide.new_ones(len(wide)))
    return cells.cpu()  # of a round on another device, the one thing that is waited for


def largest_norm(rows: Tensor) -> float:
    """Return the largest finite L2 norm of rows (k, D), 0 without any."""
    norms = row_norms(rows, None)
    return float(torch.where(torch.isfinite(norms), norms, 0.0).max()) if len(norms) else 0.0


def contributions(
    rows: Tensor, clip: Clip | None, form: Form, width: float | None = None, *, threads: int = 1
) -> Tensor:
    """Return the clipped sum of rows, of their outer products or of the diagonals of these, as it is noised.

    Args:
        rows: (..., k, d), any float dtype and device; rows that are not finite count as zero.
        clip: the bound on one row, or None.
        form: see :class:`~fedmtl.privacy.ReleasePlan`. Vectors are summed on their grid.
        width, threads: of that grid, and of the sum of vectors, see :func:`clipped_sum`.

    Returns:
        float64 on the CPU: (..., d), or (..., d (d + 1) / 2) for ``"symmetric"``, in the isometric coordinates of
        :func:`~fedmtl.privacy.noise.symmetric.svec`.
    """
    if form == "vector":
        if rows.ndim == 2:
            return clipped_sum(rows, clip, width, threads=threads)
        return torch.stack([contributions(one, clip, form, width, threads=threads) for one in rows])
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


def _with_norms(rows: Tensor, clip: Clip | None, buffer: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return rows in float64, those that are not finite as zeros, and their norms before that, (k,) float64.

    With a ``buffer`` of their shape they are a copy in it.
    """
    if buffer is not None:
        wide = buffer.copy_(rows)
    else:
        wide = rows.to(torch.float64) if rows.device.type != "mps" else rows.cpu().double()
    norms = torch.linalg.vector_norm(wide, ord=1 if clip is not None and clip.norm == "l1" else 2, dim=1)
    finite = torch.isfinite(norms)
    if not known(finite):
        wide = wide.masked_fill(~finite[:, None], 0.0)
    return wide, norms
