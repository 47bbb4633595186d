"""Clipping: the only bound on the influence of one client, or one record, on a sum.

Rows of clients are summed exactly. A clipped row is truncated to multiples of a public power of two
g, each coordinate toward zero; g is such that sums of all clients' rows are at most 2**53 g, which
float64 adds without rounding. The sum is then the same to the last bit in any order, and for any
division of the clients over stacks, devices and processes.

Sensitivity. Write t(v) for the truncated vector: abs(t(v)_j) <= abs(v_j) for every coordinate j, so
||t(v)|| <= ||v|| <= C in the L1 and in the L2 norm, C being the bound of the clip. As the sum is
exact, neighbours that differ in one row v move it by t(v) itself if the row is added, removed or
replaced by zero, so by at most C; and by t(v) - t(v') if another row replaces it, by at most
||t(v)|| + ||t(v')|| <= 2 C. Both are the bounds of the clip without truncation, and there is no
further term. (Rounding to the nearest multiple would have one: it can make a row longer than C.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._check import given, positive
from ..errors import ConfigError, PrivacyError
from .noise.laws import ORDERS, Norm

MARGIN = 2.0**-20
"""Relative slack below the clip norm: it absorbs rounding in float64 and, in secure mode, to a
grid."""

LEAST = 1e-100
MOST = 1e100
"""Between them lies every bound: squares of smaller numbers underflow, and sums of larger ones
overflow."""

_BLOCK_ELEMENTS = 1 << 17  # in float64 a block stays in the cache, and needs no fresh pages
_LONG = 1 << 14  # numbers of a row from which blocks of rows gain nothing
_DEVICE_BLOCK_ELEMENTS = 1 << 24  # off the CPU: few kernels, and 128 MiB of float64


@dataclass(frozen=True)
class Clip:
    """Bounds one norm over the whole vector, which is scaled down to ``bound * (1 - 2**-20)``.

    Args:
        bound: C, from 1e-100 to 1e100, in units of the vectors.
        norm: the norm that is bounded, ``"l1"`` or ``"l2"``.
        stability: gamma, in units of the vectors, for automatic clipping: every vector w is scaled
            to ``C w / (norm(w) + gamma)``, also a short one (Bu, Wang, Zha, Karypis: "Automatic
            clipping: differentially private deep learning made easier and stronger", NeurIPS 2023,
            equation (4)). It is never longer than C, so the sensitivity is the same. It is for
            gradients of single records, :func:`clip_rows`; sums of clients' rows do not read it.
            None: only longer vectors are scaled.

    Raises:
        ConfigError: a bound beyond these.

    Example:
        >>> import torch
        >>> from fedmtl.privacy import Clip, clip_rows
        >>> clip_rows(torch.tensor([[3.0, 4.0]]), Clip(1.0)).norm().round(decimals=4).item()
        1.0
    """

    bound: float
    norm: Norm = "l2"
    stability: float | None = None

    def __post_init__(self) -> None:
        positive(self, bound=self.bound, **given(stability=self.stability))
        if not LEAST <= self.bound <= MOST:
            raise ConfigError(
                f"The clip norm is {self.bound:g}; it must be between {LEAST:g} and {MOST:g}."
            )


def clip_factors(norms: Tensor, clip: Clip | None) -> Tensor:
    """Returns the factor of each row: ``min(1, C (1 - 2**-20) / norm)``, 0 if the norm is not
    finite, 1 without a clip.

    A row within the limit but for rounding (2**-30 of it) has the factor 1, so that a row that is
    clipped stays as it is; and one so long that its factor would lose digits (below 2**-1022) has
    the factor 0. With automatic clipping the factor is ``C (1 - 2**-20) / (norm + gamma)``.

    Args:
        norms: (k,) float64 norms, L1 or L2 as the clip needs.
        clip: the bound, or None.
    """
    limit, _ = bounds_of(clip)
    stability = None
    if clip is not None:
        stability = clip.stability
    return _factors(norms, limit, stability)


def bounds_of(clip: Clip | None) -> tuple[float, float]:
    """Returns the limit on a row's norm, infinity for none, and the order of the norm, 1 or 2."""
    if clip is None:
        return math.inf, 2.0
    return clip.bound * (1 - MARGIN), float(ORDERS[clip.norm])


