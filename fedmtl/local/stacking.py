"""Stacks of clients, which are computed together, so chosen that the arithmetic of one client does
not depend on the number of examples of another.

Numbers of examples are private if the protected unit is a client; the cohort is no client's data.
Clients are nevertheless stacked by their numbers of local steps, because those that have finished
then need not be computed. In exact arithmetic the grouping has no effect. In floating point a
client's numbers could differ in their last bits by

- how wide its batches are padded: its own number of examples decides (:func:`batch_widths`), and
  clients of one width make one stack;
- its place: matrix products round differently at different alignments in memory. Its lane, the
  place modulo :data:`LANES`, is its position in the cohort, whatever the numbers of examples;
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

import torch
from torch import Tensor

MOST_CLIENTS = 1 << 19
"""The largest number of clients that are planned or computed at once."""
LANES = 4
"""Rows of 4-byte numbers after which an alignment to 16 bytes repeats, whatever their length."""


def batch_widths(counts: Tensor, batch_size: int | None) -> Tensor:
    """Returns the width of the batches of clients with ``counts`` examples, each of them by its own
    count: int64 (k,) -> (k,).

    The width is the least of 16, 32, 48, 64, 96, 128, 192, ... that holds all examples of the
    client, and at most ``batch_size``.
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
    return max(1, min(MOST_CLIENTS, (1 << 28) // dimension))


def stack_sizes(width: int, chunk: int) -> tuple[int, int]:
    """Returns the sizes of stacks of clients whose batches have ``width`` examples.

    Args:
        width: examples of a batch.
        chunk: the largest number of clients of a stack.

    Returns:
        The number in whose multiples clients are stacked, and the number of clients of a stack.
    """
    if chunk < LANES:
        return 1, 1
    # the least number of clients that fills vector registers, and each lane
    whole = max(LANES, 32 // math.gcd(32, width))
    # larger stacks would leave the elements of other clients to other code than smaller ones
    if whole > chunk:
        return LANES, LANES
    return whole, chunk // whole * whole


def lanes(clients: Tensor, cohort: Tensor | None) -> Tensor:
    """Returns the lane of each client: its position among the participants of the round, modulo
    :data:`LANES`, int64 (k,).

    Args:
        clients: int64 (k,), positions in the data.
        cohort: int64 (m,), the participants; None for all clients of the data.
    """
    position = clients.cpu()
    if cohort is not None:
        ordered, order = torch.sort(cohort)
        position = order[torch.searchsorted(ordered, position)]
    return position % LANES


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
    # A filler repeats the computation of another client, and its result is dropped.
    members = torch.full((total,), int(order[0]))
    real = torch.zeros(total, dtype=torch.bool)
    members[place] = order
    real[place] = True
    return members, real
