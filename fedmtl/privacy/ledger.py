"""The ledger: the record of all charges, written before the noise it pays for is drawn.

Format: JSON lines, append-only, each with the hash of the line before (:mod:`.chain`). The lines
are

- the header: settings, releases, noise, fingerprint, and a random number of the run, so that no two
  runs have the same hashes;
- ``open``: a process begins, with its session number. A resumed run writes it before its first
  charge, so that one that charges nothing leaves the file as it is;
- ``charge``: consecutive steps, with the cohort of each if participations are charged;
- ``remaining``: the run stopped early and is charged as if it had continued;
- ``close``: a clean end.

A charge is a line that stays. The steps of a session follow one another. Its charges are therefore
one interval of steps, without a gap to those charged before. A step charges all of its releases
together, so a line names steps and no releases. In seeded mode a replayed step is the same release
and is charged once; the fingerprint guarantees that it is the same. In secure mode every session
draws fresh noise, so a replayed step is a new charge. A torn last line was never flushed, so its
noise was never drawn: it is dropped.

In secure mode every line is on the disk before its noise is drawn. A seeded run is a simulation,
whose noise can be drawn again: its lines are handed to the system, which keeps them if the process
is killed, and are on the disk with every checkpoint.

In secure mode the file is locked, and its last line is compared with the head file and with the
checkpoint. A second copy of the folder that is resumed as well releases twice under one charge, and
no file can tell: the report says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .._files import Json
from .._fingerprint import differing
from ..errors import PrivacyError, ResumeError
from .chain import PREVIOUS, Head, parse
from .ledger_file import VERSION, LedgerFile


class Ledger:
    """Charges of one account.

    Args:
        path: file of the ledger, or None to keep it in memory.
        header: JSON object that describes the account; a resume must bring an equal one.
        fingerprint: identifies data, configuration and execution.
        replays_free: True in seeded mode: a step charged once is never charged again.
        clients: population size if participations are charged; None if everybody is charged
            for each step.
        resume: continue the ledger at ``path`` (or begin one, if there is none yet).
        single: the file must not be used by two processes: file locks and the head file are needed,
            and every line is on the disk when it is written; None: if replays are not free.
            Otherwise the lock is taken if the system has one.

    Attributes:
        header: see above.
        session: number of times that this ledger has been opened, this one included.
        run: identity of the run: the hash of the header, which holds a random number; None in
            memory.
        replays_free: see above.
        charged: charged steps: distinct ones in seeded mode, those of every session in secure mode.
        reached: the first step after all that were ever charged, in whatever session.
        remaining: steps to which :meth:`charge_remaining` raised the charge, or None.

    Raises:
        PrivacyError: ``single`` without file locks.
        ResumeError: the file exists and ``resume`` is False, is in use, is damaged, was rolled
            back, or belongs to another run.

    Example:
        >>> from fedmtl.privacy import Ledger
        >>> ledger = Ledger(None, {}, fingerprint="", replays_free=False)  # in memory
        >>> ledger.charge(0, 1)  # the first round
        >>> ledger.charged, ledger.reached
        (1, 1)
    """

    def __init__(
        self,
        path: Path | None,
        header: Mapping[str, Json],
        *,
        fingerprint: str,
        replays_free: bool,
        clients: int | None = None,
        resume: bool = False,
        single: bool | None = None,
    ) -> None:
        self.header = header
        self.replays_free = replays_free
        self.session = self.charged = self.reached = 0
        self.remaining: int | None = None
        self.run: str | None = None
        self._path = path
        self._clients = clients or 0
        if single is None:
            single = not replays_free
        # first step, sizes of cohorts, their clients
        self._cohorts: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._next: int | None = None  # the step after those of this session
        self._opened = False  # whether the line of this session is written
        self._file: LedgerFile | None = None
        self._closed = False
        opening = {
            "kind": "header",
            "version": VERSION,
            "fingerprint": fingerprint,
            "replays_free": replays_free,
            **header,
        }
        lines: list[dict[str, Any]] = []
        if path is not None:
            # The lock is taken before anything is read: another process could be writing.
            self._file = LedgerFile(path, resume=resume, single=single)
            lines = self._file.before.lines
        try:
            if lines:
                self._check_header(lines[0], opening)
            else:
                # The random number makes two runs of equal settings two different chains.
                self._append(opening | {"run": secrets.token_hex(32)})
            for number, line in enumerate(lines[1:], start=2):
                self._apply(line, number)
            if self._file is not None:
                self.run = self._file.first
            self.session += 1
            self._next = None
            if not lines:
                self._open()
        except BaseException:
            # A refused ledger is not kept locked.
            if self._file is not None:
                self._file.close()
            raise

    # reading

    def uses(self, before: int | None = None) -> np.ndarray:
        """Returns the charged participations of each client, if participations are charged.

        Args:
            before: counts the steps below this number; None for all.

        Returns:
            int64 (n,).
        """
        chosen = [np.zeros(0, dtype=np.int64)]
        for first, sizes, clients in self._cohorts:
            some = None
            if before is not None:
                some = int(sizes[: max(0, before - first)].sum())
            chosen.append(clients[:some])
        return np.bincount(np.concatenate(chosen), minlength=self._clients).astype(np.int64)

    # writing

    def charge(self, first: int, end: int, cohorts: Sequence[list[int]] | None = None) -> None:
        """Charges steps ``[first, end)``; returns once the line is written, in secure mode to the
        disk. Steps that are charged already are not charged again in seeded mode.

        Args:
            first: the first step; in a file it follows those that this session has charged.
            end: the step after the last one.
            cohorts: for each step, the clients that take part, if participations are charged.

        Raises:
            PrivacyError: a step below 0; or in a file, a step that this session has charged
                already, or one after a step that was never charged.
        """
        if self._closed:
            raise PrivacyError("The ledger is closed.")
        if first < 0 or not self._follows(first):
            raise PrivacyError(
                f"Step {first} does not follow the steps that are charged; they are "
                "charged in order."
            )
        if self.replays_free:
            # A seeded step that was charged gives the same bits again, and costs nothing again.
            new = min(max(first, self.reached), end)
        else:
            new = first
        if new < end:
            line: dict[str, Any] = {"kind": "charge", "first": new, "end": end}
            if cohorts is not None:
                line["cohorts"] = cohorts[new - first :]
            self._open()
            self._append(line)
            self._charge(line)
        self._next = end

    def charge_remaining(self, uses: int) -> None:
        """Raises the charge to ``uses`` steps for good (or to the caps, if participations are
        charged).

        Args:
            uses: of every account, at least those that are charged.
        """
        self._open()
        self._append({"kind": "remaining", "uses": uses})
        self.remaining = uses

    @property
    def head(self) -> Head | None:
        """Returns the number of lines and the hash of the last one, also after :meth:`close`; None
        in memory."""
        if self._file is None:
            return None
        return self._file.head

    def sync(self) -> Head | None:
        """Returns :attr:`head` once all lines are on the disk."""
        if self._file is not None and not self._closed:
            self._file.sync()
        return self.head

    def close(self) -> None:
        """Ends cleanly, with all lines on the disk; idempotent."""
        if self._closed:
            return
        failed = self._file is not None and self._file.failed
        # A session that charged nothing leaves the file as it was.
        if self._opened and not failed:
            self._append({"kind": "close"})
        if not failed:
            self.sync()
        self._closed = True
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        """Writes that this session has begun, before its first charge."""
        if not self._opened:
            self._append({"kind": "open", "session": self.session})
            self._opened = True

    def _append(self, line: Mapping[str, Json]) -> None:
        """Writes a line; nothing in memory."""
        if self._closed:
            raise PrivacyError("The ledger is closed.")
        if self._file is not None:
            self._file.append(line)

    # state from lines

    def _charge(self, line: Mapping[str, Any]) -> None:
        first = int(line["first"])
        end = int(line["end"])
        cohorts = line.get("cohorts")
        if cohorts is not None:
            sizes = np.array([len(cohort) for cohort in cohorts], dtype=np.int64)
            clients = np.fromiter(
                chain.from_iterable(cohorts), dtype=np.int64, count=int(sizes.sum())
            )
            # A line with other cohorts than it charges would give clients the wrong account.
            if len(sizes) != end - first or (
                clients.size and not 0 <= clients.min() <= clients.max() < self._clients
            ):
                raise ValueError(
                    f"cohorts of steps {first} to {end - 1} are not those of "
                    f"{self._clients} clients"
                )
            self._cohorts.append((first, sizes, clients))
        self.charged += end - first
        self.reached = max(self.reached, end)
        self._next = end

    def _follows(self, first: int) -> bool:
        """Returns True if step ``first`` follows the steps of this session, or without any the
        steps that were ever charged. No session follows one in memory, so its steps may begin
        anywhere."""
        return (
            self._file is None
            or first == self._next
            or (self._next is None and first <= self.reached)
        )

    def _apply(self, line: Mapping[str, Any], number: int) -> None:
        try:
            if line["kind"] == "open":
                self.session = int(line["session"])
                self._next = None
            elif line["kind"] == "charge":
                if not (self._follows(line["first"]) and 0 <= line["first"] < line["end"]):
                    raise ValueError(
                        f"steps {line['first']} to {line['end'] - 1} do not follow those before"
                    )
                self._charge(line)
            elif line["kind"] == "remaining":
                self.remaining = int(line["uses"])
            elif line["kind"] != "close":
                raise KeyError(line["kind"])
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(
                f"{self._path}, line {number}: not a line of a ledger ({error!r})."
            ) from error

    def _check_header(self, stored: Mapping[str, Json], expected: Mapping[str, Json]) -> None:
        for key in {**stored, **expected}:
            # The identity of a run and the chain belong to the file and not to the settings.
            if key in ("run", PREVIOUS):
                continue
            if stored.get(key) == expected.get(key) or (
                key == "fingerprint" and not self.replays_free
            ):
                continue
            if key == "fingerprint":
                names = (
                    ", ".join(differing(str(stored.get(key, "")), str(expected[key])))
                    or "data, settings or execution"
                )
                raise ResumeError(
                    f"{self._path} was written for other {names}. The same seed would give the "
                    "same noise on other "
                    "data, and their difference would reveal it; start a new run in another folder."
                )
            raise ResumeError(
                f"{self._path} was written with {key} = {stored.get(key)!r}, but this run has "
                f"{expected.get(key)!r}."
            )


def read_header(path: Path) -> dict[str, Json] | None:
    """Returns the header of a ledger, or None if there is no complete one."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        lines = parse(file.readline(), path).lines
    if lines:
        return lines[0]
    return None
