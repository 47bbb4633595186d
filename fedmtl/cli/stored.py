"""The configuration in the folder of a run: written for a resume, read again, and changed if
that is allowed."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._files import read_json
from .._text import shown
from .._yaml import read_yaml, yaml_text
from ..errors import ConfigError
from ..report.tables import write_text
from .build import Config
from .config import Typed, compose, of_place, read, resolve

_PATHS = (
    *("data.root", "data.path", "data.images", "data.cache", "data.counts"),
    *("graph.root", "graph.path", "algorithm.clusters", "latency.source"),
)


def write_config(folder: Path, words: Sequence[str], config: Config) -> None:
    """Writes the configuration that a resume reads, under the command that it came from, with paths
    that lead to the same files from everywhere."""
    text = yaml_text(with_absolute_paths(config))
    write_text(
        folder / "private" / "config.yaml", f"# {shown(shlex.join(['fedmtl', *words]))}\n{text}"
    )


def with_absolute_paths(node: Any, place: str = "") -> Any:
    """Returns a resolved configuration in which the paths of data, clusters, graphs and latencies
    are absolute."""
    if isinstance(node, dict):
        return {name: with_absolute_paths(value, f"{place}.{name}") for name, value in node.items()}
    # the run may be resumed from another folder
    if place.endswith(_PATHS) and isinstance(node, str):
        return os.path.abspath(node)
    return node


def stored_config(folder: Path) -> Config:
    """Returns the settings that the command has stored in the folder of a run.

    Raises:
        ConfigError: there are none, or only a part of them.
    """
    stored = folder / "private" / "config.yaml"
    if not stored.is_file():
        if _is_of_new_clients(folder):
            raise ConfigError(
                f"{folder} has models of new clients, made from the released model of another run, "
                "which is unchanged; give the folder of that run."
            )
        raise ConfigError(f"{folder} holds no run of this command: {stored} is missing.")
    config = read_yaml(stored)
    # a run has the one, a search the other
    if not isinstance(config, dict) or not config.keys() & {"algorithm", "search"}:
        raise ConfigError(
            f"{stored} has no 'algorithm', and was cut off or changed; restore it, "
            "or start a new run."
        )
    return {str(key): value for key, value in config.items()}


def _is_of_new_clients(folder: Path) -> bool:
    """Returns True if a folder was written by ``fedmtl adapt`` or ``personalize``."""
    result = folder / "private" / "result.json"
    if not result.is_file():
        return False
    from ..trainer.personalize import ReleasedModel

    return read_json(result).get("algorithm") == ReleasedModel.name


def with_logger(config: Config, folder: Path, overrides: Sequence[str]) -> Config:
    """Returns the stored settings of a run with its logger, which writes into the folder of the run
    or to the place that these overrides name. No file may choose it for numbers of private data.

    Args:
        config: as ``private/config.yaml`` has it.
        folder: of the run.
        overrides: settings of the logger that the user gives anew.

    Raises:
        ConfigError: another setting, or a stored place outside of the run that is not given anew.
    """
    config = changed(config, overrides, ("logger",))
    typed = {text.partition("=")[0] for text in overrides}
    for key, value in () if "logger" in typed else _places_elsewhere(config, folder, typed):
        raise ConfigError(
            f"logger.{key} of {folder / 'private' / 'config.yaml'} is {value!r}, which is not in "
            "the folder of the run, and a file does not say where else a run writes. If you chose "
            f"it, give it again: fedmtl resume {folder} logger.{key}=VALUE; logger=none resumes "
            "without."
        )
    return config


def check_logger(config: Config, folder: Path, typed: Typed) -> None:
    """Refuses a logger that writes or sends elsewhere than into the folder of the run, unless the
    user has typed the place: no file chooses it for numbers of private data.

    Args:
        config: resolved.
        folder: of the run.
        typed: the settings of the command.

    Raises:
        ConfigError: the place, by its key.
    """
    for key, value in _places_elsewhere(config, folder, typed.values):
        raise ConfigError(
            f"logger.{key} is {value!r} in a file, which is not in the folder of the run, and a "
            "file does not say where else a run writes. If you choose it, give it on the command "
            f"line: logger.{key}=VALUE."
        )


def _places_elsewhere(
    config: Config, folder: Path, typed: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Yields the settings of a logger, with their values, that lead out of the folder of a run and
    are not ``typed``."""
    logger = config.get("logger") or {}
    root = folder.resolve()
    # the two places that loggers write or send to
    for key in ("folder", "tracking_uri"):
        value = logger.get(key)
        inside = (
            key == "folder"
            and isinstance(value, str)
            and (root / value).resolve().is_relative_to(root)
        )
        if not (value is None or inside or f"logger.{key}" in typed):
            yield key, value


def changed(config: Config, overrides: Sequence[str], places: Sequence[str]) -> Config:
    """Returns stored settings with some changed: a group by another option, or one of its settings.

    Args:
        config: as stored.
        overrides: as typed.
        places: the groups and settings that may change.

    Raises:
        ConfigError: an override of something else.
    """
    refuse_others(overrides, places)
    own = {place: of_place(overrides, place) for place in places}
    chosen = {
        place: texts
        for place, texts in own.items()
        if any(text.startswith(f"{place}=") for text in texts)
    }
    new = {place: resolve(compose(texts))[place] for place, texts in chosen.items()}
    # the nested mappings are changed below, and the stored ones belong to the caller
    values = copy.deepcopy(config | new)
    for override in read(overrides).overrides:
        # a group that is chosen anew was composed with its settings above
        if override.key_or_group.partition(".")[0] not in chosen:
            _set(values, override.key_or_group, override.value())
    return values


def refuse_others(overrides: Sequence[str], places: Sequence[str]) -> None:
    """Refuses overrides of settings that stay as they are stored.

    Args:
        overrides: as typed.
        places: the groups and settings that may change.

    Raises:
        ConfigError: an override of another one.
    """
    for text in overrides:
        if not any(of_place([text], place) for place in places):
            kept = ", ".join(f"{place}=... and {place}.KEY=..." for place in places)
            raise ConfigError(
                f"{text} is not taken here: settings stay as they are stored, except {kept}."
            )


def _set(values: Config, key: str, value: Any) -> None:
    """Sets a value of nested mappings, in place, by its dotted key."""
    *places, name = key.split(".")
    for place in places:
        if not isinstance(values.get(place), dict):
            values[place] = {}
        values = values[place]
    values[name] = value
