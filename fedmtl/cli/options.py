"""What several commands share: the process with its errors, options, the stored configuration, printed lines."""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ConfigError, DataError, FedmtlError, ModelError, PrivacyError, TrainingError
from ..report.tables import write_text
from .config import Config, printed_log

if TYPE_CHECKING:
    from ..privacy import PrivacyReport
    from ..ranks import Ranks

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes
_REQUEST = (ConfigError, DataError, ModelError, PrivacyError)  # the user's to fix, before training
_PATHS = (
    *("data.root", "data.path", "data.images", "data.cache", "data.counts"),
    *("graph.root", "graph.path", "algorithm.clusters", "latency.source"),
)


@dataclass
class Process:
    """This process, one or one of several of a launch, and how its errors are printed.

    Args:
        debug: whether errors are raised, for their traceback.
        ranks: of a launch of several processes.
        codes: the exit codes so far.
    """

    debug: bool = False
    ranks: Ranks | None = None
    codes: list[int] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        """Whether it is the one that writes and prints."""
        return self.ranks is None or self.ranks.first

    def agree(self) -> AbstractContextManager[None]:
        """Raise at all ranks what the block raises at any."""
        return nullcontext() if self.ranks is None else self.ranks.agree()

    @contextmanager
    def errors(self, job: object = None) -> Iterator[None]:
        """Print an error in one line and keep its exit code, unless ``debug`` asks for the traceback.

        Args:
            job: of a sweep, named in the line. An error that the other ranks do not have ends this process: they wait
                for it in that job, and hear that it has ended.
        """
        try:
            yield
        except BrokenPipeError:  # the reader of the output has gone, as with "| head"
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            self.codes.append(FAILED)
        except Exception as error:
            agreed = getattr(error, "agreed", False)
            ends = job is not None and self.ranks is not None and not agreed
            if self.debug and not ends:
                raise
            rank = int(os.environ.get("RANK", "0")) if self.ranks is None else self.ranks.rank
            text, foreign = " ".join(str(error).split()), not isinstance(error, FedmtlError)
            text = f"{type(error).__name__}: {text}" if foreign or ends else text
            text += " (--debug shows the traceback)" if foreign and not ends else ""
            if rank == 0 or not agreed:  # else the first rank prints it
                where = f"{job}: " * (job is not None) + f"rank {rank}: " * (rank > 0 or ends)
                say(f"error: {where}{text}")
            if ends:
                raise SystemExit(FAILED) from error
            self.codes.append(REFUSED if isinstance(error, _REQUEST) else FAILED)


USAGE = "fedmtl --help prints what is accepted."


class Parser(argparse.ArgumentParser):
    """Refuses words in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.format_usage()}")


def command_parser(command: Callable[..., int]) -> argparse.ArgumentParser:
    """Return the parser of ``fedmtl NAME``, whose help is the docstring of the function of that name."""
    style = argparse.RawDescriptionHelpFormatter
    prog, text = f"fedmtl {command.__name__}", inspect.getdoc(command)
    return Parser(prog=prog, description=text, formatter_class=style, allow_abbrev=False)


def add_settings(parser: argparse.ArgumentParser, metavar: str = "KEY=VALUE", what: str = "as for training") -> None:
    """Add the settings."""
    parser.add_argument("overrides", nargs="*", default=[], metavar=metavar, help=f"settings, {what}")


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the folder of a run."""
    parser.add_argument("folder", type=Path, help="of a run, such as outputs/2025-01-31/12-00-00")


def new_folder() -> Path:
    """Return where a command keeps its files unless another folder is given: under the date and time."""
    return Path(datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S"))


def write_config(folder: Path, words: Sequence[str], config: Config) -> None:
    """Write the configuration that a resume reads, under the command that it came from, with paths that lead to the
    same files from everywhere."""
    from omegaconf import OmegaConf

    text = OmegaConf.to_yaml(OmegaConf.create(with_absolute_paths(config)))
    write_text(folder / "private" / "config.yaml", f"# {shlex.join(['fedmtl', *words])}\n{text}")


def with_absolute_paths(node: Any, place: str = "") -> Any:
    """Return a resolved configuration in which the paths of data, clusters, graphs and latencies are absolute."""
    if isinstance(node, dict):
        return {name: with_absolute_paths(value, f"{place}.{name}") for name, value in node.items()}
    return os.path.abspath(node) if place.endswith(_PATHS) and isinstance(node, str) else node


@contextmanager
def resumable(folder: Path, log_level: int, *, launched: bool = False) -> Iterator[None]:
    """Print the log from ``log_level`` on while the block runs, and how to continue where it is interrupted.

    Args:
        folder: of the run, sweep or search.
        log_level: of :mod:`logging`.
        launched: whether torchrun started this process; it sends SIGTERM where another one has ended.

    Raises:
        SystemExit: an interruption.
        TrainingError: a file that could not be written or read, such as on a full disk; it says how to continue.
    """
    remedy = f"the run is stored up to its last checkpoint; continue it with: fedmtl resume {folder}"

    def end(number: int, frame: FrameType | None) -> None:
        say(f"a rank has ended; {remedy}")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end) if launched else None
    try:
        with printed_log(log_level):
            yield
    except KeyboardInterrupt:
        say(f"interrupted; {remedy}")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # of the output, whose reader has gone
        raise
    except OSError as error:
        raise TrainingError(f"{error}; {remedy}") from error
    finally:
        if launched:
            signal.signal(signal.SIGTERM, before)


def print_saved(folder: Path, privacy: PrivacyReport, private: str) -> None:
    """Print which files a run has left, what of them may be published, and the seal of a secure run.

    Args:
        folder: of the run.
        privacy: what it states.
        private: the files in ``private/``, in words.
    """
    public = ", ".join(sorted(file.name for file in (folder / "public").iterdir()))
    print(f"\nSaved in {short(folder)}\n  public/   {public}\n            {privacy.publication}")
    print(f"  private/  covered by no epsilon: {private}")
    if privacy.source == "secure":
        from ..trainer.folder import RunFolder

        print(f"  seal      {RunFolder(folder).seal}\n            publish it: it shows if a file is altered later")


def short(folder: Path) -> Path:
    """Return the folder relative to where the user is, when it lies below."""
    try:
        return folder.resolve().relative_to(Path.cwd())
    except ValueError:
        return folder


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"fedmtl: {text}", file=sys.stderr, flush=True)
