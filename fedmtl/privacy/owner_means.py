"""Answers of one or more activations grouped by owner, so that an owner that acts in several repetitions works once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def by_owner(owners: np.ndarray, dimension: int, answer: Callable[[int, Tensor], Tensor]) -> Tensor:
    """A vector for each entry of ``owners``.

    Args:
        owners: int64 (m,), who answers; -1 is nobody.
        dimension: D.
        answer: (owner, its places in ``owners`` (k,) int64, rising) -> (k, D) or (D,) float64; called once for each
            owner that is there.

    Returns:
        (m, D) float64; zero for nobody.
    """
    order = np.argsort(owners, kind="stable")  # nobody first, then by owner
    ranked = owners[order]
    cuts = (np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist()
    places, answers = torch.from_numpy(order), np.zeros((len(owners), dimension))
    for start, stop in pairwise([0, *cuts, len(owners)] if len(owners) else []):
        if ranked[start] >= 0:
            answers[start:stop] = answer(int(ranked[start]), places[start:stop]).numpy()
    found = np.empty_like(answers)
    found[order] = answers
    return torch.from_numpy(found)
