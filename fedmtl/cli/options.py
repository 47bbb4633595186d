"""What several commands share: their options, the stored configuration, and what an interruption prints."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ..errors import ConfigError, TrainingError
from ..report.tables import write_text
from .config import Config, check, printed_log, with_automatic

INTERRUPTED = 130  # exit code
_DATA_PATHS = ("root", "path", "images", "cache", "counts")


class _Parser(argparse.ArgumentParser):
    """Refuses words in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.format_usage()}")


def command_parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of ``fedmtl COMMAND``; ``epilog`` is printed as it is written."""
    style = argparse.HelpFormatter if epilog is None else argparse.RawDescriptionHelpFormatter
    return _Parser(
        prog=f"fedmtl {command}", description=description, epilog=epilog, formatter_class=style, allow_abbrev=False
    )


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--config-dir``."""
    parser.add_argument("-cd", "--config-dir", type=Path, help="a folder with your own groups, searched first")


def short_run_options(
    parser: argparse.ArgumentParser, words: list[str], rounds: int, what: str
) -> tuple[argparse.Namespace, Config]:
    """Read and check the words of a command that makes a short run of a configuration.

    Args:
        parser: with the options of only this command.
        words: of the command line.
        rounds: the default of ``--rounds``.
        what: the help text of ``--rounds``.

    Returns:
        The options, and the resolved configuration.

    Raises:
        ConfigError: an impossible setting, or less than one round.
    """
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as for training")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"{what} (default {rounds})")
    add_config_dir(parser)
    options = parser.parse_intermixed_args(words)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be a whole number of at least 1.")
    (config,) = check(with_automatic(options.overrides), extra=options.config_dir)
    return options, config


def write_config(folder: Path, command: str, config: Config) -> None:
    """Write the configuration that a resume reads, under the command that it came from."""
    from omegaconf import OmegaConf

    text = OmegaConf.to_yaml(OmegaConf.create(config))
    write_text(folder / "private" / "config.yaml", f"# {command}\n{text}")


def make_paths_absolute(config: Config, start: str = "") -> None:
    """Make the paths of data, clusters and graphs absolute, in place: a resume may start in another folder.

    Args:
        config: resolved.
        start: the folder from which they lead; default the one where the process is.
    """
    graph = config["algorithm"].get("graph")
    nodes = [(config["data"], _DATA_PATHS), (config["algorithm"], ("clusters",))]
    nodes += [(graph, _DATA_PATHS)] if isinstance(graph, dict) else []
    for node, keys in nodes:
        for key in keys:
            if isinstance(node.get(key), str):
                node[key] = os.path.abspath(os.path.join(start, node[key]))


@contextmanager
def told_to_end(folder: Path) -> Iterator[None]:
    """Say how to continue where torchrun ends this process, since another rank has ended.

    Raises:
        SystemExit: SIGTERM came.
    """

    def end(number: int, frame: FrameType | None) -> None:
        say(f"a rank has ended; what was done until the last checkpoint is kept. Go on with: fedmtl resume {folder}")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def resumable(folder: Path, log_level: int) -> Iterator[None]:
    """Print the log from ``log_level`` on while the block runs, and how to continue where it is interrupted.

    Raises:
        SystemExit: an interruption.
        TrainingError: a file that could not be written or read, such as on a full disk; it says how to continue.
    """
    try:
        with printed_log(log_level):
            yield
    except KeyboardInterrupt:
        say(f"interrupted; what was done until the last checkpoint is kept. Go on with: fedmtl resume {folder}")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # of the output, whose reader has gone
        raise
    except OSError as error:
        raise TrainingError(
            f"{error}. What was done until the last checkpoint is on the disk. Go on with: fedmtl resume {folder}"
        ) from error


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"fedmtl: {text}", file=sys.stderr, flush=True)
