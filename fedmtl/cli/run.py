"""``fedmtl KEY=VALUE``: a run, or a sweep.

Hydra composes, sweeps and names the folders. A run of its own prints a summary, the job of a sweep
one line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig

from .._files import CLAIM
from ..errors import FedmtlError
from ..report import CHOICE_NOT_COVERED
from . import build
from .around import noted, printed_log, resumable
from .config import Config, compose, printed, resolve, without_leftovers
from .defaults import VERSION, register
from .folders import claimed_sweep, new_folder, no_folder, short
from .job import Job
from .output import outputs, say, show
from .overrides import (
    chosen_folder,
    combinations,
    differing,
    parse,
    refusals,
    sweeps,
    with_automatic,
)
from .parsers import hydra_options
from .process import Process
from .stored import check_logger, write_config

if TYPE_CHECKING:
    from ..privacy import PrivacyReport
    from ..trainer import Result


def train(words: list[str], process: Process) -> int:
    """Hand over to Hydra, which composes, sweeps and names the folders, after a check of every run
    of a sweep."""
    words = with_automatic(words)
    options = hydra_options(words)
    typed = options.overrides
    ranks = process.ranks
    chosen = tuple(typed)
    first = [word for word in words if word not in typed]  # Hydra reads no option behind a setting
    shows = options.cfg or options.info or options.hydra_help or options.shell_completion
    options.multirun = options.multirun or (not shows and sweeps(typed, options.config_name))
    by_plugin = any(override.key_or_group == "hydra/sweeper" for override in parse(typed))
    if options.cfg == "job" and not options.multirun:
        with process.agree():
            text = printed(
                compose(typed, options.config_name), options.package, resolve=options.resolve
            )
        if process.writes:
            show(text.removesuffix("\n"))
        return 0
    if options.multirun and not by_plugin:
        runs = combinations(typed)
    else:
        runs = []
    with process.agree():
        configs = [resolve(compose(run, options.config_name)) for run in runs]
        for config in configs:
            build.settings(config)
            check_logger(config, Path(), typed)
        if process.writes and (warning := unlike(configs)):
            say(warning)
        if ranks is not None and not options.multirun:
            # what is refused is refused by all in one line
            compose(typed, options.config_name)

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
            job = Job(int(own.job.num), of, differing(overrides, typed), sweep=Path(own.sweep.dir))
        if job is not None and process.writes and folder == Path.cwd() / job.sweep / "0":
            for number, run in enumerate(runs):  # for a resume, also of what has not begun by then
                place = RunFolder(job.sweep / str(number))
                # else it is refused in its turn
                with suppress(FedmtlError), place.claimed(resume=False):
                    of_task = [word for word in run if not word.startswith(("hydra.", "hydra/"))]
                    write_config(place.root, of_task, configs[number])
        with outputs(), process.errors(job):  # a launcher of a plugin calls this in another process
            with process.claimed(folder), noted(folder, job, process):
                with process.agree():
                    resolved = resolve(without_leftovers(config, overrides))
                    check_logger(resolved, folder, chosen)
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
            place = chosen_folder(typed, options.config_name, key)
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


def _hydra(
    words: list[str], task: Callable[[Any], float | None], options: argparse.Namespace
) -> None:
    """Call ``hydra.main`` over the packaged configuration, with ``words`` as the command line."""
    register()
    before = sys.argv
    sys.argv = ["fedmtl", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, and are not printed by Hydra
    try:
        with refusals(options.overrides):
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
            trainer = build.build(config | {"progress": False}, folder)
            if command is not None and writes:
                write_config(folder, command, config)
        # without a terminal a job prints one line
        trainer = replace(
            trainer, progress=config["progress"] and (job is None or sys.stderr.isatty())
        )
        began = time.monotonic()
        resumed = resumable(place if job is None else short(job.sweep), process.ranks)
        with resumed if writes else nullcontext(), build.by_key(vars(trainer)):
            result = trained(
                trainer, command is None, Engine(ranks=process.ranks or Ranks.of_launch())
            )
    if writes:
        show(result.summary() if job is None else job.line(result, began, place))
        if job is None:
            print_saved(folder, result.privacy)
    return result


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
