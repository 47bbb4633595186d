"""One table from a folder of runs.

Only ``result.json``, ``outcome.json`` and ``config.yaml`` in ``private/`` and ``public/privacy.json`` of each run are
read, so a report costs no data, no model and no privacy. A run's baselines become rows of their own, marked as
comparisons.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Container, Iterable, Sequence
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
from ._names import CHOICE_NOT_COVERED
from ._settings import DATA, METHOD, PRIVACY, configuration, labels_of, of_baseline, seeds_of, telling

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
ERROR = "error.txt"
"""In the private folder of a run that failed, why."""
EPSILON, NAME = 3, 24
"""The place of its column, and how wide names may be before their table is divided."""
DISTRIBUTION = ("median", "worst_tenth", "spread", "clients", *THAN_LOCAL)
"""What follows the name of a metric that was asked for."""
TITLE = "Scores over clients, on private test data: not covered by epsilon"
SHARED = (
    "data",
    "data_fingerprint",
    "resolution",
    "clients",
    "planned_rounds",
    "seed",
    "unit",
)  # of a run and of its baselines


@dataclass(frozen=True)
class Row:
    """What one method reached in one run.

    ``epsilon`` is 0 where nothing is released and inf where nothing is protected; ``metrics`` holds the numbers of
    ``METRICS``, of those that were asked for and of their distribution that the result has, by name; ``settings`` holds
    those of ``METHOD`` and ``PRIVACY`` that it names, and ``configuration`` all that the run was given but seeds, as
    text. ``same`` is what two runs share whose clients can be compared one by one, a fingerprint of the data and the
    seed; empty where the result does not say. ``asked`` are the names of the metrics that were asked for, ``named`` the
    keys that the command line named, and ``resolution`` is the relative difference up to which two scores are equal.
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
    configuration: tuple[tuple[str, str], ...] = ()
    named: tuple[str, ...] | None = None
    same: tuple[str, ...] = ()
    resolution: float = 0.0


@dataclass(frozen=True)
class Group:
    """Rows that differ in nothing but their seed: a mean and a standard deviation for each metric."""

    algorithm: str
    unit: str
    epsilon: float
    delta: float | None
    settings: tuple[tuple[str, str], ...]
    seeds: int
    mean: dict[str, float]
    deviation: dict[str, float]
    asked: tuple[str, ...] = ()
    named: tuple[str, ...] | None = None

    @property
    def data(self) -> str:
        """The data's name and number of clients; results on different data do not compare."""
        settings = dict(self.settings)
        words = [settings[key] + (" clients" if key == "clients" else "") for key in DATA if key in settings]
        return ", ".join(words)


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[Path], list[Path], dict[Path, str]]:
    """Return all run folders at or below ``folders``: the finished ones, those that stopped before their end, and those
    that failed, with the reason.

    Raises:
        DataError: a folder does not exist.
    """
    finished: dict[Path, None] = {}
    unfinished: dict[Path, None] = {}
    failed: dict[Path, str] = {}
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
            elif (private / ERROR).is_file():
                failed[Path(here)] = (private / ERROR).read_text(encoding="utf-8").strip()
            elif (private / "config.yaml").is_file() or (private / "checkpoint.safetensors").is_file():
                unfinished[Path(here)] = None
    return list(finished), list(unfinished), failed


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
    given, named = configuration(run, result)
    rows = [_row(run, privacy | result | own, given, named, comparison=False) for own in _runs(run, result)]
    for name, outcome in baselines.items():
        found = privacy | shared | {"algorithm": name} | outcome
        rows.append(_row(run, found, given, named, comparison=True))
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


def collect(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[Row], list[Path], dict[Path, str]]:
    """Return the rows of every finished run under ``folders``, without exact repeats, the unfinished runs, and those
    that failed, with the reason.

    A sweep trains the same baseline again in many of its runs: a baseline whose numbers are those of another row, or a
    run that is the same in everything but its folder, is no row of its own.

    Raises:
        DataError: no finished run, or a file that cannot be read.
    """
    folders = [Path(folder) for folder in folders]
    finished, unfinished, failed = find_runs(folders)
    if not finished:
        names = ", ".join(map(str, folders))
        hint = f"; unfinished: {unfinished[0]} (fedmtl resume {unfinished[0]})" if unfinished else ""
        hint += "".join(f"; failed: {run}: {why.rstrip('.')}" for run, why in list(failed.items())[:1])
        raise DataError(f"no finished run under {names} (a finished run has private/result.json){hint}.")
    rows: dict[Row, Row] = {}
    numbers: set[Row] = set()
    for row in sorted((row for run in finished for row in read_rows(run)), key=lambda row: row.comparison):
        alike = replace(row, run="", comparison=False, noise_multiplier=None, named=None)
        bare = replace(alike, configuration=())
        if not (row.comparison and bare in numbers):
            rows.setdefault(alike, row)
        numbers.add(bare)
    alone = [row for row in rows.values() if row.algorithm == "local" and row.same]
    rows = {key: _beside_local(row, alone) for key, row in rows.items()}
    places = {str(run): place for place, run in enumerate(finished)}
    return sorted(rows.values(), key=lambda row: places[row.run]), unfinished, failed


