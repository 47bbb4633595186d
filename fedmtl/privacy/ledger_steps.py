"""Sets of steps and their cohorts as spans and arrays: a ledger of a million activations stays small."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np


class Spans:
    """A set of whole numbers, kept as disjoint spans [first, end) in rising order."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._first: list[int] = []
        self._end: list[int] = []
        for first, end in sorted(spans):
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Add all of [first, end)."""
        if first >= end:
            return
        low = bisect.bisect_left(self._end, first)  # the first span that reaches to it
        high = bisect.bisect_right(self._first, end)  # after the last one that begins within
        if low < high:
            first, end = min(first, self._first[low]), max(end, self._end[high - 1])
        self._first[low:high], self._end[low:high] = [first], [end]

    def __contains__(self, step: int) -> bool:
        at = bisect.bisect_right(self._first, step) - 1
        return at >= 0 and step < self._end[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._first, self._end, strict=True)

    def gaps(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return what of [first, end) is not in the set."""
        found, at = [], bisect.bisect_right(self._end, first)
        while first < end:
            begins = self._first[at] if at < len(self._first) else end
            if first < begins:
                found.append((first, min(begins, end)))
            if begins >= end:
                break
            first, at = self._end[at], at + 1
        return found

    def count(self) -> int:
        """Return how many there are."""
        return sum(end - first for first, end in self)


@dataclass(frozen=True, eq=False)
class _Block:
    """Cohorts of consecutive steps: those of step ``first + i`` are ``ranks[offsets[i] : offsets[i + 1]]``."""

    first: int
    offsets: np.ndarray
    ranks: np.ndarray

    @property
    def end(self) -> int:
        return self.first + self.offsets.size - 1

    def of(self, first: int, end: int) -> np.ndarray:
        return self.ranks[self.offsets[first - self.first] : self.offsets[end - self.first]]

    def part(self, first: int, end: int) -> _Block:
        offsets = self.offsets[first - self.first : end - self.first + 1]
        return _Block(first, offsets - offsets[0], self.of(first, end))


class Cohorts:
    """Who took part in each step of each session."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}

    def add(self, session: int, first: int, cohorts: Sequence[Sequence[int]]) -> None:
        """Add the cohorts of steps ``first``, ``first + 1``, ..., which ``session`` does not have yet."""
        offsets = np.cumsum([0, *map(len, cohorts)])
        ranks = np.fromiter(chain.from_iterable(cohorts), dtype=np.int64, count=int(offsets[-1]))
        bisect.insort(self._blocks.setdefault(session, []), _Block(first, offsets, ranks), key=_first_of)

    def drop(self, session: int, steps: Spans) -> None:
        """Forget ``steps`` of a session."""
        blocks = self._blocks.get(session, [])
        kept = [block.part(*span) for block in blocks for span in steps.gaps(block.first, block.end)]
        self._blocks[session] = kept

    def of(self, step: int) -> np.ndarray | None:
        """Return the cohort in the earliest session that has the step, or None."""
        for session in sorted(self._blocks):
            blocks = self._blocks[session]
            at = bisect.bisect_right(blocks, step, key=_first_of) - 1
            if at >= 0 and step < blocks[at].end:
                return blocks[at].of(step, step + 1)
        return None

    def counts(
        self,
        n: int,
        *,
        before: int | None = None,
        once: bool = False,
        without: tuple[int, Spans] | None = None,
    ) -> np.ndarray:
        """Return (n,) int64 participations by rank, in steps below ``before``; a step counts once if ``once``, and not
        at all where it is of the session and the steps ``without``."""
        seen, found = Spans(), [np.zeros(0, dtype=np.int64)]
        for session in sorted(self._blocks):
            for block in self._blocks[session]:
                end = block.end if before is None else max(block.first, min(block.end, before))
                spans = [(block.first, end)]
                if without is not None and session == without[0]:
                    spans = without[1].gaps(block.first, end)
                for span in spans:
                    found += [block.of(*gap) for gap in (seen.gaps(*span) if once else [span])]
                    if once:
                        seen.add(*span)
        return np.bincount(np.concatenate(found), minlength=n).astype(np.int64)


def _first_of(block: _Block) -> int:
    return block.first
