"""Files of a folder that somebody else may have written: each is read once, and within bounds.

The bytes that are read are those that are hashed: a file that is compared with its hash and then
parsed is the same bytes for both. Links out of the folder, files that are no regular ones (a device
without end, a pipe without a writer), files that change while they are read and JSON that says two
things or nothing are refused, each in one sentence that names the file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load
from torch import Tensor

from .._files import parse_json
from ..errors import DataError
from .tensor_files import split_header

MAX_TEXT = 1 << 30
"""Bytes of a file of text that is read, at most."""

MAX_TENSORS = 1 << 34
"""Bytes of a file of tensors that is read, at most."""

_MAX_HASHED = 1 << 40  # bytes of a file of which only the digest is taken
_MAX_HEADER = 100_000_000  # of a safetensors file, as its library has it
_PIECE = 1 << 20
_FLAGS = os.O_RDONLY
for _name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # as far as the system has them
    _FLAGS |= getattr(os, _name, 0)


class UntrustedFiles:
    """The files of a folder, by their place in it.

    Args:
        root: the folder, which may itself be a link.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[Path, bytes] = {}

    def content(self, path: Path, limit: int = MAX_TEXT) -> bytes:
        """Returns the bytes of a file; the same ones at every call, so that the checked bytes are
        those that are used.

        Args:
            path: of the file.
            limit: largest number of bytes.

        Raises:
            DataError: no regular file in the folder, a larger one, or one that changes while it is
                read.
        """
        if path not in self._contents:
            with self._opened(path, limit) as file:
                self._contents[path] = file.read(limit)
        return self._contents[path]

    def digest(self, path: Path) -> str:
        """Returns the SHA-256 of a file, 64 hexadecimal digits: of :meth:`content` if that was
        read.

        Raises:
            DataError: see :meth:`content`.
        """
        found = hashlib.sha256()
        if path in self._contents:
            found.update(self._contents[path])
            return found.hexdigest()
        with self._opened(path, _MAX_HASHED) as file:
            left = os.fstat(file.fileno()).st_size
            while left and (piece := file.read(min(_PIECE, left))):
                found.update(piece)
                left -= len(piece)
        return found.hexdigest()

    def text(self, path: Path) -> str:
        """Returns a file of text.

        Raises:
            DataError: see :meth:`content`, or a file that is not UTF-8.
        """
        try:
            return self.content(path).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.name(path)} is not UTF-8: {error}.") from error

    def json(self, path: Path, *, finite: bool = True) -> dict[str, Any]:
        """Returns the JSON object in a file, as :func:`~fedmtl._files.parse_json` does.

        Raises:
            DataError: see :meth:`content`, or a file that holds something else.
        """
        text = self.text(path)
        try:
            value = parse_json(text, finite=finite)
        except ValueError as error:
            raise DataError(f"{self.name(path)} cannot be read: {error}.") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.name(path)} must hold one JSON object.")
        return value

    def tensors(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns the tensors of a safetensors file by name, and its metadata.

        Raises:
            DataError: see :meth:`content`, or a file that is no safetensors file.
        """
        content = self.content(path, MAX_TENSORS)
        try:
            if int.from_bytes(content[:8], "little") > min(_MAX_HEADER, len(content)):
                raise ValueError("its header is longer than the file")
            header, _ = split_header(content)
            metadata = header.get("__metadata__", {})
            if not isinstance(metadata, dict) or not all(
                isinstance(text, str) for text in metadata.values()
            ):
                raise ValueError("its metadata are not texts by name")
            return load(content), metadata
        # the library has errors of its own, and KeyError for a dtype that it does not know
        except Exception as error:
            raise DataError(f"{self.name(path)} cannot be read as tensors: {error}.") from error

    def name(self, path: Path) -> str:
        """Returns the name of a file in messages: its place in the folder."""
        return path.relative_to(self.root).as_posix()

    @contextmanager
    def _opened(self, path: Path, limit: int) -> Iterator[IO[bytes]]:
        """Opens a file, and refuses one that changes while it is open.

        A link out of the folder, a pipe or a device could be read for ever, or be a file that is
        none of the sender's.
        """
        name = self.name(path)
        try:
            real = path.resolve(strict=True)
            if not real.is_relative_to(self.root.resolve()):
                raise DataError(f"{name} is a link to a file that is not in the folder.")
            with open(os.open(real, _FLAGS), "rb") as file:
                before = os.fstat(file.fileno())
                if not stat.S_ISREG(before.st_mode):
                    raise DataError(f"{name} is no file.")
                if before.st_size > limit:
                    raise DataError(
                        f"{name} has {before.st_size:,} bytes; at most {limit:,} are read."
                    )
                yield file
                after = os.fstat(file.fileno())
        # RuntimeError: links in a circle, of older versions of Python
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{name} cannot be read: {reason}.") from error
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            self._contents.pop(path, None)
            raise DataError(
                f"{name} changed while it was read; verify a copy that nothing writes to."
            )
