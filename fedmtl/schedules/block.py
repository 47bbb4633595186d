"""Blocks of steps: rounds of cohorts, and activations of clients that act one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Consecutive steps of R replicates, and who takes part in each.

    Attributes:
        first: number of the first step, from 0 in the whole run.
        time: float64 (R, S), virtual time, non-decreasing along each row.
        clients: int64 (R, S, k), positions in the data; -1 is no client. A round is one step with
            its cohort, in the order of the clients' keys; an activation is a step with one client
            (-1 where a replicate has finished).
    """

    first: int
    time: Tensor
    clients: Tensor

    def __len__(self) -> int:
        return self.clients.shape[1]

    @property
    def step(self) -> int:
        """Returns the number of the last step."""
        return self.first + len(self) - 1

    @property
    def replicates(self) -> int:
        """Returns R, the number of replicates."""
        return self.clients.shape[0]

    @property
    def client(self) -> Tensor:
        """Returns who acts in each activation, int64 (R, S)."""
        return self.clients[:, :, 0]

    @property
    def cohort(self) -> Tensor:
        """Returns the clients of the first replicate that take part, each once, int64 (k,); of a
        round in their order."""
        clients = self.clients[0].reshape(-1)
        clients = clients[clients >= 0]
        return clients if len(self) == 1 else clients.unique()

    def window(self, start: int, stop: int) -> Block:
        """Returns steps ``start`` to ``stop - 1`` counted from the first one of this block (views, no copies)."""
        return Block(self.first + start, self.time[:, start:stop], self.clients[:, start:stop])


def rounds(draw: Callable[[int], Tensor], *, start: int, stop: int) -> Iterator[Block]:
    """Yields rounds ``start`` to ``stop - 1``, one cohort each, at intervals of one time unit.

    Args:
        draw: cohort of a round, int64 (k,) clients.
        start, stop: first round, and one past the last.
    """
    for step in range(start, stop):
        yield Block(step, torch.tensor([[float(step)]], dtype=torch.float64), draw(step)[None, None])
