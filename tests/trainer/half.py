"""A file of which half of what is written arrives before the process ends."""

from collections.abc import Callable
from typing import Any


def by_halves(file: Any, stop: Callable[[], None]) -> Any:
    """Make a file write half of what it is given, call ``stop``, which may not return, and write the rest."""
    write = file.write

    def halves(content: bytes) -> None:
        write(content[: len(content) // 2])
        file.flush()
        stop()
        write(content[len(content) // 2 :])

    file.write = halves
    return file