def _beside_local(row: Row, alone: Sequence[Row]) -> Row:
    """Return a row with the shares of its clients that are better, equally and worse off than alone, by the local
    training of another run on the same data with the same seed; as it is where it has them, or there is none.

    Of several with different settings it is the one with those of the row, as its own baseline would have.
    """
    others = [one for one in alone if one.same == row.same]
    if row.algorithm == "local" or not others or THAN_LOCAL[0] in dict(row.metrics):
        return row
    own = of_baseline(dict(row.configuration), releases=False)
    alike = [one for one in others if _but_finetuning(dict(one.configuration)) == _but_finetuning(own)]
    if len(others) > 1:
        others = alike
    shares = _shares(row, others[0]) if len(others) == 1 else None
    return row if shares is None else replace(row, metrics=(*row.metrics, *zip(THAN_LOCAL, shares, strict=True)))


def _but_finetuning(settings: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if key.partition(".")[0] != "finetune"}


def _shares(row: Row, other: Row) -> tuple[float, float, float] | None:
    """Return the shares of the clients that score better, equal and worse in one row than in another, of those that
    have a score in both and whose training did not diverge; None without any."""
    (metric, own), (_, others) = _scores_of(row), _scores_of(other)
    sign = -1.0 if metric == "mse" else 1.0
    gains = [
        0.0 if abs(own[name] - others[name]) <= row.resolution * max(abs(own[name]), abs(others[name]))
        else sign * (own[name] - others[name])
        for name in own if name in others
    ]  # fmt: skip
    if not gains:
        return None
    return tuple(sum(parts) / len(gains) for parts in zip(*((g > 0, g == 0, g < 0) for g in gains), strict=True))  # type: ignore[return-value]


def _scores_of(row: Row) -> tuple[str, dict[str, float]]:
    """Return the main metric of a row and its value by client, without those whose training diverged."""
    private = Path(row.run) / "private"
    if row.comparison:
        private = private / "baselines" / row.algorithm.removesuffix(" + finetuning") / "private"
    if not (file := private / "outcome.json").is_file():
        return "", {}
    outcome = read_json(file)
    scores = outcome["by_client"]
    lost = {name for name, loss in scores["loss"].items() if not math.isfinite(float(loss))}
    lost.update((outcome.get("finetuned") or {}).get("diverged", ()))
    return outcome["metric"], {
        name: float(value) for name, value in scores[outcome["metric"]].items() if name not in lost
    }


def group(rows: Iterable[Row]) -> list[Group]:
    """Average rows that differ only in their seeds; ordered by data, unit, method, settings and epsilon (the largest of
    the averaged rows, which agree to six decimals). Rows of one seed are never averaged."""
    members: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row.unit, row.algorithm, row.settings, row.configuration, round(row.epsilon, 6), row.delta)
        place = 0  # runs of one seed differ in what no result names, as the data of programs do
        while any(row.seed == other.seed for other in members.get((*key, place), ())):
            place += 1
        members.setdefault((*key, place), []).append(row)
    groups = []
    for (unit, algorithm, settings, given, _, delta, _), same in members.items():
        each = [dict(row.metrics) for row in same]
        names = dict.fromkeys(name for one in each for name in one)
        columns = {name: [one.get(name, math.nan) for one in each] for name in names}
        groups.append(
            Group(
                algorithm=algorithm,
                unit=unit,
                epsilon=max(row.epsilon for row in same),
                delta=delta,
                settings=given + tuple(pair for pair in settings if pair[0] in DATA) if given else settings,
                seeds=len(same),
                mean={name: sum(values) / len(values) for name, values in columns.items()},
                deviation={name: _deviation(values) for name, values in columns.items()},
                asked=tuple(dict.fromkeys(name for row in same for name in row.asked)),
                named=same[0].named,
            )
        )
    return sorted(groups, key=lambda g: (g.data, g.unit, g.algorithm, g.settings, g.epsilon, g.delta or 0.0))


