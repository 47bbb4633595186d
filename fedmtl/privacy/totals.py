"""Sums of rows that are made where the rows are, so that the rows of a cohort are never in memory at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .clip import Clip, add_clipped, bounds_of


class RowTotal:
    """The clipped sum of one release of one round, to which rows are added as clients make them.

    It is the sum of :func:`~fedmtl.privacy.clip.clipped_sum` to the last bit: sums of rows on their grid are exact, in
    any order and any parts. It is private, and :meth:`fedmtl.privacy.Rounds.release` takes it in place of the rows.

    Args:
        dimension: D, of a row.
        clip: of the rows.
        width: of the grid.
        tap: is called with clients (k,) and the rows (k, D) that are added of them; None for no call.
    """

    def __init__(
        self, dimension: int, clip: Clip, width: float, tap: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        self._width, self._bounds, self._tap = width, bounds_of(clip), tap
        self._clients: list[Tensor] = []
        self._cells = torch.zeros(dimension, dtype=torch.float64)

    def add(self, clients: Tensor, rows: Tensor) -> None:
        """Add the rows (k, D) of ``clients``, int64 (k,); any float dtype, on the CPU."""
        self._clients.append(clients)
        if self._tap is not None:
            self._tap(clients, rows)
        for row in rows:
            add_clipped(self._cells, row, *self._bounds, self._width)

    @property
    def clients(self) -> list[int]:
        """Return the clients of the rows that have been added, sorted."""
        return sorted(client for part in self._clients for client in part.tolist())

    def sum(self) -> Tensor:
        """Return the sum, float64 (D,), whole multiples of the width."""
        return self._cells * self._width
