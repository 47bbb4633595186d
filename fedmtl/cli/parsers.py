"""The parsers of the commands."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import ConfigError
from .names import SHORT

USAGE = "fedmtl --help prints what is accepted."
# options of Hydra that are not taken, and what takes their place
_OF_HYDRA = {
    "config-path": "own files are found with --config-dir DIR",
    "experimental-rerun": "fedmtl resume FOLDER continues a run",
    "info": "fedmtl --cfg job prints all settings",
}


class Parser(argparse.ArgumentParser):
    """Refuses words in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        _, found, words = message.partition("unrecognized arguments: --")
        name = words.partition(" ")[0].partition("=")[0]
        hint = ""
        if found and name in SHORT:
            hint = f"settings are written without dashes: {SHORT[name]}=VALUE; "
        raise ConfigError(f"{message}; {hint}{self.format_usage()}")


def command_parser(
    command: Callable[..., int], settings: str = "", *, folder: bool = False
) -> argparse.ArgumentParser:
    """Returns the parser of ``fedmtl NAME``, whose help is the docstring of the function of that
    name.

    Args:
        command: the function.
        settings: the accepted ones in words; empty for none.
        folder: True if that of a run comes before them.
    """
    style = argparse.RawDescriptionHelpFormatter
    prog = f"fedmtl {command.__name__}"
    text = inspect.getdoc(command)
    parser = Parser(prog=prog, description=text, formatter_class=style, allow_abbrev=False)
    if folder:
        parser.add_argument(
            "folder", type=Path, help="of a run, such as outputs/2025-01-31/12-00-00"
        )
    if settings:
        parser.add_argument(
            "overrides", nargs="*", default=[], metavar="KEY=VALUE", help=f"settings, {settings}"
        )
    return parser


def run_options(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options and the settings, ``overrides``, of a run or a sweep.

    Raises:
        ConfigError: an option that there is not.
    """
    parser = Parser(prog="fedmtl", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    options, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        setting = SHORT.get(name, name)
        hint = _OF_HYDRA.get(name, f"settings are written without dashes: {setting}=VALUE")
        raise ConfigError(f"unknown option {unknown[0]}; {hint}.")
    return options
