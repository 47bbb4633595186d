"""The audit: statistical and deterministic checks of what a run releases, through the production path.

    setup = Setup(privacy=ClientPrivacy(clip_norm=1.0, epsilon=4.0), plans=plans, schedule=sampler, steps=100)
    print(table(audit_channel(setup)))

No check proves privacy; each can only refute what the ledger's event claims. :func:`fedmtl.trainer.audit.audit_trainer`
runs them on a configuration, with the transcript check, and ``fedmtl audit`` prints the table.
"""

from .findings import Finding, any_refuted, table
from .setup import Claim, Claims, Clocks, Setup
from .suite import CHECKS, Effort, audit_channel

__all__ = [
    "CHECKS",
    "Claim",
    "Claims",
    "Clocks",
    "Effort",
    "Finding",
    "Setup",
    "any_refuted",
    "audit_channel",
    "table",
]
