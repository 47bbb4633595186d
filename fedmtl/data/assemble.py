"""From separate clients to flat tensors, and from flat tensors to targets and sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..errors import DataError
from . import checks, rows
from .transforms import Packed

_MOST_CLASSES = 1 << 20  # that labels are taken for, if their number is not given


def as_tensor(value: Any, where: str, field: str) -> Tensor:
    """Return a tensor from a tensor, an array, a list of numbers or a SciPy sparse matrix (as CSR).

    Raises:
        DataError: the value does not hold numbers, or its rows differ in length.
    """
    if isinstance(value, Tensor):
        if value.layout not in (torch.strided, torch.sparse_csr):
            raise DataError(
                f"{where}, field {field!r} has the layout {value.layout}; accepted: dense tensors, sparse CSR."
            )
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


def as_pair(value: Any, where: str) -> tuple[Any, Any]:
    """Return a client's (x, y): a pair as it is, or the stacked items (x, y) of a torch Dataset.

    Raises:
        DataError: neither, or an item that is no pair.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    if isinstance(value, TensorDataset) and len(value.tensors) == 2:
        return value.tensors[0], value.tensors[1]
    plain = isinstance(value, (tuple, list, Tensor, np.ndarray))
    if plain or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise DataError(f"{where}: its value must be a pair (x, y), or a torch Dataset of such pairs.")
    xs, ys = [], []
    for number in range(len(value)):
        item = value[number]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"{where}, example {number} is a {type(item).__name__}; a torch Dataset must give (x, y).")
        xs.append(item[0])
        ys.append(item[1])
    y = stack_rows(ys, f"{where}, example", "field 'y'")
    if xs and all(isinstance(x, Mapping) and x.keys() == xs[0].keys() for x in xs):
        return {key: stack_rows([x[key] for x in xs], f"{where}, example", f"field 'x[{key}]'") for key in xs[0]}, y
    return stack_rows(xs, f"{where}, example", "field 'x'"), y


def stack_rows(values: Iterable[Any], where: str, field: str) -> Tensor:
    """Return one tensor (rows, ...) from numbers, lists, arrays, tensors or images, one a row.

    A Pillow image becomes uint8 (channels, height, width), real numbers that are no tensors become float32.

    Args:
        values: the rows.
        where: what is put before a row's number in messages.
        field: what is put after it.

    Raises:
        DataError: a row that is missing or holds no numbers, or rows that differ in shape.
    """
    made: list[Tensor] = []
    for number, value in enumerate(values):
        place = f"{where} {number}, {field}"
        if value is None:
            raise DataError(f"{place} is empty; every value must be given.")
        if isinstance(value, Tensor):
            row = value.detach()
        else:
            try:
                array = np.asarray(value)
            except ValueError as error:
                raise DataError(f"{place}: its parts differ in length; accepted: numbers of one shape.") from error
            if array.dtype.kind not in "fiub":
                raise DataError(f"{place} holds {str(value)[:40]!r}; accepted: numbers.")
            if hasattr(value, "getbands"):
                if value.mode in ("P", "PA"):
                    raise DataError(f"{place} is an image with a palette; give one with colours: image.convert('RGB').")
                array = array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
            row = torch.from_numpy(np.array(array, dtype=np.float32 if array.dtype == np.float64 else array.dtype))
        if made and row.shape != made[0].shape:
            raise DataError(
                f"{place} has the shape {tuple(row.shape)}, and row 0 has {tuple(made[0].shape)}; all must agree."
            )
        made.append(row)
    if not made:
        raise DataError(f"{where.rpartition(',')[0]}: there are no rows; at least 1 is needed.")
    kinds = {row.dtype for row in made}
    kind = made[0].dtype if len(kinds) == 1 else torch.float32
    return torch.stack([row.to(kind) for row in made])