def are_long(dimension: int) -> bool:
    """Returns True if rows (k, D) on the CPU are clipped and added one by one."""
    return dimension >= _LONG


def _factors(norms: Tensor, limit: float, stability: float | None = None) -> Tensor:
    if stability is not None:
        factors = limit / (norms + stability)
    else:
        # A row that was clipped before may exceed the limit by rounding. Without this slack a
        # second clip would shrink it.
        within = norms <= limit * (1 + 2.0**-30)
        factors = (limit / norms.clamp(min=limit)).masked_fill_(within, 1.0)
    # A NaN must not reach the sum: one client could otherwise erase the release for everybody.
    return factors.masked_fill_(~torch.isfinite(norms) | (factors < 2.0**-1022), 0.0)


def clip_rows(rows: Tensor, clip: Clip | None) -> Tensor:
    """Returns every row clipped, in its dtype: the row that a client adds to its own sum of sent
    messages.

    Rows that are cut end a further 2**-22 below the limit, so that a float32 result is not cut
    again.

    Args:
        rows: (k, D), any float dtype and device.
        clip: the bound, or None to only zero the rows that are not finite.

    Returns:
        (k, D), the dtype and device of ``rows``.

    Example:
        >>> import torch
        >>> from fedmtl.privacy import Clip, clip_rows
        >>> rows = torch.tensor([[3.0, 4.0], [0.25, 0.0]])
        >>> clip_rows(rows, Clip(1.0)).norm(dim=1).round(decimals=4).tolist()
        [1.0, 0.25]
    """
    out = torch.empty_like(rows)
    block = block_rows(rows)
    for target, chunk in zip(
        torch.split(out, block), torch.split(rows.detach(), block), strict=True
    ):
        wide, norms = rows_and_norms(chunk, clip)
        factors = clip_factors(norms, clip)
        # Rounding to float32 may lengthen a row by half a unit in its last place, 2**-24.
        factors = torch.where(factors < 1, factors * (1 - 2.0**-22), factors)
        target.copy_(wide * factors[:, None])
    return out


def row_norms(rows: Tensor, clip: Clip | None) -> Tensor:
    """Returns the norm of each row before clipping, in the norm of ``clip`` (L2 without one): (k,)
    float64."""
    chunks = torch.split(rows.detach(), block_rows(rows))
    parts = [rows_and_norms(chunk, clip)[1] for chunk in chunks]
    if parts:
        return torch.cat(parts)
    return torch.zeros(0, dtype=torch.float64)


def not_finite(rows: Tensor) -> int | Tensor:
    """Returns the number of rows (..., D) with a NaN or an infinity. Such a row counts as zero
    in a sum.

    Off the CPU the number stays on the device, so that nobody waits for it yet.
    """
    if rows.device.type != "cpu":
        return (~torch.isfinite(rows).all(-1)).sum()
    # One sum decides the usual case; only a sum that is not finite asks which rows are to blame.
    if math.isfinite(float(rows.sum())):
        return 0
    return int((~torch.isfinite(rows).all(-1)).sum())


def sum_width(bound: float, rows: int) -> float:
    """Returns g, the width of the grid on which sums of clipped rows are exact: a power of two.

    A coordinate is at most ``bound`` <= 2**e, and a sum of ``rows`` <= 2**l of them at most 2**(e +
    l), so with g = 2**(e + l - 53) it is a multiple of g up to 2**53 g. For a thousand rows g is
    about ``bound * 2**-43``.

    Args:
        bound: on the absolute value of a coordinate; the clip's C, public.
        rows: most rows that are summed; the public number of clients, at least 1.
    """
    mantissa, exponent = math.frexp(bound)
    # frexp gives bound = mantissa 2**exponent with a mantissa in [1/2, 1): a power of two has 1/2.
    exponent += (rows - 1).bit_length() - 53 - int(mantissa == 0.5)
    return math.ldexp(1.0, max(exponent, -1021))  # no smaller than that its inverse is a double


