"""Files of text with a row a line: how their fields are written, what is wrong with a file, on
which line a row stands."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from ...errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import pandas as pd

AS_WRITTEN: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
"""Of ``pandas.read_csv``: only an empty text is a missing value."""
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "space": " "}
DECIMALS = {"point": ".", "comma": ","}
DECIMAL_COMMA = r"\s*[-+]?\d+,\d+\s*"
"""A pattern of numbers with a decimal comma."""
DECIMAL_POINT = r"\s*[-+]?\d*\.\d+\s*"
"""A pattern of numbers with a decimal point."""
# letters and lines of a file that are looked at for its form
_HEAD = 1 << 20
_LINES = 50
_FITTING = 0.9  # share of lines with as many fields as the heading that a separator needs
_UNICODE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_NO_TEXT = {
    b"PK\x03\x04": "a zip archive, such as a workbook of Excel",
    b"\xd0\xcf\x11\xe0": "a workbook of Excel",
    b"PAR1": "a parquet file",
    b"\x1f\x8b": "compressed (name it .csv.gz)",
    b"SQLite format 3": "a database of SQLite",
    b"<!doctype": "a page of the web",
    b"<html": "a page of the web",
}


@dataclass(frozen=True)
class Format:
    """How the text of a table is written.

    Attributes:
        separator: the letter between fields; a space stands for any number of blanks.
        decimal: the letter before the decimals of a number.
        encoding: of the letters, by Python's name.
        comment: how a line begins that is left out above the heading; empty for none.
    """

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"
    comment: str = ""


def format_of(
    name: str,
    separator: str | None = None,
    decimal: str = "point",
    encoding: str = "utf-8",
    comment: str | None = None,
) -> Format:
    """Return the format of a file by its name and the settings of a reader.

    Args:
        name: of the file; the separator of .tsv is a tab and else a comma where none is given.
        separator: a name of :data:`SEPARATORS`, or the letter itself.
        decimal: a name of :data:`DECIMALS`, or the letter itself.
        encoding: a name that Python knows.
        comment: how a line begins that is left out above the heading, or None.

    Raises:
        ConfigError: another setting.
    """
    if separator is None and ".tsv" in name.lower():
        between = "\t"
    else:
        between = separator or ","
    between = SEPARATORS.get(between, between).replace("\\t", "\t")
    if len(between) != 1 or between.isalnum() or between in "\"'.\r\n\0-+_":
        accepted = f"{', '.join(SEPARATORS)}, or another single letter between fields"
        raise ConfigError(f"data.separator is {separator!r}; accepted: {accepted}.")
    point = DECIMALS.get(decimal, decimal)
    if point not in DECIMALS.values():
        raise ConfigError(f"data.decimal is {decimal!r}; accepted: {', '.join(DECIMALS)}.")
    if comment is not None and not str(comment).strip():
        raise ConfigError("data.comment is empty; give how a line of comment begins, such as '#'.")
    try:
        "".encode(encoding)
        known = codecs.lookup(encoding).name
    except (LookupError, TypeError, ValueError) as error:
        accepted = "utf-8, utf-16, latin-1, cp1252 and others that Python knows"
        raise ConfigError(f"data.encoding is {encoding!r}; accepted: {accepted}.") from error
    return Format(between, point, known, str(comment or ""))


def read_text(
    file: Path, form: Format, text: Sequence[str] = (), settable: bool = True
) -> pd.DataFrame:
    """Return the table in a file of text, whose headings have no spaces around them.

    Args:
        file: one of :data:`SUFFIXES`.
        form: how it is written.
        text: columns that are kept as they are written.
        settable: the user can set the format by ``data.separator``, ``data.decimal``,
            ``data.encoding``, ``data.comment``; for messages.

    Raises:
        DataError: no such file, no text of this encoding, other separators, a heading that occurs
            twice, a line with too many or too few fields, a quote that is not closed, or an
            unreadable file.
    """
    import pandas as pd

    check_text(file, form, settable)
    lines = first_lines(file, form)
    check_separator(file, form, lines, settable)
    options: dict[str, Any] = {
        "sep": r"\s+" if form.separator == " " else form.separator,
        "encoding": _decoder(form),
        "skiprows": skipped(lines, form),
    }
    names = _headings(file, options)
    options.update(
        AS_WRITTEN, decimal=form.decimal, dtype=dict.fromkeys(text, str), low_memory=False
    )
    try:
        frame = pd.read_csv(file, header=0, names=names, **options)
    except pd.errors.ParserError as error:
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


def unreadable(file: Path, error: BaseException, what: str = "a table") -> DataError:
    """Return the error of a file that cannot be read as ``what``."""
    return DataError(
        f"{file} cannot be read as {what} ({first_line(error)}); it may be missing, empty, "
        "truncated or no text."
    )


def check_source(source: str | Path) -> None:
    """Raise :class:`DataError` unless the source of a table is a path with something at it that may
    be read."""
    if re.match(r"[a-z][a-z0-9+]+:/", str(source).lower()):
        raise DataError(f"{source} is an address; accepted: the path of a file, so fetch it first.")
    file = Path(source)
    try:
        if not file.exists():
            raise DataError(f"{file} cannot be read as a table: it does not exist.")
        if file.is_dir() and file.suffix != ".parquet":
            raise DataError(f"{file} is a folder; accepted: the path of one file.")
        if file.is_file():
            file.open("rb").close()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read ({error.strerror}); give a file that this user may read."
        ) from error


def check_text(file: Path, form: Format, settable: bool = True) -> None:
    """Raise :class:`DataError` for a file that is no text in the encoding of its format."""
    try:
        with _binary(file) as content:
            head: bytes = content.read(1 << 16)
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{file} ends in .gz and is not compressed; give it its own suffix, such as .csv."
        ) from error
    except (OSError, EOFError) as error:
        raise unreadable(file, error) from error
    if not head.strip():
        raise DataError(f"{file} cannot be read as a table: it is empty.")
    for mark, kind in _NO_TEXT.items():
        if head.lstrip().lower().startswith(mark.lower()):
            raise DataError(f"{file} is {kind}; accepted: text with a row a line.")
    seen = _encoding_of(head)
    if seen is not None and not form.encoding.startswith(
        seen.removesuffix("-le").removesuffix("-be")
    ):
        advice = "accepted: UTF-8"
        if settable:
            advice = f"data.encoding={seen} reads it"
        raise DataError(
            f"{file} is text in {seen.upper()}, not in {form.encoding.upper()}; {advice}."
        )
    line = 1
    try:
        with opened(file, form, newline=None) as content:
            while part := content.read(_HEAD):
                if "\0" in part:
                    line += part[: part.index("\0")].count("\n")
                    raise DataError(
                        f"{file}: line {line} holds a null byte; the file may be "
                        "damaged, or no text."
                    )
                line += part.count("\n")
    except UnicodeError as error:
        advice = "accepted: UTF-8"
        if settable:
            advice = (
                "give its encoding, such as data.encoding=cp1252 (Windows, Western Europe), "
                "latin-1 or utf-8"
            )
        place = _undecodable(file, form)
        raise DataError(
            f"{file} is not text in {form.encoding.upper()}{place}; {advice}."
        ) from error
    except (OSError, EOFError) as error:
        raise unreadable(file, error) from error


def check_separator(file: Path, form: Format, lines: Sequence[str], settable: bool = True) -> None:
    """Raise :class:`DataError` if the first lines of a file fit another separator, or begin with a
    comment."""
    lines = lines[skipped(lines, form) :]
    comment = comment_of(lines)
    if comment is not None:
        advice = "remove such lines"
        if settable:
            advice = (
                f'comment={comment!r} leaves such lines out, by command "data.comment={comment!r}"'
            )
        raise DataError(f"{file}: the heading follows lines that begin with {comment!r}; {advice}.")
    other = other_separator(lines, form.separator)
    if other is None:
        return
    names = {letter: name for name, letter in SEPARATORS.items()}
    state = f"the fields seem to be separated by {other!r}, not by {form.separator!r}"
    advice = f"data.separator={names[other]}"
    if form.decimal == "." and has_decimal_commas(lines, other):
        state += ", and numbers to have a decimal comma"
        advice += " data.decimal=comma"
    if not settable:
        raise DataError(f"{file}: {state}; accepted: {form.separator!r}.")
    raise DataError(f"{file}: {state}; {advice} reads it.")


def comment_of(lines: Sequence[str]) -> str | None:
    """Returns the beginning of a first line that is no heading but a comment, or Excel's note of
    its separator."""
    first = next((line for line in lines if line.strip()), "")
    if re.fullmatch(r'"?sep=.?"?', first.strip(), re.IGNORECASE):
        return first[:4]
    if not first.startswith(("#", "%", "//")):
        return None
    heading = any(
        _fits(field_counts(lines, letter)) for letter in SEPARATORS.values() if letter != " "
    )
    if heading:
        return None
    return first[0]


def other_separator(lines: Sequence[str], separator: str) -> str | None:
    """Return the letter by which the first lines of a file seem to be separated if it is not
    ``separator``."""
    own = field_counts(lines, separator)
    if len(own) < 2 or (own[0] > 1 and _fits(own)):
        return None
    found = {
        other: field_counts(lines, other) for other in SEPARATORS.values() if other != separator
    }
    fields = {
        other: counts[0] for other, counts in found.items() if _fits(counts) and counts[0] > own[0]
    }
    return max(fields, key=lambda other: fields[other], default=None)


def has_decimal_commas(lines: Sequence[str], separator: str) -> bool:
    """Returns True if a field of some lines is a number with a decimal comma."""
    return any(
        re.fullmatch(DECIMAL_COMMA, field)
        for fields in _fields(lines, separator)
        for field in fields
    )


def field_counts(lines: Sequence[str], separator: str) -> list[int]:
    """Return the number of fields of the heading and the rows in some lines."""
    return [len(fields) for fields in _fields(lines, separator)]


def first_lines(file: Path, form: Format) -> list[str]:
    """Return at most 50 lines at the beginning of a file, without their ends; a long file's last
    one may be cut off."""
    with opened(file, form, newline=None) as text:
        head = text.read(_HEAD)
    lines = head.removeprefix("\ufeff").split("\n")
    if len(head) == _HEAD:
        lines = lines[:-1]
    return lines[:_LINES]


def skipped(lines: Sequence[str], form: Format) -> int:
    """Return the number of lines of comment, and blank ones between them, above the heading."""
    count = 0
    for number, line in enumerate(lines, start=1):
        if form.comment and line.startswith(form.comment):
            count = number
        elif line.strip():
            break
    return count


def check_lines(file: Path, form: Format) -> None:
    """Raise :class:`DataError` for the first line whose number of fields is not that of the
    heading."""
    width = 0
    for first, last, fields in records(file, form):
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
    """Return the line of a file on which a row begins, counted from 1 with blank lines, comments
    and line breaks in quotes; None for a row that is not found."""
    try:
        first, _, _ = next(islice(records(file, form), row + 1, None))
    except (StopIteration, DataError):
        return None
    return first


def records(file: Path, form: Format) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the first line, the last line and the fields of the heading and of every row.

    Raises:
        DataError: a text that is longer than the csv module takes.
    """
    above = skipped(first_lines(file, form), form)
    with opened(file, form, newline="") as text:
        for _ in range(above):
            next(text)
        reader = _reader(text, form.separator)
        last = above
        try:
            for fields in reader:
                first = last + 1
                last = above + reader.line_num
                if not _is_blank(fields):
                    yield first, last, fields
        except csv.Error as error:
            longest = csv.field_size_limit()
            raise DataError(
                f"{file}: line {above + reader.line_num} holds a text of more than {longest:,} "
                "letters; a quote may not be closed, or leave the column out."
            ) from error


