"""Sums of rows that are made where the rows are, so that the rows of a cohort are never in memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from ..errors import PrivacyError
from .clip import Clip, add_clipped, bounds_of


class RowTotal:
    """The clipped sum of one release of one round, to which rows are added as clients make them.

    It is the sum of :func:`~fedmtl.privacy.clip.clipped_sum` to the last bit: sums of rows on their grid are exact, in
    any order and any parts. It is private, and :meth:`fedmtl.privacy.Channel.release` takes it in place of the rows.

    Args:
        name: of the release.
        dimension: D, of a row.
        clip: of the rows.
        width: of the grid.

    Attributes:
        limits: limit, order of the norm and width, as :func:`~fedmtl.privacy.clip.add_clipped` takes them.
    """

    def __init__(self, name: str, dimension: int, clip: Clip, width: float) -> None:
        self.name, self.dimension = name, dimension
        self.limits = [*bounds_of(clip), width]
        self._clients: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._free: SimpleQueue[Tensor] = SimpleQueue()

    @contextmanager
    def part(self) -> Iterator[Tensor]:
        """Borrow a part of the sum, float64 (D,), to which no other thread adds meanwhile."""
        try:
            cells = self._free.get_nowait()
        except Empty:
            cells = torch.zeros(self.dimension, dtype=torch.float64)
            self._parts.append(cells)
        try:
            yield cells
        finally:
            self._free.put(cells)

    def add(self, rows: Tensor) -> None:
        """Add rows (k, D) that are there already, any float dtype, on the CPU."""
        with self.part() as cells:
            for row in rows:
                add_clipped(cells, row, *self.limits)

    def has(self, clients: Tensor) -> None:
        """Say that the rows of ``clients``, int64 (k,), have been added; who adds them to a :meth:`part` says so.

        Raises:
            PrivacyError: one of a client was added before.
        """
        self._clients.append(clients)
        if torch.cat(self._clients).unique().numel() < self.count:
            raise PrivacyError(f"Release {self.name!r}: a client's row was added twice; each client sends one.")

    @property
    def clients(self) -> list[int]:
        """Return the clients of the rows that have been added, sorted."""
        return sorted(client for part in self._clients for client in part.tolist())

    @property
    def count(self) -> int:
        """Return how many rows have been added."""
        return sum(map(len, self._clients))

    def sum(self) -> Tensor:
        """Return the sum, float64 (D,), whole multiples of the width."""
        total = torch.zeros(self.dimension, dtype=torch.float64)
        for cells in self._parts:
            total += cells
        return total.mul_(self.limits[2])
