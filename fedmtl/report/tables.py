"""The table of a report, in which runs that differ only in their seeds are one row.

Such a row has the mean and the standard deviation of each metric.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from .._extras import pandas as pd
from .._files import write_bytes
from .._rounding import number_text, percent, rounded_up
from .._text import cell
from ._names import CHOICE_NOT_COVERED
from .runs import KIND, MAIN, METRICS, PRINTED, THAN_LOCAL, metrics_of, settings_of

TITLE = "Scores over clients, on private test data: not covered by epsilon"
SHARES = "% vs local +/=/-"
DEVIATION = " ±"
"""The ending of the column of a metric's standard deviation over runs."""


def grouped(rows: pd.DataFrame) -> pd.DataFrame:
    """Averages the rows of :func:`fedmtl.report.frame` that differ only in their seeds.

    Returns:
        A row for each experiment and epsilon, ordered by data, unit, method, label and epsilon. It
        has the number of ``seeds`` and, for each metric, the mean and the standard deviation (n -
        1; 0 for a single run). Its epsilon is the largest of the averaged ones, which agree to six
        decimals.
    """
    metrics = metrics_of(rows)
    lines = []
    for _, same in rows.groupby(["experiment", rows["epsilon"].round(6), "delta"], dropna=False):
        line = same.iloc[0][[*KIND, "label", "delta"]].to_dict()
        line["epsilon"] = same["epsilon"].max()
        line["seeds"] = len(same)
        # a run without the metric makes the mean NaN: it would be one over other seeds
        line.update(same[metrics].mean(skipna=False).to_dict())
        deviations = same[metrics].std(skipna=False, ddof=min(1, len(same) - 1))
        line.update(deviations.add_suffix(DEVIATION).to_dict())
        lines.append(line)
    order = [*KIND, "label", "epsilon", "delta"]
    return pd.DataFrame(lines).sort_values(order, na_position="first", ignore_index=True)


def csv_text(rows: pd.DataFrame) -> str:
    """Returns every row at full precision as CSV, with the settings that differ.

    It is the machine-readable form of the report. Texts are as :func:`fedmtl._text.cell` writes
    them.
    """
    same = [name for name in settings_of(rows) if rows[name].nunique(dropna=False) == 1]
    table = rows.drop(columns=same).map(cell).rename(columns=cell)
    return str(table.to_csv(index=False, lineterminator="\n"))


def main_metric(rows: pd.DataFrame) -> str | None:
    """Returns the main metric of rows or groups, the first with a finite number; None without."""
    for name in MAIN:
        if rows[name].map(math.isfinite).any():
            return name
    return None


def data_text(group: pd.Series) -> str:
    """Returns the data's name and number of clients; results on different data do not compare."""
    words = []
    if pd.notna(group["data"]):
        words.append(str(group["data"]))
    if pd.notna(group["clients"]):
        words.append(f"{group['clients']:,.0f} clients")
    return ", ".join(words)


