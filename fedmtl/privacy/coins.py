"""Coins of a draw, and uniform subsets made from them."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Coins(Protocol):
    """Random bits for one draw of a cohort."""

    def uniform(self, count: int) -> np.ndarray:
        """``count`` float64 numbers in [0, 1) with 53 random bits each."""


def distinct_ranks(n: int, size: int, coins: Coins) -> np.ndarray:
    """A uniform subset of ``size`` of ``range(n)``, sorted int64; memory and time O(size), not O(n), for
    small sizes.

    Draws with replacement and keeps the first ``size`` distinct values, which is exactly uniform sampling
    without replacement; more than half of the population is drawn as a complement.
    """
    if 2 * size > n:
        left_out = distinct_ranks(n, n - size, coins)
        return np.delete(np.arange(n, dtype=np.int64), left_out)
    drawn = np.empty(0, dtype=np.int64)
    while drawn.size < size:
        fresh = np.floor(coins.uniform(size - drawn.size + 16) * n).astype(np.int64)
        drawn = np.concatenate([drawn, fresh])
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
    return np.sort(drawn[:size])
