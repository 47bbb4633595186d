"""``fedmtl check``: what can be said of data before anything is trained, and a draft of the
settings of a table."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .._text import counted, shown
from .._yaml import yaml_text
from ..errors import ConfigError
from ..report.tables import write_text
from .build import made, settings
from .config import Config, compose, resolve
from .output import show
from .parsers import command_parser
from .typed import with_automatic
from .words import without_references

if TYPE_CHECKING:
    import pandas as pd

    from ..data.readers.columns import Table
    from ..data.readers.summary import Summary

MISSING = "???"
_GROUPS = ("privacy=", "model=", "data/partition=")  # that a draft repeats


def check(words: list[str]) -> int:
    """Say before training whether the noise allows sharing, and draft the settings of a table.

    The draft of data.bounds, and the rows of clients, are read off private rows, which no epsilon
    covers: put in what you know of the columns. --public writes nothing, and prints what follows
    from declared facts and the number of clients, with privacy=record also that of records; its
    warnings and errors may speak of rows.

    examples
      fedmtl check visits.csv client=ward target=days privacy.epsilon=3
      fedmtl --config-dir . experiment=visits
          a run of the draft, once you have confirmed its bounds
    """
    parser = command_parser(check, "as for training")
    parser.add_argument(
        "--public", action="store_true", help="print no line that is computed from values"
    )
    options = parser.parse_intermixed_args(words)
    # PyTorch is imported for a check, and not for its help.
    from ..local.losses import is_of_numbers, name_of, resolve_loss

    overrides = with_automatic(options.overrides)
    config = resolve(compose(overrides))
    objects = settings(config)
    if is_of_numbers(objects["loss"]):
        loss = name_of(resolve_loss(objects["loss"]))
        raise ConfigError(
            f"loss is {loss!r}, for which there are no automatic settings to check; leave it out "
            "here, and train with it and an algorithm that takes it, as algorithm=fedavg."
        )
    chosen = {}
    node = dict(config["data"])
    table = "data=table" in overrides
    with _said_once():
        lines = list[str]()
        drafts = table and not options.public
        if drafts:
            lines = _draft(node)
        data = made(node, "data")  # what cannot be read is no draft

    from ..trainer.check import check as outlook

    if objects["algorithm"] == "auto":
        chosen = {
            name: objects[name]
            for name in ("model", "rounds", "schedule")
            if objects[name] != "auto"
        }
    found = outlook(data, objects["privacy"], **chosen, public=options.public)
    # only here, so that of data with an error this error is the whole output
    if drafts:
        show("\n".join(lines))
        _write(config | {"data": node}, overrides)
    show(found)
    return 0


@contextmanager
def _said_once() -> Iterator[None]:
    """Lets a block that reads the data more than once log nothing twice."""
    seen = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in seen
        seen.add(text)
        return new

    log = logging.getLogger("fedmtl")
    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


def _draft(node: Config) -> list[str]:
    """Fills in the bounds, features, labels and classes of a table that are not declared, and
    returns a head and a line on each column.

    Columns that look like ids, and constants, leave the features unless their bounds are declared.
    Columns with missing values become those of data.missing.
    """

    from ..data.readers.cells import check_one_column
    from ..data.readers.columns import Table
    from ..data.readers.summary import Summary
    from ..data.readers.table_settings import feature_columns

    check_one_column(client=node["client"], target=node["target"], time=node.get("time"))
    written: dict[str, Any] = {
        name: node[name] for name in ("separator", "decimal", "encoding", "comment") if name in node
    }
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
    node["bounds"] = bounds
    _fill_in_target(node, column)
    return [head, *lines]


def _refuse_endless(table: Table, names: Sequence[str]) -> None:
    """Refuses columns with a number that is not finite."""
    import pandas as pd

    for name in names:
        values = table.frame[name]
        if pd.api.types.is_float_dtype(values.dtype):
            endless = (values.abs() == math.inf).fillna(False)
            table.refuse(endless.to_numpy(bool), name, "a finite number")


def _fill_in_missing(node: Config, missing: Sequence[str]) -> None:
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
    return "", True


def _hint_of_scale(node: Config, column: Summary) -> str:
    """Returns the note on a real target whose logarithm may be easier to predict."""
    settled = node.get("target_scale") == "log" or isinstance(node.get("classes"), int)
    if column.skewed and not settled:
        return "; its mean is far above its median: data.target_scale=log may fit"
    return ""


def _fill_in_target(node: Config, column: Summary) -> None:
    """Fills in the labels, the classes or the range of the target, if they are not declared."""
    if not column.numeric:
        node["labels"] = node.get("labels") or column.kinds
    if node.get("classes") == "infer":
        node["classes"] = None
        if node.get("target_scale") != "log":
            # as the reader infers them, a draft to be confirmed, too
            node["classes"] = made(node | {"classes": "infer"}, "data").classes
            _fill_in_grades(node, column)
    if column.numeric and node.get("classes") is None:
        node["bounds"].setdefault(node["target"], column.bounds)


def _fill_in_grades(node: Config, column: Summary) -> None:
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


def _check_target(node: Config, column: Summary, *, bounded: bool) -> None:
    """Refuses a target with missing values, of dates, or one that looks like none and is not
    declared.

    Raises:
        ConfigError: what to do instead.
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


