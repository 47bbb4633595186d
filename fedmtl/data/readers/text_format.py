"""The format of a file of text: its separator, decimals, encoding and comments, and the guess of
another separator if the given one does not fit."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "space": " "}
DECIMALS = {"point": ".", "comma": ","}
DECIMAL_COMMA = r"\s*[-+]?\d+,\d+\s*"
"""A pattern of numbers with a decimal comma."""
DECIMAL_POINT = r"\s*[-+]?\d*\.\d+\s*"
"""A pattern of numbers with a decimal point."""
_FITTING = 0.9  # share of lines with as many fields as the heading that a separator needs


@dataclass(frozen=True)
class Format:
    """The format of a table of text.

    Attributes:
        separator: the letter between fields; a space stands for any number of blanks.
        decimal: the letter before the decimals of a number.
        encoding: of the letters, by Python's name.
        comment: the beginning of lines above the heading that are left out; empty for none.
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
    """Returns the format of a file by its name and the settings of a reader.

    Args:
        name: of the file; the separator of .tsv is a tab and else a comma if none is given.
        separator: a name of :data:`SEPARATORS`, or the letter itself.
        decimal: a name of :data:`DECIMALS`, or the letter itself.
        encoding: a name that Python knows.
        comment: the beginning of lines above the heading that are left out, or None.

    Raises:
        ConfigError: another setting.
    """
    # within the name, since .gz may follow
    if separator is None and ".tsv" in name.lower():
        between = "\t"
    else:
        between = separator or ","
    # a shell passes a tab as a backslash and a t
    between = SEPARATORS.get(between, between).replace("\\t", "\t")
    # a sign, a quote or a point would stand within fields
    if len(between) != 1 or between.isalnum() or between in "\"'.\r\n\0-+_":
        accepted = f"{', '.join(SEPARATORS)}, or another single letter between fields"
        raise ConfigError(f"data.separator is {separator!r}; accepted: {accepted}.")
    point = DECIMALS.get(decimal, decimal)
    if point not in DECIMALS.values():
        raise ConfigError(f"data.decimal is {decimal!r}; accepted: {', '.join(DECIMALS)}.")
    if comment is not None and not str(comment).strip():
        raise ConfigError("data.comment is empty; give how a line of comment begins, such as '#'.")
    try:
        # codecs that are no encodings of text, such as zip, are known to lookup and refused by
        # encode
        "".encode(encoding)
        known = codecs.lookup(encoding).name
    except (LookupError, TypeError, ValueError) as error:
        accepted = "utf-8, utf-16, latin-1, cp1252 and others that Python knows"
        raise ConfigError(f"data.encoding is {encoding!r}; accepted: {accepted}.") from error
    return Format(between, point, known, str(comment or ""))


def check_separator(file: Path, form: Format, lines: Sequence[str], settable: bool = True) -> None:
    """Raises :class:`DataError` if the first lines of a file fit another separator, or begin with a
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
    # which Excel writes and other programs take for a heading
    if re.fullmatch(r'"?sep=.?"?', first.strip(), re.IGNORECASE):
        return first[:4]
    if not first.startswith(("#", "%", "//")):
        return None
    # a heading may begin with a mark, as #id does; a comment does not divide like the rows
    heading = any(
        _fits(field_counts(lines, letter)) for letter in SEPARATORS.values() if letter != " "
    )
    if heading:
        return None
    return first[0]


def other_separator(lines: Sequence[str], separator: str) -> str | None:
    """Returns the letter by which the first lines of a file seem to be separated if it is not
    ``separator``."""
    own = field_counts(lines, separator)
    # one line shows nothing, and a separator that fits is not doubted
    if len(own) < 2 or (own[0] > 1 and _fits(own)):
        return None
    found = {
        other: field_counts(lines, other) for other in SEPARATORS.values() if other != separator
    }
    fields = {
        other: counts[0] for other, counts in found.items() if _fits(counts) and counts[0] > own[0]
    }
    # several may fit, as in lists of dates; the one with the most fields is the most likely
    return max(fields, key=lambda other: fields[other], default=None)


def has_decimal_commas(lines: Sequence[str], separator: str) -> bool:
    """Returns True if a field of some lines is a number with a decimal comma."""
    return any(
        re.fullmatch(DECIMAL_COMMA, field)
        for fields in _fields(lines, separator)
        for field in fields
    )


def field_counts(lines: Sequence[str], separator: str) -> list[int]:
    """Returns the number of fields of the heading and the rows in some lines."""
    return [len(fields) for fields in _fields(lines, separator)]


def skipped(lines: Sequence[str], form: Format) -> int:
    """Returns the number of lines of comment, and blank ones between them, above the heading."""
    count = 0
    for number, line in enumerate(lines, start=1):
        if form.comment and line.startswith(form.comment):
            count = number
        elif line.strip():
            break
    return count


def line_reader(lines: Any, separator: str) -> Any:
    if separator == " ":
        # csv divides at every blank, and columns are aligned by several
        lines = (f"{' '.join(line.split())}\n" for line in lines)
    return csv.reader(lines, delimiter=separator)


def _fields(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Returns the fields of the heading and the rows in some lines; a last row that goes on in the
    next line is left out."""
    try:
        found = list(line_reader([f"{line}\n" for line in lines], separator))
    except csv.Error:
        return []
    # a quoted field with a line break, of which the first lines have a part
    if len(found) > 1 and found[-1] and "\n" in found[-1][-1]:
        found = found[:-1]
    return [fields for fields in found if not is_blank(fields)]


def is_blank(fields: Sequence[str]) -> bool:
    return not fields or (len(fields) == 1 and fields[0].isspace())


def _fits(counts: Sequence[int]) -> bool:
    """Returns True if a separator gives most rows as many fields as the heading, at least two;
    one more at the end of a line may be empty."""
    if len(counts) < 2 or counts[0] < 2:
        return False
    same = sum(count in (counts[0], counts[0] + 1) for count in counts)
    return same >= _FITTING * len(counts)
