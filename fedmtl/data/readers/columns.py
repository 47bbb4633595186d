"""Columns of a table as arrays, with errors that name the file, the row and the column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import DataError
from .table import load_frame

if TYPE_CHECKING:
    import pandas as pd

MISSING = ("NA", "NaN", "nan", "")
"""Texts that stand for a value that is not there."""


def find_file(root: str | Path, names: Sequence[str]) -> Path:
    """Return ``root`` if it is a file, or the first of ``names`` in the folder ``root``.

    Raises:
        DataError: there is none.
    """
    path = Path(root)
    if not path.is_dir():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise DataError(f"{path} holds none of {', '.join(names)}; give the file or its folder.")


def read_frame(file: Path, needed: Sequence[str], text: Sequence[str]) -> pd.DataFrame:
    """Return a table with at least the columns ``needed``; the columns ``text`` are read as they are written.

    Raises:
        DataError: an unreadable or empty file, or a missing column.
    """
    frame = load_frame(file, tuple(text))
    check_columns(frame, needed, file)
    return frame


def check_columns(frame: pd.DataFrame, needed: Sequence[str], file: Path) -> None:
    """Raise :class:`DataError` unless the table has the columns ``needed``."""
    for column in needed:
        if column not in frame.columns:
            known = ", ".join(map(repr, frame.columns))
            raise DataError(f"{file}: column {column!r} is missing; the columns are {known}.")


def numbers(
    frame: pd.DataFrame,
    column: str,
    file: Path,
    *,
    missing: bool = False,
    low: float = -np.inf,
    high: float = np.inf,
) -> np.ndarray:
    """Return a column of numbers, float64 (n,).

    Args:
        frame: the table.
        column: its name.
        file: for messages.
        missing: empty values and NA are allowed, and become NaN.
        low: smallest accepted value.
        high: largest accepted value.

    Raises:
        DataError: a text, an infinity, a value outside, or a missing one that is not allowed.
    """
    import pandas as pd

    series = frame[column]
    absent = (series.isna() | series.isin(MISSING)).to_numpy()
    values = np.asarray(pd.to_numeric(series.mask(absent), errors="coerce"), dtype=np.float64)
    wrong = ~np.isfinite(values) & ~(absent & missing)
    outside = ~wrong & ((values < low) | (values > high))
    if (wrong | outside).any():
        row = int((wrong | outside).argmax())
        accepted = "a finite number" if not np.isfinite(high) else f"a number from {low:g} to {high:g}"
        value = series.iloc[row]
        state = "is empty" if absent[row] else f"holds {value!r}" if isinstance(value, str) else f"holds {value}"
        raise DataError(f"{file}: row {row}, column {column!r} {state}; accepted: {accepted}.")
    return values


def texts(frame: pd.DataFrame, column: str) -> np.ndarray:
    """Return a column of texts (n,), stripped; an empty value becomes ``""``."""
    return frame[column].fillna("").astype(str).str.strip().to_numpy(dtype=str)


def codes(values: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    """Return the positions (n,), int64, of texts (n,) in ``categories``; -1 where a text is none of them."""
    match = values[:, None] == np.asarray(list(categories), dtype=str)[None]
    return np.where(match.any(axis=1), match.argmax(axis=1), -1)


def known_codes(values: np.ndarray, categories: Sequence[str], column: str, file: Path, accepted: str) -> np.ndarray:
    """Return the :func:`codes` of texts that must all be among ``categories``.

    Raises:
        DataError: another text, named with its row and ``column``.
    """
    positions = codes(values, categories)
    if (positions < 0).any():
        row = int((positions < 0).argmax())
        raise DataError(f"{file}: row {row}, column {column!r} holds {str(values[row])!r}; accepted: {accepted}.")
    return positions
