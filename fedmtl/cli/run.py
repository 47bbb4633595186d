"""``fedmtl KEY=VALUE``: a run, or a sweep.

Hydra composes, sweeps and names the folders. A run of its own prints a summary, the job of a sweep
one line."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig

from .._files import CLAIM
from ..errors import FedmtlError
from ..report import CHOICE_NOT_COVERED
from . import build
from .around import noted, printed_log, resumable
from .config import (
    FOLDERS,
    Config,
    combinations,
    compose,
    mode_and_folder,
    printed,
    resolve,
    without_leftovers,
)
from .defaults import VERSION, register
from .folders import claimed_sweep, new_folder, no_folder, short
from .job import Job
from .output import outputs, say, show
from .parsers import hydra_options
from .process import Process
from .refusals import refusals
from .stored import check_logger, write_config
from .words import Typed, differing, read

if TYPE_CHECKING:
    from ..privacy import PrivacyReport
    from ..trainer import Result


def train(words: list[str], process: Process) -> int:
    """Trains a run, or the runs of a sweep, which are all checked before the first one.

    Hydra composes, sweeps and names the folders.
    """
    options = hydra_options(words)
    typed = read(options.overrides)
    shows = options.cfg or options.info or options.hydra_help or options.shell_completion
    multirun: bool = options.multirun
    folder = None
    with process.agree():
        if not shows:
            multirun, folder = mode_and_folder(typed, options.config_name, multirun=multirun)
        elif options.cfg == "job" and not multirun:
            config = compose(typed.words, options.config_name)
            if process.writes:
                text = printed(config, options.package, resolve=options.resolve)
                show(text.removesuffix("\n"))
            return 0
        jobs = _jobs_of(typed, options.config_name, process, multirun=multirun)
    with ExitStack() as stack:
        place: list[str] = []
        if shows:
            stack.enter_context(process.agree())
        else:
            place = stack.enter_context(_placed(folder, process, multirun=multirun))
        # Hydra reads no option behind a setting
        first = [word for word in words if word not in typed.words]
        _run_by_hydra([*first, *typed.words, *place], jobs.train, typed)
    if multirun:
        return end_of_sweep(process)
    return 0


@dataclass(frozen=True)
class _Jobs:
    """The run of a command, or the runs of its sweep, for each of which Hydra calls :meth:`train`.

    Args:
        typed: the settings, as typed.
        multirun: True if Hydra sweeps.
        runs: the words of each run; empty for a single one, and if a plugin chooses them.
        configs: the resolved configuration of each of ``runs``.
        process: of the command.
    """

    typed: Typed
    multirun: bool
    runs: list[list[str]]
    configs: list[Config]
    process: Process

    def train(self, config: Any) -> float | None:
        """Trains one run.

        Args:
            config: as Hydra has composed it.

        Returns:
            Its score, by which a sweeper of a plugin chooses the next ones; None after an error.
        """
        own = HydraConfig.get()
        overrides = list(own.overrides.task)
        folder = Path(own.runtime.output_dir)
        job = None
        if self.multirun:
            job = self._job(own, overrides)
            if self.process.writes and folder == Path.cwd() / job.sweep / "0":
                self._announce(job.sweep)
        # a launcher of a plugin calls this in another process, which has no output of its own yet
        with outputs(), self.process.errors(job):
            with self.process.claimed(folder), noted(folder, job, self.process):
                with self.process.agree():
                    resolved = resolve(without_leftovers(config, read(overrides)))
                    check_logger(resolved, folder, self.typed)
                result = train_one(resolved, folder, self.process, command=overrides, job=job)
            return float(result.final[result.metric])
        return None

    def _job(self, own: Any, overrides: list[str]) -> Job:
        of = None
        # a file can list values of its own, and then there are more runs than were typed
        if not own.sweeper.get("params"):
            of = len(self.runs) or None
        words = differing(overrides, self.typed)
        return Job(int(own.job.num), of, words, sweep=Path(own.sweep.dir))

    def _announce(self, sweep: Path) -> None:
        """Writes the configurations of all runs before the first one begins, so that a resume knows
        those that have not begun when the sweep is interrupted."""
        from ..trainer.folder import RunFolder

        for number, run in enumerate(self.runs):
            place = RunFolder(sweep / str(number))
            # a folder that is taken is refused when its turn comes
            with suppress(FedmtlError), place.claimed(resume=False):
                of_task = [word for word in run if not word.startswith(("hydra.", "hydra/"))]
                write_config(place.root, of_task, self.configs[number])


def _jobs_of(typed: Typed, name: str, process: Process, *, multirun: bool) -> _Jobs:
    """Returns the runs of a command. Those of a sweep are checked before any is trained: a fault in
    the last one is not found after hours.

    Args:
        typed: the settings.
        name: of the primary configuration file.
        process: of the command.
        multirun: True if Hydra sweeps.

    Raises:
        FedmtlError: the first impossible setting.
    """
    runs: list[list[str]] = []
    # a sweeper of a plugin chooses its own runs
    if multirun and "hydra/sweeper" not in typed.values:
        runs = combinations(typed)
    configs = [resolve(compose(run, name)) for run in runs]
    for config in configs:
        build.settings(config)
        check_logger(config, Path(), typed)
    warning = unlike(configs)
    if process.writes and warning:
        say(warning)
    if process.ranks is not None and not multirun:
        # here, so that all ranks refuse the same settings, in one line
        compose(typed.words, name)
    return _Jobs(typed, multirun, runs, configs, process)


@contextmanager
def _placed(place: Path | None, process: Process, *, multirun: bool) -> Iterator[list[str]]:
    """Yields the setting of a new folder for a command, the same for all ranks; none if one is
    chosen, ``place``. A sweep holds its folder."""
    words: list[str] = []
    with ExitStack() as stack:
        if place is None:
            kind = "outputs"
            key = FOLDERS["run"]
            if multirun:
                kind = "multirun"
                key = FOLDERS["sweep"]
            folder = process.shared(lambda: str(stack.enter_context(new_folder(kind))))
            place = Path(folder)
            words = [f"{key}={folder}"]
        # else Hydra makes the name, and only the runs hold their folders
        known = "${" not in str(place)
        with process.agree():
            if multirun and process.writes and known:
                stack.enter_context(claimed_sweep(place))
        yield words


def _run_by_hydra(words: list[str], task: Callable[[Any], float | None], typed: Typed) -> None:
    """Calls ``hydra.main`` over the packaged configuration, with ``words`` as the command line."""
    register()
    before = sys.argv
    sys.argv = ["fedmtl", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, and are not printed by Hydra
    try:
        with refusals(typed):
            hydra.main(version_base=VERSION, config_path=None, config_name="config")(task)()
    except OSError as error:  # not of the run, which is another block
        raise no_folder(error) from error
    finally:
        sys.argv = before


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


def unlike(configs: Sequence[Config]) -> str:
    """Returns a warning if methods of a sweep are finetuned beside others that are not, empty
    if all or none are. Local training is the baseline of all, and is not one of them."""
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
