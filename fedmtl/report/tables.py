"""The table of a report: runs that differ in their seeds only are one row, with a mean and a deviation."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._files import write_bytes
from .._rounding import number_text, rounded_up
from ._names import CHOICE_NOT_COVERED, title_of
from .runs import METRICS, PRINTED, SETTING, THAN_LOCAL, metrics_of, named_of, settings_of

if TYPE_CHECKING:
    import pandas as pd

TITLE = "Scores over clients, on private test data: not covered by epsilon"
SHARES = "% than local +/=/-"
DEVIATION = " ±"
"""What follows a metric's name in the column of its standard deviation over runs."""
_KIND = ["data", "clients", "unit", "algorithm"]  # groups whose settings are compared
_PLAIN_WORDS = {"algorithm", "local", "model", "data", "privacy", "schedule"}  # that a short name goes without
_LONGEST = 24


def grouped(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the rows of :func:`fedmtl.report.frame` that differ only in their seeds.

    Rows of one seed are never averaged: they differ in what no result names, as the data of programs do.

    Returns:
        A row for each group, ordered by data, unit, method, settings and epsilon (the largest of the averaged ones,
        which agree to six decimals): ``seeds`` of them, the mean and the standard deviation (n - 1; 0 for a single
        run) of each metric, the index of its ``members``, and a ``label``.
    """
    import pandas as pd

    settings, metrics = settings_of(rows), metrics_of(rows)
    by = [*_KIND, *settings, "budget", "delta"]
    rows = rows.assign(budget=rows["epsilon"].round(6))
    rows["place"] = rows.groupby([*by, "seed"], dropna=False).cumcount()
    lines = []
    for _, same in rows.groupby([*by, "place"], dropna=False):
        line = same.iloc[0][[*by, "place", "named"]].to_dict()
        line |= {"epsilon": same["epsilon"].max(), "seeds": len(same), "members": tuple(same.index)}
        line |= same[metrics].mean(skipna=False).to_dict()
        deviations = same[metrics].std(skipna=False, ddof=min(1, len(same) - 1))
        lines.append(line | deviations.add_suffix(DEVIATION).to_dict())
    groups = pd.DataFrame(lines)
    groups["label"] = _labels(groups, settings)
    return groups.sort_values([*_KIND, *settings, "epsilon", "delta"], na_position="first", ignore_index=True)


def csv_text(rows: pd.DataFrame) -> str:
    """Return every row at full precision, with the settings that differ; the machine-readable form of the report."""
    same = [name for name in settings_of(rows) if rows[name].nunique(dropna=False) == 1]
    return str(rows.drop(columns=[*same, "named"]).to_csv(index=False, lineterminator="\n"))


def main_metric(rows: pd.DataFrame) -> str | None:
    """Return the main metric of rows or of groups, the first with a finite number; None without any."""
    return next((name for name in PRINTED[:3] if rows[name].map(math.isfinite).any()), None)


def data_text(group: pd.Series) -> str:
    """Return the data's name and number of clients; results on different data do not compare."""
    from pandas import notna

    words = [str(group["data"])] if notna(group["data"]) else []
    return ", ".join([*words, f"{group['clients']:.0f} clients"] if notna(group["clients"]) else words)


def table_of(groups: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the table as text, a row for each group with mean and (over several seeds) standard deviation, and lines
    with what is the same in all groups."""
    import pandas as pd

    columns = {
        "method": list(groups["label"]),
        "data": [data_text(group) or "-" for _, group in groups.iterrows()],
        "protects": [unit or "-" for unit in groups["unit"]],
        "epsilon": [rounded_up(epsilon, 3) for epsilon in groups["epsilon"]],
        "delta": ["-" if math.isnan(delta) else rounded_up(delta, 3) for delta in groups["delta"]],
        "runs": list(map(str, groups["seeds"])),
    }
    same = [name for name in ("data", "protects", "delta", "runs") if len({*columns[name], "-"}) <= 2]
    caption = ["; ".join(f"{name} {max(columns[name])}" for name in same if max(columns[name]) != "-")]
    caption += ["±: standard deviation over runs"] * bool((groups["seeds"] > 1).any())
    caption += [CHOICE_NOT_COVERED] * (len(groups) > 1)
    shares = ["/".join(f"{100 * share:.0f}" for share in than_local(group)) or "-" for _, group in groups.iterrows()]
    for name in (*PRINTED, SHARES, *[name for name in metrics_of(groups) if name not in METRICS]):
        if name == SHARES and set(shares) != {"-"}:
            columns[name] = shares
        elif f"{name}{DEVIATION}" in groups and groups[name].map(math.isfinite).any():
            columns[name.replace("_", " ")] = _texts(groups, name)
    table = pd.DataFrame({name: texts for name, texts in columns.items() if name not in same}, dtype=object)
    return table, [line for line in caption if line]


def markdown_text(groups: pd.DataFrame) -> str:
    """Return the table as GitHub markdown."""
    table, caption = table_of(groups)
    words = list(table).index("epsilon")
    rule = ["---"] * words + ["---:"] * (len(table.columns) - words)
    lines = [list(map(str, table)), rule, *table.to_numpy().tolist()]
    text = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    return text + "".join(f"\n{line}\n" for line in caption)


def terminal_text(groups: pd.DataFrame, width: int = 80) -> str:
    """Return the table for a terminal of ``width`` columns: as many tables below each other as it takes, each with
    method and epsilon."""
    table, caption = table_of(groups)
    text = table.set_index(["method", "epsilon"]).to_string(line_width=width, sparsify=False)
    return "\n".join([TITLE, "", text, "", *caption])


def than_local(group: pd.Series) -> tuple[float, ...]:
    """Return the shares of clients that are better, equally and worse off than alone; empty where they are unknown."""
    shares = tuple(float(group[name]) for name in THAN_LOCAL)
    return shares if all(map(math.isfinite, shares)) else ()


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` to a temporary name beside ``path`` and rename it over ``path``."""
    write_bytes(Path(path), text.encode())
    return Path(path)


def _texts(groups: pd.DataFrame, name: str) -> list[str]:
    """Return the column of a metric as text, mean and (over several seeds) standard deviation, with as many decimals in
    each cell."""
    main = (
        groups[list(PRINTED[:3])].bfill(axis=1).iloc[:, 0]
        if name in ("median", "worst_tenth", "spread")
        else groups[name]
    )
    sizes = main.where(main.map(math.isfinite), groups[name])  # digits of what it is the distribution of
    plain = [number_text(value, size) for value, size in zip(groups[name], sizes, strict=True) if math.isfinite(value)]
    decimals = max((len(text.partition(".")[2]) for text in plain), default=0)

    def text(value: float, size: float) -> str:
        return number_text(value, size) if any("e" in cell for cell in plain) else f"{round(value, 12):.{decimals}f}"

    deviations = groups[f"{name}{DEVIATION}"]
    return [
        (text(mean, size) + (f" ±{text(deviation, size)}" if seeds > 1 else "")) if math.isfinite(mean) else "-"
        for mean, size, deviation, seeds in zip(groups[name], sizes, deviations, groups["seeds"], strict=True)
    ]


def _labels(groups: pd.DataFrame, settings: Sequence[str]) -> list[str]:
    """Return a short name of each group, the same for one method and settings at several epsilons: the method's, with
    what differs between the groups of one method, unit and data, such as ``PMTL lam 0.1``."""
    labels = {}
    for _, same in groups.groupby(_KIND, dropna=False):
        telling = _telling(same, settings)
        names = _short_names(telling)
        for place, group in same.iterrows():
            present = [key for key in telling if isinstance(group[key], str)]
            words = ", ".join(f"{names[key]} {_short_value(group[key])}" for key in present)
            number = f"({group['place'] + 1})" if group["place"] > 0 else ""
            labels[place] = " ".join(filter(None, (title_of(group["algorithm"]), words, number)))
    return [labels[place] for place in groups.index]


def _telling(groups: pd.DataFrame, settings: Sequence[str]) -> list[str]:
    """Return the settings that differ between the groups of one method: those that the command lines named, if they
    distinguish groups at one epsilon, else all."""
    named = named_of(groups)
    differing = [key for key in settings if groups[key].nunique(dropna=False) > 1]
    chosen = [key for key in differing if key in named]
    kinds = [groups.groupby(["budget", "delta", "place", *keys], dropna=False).ngroups for keys in (chosen, differing)]
    return chosen if kinds[0] == kinds[1] else differing


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return ``lr`` for ``algorithm.local.lr``, ``lora.rank`` for ``model.lora.rank``; whole keys if two are alike."""
    names = {}
    for key in keys:
        words = [word for word in key.removeprefix(SETTING).split(".") if word not in _PLAIN_WORDS]
        whole = key.removeprefix(SETTING)
        names[key] = ".".join(words[: -1 if len(words) > 1 and words[-1] == "kind" else None]) or whole
    several = [name for name in names.values() if list(names.values()).count(name) > 1]
    return {key: key.removeprefix(SETTING) if name in several else name for key, name in names.items()}


def _short_value(value: str) -> str:
    if "/" in value and " " not in value:
        value = Path(value).name
    value = " ".join(value.split())
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"
