"""What may be said of a private search: the report of the chosen run, with the figures of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from ..privacy import PrivacyReport
from ..privacy.report import OUTSIDE

SECRET = "number of repetitions: secret, and which of them won"
SEARCH_OUTSIDE = (
    OUTSIDE[0],
    "the list of candidates and the law of the number of repetitions, which are public",
    "how long the search took, which tells the number of repetitions",
    "copies of the search's folder that are continued elsewhere, each of which is a search of its own",
    "the server and the other clients, who take part in every repetition",
    OUTSIDE[2],
)


@dataclass(frozen=True, kw_only=True)
class SearchReport(PrivacyReport):
    """Everything the epsilon of a search depends on. ``epsilon`` and ``budget`` are those of the whole search.

    Attributes:
        candidates: what was searched, public.
        mean, shape: of the law of the number of repetitions, see :mod:`fedmtl.privacy.accounting.selection`.
        repetitions: their number, and which of them won, are secret.
        score: what was compared.
        score_noise: standard deviation of the noise on it.
    """

    candidates: tuple[str, ...]
    mean: float
    shape: float
    repetitions: str = "secret"
    score: str
    score_noise: float

    def text(self) -> str:
        """Return one printed block."""
        lines = super().text().splitlines()
        law = "Poisson" if math.isinf(self.shape) else f"truncated negative binomial, shape {self.shape:g}"
        rows = [
            ("search", f"the best of a random number of runs; {law}, mean {self.mean:g}; {SECRET}"),
            ("candidates", f"{len(self.candidates)}, drawn uniformly: {'; '.join(self.candidates)}"),
            ("score", f"{self.score}, noise of standard deviation {self.score_noise:g}"),
        ]
        return "\n".join([*lines[:2], *(f"  {label:<13}{text}" for label, text in rows), *lines[2:]])


def search_report(run: PrivacyReport, *, released: bool, **figures: Any) -> SearchReport:
    """Return the report of a search from that of its chosen run.

    Args:
        run: of the chosen run (of any candidate before its first step, where nothing was chosen).
        released: whether there is a chosen run, whose score is then one release more.
        figures: epsilon and budget of the whole search, and what else is in a :class:`SearchReport`.
    """
    facts: dict[str, Any] = {field.name: getattr(run, field.name) for field in fields(PrivacyReport)}
    notes = tuple(text for text in run.outside if text not in OUTSIDE)
    facts |= {
        "accountant": "rdp",
        "observer": "public",
        "run": None,  # the ledgers of the runs tell nothing of how many there were
        "ledger_lines": None,
        "ledger_head": None,
        "names": (*run.names, "score"),
        "releases": run.releases + 1 if released else 0,
        "outside": SEARCH_OUTSIDE + notes,
    }
    return SearchReport(**(facts | figures))
