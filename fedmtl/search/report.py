"""What may be said of a private search: the report of the chosen run, with the figures of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..privacy import PrivacyReport
from ..privacy.report import OUTSIDE

SEARCH_OUTSIDE = (
    OUTSIDE[0],
    "the list of candidates and the law of the number of repetitions, which are public",
    "how long the search took, which tells the number of repetitions",
    "copies of the search's folder that are continued elsewhere, each of which is a search of its own",
    "the server and the other clients, who take part in every repetition",
    OUTSIDE[2],
)


def search_report(run: PrivacyReport, *, released: bool, **figures: Any) -> PrivacyReport:
    """Return the report of a search from that of its chosen run.

    Args:
        run: of the chosen run (of any candidate before its first step, where nothing was chosen).
        released: whether there is a chosen run, whose score is then one release more.
        figures: of the whole search: ``epsilon``, ``budget`` and ``search``.
    """
    return replace(
        run,
        accountant="rdp",
        observer="public",
        run=None,  # the ledgers of the runs tell nothing of how many there were
        ledger_lines=None,
        ledger_head=None,
        names=(*run.names, "score"),
        releases=run.releases + 1 if released else 0,
        outside=(*SEARCH_OUTSIDE, *[text for text in run.outside if text not in OUTSIDE]),
        **figures,
    )