def opened(file: Path, form: Format, newline: str | None) -> TextIO:
    """Return the text of a file, plain or compressed; a mark of UTF-8 at its beginning is left
    out."""
    if file.suffix.lower() == ".gz":
        return cast(TextIO, gzip.open(file, "rt", encoding=_decoder(form), newline=newline))
    return file.open(encoding=_decoder(form), newline=newline)


def is_unnamed(name: Any) -> bool:
    """Returns True if pandas gives this name to a column without a heading."""
    return re.fullmatch(r"Unnamed: \d+", str(name)) is not None


def _binary(file: Path) -> Any:
    if file.suffix.lower() == ".gz":
        return gzip.open(file)
    return file.open("rb")


def _decoder(form: Format) -> str:
    if form.encoding == "utf-8":
        return "utf-8-sig"
    return form.encoding


def _encoding_of(head: bytes) -> str | None:
    """Return the Unicode encoding that a mark at the beginning of a file, or its null bytes, show;
    or None."""
    for mark, name in _UNICODE.items():
        if head.startswith(mark):
            return name
    for name, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if len(head) > 3 and zeros.count(0) > len(zeros) / 2:
            return name
    return None


def _undecodable(file: Path, form: Format) -> str:
    """Return in words the first byte of a file that is no letter of its encoding, or an empty
    text."""
    if form.encoding.startswith(("utf-16", "utf-32")):
        return ""
    with _binary(file) as content:
        for number, line in enumerate(content, start=1):
            try:
                line.decode(form.encoding)
            except UnicodeDecodeError as error:
                return f" (line {number} holds the byte 0x{line[error.start]:02x})"
    return ""


