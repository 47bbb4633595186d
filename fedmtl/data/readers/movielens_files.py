"""The rating files of MovieLens: u.data, ratings.csv and ratings.dat, also compressed."""

from __future__ import annotations

import gzip
import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from ...errors import DataError, first_line
from .columns import Table, find_file

FILES = ("u.data", "ratings.csv", "ratings.dat", "u.data.gz", "ratings.csv.gz")
RATINGS = (0.5, 5.0)
"""The public range of a rating."""

HEADER = ("userId", "movieId", "rating", "timestamp")
_FIELDS = ("user", "item", "rating", "timestamp")
_LARGEST = float(2**53)


@dataclass(frozen=True, eq=False)
class Ratings:
    """The rows of a file, in its order.

    Attributes:
        file: for messages.
        user: int64 (N,), numbers of users.
        item: int64 (N,), numbers of items; a user rates an item once.
        rating: float64 (N,), within :data:`RATINGS`.
    """

    file: str
    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray


def read_ratings(root: str | Path) -> Ratings:
    """Read a rating file.

    ``u.data``: user, item, rating, timestamp with tabs between them; ``ratings.dat``: with ``::`` between them;
    ``ratings.csv``: with commas, and the header ``userId,movieId,rating,timestamp``. Any of them may be compressed
    (.gz), or the one such file of a .zip. Timestamps are checked and not kept.

    Args:
        root: the file, or its folder.

    Raises:
        DataError: no such file, or a malformed one; the message names the row and the column.
    """
    path = find_file(root, FILES)
    with _opened(path) as (text, name):
        table = _table(text, name)
    columns, accepted = {}, "a whole number of at least 0"
    for column in ("user", "item", "timestamp"):
        columns[column] = table.numbers(column, low=0, accepted=accepted)
        whole = (columns[column] == np.floor(columns[column])) & (columns[column] < _LARGEST)
        table.refuse(~whole, column, accepted)
    rating = table.numbers("rating", low=RATINGS[0], high=RATINGS[1])
    again = table.frame.duplicated(["user", "item"]).to_numpy()
    table.refuse(again, "item", "an item that the user has not rated in a row before")
    return Ratings(name, columns["user"].astype(np.int64), columns["item"].astype(np.int64), rating)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[TextIO, str]]:
    """Open the text of a plain file, a .gz or the rating file of a .zip; yield it and its name for messages."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as text:
                yield text, str(path)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                members = [m for m in archive.namelist() if m.rsplit("/", 1)[-1] in FILES[:3]]
                if len(members) != 1:
                    raise DataError(f"{path} holds {len(members)} of {', '.join(FILES[:3])}; accepted: one.")
                with archive.open(members[0]) as raw:
                    yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""), f"{path}/{members[0]}"
        else:
            with open(path, encoding="utf-8-sig", newline="") as text:
                yield text, str(path)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        reason = first_line(error)
        raise DataError(
            f"{path} cannot be read as ratings ({reason}); it may be missing, truncated or no text."
        ) from None


def _table(text: TextIO, name: str) -> Table:
    """Return the rows of a file with the columns ``_FIELDS``."""
    import pandas as pd

    head = text.readline().strip()
    if not head:
        raise DataError(f"{name} is empty, or its first line is; accepted: ratings.")
    mark = next((mark for mark in ("\t", "::", ",") if mark in head), "\t")
    fields = tuple(field.strip().strip('"') for field in head.split(mark))
    if mark == "," and fields != HEADER:
        raise DataError(
            f"{name}: the header is {head!r}; accepted: {','.join(HEADER)} (or, without a header, values with tabs "
            "between them)."
        )
    if len(fields) != len(_FIELDS):
        raise DataError(f"{name}: the first row has {len(fields)} fields; accepted: {', '.join(_FIELDS)}.")
    text.seek(0)
    frame = pd.read_csv(
        io.StringIO(text.read().replace("::", "\t")) if mark == "::" else text,
        sep="," if mark == "," else "\t",
        names=_FIELDS,
        header=0 if mark == "," else None,
        keep_default_na=False,
        na_values=[""],
        low_memory=False,
    )
    if frame.empty:
        raise DataError(f"{name} holds no ratings.")
    return Table(frame, Path(name))