def labels(groups: Sequence[Group]) -> list[str]:
    """Return a name for each group, the same for one method and settings at several epsilons: the method's, with those
    of its settings that tell it from others of one method, unit and data, such as ``PMTL lam 0.1``."""
    return labels_of(
        [(one.algorithm, dict(one.settings), one.named) for one in groups],
        cells=[(one.data, one.unit, round(one.epsilon, 6), one.delta) for one in groups],
        classes=[(one.data, one.unit, one.algorithm) for one in groups],
    )


def csv_text(rows: Sequence[Row]) -> str:
    """Return every row at full precision, one column a setting (of those that the runs were given, all that differ);
    the machine-readable form of the report."""
    settings_of = [dict(row.configuration + row.settings) for row in rows]
    keys = [key for key in METHOD + PRIVACY if any(key in dict(row.settings) for row in rows)]
    fixed = ("run", "algorithm", "comparison", "unit", "epsilon", "delta", "seed", "rounds", "stopped")
    keys += [key for key in varying(rows) if key not in METHOD + PRIVACY + fixed]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = [*METRICS, *dict.fromkeys(name for row in rows for name, _ in row.metrics if name not in METRICS)]
    writer.writerow([*fixed, *names, "noise_multiplier", *keys])
    for row, settings in zip(rows, settings_of, strict=True):
        values = [getattr(row, name) for name in fixed]
        metrics = dict(row.metrics)
        values += [
            *(metrics.get(name) for name in names),
            row.noise_multiplier,
            *(settings.get(key, "") for key in keys),
        ]
        writer.writerow(["" if value is None or value != value else value for value in values])
    return stream.getvalue()


def main_metric(names: Container[str]) -> str:
    """Return the main metric of runs that measured ``names``, without those that were asked for."""
    return next((name for name in ("accuracy", "recall_at_5") if name in names), "mse")


def varying(rows: Sequence[Row]) -> dict[str, list[str | None]]:
    """Return the settings that were given to the runs and differ between them, with the value of each row."""
    given = [dict(row.configuration) for row in rows]
    values = {key: [one.get(key) for one in given] for key in dict.fromkeys(key for one in given for key in one)}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def headings(groups: Sequence[Group]) -> list[str]:
    """Column titles of the printed table; metrics that no group has are left out."""
    fixed = ["method", "data", "protects", "epsilon", "delta", "runs"]
    return fixed + [name.replace("_", " ") for name in _shown(groups)]


def cells(groups: Sequence[Group]) -> list[list[str]]:
    """Return the printed table: one line a group, mean and (over several seeds) standard deviation."""
    shown = _shown(groups)
    return [
        [
            label,
            one.data or "-",
            one.unit or "-",
            epsilon_text(one.epsilon),
            "-" if one.delta is None else rounded_up(one.delta, 3),
            str(one.seeds),
            *(_mean_text(one, name) for name in shown),
        ]
        for one, label in zip(groups, labels(groups), strict=True)
    ]


