"""``python -m fedmtl`` is the ``fedmtl`` command."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
