"""Files of tables: finding one, and reading it as a table of pandas."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..._extras import pandas as pd
from ..._extras import parquet
from ...errors import DataError
from .delimited import check_distinct, read_text
from .encoding import unreadable
from .text_format import SUFFIXES, Format

Read = TypeVar("Read")


def find_file(root: str | Path, names: Sequence[str]) -> Path:
    """Returns ``root`` if it is a file, or the first of ``names`` in the folder ``root``.

    Raises:
        DataError: there is none.
    """
    path = Path(root)
    if not path.exists():
        raise DataError(f"{path} does not exist; give one of {', '.join(names)}, or its folder.")
    if not path.is_dir():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise DataError(f"{path} holds none of {', '.join(names)}; give the file or its folder.")


def loaded(read: Callable[..., Read], file: Path, kind: str = "a table", **options: Any) -> Read:
    """Returns the table that a function of pandas reads from a file.

    Raises:
        DataError: the file cannot be read as ``kind``.
    """
    try:
        return read(file, **options)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise unreadable(file, error, kind) from error


def read_frame(file: Path, text: Sequence[str], form: Format, settable: bool) -> pd.DataFrame:
    """Returns the table in a file, with distinct names of columns."""
    if not file.name.lower().endswith((*SUFFIXES, ".parquet")):
        raise DataError(
            f"{file} has an unknown suffix; accepted: {', '.join((*SUFFIXES, '.parquet'))}."
        )
    if file.suffix.lower() != ".parquet":
        return read_text(file, form, text, settable)
    if file.is_file():
        # before the rows are read: a name that occurs twice would give two columns at once
        check_distinct(loaded(_parquet_names, file), file)
    return loaded(pd.read_parquet, file)


def _parquet_names(file: Path) -> list[str]:
    """Returns the names of the columns of a parquet file."""
    return list(parquet.read_schema(file).names)
