"""The CSV: a line a cell, written as soon as it is measured, with means and paired intervals."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.reproduce.intervals import interval
from fedmtl.privacy import PrivacyReport

from .measure import commit, processor
from .settings import NO_NOISE, NOTHING_SENT, TUNING, Row
from .training import Cell

COLUMNS = (
    "row", "data", "method", "unit", "relation", "trust", "adversary", "turns", "epsilon", "delta",
    "amplification", "accountant", "metric", "larger", "seeds", "scores", "mean", "half",
    "gain_local", "gain_local_half", "gain_fedavg", "gain_fedavg_half", "worst_tenth", "tuned", "chosen",
    "lower_bound", "seconds", "memory_mib", "outside", "outside_source", "command", "study",
    "figure", "note", "commit", "processor", "settings",
)  # fmt: skip
Line = dict[str, str]

ADVERSARIES = {
    ("none", "none"): "nobody: nothing is sent",
    ("client", "trusted"): (
        "clients and public: all other clients together, who see every released mean and the "
        "models; the server sees each update and is trusted"
    ),
    ("client", "secure"): (
        "server, clients and public: the server with a third of the clients, who see noised sums "
        "and who takes part"
    ),
    ("client", "local"): (
        "server, clients and public: everybody else together, who see each noised update"
    ),
    ("record", "local"): (
        "server, clients and public: everybody but the owner of the record, who see each noised "
        "update or gradient; no server is trusted"
    ),
}
PEERS = "peers and public: all other agents together, who see each noised model; there is no server"


def number(value: float | None, digits: int = 6) -> str:
    """Returns a number as text, and nothing for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.{digits}g}"


def adversary(row: Row) -> str:
    """Returns who sees what, in words."""
    if row.method == "peer averaging":
        return PEERS
    return ADVERSARIES[row.unit, row.trust]


def amplification(report: PrivacyReport) -> str:
    """Returns what is kept secret of who or what takes part, and the word ``none`` else."""
    if report.sampler.startswith("Poisson,"):
        return f"secret cohorts ({report.sampler})"
    records = report.records or ""
    if records.startswith("Poisson") and "q = 1 to 1" not in records:
        return f"secret batches ({records})"
    return "none"


def tuned(row: Row, epsilon: float) -> str:
    """Returns the settings that were tried, and that no epsilon covers the choice."""
    tried = row.choices(epsilon)
    if len(tried) == 1:
        return "nothing"
    words = " | ".join(one.words for one in tried)
    return f"{len(tried)} settings on validation rows of seed {TUNING}, not private: {words}"


def line(row: Row, epsilon: float, cell: Cell) -> Line:
    """Returns the line of a cell, without differences to other rows."""
    report = cell.results[0].privacy
    noised = epsilon not in (NO_NOISE, NOTHING_SENT)
    found = {
        "row": row.name,
        "data": row.problem.title,
        "method": row.method,
        "unit": row.unit,
        "trust": row.trust,
        "adversary": adversary(row),
        "turns": row.turns,
        "epsilon": number(epsilon),
        "metric": row.problem.metric,
        "larger": str(int(row.problem.larger)),
        "seeds": " ".join(map(str, cell.scores)),
        "scores": " ".join(number(score, 7) for score in cell.scores.values()),
        "worst_tenth": number(cell.worst_tenth),
        "tuned": tuned(row, epsilon),
        "chosen": cell.chosen,
        "lower_bound": number(cell.lower_bound, 3),
        "seconds": number(cell.seconds, 3),
        "memory_mib": f"{cell.memory:.0f}",
        "command": row.command,
        "commit": commit(),
        "processor": processor(),
        "settings": row.fingerprint,
    }
    if noised:
        relation = report.relation
        if row.unit == "client" and row.trust == "local":
            # Each client has noise of its own, so that taking part is no secret.
            relation = "zero_out"
        found |= {
            "relation": relation.replace("_", "-"),
            "delta": number(report.delta),
            "amplification": amplification(report),
            "accountant": report.accountant,
        }
    return {name: found.get(name, "") for name in COLUMNS}


def scores_of(one: Mapping[str, str]) -> dict[str, float]:
    """Returns the scores of a line by seed."""
    return dict(zip(one["seeds"].split(), map(float, one["scores"].split()), strict=True))


def gain(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[float, float]:
    """Returns how much better a line is than another over their common seeds, with half of the 95%
    interval of the paired difference."""
    sign = 1.0 if one["larger"] == "1" else -1.0
    own, theirs = scores_of(one), scores_of(other)
    return interval(sign * (own[seed] - theirs[seed]) for seed in own if seed in theirs)


def compared(lines: Sequence[Line], rows: Sequence[Row]) -> list[Line]:
    """Returns the lines with means, and with differences to Local and FedAvg of the same data.

    Args:
        lines: with scores by seed; those without are left as they are.
        rows: the settings, which name the data and the unit.
    """
    by_name = {row.name: row for row in rows}
    found = []
    for one in lines:
        row = by_name.get(one["row"])
        if row is None or not one["scores"]:
            found.append(one)
            continue
        mean, half = interval(scores_of(one).values())
        new = one | {"mean": number(mean), "half": number(half, 3)}
        for name, other in (("local", _local(row, lines)), ("fedavg", _fedavg(row, one, lines))):
            texts = ["", ""]
            if other is not None and other["row"] != one["row"]:
                texts = [number(value, 4) for value in gain(one, other)]
            new |= {f"gain_{name}": texts[0], f"gain_{name}_half": texts[1]}
        found.append(new)
    return found


def _local(row: Row, lines: Sequence[Line]) -> Line | None:
    """Returns the line of training alone on the same data, which has no epsilon."""
    same = [one for one in lines if one["data"] == row.problem.title and one["method"] == "Local"]
    return next(iter(same), None)


def _fedavg(row: Row, one: Line, lines: Sequence[Line]) -> Line | None:
    """Returns the line of FedAvg of the same data, unit and epsilon."""
    wanted = (row.problem.title, "FedAvg", row.unit, one["epsilon"])
    same = [
        each
        for each in lines
        if (each["data"], each["method"], each["unit"], each["epsilon"]) == wanted
    ]
    return next(iter(same), None)


def read(path: Path) -> list[Line]:
    """Returns the lines of a CSV; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, lines: Sequence[Line]) -> None:
    """Writes a CSV whole under another name, which then takes its place: a crash loses nothing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text.getvalue(), encoding="utf-8")
    part.replace(path)


def finished(row: Row, epsilon: float, seeds: Sequence[int], lines: Sequence[Line]) -> bool:
    """Returns True if a cell has been measured with these settings and seeds."""
    wanted = (row.name, number(epsilon), row.fingerprint, " ".join(map(str, seeds)))
    names = ("row", "epsilon", "settings", "seeds")
    return any(tuple(one[name] for name in names) == wanted for one in lines)


def renewed(lines: Sequence[Line], new: Line, order: Sequence[str]) -> list[Line]:
    """Returns the lines with a new one in its place.

    Args:
        lines: of the file.
        new: which replaces the line of the same row and epsilon.
        order: of the rows; lines of other rows are dropped.
    """
    key = (new["row"], new["epsilon"])
    kept = [one for one in lines if (one["row"], one["epsilon"]) != key and one["row"] in order]
    return sorted([*kept, new], key=lambda one: (order.index(one["row"]), float(one["epsilon"])))
