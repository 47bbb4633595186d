"""Which examples each client uses at each local step: dense batches from ragged clients.

How wide a client's batches are is decided by its own number of examples (:func:`batch_widths`), never by those of the
clients beside it: numbers of examples are private, and the rounding of a matrix product depends on its shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..random import derive_key, keyed_bits

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from .solver import LocalSolver

_CLIENT_BITS = 20
_PLANNED = 1 << 24


@dataclass(frozen=True)
class Batch:
    """One local step of the leading clients of a plan.

    Attributes:
        index: int64 (A, B), rows of the flat data; padding repeats an example of the same client.
        mask: bool (A, B), which entries are no padding.
        active: A, how many leading clients take part.
        done: places of the clients whose last step it is, int64.
    """

    index: Tensor
    mask: Tensor
    active: int
    done: Tensor


@dataclass(frozen=True)
class BatchPlan:
    """The local steps of k clients; made by :func:`plan_batches`.

    Attributes:
        keys: int64 (k,), each client's key.
        steps: int64 (k,), local steps per client; a client that has made them repeats its last batch while it stands
            among the leading ones.
        index: int64 (S, k, B), the rows of the flat data of every local step; padding repeats one of the same client.
        lengths: int64 (S, k), how many of them are no padding.
        mask: bool (S, k, B), which of them.
        grain: the leading clients of a step are a multiple of this many, as far as there are clients.
    """

    keys: Tensor
    steps: Tensor
    index: Tensor
    lengths: Tensor
    mask: Tensor
    grain: int = 1

    @property
    def max_steps(self) -> int:
        """Local steps of the client that makes most."""
        return int(self.steps.numpy().max(initial=0))

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of the examples in their batch's mean, (S, k, B); 0 of padding."""
        return self.mask[: self.max_steps].to(dtype).div_(self.lengths[: self.max_steps, :, None])

    def part(self, clients: slice) -> BatchPlan:
        """Return the plan of some of the clients, sharing this one's memory."""
        steps = (self.index[:, clients], self.lengths[:, clients], self.mask[:, clients])
        return BatchPlan(self.keys[clients], self.steps[clients], *steps, self.grain)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of local steps 0 to ``max_steps - 1``, of a client by itself without padding."""
        steps, (count, columns) = self.steps.numpy(), self.index.shape[1:]
        for number in range(self.max_steps):
            last = int(np.flatnonzero(steps > number)[-1]) + 1
            active = min(count, -(-last // self.grain) * self.grain)
            width = columns if count > 1 else int(self.lengths[number])
            done = torch.from_numpy(np.flatnonzero(steps == number + 1))
            yield Batch(self.index[number, :active, :width], self.mask[number, :active, :width], active, done)


def plan_batches(
    data: FederatedDataset,
    solver: LocalSolver,
    clients: Tensor,
    *,
    seed: int,
    round: int,
    steps: Tensor | None = None,
    width: int | None = None,
    grain: int = 1,
) -> BatchPlan:
    """Return the batches of a local run of ``clients``, int64 (k,), best in the order of decreasing numbers of steps.

    Each epoch permutes a client's examples by keys of (seed, client, round, epoch), so batches do not depend on which
    other clients are in the plan. The last partial batch of an epoch stays, at its size.

    Args:
        data: the clients' data, of each at least one example.
        solver: says how many steps each client makes, and on how many examples.
        clients: int64 (k,).
        seed, round: address the permutations.
        steps: int64 (k,), local steps in place of the solver's.
        width: B, columns of every batch, at least the largest batch of a client; None: that of the widest client.
        grain: see :class:`BatchPlan`.
    """
    counts, first, keys = data.train.counts[clients], data.train.offsets[clients], data.keys[clients]
    steps = solver.step_counts(counts) if steps is None else steps
    batch_size = solver.batch_size
    per_epoch = batches_per_epoch(counts, batch_size)
    size = width or (int(batch_widths(counts, batch_size).max()) if len(counts) else 0)
    most = int(steps.max()) if len(counts) else 0
    step = torch.minimum(torch.arange(most)[:, None], (steps - 1).clamp(min=0))
    epoch = torch.div(step, per_epoch, rounding_mode="floor")
    begin = (step - epoch * per_epoch) * (batch_size or 0)
    lengths = (counts - begin).clamp(max=size)
    column = torch.arange(size)
    within = begin[..., None] + torch.where(column < lengths[..., None], column, 0)
    start = torch.cumsum(counts, 0) - counts
    segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(segment)) - start[segment]
    rows = first[segment] + place
    orders = [rows]  # of every step, where a batch has all of a client's examples
    if batch_size is None:
        epoch = torch.zeros_like(epoch)
    elif most:
        orders = []
        for number in range(int(epoch.max()) + 1):
            bits = keyed_bits(derive_key(seed, f"batches/{number}"), keys[segment], round, place)
            order = torch.argsort((segment << (63 - _CLIENT_BITS)) | (bits >> _CLIENT_BITS), stable=True)
            orders.append(rows[order])
    index = torch.cat(orders)[(epoch * len(rows) + start)[..., None] + within]
    return BatchPlan(keys, steps, index, lengths, column < lengths[..., None], grain)


def batches_per_epoch(counts: Tensor, batch_size: int | None) -> Tensor:
    """ceil(count / batch_size) for each client, 1 when ``batch_size`` is ``None``."""
    if batch_size is None:
        return torch.ones_like(counts)
    return torch.div(counts + batch_size - 1, batch_size, rounding_mode="floor")


def batch_widths(counts: Tensor, batch_size: int | None) -> Tensor:
    """Return the width of the batches of clients with ``counts`` examples, each of them by its own count: int64 (k,)
    -> (k,).

    ``batch_size``, and for fewer examples, or where that is ``None``, the next of 16, 32, 48, 64, 96, 128, 192, ...
    """
    wide = counts.clamp(min=16)
    power = 2 ** torch.ceil(torch.log2(wide.double())).long()
    width = torch.where((4 * wide <= 3 * power) & (power >= 64), power // 4 * 3, power)
    return width if batch_size is None else width.clamp(max=batch_size)


def max_clients(dimension: int) -> int:
    """Return how many clients of ``dimension`` parameters to stack at once: about 1 GiB of float32 rows, at most
    2**19."""
    return max(1, min(1 << (_CLIENT_BITS - 1), math.floor((1 << 28) / dimension)))


def plannable(steps: int, width: int, grain: int) -> int:
    """Clients to plan at once: about 128 MiB of row numbers, at most 2**19 clients, a multiple of ``grain``."""
    most = min(1 << (_CLIENT_BITS - 1), _PLANNED // max(1, steps * width))
    return max(1, most // grain) * grain
