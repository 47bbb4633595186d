"""The parsers of the commands: argparse, and Hydra's own for a run or a sweep."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from ..errors import ConfigError
from .refusals import SHORT

USAGE = "fedmtl --help prints what is accepted."


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


def hydra_options(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options and overrides among the words, as Hydra reads them.

    Raises:
        ConfigError: an option that Hydra does not have.
    """
    parser = get_args_parser()
    parser.usage = USAGE
    parser.error = MethodType(Parser.error, parser)  # type: ignore[method-assign]
    parser.set_defaults(config_name="config")
    parser.allow_abbrev = False
    options, unknown = parser.parse_known_intermixed_args(words)
    if options.config_path is not None:
        raise ConfigError(
            f"--config-path is {options.config_path}; own files are found with --config-dir DIR."
        )
    if options.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun is {options.experimental_rerun}; fedmtl resume FOLDER continues "
            "a run."
        )
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        name = SHORT.get(name, name)
        raise ConfigError(
            f"unknown option {unknown[0]}; settings are written without dashes: {name}=VALUE."
        )
    return options
