"""``fedmtl verify``: what the files of a finished run confirm."""

from __future__ import annotations

import json
from pathlib import Path

from .options import command_parser

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
    parser = command_parser("verify", "Check a finished run by its files, line by line.", _EPILOG)
    parser.add_argument("folder", type=Path, help="the run's folder, such as outputs/2025-01-31/12-00-00")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of lines")
    options = parser.parse_args(words)

    from ..trainer.verify import verify as check

    verification = check(options.folder)
    print(json.dumps(verification.to_dict(), indent=2) if options.json else verification.text())
    return 0 if verification.fits else DOES_NOT_FIT