def markdown_text(groups: Sequence[Group]) -> str:
    """Return the printed table as GitHub markdown."""
    titles = headings(groups)
    lines = [titles, ["---"] * 3 + ["---:"] * (len(titles) - 3), *cells(groups)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


@dataclass(frozen=True)
class Printed:
    """The table as it is shown: of ``titles`` and ``lines``, as of :func:`headings` and :func:`cells`, the places that
    are ``common`` (metrics that every run has) and those that were ``asked`` for; what all groups share is in
    ``caption``, lines of text, and not in a column. ``others`` are places of what else tells the groups apart."""

    titles: list[str]
    lines: list[list[str]]
    others: list[int]
    common: list[int]
    asked: list[int]
    caption: list[str]


def printed(groups: Sequence[Group]) -> Printed:
    """Return the printed table without the columns that are the same in all groups. One column stands for the three
    shares of clients that are better, equally and worse off than alone."""
    titles, lines = headings(groups), cells(groups)
    fixed = len(titles) - len(_shown(groups))
    columns = [{line[place] for line in lines} - {"-"} for place in range(len(titles))]
    same = [place for place in (1, 2, 4, 5) if len(columns[place]) <= 1]
    caption = ["; ".join(f"{titles[place]} {next(iter(columns[place]))}" for place in same if columns[place])]
    if any(one.seeds > 1 for one in groups):
        caption.append("±: standard deviation over runs")
    if len(groups) > 1:
        caption.append(CHOICE_NOT_COVERED)
    asked = {name for one in groups for name in one.asked}
    common = [name for name in PRINTED if name not in THAN_LOCAL[1:]]
    parts = [[place for place, name in enumerate(_shown(groups), fixed) if name in some] for some in (common, asked)]
    if THAN_LOCAL[0] in _shown(groups):
        joined = titles.index(THAN_LOCAL[0].replace("_", " "))
        titles[joined] = "% than local +/=/-"
        for one, line in zip(groups, lines, strict=True):
            shares = than_local(one)
            line[joined] = "/".join(f"{100 * share:.0f}" for share in shares) if shares else "-"
    others = [place for place in range(1, fixed) if place not in same and place != EPSILON]
    return Printed(titles, lines, others, parts[0], parts[1], [line for line in caption if line])


def rich_table(groups: Sequence[Group], width: int = 80) -> RenderableType:
    """Return the printed table for a terminal of ``width`` columns: as many tables below each other as it takes, each
    with method and epsilon; those of what was asked for beside the main metric are of their own. What all groups share
    moves from the columns to the caption."""
    shown = printed(groups)
    heads = [title.replace("worst ", "worst\n").replace("% than ", "% than\n") for title in shown.titles]
    wide = [
        max([*map(len, head.split("\n")), *(len(line[place]) for line in shown.lines)])
        for place, head in enumerate(heads)
    ]
    tables: list[Table] = []
    for places in _packed(wide, [*shown.others, *shown.common], width) + _packed(wide, shown.asked, width):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column(heads[0], min_width=min(wide[0], NAME))
        for place in places:
            table.add_column(heads[place], justify="left" if place < EPSILON else "right", no_wrap=True)
        for line in shown.lines:
            table.add_row(*(line[place] for place in (0, *places)))
        tables.append(table)
    return RichGroup(TITLE, *tables, "\n".join(shown.caption))


def epsilon_text(epsilon: float) -> str:
    """Return ``0``, ``4`` or ``3.98``; ``inf`` where nothing is protected."""
    return rounded_up(epsilon, 3)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` to a temporary name beside ``path`` and rename it over ``path``."""
    write_bytes(Path(path), text.encode())
    return Path(path)


def _row(
    run: Path, outcome: dict[str, Any], given: dict[str, str], named: tuple[str, ...] | None, *, comparison: bool
) -> Row:
    file = run / "private" / "result.json"
    name = outcome.get("algorithm")
    if not isinstance(name, str):
        raise DataError(f"{file}: 'algorithm' is {name!r}; it must be the method's name.")
    epsilon = _number(file, "epsilon", outcome.get("epsilon"), missing=math.inf)
    keys = METHOD + PRIVACY if 0 < epsilon < math.inf else METHOD
    seed = seeds_of(given, str(outcome.get("seed", "")))
    if comparison or epsilon == 0:
        given = of_baseline(given, releases=epsilon > 0)
    main, mark = outcome.get("metric"), outcome.get("data_fingerprint")
    asked = tuple(name for name in outcome.get("metrics") or () if name != main)
    parts = ("", *(f"_{part}" for part in DISTRIBUTION))
    names = dict.fromkeys((*METRICS, *(f"{name}{part}" for name in asked for part in parts)))
    return Row(
        run=str(run),
        algorithm=name.lower() + (" + finetuning" if outcome.get("finetune") else ""),
        comparison=comparison,
        unit=str(outcome.get("unit") or "") if epsilon > 0 else "",  # what sends nothing protects every unit
        epsilon=epsilon,
        delta=_optional(file, "delta", outcome.get("delta")) if 0 < epsilon < math.inf else None,
        seed=seed,
        rounds=outcome.get("rounds", outcome.get("round")),
        stopped=str(outcome.get("stopped", "")),
        metrics=tuple((key, _number(file, key, outcome[key], missing=math.nan)) for key in names if key in outcome),
        noise_multiplier=_optional(file, "noise_multiplier", outcome.get("noise_multiplier")),
        settings=tuple((key, str(outcome[key])) for key in keys if outcome.get(key) is not None),
        asked=asked,
        configuration=tuple(telling(given).items()),
        named=named,
        same=()
        if mark is None or "bands" in outcome
        else (str(mark), str(outcome.get("seed"))),  # of replicates nothing
        resolution=_number(file, "resolution", outcome.get("resolution"), missing=0.0),
    )


def _packed(wide: Sequence[int], places: Sequence[int], width: int) -> list[list[int]]:
    """Divide columns into tables that fit beside the name; epsilon is the first of every table."""
    room = width - 2 - min(wide[0], NAME) - 2 - wide[EPSILON] - 2
    tables: list[list[int]] = []
    left = -1
    for place in places:
        left -= wide[place] + 2
        if left < 0:
            tables.append([EPSILON])
            left = room - wide[place] - 2
        tables[-1].append(place)
    return [sorted(table) for table in tables]


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


def than_local(one: Group) -> tuple[float, ...]:
    """Return the shares of clients that are better, equally and worse off than alone; empty where they are unknown."""
    shares = tuple(one.mean.get(name, math.nan) for name in THAN_LOCAL)
    return shares if all(map(math.isfinite, shares)) else ()


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
