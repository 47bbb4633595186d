"""Test rows of a table that are the latest of every client."""

from __future__ import annotations

import logging

import numpy as np

from ..._extras import pandas as pd
from ...errors import DataError
from ..partition import Parts
from .columns import Table

logger = logging.getLogger("fedmtl")


def by_time(table: Table, column: str, parts: Parts, share: float) -> tuple[Parts, Parts]:
    """Divides the rows of every client by time: the latest ones are for test.

    A client of n rows has ``round(share * n)`` test rows, at least 1 and at most n - 1: the only
    row of a client is for training. Rows of one time keep the order of the table, and a warning
    counts the clients that have rows of one time on both sides.

    Args:
        table: n rows.
        column: the dates, times or numbers by which rows are ordered.
        parts: the rows of each client, int64, ascending.
        share: of each client's rows for test, between 0 and 1.

    Returns:
        the rows of each client for training, and for test of the clients with at least 2 rows,
        ascending.

    Raises:
        DataError: a value that is missing, or neither a date nor a number, no client with 2 rows,
            or none with rows of different times.
    """
    when = _moments(table, column)
    train = Parts()
    test = Parts()
    tied = 0
    ordered = False
    for client, rows in parts.items():
        held = min(max(1, round(share * len(rows))), len(rows) - 1)
        order = rows[np.argsort(when[rows], kind="stable")]
        kept = len(order) - held
        train[client] = np.sort(order[:kept])
        if held:
            test[client] = np.sort(order[kept:])
            tied += int(when[order[kept - 1]] == when[order[kept]])
            ordered = ordered or when[order[0]] < when[order[-1]]
    if not test:
        raise DataError(
            f"{table.file}: no client has 2 rows, an earlier one to train on and a "
            "later one to test on."
        )
    if not ordered:
        raise DataError(
            f"{table.file}: all rows of each client have the same time in column {column!r}, which "
            "then orders nothing; choose another column as data.time, or data.split=random."
        )
    if tied:
        logger.warning(
            "%s: clients with rows of one time in training and in test (a private count): %s of "
            "%s; a finer column than %r would part them",
            table.file, f"{tied:,}", f"{len(test):,}", column,
        )  # fmt: skip
    return train, test


def _moments(table: Table, column: str) -> np.ndarray:
    """Returns a column of dates, times or numbers as numbers that ascend with them, (n,)."""
    values = table.frame[column]
    if pd.api.types.is_numeric_dtype(values.dtype) and not pd.api.types.is_bool_dtype(values.dtype):
        return table.numbers(column)
    moments = pd.to_datetime(values, format="ISO8601", errors="coerce", utc=True)
    accepted = "a date such as 1980-01-31, a time such as 1980-01-31 23:59, or a column of numbers"
    table.refuse(moments.isna().to_numpy(), column, accepted)
    return moments.to_numpy(dtype="datetime64[ns]").astype(np.int64)
