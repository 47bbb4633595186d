"""``python -m fedmtl`` is the ``fedmtl`` command."""

from __future__ import annotations

import sys

from .errors import MissingExtra


def main() -> int:
    """Runs the command and returns its exit code, 2 if its packages are not installed."""
    # Imported here, so that a missing package is a line and no traceback.
    try:
        from .cli import main as command
    except MissingExtra as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return command()


if __name__ == "__main__":
    sys.exit(main())
