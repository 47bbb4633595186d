"""``fedmtl audit``: check what a configuration would claim, and print one table."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import ConfigError
from .config import build, check, compose, resolve

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
    parser = argparse.ArgumentParser(
        prog="fedmtl audit",
        description="Check the noise, the clipping, the cohorts and the charges of a configuration by experiment.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as for training")
    parser.add_argument("--seed", type=int, default=0, help="of the audit (default 0)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the transcript check (default 10)")
    parser.add_argument("-cd", "--config-dir", type=Path, help="a folder with your own groups, searched first")
    options = parser.parse_intermixed_args(words)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be a whole number of at least 1.")
    check(options.overrides, extra=options.config_dir)

    from ..privacy.audit import any_refuted, table
    from ..trainer.audit.suite import audit_trainer

    began = time.monotonic()
    with TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        trainer = build(resolve(compose(tuple(options.overrides), options.config_dir)), Path(folder))
        findings = audit_trainer(trainer, seed=options.seed, rounds=options.rounds)
    print(table(findings))
    refuted, checked = sum(f.refuted for f in findings), sum(not f.skipped for f in findings)
    seconds = time.monotonic() - began
    print(f"\n{refuted} of {checked} checks refuted their claim, in {seconds:.0f} s. The others prove nothing.")
    return REFUTED if any_refuted(findings) else 0
