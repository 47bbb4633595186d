"""The lines of a ledger, read by code that the ledger does not use: what they charge, and what no run writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_BLOCK = 2**16  # steps that one line charges at most without their cohorts; runs write 1


@dataclass
class Charges:
    """What the lines of a ledger charge: every line counts, since a seeded session does not charge a replayed step.

    Attributes:
        steps: session, step, and the clients that it is charged to, or None where it is charged to all.
        remaining: uses to which the charge was raised after an early stop, or None.
        problems: lines that no run writes, in words.
    """

    steps: list[tuple[int, int, tuple[int, ...] | None]] = field(default_factory=list)
    remaining: int | None = None
    problems: list[str] = field(default_factory=list)

    def uses(self, n: int) -> np.ndarray:
        """Return (n,) int64 charged participations by client; a step that is charged to all counts for each.

        Raises:
            ValueError: a client beyond the ``n``.
        """
        clients = np.array([client for _, _, cohort in self.steps for client in cohort or ()], dtype=np.int64)
        if clients.size and not 0 <= clients.min() <= clients.max() < n:
            raise ValueError(f"a client is charged that is none of {n:,}")
        return np.bincount(clients, minlength=n) + sum(cohort is None for _, _, cohort in self.steps)

    def by_step(self) -> dict[int, list[int]]:
        """Return the clients that each step is charged to, -1 for all; of a step that is charged twice they are there
        twice."""
        clients: dict[int, list[int]] = {}
        for _, step, cohort in self.steps:
            clients.setdefault(step, []).extend((-1,) if cohort is None else cohort)
        return clients


def differences(stated: Mapping[str, Any], made: Mapping[str, Any], text: str) -> list[str]:
    """Return ``text`` with the key, the stated value and that of ``made``, wherever these are different."""
    pairs = [(key, stated.get(key), value) for key, value in made.items()]
    return [text.format(*pair) for pair in pairs if not _same(*pair[1:])]


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-9)
    return bool(value == other)


def read_charges(lines: Sequence[Mapping[str, Any]]) -> Charges:
    """Return what the lines after the header charge.

    Raises:
        KeyError, TypeError, ValueError: a line without what its kind has, or one that charges more steps than any run.
    """
    charges, session, reached = Charges(), 0, 0
    following: int | None = None  # the next step of the session that is open
    opened = False
    for number, line in enumerate(lines[1:], start=2):
        kind, wrong = line["kind"], None
        if kind == "open":
            if line["session"] != session + 1:
                wrong = f"session {line['session']} follows session {session}"
            session, opened, following = line["session"], True, None
        elif kind not in ("charge", "remaining", "close"):
            wrong = f"{kind!r} is no kind of line"
        elif not opened:
            wrong = f"{kind} outside of an open session"
        if kind == "close":
            opened = False
        if kind == "remaining":
            charges.remaining = max(charges.remaining or 0, int(line["uses"]))
        if kind == "charge":
            first, end, cohorts = line["first"], line["end"], line.get("cohorts")
            expected = reached if following is None else following
            again = following is None and not lines[0]["replays_free"] and 0 <= first < expected
            if first >= end or not (first == expected or again):
                wrong = f"steps {first} to {end - 1} are not the next ones"
            if cohorts is not None and len(cohorts) != end - first:
                wrong, cohorts = f"{len(cohorts)} cohorts for {end - first} steps", None
            if cohorts is None and end - first > _BLOCK:
                raise ValueError(f"line {number} charges {end - first} steps without cohorts")
            for step in range(first, end):
                charges.steps.append((session, step, None if cohorts is None else tuple(cohorts[step - first])))
            following, reached = end, max(reached, end)
        if wrong is not None:
            charges.problems.append(f"line {number}: {wrong}")
    return charges
