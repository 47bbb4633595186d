"""Answers of one or more activations grouped by owner, so that an owner that acts in several repetitions works once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def by_owner(owners: np.ndarray, dimension: int, answer: Callable[[int, Tensor, Tensor], np.ndarray]) -> np.ndarray:
    """A vector for each entry of ``owners``.

    Args:
        owners: int64 (S, R), who answers in each activation and repetition; -1 is nobody.
        dimension: D.
        answer: (owner, activations (k,) int64, repetitions (k,) int64) -> (k, D) or (D,) float64; called once for each
            owner that is there, with its places in order.

    Returns:
        (S, R, D) float64; zero for nobody.
    """
    flat = owners.ravel()
    order = np.argsort(flat, kind="stable")  # nobody first, then by owner
    ranked = flat[order]
    cuts = (np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist()
    which, where = (torch.from_numpy(places) for places in np.divmod(order, owners.shape[1]))
    answers = np.zeros((flat.size, dimension))
    for start, stop in pairwise([0, *cuts, flat.size] if flat.size else []):
        if ranked[start] >= 0:
            answers[start:stop] = answer(int(ranked[start]), which[start:stop], where[start:stop])
    found = np.empty_like(answers)
    found[order] = answers
    return found.reshape(*owners.shape, dimension)
