"""The rating files of MovieLens: u.data, ratings.csv and ratings.dat, also compressed."""

from __future__ import annotations

import gzip
import io
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn, TextIO

import numpy as np

from ...errors import DataError
from .columns import find_file

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
        DataError: no such file, or a malformed one; the message names the line and the field.
    """
    path = find_file(root, FILES)
    with _opened(path) as (text, name):
        rows, first = _parsed(text, name)
    if rows is None or not _sound(rows):
        with _opened(path) as (text, name):
            _explain(text, name, first)
    user, item = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    return Ratings(name, user, item, np.ascontiguousarray(rows[:, 2]))


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
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as ratings ({error}); it may be missing, truncated or no text."
        ) from None


def _separator(line: str) -> str:
    return next((mark for mark in ("\t", "::", ",") if mark in line), "\t")


def _parsed(text: TextIO, name: str) -> tuple[np.ndarray | None, int]:
    """Return all rows as numbers (N, 4), or None where a line is malformed, and the number of the first line of
    ratings."""
    head = text.readline()
    if not head.strip():
        raise DataError(f"{name} is empty, or its first line is; accepted: ratings.")
    mark = _separator(head)
    fields = [field.strip().strip('"') for field in head.rstrip("\r\n").split(mark)]
    if mark == ",":
        if tuple(fields) != HEADER:
            raise DataError(
                f"{name}, line 1: the header is {head.strip()!r}; accepted: {','.join(HEADER)} (or, without a header, "
                "values with tabs between them)."
            )
        first, lines = 2, iter(text)
    else:
        first, lines = 1, chain([head], text)
    if mark == "::":
        lines, mark = (line.replace("::", "\t") for line in lines), "\t"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a header alone
            rows = np.loadtxt(lines, delimiter=mark, dtype=np.float64, comments=None, ndmin=2)
    except ValueError:
        return None, first
    return (rows if rows.shape[1:] == (4,) else None), first


def _sound(rows: np.ndarray) -> bool:
    """Return whether every value is as :func:`_explain` accepts it, and no pair of user and item occurs twice."""
    user, item, rating, time = rows.T
    whole = all(bool(((c >= 0) & (c < _LARGEST) & (c == np.floor(c))).all()) for c in (user, item, time))
    if not (len(rows) and whole and bool(((rating >= RATINGS[0]) & (rating <= RATINGS[1])).all())):
        return False
    order = np.lexsort((item, user))
    again = (np.diff(user[order]) == 0) & (np.diff(item[order]) == 0)
    return not bool(again.any())


def _explain(text: TextIO, name: str, first: int) -> NoReturn:
    """Raise DataError for the first malformed line."""
    mark = ""
    line_of: dict[tuple[int, int], int] = {}
    for number, line in enumerate(text, 1):
        mark = mark or _separator(line)
        if number < first or not line.strip():
            continue
        where, fields = f"{name}, line {number}", line.rstrip("\r\n").split(mark)
        if len(fields) != len(_FIELDS):
            raise DataError(f"{where}: {len(fields)} fields; accepted: user, item, rating, timestamp.")
        user, item = (_whole(where, field, value) for field, value in zip(_FIELDS[:2], fields[:2], strict=True))
        _whole(where, "timestamp", fields[3])
        rating = _number(fields[2])
        if not RATINGS[0] <= rating <= RATINGS[1]:
            accepted = f"a number from {RATINGS[0]:g} to {RATINGS[1]:g}"
            raise DataError(f"{where}: field 'rating' is {fields[2]!r}; accepted: {accepted}.")
        if (user, item) in line_of:
            raise DataError(
                f"{where}: user {user} rates item {item} again, after line {line_of[user, item]}; accepted: once."
            )
        line_of[user, item] = number
    raise DataError(f"{name} holds no ratings." if not line_of else f"{name} changed while it was read.")


def _number(value: str) -> float:
    try:
        return float(value) if "_" not in value else float("nan")
    except ValueError:
        return float("nan")


def _whole(where: str, field: str, value: str) -> int:
    number = _number(value)
    if not (0 <= number < _LARGEST and number == np.floor(number)):
        raise DataError(f"{where}: field {field!r} is {value!r}; accepted: a whole number of at least 0.")
    return int(number)
