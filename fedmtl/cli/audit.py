"""``fedmtl audit``: check what a configuration would claim, and print one table."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from .config import build
from .options import command_parser, short_run_options

REFUTED = 1

_EPILOG = """\
examples
  fedmtl audit                                        the main job
  fedmtl audit algorithm=fedavg schedule=fixed        any other configuration, written as for training
  fedmtl audit privacy.source=secure                  with the coins of the operating system

No check proves privacy: a verdict is that the claim could not be refuted at a level, or that it was.
"""


def audit(words: list[str], debug: bool) -> int:
    """Run every check on a configuration.

    Args:
        words: overrides as for training, and ``--seed``, ``--rounds``, ``--config-dir``.
        debug: unused; errors are handled by the caller.

    Returns:
        0 if nothing was refuted, else 1.
    """
    description = "Check the noise, the clipping, the cohorts and the charges of a configuration by experiment."
    parser = command_parser("audit", description, _EPILOG)
    parser.add_argument("--seed", type=int, default=0, help="of the audit (default 0)")
    options, config = short_run_options(parser, words, rounds=10, what="rounds of the transcript check")

    from ..privacy.audit import any_refuted, table
    from ..trainer.audit.suite import audit_trainer

    began = time.monotonic()
    with TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        trainer = build(config, Path(folder))
        findings = audit_trainer(trainer, seed=options.seed, rounds=options.rounds)
    print(table(findings))
    refuted, checked = sum(f.refuted for f in findings), sum(not f.skipped for f in findings)
    seconds = time.monotonic() - began
    print(f"\n{refuted} of {checked} checks refuted their claim, in {seconds:.0f} s. The others prove nothing.")
    return REFUTED if any_refuted(findings) else 0
