"""Per-client losses, each computed independently of the other clients' data."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..local.losses import example_losses
from .base import Problem


def own_losses(
    problem: Problem, models: Tensor, clients: Tensor, side: Literal["train", "test"]
) -> Tensor:
    """Returns the mean loss of each model on the records of its client.

    Clients are computed one at a time, so that the rounding of one does not depend on the number of
    another's records: a client may decide by these losses.

    Args:
        problem: the data, the model and the loss.
        models: (k, D), or (D,) for all.
        clients: int64 (k,).
        side: of the records.

    Returns:
        (k,) float64; NaN for a client without records.
    """
    rows = models.expand(len(clients), -1)
    part = problem.data.side(side)
    counts = part.counts[clients].tolist()
    first = part.offsets[clients].tolist()
    losses = torch.full((len(clients),), torch.nan, dtype=torch.float64)
    stack = problem.executor.stack
    for place, count in enumerate(counts):
        if count == 0:
            continue
        # NaN stays for a client without records
        index = torch.arange(first[place], first[place] + count)
        row = rows[place][None].contiguous()
        x, y = problem.data.gather(side, index[None], dtype=row.dtype, device=row.device)
        losses[place] = example_losses(problem.loss, stack.predict(row, x), y).double().mean()
    return losses
