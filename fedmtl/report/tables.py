"""One table from a folder of runs.

Only ``private/result.json`` and ``public/privacy.json`` of each run are read, so a report costs no data, no
model and no privacy. A run's baselines become rows of their own, marked as comparisons.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group as RichGroup
from rich.console import RenderableType
from rich.table import Table

from .._files import read_json, write_bytes
from .._rounding import number_text, rounded_up
from ..errors import DataError
from ._names import CHOICE_NOT_COVERED, title_of

THAN_LOCAL = ("better_than_local", "as_local", "worse_than_local")
METRICS = (
    *("accuracy", "recall_at_5", "mse", "median", "worst_tenth", "spread"),
    *THAN_LOCAL,
    *("weighted_accuracy", "weighted_mse", "global_accuracy", "global_mse"),
    *("weighted_recall_at_5", "global_recall_at_5"),
)
"""What every result may have: the main metric over clients, its distribution, and the comparison with local models.
What a run was asked to measure beside follows in columns of its own."""
PRINTED = METRICS[:9]
DISTRIBUTION = ("median", "worst_tenth", "spread", "clients", *THAN_LOCAL)
"""What follows the name of a metric that was asked for."""
SHARED = ("data", "clients", "planned_rounds", "seed", "unit")  # of a run and of its baselines
DATA = ("data", "clients")
METHOD = (*DATA, "lam", "mu", "update", "server_lr", "finetune", "sampler", "planned_rounds")
PRIVACY = ("clip_norm", "relation", "observer", "guarantee", "accountant", "source")  # of what is released


@dataclass(frozen=True)
class Row:
    """What one method reached in one run.

    ``epsilon`` is 0 where nothing is released and inf where nothing is protected; ``metrics`` holds the numbers of
    ``METRICS``, of those that were asked for and of their distribution that the result has, by name; ``settings`` holds
    those of ``METHOD`` and ``PRIVACY`` that it names, as text. ``asked`` are the names of what was asked for.
    """

    run: str
    algorithm: str
    comparison: bool
    unit: str
    epsilon: float
    delta: float | None
    seed: str
    rounds: int | None
    stopped: str
    metrics: tuple[tuple[str, float], ...]
    noise_multiplier: float | None
    settings: tuple[tuple[str, str], ...]
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Rows that differ in nothing but their seed: a mean, a deviation and a range for each metric."""

    algorithm: str
    unit: str
    epsilon: float
    delta: float | None
    settings: tuple[tuple[str, str], ...]
    seeds: int
    mean: dict[str, float]
    deviation: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    asked: tuple[str, ...] = ()

    @property
    def data(self) -> str:
        """The data's name and number of clients; results on different data do not compare."""
        settings = dict(self.settings)
        words = [settings[key] + (" clients" if key == "clients" else "") for key in DATA if key in settings]
        return ", ".join(words)

    def label(self, varying: Sequence[str]) -> str:
        """Return the method's name with those of its settings that vary between the groups of a report."""
        settings = dict(self.settings)
        if "sampler" in settings:  # "Poisson, expected cohort 10 of 50 clients (q = 0.2)" -> "Poisson 10"
            settings["sampler"] = re.sub(r", (?:expected )?cohort (\S+) of .*", r" \1", settings["sampler"])
        words = [f"{key.removeprefix('planned_')}={settings[key]}" for key in varying if settings.get(key)]
        return " ".join([title_of(self.algorithm), *words])


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[Path], list[Path]]:
    """Return all run folders at or below ``folders``: the finished ones and those that stopped before their end.

    Raises:
        DataError: a folder does not exist.
    """
    finished: dict[Path, None] = {}
    unfinished: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; name a run's folder or one that holds runs.")
        for here, below, _ in os.walk(folder):
            below.sort()
            if "private" not in below:
                continue
            below[:] = [name for name in below if name not in ("private", "public", "baselines")]
            private = Path(here) / "private"
            if (private / "result.json").is_file():
                finished[Path(here)] = None
            elif (private / "config.yaml").is_file() or (private / "checkpoint.safetensors").is_file():
                unfinished[Path(here)] = None
    return list(finished), list(unfinished)


