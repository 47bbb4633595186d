"""Where and on what a cell was measured: commit, processor and memory."""

from __future__ import annotations

import platform
import resource
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("fedmtl", "benchmarks/reference", "benchmarks/reproduce/comparison/settings.py")


def commit() -> str:
    """Returns the commit of the checkout, with a plus sign if its code has been changed since."""
    found = _git("rev-parse", "--short=12", "HEAD")
    if not found:
        return "unknown"
    changed = _git(
        "status", "--porcelain", "--untracked-files=all", "--", *(f"{path}" for path in _CODE)
    )
    # The table and its picture are results: writing them changes no code.
    code = [line for line in changed.splitlines() if line.endswith(".py")]
    if code:
        return f"{found}+"
    return found


def recorded(path: str) -> str:
    """Returns the commit that last changed a file.

    Args:
        path: below the root of the repository.
    """
    return _git("log", "-1", "--format=%H", "--", path)[:12]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return ""
    return done.stdout.strip()


def processor() -> str:
    """Returns the model of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    return platform.processor() or platform.machine()


def reset_peak() -> None:
    """Forgets the most memory that this process has had so far, where Linux allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # Then the figure is that of the whole process.
        return


def peak_memory() -> float:
    """Returns the most memory that this process has had since the last reset, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    # Systems without /proc count bytes here.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
