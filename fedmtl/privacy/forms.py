"""What is released of the rows of a cohort: their sum, the sum of their outer products, or its diagonal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .clip import Clip, clip_rows, clipped_sum
from .noise.symmetric import smat, svec

if TYPE_CHECKING:
    from .release import Form

_BLOCK_ELEMENTS = 1 << 17


def contributions(rows: Tensor, clip: Clip | None, form: Form) -> Tensor:
    """The clipped sum in the coordinates that are noised.

    Args:
        rows: (..., k, d), any float dtype and device; rows that are not finite count as zero.
        clip: the bound on one row, or None.
        form: see :class:`~fedmtl.privacy.ReleasePlan`.

    Returns:
        float64 on the CPU: (..., d), or (..., d (d + 1) / 2) for ``"symmetric"``, in the isometric coordinates of
        :func:`~fedmtl.privacy.noise.symmetric.svec`.
    """
    if form == "vector":
        if rows.ndim == 2:
            return clipped_sum(rows, clip)
        return torch.stack([contributions(one, clip, form) for one in rows])
    wide = rows.detach().cpu().double()
    if wide.ndim == 3 and len(wide) > 1 and wide.numel() > _BLOCK_ELEMENTS:  # a few matrices at a time, in the cache
        parts = wide.split(max(1, _BLOCK_ELEMENTS // wide[0].numel()))
        return torch.cat([contributions(part, clip, form) for part in parts])
    clipped = clip_rows(wide.reshape(-1, wide.shape[-1]), clip).reshape(wide.shape)
    if form == "diagonal":
        return (clipped * clipped).sum(-2)
    values = clipped.numpy()  # of small matrices numpy's products are faster than torch's
    return svec(torch.from_numpy(values.swapaxes(-1, -2) @ values))


def shaped(value: Tensor, form: Form) -> Tensor:
    """Noised coordinates as what is released: (..., d), or (..., d, d) for ``"symmetric"``."""
    return smat(value) if form == "symmetric" else value
