"""Training from the command line: a run or a sweep, its process with its errors, and what it
prints.

Hydra composes, sweeps and names the folders. A run of its own prints a summary, the job of a sweep
one line.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig

from .._files import CLAIM, claimed, remove_empty
from .._rounding import number_text, rounded_up
from .._text import shown_lines
from ..errors import (
    ConfigError,
    DataError,
    FedmtlError,
    ModelError,
    PrivacyError,
    ResumeError,
    TrainingError,
)
from ..report import CHOICE_NOT_COVERED
from ..report.runs import ERROR
from ..report.tables import write_text
from . import config as conf
from .config import Config
from .names import SHORT
from .output import outputs, say, show

if TYPE_CHECKING:
    from ..privacy import PrivacyReport
    from ..ranks import Ranks
    from ..trainer import Result

# exit codes
FAILED = 1
REFUSED = 2
INTERRUPTED = 130
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
        if self.ranks is None:
            return nullcontext()
        return self.ranks.agree()

    @contextmanager
    def claimed(self, folder: Path, *, resume: bool = False) -> Iterator[None]:
        """Hold the folder of a run for the block, for all ranks.

        Args:
            folder: of the run.
            resume: whether a run that has begun there is continued.

        Raises:
            ConfigError: another process holds it, or a run has begun there that is not continued.
        """
        from ..trainer.folder import RunFolder

        run = RunFolder(folder)
        with ExitStack() as stack:
            for empty in (folder.parent.parent, folder.parent, folder) if self.writes else ():
                stack.callback(remove_empty, empty)
            with self.agree():
                try:
                    if self.writes:
                        stack.enter_context(run.claimed(resume=resume))
                except ResumeError as error:
                    held = (
                        f"{short(folder)} already holds a run; continue it with fedmtl resume "
                        f"{short(folder)}"
                    )
                    raise ConfigError(f"{held}, or choose another folder.") from error
            yield

    @contextmanager
    def errors(self, job: object = None) -> Iterator[None]:
        """Print an error in one line and keep its exit code, unless ``debug`` asks for the
        traceback.

        Args:
            job: of a sweep, named in the line. An error that the other ranks do not have ends this
                process: they wait for it in that job, and hear that it has ended.
        """
        try:
            yield
        except Exception as error:
            agreed = getattr(error, "agreed", False)
            ends = job is not None and self.ranks is not None and not agreed
            if self.debug and not ends:
                raise
            if self.ranks is None:
                rank = int(os.environ.get("RANK", "0"))
            else:
                rank = self.ranks.rank
            text = " ".join(str(error).split())
            foreign = not isinstance(error, FedmtlError)
            if foreign or ends:
                text = f"{type(error).__name__}: {text}"
            if foreign and not ends:
                text += " (--debug shows the traceback)"
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


def command_parser(
    command: Callable[..., int], settings: str = "", *, folder: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of ``fedmtl NAME``, whose help is the docstring of the function of that
    name.

    Args:
        command: the function.
        settings: which ones are accepted, in words; empty for none.
        folder: whether that of a run comes before them.
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
        of = ""
        if self.of is not None:
            of = f"/{self.of}"
        return f"[{self.number + 1}{of}] {self.words}".rstrip()

    def line(self, result: Result, began: float, folder: Path) -> str:
        """Returns the printed line of a finished job."""
        score = f"{result.metric.replace('_', ' ')} {number_text(result.final[result.metric])}"
        if result.finetuned is not None:
            score += ", finetuned"
        if result.lost:
            score += ", training diverged"
        if result.beside_local is not None:
            better, _, worse = result.beside_local
            score += f" ({better:.0%} of the clients better off than alone, {worse:.0%} worse)"
        seconds = time.monotonic() - began
        return (
            f"{self}: {score}, epsilon {rounded_up(result.epsilon, 3)}, {seconds:.0f} s, {folder}"
        )


def train(words: list[str], process: Process) -> int:
    """Hand over to Hydra, which composes, sweeps and names the folders, after a check of every run
    of a sweep."""
    words = conf.with_automatic(words)
    options = hydra_options(words)
    typed = options.overrides
    ranks = process.ranks
    chosen = tuple(typed)
    first = [word for word in words if word not in typed]  # Hydra reads no option behind a setting
    shows = options.cfg or options.info or options.hydra_help or options.shell_completion
    options.multirun = options.multirun or (not shows and conf.sweeps(typed, options.config_name))
    by_plugin = any(override.key_or_group == "hydra/sweeper" for override in conf.parse(typed))
    if options.cfg == "job" and not options.multirun:
        with process.agree():
            text = conf.printed(
                conf.compose(typed, options.config_name), options.package, resolve=options.resolve
            )
        if process.writes:
            show(text.removesuffix("\n"))
        return 0
    if options.multirun and not by_plugin:
        runs = conf.combinations(typed)
    else:
        runs = []
    with process.agree():
        configs = [conf.resolve(conf.compose(run, options.config_name)) for run in runs]
        for config in configs:
            conf.settings(config)
            conf.check_logger(config, Path(), typed)
        if process.writes and (warning := unlike(configs)):
            say(warning)
        if ranks is not None and not options.multirun:
            # what is refused is refused by all in one line
            conf.compose(typed, options.config_name)

    def task(config: Any) -> float | None:
        from ..trainer.folder import RunFolder

        own = HydraConfig.get()
        job = None
        overrides = list(own.overrides.task)
        folder = Path(own.runtime.output_dir)
        if options.multirun:
            # a file can have values of its own
            of = None
            if not own.sweeper.get("params"):
                of = len(runs) or None
            job = Job(
                int(own.job.num), of, conf.differing(overrides, typed), sweep=Path(own.sweep.dir)
            )
        if job is not None and process.writes and folder == Path.cwd() / job.sweep / "0":
            for number, run in enumerate(runs):  # for a resume, also of what has not begun by then
                place = RunFolder(job.sweep / str(number))
                # else it is refused in its turn
                with suppress(FedmtlError), place.claimed(resume=False):
                    of_task = [word for word in run if not word.startswith(("hydra.", "hydra/"))]
                    conf.write_config(place.root, of_task, configs[number])
        with outputs(), process.errors(job):  # a launcher of a plugin calls this in another process
            with process.claimed(folder), noted(folder, job, process):
                with process.agree():
                    resolved = conf.resolve(conf.without_leftovers(config, overrides))
                    conf.check_logger(resolved, folder, chosen)
                result = train_one(resolved, folder, process, command=overrides, job=job)
            return float(result.final[result.metric])
        return None

    with ExitStack() as stack:
        if shows:
            stack.enter_context(process.agree())
        else:
            typed = stack.enter_context(_placed(typed, options, process))
        _hydra([*first, *typed], task, options)
    if options.multirun:
        return end_of_sweep(process)
    return 0


@contextmanager
def _placed(
    typed: Sequence[str], options: argparse.Namespace, process: Process
) -> Iterator[list[str]]:
    """Yield the overrides of a command with its folder, the same for all ranks, a new one where
    none is chosen; a sweep holds its folder."""
    key, kind = (
        ("hydra.sweep.dir", "multirun") if options.multirun else ("hydra.run.dir", "outputs")
    )
    with ExitStack() as stack:
        with process.agree():
            place = conf.chosen_folder(typed, options.config_name, key)
        if place is None:
            folder = _shared(process, lambda: str(stack.enter_context(new_folder(kind))))
            place = Path(folder)
            typed = [*typed, f"{key}={folder}"]
        # else Hydra makes the name, and only the runs hold their folders
        known = "${" not in str(place)
        with process.agree():
            if options.multirun and process.writes and known:
                stack.enter_context(claimed_sweep(place))
        yield list(typed)


def _shared(process: Process, make: Callable[[], str]) -> str:
    """Returns the value of ``make`` at the first rank."""
    if process.ranks is None:
        return make()
    return process.ranks.share(make)


@contextmanager
def claimed_sweep(folder: Path) -> Iterator[None]:
    """Hold the folder of a sweep for the block.

    Raises:
        ConfigError: another process holds it, or no file can be written there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(folder))
        except BlockingIOError as error:
            raise ConfigError(
                f"{short(folder)} is the folder of a sweep that another process runs; choose "
                "another folder, or wait until it has ended."
            ) from error
        except OSError as error:
            raise _no_folder(error) from error
        yield


