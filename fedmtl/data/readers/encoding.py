"""Files of text opened by their encoding, with errors that name the encoding that would fit."""

from __future__ import annotations

import codecs
import gzip
from pathlib import Path
from typing import Any, TextIO, cast

from ...errors import DataError, first_line
from .text_format import Format

# letters and lines of a file that are looked at for its form
HEAD = 1 << 20
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


def unreadable(file: Path, error: BaseException, kind: str = "a table") -> DataError:
    """Returns the error of a file that cannot be read as ``kind``, such as ``"a table"``."""
    return DataError(
        f"{file} cannot be read as {kind} ({first_line(error)}); it may be missing, empty, "
        "truncated or no text."
    )


def check_text(file: Path, form: Format, settable: bool = True) -> None:
    """Raises :class:`DataError` for a file that is no text in the encoding of its format."""
    head = _head(file)
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
    try:
        _check_null_bytes(file, form)
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


def _head(file: Path) -> bytes:
    """Returns the first bytes of a file, decompressed.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with _binary(file) as content:
            head: bytes = content.read(1 << 16)
            return head
    except gzip.BadGzipFile as error:
        raise DataError(
            f"{file} ends in .gz and is not compressed; give it its own suffix, such as .csv."
        ) from error
    except (OSError, EOFError) as error:
        raise unreadable(file, error) from error


def _check_null_bytes(file: Path, form: Format) -> None:
    """Raises :class:`DataError` for a null byte, at which the parser of pandas would stop without a
    word. The whole file is decoded, a part at a time."""
    line = 1
    with opened(file, form, newline=None) as content:
        while part := content.read(HEAD):
            if "\0" in part:
                line += part[: part.index("\0")].count("\n")
                raise DataError(
                    f"{file}: line {line} holds a null byte; the file may be damaged, or no text."
                )
            line += part.count("\n")


def opened(file: Path, form: Format, newline: str | None) -> TextIO:
    """Returns the text of a file, plain or compressed; a mark of UTF-8 at its beginning is left
    out."""
    if file.suffix.lower() == ".gz":
        return cast(TextIO, gzip.open(file, "rt", encoding=decoder(form), newline=newline))
    return file.open(encoding=decoder(form), newline=newline)


def _binary(file: Path) -> Any:
    if file.suffix.lower() == ".gz":
        return gzip.open(file)
    return file.open("rb")


def decoder(form: Format) -> str:
    if form.encoding == "utf-8":
        return "utf-8-sig"
    return form.encoding


def _encoding_of(head: bytes) -> str | None:
    """Returns the Unicode encoding that a mark at the beginning of a file, or its null bytes, show;
    or None."""
    for mark, name in _UNICODE.items():
        if head.startswith(mark):
            return name
    for name, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if len(head) > 3 and zeros.count(0) > len(zeros) / 2:
            return name
    return None


def _undecodable(file: Path, form: Format) -> str:
    """Returns in words the first byte of a file that is no letter of its encoding, or an empty
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
