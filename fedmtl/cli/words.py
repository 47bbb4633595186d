"""The settings of a command as people write them: a table by its path, and its columns by short
names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ..errors import ConfigError

_TABLE = re.compile(r"(data=)?([^=]+\.(csv|csv\.gz|tsv|tsv\.gz|parquet))", re.IGNORECASE)
_OTHER_FILE = re.compile(
    r"(data=)?([^=]+\.(xlsx?|ods|jsonl?|feather|arrow|dta|sav|rds|txt))", re.IGNORECASE
)
_OF_A_TABLE = ("client", "target", "features", "bounds", "classes", "labels")
_TEXTS = ("data.path", "data.client", "data.target")  # names, and never values of another type
_USERS_DATA = ("data=table", "data=images", "data=leaf")


def understood(words: Sequence[str], *, automatic: bool = True) -> list[str]:
    """Returns settings with a table's path, ``visits.csv`` or ``data=visits.csv``, as ``data=table
    data.path=visits.csv``, and beside a table with ``client=`` and ``target=`` as settings of the
    data. Names of files and columns that Hydra cannot read, such as ``target=Größe``, are quoted.

    Args:
        words: the settings as typed.
        automatic: True if data of the user take the automatic settings unless an algorithm, an
            experiment or a setting of the schedule is chosen.

    Raises:
        ConfigError: a file of another kind, or the column of a table that is not named.
    """
    settings = _with_tables(words)
    if "data=table" in settings:
        settings = [
            f"data.{word}" if word.partition("=")[0] in _OF_A_TABLE and "=" in word else word
            for word in settings
        ]
    else:
        _refuse_columns(settings)
    settings = [_readable(word) for word in settings]
    chosen = any(word.startswith(("algorithm", "experiment=", "schedule.")) for word in settings)
    if automatic and not chosen and not set(_USERS_DATA).isdisjoint(settings):
        return ["algorithm=auto", *settings]
    return settings


def is_setting(word: str) -> bool:
    """Returns True if a word is a setting, or the path of a file of data."""
    return "=" in word or any(kind.fullmatch(word) for kind in (_TABLE, _OTHER_FILE))


def _with_tables(words: Sequence[str]) -> list[str]:
    """Returns the words with the path of a table as two settings.

    Raises:
        ConfigError: a file of another kind.
    """
    settings: list[str] = []
    for word in words:
        if found := _TABLE.fullmatch(word):
            settings += ["data=table", f"data.path={found[2]}"]
        elif other := _OTHER_FILE.fullmatch(word):
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
