"""Rows of flat tensors, dense or sparse CSR: take, select, join."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """Returns the rows ``index`` (K,) of x (N, ...) as a dense (K, ...) tensor of x's dtype, on x's
    device."""
    if x.layout == torch.strided:
        if x.ndim < 3:
            return x.index_select(0, index)
        # a view; on a CPU index_select of a matrix is 10 to 40 times faster
        flat = x.reshape(len(x), -1)
        return flat.index_select(0, index).view(len(index), *x.shape[1:])
    row, position, _ = _entries(x, index)
    out = torch.zeros(len(index), x.shape[1], dtype=x.dtype, device=x.device)
    out[row, x.col_indices()[position]] = x.values()[position]
    return out


def select(x: Tensor, index: Tensor) -> Tensor:
    """Returns the rows ``index`` (K,) of x (N, ...), in x's own layout."""
    if x.layout == torch.strided:
        return take(x, index)
    _, position, crow = _entries(x, index)
    return csr(crow, x.col_indices()[position], x.values()[position], x.shape[1])


def join(parts: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all parts, one after the other; the parts share layout and dtype."""
    if parts[0].layout == torch.strided:
        return torch.cat(list(parts))
    counts = torch.cat([part.crow_indices().diff() for part in parts])
    columns = torch.cat([part.col_indices() for part in parts])
    return csr(
        offsets_of(counts), columns, torch.cat([part.values() for part in parts]), parts[0].shape[1]
    )


def csr(crow: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    """Returns a sparse CSR matrix, its structure checked, without PyTorch's notice that the layout
    is in beta."""
    with warnings.catch_warnings():
        # the notice would come once for every program that reads sparse data
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(
            crow, columns, values, size=(len(crow) - 1, width), check_invariants=True
        )


def components(value: Tensor) -> dict[str, Tensor]:
    """Returns the dense tensors that make up a tensor: itself, or the three parts of a CSR
    matrix."""
    if value.layout == torch.strided:
        return {"": value}
    return {
        "_crow": value.crow_indices(),
        "_columns": value.col_indices(),
        "_values": value.values(),
    }


def offsets_of(counts: Tensor) -> Tensor:
    """Turns counts (n,) into offsets (n + 1,): row i of the result begins client i."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def by_number(number: np.ndarray, ids: Iterable[Any]) -> dict[str, np.ndarray]:
    """Returns ascending row numbers of each of ``ids``, as texts; ``number`` (N,) gives each row's
    place in ``ids``."""
    names = list(map(str, ids))
    # minlength, so that ids without rows get an empty part and not none
    bounds = np.cumsum(np.bincount(number, minlength=len(names)))[:-1]
    return dict(zip(names, np.split(np.argsort(number, kind="stable"), bounds), strict=True))


def ranges(start: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns concatenated ranges ``start[i], ..., start[i] + counts[i] - 1``.

    Returns:
        (positions, parts), both (counts.sum(),): the numbers, and the i each of them belongs to.
    """
    part = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    # where each range begins in the result; with it one arange makes all ranges without a loop
    first = counts.cumsum(0) - counts
    return torch.arange(len(part), device=counts.device) + (start - first)[part], part


def _entries(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # int32 indices would overflow in the sums of large matrices
    crow = x.crow_indices().long()
    start = crow[index]
    counts = crow[index + 1] - crow[index]
    position, row = ranges(start, counts)
    return row, position, offsets_of(counts)