def _write(config: Config, words: list[str]) -> None:
    """Writes an experiment, named after the table, with the data and the budget of a configuration
    that ``words`` chose.

    One that differs at most in its bounds stays; beside one of another table or budget the name
    gets a number.
    """
    data = {
        name: value
        for name, value in config["data"].items()
        if value is not None and name != "_target_"
    }
    files = {
        name: str(Path(data[name]).resolve()) for name in ("path", "test_path") if name in data
    }
    # None is a setting of its own here, a real target
    data |= files | {"classes": config["data"].get("classes")}
    dealt = (data.get("partition") or {}).get("_target_")  # else a column says whose a row is
    data = {
        name: value
        for name, value in data.items()
        if name != "seed" and (name != "partition" or dealt)
    }
    values = {"data": data, "privacy": {"epsilon": config["privacy"].get("epsilon")}}
    lines = [
        "# @package _global_",
        "# A draft: confirm that the bounds are public, or replace them.",
        "defaults:",
    ]
    lines += ["  - override /data: table", "  - override /algorithm: auto"]
    lines += [
        f"  - override /{word.replace('=', ': ')}" for word in words if word.startswith(_GROUPS)
    ]
    draft = "\n".join([*lines, "", yaml_text(_literal(values))])
    stem = re.sub(r"\W+", "_", Path(config["data"]["path"]).stem)
    others = list[str]()
    while (
        file := Path("experiment") / f"{stem}{f'_{len(others) + 1}' if others else ''}.yaml"
    ).exists():
        # bounds may have been confirmed or replaced by hand, which a new draft must not undo
        if _without_bounds(file.read_text(encoding="utf-8")) == _without_bounds(draft):
            show(f"{file} is there already and stays as it is; remove it for a new draft")
            return
        others.append(str(file))
    file.parent.mkdir(exist_ok=True)
    write_text(file, draft)
    beside = ""
    if others:
        beside = f" (other data or another budget: {', '.join(others)})"
    show(f"wrote {file}{beside}; fedmtl --config-dir . experiment={file.stem} runs it")


def _literal(value: Any) -> Any:
    """Returns values in which a text, whatever it holds, is that text for Hydra: ``${x}`` in a name
    of a column, a category, a client or a file is no reference. Keys are never references.

    Raises:
        ConfigError: a text that Hydra reads as a missing value.
    """
    if isinstance(value, dict):
        return {name: _literal(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_literal(part) for part in value]
    if value == MISSING:
        raise ConfigError(
            f"a column, a category or a file is called {MISSING!r}, which a configuration file "
            "reads as a value that is missing; give it another name."
        )
    if not isinstance(value, str):
        return value
    return without_references(value)


def _without_bounds(draft: str) -> Config:
    """Returns the values of a draft but for its bounds and the columns whose values may be
    missing."""
    values: Any = yaml.safe_load(draft)
    return values | {"data": values.get("data", {}) | {"bounds": None, "missing": None}}
