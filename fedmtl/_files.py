"""Files that are written whole or not at all (to a temporary name beside the target, then renamed),
folders that one process writes at a time, and readers."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

from .errors import DataError

CLAIM = ".lock"
"""In a folder while a process writes there, and after one that was killed."""
_TEMPORARY = re.compile(r".+\.[0-9a-f]{8}\.tmp")


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces ``path`` by ``content``; at any crash the old or the new file is there, whole.

    The temporary name is this write's own, so two processes never write into one file. A file that
    a crash left is removed by :func:`remove_temporary`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Writes ``value`` as JSON, by :func:`write_bytes`: with ``indent=None``, for many numbers, in
    one line and in a tenth of the time."""
    write_bytes(path, (json.dumps(value, indent=indent) + "\n").encode())


def plain(value: Any) -> Any:
    """Returns a value for JSON without Infinity and NaN: they become the strings ``"inf"``,
    ``"-inf"`` and ``"nan"``."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= {str, int, bool}:
            return list(value)
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def remove_temporary(folder: Path) -> None:
    """Removes the files that interrupted writes have left in a folder and below, which no other
    process may be writing."""
    for path in folder.rglob("*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def lock(file: IO[bytes]) -> None:
    """Locks an open file for one process; the system releases the lock when that process ends,
    however it ends.

    Raises:
        BlockingIOError: another process has it, or this one by another opening.
        OSError: there are no locks here, as on Windows and on some network disks.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOTSUP, "this system has none: no module fcntl") from error
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds a folder for this block alone; the folder is made, and removed at the end if nothing
    was written there.

    The claim is a lock of the file ``CLAIM``, so that of a process that was killed holds nobody up.
    If the system has no locks, the block runs without one.

    Raises:
        BlockingIOError: another block holds it, in this process or another one.
        OSError: it cannot be written.
    """
    path = folder / CLAIM
    file = None
    while file is None:
        file = _locked(path)
    try:
        yield
    finally:
        if os.name == "posix":  # elsewhere an open file cannot be removed
            path.unlink(missing_ok=True)
        file.close()
        remove_empty(folder)


def remove_empty(folder: Path) -> None:
    """Removes a folder in which there is nothing."""
    with suppress(OSError):
        folder.rmdir()


def _locked(path: Path) -> IO[bytes] | None:
    """Returns the file of a claim, open and locked; None if another process has removed it or its
    folder meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 - held until its end
    except (FileExistsError, FileNotFoundError):
        if _is_no_folder(path.parent) or path.is_symlink():
            raise
        return None  # the folder was removed in between
    try:
        lock(file)
    except BlockingIOError:
        file.close()
        raise
    except OSError:  # without locks
        return file
    try:
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except FileNotFoundError:
        pass
    file.close()
    return None


def _is_no_folder(path: Path) -> bool:
    """Returns True if something else is at ``path``, such as a file or a link to nothing."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path.is_symlink()


def append_bytes(path: Path, length: int, content: Iterable[bytes | memoryview]) -> None:
    """Writes ``content`` behind the first ``length`` bytes of a file, which stay; the rest of the
    file is cut off.

    The file is made, with its folder, if ``length`` is 0. All is on the disk when this returns.
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
    """Makes the names in a folder durable, if the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_DEEPEST = 100  # levels of JSON; files of runs have less than 10
_LARGEST = 2**128  # of whole numbers in JSON


Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value that JSON has."""


def parse_json(text: str, *, finite: bool = True) -> Any:
    """Returns the value of a JSON text that says one thing, as RFC 8259 has it.

    Args:
        text: of the value.
        finite: True if NaN, Infinity and numbers beyond a double are refused.

    Raises:
        ValueError: no JSON; a key that an object has twice; more than 100 levels; a whole number
            beyond 2**128; or a number that is not finite.
    """
    options: dict[str, Any] = {}
    if finite:
        options = {"parse_constant": _refused_constant, "parse_float": _finite}
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_int=_whole, **options)
    except RecursionError:
        raise ValueError(f"it has more than {_DEEPEST} levels") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"it has more than {_DEEPEST} levels")


def _inside(value: Any) -> Iterable[Any]:
    """Returns the objects and arrays that an object or array holds."""
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list):
        inner = value
    return [each for each in inner if isinstance(each, (dict, list))]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"an object has the key {key!r} twice")
            seen.add(key)
    return made


def _refused_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond a double")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) > _LARGEST:
        raise ValueError(f"{text[:20]}... is beyond 2**128")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"), finite=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold one JSON object.")
    return content


def csv_rows(path: Path, *headers: str, subject: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the rows of a CSV file (also compressed with gzip, ``.gz``), the cells stripped.

    Args:
        path: of the file.
        headers: accepted first rows, the usual one first, such as ``"client,seconds"``.
        subject: the content of the file with its verb, for messages, such as ``"a trace is"``.

    Yields:
        The place for messages, ``"PATH, row 2"`` for the first row under the header, and the cells.

    Raises:
        DataError: no such file, another header, or a row of another length.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; {subject} a CSV file with the columns {headers[0]}."
        )
    with (
        gzip.open(path, "rt", newline="")
        if path.suffix == ".gz"
        else path.open(newline="") as lines
    ):
        reader = csv.reader(lines)
        header = ",".join(cell.strip() for cell in next(reader, []))
        if header not in headers:
            raise DataError(
                f"{path}, row 1: the header is {header!r}; it must be "
                f"{' or '.join(map(repr, headers))}."
            )
        for cells in reader:
            where = f"{path}, row {reader.line_num}"
            if len(cells) != header.count(",") + 1:
                raise DataError(f"{where}: {len(cells)} cells; a row is {header}.")
            yield where, [cell.strip() for cell in cells]
