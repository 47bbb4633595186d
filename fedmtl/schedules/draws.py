"""Counter-based uniform numbers for rows of (replicate, client)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..random import derive_key, keyed_uniform

_CHUNK = 1 << 15


class KeyedDraws:
    """The R n pairs of a replicate and a client, replicate by replicate, and their streams of numbers.

    Args:
        seed: of the run.
        replicates: (R,) indices of the replicates.
        keys: int64 (n,) keys of the clients.
    """

    def __init__(self, seed: int, replicates: Sequence[int], keys: NDArray[np.int64]) -> None:
        self._seed, self._replicates, self._keys = seed, tuple(replicates), keys
        self._seeds: dict[str, Tensor] = {}
        self.replicate = np.repeat(np.arange(len(self._replicates)), len(keys))
        self.client = np.tile(np.arange(len(keys)), len(self._replicates))

    def uniform(
        self, purpose: str, rows: NDArray[np.int64], first: NDArray[np.int64], count: int
    ) -> NDArray[np.float64]:
        """Return numbers ``first`` to ``first + count - 1`` of each row's stream: (rows, count) in [0, 1)."""
        key = self._seeds_of(purpose)[self.replicate[rows], None]
        client = torch.from_numpy(self._keys[self.client[rows]])[:, None]
        start = torch.from_numpy(np.ascontiguousarray(first))[:, None]
        out = np.empty((len(rows), count))
        tall, wide = max(1, _CHUNK // max(count, 1)), min(count, _CHUNK)
        for a in range(0, len(rows), tall):
            part = slice(a, a + tall)
            for b in range(0, count, max(wide, 1)):
                index = start[part] + torch.arange(b, min(b + wide, count))
                out[part, b : b + wide] = keyed_uniform(key[part], client[part], 0, index).numpy()
        return out

    def _seeds_of(self, purpose: str) -> Tensor:
        """Return int64 (R,) keys of the replicates."""
        if purpose not in self._seeds:
            seeds = [derive_key(self._seed, f"schedule/{purpose}", r) for r in self._replicates]
            self._seeds[purpose] = torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds])
        return self._seeds[purpose]
