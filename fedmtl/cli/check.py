"""``fedmtl check``: the outlook for data before training, and a draft of the settings of a
table."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import yaml

from .._yaml import yaml_text
from ..errors import ConfigError
from ..report.tables import write_text
from .around import printed_log
from .build import Config, arguments, by_key, made, settings
from .config import compose, resolve
from .output import show
from .parsers import command_parser
from .words import understood, without_references

MISSING = "???"
_HEAD = "# @package _global_\n# A draft: confirm that the bounds are public, or replace them.\n"
_GROUPS = ("privacy=", "model=", "data/partition=")  # that a draft repeats


def check(words: list[str]) -> int:
    """Say before training whether the noise allows sharing, and draft the settings of a table.

    The draft of data.bounds, and the rows of clients, are read off private rows, which no epsilon
    covers: put in known facts of the columns. --public writes nothing, and prints only lines that
    follow from declared facts and the number of clients, with privacy=record also that of records;
    its warnings and errors may speak of rows.

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
    overrides = understood(options.overrides)
    config = resolve(compose(overrides))
    checked = settings(config)
    # PyTorch is imported for a check, and neither for its help nor for a setting that is refused.
    from ..local.losses import is_counts, is_of_numbers

    chosen = {}
    node = dict(config["data"])
    drafts = "data=table" in overrides and not options.public
    if drafts:
        if is_of_numbers(checked.loss) and node.get("classes") == "infer":
            node["classes"] = None  # counts look like classes
        declared = node.get("bounds") or {}
        # the data are read once more below, and logged then
        with printed_log(logging.CRITICAL):
            drafted, text = _draft(node)
        node |= drafted
        if is_counts(checked.loss) and node["target"] not in declared:
            node["bounds"] = _from_zero(node["bounds"], node["target"])
    data = made(node, "data")  # data that cannot be read give no draft

    from ..trainer.check import check as outlook

    if checked.algorithm == "auto":
        chosen = {
            name: getattr(checked, name)
            for name in ("model", "rounds", "schedule")
            if getattr(checked, name) != "auto"
        }
    found = outlook(data, checked.privacy, **chosen, loss=checked.loss, public=options.public)
    # only here, so that of data with an error this error is the whole output
    if drafts:
        show(text)
        _write(_experiment(config | {"data": node}, overrides), node["path"])
    show(found)
    return 0


def _draft(node: Config) -> tuple[Config, str]:
    """Returns a draft of the settings of a table that are not declared, and a line on each
    column."""
    from ..data.readers.draft import DRAFTED, draft

    function, given = arguments(node, "data")
    with by_key({function.__name__: "data"}):
        settings, text = draft(given)
    return {name: settings[name] for name in DRAFTED if name in settings}, text


def _from_zero(bounds: Config, target: str) -> Config:
    """Returns bounds in which the range of a target of counts begins at 0."""
    if target not in bounds:
        return bounds
    high = bounds[target][1]
    return bounds | {target: [0, high]}


def _experiment(config: Config, words: list[str]) -> str:
    """Returns an experiment with the data and the budget of a configuration that ``words``
    chose."""
    data = dict(config["data"])
    del data["_target_"], data["seed"]
    # without one a column has the client of each row
    if not (data["partition"] or {}).get("_target_"):
        del data["partition"]
    data = {name: value for name, value in data.items() if value is not None}
    # None is a setting of its own here, a real target
    data["classes"] = config["data"]["classes"]
    for name in {"path", "test_path"} & data.keys():
        data[name] = str(Path(data[name]).resolve())
    chosen = ["data=table", "algorithm=auto", *(word for word in words if word.startswith(_GROUPS))]
    options = [word.split("=", 1) for word in chosen]
    values: Config = {"data": data, "privacy": {"epsilon": config["privacy"].get("epsilon")}}
    if config["loss"] != "auto":
        values["loss"] = config["loss"]
    defaults = {"defaults": [{f"override /{group}": option} for group, option in options]}
    return f"{_HEAD}{yaml_text(defaults)}{yaml_text(_literal(values))}"


def _write(draft: str, table: str) -> None:
    """Writes an experiment, named after the table.

    One that differs at most in its bounds stays; beside one of another table or budget the name
    gets a number.
    """
    stem = re.sub(r"\W+", "_", Path(table).stem)
    file = Path("experiment") / f"{stem}.yaml"
    others = list[str]()
    while file.exists():
        # bounds may have been confirmed or replaced by hand, which a new draft must not undo
        if _without_bounds(file.read_text(encoding="utf-8")) == _without_bounds(draft):
            show(f"{file} is there already and stays as it is; remove it for a new draft")
            return
        others.append(str(file))
        file = file.with_name(f"{stem}_{len(others) + 1}.yaml")
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
