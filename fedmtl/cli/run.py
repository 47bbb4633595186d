"""Training from the command line: a run or a sweep, its process with its errors, and what it prints.

Hydra composes, sweeps and names the folders. A run of its own prints a summary, the job of a sweep one line.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig

from .._rounding import number_text, rounded_up
from ..errors import ConfigError, DataError, FedmtlError, ModelError, PrivacyError, TrainingError
from ..report import CHOICE_NOT_COVERED
from ..report.runs import ERROR
from ..report.tables import write_text
from . import config as conf
from .config import Config

if TYPE_CHECKING:
    from ..privacy import PrivacyReport
    from ..ranks import Ranks
    from ..trainer import Result

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes
USAGE = "fedmtl --help prints what is accepted."
_REQUEST = (ConfigError, DataError, ModelError, PrivacyError)  # the user's to fix, before training


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


class Parser(argparse.ArgumentParser):
    """Refuses words in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.format_usage()}")


def command_parser(command: Callable[..., int], settings: str = "", *, folder: bool = False) -> argparse.ArgumentParser:
    """Return the parser of ``fedmtl NAME``, whose help is the docstring of the function of that name.

    Args:
        command: the function.
        settings: which ones are accepted, in words; empty for none.
        folder: whether that of a run comes before them.
    """
    style = argparse.RawDescriptionHelpFormatter
    prog, text = f"fedmtl {command.__name__}", inspect.getdoc(command)
    parser = Parser(prog=prog, description=text, formatter_class=style, allow_abbrev=False)
    if folder:
        parser.add_argument("folder", type=Path, help="of a run, such as outputs/2025-01-31/12-00-00")
    if settings:
        parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=f"settings, {settings}")
    return parser


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        number: its place, from 0.
        of: how many there are; None if a configuration file or a sweeper of a plugin chooses some.
        words: the settings that differ between them.
        sweep: the folder of the sweep.
    """

    number: int
    of: int | None
    words: str
    sweep: Path

    def __str__(self) -> str:
        of = "" if self.of is None else f"/{self.of}"
        return f"[{self.number + 1}{of}] {self.words}".rstrip()

    def line(self, result: Result, began: float, folder: Path) -> str:
        """Return what is printed of a finished job."""
        score = f"{result.metric.replace('_', ' ')} {number_text(result.final[result.metric])}"
        score += "" if result.finetuned is None else ", finetuned"
        score += ", training diverged" if result.lost else ""
        seconds = time.monotonic() - began
        return f"{self}: {score}, epsilon {rounded_up(result.epsilon, 3)}, {seconds:.0f} s, {folder}"


def train(words: list[str], process: Process) -> int:
    """Hand over to Hydra, which composes, sweeps and names the folders, after a check of every run of a sweep."""
    words = conf.with_automatic(words)
    options = hydra_options(words)
    typed, ranks = options.overrides, process.ranks
    shows = options.cfg or options.info or options.hydra_help or options.shell_completion
    options.multirun = options.multirun or (not shows and conf.sweeps(typed, options.config_name))
    by_plugin = any(override.key_or_group == "hydra/sweeper" for override in conf.parse(typed))
    if options.cfg == "job" and not options.multirun:
        with process.agree():
            text = conf.printed(conf.compose(typed, options.config_name), options.package, resolve=options.resolve)
        if process.writes:
            print(text, end="")
        return 0
    runs = conf.combinations(typed) if options.multirun and not by_plugin else []
    with process.agree():
        configs = [conf.resolve(conf.compose(run, options.config_name)) for run in runs]
        for config in configs:
            conf.settings(config)
        if process.writes and (warning := unlike(configs)):
            say(warning)
        if ranks is not None and not options.multirun:
            conf.compose(typed, options.config_name)  # what is refused is refused by all in one line
    if ranks is not None:  # one folder for all, whose name is a time
        place, name = ("multirun", "hydra.sweep.dir=") if options.multirun else ("outputs", "hydra.run.dir=")
        when = ranks.share(lambda: time.strftime("%Y-%m-%d/%H-%M-%S"))
        words = words if any(word.startswith(name) for word in words) else [*words, f"{name}{place}/{when}"]

    def task(config: Any) -> float | None:
        from ..trainer.folder import RunFolder

        own, job = HydraConfig.get(), None
        overrides, folder = list(own.overrides.task), Path(own.runtime.output_dir)
        if options.multirun:
            of = None if own.sweeper.get("params") else len(runs) or None  # a file can have values of its own
            job = Job(int(own.job.num), of, conf.differing(overrides, typed), sweep=Path(own.sweep.dir))
        if job is not None and process.writes and folder == Path.cwd() / job.sweep / "0":
            for number, run in enumerate(runs):  # for a resume, also of what has not begun by then
                if not RunFolder(job.sweep / str(number)).started:  # else it is refused in its turn
                    of_task = [word for word in run if not word.startswith(("hydra.", "hydra/"))]
                    conf.write_config(job.sweep / str(number), of_task, configs[number])
        with process.errors(job):
            with process.agree():
                if process.writes and RunFolder(folder).started:
                    held = f"{short(folder)} already holds a run; continue it with fedmtl resume {short(folder)}"
                    raise ConfigError(f"{held}, or choose another folder.")
            with noted(folder, job, process):
                with process.agree():
                    resolved = conf.resolve(conf.without_leftovers(config, overrides))
                result = train_one(resolved, folder, process, command=overrides, job=job)
            return float(result.final[result.metric])
        return None

    with process.agree() if shows else nullcontext():
        _hydra(words, task, options)
    return end_of_sweep(process) if options.multirun else 0


def hydra_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options and overrides among the words, as Hydra reads them.

    Raises:
        ConfigError: an option that Hydra does not have.
    """
    parser = get_args_parser()
    parser.usage, parser.error = USAGE, MethodType(Parser.error, parser)  # type: ignore[method-assign]
    parser.set_defaults(config_name="config")
    parser.allow_abbrev = False
    options, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise ConfigError(f"unknown option {unknown[0]}; settings are written without dashes: {name}=VALUE.")
    return options


