"""The table of a report: runs that differ in their seeds only are one row, with a mean and a deviation."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .._files import write_bytes
from .._rounding import number_text, percent, rounded_up
from .._text import cell
from ._names import CHOICE_NOT_COVERED
from .runs import KIND, MAIN, METRICS, PRINTED, THAN_LOCAL, metrics_of, settings_of

if TYPE_CHECKING:
    import pandas as pd

TITLE = "Scores over clients, on private test data: not covered by epsilon"
SHARES = "% than local +/=/-"
DEVIATION = " ±"
"""What follows a metric's name in the column of its standard deviation over runs."""


def grouped(rows: pd.DataFrame) -> pd.DataFrame:
    """Average the rows of :func:`fedmtl.report.frame` that differ only in their seeds.

    Returns:
        A row for each experiment and epsilon (the largest of the averaged ones, which agree to six decimals), ordered
        by data, unit, method, label and epsilon: the number of ``seeds``, the mean and the standard deviation (n - 1;
        0 for a single run) of each metric.
    """
    import pandas as pd

    metrics, lines = metrics_of(rows), []
    for _, same in rows.groupby(["experiment", rows["epsilon"].round(6), "delta"], dropna=False):
        line = same.iloc[0][[*KIND, "label", "delta"]].to_dict()
        line |= {"epsilon": same["epsilon"].max(), "seeds": len(same)} | same[metrics].mean(skipna=False).to_dict()
        deviations = same[metrics].std(skipna=False, ddof=min(1, len(same) - 1))
        lines.append(line | deviations.add_suffix(DEVIATION).to_dict())
    order = [*KIND, "label", "epsilon", "delta"]
    return pd.DataFrame(lines).sort_values(order, na_position="first", ignore_index=True)


def csv_text(rows: pd.DataFrame) -> str:
    """Return every row at full precision, with the settings that differ; the machine-readable form of the report, with
    texts as :func:`fedmtl._text.cell` writes them."""
    same = [name for name in settings_of(rows) if rows[name].nunique(dropna=False) == 1]
    table = rows.drop(columns=same).map(cell).rename(columns=cell)
    return str(table.to_csv(index=False, lineterminator="\n"))


def main_metric(rows: pd.DataFrame) -> str | None:
    """Return the main metric of rows or of groups, the first with a finite number; None without any."""
    return next((name for name in MAIN if rows[name].map(math.isfinite).any()), None)


def data_text(group: pd.Series) -> str:
    """Return the data's name and number of clients; results on different data do not compare."""
    from pandas import notna

    words = [str(group["data"])] if notna(group["data"]) else []
    return ", ".join([*words, f"{group['clients']:,.0f} clients"] if notna(group["clients"]) else words)


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
    words = {name: f"{name} {max(columns[name])}" for name in same if max(columns[name]) != "-"}
    if "runs" in words:
        count = groups["seeds"].max()
        words["runs"] = "every row is one run" if count == 1 else f"every row is the mean of {count:,} runs"
    caption = ["; ".join(words.values())]
    caption += ["±: standard deviation over runs"] * bool((groups["seeds"] > 1).any())
    caption += [CHOICE_NOT_COVERED] * (len(groups) > 1)
    shares = [name for name in metrics_of(groups) if name.endswith(THAN_LOCAL)]
    for name in (*PRINTED, *[name for name in metrics_of(groups) if name not in (*METRICS, *shares)]):
        if f"{name}{DEVIATION}" in groups and groups[name].map(math.isfinite).any():
            columns[name.replace("_", " ")] = _texts(groups, name)
    for better in shares[:: len(THAN_LOCAL)]:
        metric = better.removesuffix(THAN_LOCAL[0])
        three = groups[[f"{metric}{name}" for name in THAN_LOCAL]]
        if three.notna().any(axis=None):
            texts = [percent(line.dropna()) or "-" for _, line in three.iterrows()]
            columns[f"{metric.replace('_', ' ')}{SHARES}"] = texts
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


def latex_text(groups: pd.DataFrame) -> str:
    """Return the table for LaTeX with the package booktabs, with what is the same in all groups as a comment."""
    table, caption = table_of(groups)
    words = list(table).index("epsilon")
    text = table.to_latex(index=False, escape=True, column_format="l" * words + "r" * (len(table.columns) - words))
    return "".join(f"% {line}\n" for line in [TITLE, *caption]) + text.replace("±", r"$\pm$").replace("…", r"\dots{}")


def terminal_text(groups: pd.DataFrame, width: int = 80) -> str:
    """Return the table for a terminal of ``width`` columns, of each data set by itself: as many tables below each other
    as it takes, each with method and epsilon."""
    table, caption = table_of(groups)
    lines = [TITLE, ""]
    for data, same in table.groupby("data") if "data" in table else [("", table)]:
        columns = same.drop(columns="data", errors="ignore").set_index(["method", "epsilon"])
        lines += [str(data)] * bool(data) + [columns.to_string(line_width=width, sparsify=False), ""]
    return "\n".join([*lines, *caption])


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` to a temporary name beside ``path`` and rename it over ``path``."""
    write_bytes(Path(path), text.encode())
    return Path(path)


def _texts(groups: pd.DataFrame, name: str) -> list[str]:
    """Return the column of a metric as text, mean and (over several seeds) standard deviation; each cell has as many
    decimals as the metric needs anywhere, and so have its median, worst tenth and spread."""
    like = groups[list(MAIN) if name in PRINTED else [name]]
    numbers = [number_text(value) for value in like.to_numpy().ravel() if math.isfinite(value)]
    decimals = max((len(number.partition(".")[2]) for number in numbers), default=3)

    def text(value: float) -> str:
        if any("e+" in number for number in numbers):
            return f"{value:.3e}"
        return number_text(value) if any("e" in number for number in numbers) else f"{round(value, 12):.{decimals}f}"

    return [
        (text(mean) + (f" ±{text(deviation)}" if seeds > 1 else "")) if math.isfinite(mean) else "-"
        for mean, deviation, seeds in zip(groups[name], groups[f"{name}{DEVIATION}"], groups["seeds"], strict=True)
    ]
