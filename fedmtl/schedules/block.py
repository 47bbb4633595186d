"""Blocks of steps: rounds of cohorts, and activations of clients that act one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Starts:
    """The public states from which the participants of a round started, and their weights.

    A participant starts from the public state of the moment at which the server asks it. Version v
    of that state is the one before round v.

    Attributes:
        versions: int64 (k,), version of the public state from which each participant started, in
            the order of the block's participants.
        weights: float64 (k,), public factors of their clipped rows, in [0, 1].
        kept: the earlier versions that later rounds may use.
    """

    versions: Tensor
    weights: Tensor
    kept: frozenset[int]


@dataclass(frozen=True)
class Block:
    """Consecutive steps of R replicates, with the participants of each.

    Attributes:
        first: number of the first step, from 0 in the whole run.
        time: float64 (R, S), virtual time, non-decreasing along each row.
        clients: int64 (R, S, k), positions in the data; -1 is no client. A round is one step with
            its cohort, in the order of the clients' keys. An activation is a step with one client
            (-1 if a replicate has finished).
        starts: the public states from which the participants of a round started; None if all
            started from the state before the round.

    Example:
        >>> import torch
        >>> from fedmtl.schedules import Block
        >>> cohort = torch.tensor([[[0, 2, 3]]])
        >>> block = Block(first=5, time=torch.zeros(1, 1), clients=cohort)
        >>> block.step, block.cohort.tolist()
        (5, [0, 2, 3])
    """

    first: int
    time: Tensor
    clients: Tensor
    starts: Starts | None = None

    def __len__(self) -> int:
        return self.clients.shape[1]

    @property
    def step(self) -> int:
        """Returns the number of the last step."""
        return self.first + self.clients.shape[1] - 1

    @property
    def replicates(self) -> int:
        """Returns R, the number of replicates."""
        return self.clients.shape[0]

    @property
    def client(self) -> Tensor:
        """Returns the client of each activation, int64 (R, S)."""
        return self.clients[:, :, 0]

    @property
    def cohort(self) -> Tensor:
        """Returns the participants of the first replicate, each once, int64 (k,).

        Those of a round are in the round's order.
        """
        # in the activations of a block a client may act several times
        clients = self.clients[0].reshape(-1)
        clients = clients[clients >= 0]
        if self.clients.shape[1] == 1:
            return clients
        return clients.unique()

    def ascending(self) -> Block:
        """Returns this block with the participants of each step in ascending order."""
        clients, order = torch.sort(self.clients)
        starts = self.starts
        if starts is not None:
            order = order[0, 0]
            starts = replace(starts, versions=starts.versions[order], weights=starts.weights[order])
        return replace(self, clients=clients, starts=starts)

    def window(self, start: int, stop: int) -> Block:
        """Returns some of the steps; the tensors are views.

        Args:
            start: first step, counted from the first one of this block.
            stop: step after the last one.
        """
        time = self.time[:, start:stop]
        return Block(self.first + start, time, self.clients[:, start:stop])


def rounds(draw: Callable[[int], Tensor], *, start: int, stop: int) -> Iterator[Block]:
    """Yields rounds ``start`` to ``stop - 1``, one cohort each, at intervals of one time unit.

    Args:
        draw: cohort of a round, int64 (k,) clients.
        start: the first round.
        stop: one past the last.

    Example:
        >>> import torch
        >>> from fedmtl.schedules import rounds
        >>> steps = rounds(lambda step: torch.tensor([0, step]), start=1, stop=3)
        >>> [block.cohort.tolist() for block in steps]
        [[0, 1], [0, 2]]
    """
    # round r takes place at virtual time r
    for step in range(start, stop):
        time = torch.tensor([[float(step)]], dtype=torch.float64)
        yield Block(step, time, draw(step)[None, None])
