"""``fedmtl KEY=VALUE``: a run, or a sweep.

Hydra composes, sweeps and names the folders. A run of its own prints a summary, the job of a sweep
one line."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from .._files import CLAIM
from .._rounding import number_text, rounded_up
from ..errors import FedmtlError
from ..report import CHOICE_NOT_COVERED
from . import build
from .around import noted, printed_log, resumable
from .build import Config
from .config import (
    FOLDERS,
    Typed,
    combinations,
    compose,
    composing,
    differing,
    mode_and_folder,
    printed,
    read,
    resolve,
)
from .folders import claimed_sweep, new_folder, no_folder, short
from .output import outputs, say, show
from .parsers import run_options
from .process import Process
from .stored import check_logger, write_config
from .words import understood

if TYPE_CHECKING:
    from ..privacy import PrivacyReport
    from ..trainer import Result
    from ..trainer.run_settings import Settings


def train(words: list[str], process: Process) -> int:
    """Trains a run, or the runs of a sweep, which are all checked before the first one."""
    options = run_options(words)
    typed = read(understood(options.overrides))
    name = options.config_name
    with process.agree():
        if options.cfg:
            text = printed(compose(typed.words, name), options.package, resolve=options.resolve)
            if process.writes:
                show(text.removesuffix("\n"))
            return 0
        mode, folder = mode_and_folder(typed, name, multirun=options.multirun)
        runs = _checked_runs(typed, name, mode, process)
    jobs = _Jobs(typed, runs, process)
    with _placed(folder, process, mode) as place, composing(typed) as app:
        # Hydra composes, sweeps and makes the folders
        begin = app.run
        if mode is RunMode.MULTIRUN:
            begin = app.multirun
        begin(name, jobs.train, [*typed.words, f"hydra.mode={mode.name}", *place])
    if mode is RunMode.MULTIRUN:
        return end_of_sweep(process)
    return 0


def _checked_runs(
    typed: Typed, name: str, mode: RunMode, process: Process
) -> list[tuple[list[str], Config]]:
    """Returns the words and the settings of each run of a sweep, all of them checked before any is
    trained: a fault in the last one is not found after hours. There are none if a sweeper of a
    plugin chooses them, and for a single run, which is checked when it begins.

    Args:
        typed: the settings.
        name: of the primary configuration file.
        mode: a run or a sweep.
        process: of the command.

    Raises:
        FedmtlError: the first impossible setting.
    """
    if mode is RunMode.RUN:
        if process.ranks is not None:
            # here, so that all ranks refuse the same settings, in one line
            compose(typed.words, name)
        return []
    if "hydra/sweeper" in typed.values:
        return []
    runs = [(run, resolve(compose(run, name))) for run in combinations(typed)]
    checked = []
    for _, config in runs:
        checked.append(build.settings(config))
        check_logger(config, Path(), typed)
    warning = unlike(checked)
    if process.writes and warning:
        say(warning)
    return runs


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        number: its place, from 0.
        of: the number of jobs; None if a configuration file or a sweeper of a plugin chooses some.
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


@dataclass(frozen=True)
class _Jobs:
    """The run of a command, or the runs of its sweep, for each of which Hydra calls :meth:`train`.

    Args:
        typed: the settings, as typed.
        runs: the words and the settings of each run of a sweep, as far as they are known.
        process: of the command.
    """

    typed: Typed
    runs: list[tuple[list[str], Config]]
    process: Process

    def train(self, config: Any) -> float | None:
        """Trains one run.

        Args:
            config: as Hydra has composed it.

        Returns:
            Its score, by which a sweeper of a plugin chooses the next ones; None after an error.
        """
        hydra = HydraConfig.get()
        words = list(hydra.overrides.task)
        folder = Path(hydra.runtime.output_dir)
        job = None
        if hydra.mode is RunMode.MULTIRUN:
            job = self._job(hydra, words)
            if self.process.writes and folder == Path.cwd() / job.sweep / "0":
                self._announce(job.sweep)
        # a launcher of a plugin calls this in another process, which has no output of its own yet
        with outputs(), self.process.errors(job):
            with self.process.claimed(folder), noted(folder, job, self.process):
                with self.process.agree():
                    resolved = resolve(config)
                    check_logger(resolved, folder, self.typed)
                result = train_one(resolved, folder, self.process, command=words, job=job)
            return float(result.final[result.metric])
        return None

    def _job(self, hydra: Any, words: list[str]) -> Job:
        of = None
        # a file can list values of its own, and then there are more runs than were typed
        if not hydra.sweeper.get("params"):
            of = len(self.runs) or None
        return Job(
            int(hydra.job.num), of, differing(words, self.typed), sweep=Path(hydra.sweep.dir)
        )

    def _announce(self, sweep: Path) -> None:
        """Writes the configurations of all runs before the first one begins, so that a resume knows
        those that have not begun when the sweep is interrupted."""
        from ..trainer.folder import RunFolder

        for number, (run, config) in enumerate(self.runs):
            place = RunFolder(sweep / str(number))
            # a folder that is taken is refused when its turn comes
            with suppress(FedmtlError), place.claimed(resume=False):
                of_task = [word for word in run if not word.startswith(("hydra.", "hydra/"))]
                write_config(place.root, of_task, config)


@contextmanager
def _placed(place: Path | None, process: Process, mode: RunMode) -> Iterator[list[str]]:
    """Yields the setting of a new folder for a command, the same for all ranks; none if one is
    chosen, ``place``. A sweep holds its folder."""
    words: list[str] = []
    with ExitStack() as stack:
        if place is None:
            kind = "outputs"
            if mode is RunMode.MULTIRUN:
                kind = "multirun"
            folder = process.shared(lambda: str(stack.enter_context(new_folder(kind))))
            place = Path(folder)
            words = [f"{FOLDERS[mode]}={folder}"]
        # else Hydra makes the name, and only the runs hold their folders
        known = "${" not in str(place)
        with process.agree():
            if mode is RunMode.MULTIRUN and process.writes and known:
                stack.enter_context(claimed_sweep(place))
        try:
            yield words
        except OSError as error:  # of Hydra, since each run has a block of its own for its errors
            raise no_folder(error) from error


def train_one(
    config: Config,
    folder: Path,
    process: Process,
    *,
    command: Sequence[str] = (),
    resume: bool = False,
    job: Job | None = None,
) -> Result:
    """Trains a run in a folder that is claimed, and prints its summary, or the line of a job.

    Args:
        config: resolved.
        folder: of the run.
        process: of the command.
        command: the words of the command, which are stored with a run that begins.
        resume: True to continue the run in the folder.
        job: of a sweep; None for a run of its own.
    """
    from ..ranks import Ranks
    from ..trainer.engine import Engine
    from ..trainer.fit import run_with_baselines

    writes = process.writes
    place = short(folder)
    level = logging.INFO if job is None else logging.WARNING
    # without a terminal a job prints one line
    progress = config["progress"] and writes and (job is None or sys.stderr.isatty())
    with printed_log(level if writes else logging.CRITICAL):
        with process.agree():
            trainer = build.build(config | {"progress": progress}, folder)
            if writes and not resume:
                write_config(folder, command, config)
        began = time.monotonic()
        resumed = resumable(place if job is None else short(job.sweep), process.ranks)
        with resumed if writes else nullcontext(), build.by_key(build.keys(vars(trainer))):
            result = run_with_baselines(
                trainer, resume, Engine(ranks=process.ranks or Ranks.of_launch())
            )
    if writes:
        show(result.summary() if job is None else job.line(result, began, place))
        if job is None:
            print_saved(folder, result.privacy)
    return result


def end_of_sweep(process: Process) -> int:
    """Prints that no epsilon covers the choice among the runs of a sweep, and returns 0."""
    if process.writes:
        show(f"\n{CHOICE_NOT_COVERED}")
    return 0


def unlike(runs: Sequence[Settings]) -> str:
    """Returns a warning if methods of a sweep are finetuned beside others that are not, empty
    if all or none are. Local training is the baseline of all, and is not one of them."""
    tuned: list[str] = []
    plain: list[str] = []
    for run in runs:
        name = "auto"
        if not isinstance(run.algorithm, str):
            name = type(run.algorithm).__name__
        if run.finetune is not None:
            tuned.append(name)
        elif name != "Local":
            plain.append(name)
    others = [name for name in dict.fromkeys(plain) if name not in tuned]
    if not tuned or not others:
        return ""
    return (
        f"finetuned after training: {', '.join(dict.fromkeys(tuned))}; not: {', '.join(others)}. "
        "Their scores do not compare; give all of them the same, as finetune=kl or finetune=none."
    )


def print_saved(folder: Path, privacy: PrivacyReport) -> None:
    """Prints the files of a run, those that may be published, and the seal of a secure run."""
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
