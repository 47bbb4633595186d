"""The records of owners who act one at a time, and what bounds their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .mechanisms import Norm

_LEAST_NORM = 1e-140


@dataclass(frozen=True)
class OwnerRecords:
    """The rows x_j of one owner's records, whose gradients are multiples of them, and their norms.

    Attributes:
        x: (n_i, D) float64.
        norms: (n_i,) float64, in the norm of the clip.
    """

    x: Tensor
    norms: Tensor

    @classmethod
    def of(cls, x: Tensor, norm: Norm) -> OwnerRecords:
        """Rows ``x`` (n_i, D) with their norms, computed here once.

        A row that is not finite, or whose norm is below 1e-140 (its squares underflow), counts as zero: no limit on its
        factor would bound its gradient.
        """
        wide = x.detach().double()
        norms = torch.linalg.vector_norm(wide, ord=1 if norm == "l1" else 2, dim=1)
        usable = torch.isfinite(norms) & (norms >= _LEAST_NORM)
        if bool(usable.all()):
            return cls(wide, norms)
        nothing = torch.zeros((), dtype=torch.float64)
        return cls(torch.where(usable[:, None], wide, nothing), torch.where(usable, norms, nothing))
