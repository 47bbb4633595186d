"""One event of a schedule."""

from __future__ import annotations

from dataclasses import dataclass

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
