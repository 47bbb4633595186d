"""An append-only file of JSON lines in which every line carries the hash of the line before.

The hash is SHA-256 over the bytes of a line as they are written, its newline included, so a line that is altered,
removed or put in between is found by the line that follows it, and the hash of the last line (the head) stands for the
whole file. A small file beside it, of the same name with the suffix ``.head``, is overwritten with the number of lines
and the head after every line that has reached the disk: a chain from which whole lines at the end are missing is
behind its head file. A line that was torn by a crash was never flushed; it is dropped.

A person who can write both files can rewrite both, undetected. The head that a checkpoint or a published report has
kept is then what is left to compare with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .._files import sync_folder
from ..errors import PrivacyError, ResumeError

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
        """Return one line of fixed length, read by :meth:`parse`."""
        return f"{self.lines:>15} {self.digest}\n"

    @classmethod
    def parse(cls, text: str) -> Head | None:
        """Return the head that :meth:`text` wrote, or None where the text is something else."""
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
        size: number of bytes that they take; what comes after them is a torn line.
    """

    lines: list[dict[str, Any]]
    digests: list[str]
    size: int

    @property
    def head(self) -> Head:
        return Head(len(self.digests), self.digests[-1]) if self.digests else START

    def has(self, head: Head) -> bool:
        """Whether the chain once ended in ``head``."""
        return head == START or (0 < head.lines <= len(self.digests) and self.digests[head.lines - 1] == head.digest)


def digest_of(line: bytes) -> str:
    """Return SHA-256 of a line as it is written, newline included."""
    return hashlib.sha256(line).hexdigest()


def read_chain(path: Path, *, version: int | None = None) -> Chain:
    """Return the lines of the file at ``path``; none where there is no file.

    Args:
        path: of the file.
        version: that the first line must have.

    Raises:
        ResumeError: damage before the last line, a line that does not follow the one before, a first line that is not
            a header, or one of another version.
    """
    return _parse(path.read_bytes() if path.exists() else b"", path, version)


def read_first(path: Path) -> dict[str, Any] | None:
    """Return the first line of the file at ``path``, or None if there is no complete one."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        chain = _parse(file.readline(), path, None)
    return chain.lines[0] if chain.lines else None


def head_file(path: Path) -> Path:
    """Return where the number of lines and the head of the chain at ``path`` are kept."""
    return path.with_suffix(".head")


class ChainFile:
    """A chain that is open for appending, under an exclusive lock.

    Args:
        path: of the file; made where it is missing, with its folder.
        version: that the first line must have.
        single: the file must not be used by two processes: file locks and the head file are needed. Otherwise the
            lock is taken where the system has one.
        resume: whether the file may have lines already.

    Attributes:
        chain: what was there when it was opened.
        head: of the chain as it is now.

    Raises:
        PrivacyError: ``single`` on a system that cannot lock files.
        ResumeError: the file is in use, damaged or rolled back, or has lines without ``resume``.
    """

    def __init__(self, path: Path, *, version: int, single: bool, resume: bool) -> None:
        self.path, self._single = path, single
        path.parent.mkdir(parents=True, exist_ok=True)
        created = not path.exists()
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 - held until close
        self._head_file: IO[bytes] | None = None
        try:
            _lock(self._file, path, needed=single)
            self._file.seek(0)
            raw = self._file.read()
            self.chain = _parse(raw, path, version)
            self.head = self.chain.head
            if self.chain.lines and not resume:
                raise ResumeError(f"{path} already holds the charges of a run; resume it, or choose another folder.")
            if self.chain.lines:
                self._check_head(needed=single)
            if self.chain.size < len(raw):
                self._file.truncate(self.chain.size)
            self.sync()
            self._open_head()
            if created:
                sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line with the hash of the one before: to the disk where the file is ``single``, else to the system,
        which keeps it if the process ends."""
        content = {**line, PREVIOUS: self.head.digest}
        written = json.dumps(content, separators=(",", ":")).encode() + b"\n"
        self._file.write(written)
        self._file.flush()
        if self._single:
            self.sync()
        self.head = Head(self.head.lines + 1, digest_of(written))
        self._note_head()

    def sync(self) -> None:
        """Return once all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files; idempotent."""
        self._file.close()
        if self._head_file is not None:
            self._head_file.close()

    def _check_head(self, *, needed: bool) -> None:
        place = head_file(self.path)
        existing = Head.parse(place.read_text(errors="replace")) if place.exists() else None
        if existing is None:
            if needed:
                raise ResumeError(
                    f"{place} is missing or unreadable; it says how long {self.path} was, so whether charges were "
                    f"taken back cannot be told. Start a new run in another folder."
                )
            return
        if not self.chain.has(existing):
            raise ResumeError(
                f"{self.path} has {len(self.chain.lines):,} lines and does not have line {existing.lines:,} that "
                f"{place.name} has recorded: the ledger was rolled back or replaced, and charges of releases that "
                f"were made are missing. Restore the ledger, or start a new run in another folder."
            )

    def _open_head(self) -> None:
        place = head_file(self.path)
        self._head_file = open(place, "r+b" if place.exists() else "w+b", buffering=0)  # noqa: SIM115
        self._note_head()
        os.fsync(self._head_file.fileno())

    def _note_head(self) -> None:
        """Overwrite the head in place: it may lag behind the chain after a crash of the system, and is never ahead."""
        assert self._head_file is not None
        self._head_file.seek(0)
        self._head_file.write(self.head.text().encode())


def _parse(raw: bytes, path: Path, version: int | None) -> Chain:
    lines: list[dict[str, Any]] = []
    digests: list[str] = []
    good = 0
    while good < len(raw):
        end = raw.find(b"\n", good)
        written = raw[good : end + 1]
        try:
            line = json.loads(written) if end >= 0 else None
        except ValueError:
            line = None
        if not isinstance(line, dict):
            if end >= 0 and end + 1 < len(raw):
                raise ResumeError(f"{path}, line {len(lines) + 1}: the ledger is damaged before its last line.")
            break
        if not lines:
            _check_first(line, path, version)
        if version is not None and line.get(PREVIOUS) != (digests[-1] if digests else _NOTHING):
            raise ResumeError(
                f"{path}, line {len(lines) + 1}: it does not follow the line before; a line was altered, removed or "
                f"put in between, so the charges cannot be trusted. Start a new run in another folder."
            )
        lines.append(line)
        digests.append(digest_of(written))
        good = end + 1
    return Chain(lines, digests, good)


def _check_first(line: Mapping[str, Any], path: Path, version: int | None) -> None:
    if line.get("kind") != "header":
        raise ResumeError(f"{path} is not a ledger: its first line is not a header.")
    if version is not None and line.get("version") != version:
        raise ResumeError(
            f"{path} is a ledger of version {line.get('version')!r}, this is version {version}, whose lines are "
            f"chained by hashes: that no charge of the older one is missing cannot be told. Finish the run with the "
            f"version of fedmtl that began it, or start a new run in another folder."
        )


def _lock(file: IO[bytes], path: Path, *, needed: bool) -> None:
    """Take an exclusive lock, released by the system when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        if needed:
            raise PrivacyError(
                f"{path}: a run with source='secure' needs file locks, so that no second process releases under the "
                f"same charges, and this system has none (no module fcntl). Use another system, or source='seeded'."
            ) from None
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ResumeError(f"{path} is in use by another process.") from error
    except OSError as error:
        if needed:
            raise PrivacyError(
                f"{path} cannot be locked ({error}), and a run with source='secure' needs file locks, so that no "
                f"second process releases under the same charges. Use a folder on a local disk, or source='seeded'."
            ) from error
