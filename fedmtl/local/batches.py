"""Plans of batches: the examples of each client at each local step, as dense batches of ragged
clients. Places in a stack are chosen so that the arithmetic of one client does not show how many
examples another has.

Numbers of examples are private if the protected unit is a client; who takes part is no client's
data. Clients are nevertheless stacked by their numbers of local steps, because those that have
finished then need not be computed. In exact arithmetic the grouping has no effect. In floating
point a client's numbers could differ in their last bits by

- how wide its batches are padded: its own number of examples decides (:func:`batch_widths`), and
  clients of one width make one stack;
- its place: matrix products round differently at different alignments in memory. Its lane, the
  place modulo :data:`LANES`, is its position among those who take part, whatever the numbers of
  examples;
- the size of its stack: a batched product computes a stack of one client by other code than a
  larger one, so either all stacks have one client, or none has. Elements that do not fill a vector
  register are left to other code, too, so stacks have a multiple of 32 examples. If a chunk is too
  short for that, every stack has one client for each lane: which elements are left follows from
  the lane.

That makes every client's numbers the same to the last bit on a CPU whose operations use one thread,
which ``fedmtl audit`` checks. With several threads an operation, or on a GPU, a library may choose
its code by the number of clients of a stack, and numbers agree only to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .._devices import sent
from ..random import derive_key, keyed_bits

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from .solver import LocalSolver

_CLIENT_BITS = 20  # of the keys by which examples are sorted: the number of the client
_PLANNED = 1 << 24  # row numbers of 8 bytes that are planned at once


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
        lengths: int64 (S, k), how many of them are no padding.
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
            weights = sent(weights, device)
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
        solver: says how many steps each client makes, and on how many examples.
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
    if solver.batch_size is None:
        # Every batch has all of a client's examples, so their order does not matter.
        epoch = torch.zeros_like(epoch)
        rows = _flat_rows(data, clients)[2][None]
    else:
        epochs = 1
        if epoch.numel():
            epochs = int(epoch.max()) + 1
        rows = _permuted_rows(data, clients, seed, round, epochs)
    start = torch.cumsum(counts, 0) - counts
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


def _flat_rows(data: FederatedDataset, clients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for the N examples of ``clients`` one after another, int64 (N,) each: the client's
    place in ``clients``, the example's place among the client's, and its row in the flat data."""
    counts = data.train.counts[clients]
    start = torch.cumsum(counts, 0) - counts
    segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(segment)) - start[segment]
    return segment, place, data.train.offsets[clients][segment] + place


def _permuted_rows(
    data: FederatedDataset, clients: Tensor, seed: int, round: int, epochs: int
) -> Tensor:
    """Returns the rows of the N examples of ``clients``, each client's in the order of each epoch,
    int64 (epochs, N)."""
    segment, place, rows = _flat_rows(data, clients)
    keys = data.keys[clients][segment]
    orders = []
    for number in range(epochs):
        bits = keyed_bits(derive_key(seed, f"batches/{number}"), keys, round, place)
        # One sort for all clients: the client in the upper bits, random bits in the lower ones.
        order = torch.argsort(
            (segment << (63 - _CLIENT_BITS)) | (bits >> _CLIENT_BITS), stable=True
        )
        orders.append(rows[order])
    return torch.stack(orders)


def batches_per_epoch(counts: Tensor, batch_size: int | None) -> Tensor:
    """Returns ceil(count / batch_size) for each client, int64 (k,); 1 if ``batch_size`` is None."""
    if batch_size is None:
        return torch.ones_like(counts)
    return torch.div(counts + batch_size - 1, batch_size, rounding_mode="floor")


def batch_widths(counts: Tensor, batch_size: int | None) -> Tensor:
    """Returns the width of the batches of clients with ``counts`` examples, each of them by its own
    count: int64 (k,) -> (k,).

    ``batch_size``, and for fewer examples, or if that is ``None``, the next of 16, 32, 48, 64,
    96, 128, 192, ...
    """
    wide = counts.clamp(min=16)
    # Few distinct widths: compiled code and memory are used again from round to round.
    power = 2 ** torch.ceil(torch.log2(wide.double())).long()
    width = torch.where((4 * wide <= 3 * power) & (power >= 64), power // 4 * 3, power)
    if batch_size is None:
        return width
    return width.clamp(max=batch_size)


def max_clients(dimension: int) -> int:
    """Returns the largest number of clients of ``dimension`` parameters in a stack: about 1 GiB of
    float32 rows, at most 2**19 clients."""
    return max(1, min(1 << (_CLIENT_BITS - 1), math.floor((1 << 28) / dimension)))


def plannable(steps: int, width: int, grain: int) -> int:
    """Returns the number of clients to plan at once: about 128 MiB of row numbers, at most 2**19
    clients, a multiple of ``grain``."""
    fitting = min(1 << (_CLIENT_BITS - 1), _PLANNED // max(1, steps * width))
    return max(1, fitting // grain) * grain


LANES = 4
"""Rows of 4-byte numbers after which an alignment to 16 bytes repeats, whatever their length."""


def grain_of(width: int, chunk: int) -> int:
    """Returns the number in whose multiples clients with batches of ``width`` examples are stacked,
    in stacks of at most ``chunk``."""
    if chunk < LANES:
        return 1
    whole = _whole(width)
    if whole > chunk:
        return LANES
    return whole


def stack_of(width: int, chunk: int) -> int:
    """Returns the number of clients of a stack, if their batches have ``width`` examples and a
    stack has at most ``chunk`` clients."""
    if chunk < LANES:
        return 1
    whole = _whole(width)
    # larger stacks would leave the elements of other clients to other code than smaller ones
    if whole > chunk:
        return LANES
    return chunk // whole * whole


def _whole(width: int) -> int:
    """Returns the least number of clients whose batches of ``width`` examples fill vector
    registers, and one for each lane."""
    return max(LANES, 32 // math.gcd(32, width))


def places(steps: Tensor, lanes: Tensor, grain: int) -> tuple[Tensor, Tensor]:
    """Places clients in a stack: each in its lane, those with most steps first.

    A place that no client needs is filled with one whose result there is not used.

    Args:
        steps: int64 (k,), local steps; k at least 1.
        lanes: int64 (k,), each in [0, LANES).
        grain: the number of places is a multiple of it; 1, of clients that are computed one by one,
            needs no lanes.

    Returns:
        members int64 (P,), positions in ``steps``, and bool (P,), which of them are not fillers:
        each client once.
    """
    # Stable, so that the places do not depend on the library.
    order = torch.argsort(steps, descending=True, stable=True)
    if grain == 1:
        return order, torch.ones(len(order), dtype=torch.bool)
    order = order[torch.argsort(lanes[order], stable=True)]
    lane = lanes[order]
    sizes = torch.bincount(lanes, minlength=LANES)
    place = (torch.arange(len(order)) - (torch.cumsum(sizes, 0) - sizes)[lane]) * LANES + lane
    total = -(-(int(place.max()) + 1) // grain) * grain
    # A filler computes what another client computes, and its result is dropped.
    members = torch.full((total,), int(order[0]))
    real = torch.zeros(total, dtype=torch.bool)
    members[place] = order
    real[place] = True
    return members, real
