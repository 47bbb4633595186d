"""Files of text with a row a line: their lines, headings and records."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..._extras import pandas as pd
from ...errors import DataError
from .encoding import HEAD, check_text, decoder, opened, unreadable
from .text_format import Format, check_separator, field_counts, is_blank, line_reader, skipped

AS_WRITTEN: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
"""Of ``pandas.read_csv``: only an empty text is a missing value."""
_LINES = 50


def read_text(
    file: Path, form: Format, text: Sequence[str] = (), settable: bool = True
) -> pd.DataFrame:
    """Returns the table in a file of text, whose headings have no spaces around them.

    Args:
        file: one of :data:`.text_format.SUFFIXES`.
        form: the format of its text.
        text: columns that are kept as they are written.
        settable: the user can set the format by ``data.separator``, ``data.decimal``,
            ``data.encoding``, ``data.comment``; for messages.

    Raises:
        DataError: no such file, no text of this encoding, other separators, a heading that occurs
            twice, a line with too many or too few fields, a quote that is not closed, or an
            unreadable file.
    """
    check_text(file, form, settable)
    lines = first_lines(file, form)
    check_separator(file, form, lines, settable)
    options: dict[str, Any] = {
        "sep": r"\s+" if form.separator == " " else form.separator,
        "encoding": decoder(form),
        "skiprows": skipped(lines, form),
    }
    names = _headings(file, options)
    options.update(
        AS_WRITTEN, decimal=form.decimal, dtype=dict.fromkeys(text, str), low_memory=False
    )
    try:
        frame = pd.read_csv(file, header=0, names=names, **options)
    except pd.errors.ParserError as error:
        # the parser does not say where; the last record that the csv module finds begins there
        if "EOF inside string" in str(error):
            *_, (opened_at, _, _) = records(file, form)
            raise DataError(
                f"{file}: a quote that opens in line {opened_at} is not closed."
            ) from error
        check_lines(file, form)
        raise unreadable(file, error) from error
    except (ValueError, OSError, EOFError) as error:
        raise unreadable(file, error) from error
    # pandas fills lines that are too short, and takes the first fields of lines that are too long
    # as an index
    counts = field_counts(lines, form.separator)
    longer = len(counts) > 1 and counts[1] > counts[0]
    if longer or frame.iloc[:, -1].isna().any() or not isinstance(frame.index, pd.RangeIndex):
        check_lines(file, form)
    empty = [name for name in names if is_unnamed(name) and frame[name].isna().all()]
    return frame.drop(columns=empty)  # of separators at the end of every line


def check_source(source: str | Path) -> None:
    """Raises :class:`DataError` unless the source of a table is a path with something at it that
    may be read."""
    # pandas would fetch it, and data that a run reads twice must not change in between
    if re.match(r"[a-z][a-z0-9+]+:/", str(source).lower()):
        raise DataError(f"{source} is an address; accepted: the path of a file, so fetch it first.")
    file = Path(source)
    try:
        if not file.exists():
            raise DataError(f"{file} cannot be read as a table: it does not exist.")
        # a parquet table may be a folder of its parts
        if file.is_dir() and file.suffix != ".parquet":
            raise DataError(f"{file} is a folder; accepted: the path of one file.")
        if file.is_file():
            file.open("rb").close()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}); give a file that this user may read."
        ) from error


def first_lines(file: Path, form: Format) -> list[str]:
    """Returns at most 50 lines at the beginning of a file, without their ends; a long file's last
    one may be cut off."""
    with opened(file, form, newline=None) as text:
        head = text.read(HEAD)
    # a mark of UTF-8 in a file that is read in another encoding
    lines = head.removeprefix("\ufeff").split("\n")
    if len(head) == HEAD:
        lines = lines[:-1]
    return lines[:_LINES]


def check_lines(file: Path, form: Format) -> None:
    """Raises :class:`DataError` for the first line whose number of fields is not that of the
    heading."""
    width = 0
    for first, last, fields in records(file, form):
        # the heading is the first record
        width = width or len(fields)
        if len(fields) == width:
            continue
        why = f"the line may be cut off, or a text with {form.separator!r} in it must be quoted"
        if last > first:
            why = (
                f"a quote joins the lines {first} to {last}, and may not be closed where it "
                "should be"
            )
        elif len(fields) == width + 1 and not fields[-1].strip():
            why = "it ends with a separator, and the heading does not"
        elif len(fields) == 1 and fields[0].startswith("#"):
            why = "comments are left out above the heading only, with data.comment"
        raise DataError(
            f"{file}: the number of fields of line {first} is {len(fields)}, that of the header "
            f"{width}; {why}."
        )


def line_of(file: Path, form: Format, row: int) -> int | None:
    """Returns the line of a file on which a row begins, counted from 1 with blank lines, comments
    and line breaks in quotes; None for a row that is not found."""
    try:
        first, _, _ = next(islice(records(file, form), row + 1, None))
    # the line is for a message only, and the message comes without it, too
    except (StopIteration, DataError):
        return None
    return first


def records(file: Path, form: Format) -> Iterator[tuple[int, int, list[str]]]:
    """Yields the first line, the last line and the fields of the heading and of every row.

    Raises:
        DataError: a text that is longer than the csv module takes.
    """
    above = skipped(first_lines(file, form), form)
    with opened(file, form, newline="") as text:
        for _ in range(above):
            next(text)
        reader = line_reader(text, form.separator)
        last = above
        try:
            for fields in reader:
                first = last + 1
                last = above + reader.line_num
                if not is_blank(fields):
                    yield first, last, fields
        except csv.Error as error:
            longest = csv.field_size_limit()
            raise DataError(
                f"{file}: line {above + reader.line_num} holds a text of more than {longest:,} "
                "letters; a quote may not be closed, or leave the column out."
            ) from error


def is_unnamed(name: Any) -> bool:
    """Returns True if pandas gives this name to a column without a heading."""
    return re.fullmatch(r"Unnamed: \d+", str(name)) is not None


def _headings(file: Path, options: dict[str, Any]) -> list[str]:
    """Returns the names of the columns of a file.

    Raises:
        DataError: none, or one that occurs twice.
    """
    try:
        first = pd.read_csv(file, header=None, nrows=1, dtype=str, na_filter=False, **options)
    except (ValueError, OSError, EOFError) as error:
        raise unreadable(file, error) from error
    # spaces behind separators would be part of the names that the user has to type
    names = [str(name).strip(" \t\ufeff") for name in first.iloc[0]]
    names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
    check_distinct(names, file)
    return names


def check_distinct(names: Sequence[Any], file: Path) -> None:
    """Raises :class:`DataError` if a column's name occurs twice."""
    for name, times in Counter(names).items():
        if times > 1:
            often = "twice"
            if times != 2:
                often = f"{times} times"
            raise DataError(
                f"{file}: column {name!r} occurs {often}; every column needs a name of its own."
            )
