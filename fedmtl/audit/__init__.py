"""The audit: experiments that can refute the claims of a run, and the check of its files.

    print(table(audit_trainer(Trainer(...))))   # every release, and the run around them
    verify("outputs/my-run").text()             # the files of a finished run, without its data
    Trainer(..., audit=Interval(canaries=200))  # a lower bound on epsilon, measured in the run itself

No check proves privacy; each can only refute what the ledger's event claims. :func:`audit_channel` checks the releases
alone, through the production path, and :func:`audit_trainer` the whole run: the transcript of an algorithm, what is
each client's own, starts and stops.
"""

from .findings import Finding, any_refuted, table
from .lower_bound import Interval
from .release_suite import CHECKS, Effort, audit_channel
from .run_suite import audit_trainer
from .setup import Claim, Claims, Clocks, Setup
from .verification import Verification, verify

__all__ = [
    "CHECKS",
    "Claim",
    "Claims",
    "Clocks",
    "Effort",
    "Finding",
    "Interval",
    "Setup",
    "Verification",
    "any_refuted",
    "audit_channel",
    "audit_trainer",
    "table",
    "verify",
]
