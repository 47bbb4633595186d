"""A draft of the settings of a table, read off its private rows: bounds, features, labels and
classes that are not declared, with a line on each column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..._extras import pandas as pd
from ..._text import counted, shown
from ...errors import ConfigError
from .cells import check_one_column
from .columns import Table
from .table import read_table
from .table_settings import feature_columns
from .table_summary import Summary

DRAFTED = ("features", "bounds", "missing", "labels", "classes")
"""The settings that a draft fills in."""
_MARKED = "; if these are amounts, write the numbers alone"
_FORM = ("separator", "decimal", "encoding", "comment")


def draft(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the settings of a table with a draft of those that are not declared, and a line on
    each column.

    Columns that look like ids, and constants, leave the features unless their bounds are declared.
    Columns with missing values become those of ``missing``. The draft and the lines are computed
    from private rows, which no epsilon covers.

    Args:
        settings: arguments of :func:`~fedmtl.data.read_table`; ``classes="infer"`` is filled in,
            too.

    Raises:
        ConfigError: a target that is none, or another impossible setting.
        DataError: a table that cannot be read.

    Example:
        >>> import pandas as pd
        >>> from fedmtl.data.readers.draft import draft
        >>> table = pd.DataFrame({"ward": list("abcd"), "age": [3, 5, 7, 9], "days": [1, 2, 2, 4]})
        >>> settings, text = draft({"path": table, "client": "ward", "target": "days"})
        >>> settings["features"], settings["bounds"]["age"]
        (['age'], [3, 9])
    """
    node = dict(settings)
    written: dict[str, Any] = {name: node[name] for name in _FORM if name in node}
    check_one_column(client=node["client"], target=node["target"], time=node.get("time"))
    table = Table.of(node["path"], settings=written)
    target = node["target"]
    labels = list(map(str, node.get("labels") or []))
    client = node["client"]
    if node.get("missing_client") == "drop" and client in table.frame.columns:
        table = table.without(table.gaps(client), client, texts=True)
    if node.get("missing_target") == "drop" and target in table.frame.columns:
        gaps = table.gaps(target, labels)
        table = table.without(gaps, target, texts=bool(labels))
    bounds = dict(node.get("bounds") or {})
    missing = list[str]()
    time = node.get("time")
    left_out = time if time not in bounds else None
    chosen = feature_columns(table, client, target, node.get("features"), left_out)
    lines = list[str]()
    # a range with an infinite end would bound nothing
    _refuse_endless(table, (*chosen, str(target)))
    # as texts, so that missing values are equal, too
    goal = table.frame[str(target)].astype(str)
    for name in chosen:
        column = Summary(table.frame[name])
        note = ""
        feature = name in bounds
        if not feature:
            note, feature = _doubts(table.frame, name, client, column)
            if feature:
                bounds[name] = column.bounds
        if feature and column.missing:
            note += (
                f"; {counted(column.missing, 'missing value')}: 0, and a feature that says so "
                "(data.missing)"
            )
            missing.append(name)
        if len(goal.unique()) > 1 and goal.equals(table.frame[name].astype(str)):
            note += f"; equal to {target} in every row: is it known before?"
        lines.append(shown(f"  {name}: {column.text}{note}"))
    node["bounds"] = bounds
    node["features"] = [name for name in chosen if name in bounds]
    _fill_in_missing(node, missing)
    column = Summary(table.frame[str(target)])
    lines.append(shown(f"  {target}: {column.text}{_hint_of_scale(node, column)}"))
    _check_target(node, column, bounded=target in bounds)
    head = (
        f"{node['path']}: columns, read off private rows that no epsilon covers; confirm or "
        "replace the bounds"
    )
    # as texts, since lists have no hash
    repeated = int(table.frame.astype(str).duplicated().sum())
    if repeated:
        do = "repeat"
        if repeated == 1:
            do = "repeats"
        lines.append(
            f"  {repeated:,} of {counted(len(table), 'row')} {do} another one in every column: the "
            "same row may be in training and in test"
        )
    _fill_in_target(node, column)
    return node, "\n".join([head, *lines])


def _refuse_endless(table: Table, names: Sequence[str]) -> None:
    """Refuses columns with a number that is not finite."""
    for name in names:
        values = table.frame[name]
        if pd.api.types.is_float_dtype(values.dtype):
            endless = (values.abs() == math.inf).fillna(False)
            table.refuse(endless.to_numpy(bool), name, "a finite number")