def _headings(file: Path, options: dict[str, Any]) -> list[str]:
    """Return the names of the columns of a file.

    Raises:
        DataError: none, or one that occurs twice.
    """
    import pandas as pd

    try:
        first = pd.read_csv(file, header=None, nrows=1, dtype=str, na_filter=False, **options)
    except (ValueError, OSError, EOFError) as error:
        raise unreadable(file, error) from error
    names = [str(name).strip(" \t\ufeff") for name in first.iloc[0]]
    names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
    check_distinct(names, file)
    return names


def check_distinct(names: Sequence[Any], file: Path) -> None:
    """Raise :class:`DataError` if a column's name occurs twice."""
    for name, times in Counter(names).items():
        if times > 1:
            often = "twice"
            if times != 2:
                often = f"{times} times"
            raise DataError(
                f"{file}: column {name!r} occurs {often}; every column needs a name of its own."
            )


def _reader(lines: Any, separator: str) -> Any:
    if separator == " ":
        lines = (f"{' '.join(line.split())}\n" for line in lines)
    return csv.reader(lines, delimiter=separator)


def _fields(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Return the fields of the heading and the rows in some lines; a last row that goes on in the
    next line is left out."""
    try:
        found = list(_reader([f"{line}\n" for line in lines], separator))
    except csv.Error:
        return []
    if len(found) > 1 and found[-1] and "\n" in found[-1][-1]:
        found = found[:-1]
    return [fields for fields in found if not _is_blank(fields)]


def _is_blank(fields: Sequence[str]) -> bool:
    return not fields or (len(fields) == 1 and fields[0].isspace())


def _fits(counts: Sequence[int]) -> bool:
    """Returns True if a separator gives most rows as many fields as the heading, at least two;
    one more at the end of a line may be empty."""
    if len(counts) < 2 or counts[0] < 2:
        return False
    same = sum(count in (counts[0], counts[0] + 1) for count in counts)
    return same >= _FITTING * len(counts)