def table_of(groups: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Returns the table as text, and its caption.

    Args:
        groups: from :func:`grouped`.

    Returns:
        A row for each group, with the mean and, over several seeds, the standard deviation of each
        metric; and the lines of the caption, with the columns that are the same in all groups.
    """
    columns = {
        "method": list(groups["label"]),
        "data": [data_text(group) or "-" for _, group in groups.iterrows()],
        "protects": [unit or "-" for unit in groups["unit"]],
        "epsilon": [rounded_up(epsilon, 3) for epsilon in groups["epsilon"]],
        "delta": [_delta_text(delta) for delta in groups["delta"]],
        "runs": list(map(str, groups["seeds"])),
    }
    same = []
    for name in ("data", "protects", "delta", "runs"):
        # one text, and "-" for groups to which the column does not apply
        if len({*columns[name], "-"}) <= 2:
            same.append(name)
    caption = _caption(groups, {name: columns[name] for name in same})
    columns.update(_metric_columns(groups))
    shown = {name: texts for name, texts in columns.items() if name not in same}
    return pd.DataFrame(shown, dtype=object), caption


def markdown_text(groups: pd.DataFrame) -> str:
    """Returns the table as GitHub markdown."""
    table, caption = table_of(groups)
    words = list(table).index("epsilon")
    # columns of numbers, from epsilon on, are aligned to the right
    rule = ["---"] * words + ["---:"] * (len(table.columns) - words)
    text = ""
    for line in [list(map(str, table)), rule, *table.to_numpy().tolist()]:
        cells = [cell.replace("|", "\\|") for cell in line]
        text += f"| {' | '.join(cells)} |\n"
    return text + "".join(f"\n{line}\n" for line in caption)


def latex_text(groups: pd.DataFrame) -> str:
    """Returns the table for LaTeX with the package booktabs; its caption is a comment."""
    table, caption = table_of(groups)
    words = list(table).index("epsilon")
    alignment = "l" * words + "r" * (len(table.columns) - words)
    text = table.to_latex(index=False, escape=True, column_format=alignment)
    # to_latex escapes the special characters of LaTeX, and passes these two on
    text = text.replace("±", r"$\pm$").replace("…", r"\dots{}")
    comments = "".join(f"% {line}\n" for line in [TITLE, *caption])
    return comments + text


def terminal_text(groups: pd.DataFrame, width: int = 80) -> str:
    """Returns the table for a terminal of ``width`` columns.

    Each data set has as many tables below each other as it takes, each with method and epsilon.
    """
    table, caption = table_of(groups)
    # without the column all rows are on the same data
    by_data: Any = [("", table)]
    if "data" in table:
        by_data = table.groupby("data")
    lines = [TITLE, ""]
    for data, same in by_data:
        if data:
            lines.append(str(data))
        columns = same.drop(columns="data", errors="ignore").set_index(["method", "epsilon"])
        lines.append(columns.to_string(line_width=width, sparsify=False))
        lines.append("")
    return "\n".join([*lines, *caption])


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes ``text`` to a temporary name in the same folder and renames it over ``path``."""
    write_bytes(Path(path), text.encode())
    return Path(path)


def _delta_text(delta: float) -> str:
    if math.isnan(delta):
        return "-"
    return rounded_up(delta, 3)


def _caption(groups: pd.DataFrame, same: dict[str, list[str]]) -> list[str]:
    """Returns the lines below a table: the columns that are the same in all groups, and notes."""
    words = []
    for name, texts in same.items():
        value = max(texts)  # "-" sorts before every other text
        if value == "-":
            continue
        if name == "runs":
            words.append(_runs_text(int(groups["seeds"].max())))
        else:
            words.append(f"{name} {value}")
    caption = ["; ".join(words)]
    if (groups["seeds"] > 1).any():
        caption.append("±: standard deviation over runs")
    if len(groups) > 1:
        caption.append(CHOICE_NOT_COVERED)
    return [line for line in caption if line]


def _runs_text(count: int) -> str:
    if count == 1:
        return "every row is one run"
    return f"every row is the mean of {count:,} runs"


def _metric_columns(groups: pd.DataFrame) -> dict[str, list[str]]:
    """Returns the columns of the metrics that some group has, as text by their titles."""
    columns: dict[str, list[str]] = {}
    metrics = metrics_of(groups)
    shares = [name for name in metrics if name.endswith(THAN_LOCAL)]
    additional = [name for name in metrics if name not in (*METRICS, *shares)]
    for name in (*PRINTED, *additional):
        if f"{name}{DEVIATION}" in groups and groups[name].map(math.isfinite).any():
            columns[name.replace("_", " ")] = _texts(groups, name)
    # the three shares of a metric (better, equal, worse) follow each other and become one column
    for better in shares[:: len(THAN_LOCAL)]:
        metric = better.removesuffix(THAN_LOCAL[0])
        three = groups[[f"{metric}{name}" for name in THAN_LOCAL]]
        if three.notna().any(axis=None):
            texts = [percent(line.dropna()) or "-" for _, line in three.iterrows()]
            columns[f"{metric.replace('_', ' ')}{SHARES}"] = texts
    return columns


def _texts(groups: pd.DataFrame, name: str) -> list[str]:
    """Returns the column of a metric as text: the mean and, over several seeds, the deviation.

    Each cell has as many decimals as the metric needs anywhere; the columns of its median, worst
    tenth and spread have the same number of them.
    """
    # the main metric decides about the columns that describe its distribution
    alike = [name]
    if name in PRINTED:
        alike = list(MAIN)
    numbers = []
    for value in groups[alike].to_numpy().ravel():
        if math.isfinite(value):
            numbers.append(number_text(value))
    decimals = max((len(number.partition(".")[2]) for number in numbers), default=3)
    large = any("e+" in number for number in numbers)
    exponents = any("e" in number for number in numbers)

    def text(value: float) -> str:
        if large:
            return f"{value:.3e}"
        if exponents:
            return number_text(value)
        return f"{round(value, 12):.{decimals}f}"

    texts = []
    columns = (groups[name], groups[f"{name}{DEVIATION}"], groups["seeds"])
    for mean, deviation, seeds in zip(*columns, strict=True):
        if not math.isfinite(mean):
            texts.append("-")
        elif seeds > 1:
            texts.append(f"{text(mean)} ±{text(deviation)}")
        else:
            texts.append(text(mean))
    return texts
