"""Run folders as a data frame of pandas, from which tables, figures and pages are made.

Only ``result.json`` and ``config.yaml`` in ``private/`` and ``public/privacy.json`` of each run are read, so a report
costs no data, no model and no privacy. A folder may come from anyone: its texts are read as :func:`fedmtl._text.shown`
writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import read_json, read_yaml
from .._text import shown
from ..errors import DataError
from ._names import register_stored, title_of
from ._settings import flat, of_baseline, seeds_of, telling, within

if TYPE_CHECKING:
    from pandas import DataFrame

THAN_LOCAL = ("better_than_local", "as_local", "worse_than_local")
MAIN = ("accuracy", "recall_at_5", "mse")
PRINTED = (*MAIN, "median", "worst_tenth", "spread")
METRICS = (
    *PRINTED,
    *THAN_LOCAL,
    *("weighted_accuracy", "weighted_mse", "global_accuracy", "global_mse"),
    *("weighted_recall_at_5", "global_recall_at_5"),
)
"""What every result may have: the main metric over clients, its distribution, and the comparison with local models."""
DISTRIBUTION = ("", "_median", "_worst_tenth", "_spread", "_clients", *(f"_{name}" for name in THAN_LOCAL))
"""What follows the name of a metric that a run was asked to measure beside."""
KIND = ("data", "clients", "unit", "algorithm")
"""The columns of what a label distinguishes by its settings."""
FIXED = (
    *("run", "algorithm", "comparison", "label", "experiment", "data", "clients", "unit", "epsilon", "delta", "seed"),
    *("rounds", "stopped", "noise_multiplier"),
)
SETTING = "config."
"""How the columns of settings begin."""
FINETUNE = f"{SETTING}finetune"
"""The column of the kind of finetuning."""
ERROR = "error.txt"
"""In the private folder of a run that failed, why."""
_PLAIN_WORDS = {"algorithm", "local", "model", "data", "privacy", "schedule"}  # that a short name goes without
_LONGEST = 24


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> dict[Path, str]:
    """Return all run folders at or below ``folders``, each with why it has no result: that it failed, or that it
    stopped before its end; empty for a finished run.

    Raises:
        DataError: a folder does not exist.
    """
    runs: dict[Path, str] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; name a run's folder or one that holds runs.")
        for here, below, _ in os.walk(folder):
            below.sort()
            if "private" not in below:
                continue
            below[:] = [name for name in below if name not in ("private", "public", "baselines")]
            run, private = Path(here), Path(here) / "private"
            if (private / "result.json").is_file():
                runs[run] = ""
            elif (private / ERROR).is_file():
                reason = (private / ERROR).read_text(encoding="utf-8", errors="replace").strip()
                runs[run] = f"failed: {shown(reason)}"
            elif (private / "config.yaml").is_file() or (private / "checkpoint.safetensors").is_file():
                runs[run] = f"unfinished: continue it with fedmtl resume {shown(str(run))}"
    return runs


def frame(folders: Iterable[str | os.PathLike[str]]) -> DataFrame:
    """Return a data frame with a row for each method of every finished run under ``folders``.

    A run has a row (each of its replicates has one), and so has each of its baselines, marked as a ``comparison``. A
    sweep trains the same baseline again in many of its runs: a baseline whose numbers are those of another row, or a
    run that is the same in everything but its folder, is no row of its own.

    Returns:
        The columns of ``FIXED`` (``epsilon`` is 0 where nothing is released and inf where nothing is protected; rows
        of one ``experiment`` differ only in their epsilons and seeds, and ``label`` is its short name), the metrics
        that the runs have, and all settings but seeds as text, in columns such as ``config.algorithm.lam``.

    Raises:
        DataError: no finished run, or a file that cannot be read.
    """
    import pandas as pd

    folders = [Path(folder) for folder in folders]
    runs = find_runs(folders)
    rows = pd.DataFrame([row for run, why in runs.items() if not why for row in _rows(run)])
    if rows.empty:
        names = ", ".join(map(str, folders))
        hint = "".join(f"; {run} {why.rstrip('.')}" for run, why in list(runs.items())[:1])
        raise DataError(f"no finished run under {names} (a finished run has private/result.json){hint}.")
    rows = rows.sort_values("comparison", kind="stable")
    numbers = [str(name) for name in rows if name not in ("run", "comparison", "noise_multiplier")]
    bare = [name for name in numbers if not name.startswith(SETTING)]
    rows = rows[~rows.duplicated(numbers) & ~(rows["comparison"] & rows.duplicated(bare))].sort_index()
    settings = settings_of(rows)
    # rows of one seed are never repetitions of each other: they differ in what no result names, as the data of programs
    same = [*KIND, *settings]
    place = rows.groupby([*same, rows["epsilon"].round(6), "delta", "seed"], dropna=False).cumcount()
    rows["experiment"] = rows.groupby([*same, place], dropna=False, sort=False).ngroup()
    rows["label"] = _labels(rows)
    rows["label"] += place.map(lambda place: f" ({place + 1})" if place else "")
    order = dict.fromkeys([*FIXED, *metrics_of(rows), *settings])
    return rows.reindex(columns=list(order)).reset_index(drop=True)


def metrics_of(rows: DataFrame) -> list[str]:
    """Return the columns that are metrics: those of ``METRICS``, then those that runs were asked for beside."""
    others = {*FIXED, *METRICS, *settings_of(rows)}
    return [*METRICS, *[str(name) for name in rows if name not in others]]


def settings_of(rows: DataFrame) -> list[str]:
    """Return the columns that are settings."""
    return [name for name in map(str, rows) if name.startswith(SETTING)]


def differing(rows: DataFrame) -> list[str]:
    """Return the settings with several values among these rows, or that only some of them have; without the parts of
    an object whose class or kind is another, as those of two models, unless they distinguish more."""
    several = {key: key.removesuffix(".kind") for key in settings_of(rows) if rows[key].nunique(dropna=False) > 1}
    outer = [key for key, part in several.items() if not within(key, {*several.values()} - {part})]
    kinds = [rows.groupby(["algorithm", *keys], dropna=False).ngroups for keys in (outer, several)]
    return outer if kinds[0] == kinds[1] else list(several)


def configuration(run: Path, result: Mapping[str, Any]) -> dict[str, str]:
    """Return every setting of a run as text by its dotted key; empty for a run that says none.

    They come from ``private/config.yaml`` or, of a run that no command made, from its result. Lists are one value; what
    is null is left out, as if it was not there; an object is its class under its own key.

    Raises:
        DataError: a configuration that is not YAML.
    """
    file = run / "private" / "config.yaml"
    if not file.is_file():
        return flat(result.get("configuration") or {})
    stored = read_yaml(file)
    return flat(stored) if isinstance(stored, dict) and "search" not in stored else {}


def _labels(rows: DataFrame) -> list[str]:
    """Return a short name of each row's experiment: the method's, with what differs between the experiments of one
    method, unit and data, such as ``PMTL lam 0.1`` or ``FedAvg + finetuning (kl)``."""
    labels = {}
    for _, same in rows.groupby(list(KIND), dropna=False):
        keys = differing(same)
        names = dict(zip(keys, _short_names(keys), strict=True))
        for place, row in same.iterrows():
            values = {key: _short_value(row[key]) for key in keys if isinstance(row[key], str)}
            kind = f" ({values.pop(FINETUNE)})" if FINETUNE in values else ""
            words = ", ".join(f"{names[key]} {value}" for key, value in values.items())
            labels[place] = f"{title_of(row['algorithm'])}{kind} {words}".rstrip()
    return [labels[place] for place in rows.index]


def _short_names(keys: Sequence[str]) -> list[str]:
    """Return ``lr`` for ``algorithm.local.lr``, ``lora.rank`` for ``model.lora.rank``; whole keys if two are alike."""
    whole = [key.removeprefix(SETTING) for key in keys]
    words = [[word for word in key.split(".") if word not in _PLAIN_WORDS] for key in whole]
    short = [".".join(some[: -1 if len(some) > 1 and some[-1] == "kind" else None]) for some in words]
    names = [name if name and short.count(name) == 1 else key for name, key in zip(short, whole, strict=True)]
    return list(map(shown, names))


def _short_value(value: str) -> str:
    value = Path(value).name if "/" in value and " " not in value else " ".join(value.split())
    value = shown(value)
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"


def _rows(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one finished run: its own (one for each of its replicates), then one for each baseline.

    Raises:
        DataError: a file is not valid JSON or lacks the algorithm; the message names it.
    """
    file, protection = run / "private" / "result.json", run / "public" / "privacy.json"
    result = read_json(file)
    privacy = read_json(protection) if protection.is_file() else {}
    baselines, several = result.get("baselines") or {}, result.get("replicates")
    if not isinstance(baselines, dict):
        raise DataError(f"{file}: baselines must be a mapping of name to result.")
    settings = configuration(run, result)
    register_stored(result.get("methods"))
    runs: list[dict[str, Any]] = [{}]
    if several is not None:
        try:
            spent = {band["budget"]: band["epsilon"] for band in result.get("bands") or ()}
            seed = result.get("seed", "")
            runs = [row | {"epsilon": spent[row["budget"]], "seed": f"{seed}.{i}"} for i, row in enumerate(several)]
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: replicates and bands do not fit: {error!r}.") from error
    for replicate in runs:
        yield {"run": str(run), **_row(file, privacy | result | replicate, settings, comparison=False)}
    shared = privacy | {key: result[key] for key in ("data", "clients", "seed", "unit") if key in result}
    for name, outcome in baselines.items():
        row = _row(file, shared | {"algorithm": name} | outcome, settings, comparison=True)
        yield {"run": str(run), **row}


