"""Counter-based uniform numbers for rows of (replicate, client)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..random import derive_key, philox_words, uniform_of

_CHUNK = 1 << 13  # numbers of a block, which stay in the cache


class KeyedDraws:
    """The R n pairs of a replicate and a client, replicate by replicate, and their streams of numbers.

    Args:
        seed: of the run.
        replicates: (R,) indices of the replicates.
        keys: int64 (n,) keys of the clients.
    """

    def __init__(self, seed: int, replicates: Sequence[int], keys: NDArray[np.int64]) -> None:
        self._seed, self._replicates, self._keys = seed, tuple(replicates), keys
        self._seeds: dict[str, NDArray[np.uint64]] = {}
        self.replicate = np.repeat(np.arange(len(self._replicates)), len(keys))
        self.client = np.tile(np.arange(len(keys)), len(self._replicates))

    def uniform(
        self, purpose: str, rows: NDArray[np.int64], first: NDArray[np.int64], count: int
    ) -> NDArray[np.float64]:
        """Return numbers ``first`` to ``first + count - 1`` of each row's stream: (rows, count) in [0, 1)."""
        key = self._seeds_of(purpose)[self.replicate[rows], None]
        client = self._keys[self.client[rows], None].view(np.uint64)
        low, high, start = client & 0xFFFFFFFF, client >> 32, first[:, None].astype(np.uint64)
        out, step = np.empty((len(rows), count)), np.zeros(1, dtype=np.uint64)
        tall, wide = max(1, _CHUNK // max(count, 1)), min(count, _CHUNK)
        words = np.empty((2, min(len(rows), tall), wide), dtype=np.uint64)
        for a in range(0, len(rows), tall):
            part = slice(a, a + tall)
            for b in range(0, count, max(wide, 1)):
                index = start[part] + np.arange(b, min(b + wide, count), dtype=np.uint64)
                found = words[:, : len(index), : index.shape[1]]
                philox_words(found, key[part], index, step, low[part], high[part])
                out[part, b : b + wide] = uniform_of(found[0])
        return out

    def _seeds_of(self, purpose: str) -> NDArray[np.uint64]:
        """Return (R,) keys of the replicates."""
        if purpose not in self._seeds:
            seeds = [derive_key(self._seed, f"schedule/{purpose}", r) for r in self._replicates]
            self._seeds[purpose] = np.array(seeds, dtype=np.uint64)
        return self._seeds[purpose]
