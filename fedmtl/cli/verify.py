"""``fedmtl verify``: what the files of a finished run confirm."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DOES_NOT_FIT = 1

_EPILOG = """\
The checks: the hashes of all files, the chain of hashes of the ledger and its head in privacy.json and in the
checkpoint, every charge against the schedule, epsilon from below by a second accountant, the last released values on
their public grid, and the shared model against the checkpoint. What cannot be confirmed is said to be not covered. With
--json the output can travel with a model as its privacy certificate; it holds nothing private.

Files that fit prove that nothing was altered by mistake or by someone without the whole folder. Whoever holds the whole
folder can write it anew, but not so that it fits a head in a privacy.json that was published before.
"""


def verify(words: list[str], debug: bool) -> int:
    """Check a finished run by its files.

    Args:
        words: the run's folder, and ``--json``.
        debug: unused; errors are handled by the caller.

    Returns:
        0 if everything that was checked fits, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="fedmtl verify",
        description="Check a finished run by its files, line by line.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="the run's folder, such as outputs/2025-01-31/12-00-00")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of lines")
    options = parser.parse_args(words)

    from ..trainer.verify import verify as check

    found = check(options.folder)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found.text())
    return 0 if found.fits else DOES_NOT_FIT