def _fill_in_missing(node: dict[str, Any], missing: Sequence[str]) -> None:
    """Adds columns with missing values to those that may have some, if any are declared by name or
    none at all."""
    declared = node.get("missing", "refuse")
    if missing and declared == "refuse":
        node["missing"] = list(missing)
    elif missing and not isinstance(declared, str):
        node["missing"] = list(dict.fromkeys([*declared, *missing]))


def _doubts(
    frame: pd.DataFrame, name: str, client: str | None, column: Summary
) -> tuple[str, bool]:
    """Returns the note on a column that has no bounds, why it is no feature or may be none, and
    whether it is one."""
    if _names_clients(frame, name, client, column):
        note = (
            "; it names the client, whose rows it would tell apart, and new clients have no "
            "known one: left out of data.features (declare its data.bounds to have it)"
        )
        return note, False
    if column.doubt:
        note = f"; it {column.doubt}: left out of data.features ({column.remedy} to have it)"
        return note, False
    if column.distinct:
        return "; no two rows are alike: if it is an id, leave it out of data.features", True
    if column.coded:
        codes = ", ".join(repr(f"{float(kind):g}") for kind in sorted(column.kinds, key=float))
        note = f"; {len(column.kinds)} whole numbers: if they are codes, its bounds are [{codes}]"
        return note, True
    if column.marked:
        return _MARKED, True
    return "", True


def _hint_of_scale(node: dict[str, Any], column: Summary) -> str:
    """Returns the note on a real target whose logarithm may be easier to predict, or on one that
    is written with units."""
    settled = node.get("target_scale") == "log" or isinstance(node.get("classes"), int)
    if column.skewed and not settled:
        return "; its mean is far above its median: data.target_scale=log may fit"
    if column.marked:
        return _MARKED
    return ""


def _fill_in_target(node: dict[str, Any], column: Summary) -> None:
    """Fills in the labels, the classes or the range of the target, if they are not declared."""
    if not column.numeric:
        node["labels"] = node.get("labels") or column.kinds
    if node.get("classes") == "infer":
        node["classes"] = None
        if node.get("target_scale") != "log":
            # as the reader infers them, a draft to be confirmed, too
            node["classes"] = read_table(**node | {"classes": "infer"}).classes
            _fill_in_grades(node, column)
    if column.numeric and node.get("classes") is None:
        node["bounds"].setdefault(node["target"], column.bounds)


def _fill_in_grades(node: dict[str, Any], column: Summary) -> None:
    """Makes whole numbers 1 to K of the target, of which the reader would make K + 1 classes, K
    labels."""
    first = column.whole and column.bounds[0] == 1
    if node["classes"] is not None and first:
        node["labels"] = list(range(1, node["classes"]))
        node["classes"] = len(node["labels"])


def _names_clients(frame: pd.DataFrame, name: str, client: str | None, column: Summary) -> bool:
    """Returns True if a column of texts has one value for each client, and another for every
    client, as a code beside the name of a country."""
    if client is None or column.numeric or column.dates:
        return False
    # one to one: as many pairs as clients and as values
    pairs = frame[[client, name]].dropna().astype(str).drop_duplicates()
    return len(pairs) == pairs[client].nunique() == pairs[name].nunique() > 1


def _check_target(node: dict[str, Any], column: Summary, *, bounded: bool) -> None:
    """Refuses a target with missing values, of dates, or one that looks like none and is not
    declared.

    Raises:
        ConfigError: such a target; the message says how to mend the draft.
    """
    name = str(node["target"])
    if column.missing:
        raise ConfigError(
            f"data.target is {name!r}, which is missing in {counted(column.missing, 'row')}; "
            "choose another, or leave rows without one out with data.missing_target=drop."
        )
    if column.dates:
        raise ConfigError(
            f"data.target is {name!r}, which holds dates; choose another, such as a number of days."
        )
    declared = bounded or node.get("labels") or isinstance(node.get("classes"), int)
    if column.doubt and not declared:
        raise ConfigError(
            f"data.target is {node['target']!r}, which {column.doubt}; choose another, or "
            f"{column.remedy}."
        )
