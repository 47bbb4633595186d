"""From separate clients to flat tensors, and from flat tensors to targets and sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from ..errors import DataError
from . import checks, rows


def as_tensor(value: Any, where: str, field: str) -> Tensor:
    """Return a tensor from a tensor, an array, a list of numbers or a SciPy sparse matrix (as CSR).

    Raises:
        DataError: the value does not hold numbers, or its rows differ in length.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if scipy.sparse.issparse(value):
        matrix: Any = scipy.sparse.csr_array(value)  # type: ignore[call-overload]
        matrix.sum_duplicates()
        parts = [torch.from_numpy(np.array(v)) for v in (matrix.indptr, matrix.indices, matrix.data)]
        return rows.csr(parts[0].long(), parts[1].long(), parts[2], matrix.shape[1])
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where}, field {field!r}: rows differ in length; each must have the same shape.") from error
    if array.dtype.kind not in "fiub":
        raise DataError(f"{where}, field {field!r} has dtype {array.dtype}; accepted: numbers.")
    try:
        return torch.from_numpy(np.array(array))
    except TypeError as error:
        raise DataError(f"{where}, field {field!r} has dtype {array.dtype}; torch has no such dtype.") from error


def stack_clients(
    clients: Mapping[str, tuple[Any, Any]], name: str, *, empty: bool = False
) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Turn one (x, y) pair a client into flat x (N, ...), y (N, ...), offsets (n + 1,) and ids; ``empty`` accepts
    clients without examples."""
    ids = tuple(clients)
    checks.check_ids(ids, name)
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for client, pair in clients.items():
        where = f"{name}: client {client!r}"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(f"{where}: its value must be a pair (x, y).")
        x, y = as_tensor(pair[0], where, "x"), as_tensor(pair[1], where, "y")
        checks.check_lengths(x, y, where)
        if len(y) == 0 and not empty:
            raise DataError(f"{where} has no examples; every client needs at least 1.")
        for field, value, first in (("x", x, xs[:1] or [x]), ("y", y, ys[:1] or [y])):
            reference = first[0]
            if value.shape[1:] != reference.shape[1:] or value.layout != reference.layout:
                raise DataError(
                    f"{where}, field {field!r} has examples of shape {tuple(value.shape[1:])}; "
                    f"client {ids[0]!r} has {tuple(reference.shape[1:])}, and all clients must agree."
                )
            if value.dtype != reference.dtype:
                raise DataError(
                    f"{where}, field {field!r} has dtype {value.dtype}; client {ids[0]!r} has "
                    f"{reference.dtype}, and all clients must agree."
                )
        xs.append(x)
        ys.append(y)
    counts = torch.tensor([len(y) for y in ys], dtype=torch.int64)
    return rows.join(xs), torch.cat(ys), rows.offsets_of(counts), ids


def infer_classes(y: Tensor, offsets: Tensor, ids: Sequence[str], where: str) -> int | None:
    """Return the number of classes that targets are taken for, or None for a regression.

    Two where the targets are -1 and +1 or floating 0.0 and 1.0, both of them present, and for several integer labels an
    example that are all 0 or 1; else the largest label plus 1 of integer targets, and None for floating ones.
    """
    values = y.unique() if y.is_floating_point() or y.ndim > 1 or (len(y) and int(y.min()) < 0) else y[:0]
    if values.tolist() in ([-1, 1], [0, 1]) or (y.ndim > 1 and not y.is_floating_point() and values.tolist() == [0]):
        return 2
    if y.is_floating_point():
        return None
    if len(y) and int(y.min()) < 0:
        row = int((y < 0).nonzero()[0, 0])
        raise DataError(
            f"{where}: {checks.locate(row, offsets, ids)}, field 'y' holds the label {int(y[row].min())}; "
            "labels must be whole numbers from 0 on, or -1 and +1 for two classes (for regression give classes=None)."
        )
    return int(y.max()) + 1 if len(y) else None


def as_targets(y: Tensor, classes: int | None, offsets: Tensor, ids: Sequence[str], where: str) -> Tensor:
    """Checked targets: int64 labels below ``classes``, or finite floating targets if ``classes`` is None.

    Two classes may be coded 0 and 1 or -1 and +1, whole or floating; here they become 0 and 1. Several labels of two
    classes an example become uint8.
    """
    if classes is None:
        y = y if y.is_floating_point() else y.float()
        checks.check_finite(y, offsets, ids, where, "y")
        return y
    y = checks.whole_labels(y, offsets, ids, where)
    if classes == 2:
        y = checks.zero_one(y)
    checks.check_labels(y, classes, offsets, ids, where)
    return y.to(torch.uint8) if classes == 2 and y.ndim > 1 else y
