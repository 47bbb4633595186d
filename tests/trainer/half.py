"""A file of which half of what is written arrives before the process ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Half:
    """Writes half of what it is given, calls ``stop``, which may not return, and writes the rest."""

    def __init__(self, file: Any, stop: Callable[[], None]) -> None:
        self.file, self.stop = file, stop

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        self.stop()
        self.file.write(content[len(content) // 2 :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
