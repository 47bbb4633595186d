"""The job of a sweep: its name and its printed line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .._rounding import number_text, rounded_up

if TYPE_CHECKING:
    from ..trainer import Result


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        number: its place, from 0.
        of: the number of jobs; None if a configuration file or a sweeper of a plugin chooses some.
        words: the settings that differ between them.
        sweep: the folder of the sweep.
    """

    number: int
    of: int | None
    words: str
    sweep: Path

    def __str__(self) -> str:
        of = ""
        if self.of is not None:
            of = f"/{self.of}"
        return f"[{self.number + 1}{of}] {self.words}".rstrip()

    def line(self, result: Result, began: float, folder: Path) -> str:
        """Returns the printed line of a finished job."""
        score = f"{result.metric.replace('_', ' ')} {number_text(result.final[result.metric])}"
        if result.finetuned is not None:
            score += ", finetuned"
        if result.lost:
            score += ", training diverged"
        if result.beside_local is not None:
            better, _, worse = result.beside_local
            score += f" ({better:.0%} of the clients better off than alone, {worse:.0%} worse)"
        seconds = time.monotonic() - began
        return (
            f"{self}: {score}, epsilon {rounded_up(result.epsilon, 3)}, {seconds:.0f} s, {folder}"
        )
