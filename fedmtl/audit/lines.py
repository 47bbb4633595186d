"""The lines of a ledger, read by code that no run uses: the charges, lines that no run writes, and
the costs.

The audit reads the ledgers of the runs that it makes, ``fedmtl verify`` those of finished ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from ..privacy.accounting.library import library_epsilon
from ..privacy.cost import PrivacyCost
from .claim import composition

_UNLIMITED = 1 << 62
_ACCOUNTS = 2**24  # of a run, at most
_SIZED = ("BoundFixed", "BoundCyclic", "BoundBuffered")  # whose cohorts have a size
_BLOCK = 2**16  # steps that one line charges at most without their cohorts; runs write 1


def differences(stated: Mapping[str, Any], made: Mapping[str, Any], text: str) -> list[str]:
    """Returns ``text`` with the key, the stated value and that of ``made``, wherever these are
    different."""
    pairs = [(key, stated.get(key), value) for key, value in made.items()]
    return [text.format(*pair) for pair in pairs if not _same(*pair[1:])]


def _same(value: Any, other: Any) -> bool:
    """Returns True if two values are equal, numbers up to rounding."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-9)
    return bool(value == other)


def turns_apart(schedule: Mapping[str, Any]) -> int:
    """Returns the least number of rounds between two turns of a client.

    Args:
        schedule: in the header of a ledger, whose turns are public.
    """
    if schedule["class"] == "BoundBuffered":
        return int(schedule["rest"])
    return int(schedule["n"] // schedule["cohort"])


def spread(values: Sequence[int], count: int) -> Sequence[int]:
    """Returns up to ``count`` of some values, evenly chosen."""
    return values[:: max(1, math.ceil(len(values) / count))]


_Steps: TypeAlias = list[tuple[int, tuple[int, ...] | None]]
"""Step, and the clients that it is charged to, or None if it is charged to all."""


class _Lines:
    """The charges of the lines of a ledger after its header. Every line counts, since a seeded
    session does not charge a replayed step.

    Args:
        header: the first line.

    Attributes:
        steps: the charged steps, in order.
        remaining: the uses to which an early stop raised the charge; None without one.
        problems: the lines that no run writes, in words.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.steps = _Steps()
        self.remaining: int | None = None
        self.problems = list[str]()
        self._header = header
        self._session = 0
        self._open = False
        self._reached = 0
        self._next: int | None = None  # step of the session that is open

    def read(self, number: int, line: Mapping[str, Any]) -> None:
        """Takes in line ``number`` of the file, from 1.

        Raises:
            KeyError, TypeError, ValueError: a line without a field of its kind, or one that charges
                more steps than any run.
        """
        kind = line["kind"]
        wrong = None
        if kind == "open":
            wrong = self._begin(line["session"])
        elif kind not in ("charge", "remaining", "close"):
            wrong = f"{kind!r} is no kind of line"
        elif not self._open:
            wrong = f"{kind} outside of an open session"
        self._open = self._open and kind != "close"
        if kind == "remaining":
            self.remaining = max(self.remaining or 0, int(line["uses"]))
        if kind == "charge":
            # one sentence a line: steps out of order tell more than a session that is not open
            wrong = self._charge(number, line) or wrong
        if wrong is not None:
            self.problems.append(f"line {number}: {wrong}")

    def _begin(self, session: int) -> str | None:
        """Opens a session, and returns the fault of its number."""
        before = self._session
        self._session = session
        self._open = True
        self._next = None
        if session != before + 1:
            return f"session {session} follows session {before}"
        return None

    def _charge(self, number: int, line: Mapping[str, Any]) -> str | None:
        """Adds the steps of a line, and returns their fault."""
        first = line["first"]
        end = line["end"]
        cohorts = line.get("cohorts")
        wrong = None
        expected = self._reached if self._next is None else self._next
        # the first charge of a secure session may repeat steps: those after the last checkpoint
        again = self._next is None and not self._header["replays_free"] and 0 <= first < expected
        if first >= end or not (first == expected or again):
            wrong = f"steps {first} to {end - 1} are not the next ones"
        if cohorts is not None and len(cohorts) != end - first:
            wrong = f"{len(cohorts)} cohorts for {end - first} steps"
            cohorts = None
        # before the loop, so that no line of a few letters takes all memory
        if cohorts is None and end - first > _BLOCK:
            raise ValueError(f"line {number} charges {end - first} steps without cohorts")
        for step in range(first, end):
            cohort = None
            if cohorts is not None:
                cohort = tuple(cohorts[step - first])
            self.steps.append((step, cohort))
        self._next = end
        self._reached = max(self._reached, end)
        return wrong


class Reading:
    """The content of a ledger: its charges, and the kinds of accounts.

    Args:
        lines: of the file, the header first.

    Attributes:
        header: the first line.
        steps: step, and the clients that it is charged to, or None if it is charged to all.
        remaining: uses to which the charge was raised after an early stop, or None.
        kinds: the kinds of accounts, each with its ``cost``, ``multiplier`` and ``cap``.
        kind_of: (m,) int64, the kind of each account: a single one if all clients are charged
            for every step.
        caps: (m,) int64, most uses of each account.

    Raises:
        KeyError, TypeError, ValueError: a line without a field of its kind, or one that charges
            more steps than any run.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.header = lines[0]
        charges = _Lines(self.header)
        for number, line in enumerate(lines[1:], start=2):
            charges.read(number, line)
        self.steps = charges.steps
        self.remaining = charges.remaining
        self._problems = charges.problems
        self.kinds: list[dict[str, Any]] = list(self.header["kinds"])
        accounts = self.header["accounts"]
        if not 1 <= accounts <= _ACCOUNTS:
            raise ValueError(f"{accounts:,} accounts; a run has 1 to {_ACCOUNTS:,}")
        self.kind_of = np.array(self.header.get("kind_of", [0] * accounts), dtype=np.int64)
        caps = [_UNLIMITED if kind["cap"] is None else kind["cap"] for kind in self.kinds]
        self.caps = np.array(caps, dtype=np.int64)[self.kind_of]

    @cached_property
    def by_step(self) -> dict[int, list[int]]:
        """Returns the clients, in order, that each step is charged to, -1 for all; of a step that
        is charged twice they are there twice."""
        clients: dict[int, list[int]] = {}
        for step, cohort in self.steps:
            clients.setdefault(step, []).extend((-1,) if cohort is None else cohort)
        return {step: sorted(each) for step, each in clients.items()}

    @cached_property
    def participations(self) -> np.ndarray:
        """Returns (m,) int64, steps that each account is charged; one that is charged to all counts
        for each.

        Raises:
            ValueError: a client beyond the accounts.
        """
        n = len(self.kind_of)
        clients = np.array([k for each in self.by_step.values() for k in each], dtype=np.int64)
        if clients.size and not -1 <= clients.min() <= clients.max() < n:
            raise ValueError(f"a client is charged that is none of {n:,}")
        return np.bincount(clients[clients >= 0], minlength=n) + int((clients < 0).sum())

    @cached_property
    def uses(self) -> np.ndarray:
        """Returns (m,) int64 uses that each account is charged, the rest after an early stop
        included."""
        uses = self.participations
        rest = self.remaining
        if rest is None:
            return uses
        return np.where(self.caps < _UNLIMITED, self.caps, np.maximum(uses, rest))

    @property
    def by_client(self) -> bool:
        """Returns True if a client is charged for the steps in which it takes part."""
        return "schedule" not in self.header or bool(self.header["schedule"]["per_participation"])

    @property
    def releases(self) -> int:
        """Returns the number of releases that are charged."""
        if "releases" not in self.header:
            return int(
                self.uses @ np.array([kind["cost"]["sums"] for kind in self.kinds])[self.kind_of]
            )
        if self.by_client:
            steps = len(self.steps)
        else:
            steps = int(self.uses[0])
        return steps * len(self.header["releases"])

    def problems(self) -> list[str]:
        """Returns the errors of the lines: steps, cohorts, caps, and turns too close for
        correlated noise."""
        if self.by_client:
            cohorts = self._cohorts()
        else:
            cohorts = []
        over = int((self.participations > self.caps).sum())
        if over:
            above = [f"{over} clients are charged above their caps"]
        else:
            above = []
        return [*self._problems, *cohorts, *self._bands(), *above]

    @cached_property
    def most_charged(self) -> list[int]:
        """Returns of each kind of accounts that is charged the account with the most uses."""
        uses = [np.where(self.kind_of == k, self.uses, 0) for k in range(len(self.kinds))]
        return [int(each.argmax()) for each in uses if each.any()]

    def library_epsilon(self, account: int, near: float) -> float | None:
        """Returns epsilon of all that an account is charged by ``dp_accounting``, or None if
        that does not have the law of the noise; ``near`` is the epsilon that it is compared
        with."""
        kind = self.kinds[self.kind_of[account]]
        uses = int(self.uses[account])
        events = composition(PrivacyCost.from_dict(kind["cost"]), kind["multiplier"], uses)
        return library_epsilon(events, self.header["delta"], near)

    def _cohorts(self) -> list[str]:
        """Returns the charged cohorts that the sampler does not draw, or activations of several
        clients.

        No file has the order of the clients' turns, but turns of one are some rounds from each
        other at least; local steps are not charged to clients that have reached their caps.
        """
        n = len(self.kind_of)
        problems = list[str]()
        schedule = self.header.get("schedule", {"class": "BoundFixed", "cohort": 1})
        kind = schedule["class"]
        cohort = schedule.get("cohort")
        taken = np.zeros(n, dtype=np.int64)
        latest = np.full(n, -(1 << 40))  # turns
        for step, clients in self.steps:
            if clients is None or len(set(clients)) < len(clients):
                problems.append(f"step {step} has no cohort of distinct clients")
                continue
            members = np.array(clients, dtype=np.int64)
            fits = kind not in _SIZED or len(members) <= cohort
            if kind == "BoundFull":
                fits = not np.delete(taken < self.caps, members).any()
            elif kind in ("BoundCyclic", "BoundBuffered"):
                distance = np.abs(step - latest[members])
                apart = turns_apart(schedule)
                fits = fits and bool(((distance == 0) | (distance >= apart)).all())
                latest[members] = step
            if not fits:
                problems.append(
                    f"step {step} has a cohort that {kind.removeprefix('Bound')} does not draw"
                )
            taken[members] += 1
        return problems

    def _bands(self) -> list[str]:
        """Returns the correlations of noise that the cost does not cover: bands whose squares
        add up to more than 1, or more of them than rounds between two turns of a client."""
        bands = self.header.get("bands") or ()
        problems = list[str]()
        if self.header["privacy"].get("bands") is not None and not bands:
            problems.append("the settings have bands of noise, and the ledger has none")
        if math.fsum(c * c for c in bands) > 1 + 1e-12:
            problems.append("the bands of the noise are longer than 1")
        schedule = self.header.get("schedule", {})
        between = 1
        if schedule.get("class") in ("BoundCyclic", "BoundBuffered"):
            between = turns_apart(schedule)
        if len(bands) > between:
            problems.append(
                f"noise is correlated over {len(bands)} rounds, and a client may act "
                f"again after {between}"
            )
        return problems
