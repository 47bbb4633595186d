"""Tables of columns with a row an example, such as those of Hugging Face's ``datasets``, by
client."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._check import id_of, one_of, without_zeros
from .._extras import pandas as pd
from ..errors import ConfigError, DataError
from . import checks
from .arrays import as_tensor, stack_rows
from .missing import (
    MISSING_CLIENT,
    MissingClient,
    accepted_client,
    is_missing,
    marks_of_clients,
)

logger = logging.getLogger("fedmtl")
MASK = "mask"
"""The input that says which places of padded lists hold a value."""
_MASKS = (MASK, "attention_mask")

Rows = tuple[Tensor | dict[str, Tensor], Tensor]
"""The x, or the inputs by name, and the y of some rows."""


def splits_of(table: Any, test: Any, where: str) -> tuple[Any, Any]:
    """Returns the tables of training and of test rows: of a mapping of splits ``"train"`` and,
    unless ``test`` is given, ``"test"``. A warning names the other splits.

    Args:
        table: a table, or a mapping of splits to tables.
        test: a table of test rows; None for none.
        where: names the table in messages.

    Raises:
        DataError: splits without ``"train"``.
    """
    names = getattr(table, "column_names", None)
    # a plain dict of tables is meant as the splits that a DatasetDict is
    if names is None and isinstance(table, Mapping) and any(map(_is_table, table.values())):
        names = table
    # a DatasetDict has the columns of each split by its name
    if not isinstance(names, Mapping):
        return table, test
    if "train" not in names:
        splits = ", ".join(map(repr, names))
        raise DataError(
            f"{where} is a {type(table).__name__} of the splits {splits}, and none is "
            "'train'; give the rows of one, from_columns(dataset[SPLIT], ...), and those "
            "of another, where there is one, as test=dataset[OTHER]."
        )
    used = ["train"]
    if test is None and "test" in names:
        used.append("test")
        test = table["test"]
    others = ", ".join(repr(name) for name in names if name not in used)
    if others:
        logger.warning(
            "%s: the splits %s are left out; test=dataset[SPLIT] tests on another", where, others
        )
    return table["train"], test


def _is_table(value: Any) -> bool:
    """Returns True for a table of pandas, or one like those of Hugging Face."""
    return isinstance(value, pd.DataFrame) or hasattr(value, "column_names")


def _column_names(table: Any, where: str) -> list[str]:
    """Returns the names of the columns of a table of pandas, or of one like those of Hugging Face.

    Raises:
        DataError: a mapping of splits, or no table.
    """
    names: Any = getattr(table, "column_names", None)
    if isinstance(table, pd.DataFrame):
        names = list(table.columns)
    if names is None and isinstance(table, Mapping) and any(map(_is_table, table.values())):
        names = table
    if isinstance(names, Mapping):
        splits = ", ".join(map(repr, names))
        raise DataError(
            f"{where} is a {type(table).__name__} of the splits {splits}; give the rows of one, "
            "as test=dataset[SPLIT]."
        )
    if names is None or not hasattr(table, "__getitem__"):
        raise DataError(
            f"{where} is a {type(table).__name__}; accepted: a table with column_names and columns "
            "by name."
        )
    return list(names)


def _check_roles(names: Sequence[str], roles: Sequence[str], where: str) -> None:
    """Checks that the columns for the client, the target and the features are distinct, and that
    each is in the table once.

    Raises:
        DataError: the column.
    """
    missing = [column for column in dict.fromkeys(roles) if column not in names]
    wrong = missing
    state = "is missing"
    if len(missing) > 1:
        state = "are missing"
    if not missing:
        state = "occurs twice, in the table or as client, target, features"
        twice = (
            column
            for column, count in Counter(roles).items()
            if count > 1 or names.count(column) != 1
        )
        wrong = list(twice)[:1]
    if wrong:
        columns = "column"
        if len(wrong) > 1:
            columns = "columns"
        raise DataError(
            f"{where}: {columns} {', '.join(map(repr, wrong))} {state}; the columns are "
            f"{', '.join(map(repr, names))}."
        )


def _rows_of_clients(
    clients: Any, column: str, where: str, missing: MissingClient
) -> dict[str | int, list[int]]:
    """Returns the row numbers of each client, in the order in which the clients occur.

    Raises:
        DataError: no row with a client, or one without that is to be refused.
    """
    marks = marks_of_clients(missing)
    places: dict[str | int, list[int]] = {}
    left_out = 0
    for row, name in enumerate(clients):
        if is_missing(name, marks):
            if missing != "drop":
                _refuse_client(name, f"{where}: row {row}, column {column!r}")
            left_out += 1
            continue
        places.setdefault(_key(name), []).append(row)
    if not places and left_out:
        raise DataError(f"{where}: no row has a value in the client column {column!r}.")
    if not places:
        raise DataError(f"{where} has no rows; at least one a client is needed.")
    if left_out:
        logger.warning(
            "%s: rows without a client left out (a private count): %s", where, f"{left_out:,}"
        )
    return places


def _refuse_client(name: Any, place: str) -> None:
    """Refuses a row without a client."""
    state = "is empty"
    if isinstance(name, str) and name.strip():
        state = f"holds {name!r}"
    raise DataError(f"{place} {state}; accepted: {accepted_client('missing_client')}.")


def _key(name: Any) -> str | int:
    """Returns the id of a client; whole numbers stay apart from texts, so that 7 and "7" are
    noticed as one id."""
    known = id_of(name)
    if known is not name and not isinstance(name, str):
        return int(known)
    return without_zeros(str(name))


def group_rows(
    table: Any,
    client: str,
    target: str,
    features: str | Sequence[str],
    where: str,
    length: int | None = None,
    missing_client: MissingClient = "refuse",
) -> dict[str, Rows]:
    """Returns the (x, y) of each client of a table of columns.

    Several columns of numbers become one feature each, several columns of which one holds more than
    a number a row as many inputs by name.

    Args:
        table: has ``column_names``, or ``columns`` as a table of pandas has, and its item at a name
            is that column, a value a row.
        client: the column with each row's client.
        target: the column to predict.
        features: the columns to predict from.
        where: names the table in messages.
        length: to which lists of whole numbers are padded with 0, and cut; None for rows of one
            shape.
        missing_client: of rows without a client, see :class:`~fedmtl.data.TableSettings`.

    Raises:
        DataError: a missing column, an empty client, or rows that do not agree.
        ConfigError: an impossible length, or another choice for rows without a client.
    """
    names = _column_names(table, where)
    if isinstance(features, str):
        features = (features,)
    features = tuple(features)
    if not features:
        raise DataError(f"{where}: features names no column; at least one is needed.")
    _check_roles(names, (client, target, *features), where)
    one_of("from_columns", MISSING_CLIENT, missing_client=missing_client)
    places = _rows_of_clients(table[client], client, where, missing_client)
    x = _inputs(table, features, where, length)
    _check_one_target(table[target], where, target)
    y = stack_rows(table[target], f"{where}: row", target)
    _check_lengths(table, (client, target, *features), where)
    by_client: dict[str, Rows] = {}
    for name, index in checks.by_id(places, where).items():
        if isinstance(x, dict):
            by_client[name] = {key: part[index] for key, part in x.items()}, y[index]
        else:
            by_client[name] = x[index], y[index]
    return by_client


def _check_lengths(table: Any, columns: Sequence[str], where: str) -> None:
    """Refuses columns of different lengths, as a mapping of lists may have.

    Raises:
        DataError: names the column.
    """
    # a table that is no DataFrame may be a mapping of the user's own, whose columns nothing has
    # compared
    sizes = {name: sum(1 for _ in table[name]) for name in columns}
    rows = sizes[columns[0]]
    for name, size in sizes.items():
        if size != rows:
            raise DataError(
                f"{where}: column {name!r} has {size:,} rows, and {columns[0]!r} {rows:,}; all "
                "columns need a value a row."
            )


def _check_one_target(values: Iterable[Any], where: str, target: str) -> None:
    """Refuses targets that are lists of different lengths, as one label a token.

    Raises:
        DataError: names the row.
    """
    first = None
    for row, value in enumerate(values):
        size = None
        if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0:
            size = len(value)
        if row == 0:
            first = size
        if size != first:
            raise DataError(
                f"{where}: row {row}, column {target!r} holds {_items(size)}, and row 0 "
                f"{_items(first)}: one label a token is not taken, since losses and scores leave "
                "no padded place out; accepted: one value a row, or lists of one length. Windows "
                "of one length about each token, a row and a label each, are such rows."
            )


def _items(size: int | None) -> str:
    """Returns in words the number of values of a target."""
    if size is None:
        return "one value"
    return f"a list of {size:,}"


def _inputs(
    table: Any, features: Sequence[str], where: str, length: int | None
) -> Tensor | dict[str, Tensor]:
    """Returns the x of all rows, or several inputs by name."""
    if length is not None:
        return _padded(table, features, where, length)
    columns = {name: stack_rows(table[name], f"{where}: row", name) for name in features}
    if len(columns) == 1:
        return columns[features[0]]
    # arrays of different shapes cannot be stacked, so the model takes them by name
    if any(values.ndim > 1 for values in columns.values()):
        return columns
    # as floats, since columns of whole numbers and of floats become one tensor
    return torch.stack([columns[name].float() for name in features], 1)


def _padded(table: Any, features: Sequence[str], where: str, length: int) -> dict[str, Tensor]:
    """Returns the columns of lists (rows, length), padded with 0, the others as they are, and the
    mask, 1 for a value of a list, unless one is among the columns."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"length is {length!r}; it must be a whole number of at least 1, the longest list that "
            "is kept."
        )
    inputs: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name in features:
        values = list(table[name])
        if not _holds_tokens(values, f"{where}: row", name):
            inputs[name] = stack_rows(values, f"{where}: row", name)
            continue
        rows = [
            _tokens(value, f"{where}: row {number}", name) for number, value in enumerate(values)
        ]
        inputs[name], masks[name] = torch.zeros(2, len(rows), length, dtype=torch.int64)
        for place, row in enumerate(rows):
            # cut at a public length: the longest list would be a fact of one record
            kept = row[:length]
            inputs[name][place, : len(kept)] = kept
            masks[name][place, : len(kept)] = 1
    if not masks:
        raise ConfigError(
            f"{where}: length is {length}, but none of the features "
            f"{', '.join(features)} holds lists of whole numbers, which length pads."
        )
    # one mask serves all lists of a row, so they must be of one length
    first, *others = masks
    for name in others:
        differing = (masks[name] != masks[first]).any(1).nonzero()
        if len(differing):
            raise DataError(
                f"{where}: row {int(differing[0])}, column {name!r} has another number of values "
                f"than {first!r}; lists of one row must have one length."
            )
    # a tokenizer gives a mask of its own
    if not set(features) & set(_MASKS):
        inputs[MASK] = masks[first]
    return inputs


def _holds_tokens(values: Sequence[Any], where: str, field: str) -> bool:
    """Returns True if the first value of a column that is no empty list is one of whole numbers;
    images and vectors of real numbers beside them stay as they are."""
    for number, value in enumerate(values):
        if isinstance(value, str) or not isinstance(value, Iterable):
            # a gap says nothing of its column
            if value is None:
                continue
            return False
        row = as_tensor(value, f"{where} {number}", field)
        if row.numel():
            return row.ndim == 1 and not row.is_floating_point()
    return bool(values)


def _tokens(value: Any, where: str, field: str) -> Tensor:
    """Returns a list of whole numbers as int64 (n,)."""
    if value is None:
        raise DataError(
            f"{where}, field {field!r} has no value; accepted: a list of whole numbers."
        )
    row = as_tensor(value, where, field)
    if row.ndim != 1 or row.is_floating_point():
        if row.numel():
            raise DataError(
                f"{where}, field {field!r} is no list of whole numbers, which length pads."
            )
        # an empty list has the dtype of floats
        row = torch.zeros(0)
    return row.long()