def clipped_sum(rows: Tensor, clip: Clip | None, width: float | None = None) -> Tensor:
    """Returns the sum of clipped rows on their grid, exactly, without a float64 copy of the whole
    matrix.

    A row with a NaN or an infinity (or whose norm overflows float64) counts as zero.

    Args:
        rows: (k, D), any float dtype and device; k may be 0.
        clip: the bound, or None for no clipping.
        width: g from :func:`sum_width`, the same for all parts of one sum; None for that of only
            these rows, by the bound of the clip or, without one, by their largest norm.

    Returns:
        (D,) float64 on the CPU, whole multiples of g.

    Example:
        >>> import torch
        >>> from fedmtl.privacy import Clip, clipped_sum
        >>> rows = torch.tensor([[30.0, 40.0], [0.25, 0.0]])
        >>> clipped_sum(rows, Clip(1.0)).round(decimals=4).tolist()
        [0.85, 0.8]
    """
    if width is None:
        width = sum_width(largest_norm(rows) if clip is None else clip.bound, max(1, len(rows)))
    rows = rows.detach()
    limit, order = bounds_of(clip)
    if rows.device.type != "cpu":  # of a round on another device, the one thing that is waited for
        return whole_cells(rows, limit, order, width).cpu().mul_(width)
    if rows.shape[1] >= _LONG:
        program = whole_cells_by_row
    else:
        program = whole_cells
    return program(rows, limit, order, width).mul_(width)


def whole_cells(rows: Tensor, limit: float, order: float, width: float) -> Tensor:
    """Returns the sum of clipped rows (k, D) in multiples of ``width``, each coordinate truncated
    toward zero: float64 (D,).

    Args:
        rows: any float dtype; those that are not finite count as zero.
        limit: on a row's norm; infinity for none.
        order: 1 or 2, of the norm.
        width: of the grid.
    """
    block = block_rows(rows)  # rows that are copied to float64 at once
    cells = torch.zeros([rows.shape[1]], dtype=torch.float64, device=rows.device)
    # One buffer for all blocks: fresh pages would cost more than the arithmetic.
    buffer = torch.empty(
        [min(block, rows.shape[0]), rows.shape[1]], dtype=torch.float64, device=rows.device
    )
    for first in range(0, rows.shape[0], block):
        chunk = rows[first : first + block]
        wide = buffer[: chunk.shape[0]].copy_(chunk)
        norms = torch.linalg.vector_norm(wide, order, [1])
        if _may_be_infinite(norms):
            wide.masked_fill_(~torch.isfinite(norms)[:, None], 0.0)
        wide.mul_((_factors(norms, limit) / width)[:, None]).trunc_()
        # a product of whole numbers with ones is as exact as their sum, and faster for few rows
        cells.addmv_(wide.T, torch.ones([chunk.shape[0]], dtype=torch.float64, device=rows.device))
    return cells


def whole_cells_by_row(rows: Tensor, limit: float, order: float, width: float) -> Tensor:
    """Returns :func:`whole_cells` of long rows on the CPU, one after another, so that the parts of
    a row stay in the cache."""
    cells = torch.zeros([rows.shape[1]], dtype=torch.float64)
    wide = torch.empty_like(cells)
    for row in rows.unbind(0):
        add_clipped(cells, row, limit, order, width, wide)
    return cells


