"""Precision matrices of a prior over a network's parameters: the quadratic pull 1/2 (w - m)^T P (w
- m).

P is block diagonal, and never built. In a matrix D of parameters that is one of its blocks, P acts
on one side, as D -> D (c I - V (c - a) V^T) with V of orthonormal columns: strength a_j along the
directions of V, c across them. Everywhere else it is a number times the identity. So a product with
P costs as much as one with V, and so does the proximal step of the pull, since (I + eta P)^-1 has
the same form with 1 / (1 + eta a_j) and 1 / (1 + eta c).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A tensor of parameters as a matrix: outputs by inputs, a vector as one column.

    Attributes:
        name: of the parameter.
        first: place at which it begins in a flat row of all parameters.
        shape: (rows, columns).
        columns: True if the side of interest is that of the columns (inputs), not of the rows
            (outputs).
    """

    name: str
    first: int
    shape: tuple[int, int]
    columns: bool

    @property
    def places(self) -> slice:
        """Returns the columns of the matrix in a flat row."""
        return slice(self.first, self.first + self.shape[0] * self.shape[1])

    @property
    def width(self) -> int:
        """Returns p, the length of the side of interest."""
        if self.columns:
            return self.shape[1]
        return self.shape[0]

    def matrix(self, rows: Tensor) -> Tensor:
        """Returns the matrices of flat rows, the side of interest last: (..., D) -> (..., q, p)."""
        matrices = rows[..., self.places].reshape(*rows.shape[:-1], *self.shape)
        if self.columns:
            return matrices
        return matrices.mT

    def flat(self, matrices: Tensor) -> Tensor:
        """Returns matrices (..., q, p) as they stand in flat rows, the inverse of
        :meth:`matrix`."""
        if not self.columns:
            matrices = matrices.mT
        return matrices.reshape(*matrices.shape[:-2], -1)


@dataclass(frozen=True)
class PrecisionBlock:
    """P in one matrix of parameters of K clients.

    Attributes:
        part: the matrix, and on which side of it P acts.
        directions: V, (p, r).
        along: a, (K, r).
        across: c, (K,).
    """

    part: Part
    directions: Tensor
    along: Tensor
    across: Tensor

    def scaled(self, rows: Tensor, along: Tensor, across: Tensor) -> Tensor:
        """Returns the product of a matrix of this form with the block of flat ``rows``: (K, D) ->
        (K, size)."""
        matrix = self.part.matrix(rows)
        # P = c I - V (c - a) V^T: a product with (p, r) matrices, and none with (p, p).
        v = self.directions.expand(len(rows), -1, -1)
        product = across[:, None, None] * matrix
        return self.part.flat(
            product - torch.bmm(torch.bmm(matrix, v) * (across[:, None] - along)[:, None, :], v.mT)
        )


@dataclass(frozen=True)
class Precision:
    """P for the flat parameters of K clients: ``strength`` times the identity outside of
    ``blocks``."""

    strength: float
    blocks: tuple[PrecisionBlock, ...]

    def times(self, rows: Tensor) -> Tensor:
        """Returns P w for every row w: (K, D) -> (K, D)."""
        product = self.strength * rows
        for block in self.blocks:
            product[:, block.part.places] = block.scaled(rows, block.along, block.across)
        return product

    def resolvent(self, rows: Tensor, step: float) -> Tensor:
        """Returns (I + step P)^-1 w for every row w: (K, D) -> (K, D)."""
        product = rows / (1.0 + step * self.strength)
        for block in self.blocks:
            # A function of P has the same directions, and the function of each eigenvalue.
            along = 1.0 / (1.0 + step * block.along)
            across = 1.0 / (1.0 + step * block.across)
            product[:, block.part.places] = block.scaled(rows, along, across)
        return product

    def of(self, clients: Any) -> Precision:
        """Returns P of some of the clients, a slice or int64 positions."""
        chosen = tuple(
            replace(b, along=b.along[clients], across=b.across[clients]) for b in self.blocks
        )
        return Precision(self.strength, chosen)
