"""What is released of the rows of a cohort: their sum, the sum of their outer products, or its diagonal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .clip import Clip, clip_rows, clipped_sum
from .symmetric import smat, svec

if TYPE_CHECKING:
    from .release import Form


def contributions(rows: Tensor, clip: Clip | None, form: Form) -> Tensor:
    """The clipped sum in the coordinates that are noised.

    Args:
        rows: (..., k, d), any float dtype and device; rows that are not finite count as zero.
        clip: the bound on one row, or None.
        form: see :class:`~fedmtl.privacy.ReleasePlan`.

    Returns:
        float64 on the CPU: (..., d), or (..., d (d + 1) / 2) for ``"symmetric"``, in the isometric coordinates of
        :func:`~fedmtl.privacy.symmetric.svec`.
    """
    if form == "vector":
        if rows.ndim == 2:
            return clipped_sum(rows, clip)
        return torch.stack([contributions(one, clip, form) for one in rows])
    wide = rows.detach().cpu().double()
    clipped = clip_rows(wide.reshape(-1, wide.shape[-1]), clip).reshape(wide.shape)
    return (clipped * clipped).sum(-2) if form == "diagonal" else svec(clipped.mT @ clipped)


def shaped(value: Tensor, form: Form) -> Tensor:
    """Noised coordinates as what is released: (..., d), or (..., d, d) for ``"symmetric"``."""
    return smat(value) if form == "symmetric" else value
