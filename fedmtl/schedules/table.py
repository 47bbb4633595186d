"""Tables of events: a window of an asynchronous schedule, for one or many replicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .event import Event


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
