"""Run folders as a data frame of pandas, from which tables, figures and pages are made.

Only ``result.json`` and ``config.yaml`` in ``private/`` and ``public/privacy.json`` of each run are
read, so a report costs no data, no model and no privacy. A folder may come from anyone: its texts
are read as :func:`fedmtl._text.shown` writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._extras import pandas as pd
from .._files import read_json
from .._text import shown
from ..errors import DataError
from ._names import register_stored, title_of
from ._settings import flat, of_baseline, seeds_of, telling, within

if TYPE_CHECKING:
    from pandas import DataFrame

THAN_LOCAL = ("better_than_local", "as_local", "worse_than_local")
MAIN = ("accuracy", "recall_at_5", "pinball", "mse")
PRINTED = (*MAIN, "median", "worst_tenth", "spread")
METRICS = (
    *PRINTED,
    *THAN_LOCAL,
    *("weighted_accuracy", "weighted_mse", "global_accuracy", "global_mse"),
    *("weighted_recall_at_5", "global_recall_at_5", "weighted_pinball", "global_pinball"),
)
"""The metrics of results: the main one, its distribution, and the comparison with local models."""
DISTRIBUTION = (
    *("", "_median", "_worst_tenth", "_spread", "_clients"),
    *(f"_{name}" for name in THAN_LOCAL),
)
"""The endings of the columns of an additional metric, one that a run was asked to measure."""
KIND = ("data", "clients", "unit", "algorithm")
"""The columns that rows must share for their labels to differ by settings alone."""
FIXED = (
    *("run", "algorithm", "comparison", "label", "experiment"),
    *("data", "clients", "unit", "epsilon", "delta", "seed"),
    *("rounds", "stopped", "noise_multiplier"),
)
SETTING = "config."
"""The prefix of the columns of settings."""
FINETUNE = f"{SETTING}finetune"
"""The column of the kind of finetuning."""
ERROR = "error.txt"
"""The file in the private folder of a failed run that holds the reason."""
# Parts of a dotted key that its short name leaves out.
_PLAIN_WORDS = {"algorithm", "local", "model", "data", "privacy", "schedule"}
# The longest value of a setting in a label, in characters.
_LONGEST = 24


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> dict[Path, str]:
    """Finds all run folders at or below ``folders``.

    Returns:
        By run folder, the reason for which it has no result: it failed, or it stopped before its
        end. The reason of a finished run is empty.

    Raises:
        DataError: a folder does not exist.
    """
    runs: dict[Path, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            accepted = "name a run's folder or one that holds runs"
            raise DataError(f"{folder} is not a folder; {accepted}.")
        for here, below, _ in os.walk(folder):
            below.sort()  # os.walk descends in the order of this list
            if "private" not in below:
                continue
            # a run's own folders hold no further runs
            below[:] = [name for name in below if name not in ("private", "public", "baselines")]
            run = Path(here)
            private = run / "private"
            if (private / "result.json").is_file():
                runs[run] = ""
            elif (private / ERROR).is_file():
                reason = (private / ERROR).read_text(encoding="utf-8", errors="replace").strip()
                runs[run] = f"failed: {shown(reason)}"
            elif _is_begun(private):
                runs[run] = f"unfinished: continue it with fedmtl resume {shown(str(run))}"
    return runs


def frame(folders: Iterable[str | os.PathLike[str]]) -> DataFrame:
    """Returns a data frame with a row for each method of every finished run under ``folders``.

    A run has one row, or one for each of its replicates. Each of its baselines has a row that is
    marked as a ``comparison``. A sweep trains the same baseline again in many of its runs: a
    baseline with the numbers of another row has no row of its own, and neither has a run that
    differs from another in its folder alone.

    Args:
        folders: of runs, or of folders with runs in them, at any depth.

    Returns:
        The columns of ``FIXED``, the metrics that the runs have, and all settings but seeds as
        text, in columns such as ``config.algorithm.lam``. ``epsilon`` is 0 if nothing is released
        and inf if nothing is protected. Rows of one ``experiment`` differ only in their epsilons
        and seeds; ``label`` is its short name.

    Raises:
        DataError: no run is finished, or a file cannot be read.
    """
    places = [Path(folder) for folder in folders]
    runs = find_runs(places)
    finished = [run for run, reason in runs.items() if not reason]
    rows = pd.DataFrame([row for run in finished for row in _rows(run)])
    if rows.empty:
        raise DataError(_no_run(places, runs))
    rows = _without_repeated(rows)
    settings = settings_of(rows)
    # Rows of one seed are never repetitions of each other: they differ in something that no result
    # names, such as the data of programs. Their place among them makes them experiments of their
    # own.
    same = [*KIND, *settings]
    epsilon = rows["epsilon"].round(6)
    place = rows.groupby([*same, epsilon, "delta", "seed"], dropna=False).cumcount()
    rows["experiment"] = rows.groupby([*same, place], dropna=False, sort=False).ngroup()
    rows["label"] = _labels(rows)
    rows["label"] += place.map(_place_text)
    order = dict.fromkeys([*FIXED, *metrics_of(rows), *settings])
    return rows.reindex(columns=list(order)).reset_index(drop=True)


def metrics_of(rows: DataFrame) -> list[str]:
    """Returns the columns that are metrics: those of ``METRICS``, then the additional ones."""
    others = {*FIXED, *METRICS, *settings_of(rows)}
    additional = [str(name) for name in rows if name not in others]
    return [*METRICS, *additional]


def settings_of(rows: DataFrame) -> list[str]:
    """Returns the columns that are settings."""
    return [name for name in map(str, rows) if name.startswith(SETTING)]


def differing(rows: DataFrame) -> list[str]:
    """Returns the settings that differ among these rows, or that only some of them have.

    If objects of another class or kind differ, such as two models, their parts are left out unless
    they distinguish more rows.
    """
    several = {}
    for key in settings_of(rows):
        if rows[key].nunique(dropna=False) > 1:
            several[key] = key.removesuffix(".kind")
    objects = set(several.values())
    outer = [key for key, part in several.items() if not within(key, objects - {part})]
    if _count_kinds(rows, outer) == _count_kinds(rows, list(several)):
        return outer
    return list(several)


def configuration(run: Path, result: Mapping[str, Any]) -> dict[str, str]:
    """Returns every setting of a run as text by its dotted key.

    The settings come from ``private/config.yaml``, or from the result of a run that no command
    made. Lists are one value. Null values are left out. An object is its class under its own key.

    Args:
        run: the run's folder.
        result: its ``result.json``.

    Returns:
        Key to text; empty for a run without a configuration.

    Raises:
        DataError: the configuration is not YAML.
    """
    file = run / "private" / "config.yaml"
    if not file.is_file():
        return flat(result.get("configuration") or {})
    # of the command alone: a run from Python has its settings in its result
    from .._yaml import read_yaml

    stored = read_yaml(file)
    # the file of a search is its plan, which no single run was computed with
    if not isinstance(stored, dict) or "search" in stored:
        return {}
    return flat(stored)


def _is_begun(private: Path) -> bool:
    return any((private / name).is_file() for name in ("config.yaml", "checkpoint.safetensors"))


def _no_run(folders: Sequence[Path], runs: Mapping[Path, str]) -> str:
    """Returns the message about folders without a finished run, with the reason of the first."""
    names = ", ".join(map(str, folders))
    hint = ""
    for run, reason in list(runs.items())[:1]:
        hint = f"; {run} {reason.rstrip('.')}"
    return f"no finished run under {names} (a finished run has private/result.json){hint}."


def _without_repeated(rows: DataFrame) -> DataFrame:
    """Returns the rows without repeated runs and without baselines that another row repeats."""
    rows = rows.sort_values("comparison", kind="stable")  # a run stays rather than a baseline
    folder = ("run", "comparison", "noise_multiplier")
    numbers = [str(name) for name in rows if name not in folder]
    bare = [name for name in numbers if not name.startswith(SETTING)]
    repeated = rows.duplicated(numbers) | (rows["comparison"] & rows.duplicated(bare))
    return rows[~repeated].sort_index()


def _place_text(place: int) -> str:
    if place == 0:
        return ""
    return f" ({place + 1})"


def _count_kinds(rows: DataFrame, keys: Sequence[str]) -> int:
    return int(rows.groupby(["algorithm", *keys], dropna=False).ngroups)


def _labels(rows: DataFrame) -> list[str]:
    """Returns a short name of each row's experiment.

    It is the method's name with the settings that differ between the experiments of one method,
    unit and data, such as ``PMTL lam 0.1`` or ``FedAvg + finetuning (kl)``.
    """
    labels = {}
    for _, same in rows.groupby(list(KIND), dropna=False):
        keys = differing(same)
        names = dict(zip(keys, _short_names(keys), strict=True))
        for place, row in same.iterrows():
            values = {}
            for key in keys:
                if isinstance(row[key], str):  # a setting that the run does not have is NaN
                    values[key] = _short_value(row[key])
            kind = ""
            if FINETUNE in values:
                kind = f" ({values.pop(FINETUNE)})"
            words = ", ".join(f"{names[key]} {value}" for key, value in values.items())
            labels[place] = f"{title_of(row['algorithm'])}{kind} {words}".rstrip()
    return [labels[place] for place in rows.index]


def _short_names(keys: Sequence[str]) -> list[str]:
    """Returns ``lr`` for ``algorithm.local.lr`` and ``lora.rank`` for ``model.lora.rank``.

    If two short names are alike, both keys stay whole.
    """
    whole = [key.removeprefix(SETTING) for key in keys]
    short = [_short_name(key) for key in whole]
    names = []
    for key, name in zip(whole, short, strict=True):
        if not name or short.count(name) > 1:
            name = key
        names.append(shown(name))
    return names


def _short_name(key: str) -> str:
    words = [word for word in key.split(".") if word not in _PLAIN_WORDS]
    if len(words) > 1 and words[-1] == "kind":
        words.pop()
    return ".".join(words)


def _short_value(value: str) -> str:
    short = " ".join(value.split())
    if "/" in value and " " not in value:
        short = Path(value).name  # the last part of a path tells files apart
    short = shown(short)
    if len(short) <= _LONGEST:
        return short
    return f"{short[: _LONGEST - 1]}…"


def _rows(run: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of one finished run: its own or its replicates', then its baselines'.

    Raises:
        DataError: a file is not valid JSON or lacks the algorithm; the message names it.
    """
    file = run / "private" / "result.json"
    protection = run / "public" / "privacy.json"
    result = read_json(file)
    privacy: dict[str, Any] = {}
    if protection.is_file():
        privacy = read_json(protection)
    baselines = result.get("baselines") or {}
    if not isinstance(baselines, dict):
        raise DataError(f"{file}: baselines must be a mapping of name to result.")
    settings = configuration(run, result)
    register_stored(result.get("methods"))
    for replicate in _replicates(file, result):
        row = _row(file, privacy | result | replicate, settings, comparison=False)
        yield {"run": str(run), **row}
    shared = dict(privacy)
    for key in ("data", "clients", "seed", "unit"):
        if key in result:
            shared[key] = result[key]
    for name, outcome in baselines.items():
        row = _row(file, shared | {"algorithm": name} | outcome, settings, comparison=True)
        yield {"run": str(run), **row}


