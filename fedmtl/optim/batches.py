"""Which examples each client uses at each local step: dense batches from ragged clients."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..random import derive_key, keyed_bits

_CLIENT_BITS = 20
_PLANNED = 1 << 24


@dataclass(frozen=True)
class Batch:
    """One local step of the leading clients of a plan.

    Attributes:
        index: int64 (A, B), rows of the flat data; padding repeats an example of the same client.
        mask: bool (A, B), or ``None`` when nothing is padded.
        active: A, how many leading clients take part.
    """

    index: Tensor
    mask: Tensor | None
    active: int


class BatchPlan:
    """The local steps of clients given in decreasing order of their number of steps.

    Each epoch permutes a client's examples by keys of (seed, client, round, epoch), so batches do not depend on which
    clients are planned together. The last partial batch of an epoch is kept, at its own size.

    Args:
        counts: int64 (k,), examples per client, each at least 1.
        first: int64 (k,), each client's first row in the flat data.
        keys: int64 (k,), each client's key.
        steps: int64 (k,), local steps per client, non-increasing.
        batch_size: examples per batch; ``None`` uses all of a client's examples in every step.
        seed, round: address the permutations.

    Attributes:
        keys: as given.
        round: as given.
        steps: as given.
    """

    def __init__(
        self,
        *,
        counts: Tensor,
        first: Tensor,
        keys: Tensor,
        steps: Tensor,
        batch_size: int | None,
        seed: int,
        round: int,
    ) -> None:
        self.keys, self.steps, self.round = keys, steps, round
        per_epoch = batches_per_epoch(counts, batch_size)
        widest = int(counts.max()) if len(counts) else 0
        size = widest if batch_size is None else min(batch_size, widest)
        step = torch.arange(int(steps[0]) if len(steps) else 0)[:, None]
        epoch = torch.div(step, per_epoch, rounding_mode="floor")
        begin = (step - epoch * per_epoch) * (widest if batch_size is None else batch_size)
        lengths = (counts - begin).clamp(max=size)
        column = torch.arange(size)
        within = begin[..., None] + torch.where(column < lengths[..., None], column, 0)
        start = torch.cumsum(counts, 0) - counts
        epochs = 1 if batch_size is None else int(epoch.max()) + 1 if epoch.numel() else 0
        segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
        place = torch.arange(len(segment)) - start[segment]
        rows = first[segment] + place
        orders = [rows] if batch_size is None else []
        for number in range(len(orders), epochs):
            bits = keyed_bits(derive_key(seed, f"batches/{number}"), keys[segment], round, place)
            order = torch.argsort((segment << (63 - _CLIENT_BITS)) | (bits >> _CLIENT_BITS), stable=True)
            orders.append(rows[order])
        flat = torch.cat(orders) if orders else rows
        used = torch.zeros_like(epoch) if batch_size is None else epoch
        self._index = flat[(used * len(rows) + start)[..., None] + within]  # (S, k, size)
        self._lengths: np.ndarray = lengths.numpy()  # (S, k)

    @property
    def max_steps(self) -> int:
        """Local steps of the client that makes most."""
        return int(self.steps[0]) if len(self.steps) else 0

    def part(self, clients: slice) -> BatchPlan:
        """The plan of some of the clients, sharing this one's memory."""
        plan = copy.copy(self)
        plan.keys, plan.steps = self.keys[clients], self.steps[clients]
        plan._index, plan._lengths = self._index[:, clients], self._lengths[:, clients]
        return plan

    def batches(self) -> Iterator[Batch]:
        """The batches of local steps 0 to ``max_steps - 1``."""
        steps = self.steps.numpy()
        for number in range(self.max_steps):
            active = int(np.searchsorted(-steps, -number, side="left"))
            lengths = self._lengths[number, :active]
            width = int(lengths.max())
            mask = None if int(lengths.min()) == width else torch.from_numpy(np.arange(width) < lengths[:, None])
            yield Batch(self._index[number, :active, :width], mask, active)


def batches_per_epoch(counts: Tensor, batch_size: int | None) -> Tensor:
    """ceil(count / batch_size) for each client, 1 when ``batch_size`` is ``None``."""
    if batch_size is None:
        return torch.ones_like(counts)
    return torch.div(counts + batch_size - 1, batch_size, rounding_mode="floor")


def max_clients(dimension: int) -> int:
    """How many clients of ``dimension`` parameters to stack at once: about 1 GiB of float32 rows, at most 2**19."""
    return max(1, min(1 << (_CLIENT_BITS - 1), math.floor((1 << 28) / dimension)))


def plannable(steps: Tensor, counts: Tensor, batch_size: int | None) -> int:
    """How many clients to plan at once: about 128 MiB of row numbers, at most 2**19 clients, at least one."""
    size = int(counts.max()) if batch_size is None else min(batch_size, int(counts.max()))
    return max(1, min(1 << (_CLIENT_BITS - 1), _PLANNED // max(1, int(steps.max()) * size)))
