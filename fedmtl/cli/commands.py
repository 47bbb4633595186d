"""The commands about runs that exist, ``resume``, ``verify`` and ``report``; ``audit`` and
``identity``."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from .._text import shown
from ..errors import ConfigError
from ..report import report as make_report
from ..report._settings import command_of
from . import build
from .around import noted
from .build import Config
from .config import compose, resolve
from .folders import claimed_sweep, short
from .output import say, show
from .parsers import command_parser
from .process import Process
from .run import Job, end_of_sweep, train_one
from .search import run_search
from .stored import refuse_others, stored_config, with_logger
from .words import understood

REFUTED = DOES_NOT_FIT = 1  # exit codes


def resume(words: list[str], process: Process) -> int:
    """Continue an interrupted run or search from its last checkpoint, or the runs of a sweep that
    have not finished.

    The jobs of a sweep that failed are started again; those that finished stay.
    """
    parser = command_parser(resume, "of the logger: where it writes, if elsewhere", folder=True)
    options = parser.parse_intermixed_args(words)
    folder = options.folder
    overrides = options.overrides
    jobs = list[Path]()
    if not (folder / "private" / "config.yaml").is_file():
        files = folder.glob("*/private/config.yaml")
        jobs = sorted(
            # the shorter name first, so that job 10 follows job 9
            (file.parents[1] for file in files),
            key=lambda job: (len(job.name), job.name),
        )
        # also if no job is left that would refuse them
        refuse_others(overrides, ("logger",))
    elif "search" in (config := stored_config(folder)):
        if process.ranks is not None or overrides:
            alone = "is resumed in one process, not torchrun"
            raise ConfigError(
                f"A search {f'has no logger; leave out {overrides[0]}' if overrides else alone}."
            )
        with process.claimed(folder, resume=True):
            return run_search(config["search"], folder)
    with ExitStack() as stack:
        if jobs and process.writes:
            stack.enter_context(claimed_sweep(folder))
        _resume_runs(folder, jobs, overrides, process)
    if jobs:
        return end_of_sweep(process)
    return 0


def _resume_runs(
    folder: Path, jobs: Sequence[Path], overrides: Sequence[str], process: Process
) -> None:
    """Continues the run in a folder, or the runs of a sweep there, ``jobs``."""
    commands = [shlex.split(command_of(job) or "")[1:] for job in jobs]
    # only the settings that differ name a job of a sweep
    common = set[str]().union(*commands).intersection(*commands)
    for number, run in enumerate(jobs or [folder]):
        job = None
        if jobs:
            differ = " ".join(word for word in commands[number] if word not in common)
            job = Job(number, len(jobs), differ, sweep=folder)
        if job is not None and (run / "private" / "result.json").is_file():
            if process.writes:
                show(f"{job}: finished before, {short(run)}")
            continue
        with process.errors(job):
            with process.agree():
                config = with_logger(stored_config(run), run, overrides)
            with process.claimed(run, resume=True), noted(run, job, process):
                train_one(config, run, process, resume=True, job=job)


def audit(words: list[str]) -> int:
    """Check the noise, the clipping, the cohorts and the charges of a configuration by experiment.

    No check proves privacy: a verdict is that the claim could not be refuted at a level, or that it
    was; then the exit code is 1.

    examples
      fedmtl audit                                   the main job
      fedmtl audit algorithm=fedavg schedule=fixed   another configuration, written as for training
      fedmtl audit privacy.source=secure             with the coins of the operating system
      fedmtl audit --interval rounds=100             a lower bound on epsilon, measured in a run
                                                     with 500 canaries
    """
    parser = command_parser(audit, "as for training")
    parser.add_argument("--seed", type=int, default=0, help="of the audit (default 0)")
    parser.add_argument(
        "--interval",
        action="store_true",
        help="train once with canaries, and print epsilon's interval",
    )
    parser.add_argument("--canaries", type=int, default=500, help="of --interval (default 500)")
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds of the transcript check (default 10)"
    )
    options = parser.parse_intermixed_args(words)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be a whole number of at least 1.")
    overrides = understood(options.overrides)
    if options.interval:
        overrides += [f"audit.canaries={options.canaries}", "baselines=[]", "logger=none"]
    config = resolve(compose(overrides))
    config["logger"] = {}  # of a file, perhaps; nothing of an audit is logged
    if options.interval:
        return _interval(config)

    from ..audit import any_refuted, table
    from ..audit.run_suite import audit_trainer

    began = time.monotonic()
    print(
        "the checks take seconds to minutes; their table is printed at the end",
        file=sys.stderr,
        flush=True,
    )
    with TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        findings = audit_trainer(
            build.build(config, Path(folder)), seed=options.seed, rounds=options.rounds
        )
    show(table(findings))
    refuted = sum(f.refuted for f in findings)
    checked = sum(not f.skipped for f in findings)
    seconds = time.monotonic() - began
    show(
        f"\n{refuted} of {checked} checks refuted their claim, in {seconds:.0f} s. The others "
        "prove nothing."
    )
    if any_refuted(findings):
        return REFUTED
    return 0


def _interval(config: Config) -> int:
    """Trains a configuration with canaries, print the interval of epsilon, and returns 1 if it is
    empty."""
    with TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        trainer = build.build(config, Path(folder))
        began = time.monotonic()
        with build.by_key(build.keys(vars(trainer))):
            result = replace(trainer, folder=None, finetune=None).fit()
    seconds = time.monotonic() - began
    interval = result.privacy.interval
    assert interval is not None
    show(
        f"{result.privacy.text()}\n\nOne run with {interval['canaries']:,} canaries, in "
        f"{seconds:.0f} s."
    )
    if interval["measured"] > interval["claimed"]:
        return REFUTED
    return 0


def verify(words: list[str]) -> int:
    """Check a finished run by its files, line by line; the exit code is 1 if something does not
    fit.

    The checks: the hashes of all files, the chain of hashes of the ledger and its head in
    privacy.json and in the checkpoint, every charge against the schedule, epsilon by dp-accounting,
    the last released values on their public grid, and the shared model against the checkpoint.
    Facts that cannot be confirmed are reported as not covered. With --json the output can travel
    with a model as its privacy certificate; it holds nothing private.

    Files that fit prove that nothing was altered by mistake or by someone without the whole folder.
    Whoever holds the whole folder can write it anew, but not under the seal that a secure run
    prints at its end, if that was published.
    """
    parser = command_parser(verify, folder=True)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of lines"
    )
    options = parser.parse_args(words)

    folder = options.folder
    # a part alone would fail with everything that the other has
    if folder.name in ("public", "private") and (folder / "manifest.json").is_file():
        raise ConfigError(f"{folder} is a part of a run; fedmtl verify {folder.parent} checks it.")

    from ..audit.verification import verify as check_files

    verification = check_files(options.folder)
    show(json.dumps(verification.to_dict(), indent=2) if options.json else verification.text())
    if verification.fits:
        return 0
    return DOES_NOT_FIT


def report(words: list[str]) -> int:
    """Collect finished runs into one table (CSV, markdown, LaTeX) and one privacy-utility plot."""
    parser = command_parser(report)
    parser.add_argument("folders", nargs="+", type=Path, help="runs, or folders that hold runs")
    parser.add_argument(
        "--out", type=Path, help="where the files go; default report/ in the first folder"
    )
    parser.add_argument(
        "--html",
        action="store_true",
        help="one page as well, for a browser, that needs no other file",
    )
    formats = "of the plots, png by default; those of a single run are drawn, too"
    parser.add_argument("--format", choices=("png", "pdf", "svg"), help=formats)
    paper = (
        "of plots for a paper: 3.3 for a column, 6.8 for a page; their notes then belong into "
        "the caption"
    )
    parser.add_argument("--width", type=float, metavar="INCHES", help=paper)
    options = parser.parse_intermixed_args(words)
    drawn = {"format": options.format or "png", "width": options.width}
    made = make_report(options.folders, options.out, html=options.html, **drawn)
    files = list(made.files)
    run = options.folders[0]
    target = files[0].parent
    if (
        (options.format or options.width)
        and len(options.folders) == 1
        and (run / "private" / "result.json").is_file()
    ):
        from ..trainer.plots import plot_result
        from ..trainer.result import Result

        files += plot_result(Result.load(run), target, **drawn)
    for folder, why in made.left_out.items():
        say(shown(f"left out: {folder}: {why}"))
    show("\n".join(map(str, files)))
    return 0


def identity(words: list[str]) -> int:
    """Make the identity key of a client, by which others know it in secure sums.

    The private key goes into a new file, which stays on the client's node. The printed key is the
    public one, for identities= of the server and of all nodes.

    examples
      fedmtl identity north                     north.key, in this folder
      fedmtl identity north --file keys/n.key   another file
    """
    parser = command_parser(identity)
    parser.add_argument("name", help="of the client, as in the population")
    parser.add_argument("--file", type=Path, help="a new one, for the private key")
    options = parser.parse_args(words)

    from ..secure.identity import new_identity

    file = options.file
    if file is None:
        file = Path(f"{quote(options.name, safe='')}.key")
    public = new_identity(file)
    show(f'"{options.name}": "{public}"')
    return 0
