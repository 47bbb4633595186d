"""The file of a ledger: lines that are only appended, chained by hashes, under a lock."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from .._files import Json, lock, sync_folder
from ..errors import PrivacyError, ResumeError
from .chain import PREVIOUS, Chain, Head, digest_of, head_file, parse

VERSION = 9


class LedgerFile:
    """An open file of chained lines, with the small file of its head beside it.

    Args:
        path: of the file; its folder is made if it is missing.
        resume: continue the file (or begin one, if there is none yet).
        single: the file must not be used by two processes: locks and the head file are needed, and
            every line is on the disk when it is written. Otherwise the lock is taken if the system
            has one, and the disk is the system's affair.

    Attributes:
        before: the lines that were there.
        head: number of lines and hash of the last one, of this session's too.
        failed: True if a line could not be written: the file may have none of it, a part, or all.
        first: hash of the first line; None of an empty file.

    Raises:
        PrivacyError: ``single`` without file locks.
        ResumeError: the file exists and ``resume`` is False, is in use, is damaged, or was rolled
            back.
    """

    def __init__(self, path: Path, *, resume: bool, single: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._single = single
        self.failed = False
        created = not path.exists()
        # A file that is refused is closed, and so not kept locked.
        with ExitStack() as opened:
            self._lines: IO[bytes] = opened.enter_context(open(path, "a+b", buffering=0))
            _lock(self._lines, path, needed=single)
            self.before = self._read(resume)
            self.head = self.before.head
            self.first: str | None = None
            if self.before.digests:
                self.first = self.before.digests[0]
            place = head_file(path)
            mode = "r+b" if place.exists() else "w+b"
            self._heads: IO[bytes] = opened.enter_context(open(place, mode, buffering=0))
            self._write_head()
            os.fsync(self._heads.fileno())
            # A new file is found again after a crash only if its folder is on the disk, too.
            if created:
                sync_folder(path.parent)
            opened.pop_all()

    def append(self, line: Mapping[str, Json]) -> None:
        """Writes a line with the hash of the one before: to the disk if the file is ``single``,
        otherwise to the system, which keeps it if the process ends.

        Raises:
            PrivacyError: an earlier line could not be written.
        """
        # A line behind one that is torn, or that nobody counted, would break the chain.
        if self.failed:
            raise PrivacyError(
                f"A line of {self._path} could not be written, and no other one follows it. Make "
                "room on the disk, and resume the run; the charge counts if its line is there."
            )
        self.failed = True  # until the line is written
        chained = {**line, PREVIOUS: self.head.digest}
        written = json.dumps(chained, separators=(",", ":")).encode() + b"\n"
        # The line must have left this process before its noise is drawn.
        rest = memoryview(written)
        while rest:
            rest = rest[self._lines.write(rest) :]
        if self._single:
            os.fsync(self._lines.fileno())
        self.head = Head(self.head.lines + 1, digest_of(written))
        if self.first is None:
            self.first = self.head.digest
        self._write_head()
        self.failed = False

    def sync(self) -> None:
        """Returns once all lines are on the disk."""
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Closes the file, and gives the lock back; idempotent."""
        self._lines.close()
        self._heads.close()

    def _read(self, resume: bool) -> Chain:
        """Returns the lines so far, without a torn one at the end."""
        path = self._path
        self._lines.seek(0)
        raw = self._lines.read()
        before = parse(raw, path, VERSION)
        if before.lines and not resume:
            raise ResumeError(
                f"{path} already holds the charges of a run; resume it, or choose another folder."
            )
        # An empty file of which a head is left was rolled back to before its first charge.
        if resume:
            self._check_head(before)
        # A torn line was never flushed, so its noise was never drawn.
        if before.size < len(raw):
            self._lines.truncate(before.size)
        os.fsync(self._lines.fileno())
        return before

    def _check_head(self, before: Chain) -> None:
        """Refuses a file that is shorter than its head file says, or another one."""
        path = self._path
        place = head_file(path)
        existing = None
        if place.exists():
            existing = Head.parse(place.read_text(errors="replace"))
        if existing is None and self._single and before.lines:
            raise ResumeError(
                f"{place} is missing or unreadable; it says how long {path} was, so whether "
                "charges were taken back cannot be told. Start a new run in another folder."
            )
        if existing is not None and not before.has(existing):
            raise ResumeError(
                f"{path} has {len(before.lines):,} lines and does not have line {existing.lines:,} "
                f"that {place.name} has recorded: the ledger was rolled back or replaced, and "
                "charges of releases that were made are missing. Restore the ledger, or start a "
                "new run in another folder."
            )

    def _write_head(self) -> None:
        """Overwrites the head in place: it may lag behind the lines after a crash of the system,
        and is never ahead."""
        self._heads.seek(0)
        self._heads.write(self.head.text().encode())


def _lock(file: IO[bytes], path: Path, *, needed: bool) -> None:
    """Takes the lock of a ledger, which a run whose noise cannot be drawn again needs."""
    try:
        lock(file)
    except BlockingIOError as error:
        raise ResumeError(f"{path} is in use by another process.") from error
    except OSError as error:
        if needed:
            raise PrivacyError(
                f"{path} cannot be locked ({error}), and a run with source='secure' needs file "
                "locks, so that no second process releases under the same charges. Use a folder "
                "on a local disk, or source='seeded'."
            ) from error