def pack_inputs(
    clients: Mapping[str, Any], name: str, packed: Packed | None = None
) -> tuple[Mapping[str, Any], Packed | None]:
    """Return clients whose x is a mapping of several inputs with one row of numbers an example instead.

    Args:
        clients: one (x, y) pair a client, x (examples, ...) or a mapping of names to such.
        name: for messages.
        packed: what the inputs must be; None takes it from the first client.

    Returns:
        The pairs with x float32 (examples, D), and the inputs in a row; the clients as they are and None where x is no
        mapping.

    Raises:
        DataError: inputs that differ between clients, of different lengths, or a whole number of 2^24 or more.
    """
    found = {}
    for client, value in clients.items():
        where = f"{name}: client {client!r}"
        pair = as_pair(value, where)
        if not isinstance(pair[0], Mapping):
            if packed is not None:
                raise DataError(f"{where}, field 'x' is no mapping; accepted: one of {_names(packed)}.")
            return clients, None
        inputs = {str(key): as_tensor(part, where, f"x[{key}]") for key, part in pair[0].items()}
        shapes = tuple(
            (key, tuple(part.shape[1:]), "real" if part.is_floating_point() else "integer")
            for key, part in inputs.items()
        )
        packed = packed or Packed(shapes)
        if {key: (shape, kind) for key, shape, kind in shapes} != {k: (s, kind) for k, s, kind in packed.inputs}:
            raise DataError(f"{where}, field 'x' has the inputs {_names(Packed(shapes))}; accepted: {_names(packed)}.")
        lengths = {key: len(part) for key, part in inputs.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{where}, field 'x' has inputs of different lengths: {lengths}; they must agree.")
        for key, part in inputs.items():
            if not part.is_floating_point() and len(part) and int(part.abs().max()) >= 1 << 24:
                raise DataError(
                    f"{where}, field 'x[{key}]' holds a whole number of 2^24 or more; accepted: smaller ones."
                )
        row = [inputs[key].float().reshape(len(inputs[key]), math.prod(shape)) for key, shape, _ in packed.inputs]
        found[client] = torch.cat(row, 1), pair[1]
    return found, packed


def _names(packed: Packed) -> str:
    return ", ".join(f"{name} {shape} ({kind})" for name, shape, kind in packed.inputs)


def group_rows(
    table: Any, client: str, target: str, features: Sequence[str], where: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the (x, y) of each client of a table of columns; several feature columns become one feature each.

    Args:
        table: has ``column_names``, or ``columns`` as a table of pandas has, and its item at a name is that column, a
            value a row.
        client, target, features: names of columns.
        where: names the table in messages.

    Raises:
        DataError: a missing column, columns of different lengths, an empty client, or rows that do not agree.
    """
    known = getattr(table, "column_names", None)
    if known is None and hasattr(table, "columns") and hasattr(table, "iloc"):
        known = list(table.columns)
        for name in dict.fromkeys((client, target, *features)):
            if known.count(name) > 1:
                raise DataError(f"{where}: column {name!r} occurs twice; names of columns must differ.")
        table = {name: table[name].tolist() for name in dict.fromkeys((client, target, *features)) if name in known}
    if known is None or not hasattr(table, "__getitem__"):
        raise DataError(
            f"{where} is a {type(table).__name__}; accepted: a table with column_names and columns by name."
        )
    if not features:
        raise DataError(f"{where}: features names no column; at least one is needed.")
    for column in (client, target, *features):
        if column not in known:
            raise DataError(f"{where}: column {column!r} is missing; the columns are {', '.join(map(repr, known))}.")
    for column in features:
        if column in (client, target):
            raise DataError(f"{where}: features names {column!r}, which is the client or target column; leave it out.")
    places = _places(table[client], f"{where}: row", f"column {client!r}")
    if not places:
        raise DataError(f"{where} has no rows; at least one a client is needed.")
    columns = {name: stack_rows(table[name], f"{where}: row", f"column {name!r}") for name in (*features, target)}
    count = sum(map(len, places.values()))
    for name, values in columns.items():
        if len(values) != count:
            raise DataError(f"{where}: column {name!r} has {len(values):,} rows and column {client!r} has {count:,}.")
        if name in features and len(features) > 1 and values.ndim != 1:
            raise DataError(
                f"{where}: column {name!r} has rows of shape {tuple(values.shape[1:])}; each of several features "
                "must hold one number a row."
            )
    x = columns[features[0]] if len(features) == 1 else torch.stack([columns[f].float() for f in features], 1)
    return {name: (x[rows], columns[target][rows]) for name, rows in places.items()}


def _places(clients: Iterable[Any], where: str, field: str) -> dict[str, list[int]]:
    """Return the rows of each client by its id, in the order in which they first occur.

    Raises:
        DataError: a row without a client, or an id that is a number in one row and a text in another.
    """
    import pandas as pd

    places: dict[str, list[int]] = {}
    texts: dict[str, bool] = {}
    for row, name in enumerate(clients):
        if pd.api.types.is_scalar(name) and (pd.isna(name) or name == ""):
            raise DataError(f"{where} {row}, {field} is empty; every row must name its client.")
        if texts.setdefault(str(name), isinstance(name, str)) != isinstance(name, str):
            raise DataError(
                f"{where} {row}, {field} holds the client {str(name)!r} as a number and as a text; give all as texts."
            )
        places.setdefault(str(name), []).append(row)
    return places


def stack_clients(
    clients: Mapping[str, Any], name: str, *, empty: bool = False
) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Turn one (x, y) pair a client into flat x (N, ...), y (N, ...), offsets (n + 1,) and ids; ``empty`` accepts
    clients without examples."""
    ids = tuple(clients)
    checks.check_ids(ids, name)
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    for client, pair in clients.items():
        where = f"{name}: client {client!r}"
        x, y = (as_tensor(part, where, field) for part, field in zip(as_pair(pair, where), "xy", strict=True))
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
    if len(y) and int(y.max()) >= _MOST_CLASSES:
        row = int((y >= _MOST_CLASSES).reshape(len(y), -1).any(1).nonzero()[0, 0])
        raise DataError(
            f"{where}: {checks.locate(row, offsets, ids)}, field 'y' holds the label {int(y[row].max())}; as many "
            "classes are taken only where they are given, as classes=K (for regression give classes=None)."
        )
    return int(y.max()) + 1 if len(y) else None


def as_targets(y: Tensor, classes: int | None, offsets: Tensor, ids: Sequence[str], where: str) -> Tensor:
    """Return checked targets: int64 labels below ``classes``, or finite floating targets if ``classes`` is None.

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