def _replicates(file: Path, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the facts in which each replicate differs from the run; one empty set without any.

    Raises:
        DataError: the replicates and the budgets of the result do not fit.
    """
    replicates = result.get("replicates")
    if replicates is None:
        return [{}]
    runs = []
    try:
        spent = {band["budget"]: band["epsilon"] for band in result.get("bands") or ()}
        seed = result.get("seed", "")
        for place, row in enumerate(replicates):
            own = {"epsilon": spent[row["budget"]], "seed": f"{seed}.{place}"}
            runs.append(row | own)
    except (KeyError, TypeError) as error:
        raise DataError(f"{file}: replicates and bands do not fit: {error!r}.") from error
    return runs


def _row(
    file: Path, outcome: dict[str, Any], settings: dict[str, str], *, comparison: bool
) -> dict[str, Any]:
    """Returns one row of the frame, without the run's folder, label and experiment."""
    name = outcome.get("algorithm")
    if not isinstance(name, str):
        raise DataError(f"{file}: 'algorithm' is {name!r}; it must be the method's name.")
    algorithm = name.lower()
    if outcome.get("finetune"):
        algorithm += " + finetuning"
    epsilon = _number(file, outcome, "epsilon", missing=math.inf)
    delta = math.nan
    if 0 < epsilon < math.inf:
        delta = _number(file, outcome, "delta")
    unit = ""  # a method that releases nothing protects every unit
    if epsilon > 0:
        unit = str(outcome.get("unit") or "")
    row: dict[str, Any] = {
        "comparison": comparison,
        "algorithm": algorithm,
        "data": outcome.get("data"),
        "clients": outcome.get("clients"),
        "unit": unit,
        "epsilon": epsilon,
        "delta": delta,
        "seed": seeds_of(settings, str(outcome.get("seed", ""))),
        "rounds": outcome.get("rounds", outcome.get("round")),
        "stopped": str(outcome.get("stopped", "")),
        "noise_multiplier": _number(file, outcome, "noise_multiplier"),
    }
    for key, value in row.items():
        if isinstance(value, str):
            row[key] = shown(value)
    for key in (*METRICS, *_additional(outcome)):
        if key in outcome:
            row[shown(key)] = _number(file, outcome, key)
    applicable = _applicable(settings, epsilon, comparison=comparison)
    for key, text in telling(applicable).items():
        row[f"{SETTING}{key}"] = text
    return row


def _additional(outcome: Mapping[str, Any]) -> list[str]:
    """Returns the columns of the metrics that a run was asked to measure besides the main one."""
    main = outcome.get("metric")
    columns: list[str] = []
    for name in outcome.get("metrics") or ():
        if name != main:
            columns.extend(f"{name}{part}" for part in DISTRIBUTION)
    return columns


def _applicable(settings: Mapping[str, str], epsilon: float, *, comparison: bool) -> dict[str, str]:
    """Returns the settings that the numbers of a row depend on."""
    applicable = dict(settings)
    if comparison or epsilon == 0:
        applicable = of_baseline(settings, releases=epsilon > 0)
    if "finetune" in applicable:
        kind = applicable.pop("finetune.kind", applicable["finetune"])
        applicable["finetune"] = kind.lower()
    return applicable


def _number(file: Path, outcome: Mapping[str, Any], key: str, missing: float = math.nan) -> float:
    value = outcome.get(key)
    if value is None:
        return missing
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: {key!r} is {value!r}; it must be a number.") from error
