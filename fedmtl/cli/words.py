"""The words of a command: as people write them, a table by its path and settings by their short
names, and as Hydra reads them, as overrides of settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from .._extras import vision_models
from ..errors import ConfigError
from .refusals import refusals

_TABLE = re.compile(r"(data=)?([^=]+\.(csv|csv\.gz|tsv|tsv\.gz|parquet))", re.IGNORECASE)
_OTHER_FILE = re.compile(
    r"(data=)?([^=]+\.(xlsx?|ods|jsonl?|feather|arrow|dta|sav|rds|txt))", re.IGNORECASE
)
_OF_A_TABLE = ("client", "target", "features", "bounds", "classes", "labels")
_TEXTS = ("data.path", "data.client", "data.target")  # names, and never values of another type
_USERS_DATA = ("data=table", "data=images", "data=leaf")
_COMMANDS = ("check", "search", "audit", "adapt")  # whose words are settings, behind their name
_OPTIONS = {  # words in the place of an option of a group, and the meaning
    "finetune=true": "finetune=auto trains every client's own model further; finetune=none does "
    "not",
    "finetune=false": "finetune=none trains no client's model further",
    "privacy=true": "privacy=client protects whole clients, privacy=record single records",
    "privacy=false": "privacy=none trains without noise",
}


def understood(words: Sequence[str]) -> list[str]:
    """Returns the words of a command with a table's path, ``visits.csv`` or ``data=visits.csv``, as
    ``data=table data.path=visits.csv``, and beside a table with ``client=`` and ``target=`` as
    settings of the data. Names of files and columns that Hydra cannot read, such as
    ``target=Größe``, are quoted. Data of the user take the automatic settings, see
    :func:`with_automatic`.

    Args:
        words: as typed, without the options of every command.

    Raises:
        ConfigError: an option that a group does not have and that has a known meaning, a file of
            another kind, or the column of a table that is not named.
    """
    first = ""
    if words:
        first = words[0]
    if not (first in _COMMANDS or first.startswith(("-", "~", "+")) or _is_setting(first)):
        return list(words)
    settings = _with_tables(words)
    if "data=table" in settings:
        settings = [
            f"data.{word}" if word.partition("=")[0] in _OF_A_TABLE and "=" in word else word
            for word in settings
        ]
    else:
        _refuse_columns(settings)
    settings = [_readable(word) for word in settings]
    for word in settings:
        if word.lower() in _OPTIONS:
            raise ConfigError(f"{word} is no choice: {_OPTIONS[word.lower()]}.")
        if word.startswith("model=") and _is_of_torchvision(word.removeprefix("model=")):
            name = word.removeprefix("model=")
            raise ConfigError(
                f"{name} is a network of torchvision: model=torchvision model.name={name}."
            )
    # candidates of a search are typed, and new clients have the settings of their run
    if first in ("search", "adapt"):
        return settings
    return with_automatic(settings)


def with_automatic(words: Sequence[str]) -> list[str]:
    """Returns the words of a command, in which data of the user take the automatic settings unless
    an algorithm, an experiment or a setting of the schedule is chosen."""
    places = [place for place, word in enumerate(words) if word in _USERS_DATA]
    if not places or any(
        word.startswith(("algorithm", "experiment=", "schedule.")) for word in words
    ):
        return list(words)
    # settings stand between the options
    return [*words[: places[0]], "algorithm=auto", *words[places[0] :]]


def _with_tables(words: Sequence[str]) -> list[str]:
    """Returns the words with the path of a table as two settings.

    Raises:
        ConfigError: a file of another kind.
    """
    settings: list[str] = []
    for word in words:
        found = _TABLE.fullmatch(word)
        behind_option = bool(settings) and settings[-1].startswith("--") and "=" not in settings[-1]
        other = _OTHER_FILE.fullmatch(word)
        if found and not behind_option:
            settings += ["data=table", f"data.path={found[2]}"]
        elif other and not behind_option:
            raise ConfigError(
                f"{other[2]} is no file of a table that is read; save the table as .csv or .parquet"
                " (also .tsv, .csv.gz and .tsv.gz)."
            )
        else:
            settings.append(word)
    return settings


def _readable(word: str) -> str:
    """Returns a word in which the name of a file or of a column is quoted if Hydra's grammar has no
    such text, or if it would be another one: names may have letters of any language, and any
    sign."""
    key, _, text = word.partition("=")
    if key not in _TEXTS or not text:
        return word
    # A path that leads to a file is that path: no sweep, and no reference to a setting.
    is_path = key == "data.path" and Path(text).is_file()
    value = _as_hydra_reads(word)
    if value is None or (is_path and (value != text or "${" in text)):
        return f"{key}={_quoted(text)}"
    return word


def _as_hydra_reads(word: str) -> Any:
    """Returns the value of a setting; () if it is a sweep over several, and None if Hydra cannot
    read it."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return None
    if override.is_sweep_override():
        return ()
    return override.value()


