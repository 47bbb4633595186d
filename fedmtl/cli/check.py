"""``fedmtl check``: what can be said of data before anything is trained, and a draft of the
settings of a table."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .._text import shown
from .._yaml import yaml_text
from ..errors import ConfigError
from ..report.tables import write_text
from .build import made, settings
from .config import Config, compose, resolve
from .output import show
from .overrides import with_automatic
from .parsers import command_parser

if TYPE_CHECKING:
    import pandas as pd

    from ..data.readers.summary import Summary

MISSING = "???"
_REFERENCE = re.compile(r"(\\*)\$\{")
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
        drafts = table and not options.public
        if drafts:
            _draft(node)
        data = made(node, "data")  # what cannot be read is no draft
        if drafts:
            _write(config | {"data": node}, overrides)

    from ..trainer.check import check as outlook

    if objects["algorithm"] == "auto":
        chosen = {
            name: objects[name]
            for name in ("model", "rounds", "schedule")
            if objects[name] != "auto"
        }
    show(outlook(data, objects["privacy"], **chosen, public=options.public))
    return 0


@contextmanager
def _said_once() -> Iterator[None]:
    """Let a block that reads the data more than once log nothing twice."""
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


def _draft(node: Config) -> None:
    """Fill in the bounds, features, labels and classes of a table that are not declared, and print
    a line on each column.

    Columns that look like ids, and constants, leave the features unless their bounds are declared.
    Columns with missing values become those of data.missing.
    """
    import pandas as pd

    from ..data.readers.columns import Table
    from ..data.readers.summary import Summary
    from ..data.readers.table_settings import feature_columns

    written: dict[str, Any] = {
        name: node[name] for name in ("separator", "decimal", "encoding", "comment") if name in node
    }
    table = Table.of(node["path"], settings=written)
    target = node["target"]
    bounds = dict(node.get("bounds") or {})
    missing = list[str]()
    time = node.get("time")
    left_out = time if time not in bounds else None
    chosen = feature_columns(table, node["client"], target, node.get("features"), left_out)
    lines = list[str]()
    for name in (*chosen, str(target)):
        values = table.frame[name]
        if pd.api.types.is_float_dtype(values.dtype):
            endless = (values.abs() == math.inf).fillna(False)
            table.refuse(endless.to_numpy(bool), name, "a finite number")
    goal = table.frame[str(target)].astype(str)
    for name in chosen:
        column = Summary(table.frame[name])
        note = ""
        if name not in bounds and _names_clients(table.frame, name, node["client"], column):
            note = (
                "; it names the client, whose rows it would tell apart, and new clients have no "
                "known one: left out of data.features (declare its data.bounds to have it)"
            )
        elif name not in bounds and column.doubt:
            note = f"; it {column.doubt}: left out of data.features ({column.remedy} to have it)"
        elif name not in bounds:
            bounds[name] = column.bounds
            if column.distinct:
                note = "; no two rows are alike: if it is an id, leave it out of data.features"
            elif column.coded:
                codes = ", ".join(
                    repr(f"{float(kind):g}") for kind in sorted(column.kinds, key=float)
                )
                note = (
                    f"; {len(column.kinds)} whole numbers: if they are codes, its bounds are "
                    f"[{codes}]"
                )
        if name in bounds and column.missing:
            note += (
                f"; {column.missing:,} missing values: 0, and a feature that says so (data.missing)"
            )
            missing.append(name)
        if len(goal.unique()) > 1 and goal.equals(table.frame[name].astype(str)):
            note += f"; equal to {target} in every row: is it known before?"
        lines.append(shown(f"  {name}: {column.text}{note}"))
    node["features"] = [name for name in chosen if name in bounds]
    declared = node.get("missing", "refuse")
    if missing and declared == "refuse":
        node["missing"] = missing
    elif missing and not isinstance(declared, str):
        node["missing"] = list(dict.fromkeys([*declared, *missing]))
    column = Summary(table.frame[str(target)])
    classes = node.get("classes")
    log = node.get("target_scale") == "log"
    hint = ""
    if column.skewed and not log and not isinstance(classes, int):
        hint = "; its mean is far above its median: data.target_scale=log may fit"
    lines.append(shown(f"  {target}: {column.text}{hint}"))
    _check_target(str(target), column)
    if (
        target not in bounds
        and column.doubt
        and not (node.get("labels") or isinstance(classes, int))
    ):
        raise ConfigError(
            f"data.target is {target!r}, which {column.doubt}; choose another, or {column.remedy}."
        )
    head = (
        f"{node['path']}: columns, read off private rows that no epsilon covers; confirm or "
        "replace the bounds"
    )
    repeated = int(table.frame.astype(str).duplicated().sum())
    if repeated:
        lines.append(
            f"  {repeated:,} of {len(table):,} rows repeat another one in every column: the same "
            "row may be in training and in test"
        )
    show("\n".join([head, *lines]))
    node["bounds"] = bounds
    if not column.numeric:
        node["labels"] = node.get("labels") or column.kinds
    if classes == "infer" and log:
        node["classes"] = None
    elif classes == "infer":
        # as the reader infers them, a draft to be confirmed, too
        node["classes"] = made(node, "data").classes
    if column.numeric and node.get("classes") is None:
        bounds.setdefault(target, column.bounds)


def _names_clients(frame: pd.DataFrame, name: str, client: str | None, column: Summary) -> bool:
    """Return True if a column of texts has one value for each client, and another for every
    client, as a code beside the name of a country."""
    if client is None or column.numeric or column.dates:
        return False
    pairs = frame[[client, name]].dropna().astype(str).drop_duplicates()
    return len(pairs) == pairs[client].nunique() == pairs[name].nunique() > 1


def _check_target(name: str, column: Summary) -> None:
    """Refuse a target with missing values, or of dates.

    Raises:
        ConfigError: what to do instead.
    """
    if column.missing:
        raise ConfigError(
            f"data.target is {name!r}, which is missing in {column.missing:,} rows; choose "
            "another, or leave these rows out."
        )
    if column.dates:
        raise ConfigError(
            f"data.target is {name!r}, which holds dates; choose another, such as a number of days."
        )


def _write(config: Config, words: list[str]) -> None:
    """Write an experiment, named after the table, with the data and the budget of a configuration
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
    """Return values in which a text, whatever it holds, is that text for Hydra: ``${x}`` in a name
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
    return _REFERENCE.sub(_escaped, value)


def _escaped(found: re.Match[str]) -> str:
    """Return the beginning of a reference, with the backslashes before it, as Hydra reads it as a
    text."""
    return f"{found[1] * 2}\\${{"


def _without_bounds(draft: str) -> Config:
    """Return the values of a draft but for its bounds and the columns whose values may be
    missing."""
    values: Any = yaml.safe_load(draft)
    return values | {"data": values.get("data", {}) | {"bounds": None, "missing": None}}
