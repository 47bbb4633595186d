"""One row, clipped and added to an exact sum: where a row is made and where rows are handed over, it is this function.

Why it bounds what a row can do to the sum is written in :mod:`fedmtl.privacy.clip`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def add_clipped(cells: Tensor, row: Tensor, limit: float, order: float, width: float) -> None:
    """Add a clipped row to a sum, in multiples of ``width``, each coordinate truncated toward zero.

    It keeps to what :func:`~fedmtl._compiled.without_interpreter` knows.

    Args:
        cells: float64 (D,), the sum, on the CPU.
        row: (D,), any float dtype; one that is not finite counts as zero.
        limit: on its norm; infinity for none.
        order: 1 or 2, of the norm.
        width: of the grid.
    """
    wide = row.to(torch.float64, copy=True)
    if order == 1.0 and wide.shape[0] >= 1 << 15:  # threads would share the sum, and its last bits show how many
        parts = [torch.linalg.vector_norm(part, order) for part in wide.split(1 << 14)]
        norm = float(torch.stack(parts).sum())
    else:
        norm = float(torch.linalg.vector_norm(wide, order))
    factor = 1.0 if norm <= limit * (1 + 2.0**-30) else limit / norm  # rows clipped before are longer by rounding
    if math.isfinite(norm) and factor >= 2.0**-1022:
        cells.add_(wide.mul_(factor / width).trunc_())