def _quoted(text: str) -> str:
    """Returns a text in quotes, in which nothing is a reference to a setting."""
    inner = re.sub(r"(\\*)'", lambda found: f"{found[1] * 2}\\'", without_references(text))
    end = re.search(r"\\*$", inner)
    assert end is not None
    return f"'{inner}{end[0]}'"


def without_references(text: str) -> str:
    """Returns a text that Hydra reads as this text, whatever it refers to: ``${x}`` is escaped."""
    # backslashes count before a character that they can escape
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def _is_setting(word: str) -> bool:
    return "=" in word or any(kind.fullmatch(word) for kind in (_TABLE, _OTHER_FILE))


def _refuse_columns(words: Sequence[str]) -> None:
    """Refuses the short name of a column if no table is named.

    Raises:
        ConfigError: such a word; the message says how to name the table.
    """
    for word in words:
        if word.startswith(("client=", "target=")):
            raise ConfigError(
                f"{word} is a column of a table, and none is named; accepted: the table before it, "
                f"as visits.csv {word}, or data.{word} beside other data."
            )


def _is_of_torchvision(name: str) -> bool:
    """Returns True if a model is one of torchvision. It is imported for names alone that look
    like one."""
    if not re.fullmatch(r"[a-z]+_?[a-z]*\d+[a-z0-9_]*", name):
        return False
    return name in vision_models.list_models()


@dataclass(frozen=True)
class Typed:
    """Settings as they are typed, which :func:`read` reads once.

    Attributes:
        words: ``KEY=VALUE`` each.
        overrides: the same as Hydra reads them.
    """

    words: tuple[str, ...]
    overrides: tuple[Override, ...]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Returns the values by dotted key or group; the last one counts."""
        return {override.key_or_group: override.value() for override in self.overrides}

    @property
    def single(self) -> dict[str, Any]:
        """Returns the values without those that a sweep goes through."""
        single = (one for one in self.overrides if not one.is_sweep_override())
        return {one.key_or_group: one.value() for one in single}


def read(words: Sequence[str]) -> Typed:
    """Returns settings as Hydra reads them.

    Raises:
        ConfigError: one that it cannot read, or another folder of files than that of
            ``--config-dir``.
    """
    with refusals():
        overrides = OverridesParser.create().parse_overrides(list(words))
    for override in overrides:
        if override.get_key_element().lstrip("+~") == "hydra.searchpath":
            raise ConfigError(
                f"{override.input_line} is not taken; --config-dir DIR is the folder "
                "with own groups."
            )
    return Typed(tuple(words), tuple(overrides))


def of_place(words: Sequence[str], place: str) -> list[str]:
    """Returns the settings of a group or of a setting."""
    return [text for text in words if text.split("=")[0].split(".")[0].lstrip("+") == place]


def differing(run: Sequence[str], typed: Typed) -> str:
    """Returns those settings of a run of a sweep that were not typed with a single value."""
    # the last counts
    keys = {one.get_key_element(): one.is_sweep_override() for one in typed.overrides}
    return " ".join(text for text in run if keys.get(text.partition("=")[0], True))
