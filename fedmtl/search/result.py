"""The outcome of a private search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..privacy import PrivacyReport
from ..privacy.report import OUTSIDE
from ..trainer.result import Result

SEARCH_OUTSIDE = (
    OUTSIDE[0],
    "the list of candidates and the law of the number of repetitions, which are public",
    "how long the search took, which tells the number of repetitions",
    "copies of the search's folder that are continued elsewhere, each of which is a search of its "
    "own",
    "the server and the other clients, who take part in every repetition",
    OUTSIDE[2],
)
"""The values that the epsilon of a search does not cover."""


@dataclass(frozen=True)
class Repetition:
    """One repetition: private, unless it is the chosen one.

    Attributes:
        candidate: its name.
        score: noised.
    """

    candidate: str
    score: float


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        chosen: name of the candidate with the best noised score; None if nothing is released.
        score: its noised score, released.
        best: the chosen run; its ``privacy``, ``epsilon`` and history carry the epsilon of the
            whole search.
        privacy: everything that epsilon depends on.
        repetitions: all repetitions in order. Private, as is their number: neither is released.
        folder: of the search, if any.
    """

    chosen: str | None
    score: float | None
    best: Result | None
    privacy: PrivacyReport
    repetitions: tuple[Repetition, ...]
    folder: Path | None = None

    @property
    def epsilon(self) -> float:
        """Returns the epsilon of the whole search."""
        return self.privacy.epsilon

    def summary(self) -> str:
        """Returns the printed summary: the choice, its noised score, the scores of its run, and the
        privacy block."""
        search = self.privacy.search or {}
        count = len(search["candidates"])
        if self.best is None or self.score is None:
            return (
                f"private search over {count} candidates: nothing is "
                f"released\n\n{self.privacy.text()}"
            )
        head = (
            f"private search over {count} candidates\n  chosen    {self.chosen}\n  score     "
            f"{self.score:.3f}, released with noise of standard deviation "
            f"{search['score_noise']:g}"
        )
        return f"{head}\n\n{self.best.summary()}"


def search_report(
    own: PrivacyReport, search: Mapping[str, Any], *, epsilon: float, budget: float, releases: int
) -> PrivacyReport:
    """Returns the privacy report of a search.

    Args:
        own: the report of the chosen run, or of the first candidate if no run was made.
        search: the public settings of the search.
        epsilon: of the whole search.
        budget: the epsilon that was asked for.
        releases: number of releases of the chosen run with its score; 0 without one.
    """
    return replace(
        own,
        epsilon=epsilon,
        budget=budget,
        accountant="rdp",
        observer="public",
        run=None,  # the ledgers of the runs tell nothing of how many there were
        ledger_lines=None,
        ledger_head=None,
        names=(*own.names, "score"),
        releases=releases,
        outside=(*SEARCH_OUTSIDE, *[text for text in own.outside if text not in OUTSIDE]),
        search=dict(search),
    )
