"""The ledger: what has been charged, written and flushed to disk before the noise it pays for is drawn.

Format: JSON lines, append-only, each with the hash of the line before (:mod:`.chain`). A header (settings, releases,
noise, fingerprint, and a random number of the run, so that no two runs have the same hashes), then ``open`` (a process
begins, with its session number), ``reserve`` (a block of steps, with the cohort of each where
participations are charged), ``first`` (one release before all steps, of everybody who has one), ``remaining`` (the run
stopped because of what it showed, and is charged as if it had gone on), ``close`` (a clean end, which returns the
steps that its own session reserved and never began) and ``moved`` (the user has said that this file is the only one
that goes on).

Charges are keyed by (release, step, draw); the releases of an account share every step, so lines hold steps
only, and ``draw`` is the session. In seeded mode a replayed step is the same release and is charged once; the
fingerprint guarantees that it is the same. In secure mode every session draws fresh noise, so a replayed step
is a new charge, and a block that a crash left behind stays charged in full. A torn last line was never
flushed, so its noise was never
drawn: it is dropped.

In secure mode a second copy of the file would release twice under one charge. The path, device and inode of the file
are therefore written when it is opened, and a file that has another inode is refused until :func:`accept_move` has
noted that the original is gone. What cannot be told from the original: the same file restored in place from a backup,
together with its head file and its checkpoint, and copies of which the user says that they are moved.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .._fingerprint import differing
from ..errors import PrivacyError, ResumeError
from .chain import PREVIOUS, ChainFile, Head, place_of, read_first, same_place
from .ledger_steps import Cohorts, Spans

VERSION = 3


class Ledger:
    """Charges of one account.

    Args:
        path: file of the ledger, or None to keep it in memory.
        header: JSON object that describes the account; a resume must bring an equal one.
        fingerprint: identifies data, configuration and execution.
        replays_free: True in seeded mode: a step charged once is never charged again.
        clients: population size where participations are charged; None where everybody is charged for each
            step.
        resume: continue the ledger at ``path`` (or begin one, if there is none yet).
        single: refuse a copy of the file, and a system without file locks; None: where replays are not free.

    Raises:
        PrivacyError: ``single`` without file locks.
        ResumeError: the file exists and ``resume`` is False, is in use, is damaged, was rolled back, is a copy, or
            belongs to another run.
    """

    def __init__(
        self,
        path: Path | None,
        header: Mapping[str, Any],
        *,
        fingerprint: str,
        replays_free: bool,
        clients: int | None = None,
        resume: bool = False,
        single: bool | None = None,
    ) -> None:
        self._path, self.header = path, header
        self._file: ChainFile | None = None
        self._single = not replays_free if single is None else single
        self._place: Mapping[str, Any] | None = None
        self._run: str | None = None
        self._closed = False
        self._free, self._clients = replays_free, clients
        self._charges: list[tuple[int, int, int]] = []  # (session, first step, end step)
        self._cohorts = Cohorts()
        self._session = 0
        self._remaining: int | None = None
        self._firsts = 0
        self._paid, self._began = Spans(), Spans()
        opening = {
            "kind": "header",
            "version": VERSION,
            "fingerprint": fingerprint,
            "replays_free": replays_free,
            **header,
        }
        if path is not None:
            self._file = ChainFile(path, version=VERSION, single=self._single, resume=resume)
        lines = self._file.chain.lines if self._file is not None else []
        try:
            if lines:
                self._check_header(lines[0], opening)
            else:
                self._append(opening | {"run": secrets.token_hex(32)})
            for number, line in enumerate(lines[1:], start=2):
                self._apply(line, number)
            if path is not None and self._file is not None:
                self._check_place(path)
                self._run = self._file.chain.digests[0] if lines else self._file.head.digest
            self._session += 1
            if not replays_free:
                self._paid = Spans()  # fresh noise in a new session is a new charge
            here = {"place": place_of(path)} if path is not None and self._single else {}
            self._append({"kind": "open", "session": self._session, **here})
        except BaseException:
            if self._file is not None:
                self._file.close()  # a refused ledger is not kept locked
            raise

    # reading

    @property
    def session(self) -> int:
        """Return the number of times that this ledger has been opened, this one included."""
        return self._session

    @property
    def run(self) -> str | None:
        """Return the identity of the run: the hash of the header, which holds a random number; None in memory."""
        return self._run

    @property
    def head(self) -> Head | None:
        """Return the number of lines and hash of the last one, also after :meth:`close`; None in memory."""
        return self._file.head if self._file is not None else None

    @property
    def replays_free(self) -> bool:
        """Whether a step charged once is never charged again (seeded mode)."""
        return self._free

    def reserved(self, step: int) -> bool:
        """Whether the noise of ``step`` is paid for: in this session, or (seeded mode) in any."""
        return step in self._paid

    def charged(self) -> int:
        """Return charged steps: distinct ones in seeded mode, every reservation of every session in secure mode."""
        if self._free:
            return Spans((first, end) for _, first, end in self._charges).count()
        return sum(end - first for _, first, end in self._charges)

    def uncharged(self, before: int) -> int | None:
        """Return the first step below ``before`` that no session has charged, or None."""
        gaps = Spans((first, end) for _, first, end in self._charges).gaps(0, before)
        return gaps[0][0] if gaps else None

    @property
    def reached(self) -> int:
        """Return the first step after all that were ever charged, in whatever session."""
        return max((end for _, _, end in self._charges), default=0)

    def reserved_until(self, first: int, end: int) -> int:
        """Return the first step of [first, end) that :meth:`reserved` denies, or ``end``."""
        gaps = self._paid.gaps(first, end)
        return gaps[0][0] if gaps else end

    def uses(self, before: int | None = None) -> np.ndarray:
        """Return (n,) int64 charged participations by rank, for an account that charges participations."""
        return self._cohorts.counts(self._clients or 0, before=before, once=self._free)

    def spent_uses(self) -> np.ndarray:
        """Return :meth:`uses` that stay charged if the ledger is closed now: not this session's unused ones."""
        without = self._session, Spans(self._unused())
        return self._cohorts.counts(self._clients or 0, once=self._free, without=without)

    def _unused(self) -> list[tuple[int, int]]:
        """Return spans that this session reserved and never began."""
        mine = Spans((first, end) for session, first, end in self._charges if session == self._session)
        return [gap for span in mine for gap in self._began.gaps(*span)]

    @property
    def firsts(self) -> int:
        """Return how often the release before all steps was charged."""
        return self._firsts

    def spent(self) -> int:
        """Return steps that stay charged if the ledger is closed now: not this session's unused reservations."""
        others = [(first, end) for session, first, end in self._charges if session != self._session]
        if self._free:
            return Spans([*others, *self._began]).count()
        return sum(end - first for first, end in others) + self._began.count()

    @property
    def remaining(self) -> int | None:
        """Return steps to which :meth:`charge_remaining` raised the charge, or None."""
        return self._remaining

    def participants(self, step: int) -> np.ndarray | None:
        """Return ranks recorded for ``step`` in the earliest session that has it, or None."""
        return self._cohorts.of(step)

    # writing

    def reserve(self, first: int, end: int, cohorts: Sequence[list[int]] | None = None) -> None:
        """Charge steps ``[first, end)``; returns once the line is on the disk.

        Args:
            first, end: the block.
            cohorts: for each step of the block, the ranks that take part, where participations are charged.
        """
        line: dict[str, Any] = {"kind": "reserve", "session": self._session, "first": first, "end": end}
        if cohorts is not None:
            line["cohorts"] = cohorts
        self._append(line)
        self._charge(self._session, first, end, cohorts)

    def charge_remaining(self, uses: int) -> None:
        """Raise the charge to ``uses`` steps for good (or to the caps, where participations are charged)."""
        self._append({"kind": "remaining", "session": self._session, "uses": uses})
        self._remaining = uses

    def reserve_first(self) -> None:
        """Charge the release that everybody who has one makes before all steps; returns once it is on the disk."""
        self._append({"kind": "first", "session": self._session})
        self._firsts += 1

    def begin(self, step: int, end: int | None = None) -> None:
        """Note that the noise of a reserved ``step`` (or of all of [step, end)) is about to be drawn, so that a clean
        close keeps its charge.

        Raises:
            PrivacyError: a step is not reserved, or has begun in this session already.
        """
        end = step + 1 if end is None else end
        unpaid, fresh = self._paid.gaps(step, end), self._began.gaps(step, end)
        if unpaid:
            raise PrivacyError(f"Step {unpaid[0][0]} is not reserved in the ledger.")
        if fresh != [(step, end)] and step < end:
            again = step if not fresh or fresh[0][0] > step else fresh[0][1]
            raise PrivacyError(f"Step {again} has begun already; its noise would be used twice.")
        if self._closed:
            raise PrivacyError("The ledger is closed.")
        self._began.add(step, end)

    def close(self) -> None:
        """End cleanly and return the steps that this session reserved and never began; idempotent."""
        if self._closed:
            return
        unused = [step for gap in self._unused() for step in range(*gap)]
        self._append({"kind": "close", "session": self._session, "unused": unused})
        self._refund(self._session, unused)
        self._closed = True
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._closed:
            raise PrivacyError("The ledger is closed.")
        if self._file is None:
            return
        self._file.append(line)

    # state from lines

    def _charge(self, session: int, first: int, end: int, cohorts: Sequence[Sequence[int]] | None) -> None:
        self._charges.append((session, first, end))
        if self._free or session == self._session:
            self._paid.add(first, end)
        if cohorts is not None:
            if len(cohorts) != end - first:
                raise ValueError(f"{len(cohorts)} cohorts for {end - first} steps")
            self._cohorts.add(session, first, cohorts)

    def _refund(self, session: int, unused: Sequence[int]) -> None:
        if not unused:
            return
        returned = Spans((step, step + 1) for step in unused)
        kept: list[tuple[int, int, int]] = []
        for owner, first, end in self._charges:
            spans = returned.gaps(first, end) if owner == session else [(first, end)]
            kept += [(owner, *span) for span in spans]
        self._charges = kept
        if self._free:
            self._paid = Spans((first, end) for _, first, end in kept)
        self._cohorts.drop(session, returned)

    def _apply(self, line: Mapping[str, Any], number: int) -> None:
        try:
            if line["kind"] == "open":
                self._session = int(line["session"])
                self._place = line.get("place", self._place)
            elif line["kind"] == "reserve":
                self._charge(int(line["session"]), int(line["first"]), int(line["end"]), line.get("cohorts"))
            elif line["kind"] == "first":
                self._firsts += 1
            elif line["kind"] == "remaining":
                self._remaining = int(line["uses"])
            elif line["kind"] == "moved":
                self._place = line["place"]
            elif line["kind"] == "seal":  # of earlier versions
                pass
            elif line["kind"] == "close":
                self._refund(int(line["session"]), line["unused"])
            else:
                raise KeyError(line["kind"])
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"{self._path}, line {number}: not a line of a ledger ({error!r}).") from error

    def _check_header(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for key in {**found, **expected}:
            if key in ("run", PREVIOUS):
                continue
            if found.get(key) == expected.get(key) or (key == "fingerprint" and not self._free):
                continue
            if key == "fingerprint":
                names = ", ".join(differing(found.get(key, ""), expected[key])) or "data, settings or execution"
                raise ResumeError(
                    f"{self._path} was written for other {names}. The same seed would give the same noise on other "
                    "data, and their difference would reveal it; start a new run in another folder."
                )
            raise ResumeError(
                f"{self._path} was written with {key} = {found.get(key)!r}, but this run has {expected.get(key)!r}."
            )

    def _check_place(self, path: Path) -> None:
        if not self._single or self._place is None or same_place(self._place, place_of(path)):
            return
        raise ResumeError(
            f"{path} is a copy: the ledger of this run was last written at {self._place['path']}, as another file. Two "
            f"copies that go on release twice under one charge. Resume the original; only where it is gone for good, "
            f"say so once with: fedmtl resume FOLDER --moved."
        )


def accept_move(path: Path) -> None:
    """Note in the ledger at ``path`` that this file is the only one of its run that goes on.

    Nothing is written where the file is the one that was last written, or where copies do no harm (seeded mode).

    Raises:
        ResumeError: not a ledger of this version, in use, damaged or rolled back.
    """
    header = read_first(path)
    if header is None:
        return
    file = ChainFile(path, version=VERSION, single=not header.get("replays_free", False), resume=True)
    try:
        places = [line["place"] for line in file.chain.lines if "place" in line]
        if places and not same_place(places[-1], place_of(path)):
            file.append({"kind": "moved", "place": place_of(path)})
    finally:
        file.close()


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the header of a ledger, or None if there is no complete one."""
    return read_first(path)
