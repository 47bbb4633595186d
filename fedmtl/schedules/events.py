"""Events of a schedule: single ones, tables of them for one or many replicates, and rounds of cohorts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Event:
    """Who acts, and when.

    Attributes:
        step: number of the event, from 0.
        time: float64 (R,), virtual time of each replicate.
        clients: int64 (R, k), positions in the data; -1 is nobody.
    """

    step: int
    time: Tensor
    clients: Tensor

    @property
    def cohort(self) -> Tensor:
        """int64 (k,): the clients of a single replicate, in the order of their keys."""
        (clients,) = self.clients
        return clients[clients >= 0]


@dataclass(frozen=True)
class EventTable:
    """Steps ``start`` to ``stop - 1`` of R replicates: one client a step.

    Attributes:
        step: int64 (S,), numbers of the events, from 0 in the whole run.
        time: float64 (R, S), virtual time, non-decreasing along each row.
        client: int64 (R, S), positions in the data; -1 is nobody (a replicate whose clients have all finished).
        activation: int64 (R, S), how often that client has acted before, 0 at its first event; -1 for nobody.
    """

    step: Tensor
    time: Tensor
    client: Tensor
    activation: Tensor

    def __len__(self) -> int:
        return self.step.shape[0]

    @property
    def replicates(self) -> int:
        """R, the number of replicates."""
        return self.client.shape[0]

    def window(self, start: int, stop: int) -> EventTable:
        """Rows ``start`` to ``stop - 1`` counted from the first row of this table (views, no copies)."""
        part = slice(start, stop)
        return EventTable(self.step[part], self.time[:, part], self.client[:, part], self.activation[:, part])

    def events(self) -> Iterator[Event]:
        """One :class:`Event` a step, with ``clients`` of shape (R, 1)."""
        for i, step in enumerate(self.step.tolist()):
            yield Event(step, self.time[:, i], self.client[:, i : i + 1])


def rounds(draw: Callable[[int], Tensor], clients: Tensor, *, start: int, stop: int) -> Iterator[Event]:
    """Events ``start`` to ``stop - 1``, one cohort each, one time unit apart.

    Args:
        draw: cohort of a round, as sorted ranks in [0, n), int64 (k,).
        clients: int64 (n,), the client at each rank.
        start, stop: first round, and one past the last.
    """
    for step in range(start, stop):
        yield Event(step, torch.tensor([float(step)], dtype=torch.float64), clients[draw(step)][None])
