"""Plans of batches: the examples of each client at each local step, as dense batches of ragged
clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .._devices import on_device
from ..random import derive_key, keyed_bits
from .stacking import batch_widths

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from .solver import LocalSolver

_CLIENT_BITS = 20  # of the keys by which examples are sorted: the number of the client


@dataclass(frozen=True)
class Batch:
    """One local step of the leading clients of a plan.

    Attributes:
        index: int64 (A, B), rows of the flat data; padding repeats an example of the same client.
        weight: (A, B), of the examples in their batch's mean; 0 of padding.
        done: places of the clients whose last step it is, int64.
    """

    index: Tensor
    weight: Tensor
    done: Tensor


@dataclass(frozen=True)
class BatchPlan:
    """The local steps of k clients; made by :func:`plan_batches`.

    Attributes:
        keys: int64 (k,), each client's key.
        steps: int64 (k,), local steps per client; a client that has made them repeats its last
            batch while it stands among the leading ones.
        index: int64 (S, k, B), the rows of the flat data of every local step; padding repeats one
            of the same client.
        lengths: int64 (S, k), the number of them that are no padding.
        weights: float64 (S, k, B), of each of them in its batch's mean; 0 of padding.
        grain: the leading clients of a step are a multiple of this many, as far as there are
            clients.

    Example:
        >>> import torch
        >>> from fedmtl import LocalSGD, load_data
        >>> from fedmtl.local import plan_batches
        >>> data = load_data("digits", clients=4)
        >>> solver = LocalSGD(lr=0.1, batch_size=4)  # of 10 examples a client
        >>> plan = plan_batches(data, solver, torch.arange(4), seed=0, round=0)
        >>> plan.part(slice(0, 2)).steps.tolist()
        [3, 3]
    """

    keys: Tensor
    steps: Tensor
    index: Tensor
    lengths: Tensor
    weights: Tensor
    grain: int = 1

    def part(self, clients: slice) -> BatchPlan:
        """Returns the plan of some of the clients, sharing this one's memory.

        Args:
            clients: a slice of the k clients.
        """
        index = self.index[:, clients]
        lengths = self.lengths[:, clients]
        weights = self.weights[:, clients]
        return BatchPlan(
            self.keys[clients], self.steps[clients], index, lengths, weights, self.grain
        )

    def batches(
        self, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Iterator[Batch]:
        """Yields the batches of the local steps.

        Args:
            dtype: of the weights.
            device: of the weights; None for the host.

        Yields:
            One batch a step. That of a single client has no padding.
        """
        steps = self.steps.numpy()
        count, columns = self.index.shape[1:]
        longest = int(steps.max(initial=0))
        weights = self.weights[:longest].to(dtype)
        if device is not None:
            weights = on_device(weights, device)
        # Clients that finish at each step, and the last one that is left before it: for all steps
        # at once, since a step of a small stack takes no longer than a search.
        order = np.argsort(steps, kind="stable")
        ends = np.searchsorted(steps[order], np.arange(longest + 1), side="right").tolist()
        finishing = torch.from_numpy(order)
        last = np.zeros(longest + 1, dtype=np.int64)
        np.maximum.at(last, steps, np.arange(1, count + 1))
        left = np.maximum.accumulate(last[::-1])[::-1].tolist()
        for number, (index, weight) in enumerate(zip(self.index, weights, strict=False)):
            # A step is computed for a multiple of the grain, so that matrix products have the same
            # code.
            active = min(count, -(-left[number + 1] // self.grain) * self.grain)
            width = columns
            if count == 1:
                width = int(self.lengths[number])
            if (active, width) != (count, columns):
                index = index[:active, :width]
                weight = weight[:active, :width]
            yield Batch(index, weight, finishing[ends[number] : ends[number + 1]])


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
    """Returns the batches of a local run of ``clients``, int64 (k,), best in the order of
    decreasing numbers of steps.

    Each epoch permutes a client's examples by keys of (seed, client, round, epoch), so batches do
    not depend on which other clients are in the plan. The last partial batch of an epoch stays, at
    its size.

    Args:
        data: the clients' data, of each at least one example.
        solver: sets the number of each client's steps, and of the examples of a step.
        clients: int64 (k,).
        seed: addresses the permutations.
        round: addresses the permutations.
        steps: int64 (k,), local steps in place of the solver's.
        width: B, columns of every batch, at least the largest batch of a client; None: that of the
            widest client.
        grain: see :class:`BatchPlan`.

    Example:
        >>> import torch
        >>> from fedmtl import LocalSGD, load_data
        >>> from fedmtl.local import plan_batches
        >>> data = load_data("digits", clients=4)
        >>> plan = plan_batches(data, LocalSGD(lr=0.1, epochs=2), torch.arange(4), seed=0, round=0)
        >>> plan.steps.tolist(), len(list(plan.batches()))
        ([2, 2, 2, 2], 2)
    """
    counts = data.train.counts[clients]
    if steps is None:
        steps = solver.step_counts(counts)
    size = width or 0
    if not size and len(counts):
        size = int(batch_widths(counts, solver.batch_size).max())
    epoch, within, lengths = _steps_of(counts, steps, solver.batch_size, size)
    # of the N examples of the clients one after another
    start = torch.cumsum(counts, 0) - counts
    segment = torch.repeat_interleave(torch.arange(len(counts)), counts)  # the client's place
    place = torch.arange(len(segment)) - start[segment]  # the example's among the client's
    rows = (data.train.offsets[clients][segment] + place)[None]  # in the flat data
    if solver.batch_size is None:
        # Every batch has all of a client's examples, so their order does not matter.
        epoch = torch.zeros_like(epoch)
    else:
        epochs = 1
        if epoch.numel():
            epochs = int(epoch.max()) + 1
        keys = data.keys[clients][segment]
        rows = rows[0, _orders(keys, segment, place, seed, round, epochs)]
    index = rows.flatten()[(epoch * rows.shape[1] + start)[..., None] + within]
    # The reciprocal of the length, so that a weighted sum is the mean of a batch. Rounded to
    # float32 it has the bits of a division in float32, of whose digits float64 has twice as many.
    weights = (torch.arange(size) < lengths[..., None]).double().div_(lengths[..., None])
    return BatchPlan(data.keys[clients], steps, index, lengths, weights, grain)


def _steps_of(
    counts: Tensor, steps: Tensor, batch_size: int | None, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the batches of S local steps of k clients as places among a client's examples.

    Args:
        counts: int64 (k,), examples of each client.
        steps: int64 (k,), local steps; S is the largest.
        batch_size: of the solver; None for all examples.
        size: B, columns of every batch.

    Returns:
        The epoch of a step, int64 (S, k); the places in that epoch, int64 (S, k, B); and how many
        of these are no padding, int64 (S, k).
    """
    per_epoch = batches_per_epoch(counts, batch_size)
    longest = 0
    if len(counts):
        longest = int(steps.max())
    # A client that has made its steps repeats its last batch, whose result is not used.
    step = torch.minimum(torch.arange(longest)[:, None], (steps - 1).clamp(min=0))
    epoch = torch.div(step, per_epoch, rounding_mode="floor")
    # The last batch of an epoch is the shorter one that is left.
    begin = (step - epoch * per_epoch) * (batch_size or 0)
    lengths = (counts - begin).clamp(max=size)
    column = torch.arange(size)
    # Padding reads the first example of the batch; its weight is 0.
    within = begin[..., None] + torch.where(column < lengths[..., None], column, 0)
    return epoch, within, lengths


def _orders(
    keys: Tensor, segment: Tensor, place: Tensor, seed: int, round: int, epochs: int
) -> Tensor:
    """Returns the order of N examples in each epoch, in which those of a client stay together:
    int64 (epochs, N).

    Args:
        keys: int64 (N,), of the client of each example.
        segment: int64 (N,), ascending, the place of that client.
        place: int64 (N,), of the example among the client's.
        seed: addresses the order.
        round: addresses the order.
        epochs: their number.
    """
    orders = []
    for number in range(epochs):
        bits = keyed_bits(derive_key(seed, f"batches/{number}"), keys, round, place)
        # One sort for all clients: the client in the upper bits, random bits in the lower ones.
        sorted_by = (segment << (63 - _CLIENT_BITS)) | (bits >> _CLIENT_BITS)
        orders.append(torch.argsort(sorted_by, stable=True))
    return torch.stack(orders)


def batches_per_epoch(counts: Tensor, batch_size: int | None) -> Tensor:
    """Returns ceil(count / batch_size) for each client, int64 (k,); 1 if ``batch_size`` is None."""
    if batch_size is None:
        return torch.ones_like(counts)
    return torch.div(counts + batch_size - 1, batch_size, rounding_mode="floor")
