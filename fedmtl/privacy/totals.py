"""Sums of rows that are made where the rows are, so that the rows of a cohort are never in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

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
        self._dimension, self._width, self._bounds, self._tap = dimension, width, bounds_of(clip), tap
        self._clients: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._free: SimpleQueue[Tensor] = SimpleQueue()

    def add(self, clients: Tensor, rows: Tensor) -> None:
        """Add the rows (k, D) of ``clients``, int64 (k,); any float dtype, on the CPU. Several threads may call it."""
        self._clients.append(clients)
        if self._tap is not None:
            self._tap(clients, rows)
        with self._part() as cells:
            for row in rows:
                add_clipped(cells, row, *self._bounds, self._width)

    @contextmanager
    def _part(self) -> Iterator[Tensor]:
        """Borrow a part of the sum, float64 (D,), to which no other thread adds meanwhile."""
        try:
            cells = self._free.get_nowait()
        except Empty:
            cells = torch.zeros(self._dimension, dtype=torch.float64)
            self._parts.append(cells)
        try:
            yield cells
        finally:
            self._free.put(cells)

    @property
    def clients(self) -> list[int]:
        """Return the clients of the rows that have been added, sorted."""
        return sorted(client for part in self._clients for client in part.tolist())

    def sum(self) -> Tensor:
        """Return the sum, float64 (D,), whole multiples of the width."""
        total = torch.zeros(self._dimension, dtype=torch.float64)
        for cells in self._parts:
            total += cells
        return total.mul_(self._width)
