"""Toom-Cook products: convolutions of short rows at a few points."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

# Small points and their inverses: larger powers would lose digits in float32.
_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)
_TILE = 4  # results at once; more of them save products and lose more digits


@dataclass(frozen=True)
class Toom:
    """A correlation of ``size`` numbers along a line, ``tile`` results at once: y = A^T [(G f) * (D
    x)], elementwise, of a filter f and ``points`` numbers x.

    Attributes:
        tile: the number of results.
        points: the number of products, ``tile + size - 1``.
        a, g, d: (points, tile), (points, size), (points, points).
    """

    tile: int
    points: int
    a: Tensor
    g: Tensor
    d: Tensor

    @classmethod
    @functools.cache
    def of(cls, size: int, dtype: torch.dtype) -> Toom:
        """Returns the correlation with filters of ``size`` numbers, at most as many as there are
        points, infinity included.

        Polynomials with coefficients u and v are multiplied by their values: (u v) = V^-1 (V_u u *
        V_v v), V with the powers of the points in its rows. The transpose of that linear function
        of u is the correlation with v.
        """
        tile = 1
        if size > 1:
            tile = min(_TILE, len(_POINTS) + 2 - size)
        points = torch.tensor(_POINTS[: tile + size - 2], dtype=torch.float64)

        def powers(count: int) -> Tensor:
            infinite = torch.zeros(1, count, dtype=torch.float64)
            infinite[0, -1] = 1.0
            return torch.cat([points[:, None] ** torch.arange(count), infinite])

        count = tile + size - 1
        inverse = torch.linalg.inv(powers(count))
        return cls(
            tile,
            count,
            powers(tile).to(dtype),
            powers(size).to(dtype),
            inverse.mT.to(dtype).contiguous(),
        )
