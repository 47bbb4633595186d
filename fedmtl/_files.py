"""Files that are written whole or not at all (to a temporary name beside the target, then renamed), and readers."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import DataError


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; at any crash the old or the new file is there, whole.

    The temporary name is always the same, so the next write clears what a crash has left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def append_bytes(path: Path, length: int, content: Iterable[bytes | memoryview]) -> None:
    """Write ``content`` behind the first ``length`` bytes of a file, which keep; what stood behind them is cut off.

    The file is made, with its folder, where ``length`` is 0. All is on the disk when this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if length else "wb") as file:
        file.truncate(length)
        file.seek(length)
        for part in content:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold one JSON object.")
    return content


def csv_rows(path: Path, *headers: str, what: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a CSV file (also compressed with gzip, ``.gz``), the cells stripped.

    Args:
        path: of the file.
        headers: accepted first rows, the usual one first, such as ``"client,seconds"``.
        what: the content, with its verb, such as ``"a trace is"``.

    Yields:
        The place for messages, ``"PATH, row 2"`` for the first row under the header, and the cells.

    Raises:
        DataError: no such file, another header, or a row of another length.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; {what} a CSV file with the columns {headers[0]}.")
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        reader = csv.reader(lines)
        header = ",".join(cell.strip() for cell in next(reader, []))
        if header not in headers:
            raise DataError(f"{path}, row 1: the header is {header!r}; it must be {' or '.join(map(repr, headers))}.")
        for cells in reader:
            where = f"{path}, row {reader.line_num}"
            if len(cells) != header.count(",") + 1:
                raise DataError(f"{where}: {len(cells)} cells; a row is {header}.")
            yield where, [cell.strip() for cell in cells]