def _hydra(words: list[str], task: Callable[[Any], float | None], options: argparse.Namespace) -> None:
    """Call ``hydra.main`` over the packaged configuration, with ``words`` as the command line."""
    conf.register()
    first = [word for word in words if word not in options.overrides]  # Hydra reads no option behind a setting
    before, sys.argv = sys.argv, ["fedmtl", *first, *options.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, and are not printed by Hydra
    try:
        with conf.refusals(options.overrides):
            hydra.main(version_base=conf.VERSION, config_path=None, config_name="config")(task)()
    except OSError as error:  # not of the run, which is another block
        raise ConfigError(
            f"the folder of the run cannot be made: {error}; choose another with hydra.run.dir=FOLDER."
        ) from error
    finally:
        sys.argv = before


def train_one(
    config: Config, folder: Path, process: Process, *, command: Sequence[str] | None = None, job: Job | None = None
) -> Result:
    """Make the run of a resolved configuration; without the words of the ``command`` that begins it, continue the one
    in the folder."""
    writes, place, level = process.writes, short(folder), logging.INFO if job is None else logging.WARNING
    with printed_log(level if writes else logging.CRITICAL):
        with process.agree():
            trainer = conf.build(config | {"progress": False}, folder)  # the log says what automatic settings are
            if command is not None and writes:
                conf.write_config(folder, command, config)
        # without a terminal a job prints one line
        trainer = replace(trainer, progress=config["progress"] and (job is None or sys.stderr.isatty()))
        began, resumed = time.monotonic(), resumable(place if job is None else short(job.sweep), process.ranks)
        with resumed if writes else nullcontext(), conf.by_key(vars(trainer)):
            result = trainer.fit(resume=command is None, ranks=process.ranks)
    if writes:
        print(job.line(result, began, place) if job is not None else result.summary(), flush=True)
        if job is None:
            print_saved(folder, result.privacy)
    return result


@contextmanager
def noted(folder: Path, job: Job | None, process: Process) -> Iterator[None]:
    """Leave the reason of a failure in the folder of a run that has begun, or of a job, by which a report knows it from
    an unfinished one; remove the folder, and those of its date, if nothing has been written."""
    note = folder / "private" / ERROR
    if process.writes:
        note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            if process.writes and (job is not None or note.parent.is_dir()):
                write_text(note, f"{' '.join(str(error).split()) or type(error).__name__}\n")
            for empty in (folder, folder.parent, folder.parent.parent):
                empty.rmdir()
        raise


def end_of_sweep(process: Process) -> int:
    """Print what the choice among the runs of a sweep costs, and return 0."""
    if process.writes:
        print(f"\n{CHOICE_NOT_COVERED}", flush=True)
    return 0


def unlike(configs: Sequence[Config]) -> str:
    """Return a warning where methods of a sweep are finetuned beside others that are not, empty where all or none are.
    Local training is what all are compared with, and is not one of them."""
    methods = [
        ((config["algorithm"]["_target_"] or "auto").rpartition(".")[2], (config.get("finetune") or {}).get("_target_"))
        for config in configs
    ]
    tuned = {name: None for name, finetune in methods if finetune}
    plain = {name: None for name, finetune in methods if not finetune and name not in ("Local", *tuned)}
    if not tuned or not plain:
        return ""
    return (
        f"finetuned after training: {', '.join(tuned)}; not: {', '.join(plain)}. Their scores do not compare; give all "
        "of them the same, as finetune=kl or finetune=none."
    )


@contextmanager
def resumable(folder: Path, ranks: Ranks | None = None) -> Iterator[None]:
    """Say how to continue where the block is interrupted.

    Args:
        folder: of the run, sweep or search.
        ranks: of torchrun, which sends SIGTERM to this process where another one has ended.

    Raises:
        SystemExit: an interruption.
        TrainingError: a file that could not be written or read, such as on a full disk; it says how to continue.
    """
    remedy = f"the run is stored up to its last checkpoint; continue it with: fedmtl resume {folder}"

    def end(number: int, frame: FrameType | None) -> None:
        say(f"a rank has ended; {remedy}")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end) if ranks is not None else None
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {remedy}")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # of the output, whose reader has gone
        raise
    except OSError as error:
        raise TrainingError(f"{error}; {remedy}") from error
    finally:
        if ranks is not None:
            signal.signal(signal.SIGTERM, before)


class _Printed(logging.Handler):
    """Writes to what standard error is at the time, as a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def printed_log(level: int) -> Iterator[None]:
    """Print what the package logs from ``level`` on as plain lines, and nothing twice, while the block runs."""
    log, handler = logging.getLogger("fedmtl"), _Printed()
    log.addHandler(handler)
    before = log.level, log.propagate
    log.propagate = False
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def print_saved(folder: Path, privacy: PrivacyReport) -> None:
    """Print which files a run has left, what of them may be published, and the seal of a secure run."""
    public, private = (
        ", ".join(sorted(file.name for file in (folder / name).iterdir())) for name in ("public", "private")
    )
    print(f"\nSaved in {short(folder)}\n  public/   {public}\n            {privacy.publication}")
    print(textwrap.fill(f"  private/  covered by no epsilon: {private}", 100, subsequent_indent=" " * 12))
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