def _row(file: Path, outcome: dict[str, Any], settings: dict[str, str], *, comparison: bool) -> dict[str, Any]:
    name, main = outcome.get("algorithm"), outcome.get("metric")
    if not isinstance(name, str):
        raise DataError(f"{file}: 'algorithm' is {name!r}; it must be the method's name.")
    epsilon = _number(file, outcome, "epsilon", missing=math.inf)
    asked = [f"{name}{part}" for name in outcome.get("metrics") or () if name != main for part in DISTRIBUTION]
    applicable = of_baseline(settings, releases=epsilon > 0) if comparison or epsilon == 0 else dict(settings)
    if "finetune" in applicable:
        applicable["finetune"] = applicable.pop("finetune.kind", applicable["finetune"]).lower()
    row = {
        "comparison": comparison,
        "algorithm": name.lower() + (" + finetuning" if outcome.get("finetune") else ""),
        "data": outcome.get("data"),
        "clients": outcome.get("clients"),
        "unit": str(outcome.get("unit") or "") if epsilon > 0 else "",  # what sends nothing protects every unit
        "epsilon": epsilon,
        "delta": _number(file, outcome, "delta") if 0 < epsilon < math.inf else math.nan,
        "seed": seeds_of(settings, str(outcome.get("seed", ""))),
        "rounds": outcome.get("rounds", outcome.get("round")),
        "stopped": str(outcome.get("stopped", "")),
        "noise_multiplier": _number(file, outcome, "noise_multiplier"),
    }
    row = {key: shown(value) if isinstance(value, str) else value for key, value in row.items()}
    row |= {shown(key): _number(file, outcome, key) for key in (*METRICS, *asked) if key in outcome}
    return row | {f"{SETTING}{key}": value for key, value in telling(applicable).items()}


def _number(file: Path, outcome: Mapping[str, Any], key: str, missing: float = math.nan) -> float:
    value = outcome.get(key)
    try:
        return missing if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: {key!r} is {value!r}; it must be a number.") from error