def read_rows(run: Path) -> list[Row]:
    """Return the rows of one finished run: its own (one for each of its replicates), then one for each baseline.

    Raises:
        DataError: a file is not valid JSON or lacks the algorithm; the message names it.
    """
    result = read_json(run / "private" / "result.json")
    protection = run / "public" / "privacy.json"
    privacy = read_json(protection) if protection.is_file() else {}
    baselines = result.get("baselines") or {}
    if not isinstance(baselines, dict):
        raise DataError(f"{run / 'private' / 'result.json'}: baselines must be a mapping of name to result.")
    shared = {key: result[key] for key in SHARED if key in result}
    rows = [_row(run, privacy | result | own, comparison=False) for own in _runs(run, result)]
    for name, outcome in baselines.items():
        rows.append(_row(run, privacy | shared | {"algorithm": name} | outcome, comparison=True))
    return rows


def _runs(run: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the replicates of a run have in place of the run's own epsilon, seed and numbers; one empty mapping
    where it has none."""
    several, bands = result.get("replicates"), result.get("bands")
    if several is None:
        return [{}]
    try:
        spent = {band["budget"]: band["epsilon"] for band in bands or ()}
        seed = result.get("seed", "")
        return [one | {"epsilon": spent[one["budget"]], "seed": f"{seed}.{place}"} for place, one in enumerate(several)]
    except (KeyError, TypeError) as error:
        raise DataError(f"{run / 'private' / 'result.json'}: replicates and bands do not fit: {error!r}.") from error


def collect(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[Row], list[Path]]:
    """Return the rows of every finished run under ``folders``, without exact repeats, and the unfinished runs.

    A sweep trains the same baseline again in many of its runs; what is the same in everything but the run's
    folder is one row.

    Raises:
        DataError: no finished run, or a file that cannot be read.
    """
    folders = [Path(folder) for folder in folders]
    finished, unfinished = find_runs(folders)
    if not finished:
        names = ", ".join(map(str, folders))
        hint = f"; unfinished: {unfinished[0]} (fedmtl resume {unfinished[0]})" if unfinished else ""
        raise DataError(f"no finished run under {names} (a finished run has private/result.json){hint}.")
    rows: dict[Row, Row] = {}
    for run in finished:
        for row in read_rows(run):
            rows.setdefault(replace(row, run="", comparison=False, noise_multiplier=None), row)
    return list(rows.values()), unfinished


def group(rows: Iterable[Row]) -> list[Group]:
    """Average rows that differ only in their seed; ordered by data, unit, method, settings and epsilon (the largest of
    the averaged rows, which agree to six decimals). Rows of one seed are never averaged."""
    members: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row.unit, row.algorithm, row.settings, round(row.epsilon, 6), row.delta)
        place = 0  # runs of one seed differ in a setting that no result names, as baselines of two methods do
        while row.seed and any(row.seed == other.seed for other in members.get((*key, place), ())):
            place += 1
        members.setdefault((*key, place), []).append(row)
    groups = []
    for (unit, algorithm, settings, _, delta, _), same in members.items():
        each = [dict(row.metrics) for row in same]
        names = dict.fromkeys(name for one in each for name in one)
        columns = {name: [one.get(name, math.nan) for one in each] for name in names}
        groups.append(
            Group(
                algorithm=algorithm,
                unit=unit,
                epsilon=max(row.epsilon for row in same),
                delta=delta,
                settings=settings,
                seeds=len(same),
                mean={name: sum(values) / len(values) for name, values in columns.items()},
                deviation={name: _deviation(values) for name, values in columns.items()},
                low={name: min(values) for name, values in columns.items()},
                high={name: max(values) for name, values in columns.items()},
                asked=tuple(dict.fromkeys(name for row in same for name in row.asked)),
            )
        )
    return sorted(groups, key=lambda g: (g.data, g.unit, g.algorithm, g.settings, g.epsilon, g.delta or 0.0))


def varying_settings(groups: Sequence[Group]) -> list[str]:
    """Return the settings that tell groups of one method, unit and data apart."""
    varying: dict[str, None] = {}
    by_method: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for one in groups:
        by_method.setdefault((one.algorithm, one.unit, one.data), []).append(dict(one.settings))
    for settings in by_method.values():
        for key in (*METHOD[len(DATA) :], *PRIVACY):
            if len({mine[key] for mine in settings if key in mine}) > 1:
                varying[key] = None
    return list(varying)


def csv_text(rows: Sequence[Row]) -> str:
    """Return every row at full precision, one column a setting; the machine-readable form of the report."""
    keys = [key for key in METHOD + PRIVACY if any(key in dict(row.settings) for row in rows)]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    fixed = ["run", "algorithm", "comparison", "unit", "epsilon", "delta", "seed", "rounds", "stopped"]
    names = [*METRICS, *dict.fromkeys(name for row in rows for name, _ in row.metrics if name not in METRICS)]
    writer.writerow([*fixed, *names, "noise_multiplier", *keys])
    for row in rows:
        settings = dict(row.settings)
        values = [getattr(row, name) for name in fixed]
        metrics = dict(row.metrics)
        values += [
            *(metrics.get(name) for name in names),
            row.noise_multiplier,
            *(settings.get(key, "") for key in keys),
        ]
        writer.writerow(["" if value is None or value != value else value for value in values])
    return stream.getvalue()


def headings(groups: Sequence[Group]) -> list[str]:
    """Column titles of the printed table; metrics that no group has are left out."""
    fixed = ["method", "data", "protects", "epsilon", "delta", "runs"]
    return fixed + [name.replace("_", " ") for name in _shown(groups)]


def cells(groups: Sequence[Group]) -> list[list[str]]:
    """Return the printed table: one line a group, mean and (over several seeds) standard deviation."""
    varying, shown = varying_settings(groups), _shown(groups)
    return [
        [
            one.label(varying),
            one.data or "-",
            one.unit or "-",
            epsilon_text(one.epsilon),
            "-" if one.delta is None else rounded_up(one.delta, 3),
            str(one.seeds),
            *(_mean_text(one, name) for name in shown),
        ]
        for one in groups
    ]


def markdown_text(groups: Sequence[Group]) -> str:
    """Return the printed table as GitHub markdown."""
    titles = headings(groups)
    lines = [titles, ["---"] * 3 + ["---:"] * (len(titles) - 3), *cells(groups)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def rich_table(groups: Sequence[Group]) -> RenderableType:
    """Return the printed table for a terminal, and one more for what was asked for beside the main metric; what all
    groups share moves from its columns to the caption."""
    titles, lines = headings(groups), cells(groups)
    fixed = len(titles) - len(_shown(groups))
    columns = [{line[place] for line in lines} - {"-"} for place in range(len(titles))]
    same = [place for place in (1, 2, 4, 5) if len(columns[place]) <= 1]
    caption = ["; ".join(f"{titles[place]} {next(iter(columns[place]))}" for place in same if columns[place])]
    if len(groups) > 1:
        caption.append(CHOICE_NOT_COVERED)
    asked = {name for one in groups for name in one.asked}
    printed = [name for name in PRINTED if name not in THAN_LOCAL[1:]]  # one column stands for the three
    parts = [[place for place, name in enumerate(_shown(groups), fixed) if name in some] for some in (printed, asked)]
    joined = titles.index(THAN_LOCAL[0].replace("_", " ")) if THAN_LOCAL[0] in _shown(groups) else None
    tables: list[Table] = []
    for places in filter(None, parts):
        table = Table(
            title=None if tables else "Scores over clients, on private test data: not covered by epsilon",
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        shown = [*(place for place in range(fixed) if place not in same), *places]
        for place in shown:
            title = "% than\nlocal +/=/-" if place == joined else titles[place].replace("worst ", "worst\n")
            table.add_column(title, justify="left" if place < 3 else "right", no_wrap=place > 0)
        for one, line in zip(groups, lines, strict=True):
            table.add_row(*(_than_local(one) if place == joined else line[place] for place in shown))
        tables.append(table)
    if tables:
        tables[-1].caption, tables[-1].caption_justify = "\n".join(filter(None, caption)), "left"
    return RichGroup(*tables)


def epsilon_text(epsilon: float) -> str:
    """Return ``0``, ``4`` or ``3.98``; ``inf`` where nothing is protected."""
    return rounded_up(epsilon, 3)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` to a temporary name beside ``path`` and rename it over ``path``."""
    write_bytes(Path(path), text.encode())
    return Path(path)


def _row(run: Path, outcome: dict[str, Any], *, comparison: bool) -> Row:
    file = run / "private" / "result.json"
    name = outcome.get("algorithm")
    if not isinstance(name, str):
        raise DataError(f"{file}: 'algorithm' is {name!r}; it must be the method's name.")
    epsilon = _number(file, "epsilon", outcome.get("epsilon"), missing=math.inf)
    keys = METHOD + PRIVACY if 0 < epsilon < math.inf else METHOD
    main = outcome.get("metric")
    asked = tuple(name for name in outcome.get("metrics") or () if name != main)
    parts = ("", *(f"_{part}" for part in DISTRIBUTION))
    names = dict.fromkeys((*METRICS, *(f"{name}{part}" for name in asked for part in parts)))
    return Row(
        run=str(run),
        algorithm=name.lower() + (" + finetuning" if outcome.get("finetune") else ""),
        comparison=comparison,
        unit=str(outcome.get("unit") or ""),
        epsilon=epsilon,
        delta=_optional(file, "delta", outcome.get("delta")) if 0 < epsilon < math.inf else None,
        seed=str(outcome.get("seed", "")),
        rounds=outcome.get("rounds", outcome.get("round")),
        stopped=str(outcome.get("stopped", "")),
        metrics=tuple((key, _number(file, key, outcome[key], missing=math.nan)) for key in names if key in outcome),
        noise_multiplier=_optional(file, "noise_multiplier", outcome.get("noise_multiplier")),
        settings=tuple((key, str(outcome[key])) for key in keys if outcome.get(key) is not None),
        asked=asked,
    )


def _number(file: Path, key: str, value: Any, *, missing: float) -> float:
    if value is None:
        return missing
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: {key!r} is {value!r}; it must be a number.") from error


def _optional(file: Path, key: str, value: Any) -> float | None:
    return None if value is None else _number(file, key, value, missing=math.nan)


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation with n - 1; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _than_local(one: Group) -> str:
    """Return the shares of clients that are better, equally and worse off than alone, in whole percents."""
    shares = [one.mean.get(name, math.nan) for name in THAN_LOCAL]
    return "/".join(f"{100 * share:.0f}" for share in shares) if all(map(math.isfinite, shares)) else "-"


def _shown(groups: Sequence[Group]) -> list[str]:
    """Return the printed columns: those of ``METRICS`` and those that were asked for, where a group has a number."""
    asked = dict.fromkeys(name for one in groups for name in one.asked)
    names = dict.fromkeys([*PRINTED, *asked, *METRICS])
    return [name for name in names if any(math.isfinite(one.mean.get(name, math.nan)) for one in groups)]


def _mean_text(one: Group, name: str) -> str:
    mean = one.mean.get(name, math.nan)
    if not math.isfinite(mean):
        return "-"
    main = next((one.mean[metric] for metric in PRINTED[:3] if metric in one.mean), mean)
    size = main if name in ("median", "worst_tenth", "spread") else mean  # digits of what it is the distribution of
    return number_text(mean, size) + (f" ±{number_text(one.deviation[name], size)}" if one.seeds > 1 else "")
