"""The audit: experiments that can refute the claims of a run, and the check of its files.

    print(table(audit_trainer(Trainer(...))))   # every release, and the run around them
    verify("outputs/my-run").text()             # the files of a finished run, without its data
    Trainer(..., audit=Interval(canaries=200))  # a lower bound on epsilon, measured in the run

No check proves privacy; each can only refute the claim of the ledger's event. :func:`audit_channel`
checks the releases alone, through the production path, and :func:`audit_trainer` the whole run: the
transcript of the public state, the independence of the clients, the start and the end of the run.

Each name is imported on first use: the statistics behind the checks take a second to import, and a
run with canaries needs them only at its end.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .claim import Claim
    from .findings import Finding, any_refuted, table
    from .lower_bound import Interval
    from .release_claims import ReleaseClaims
    from .release_suite import CHECKS, Effort, audit_channel
    from .run_suite import audit_trainer
    from .setup import Clocks, Setup
    from .verification import Verification, verify

_MODULES = {
    "CHECKS": "release_suite",
    "Claim": "claim",
    "ReleaseClaims": "release_claims",
    "Clocks": "setup",
    "Effort": "release_suite",
    "Finding": "findings",
    "Interval": "lower_bound",
    "Setup": "setup",
    "Verification": "verification",
    "any_refuted": "findings",
    "audit_channel": "release_suite",
    "audit_trainer": "run_suite",
    "table": "findings",
    "verify": "verification",
}
__all__ = [
    "CHECKS",
    "Claim",
    "Clocks",
    "Effort",
    "Finding",
    "Interval",
    "ReleaseClaims",
    "Setup",
    "Verification",
    "any_refuted",
    "audit_channel",
    "audit_trainer",
    "table",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
