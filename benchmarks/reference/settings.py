"""Records of settings: what a row of the table is made of."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedmtl import Finetune
from fedmtl.algorithms import Algorithm

DELTA = 1e-5
SEEDS = (0, 1, 2, 3, 4)
"""Of the split, the start, the cohorts and the noise: scores of one seed are paired."""
TUNING = 10
"""The seed on whose validation rows settings are chosen; it is scored in no cell."""
EPSILONS = (1.0, 3.0, 10.0)
NO_NOISE = math.inf
NOTHING_SENT = 0.0
CANARIES = 200
CONFIDENCE = 0.999
"""Of a lower bound: with about a hundred of them, one that is above its epsilon is no accident."""

Unit = Literal["client", "record", "none"]
Trust = Literal["trusted", "secure", "local", "none"]
"""Who is trusted: a server, nobody with secure sums, nobody with each client's own noise; with
``"none"`` nothing is sent."""
Model = Literal["linear", "hidden", "automatic"]


@dataclass(frozen=True)
class Problem:
    """A data set.

    Attributes:
        name: key of its loader, and the first word of its rows.
        title: in tables.
        file: below the folder of the data; empty for data that come with scikit-learn.
        metric: key of a run's final scores.
        larger: True if a larger score is better.
        bias: True if linear models have one.
    """

    name: str
    title: str
    file: str
    metric: Literal["accuracy", "mse"]
    larger: bool
    bias: bool = True


@dataclass(frozen=True)
class Setting:
    """One of the settings that a row chooses from.

    Attributes:
        words: what differs from the other settings of the row.
        algorithm: with its solver; ``"auto"`` for automatic settings.
        clip: norm of what a client sends; None for the automatic one, or if nothing is sent.
        finetune: after the run, on the client's own rows.
    """

    words: str
    algorithm: Algorithm | Literal["auto"]
    clip: float | None = None
    finetune: Finetune | None = None


@dataclass(frozen=True)
class Row:
    """A row that is measured here.

    Attributes:
        name: word of the command.
        problem: the data.
        method: in tables.
        unit: what epsilon protects.
        trust: who is trusted.
        turns: the schedule, in words.
        schedule: of the run, or ``"auto"``.
        rounds: of the run, or ``"auto"``; the most activations if clients act one at a time.
        settings: that are tried on validation rows; equally many for each method.
        epsilons: the cells of the row.
        model: of every client; ``"hidden"`` has a hidden layer of 32 units.
        bands: True if the noise is correlated over rounds.
    """

    name: str
    problem: Problem
    method: str
    unit: Unit
    trust: Trust
    turns: str
    schedule: Any
    rounds: Any
    settings: tuple[Setting, ...]
    epsilons: tuple[float, ...]
    model: Model = "linear"
    bands: bool = False

    @property
    def command(self) -> str:
        """Returns the command that measures this row."""
        return f"python -m benchmarks.reference run {self.name}"

    @property
    def fingerprint(self) -> str:
        """Returns a hash of all settings: a cell of other settings is measured again."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def choices(self, epsilon: float) -> tuple[Setting, ...]:
        """Returns the settings that differ at an epsilon: without noise nothing is clipped."""
        if epsilon != NO_NOISE:
            return self.settings
        by_words = {one.words.split("; clip")[0]: one for one in self.settings}
        return tuple(replace(one, words=words, clip=None) for words, one in by_words.items())

    def quick(self) -> Row:
        """Returns this row with few rounds, two settings and its first and last epsilon."""
        rounds = self.rounds
        if isinstance(rounds, int):
            # In rounds everybody acts in each; activations are of one client each.
            fewest = 2
            if rounds > 200:
                fewest = 300
            rounds = min(rounds, fewest)
        ends = tuple(dict.fromkeys((self.epsilons[0], self.epsilons[-1])))
        return replace(self, rounds=rounds, settings=self.settings[:2], epsilons=ends)
