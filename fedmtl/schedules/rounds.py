"""Round-based schedules: one cohort a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .event import Event


def rounds(draw: Callable[[int], Tensor], clients: Tensor, *, start: int, stop: int) -> Iterator[Event]:
    """Events ``start`` to ``stop - 1``, one cohort each, one time unit apart.

    Args:
        draw: cohort of a round, as sorted ranks in [0, n), int64 (k,).
        clients: int64 (n,), the client at each rank.
        start, stop: first round, and one past the last.
    """
    for step in range(start, stop):
        yield Event(step, torch.tensor([float(step)], dtype=torch.float64), clients[draw(step)][None])
