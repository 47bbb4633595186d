"""Lines of JSON in which every one carries the hash of the line before, as a ledger has them.

The hash is SHA-256 over the bytes of a line as they are written, its newline included, so a line
that is altered, removed or put in between is found by the line that follows it, and the hash of the
last line (the head) stands for the whole file. A small file beside it, of the same name with the
suffix ``.head``, is overwritten with the number of lines and the head after every line that has
reached the disk: a chain from which whole lines at the end are missing is behind its head file. A
line that was torn by a crash was never flushed; it is dropped.

A person who can write both files can rewrite both, undetected. Only the head in a checkpoint or in
a published report then tells them from the old ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import Json, parse_json
from ..errors import ResumeError

PREVIOUS = "previous"
_NOTHING = "0" * 64


@dataclass(frozen=True)
class Head:
    """The end of a chain.

    Attributes:
        lines: number of lines.
        digest: SHA-256 of the last one, 64 hexadecimal digits.
    """

    lines: int
    digest: str

    def text(self) -> str:
        """Returns one line of fixed length, read by :meth:`parse`."""
        return f"{self.lines:>15} {self.digest}\n"

    @classmethod
    def parse(cls, text: str) -> Head | None:
        """Returns the head that :meth:`text` wrote, or None if the text is something else."""
        parts = text.split()
        if len(parts) != 2 or not parts[0].isdecimal() or len(parts[1]) != 64:
            return None
        return cls(int(parts[0]), parts[1])


START = Head(0, _NOTHING)


@dataclass(frozen=True)
class Chain:
    """Lines that were read from a file, each of which follows the one before.

    Attributes:
        lines: the objects.
        digests: SHA-256 of each line, hexadecimal.
        size: number of bytes that they take; bytes after them are a torn line.
    """

    lines: list[dict[str, Any]]
    digests: list[str]
    size: int

    @property
    def head(self) -> Head:
        if self.digests:
            return Head(len(self.digests), self.digests[-1])
        return START

    def has(self, head: Head) -> bool:
        """Returns True if the chain once ended in ``head``."""
        return head == START or (
            0 < head.lines <= len(self.digests) and self.digests[head.lines - 1] == head.digest
        )


def digest_of(line: bytes) -> str:
    """Returns SHA-256 of a line as it is written, newline included."""
    return hashlib.sha256(line).hexdigest()


def read_chain(path: Path, *, version: int | None = None) -> Chain:
    """Returns the lines of the file at ``path``; none if there is no file.

    Args:
        path: of the file.
        version: that the first line must have.

    Raises:
        ResumeError: damage before the last line, a line that does not follow the one before, a
            first line that is not a header, or one of another version.
    """
    if not path.exists():
        return parse(b"", path, version)
    return parse(path.read_bytes(), path, version)


def head_file(path: Path) -> Path:
    """Returns the path of the file that keeps the number of lines and the head of the chain at
    ``path``."""
    return path.with_suffix(".head")


def parse(raw: bytes, path: Path, version: int | None = None) -> Chain:
    """Returns the lines of the file at ``path``, whose bytes are ``raw``; arguments and errors of
    :func:`read_chain`."""
    lines: list[dict[str, Any]] = []
    digests: list[str] = []
    good = 0
    while good < len(raw):
        end = raw.find(b"\n", good)
        written = raw[good : end + 1]
        try:
            line = None
            if end >= 0:
                line = parse_json(written.decode())
        except ValueError:
            line = None
        if not isinstance(line, dict):
            if end >= 0 and end + 1 < len(raw):
                raise ResumeError(
                    f"{path}, line {len(lines) + 1}: the ledger is damaged before its last line."
                )
            break
        if not lines:
            _check_first(line, path, version)
        if version is not None and line.get(PREVIOUS) != (digests[-1] if digests else _NOTHING):
            raise ResumeError(
                f"{path}, line {len(lines) + 1}: it does not follow the line before; a line was "
                "altered, removed or put in between, so the charges cannot be trusted. Start a "
                "new run in another folder."
            )
        lines.append(line)
        digests.append(digest_of(written))
        good = end + 1
    return Chain(lines, digests, good)


def _check_first(line: Mapping[str, Json], path: Path, version: int | None) -> None:
    if line.get("kind") != "header":
        raise ResumeError(f"{path} is not a ledger: its first line is not a header.")
    if version is not None and line.get("version") != version:
        raise ResumeError(
            f"{path} is a ledger of version {line.get('version')!r}, this is version {version}, "
            "whose lines are chained by hashes: that no charge of the older one is missing cannot "
            "be told. Finish the run with the version of fedmtl that began it, or start a new run "
            "in another folder."
        )
