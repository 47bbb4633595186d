"""``fedmtl check``: what can be said of data before anything is trained, and a draft of the settings of a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..report.tables import write_text
from .config import Config, compose, made, resolve, with_automatic
from .options import add_config_dir, command_parser

_MOST = 50  # categories of a column that is no id
_EPILOG = """\
examples
  fedmtl check data=table data.path=visits.csv data.client=ward data.target=days privacy.epsilon=3
  fedmtl --config-dir . experiment=visits     the run of the draft that it writes, once you have confirmed its bounds

The draft of data.bounds, and the rows of clients, are read off private rows, which no epsilon covers: put in what you
know of the columns. --public prints only what follows from declared facts, and writes nothing.
"""


def check(words: list[str]) -> int:
    """Print what can be said of the data, and write a draft of the experiment of a table without bounds."""
    parser = command_parser("check", "Say before training whether sharing can help.", _EPILOG)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as for training")
    parser.add_argument("--public", action="store_true", help="only what follows from declared facts")
    add_config_dir(parser)
    options = parser.parse_intermixed_args(words)
    overrides = with_automatic(options.overrides)
    config = resolve(compose(overrides, options.config_dir))
    privacy, chosen = made(config["privacy"], "privacy"), {}
    node, table = dict(config["data"]), "data=table" in overrides
    if table and not options.public:
        node["bounds"], lines = _draft(node)
        print("\n".join(lines))
        if node.get("classes") == "infer":  # as the reader infers them, a draft to be confirmed, too
            node["classes"] = made(node, "data").classes
            node["bounds"], _ = _draft(node | {"bounds": config["data"].get("bounds")})
        _write(config | {"data": node})

    from ..trainer.check import check as outlook

    if config["algorithm"]["_target_"] is None:  # of automatic settings
        model = {name: value for name, value in config["model"].items() if name not in ("fix", "lora")}
        chosen = {"model": made(model, "model"), "schedule": made(config["schedule"], "schedule")}
        chosen["rounds"] = config["rounds"]
    print(outlook(made(node, "data"), privacy, **chosen, public=options.public))
    return 0


def _draft(node: Config) -> tuple[dict[str, Any], list[str]]:
    """Return the bounds of a table, the declared ones and a draft of the others, and a line on each column."""
    import pandas as pd

    from ..data.readers.columns import Table, looks_like_id

    frame = Table.of(node["path"]).frame
    bounds, target, lines = dict(node.get("bounds") or {}), node["target"], list[str]()
    chosen = node.get("features") or [name for name in frame.columns if name not in (node["client"], target)]
    for name in [*chosen, target]:
        if name not in frame.columns:
            raise ConfigError(f"{node['path']} has no column {name!r}; its columns are {', '.join(frame.columns)}.")
        column, values = frame[name], sorted(map(str, frame[name].dropna().unique()))
        number = pd.api.types.is_numeric_dtype(column.dtype)
        text = f"  {name}: {f'{column.min():g} to {column.max():g}' if number else f'{len(values):,} categories'}"
        text += f", {missing:,} missing" if (missing := int(column.isna().sum())) else ""
        if looks_like_id(column) or (not number and len(values) > _MOST):
            if name == target and name not in bounds:
                raise ConfigError(
                    f"data.target is {name!r}, which looks like an id of rows; choose another, or bound it."
                )
            text += "; it looks like an id: leave it out of data.features"
        elif name == target and not number:
            node["labels"] = node.get("labels") or values
        elif name in bounds or (name == target and node.get("classes") is not None):
            pass
        elif len(values) > 1 or not number:
            bounds[name] = [float(column.min()), float(column.max())] if number else values
        lines.append(text)
    head = f"{node['path']}: columns, read off private rows that no epsilon covers; confirm or replace the bounds"
    return bounds, [head, *lines]


def _write(config: Config) -> None:
    """Write an experiment, named after the table, with the data and the budget of a configuration; one that is there
    already stays."""
    from omegaconf import OmegaConf

    name = re.sub(r"\W+", "_", Path(config["data"]["path"]).stem)
    file = Path("experiment") / f"{name}.yaml"
    if file.exists():
        print(f"{file} is there already and stays as it is; remove it for a new draft")
        return
    data = {name: value for name, value in config["data"].items() if value is not None and name != "_target_"}
    data |= {"classes": config["data"].get("classes"), "path": str(Path(config["data"]["path"]).resolve())}
    data = {name: value for name, value in data.items() if name not in ("seed", "partition")}
    values = {"data": data, "privacy": {"epsilon": config["privacy"].get("epsilon")}}
    lines = ["# @package _global_", "# A draft: confirm that the bounds are public, or replace them.", "defaults:"]
    lines += ["  - override /data: table", "  - override /algorithm: auto", ""]
    file.parent.mkdir(exist_ok=True)
    write_text(file, "\n".join([*lines, OmegaConf.to_yaml(OmegaConf.create(values))]))
    print(f"wrote {file}; fedmtl --config-dir . experiment={name} runs it")
