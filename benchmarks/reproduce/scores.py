"""Scores of methods by seed, in one format for all studies, and the tables and intervals that are made of them.

A study writes a row for each setting, method, epsilon and seed, so that every table, interval and mark can be computed
again from the file.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from scipy.stats import t as student
from sweep import markdown

Role = Literal["local", "fedavg", "public", "baseline", "published", "new"]


@dataclass(frozen=True)
class Score:
    """The score of a method in one seed.

    Attributes:
        setting: the problem, such as ``"School, 139 schools"``.
        metric: what is measured on test rows, such as ``"accuracy"`` or ``"nMSE"``.
        larger: whether a larger score is better.
        role: ``"local"`` for tuned training alone, ``"fedavg"`` for FedAvg and FedAvg with finetuning, ``"public"`` for
            what public rows alone give, ``"published"`` for a method as its paper has it, ``"new"`` for one that is not
            in the paper, ``"baseline"`` for all others.
        method: its name in tables.
        epsilon: of the run; 0 where nothing is released, ``inf`` without privacy.
        seed: of rows, start, cohorts and noise; scores of the same seed are paired.
        score: of this run.
        better, equal, worse: shares of the clients that are better, equally and worse off than with training alone.
        worst_tenth: mean score over the tenth of the clients that score worst.
        chosen: the setting that was chosen, in words.
    """

    setting: str
    metric: str
    larger: bool
    role: Role
    method: str
    epsilon: float
    seed: int
    score: float
    better: float = math.nan
    equal: float = math.nan
    worse: float = math.nan
    worst_tenth: float = math.nan
    chosen: str = ""


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95% interval (Student's t); NaN for a single value."""
    values = list(values)
    if len(values) < 2:
        return values[0], math.nan
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values), half


def by_client(own: Mapping[str, float], local: Mapping[str, float], *, larger: bool) -> dict[str, float]:
    """Return ``better``, ``equal``, ``worse`` and ``worst_tenth`` of clients' scores beside those of training alone."""
    sign = 1.0 if larger else -1.0
    gains = [sign * (own[client] - local[client]) for client in local]
    ordered = sorted(own.values(), reverse=not larger)
    return {
        "better": mean(gain > 0 for gain in gains),
        "equal": mean(gain == 0 for gain in gains),
        "worse": mean(gain < 0 for gain in gains),
        "worst_tenth": mean(ordered[: math.ceil(len(ordered) / 10)]),
    }


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """Write one line a score, with seven significant digits."""
    names = [field.name for field in fields(Score)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for score in scores:
            row = asdict(score)
            writer.writerow([_text(row[name]) for name in names])


def renew_scores(path: Path, scores: Sequence[Score]) -> list[Score]:
    """Write ``scores`` and keep those of other settings and methods in the file; return all of them."""
    new = {(score.setting, score.method) for score in scores}
    kept = [score for score in read_scores(path) if (score.setting, score.method) not in new] if path.exists() else []
    write_scores(path, [*kept, *scores])
    return [*kept, *scores]


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.7g}"
    return value


def read_scores(path: Path) -> list[Score]:
    """Read what :func:`write_scores` wrote."""
    with open(path, newline="", encoding="utf-8") as file:
        return [_score(row) for row in csv.DictReader(file)]


def _score(row: dict[str, str]) -> Score:
    numbers = {
        name: float(row[name] or "nan") for name in ("epsilon", "score", "better", "equal", "worse", "worst_tenth")
    }
    return Score(
        setting=row["setting"], metric=row["metric"], larger=row["larger"] == "1", role=row["role"],  # type: ignore[arg-type]
        method=row["method"], seed=int(row["seed"]), chosen=row["chosen"], **numbers,
    )  # fmt: skip


def difference(own: Iterable[Score], other: Iterable[Score]) -> tuple[float, float]:
    """Return the mean of the paired differences own - other over their common seeds, and half its 95% interval."""
    a, b = ({score.seed: score.score for score in scores} for scores in (own, other))
    return interval(a[seed] - b[seed] for seed in sorted(a.keys() & b.keys()))


def mark(own: Sequence[Score], other: Sequence[Score]) -> str:
    """Return ▲ where ``own`` is better than ``other`` and the 95% interval of the difference leaves out 0, ▼ where it
    is worse by the same rule, else nothing."""
    gain, half = difference(own, other)
    if not abs(gain) > half:
        return ""
    return "▲" if (gain > 0) == own[0].larger else "▼"


def table(scores: Sequence[Score], setting: str, *, digits: int = 3) -> str:
    """Return a table of a setting: a line a method, a column an epsilon, marks against training alone, best in bold.

    What does not depend on epsilon (training alone, public rows alone) has its score in every column.
    """
    own = [score for score in scores if score.setting == setting]
    methods = list(dict.fromkeys(score.method for score in own))
    epsilons = sorted({score.epsilon for score in own if 0 < score.epsilon < math.inf})
    cells = {
        (method, epsilon): [s for s in own if s.method == method and s.epsilon in (epsilon, 0.0)]
        for method in methods
        for epsilon in epsilons
    }
    methods = [method for method in methods if any(cells[method, epsilon] for epsilon in epsilons)]
    local = next((score.method for score in own if score.role == "local"), None)
    sign = 1.0 if own[0].larger else -1.0

    def value_of(method: str, epsilon: float) -> float:
        return sign * mean(score.score for score in cells[method, epsilon])

    best = {e: max((m for m in methods if cells[m, e]), key=lambda m, e=e: value_of(m, e)) for e in epsilons}
    lines = []
    for method in methods:
        line = [method]
        for epsilon in epsilons:
            found = cells[method, epsilon]
            if not found:
                line.append("")
                continue
            value, half = interval(score.score for score in found)
            text = f"{value:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
            text = f"**{text}**" if best[epsilon] == method else text
            marked = mark(found, cells[local, epsilon]) if local and method != local and len(found) > 1 else ""
            line.append(f"{text} {marked}".strip())
        lines.append(line)
    return markdown(["method", *(f"epsilon {epsilon:g}:" for epsilon in epsilons)], lines)
