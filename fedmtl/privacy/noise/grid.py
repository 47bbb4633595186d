"""The public grid of secure mode: the least significant bits of a released value say nothing.

A double made by adding noise to a private sum gives the sum away through its low bits (Mironov, "On
significance of the least significant bits for differential privacy", CCS 2012). Sum and noise are therefore
rounded apart to multiples of a public power of two and added as whole numbers, so a release is a function of
the rounded sum plus the noise, and which values are reachable does not depend on the sum.

Noise in whole numbers (:mod:`.discrete`) needs none of this: the rows are on a grid before they are summed, and the
noise is drawn on it. Of the other laws, what is left of the arithmetic: tails end at 2**-129, so a pure epsilon holds
but for a delta of about ``D 2**-128``.
The noise is a double with a spacing of about 2**-52 of its size, so the law of the rounded noise is the ideal one up to
relative errors that grow as the width shrinks beside the noise; no epsilon here accounts for them, and reports of runs
in secure mode say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._check import positive, positive_int
from .laws import Norm
from .sources import NoiseSource


@dataclass(frozen=True, eq=False)
class GridValue:
    """A value that was released in secure mode, and the public grid on which it lies.

    Attributes:
        step: of the release.
        value: (D,) float64, a whole multiple of ``width`` divided by ``divisor``.
        width: of the grid.
        divisor: the public constant by which the noised sum was divided.
    """

    step: int
    value: Tensor
    width: float
    divisor: float

    @property
    def off_grid(self) -> int:
        """Return the number of coordinates that are not on the grid."""
        cells = torch.round(self.value * self.divisor / self.width)
        return int((cells * self.width / self.divisor != self.value).sum())


def grid_width(clip_bound: float | Tensor, norm: Norm, dimension: int, scale: float | Tensor) -> float | Tensor:
    """Return the width of the public grid: a power of two, at most ``scale * 2**-20``; a number, or float64 (k,) by
    row.

    Rounding moves the sum by at most half a width in every coordinate, so the sums of two neighbours move
    apart by at most D widths in the L1 norm and sqrt(D) widths in the L2 norm. That is at most half of the
    margin of ``2**-20`` times the bound that every clip leaves; the other half is for rounding in float64: of norms,
    and of sums that are not exact (outer products, multiples of rows of records) for up to 2**15 rows in any order.

    Args:
        clip_bound: C, the bound on one contribution, above 0; a number, or (k,) by row.
        norm: the norm of that bound.
        dimension: D, at least 1.
        scale: size of the noise on one coordinate of the sum (root mean square), above 0; a number, or (k,) by row.
    """
    bound, size = (torch.as_tensor(value, dtype=torch.float64) for value in (clip_bound, scale))
    for name, value in (("clip_bound", bound), ("scale", size)):
        if value.numel():
            positive("grid_width", **{name: float(value.min())})
    positive_int("grid_width", dimension=dimension)
    spread = float(dimension) if norm == "l1" else math.sqrt(dimension)
    mantissa, exponent = torch.frexp(torch.minimum(bound * 2.0**-21 / spread, size * 2.0**-20))
    width = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    return width if width.ndim else float(width)


def whole_width(sum_width: float, scale: float) -> float:
    """Return the width of the grid on which rows are truncated, summed and noised in whole numbers: a power of two.

    It is that of exact sums, or the largest one that is at most 2**-39 of the noise, where that is larger. Then a
    deviation is less than 2**40 cells, rounded up, and a sum at most 2**53 of them, so sums and noise fit 64-bit
    integers: of a coordinate, 2**62 cells are four million deviations.

    Args:
        sum_width: g, from :func:`fedmtl.privacy.clip.sum_width`.
        scale: deviation of the noise on one coordinate of the sum, above 0.
    """
    return max(sum_width, math.ldexp(1.0, math.frexp(scale)[1] - 40))


def sum_spacing(clients: int) -> float:
    """Return a bound on the width of the grid of exact sums over the clip norm C, whatever C is: of n <= 2**l clients
    it is less than 2**(l - 52) C. With 2**-39 of the deviation of the noise, which bounds the other of the two widths
    of :func:`whole_width`, it bounds their larger one.

    Args:
        clients: n, the most rows that are summed.
    """
    return math.ldexp(1.0, (clients - 1).bit_length() - 52)


def noised(
    total: Tensor,
    noise: Tensor,
    source: NoiseSource,
    *,
    bound: float | Tensor,
    norm: Norm,
    scale: float | Tensor,
    cell: float | None = None,
) -> tuple[Tensor, float | Tensor | None]:
    """Return a private sum with its noise: the one place where noise is added.

    Whole numbers of a cell are added as integers, exactly. Other noise is added as it is in seeded mode, and in secure
    mode on the public grid, to which the sum and the noise are rounded, the latter with a dither of its own.

    Args:
        total: (..., D) float64 private sum; with ``cell`` whole multiples of it, at most 2**53 of them.
        noise: the same shape and device, drawn from ``source``: float64 and scaled to the sensitivity, or int64 in
            cells.
        source: seeded or secure.
        bound: C, the bound on one contribution; a number, or (k,) of k rows.
        norm: the norm of that bound.
        scale: size of the noise on one coordinate (root mean square); a number, or (k,) of k rows.
        cell: from :func:`whole_width`, where the noise is in whole numbers.

    Returns:
        (..., D) float64, and the width of the grid, a number or (k,); None without one, in seeded mode.
    """
    secure = source.name == "secure"
    if cell is not None:
        return ((total / cell).to(torch.int64) + noise).to(torch.float64) * cell, cell if secure else None
    if not secure:
        return total + noise, None
    width = grid_width(bound, norm, total.shape[-1], scale)
    dither = torch.from_numpy(source.coins("dither", 0).uniform(noise.numel())).view(noise.shape)
    each = width.to(total.device)[:, None] if isinstance(width, Tensor) else width
    return to_grid(total, noise, each, dither.to(total.device)), width


def to_grid(total: Tensor, noise: Tensor, width: float | Tensor, dither: Tensor | None = None) -> Tensor:
    """Return ``total`` and ``noise`` rounded to multiples of ``width`` apart, then added.

    The sum of two whole numbers in float64 is a function of their exact sum, even beyond 2**53. The total goes to the
    nearest multiple; so does the noise, or with ``dither`` to the multiple above where the fraction left over exceeds
    it, else to the one below. The dither is one more independent noise, so no guarantee changes, and it makes the law
    of the rounded noise smoother than the doubles it comes from.

    Args:
        total: float64 private sum, any shape.
        noise: float64, the same shape.
        width: from :func:`grid_width`, a number or a tensor that broadcasts.
        dither: float64 in [0, 1), the same shape, secret and fresh like the noise; None to round to the nearest.

    Returns:
        float64, the shape of ``total``.
    """
    cells = noise / width
    if dither is None:
        cells = torch.round(cells)
    else:
        whole = torch.floor(cells)
        cells = whole + (dither < cells - whole)
    return (torch.round(total / width) + cells) * width
