"""Files in folders and in zip files, without those that systems leave there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from ...errors import DataError

Inode = tuple[int, int]


def is_hidden(name: str) -> bool:
    """Tells whether a name in a folder is one that systems leave, such as ``._x.png`` or
    ``__MACOSX``."""
    return name == "__MACOSX" or (name.startswith(".") and name not in (".", ".."))


def is_visible_member(name: str) -> bool:
    """Tells whether no part of the path of a file in a zip is hidden."""
    return not any(is_hidden(part) for part in PurePosixPath(name).parts)


def listed_files(folder: Path, suffixes: Sequence[str], *, below: bool = True) -> list[Path]:
    """Returns the files of a folder with one of some suffixes, sorted by path.

    Hidden names are passed over (:func:`is_hidden`). Links to files and to folders are followed.

    Args:
        folder: exists.
        suffixes: in lower case; a file's own may be in any case.
        below: also those in folders below.

    Raises:
        DataError: a folder that cannot be read, a link back to a folder that it is in or to
            nothing, a name that is no UTF-8, or one with such a suffix that is neither a file nor a
            folder.
    """
    return sorted(_files(folder, tuple(suffixes), below, []))


def _files(
    folder: Path, suffixes: tuple[str, ...], below: bool, above: list[Inode]
) -> Iterator[Path]:
    try:
        status = folder.stat()
        found = sorted(folder.iterdir())
    except OSError as error:
        raise unreadable(str(folder), error) from error
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise DataError(f"{folder} is a link back to a folder that it is in; remove the link.")
    for path in found:
        if is_hidden(path.name):
            continue
        if path.is_symlink():
            _status(path)
        if path.is_dir():
            if below:
                _check_name(path)
                yield from _files(path, suffixes, below, [*above, here])
        elif path.suffix.lower() in suffixes:
            _check_name(path)
            check_file(path)
            yield path


def check_file(path: Path) -> os.stat_result:
    """Returns the status of a file.

    Raises:
        DataError: there is none, it cannot be reached, or it is no file.
    """
    status = _status(path)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no file; accepted: a file, or a link to one.")
    return status


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise DataError(
                f"{path} is a link to nothing; remove it, or restore what it points to."
            ) from error
        raise DataError(
            f"{path} does not exist; every file that is listed must be there."
        ) from error
    except (OSError, ValueError) as error:  # a ValueError of a null character in the name
        raise unreadable(str(path), error) from error


def unreadable(where: str, error: Exception) -> DataError:
    """Returns the error of a file that the system does not let be read."""
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(f"{where} cannot be read ({reason}); it must be a file that may be read.")


def _check_name(path: Path) -> None:
    try:
        path.name.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path.parent} holds the name {path.name!r}, which is no UTF-8; rename it."
        ) from error
