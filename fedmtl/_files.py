"""Files that are there whole or not at all: written to a temporary name beside the target, synced and renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``; at any crash the old or the new file is there, whole.

    The temporary name is always the same, so the next write clears what a crash has left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
