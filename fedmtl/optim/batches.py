"""Which examples each client uses at each local step: dense batches from ragged clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..random import derive_key, keyed_bits

_CLIENT_BITS = 20


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
        self.counts, self.first, self.steps = counts, first, steps
        self.size = int(counts.max()) if batch_size is None else batch_size
        self.per_epoch = batches_per_epoch(counts, batch_size)
        self.max_steps = int(steps[0]) if len(steps) else 0
        self._start = torch.cumsum(counts, 0) - counts
        self._batched = batch_size is not None
        self._seed, self._round, self._keys = seed, round, keys
        self._orders: dict[int, Tensor] = {}
        # number of clients still active at each step: steps are non-increasing
        self._active = [int(v) for v in (steps[:, None] > torch.arange(self.max_steps)).sum(0)]

    def batch(self, step: int) -> Batch:
        """The batch of local step ``step``, in ``[0, max_steps)``."""
        active = self._active[step]
        counts, per_epoch = self.counts[:active], self.per_epoch[:active]
        epoch = torch.div(step, per_epoch, rounding_mode="floor")
        position = (step - epoch * per_epoch)[:, None] * self.size + torch.arange(self.size)
        width = int((counts - position[:, 0]).clamp(max=self.size).max())
        position = position[:, :width]
        mask = position < counts[:, None]
        place = self._start[:active, None] + torch.where(mask, position, torch.zeros_like(position))
        low, high = int(epoch.min()), int(epoch.max())
        for done in [e for e in self._orders if e < low]:
            del self._orders[done]
        if low == high:
            index = self._order(low)[place]
        else:
            orders = torch.stack([self._order(e) for e in range(low, high + 1)])
            index = orders[(epoch - low)[:, None], place]
        return Batch(index, None if bool(mask.all()) else mask, active)

    def _order(self, epoch: int) -> Tensor:
        """int64 (sum of counts,): each client's flat rows, permuted within the client."""
        if epoch not in self._orders:
            segment = torch.repeat_interleave(torch.arange(len(self.counts)), self.counts)
            within = torch.arange(len(segment)) - self._start[segment]
            order = torch.arange(len(segment))
            if self._batched:
                key = derive_key(self._seed, f"batches/{epoch}")
                bits = keyed_bits(key, self._keys[segment], self._round, within)
                order = torch.argsort((segment << (63 - _CLIENT_BITS)) | (bits >> _CLIENT_BITS), stable=True)
            self._orders[epoch] = (self.first[segment] + within)[order]
        return self._orders[epoch]


def batches_per_epoch(counts: Tensor, batch_size: int | None) -> Tensor:
    """ceil(count / batch_size) for each client, 1 when ``batch_size`` is ``None``."""
    if batch_size is None:
        return torch.ones_like(counts)
    return torch.div(counts + batch_size - 1, batch_size, rounding_mode="floor")


def max_clients(dimension: int) -> int:
    """How many clients of ``dimension`` parameters to stack at once: about 1 GiB of float32 rows, at most 2**19."""
    return max(1, min(1 << (_CLIENT_BITS - 1), math.floor((1 << 28) / dimension)))
