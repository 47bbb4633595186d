"""The train/test split of every client, keyed by its id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..random import derive_key, id_keys, keyed_bits
from .rows import ranges


def client_keys(ids: Sequence[str]) -> Tensor:
    """Return :func:`fedmtl.random.id_key` of each id, int64 (n,)."""
    return torch.from_numpy(id_keys(ids))


def split_rows(
    offsets: Tensor, ids: Sequence[str], *, test_fraction: float, seed: int, where: str
) -> tuple[Tensor, Tensor]:
    """Return the rows of the training and of the test part.

    Each client's examples are permuted by draws keyed with (seed, id, position within the client) and the
    first ``round(test_fraction * count)`` of them, at least 1 and at most count - 1, are its test examples: the only
    example of a client is for training. The split of a client does not depend on the other clients or on their order.

    Args:
        offsets: (n + 1,) on the host; client i owns rows ``offsets[i]:offsets[i + 1]``.
        ids: the n clients' ids.

    Returns:
        Two ascending int64 tensors of row numbers, which hold every row once.

    Raises:
        DataError: a client has no examples, or none has 2.
    """
    counts = offsets.diff()
    if (counts < 1).any():
        client = int((counts < 1).nonzero()[0])
        raise DataError(f"{where}: client {ids[client]!r} has no examples; at least 1 is needed to train on.")
    if len(counts) and int(counts.max()) < 2:
        raise DataError(
            f"{where}: no client has 2 examples, one to train on and one to test on; at least one client needs 2."
        )
    position, client_of = ranges(torch.zeros_like(counts), counts)
    bits = keyed_bits(derive_key(seed, "split"), client_keys(ids)[client_of], 0, position)
    order = torch.from_numpy(np.lexsort((bits.numpy(), client_of.numpy())))
    held = torch.round(counts * test_fraction).long().clamp(min=1).minimum(counts - 1)
    test = torch.zeros(len(client_of), dtype=torch.bool)
    test[order[position < held[client_of]]] = True
    return (~test).nonzero().squeeze(1), test.nonzero().squeeze(1)
