"""Run folders as a data frame of pandas.

Only ``result.json``, ``outcome.json`` and ``config.yaml`` in ``private/`` and ``public/privacy.json`` of each run are
read, so a report costs no data, no model and no privacy.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import read_json
from ..errors import DataError
from ._names import register_stored
from ._settings import command_of, flat, of_baseline, seeds_of, telling

if TYPE_CHECKING:
    from pandas import DataFrame

THAN_LOCAL = ("better_than_local", "as_local", "worse_than_local")
PRINTED = ("accuracy", "recall_at_5", "mse", "median", "worst_tenth", "spread")
METRICS = (
    *PRINTED,
    *THAN_LOCAL,
    *("weighted_accuracy", "weighted_mse", "global_accuracy", "global_mse"),
    *("weighted_recall_at_5", "global_recall_at_5"),
)
"""What every result may have: the main metric over clients, its distribution, and the comparison with local models."""
DISTRIBUTION = ("", "_median", "_worst_tenth", "_spread", "_clients", *(f"_{name}" for name in THAN_LOCAL))
"""What follows the name of a metric that a run was asked to measure beside."""
FIXED = ("run", "algorithm", "comparison", "data", "clients", "unit", "epsilon", "delta", "seed", "rounds", "stopped")
SETTING = "config."
"""How the columns of settings begin."""
_MORE = ("noise_multiplier", "named")  # columns that are neither of these
ERROR = "error.txt"
"""In the private folder of a run that failed, why."""
_SHARED = ("data", "clients", "seed", "unit")  # of a run and of its baselines


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


def frame(folders: Iterable[str | os.PathLike[str]]) -> DataFrame:
    """Return a data frame with a row for each method of every finished run under ``folders``.

    A run has a row (each of its replicates has one), and so has each of its baselines, marked as a ``comparison``. A
    sweep trains the same baseline again in many of its runs: a baseline whose numbers are those of another row, or a
    run that is the same in everything but its folder, is no row of its own.

    Returns:
        The columns of ``FIXED`` (``epsilon`` is 0 where nothing is released and inf where nothing is protected), the
        metrics that the runs have, ``noise_multiplier``, ``named`` (the keys that the run's command line named), and
        all of its settings but seeds as text, in columns such as ``config.algorithm.lam``.

    Raises:
        DataError: no finished run, or a file that cannot be read.
    """
    import pandas as pd

    folders = [Path(folder) for folder in folders]
    finished, unfinished, failed = find_runs(folders)
    if not finished:
        names = ", ".join(map(str, folders))
        hint = f"; unfinished: {unfinished[0]} (fedmtl resume {unfinished[0]})" if unfinished else ""
        hint += "".join(f"; failed: {run}: {why.rstrip('.')}" for run, why in list(failed.items())[:1])
        raise DataError(f"no finished run under {names} (a finished run has private/result.json){hint}.")
    rows = pd.DataFrame([row for run in finished for row in _rows(run)])
    rows = rows.sort_values("comparison", kind="stable")
    numbers = [str(name) for name in rows if name not in ("run", "comparison", "noise_multiplier", "named")]
    bare = [name for name in numbers if not name.startswith(SETTING)]
    rows = rows[~rows.duplicated(numbers) & ~(rows["comparison"] & rows.duplicated(bare))]
    order = [*FIXED, *metrics_of(rows), *_MORE, *settings_of(rows)]
    return rows.sort_index().reindex(columns=list(dict.fromkeys(order))).reset_index(drop=True)


def metrics_of(rows: DataFrame) -> list[str]:
    """Return the columns that are metrics: those of ``METRICS``, then those that runs were asked for beside."""
    others = {*FIXED, *_MORE, *METRICS, *settings_of(rows)}
    return [*METRICS, *[str(name) for name in rows if name not in others]]


def settings_of(rows: DataFrame) -> list[str]:
    """Return the columns that are settings."""
    return [name for name in map(str, rows) if name.startswith(SETTING)]


def named_of(rows: DataFrame) -> set[str]:
    """Return the columns of the settings that command lines named."""
    return {f"{SETTING}{key}" for keys in rows["named"] if isinstance(keys, tuple) for key in keys}


def configuration(run: Path, result: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...] | None]:
    """Return every setting of a run as text by its dotted key, and the keys that its command line named.

    They come from ``private/config.yaml`` or, of a run that no command made, from its result. Lists are one value; what
    is null is left out, as if it was not there; an object is its class under its own key.

    Returns:
        The settings, empty for a run that says none, and the named keys, or None where there was no command.

    Raises:
        DataError: a configuration that is not YAML.
    """
    file = run / "private" / "config.yaml"
    if not file.is_file():
        return flat(result.get("configuration") or {}), None
    from omegaconf import OmegaConf

    try:
        text = file.read_text(encoding="utf-8")
        stored = OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:
        raise DataError(f"{file} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(stored, dict) or "search" in stored:
        return {}, None
    named = re.findall(r"(?<=\s)'?[+]{0,2}([\w./@]+)=", command_of(run) or "")
    return flat(stored), tuple(name.rpartition("@")[2].replace("/", ".") for name in named)


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
    settings, named = configuration(run, result)
    register_stored(result.get("methods"))
    own: list[dict[str, Any]] = [{}]
    if several is not None:
        try:
            spent = {band["budget"]: band["epsilon"] for band in result.get("bands") or ()}
            seed = result.get("seed", "")
            own = [row | {"epsilon": spent[row["budget"]], "seed": f"{seed}.{i}"} for i, row in enumerate(several)]
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: replicates and bands do not fit: {error!r}.") from error
    for replicate in own:
        row = _row(file, privacy | result | replicate, settings, comparison=False)
        yield {"run": str(run), "named": named, **row}
    shared = {key: result[key] for key in _SHARED if key in result}
    for name, outcome in baselines.items():
        row = _row(file, privacy | shared | {"algorithm": name} | outcome, settings, comparison=True)
        yield {"run": str(run), "named": named, **row}


def _row(file: Path, outcome: dict[str, Any], settings: dict[str, str], *, comparison: bool) -> dict[str, Any]:
    name, main = outcome.get("algorithm"), outcome.get("metric")
    if not isinstance(name, str):
        raise DataError(f"{file}: 'algorithm' is {name!r}; it must be the method's name.")
    epsilon = _number(file, outcome, "epsilon", missing=math.inf)
    asked = [f"{name}{part}" for name in outcome.get("metrics") or () if name != main for part in DISTRIBUTION]
    applicable = of_baseline(settings, releases=epsilon > 0) if comparison or epsilon == 0 else settings
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
    row |= {key: _number(file, outcome, key) for key in (*METRICS, *asked) if key in outcome}
    return row | {f"{SETTING}{key}": value for key, value in telling(applicable).items()}


def _number(file: Path, outcome: Mapping[str, Any], key: str, missing: float = math.nan) -> float:
    value = outcome.get(key)
    try:
        return missing if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{file}: {key!r} is {value!r}; it must be a number.") from error