@contextmanager
def new_folder(kind: str) -> Iterator[Path]:
    """Make a folder named by the date and time, ``KIND/2025-01-31/12-00-00``, which no other
    process has: those that begin within one second are ``12-00-00_2`` and so on. It is removed at
    the end if nothing was written there.

    Raises:
        ConfigError: it cannot be made.
    """
    when = Path(kind, time.strftime("%Y-%m-%d/%H-%M-%S"))
    count = 1
    folder = when
    made = False
    while not made:
        try:
            folder.mkdir(parents=True)
            made = True
        except FileExistsError as error:
            if not folder.is_dir():
                raise _no_folder(error) from error
            count += 1
            folder = when.with_name(f"{when.name}_{count}")
        # another process has removed its empty folder, and that of the date with it
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _no_folder(error) from error
    try:
        yield folder
    finally:
        for empty in (folder, folder.parent, folder.parent.parent):
            remove_empty(empty)


def _no_folder(error: OSError) -> ConfigError:
    return ConfigError(
        f"the folder of the run cannot be made: {error}; choose another with hydra.run.dir=FOLDER."
    )


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


def _hydra(
    words: list[str], task: Callable[[Any], float | None], options: argparse.Namespace
) -> None:
    """Call ``hydra.main`` over the packaged configuration, with ``words`` as the command line."""
    conf.register()
    before = sys.argv
    sys.argv = ["fedmtl", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, and are not printed by Hydra
    try:
        with conf.refusals(options.overrides):
            hydra.main(version_base=conf.VERSION, config_path=None, config_name="config")(task)()
    except OSError as error:  # not of the run, which is another block
        raise _no_folder(error) from error
    finally:
        sys.argv = before


def train_one(
    config: Config,
    folder: Path,
    process: Process,
    *,
    command: Sequence[str] | None = None,
    job: Job | None = None,
) -> Result:
    """Make the run of a resolved configuration in a folder that is claimed; without the words of
    the ``command`` that begins it, continue the one in the folder."""
    from ..ranks import Ranks
    from ..trainer.engine import Engine
    from ..trainer.fit import trained

    writes = process.writes
    place = short(folder)
    level = logging.INFO if job is None else logging.WARNING
    with printed_log(level if writes else logging.CRITICAL):
        with process.agree():
            # the log says what automatic settings are
            trainer = conf.build(config | {"progress": False}, folder)
            if command is not None and writes:
                conf.write_config(folder, command, config)
        # without a terminal a job prints one line
        trainer = replace(
            trainer, progress=config["progress"] and (job is None or sys.stderr.isatty())
        )
        began = time.monotonic()
        resumed = resumable(place if job is None else short(job.sweep), process.ranks)
        with resumed if writes else nullcontext(), conf.by_key(vars(trainer)):
            result = trained(
                trainer, command is None, Engine(ranks=process.ranks or Ranks.of_launch())
            )
    if writes:
        show(result.summary() if job is None else job.line(result, began, place))
        if job is None:
            print_saved(folder, result.privacy)
    return result


@contextmanager
def noted(folder: Path, job: Job | None, process: Process) -> Iterator[None]:
    """Leave the reason of a failure in the claimed folder of a run that has begun, or of a job, by
    which a report knows it from an unfinished one."""
    note = folder / "private" / ERROR
    if process.writes:
        note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            begun = any(file.name != CLAIM for file in folder.glob("*/*"))
            if process.writes and (job is not None or begun):
                write_text(note, f"{' '.join(str(error).split()) or type(error).__name__}\n")
        raise


def end_of_sweep(process: Process) -> int:
    """Print what the choice among the runs of a sweep costs, and return 0."""
    if process.writes:
        show(f"\n{CHOICE_NOT_COVERED}")
    return 0


def unlike(configs: Sequence[Config]) -> str:
    """Return a warning where methods of a sweep are finetuned beside others that are not, empty
    where all or none are. Local training is what all are compared with, and is not one of them."""
    methods = [
        (
            (config["algorithm"]["_target_"] or "auto").rpartition(".")[2],
            (config.get("finetune") or {}).get("_target_"),
        )
        for config in configs
    ]
    tuned = {name: None for name, finetune in methods if finetune}
    plain = {
        name: None for name, finetune in methods if not finetune and name not in ("Local", *tuned)
    }
    if not tuned or not plain:
        return ""
    return (
        f"finetuned after training: {', '.join(tuned)}; not: {', '.join(plain)}. Their scores do "
        "not compare; give all of them the same, as finetune=kl or finetune=none."
    )


@contextmanager
def resumable(folder: Path, ranks: Ranks | None = None) -> Iterator[None]:
    """Say how to continue where the block is interrupted.

    Args:
        folder: of the run, sweep or search.
        ranks: of torchrun, which sends SIGTERM to this process where another one has ended.

    Raises:
        SystemExit: an interruption.
        TrainingError: a file that could not be written or read, such as on a full disk; it says how
            to continue.
    """
    remedy = (
        f"the run is stored up to its last checkpoint; continue it with: fedmtl resume {folder}"
    )

    def end(number: int, frame: FrameType | None) -> None:
        say(f"a rank has ended; {remedy}")
        raise SystemExit(128 + number)

    before = None
    if ranks is not None:
        before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {remedy}")
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        raise TrainingError(f"{error}; {remedy}") from error
    finally:
        if ranks is not None:
            signal.signal(signal.SIGTERM, before)


class _Printed(logging.Handler):
    """Writes to what standard error is at the time, as a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(shown_lines(self.format(record)), file=sys.stderr, flush=True)


@contextmanager
def printed_log(level: int) -> Iterator[None]:
    """Print what the package logs from ``level`` on as plain lines, and nothing twice, while the
    block runs."""
    log = logging.getLogger("fedmtl")
    handler = _Printed()
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
    """Print which files a run has left, what of them may be published, and the seal of a secure
    run."""
    public, private = (
        ", ".join(sorted(file.name for file in (folder / name).iterdir() if file.name != CLAIM))
        for name in ("public", "private")
    )
    show(f"\nSaved in {short(folder)}\n  public/   {public}\n            {privacy.publication}")
    show(
        textwrap.fill(
            f"  private/  covered by no epsilon: {private}", 100, subsequent_indent=" " * 12
        )
    )
    if privacy.source == "secure":
        from ..trainer.folder import RunFolder

        show(
            f"  seal      {RunFolder(folder).seal}\n            publish it: it shows if a file is "
            "altered later"
        )


def short(folder: Path) -> Path:
    """Return the folder relative to where the user is, when it lies below."""
    try:
        return folder.resolve().relative_to(Path.cwd())
    except ValueError:
        return folder
