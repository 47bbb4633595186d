"""A row with a figure from outside: a record of where a study has its score, and whose figure stands beside it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.reproduce.intervals import interval

from .measure import recorded
from .records import COLUMNS, Line, number

BENCHMARKS = Path(__file__).resolve().parents[1]
PFLLIB = "PFLlib, its own clients and servers, run here on the same batches"
PFL = "Apple's pfl, its own FedAvg, clip and noise, run here on the same cohorts and batches"


@dataclass(frozen=True)
class Outside:
    """A figure that somebody else has published.

    Attributes:
        value: the number; None of a figure that is only drawn, or that stands in ``column``.
        source: authors, year, and the table or figure.
        column: of the CSV of the study, if somebody else's program or a closed form was computed
            there.
    """

    value: float | None
    source: str
    column: str = ""


@dataclass(frozen=True)
class Place:
    """Where a study has what it measured.

    Attributes:
        folder: of the study, below ``benchmarks``.
        file: its CSV.
        where: the texts of its columns that choose the lines.
        value: the column of the score.
        half: the column of half of its interval; empty where each line is one seed, or a study
            has none.
    """

    folder: str
    file: str
    where: tuple[tuple[str, str], ...]
    value: str = "score"
    half: str = ""

    @property
    def name(self) -> str:
        """Returns the CSV, below the root of the repository."""
        return f"benchmarks/{self.folder}/{self.file}"

    def lines(self) -> list[dict[str, str]]:
        """Returns the lines that are meant.

        Raises:
            ValueError: the CSV has no such line.
        """
        with open(BENCHMARKS.parent / self.name, newline="", encoding="utf-8") as file:
            found = [
                one
                for one in csv.DictReader(file)
                if all(one[name] == text for name, text in self.where)
            ]
        if not found:
            raise ValueError(f"{self.name} has no line with {dict(self.where)}.")
        return found

    def found(self) -> tuple[float, float, int]:
        """Returns the mean, half of its 95% interval and the number of seeds."""
        lines = self.lines()
        if self.half:
            (one,) = lines
            return float(one[self.value]), float(one[self.half]), int(one["seeds"])
        mean, half = interval(float(one[self.value]) for one in lines)
        return mean, half, len(lines)


@dataclass(frozen=True)
class Study:
    """A row that a study has measured.

    Attributes:
        name: word of the command, and of the row.
        data: in tables.
        method: in tables.
        unit, relation, trust, adversary, amplification, accountant: what epsilon means.
        epsilon, delta: as text; an empty epsilon is the column of the CSV.
        metric: of the score; ``larger`` is True if a larger one is better.
        place: in which the study has its score.
        outside: the figure from outside.
        command: of the study, which measures it again.
        figure: of the study; empty for none.
        tuned: what was chosen, and on what.
        note: what differs from the source.
        repeated: of what the score is the mean; empty for the seeds of the CSV.
    """

    name: str
    data: str
    method: str
    unit: str
    relation: str
    trust: str
    adversary: str
    amplification: str
    epsilon: str
    delta: str
    metric: str
    larger: bool
    place: Place
    outside: Outside
    command: str
    figure: str
    tuned: str
    note: str
    accountant: str = "pld"
    repeated: str = ""

    def line(self) -> Line:
        """Returns the line of the table."""
        mean, half, seeds = self.place.found()
        first = self.place.lines()[0]
        theirs = self.outside.value
        if self.outside.column:
            theirs = fmean(float(one[self.outside.column]) for one in self.place.lines())
        found = {
            "row": self.name,
            "data": self.data,
            "method": self.method,
            "unit": self.unit,
            "relation": self.relation,
            "trust": self.trust,
            "adversary": self.adversary,
            "epsilon": self.epsilon or first["epsilon"],
            "delta": self.delta,
            "amplification": self.amplification,
            "accountant": self.accountant,
            "metric": self.metric,
            "larger": str(int(self.larger)),
            "seeds": self.repeated or f"{seeds} of the study",
            "mean": number(mean),
            "half": number(half, 3),
            "tuned": self.tuned,
            "outside": number(theirs),
            "outside_source": self.outside.source,
            "command": self.command,
            "study": self.place.name,
            "figure": self.figure,
            "note": "; ".join(filter(None, (self.note, self.differences()))),
            # a CSV that says so knows it better than the log does
            "commit": first.get("commit") or recorded(self.place.name),
        }
        return {name: found.get(name, "") for name in COLUMNS}

    def differences(self) -> str:
        """Returns how another program ended on the same work, in words; nothing for other sources."""
        if self.outside.source not in (PFLLIB, PFL):
            return ""
        lines = self.place.lines()
        largest = f"the largest difference of a parameter is {max(float(one['difference']) for one in lines):.2g}"
        if self.outside.source == PFLLIB or self.epsilon == "inf":
            return largest
        _, half = interval(float(one["pfl"]) for one in lines)
        gain, spread = interval(float(one["fedmtl"]) - float(one["pfl"]) for one in lines)
        return (
            f"pfl has ± {half:.2g}, and fedmtl less pfl, paired, is {gain:.2g} ± {spread:.2g}; pfl's "
            f"accountant has {lines[0]['account_pfl']} where that of fedmtl has "
            f"{lines[0]['account_fedmtl']}"
        )