def add_clipped(
    cells: Tensor, row: Tensor, limit: float, order: float, width: float, wide: Tensor
) -> None:
    """Adds one clipped row to an exact sum, in multiples of ``width``, each coordinate truncated
    toward zero.

    Args:
        cells: float64 (D,), the sum, on the CPU.
        row: (D,), any float dtype; one that is not finite counts as zero.
        limit: on its norm; infinity for none.
        order: 1 or 2, of the norm.
        width: of the grid.
        wide: float64 (D,), overwritten: memory of its own for each row would cost as much as the
            arithmetic.
    """
    wide.copy_(row)
    # threads would share the sum, and its last bits show how many
    if order == 1.0 and wide.shape[0] >= 1 << 15:
        parts = [torch.linalg.vector_norm(part, order) for part in torch.split(wide, 1 << 14)]
        norm = float(torch.stack(parts).sum())
    else:
        norm = float(torch.linalg.vector_norm(wide, order))
    # rows clipped before are longer by rounding
    if norm <= limit * (1 + 2.0**-30):
        factor = 1.0
    else:
        factor = limit / norm
    if math.isfinite(norm) and factor >= 2.0**-1022:
        # The view shares memory with the tensor, so truncating it truncates the row.
        scaled = wide.mul_(factor / width).numpy()
        np.trunc(scaled, out=scaled)  # a third of the time of torch.trunc
        cells.add_(wide)


class RowTotal:
    """The clipped sum of one release of one round, to which rows are added as clients make them.

    It is the sum of :func:`clipped_sum` to the last bit: sums of rows on their grid are exact, in
    any order and any parts. It is private, and :meth:`fedmtl.privacy.RoundChannel.release` takes it
    in place of the rows.

    Args:
        dimension: D, of a row.
        clip: of the rows.
        width: of the grid.

    Attributes:
        dimension, clip, width: see above.
    """

    def __init__(self, dimension: int, clip: Clip, width: float) -> None:
        self.dimension = dimension
        self.clip = clip
        self.width = width
        self._bounds = bounds_of(clip)
        self._clients: list[int] = []
        self._cells = torch.zeros(dimension, dtype=torch.float64)
        self._wide = torch.empty_like(self._cells)

    def add(self, clients: Tensor, rows: Tensor) -> None:
        """Adds the rows (k, D) of ``clients``, int64 (k,); any float dtype, on the CPU.

        Raises:
            PrivacyError: rows of another shape, whole numbers, or another number of clients.
        """
        # Two rows of one client, or one number for all coordinates, would be longer than the clip.
        shape = (*clients.shape, self.dimension)
        if clients.ndim != 1 or rows.shape != shape or not rows.is_floating_point():
            raise PrivacyError(
                f"A sum takes float rows of shape (k, {self.dimension}), one from each of k "
                f"clients, not {tuple(rows.shape)} of {rows.dtype} from {tuple(clients.shape)}."
            )
        self._clients += clients.tolist()
        for row in rows.detach().unbind(0):
            add_clipped(self._cells, row, *self._bounds, self.width, self._wide)

    @property
    def clients(self) -> list[int]:
        """Returns the clients of the rows that have been added, sorted."""
        return sorted(self._clients)

    def sum(self) -> Tensor:
        """Returns the sum, float64 (D,), whole multiples of the width."""
        return self._cells * self.width


def largest_norm(rows: Tensor) -> float:
    """Returns the largest finite L2 norm of rows (k, D), 0 without any."""
    norms = row_norms(rows, None)
    if len(norms):
        return float(torch.where(torch.isfinite(norms), norms, 0.0).max())
    return 0.0


def block_rows(rows: Tensor) -> int:
    """Returns the number of ``rows`` (k, D) that are copied to float64 at once."""
    if rows.device.type == "cpu":
        elements = _BLOCK_ELEMENTS
    else:
        elements = _DEVICE_BLOCK_ELEMENTS
    return max(1, elements // max(1, rows.shape[1]))


def rows_and_norms(rows: Tensor, clip: Clip | None) -> tuple[Tensor, Tensor]:
    """Returns rows in float64, those that are not finite as zeros, and their norms before that,
    (k,) float64."""
    wide = rows.to(torch.float64)
    norms = torch.linalg.vector_norm(wide, ord=bounds_of(clip)[1], dim=1)
    if _may_be_infinite(norms):
        wide = wide.masked_fill(~torch.isfinite(norms)[:, None], 0.0)
    return wide, norms


def _may_be_infinite(norms: Tensor) -> bool:
    """Returns False if all norms are finite; always True off the CPU, where to ask is to wait."""
    return norms.device.type != "cpu" or not bool(torch.isfinite(norms).all())
