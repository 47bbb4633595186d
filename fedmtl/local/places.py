"""Where clients stand in a stack, so that the arithmetic of one does not show how many examples another has.

Numbers of examples are private where the protected unit is a client; who takes part is no client's data. Clients are
nevertheless stacked by their numbers of local steps, because those that have finished then need not be computed. In
exact arithmetic the grouping has no effect. In floating point a client's numbers could differ in their last bits by

- how wide its batches are padded: its own number of examples decides (:func:`fedmtl.local.batches.batch_widths`), and
  clients of one width make one stack;
- its place: matrix products round differently at different alignments in memory. Its lane, the place modulo
  :data:`LANES`, is its position among those who take part, whatever the numbers of examples;
- how many stand beside it: a batched product treats each of two or more alike, a single one otherwise, so stacks are
  made of one client always, or never; and elements that do not fill a vector register are left to other code, so stacks
  have a multiple of 32 examples where a chunk is long enough.

That makes every client's numbers the same to the last bit on a CPU whose operations use one thread, which
``fedmtl audit`` checks. With several threads an operation, or on a GPU, a library may choose its code by the number of
clients of a stack, and numbers agree only to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LANES = 4
"""Rows of 4-byte numbers after which an alignment to 16 bytes repeats, whatever their length."""


def grain_of(width: int, chunk: int) -> int:
    """Clients with batches of ``width`` examples are stacked in multiples of this, in stacks of at most ``chunk``."""
    if chunk < LANES:
        return 1
    whole = max(LANES, 32 // math.gcd(32, width))
    return whole if whole <= chunk else LANES


def places(steps: Tensor, lanes: Tensor, grain: int) -> tuple[Tensor, Tensor]:
    """Places of clients in a stack: each in its lane, those with most steps first.

    A place that no client needs is filled with one whose result there is not used.

    Args:
        steps: int64 (k,), local steps; k at least 1.
        lanes: int64 (k,), each in [0, LANES).
        grain: the number of places is a multiple of it; 1, of clients that are computed one by one, needs no lanes.

    Returns:
        members int64 (P,), positions in ``steps``, and bool (P,), which of them are not fillers: each client once.
    """
    order = torch.argsort(steps, descending=True, stable=True)
    if grain == 1:
        return order, torch.ones(len(order), dtype=torch.bool)
    order = order[torch.argsort(lanes[order], stable=True)]
    lane, sizes = lanes[order], torch.bincount(lanes, minlength=LANES)
    place = (torch.arange(len(order)) - (torch.cumsum(sizes, 0) - sizes)[lane]) * LANES + lane
    total = -(-(int(place.max()) + 1) // grain) * grain
    members, real = torch.full((total,), int(order[0])), torch.zeros(total, dtype=torch.bool)
    members[place], real[place] = order, True
    return members, real
