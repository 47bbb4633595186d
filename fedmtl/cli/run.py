"""Training from the command line: a run, a sweep, and what is left of an interrupted one.

Hydra composes, sweeps and names the folders. A run of its own prints a summary, the job of a sweep one line.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from .._rounding import number_text, rounded_up
from ..errors import ConfigError, ResumeError
from ..report import CHOICE_NOT_COVERED
from ..report._settings import command_of
from ..report.runs import ERROR
from ..report.tables import write_text
from .config import (
    VERSION,
    Config,
    build,
    combinations,
    compose,
    differing,
    parse,
    printed_log,
    refusals,
    resolve,
    settings,
    stored_config,
    with_automatic,
    with_logger,
    without_leftovers,
)
from .options import (
    USAGE,
    Parser,
    Process,
    add_folder,
    add_settings,
    command_parser,
    print_saved,
    resumable,
    say,
    short,
    write_config,
)
from .search import resume_search

if TYPE_CHECKING:
    from ..trainer import Result


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        number: its place, from 0.
        of: how many there are; None if a sweeper of a plugin chooses them on the way.
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
    words = with_automatic(words)
    options = hydra_options(words)
    typed, ranks = options.overrides, process.ranks
    by_plugin = any(override.key_or_group == "hydra/sweeper" for override in parse(typed))
    several = [override.input_line for override in parse(typed) if override.is_sweep_override()]
    if several and not options.multirun:
        raise ConfigError(f"{several[0]} has several values: fedmtl -m sweeps over them; a list is written [1,2].")
    shows = options.cfg or options.info or options.hydra_help or options.shell_completion
    runs = combinations(typed) if options.multirun and not by_plugin else []
    with process.agree():
        configs = [resolve(compose(run, options.config_name)) for run in runs]
        for config in configs:
            settings(config)
        if process.writes and (warning := unlike(configs)):
            say(warning)
        if ranks is not None and not options.multirun:
            compose(typed, options.config_name)  # what is refused is refused by all in one line
    if ranks is not None:  # one folder for all, whose name is a time
        place, name = ("multirun", "hydra.sweep.dir=") if options.multirun else ("outputs", "hydra.run.dir=")
        when = ranks.share(lambda: time.strftime("%Y-%m-%d/%H-%M-%S"))
        words = words if any(word.startswith(name) for word in words) else [*words, f"{name}{place}/{when}"]

    def task(config: Any) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        from ..trainer.folder import RunFolder

        hydra, job = HydraConfig.get(), None
        overrides, folder = list(hydra.overrides.task), Path(hydra.runtime.output_dir)
        if options.multirun:
            job = Job(int(hydra.job.num), len(runs) or None, differing(overrides, typed), sweep=Path(hydra.sweep.dir))
        with process.errors(job), _without_empty(folder):
            if job is not None and process.writes and folder == Path.cwd() / job.sweep / "0":
                for number, run in enumerate(runs):  # for a resume, also of what has not begun by then
                    if not RunFolder(job.sweep / str(number)).started:  # else it is refused in its turn
                        of_task = [word for word in run if not word.startswith(("hydra.", "hydra/"))]
                        write_config(job.sweep / str(number), of_task, configs[number])
            with process.agree():
                resolved = resolve(without_leftovers(config, overrides))
            result = _run(resolved, folder, process, command=overrides, job=job)
            return float(result.final[result.metric])
        return None

    with process.agree() if shows else nullcontext():
        _hydra(words, (lambda config: None) if shows else task, options)
    return _end_of_sweep(process) if options.multirun else 0


def hydra_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options and overrides among the words, as Hydra reads them.

    Raises:
        ConfigError: an option that Hydra does not have.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.usage, parser.error = USAGE, MethodType(Parser.error, parser)  # type: ignore[method-assign]
    parser.set_defaults(config_name="config")
    parser.allow_abbrev = False
    options, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise ConfigError(f"unknown option {unknown[0]}; settings are written without dashes: {name}=VALUE.")
    return options


@contextmanager
def _without_empty(folder: Path) -> Iterator[None]:
    """Remove the folder of a run, and those of its date, if the run is refused before it has written a file."""
    try:
        yield
    except Exception:
        with suppress(OSError):
            for made in (folder, folder.parent, folder.parent.parent):
                made.rmdir()
        raise


def _hydra(words: list[str], task: Callable[[Any], float | None], options: argparse.Namespace) -> None:
    """Call ``hydra.main`` over the packaged configuration, with ``words`` as the command line."""
    import hydra

    from .defaults import register

    register()
    first = [word for word in words if word not in options.overrides]  # Hydra reads no option behind a setting
    before, sys.argv = sys.argv, ["fedmtl", *first, *options.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, and are not printed by Hydra
    try:
        with refusals(options.overrides):
            hydra.main(version_base=VERSION, config_path=None, config_name="config")(task)()
    except OSError as error:  # not of the run, which is another block
        raise ConfigError(
            f"the folder of the run cannot be made: {error}; choose another with hydra.run.dir=FOLDER."
        ) from error
    finally:
        sys.argv = before


def _run(
    config: Config, folder: Path, process: Process, *, command: Sequence[str] | None = None, job: Job | None = None
) -> Result:
    """Make the run of a resolved configuration; without the words of the ``command`` that begins it, continue the one
    in the folder.

    Raises:
        ResumeError: one begins in a folder that has one already.
    """
    from ..trainer.folder import RunFolder

    writes, place = process.writes, short(folder)
    with process.agree():
        if command is not None and writes and RunFolder(folder).started:
            raise ResumeError(
                f"{place} already holds a run; continue it with fedmtl resume {place}, or choose another folder."
            )
    with _marked(folder, job) if writes else nullcontext():
        with process.agree():
            with printed_log(logging.INFO) if writes and job is None and command is not None else nullcontext():
                trainer = build(config | {"progress": False}, folder)  # the log says what automatic settings are
            if command is not None and writes:
                write_config(folder, command, config)
        # without a terminal a job prints one line
        trainer = replace(trainer, progress=config["progress"] and (job is None or sys.stderr.isatty()))
        began, level = time.monotonic(), logging.INFO if job is None else logging.WARNING
        resumed = resumable(short(folder if job is None else job.sweep), level, launched=process.ranks is not None)
        with resumed if writes else printed_log(logging.CRITICAL):
            result = trainer.fit(resume=command is None, ranks=process.ranks)
    if writes:
        print(job.line(result, began, place) if job is not None else result.summary(), flush=True)
        if job is None:
            print_saved(folder, result.privacy, _private_files(result, folder))
    return result


def _private_files(result: Result, folder: Path) -> str:
    if result.replicates is not None:
        return "bands.png, metrics.csv, replicates.csv, personal models and checkpoint of the first run"
    own = "personal models, " * (folder / "private" / "models.safetensors").is_file()
    return f"accuracy.png, clients.png, {own}metrics.csv, checkpoint, ledger"


@contextmanager
def _marked(folder: Path, job: Job | None) -> Iterator[None]:
    """Leave the reason of a failure in the folder of a run that has begun, or of a job, by which a report knows it from
    an unfinished one."""
    note = folder / "private" / ERROR
    note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        if job is not None or note.parent.is_dir():
            with suppress(OSError):
                write_text(note, f"{' '.join(str(error).split()) or type(error).__name__}\n")
        raise


def resume(words: list[str], process: Process) -> int:
    """Continue an interrupted run or search from its last checkpoint, or the runs of a sweep that have not finished."""
    parser = command_parser(resume)
    add_folder(parser)
    add_settings(parser, "logger.KEY=VALUE", "where a logger writes, if elsewhere")
    options = parser.parse_intermixed_args(words)
    folder, overrides = options.folder, options.overrides
    jobs = sorted(file.parents[1] for file in folder.glob("*/private/config.yaml"))
    if jobs and not (folder / "private" / "config.yaml").is_file():
        return _resume_sweep(sorted(jobs, key=lambda job: len(job.name)), overrides, process)
    with process.agree():
        config = stored_config(folder)
    if "search" in config:
        if process.ranks is not None or overrides:
            wrong = (
                f"has no logger; leave out {overrides[0]}" if overrides else "is resumed in one process, not torchrun"
            )
            raise ConfigError(f"A search {wrong}.")
        return resume_search(config, folder)
    with process.agree():
        config = with_logger(config, folder, overrides)
    _run(config, folder, process)
    return 0


def _resume_sweep(folders: Sequence[Path], overrides: Sequence[str], process: Process) -> int:
    """Finish the jobs of a sweep, in these folders, with ``overrides`` of their loggers: those that finished stay,
    others continue or start, also those that failed."""
    commands = [shlex.split(command_of(folder) or "")[1:] for folder in folders]
    common = set(commands[0]).intersection(*commands)
    for number, (folder, words) in enumerate(zip(folders, commands, strict=True)):
        differ = " ".join(word for word in words if word not in common)
        job = Job(number, len(folders), differ, sweep=folder.parent)
        if (folder / "private" / "result.json").is_file():
            if process.writes:
                print(f"{job}: finished before, {short(folder)}", flush=True)
            continue
        with process.errors(job):
            with process.agree():
                config = with_logger(stored_config(folder), folder, overrides)
            _run(config, folder, process, job=job)
    return _end_of_sweep(process)


def _end_of_sweep(process: Process) -> int:
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
