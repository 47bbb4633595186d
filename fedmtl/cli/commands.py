"""The commands beside training: ``fedmtl resume``, ``search``, ``adapt``, ``audit``, ``verify`` and
``report``."""

from __future__ import annotations

import argparse
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from .._text import shown
from ..errors import ConfigError
from ..report import report as make_report
from ..report._settings import command_of
from . import config as conf
from .config import Config
from .names import TRUST
from .output import say, show
from .run import (
    Job,
    Process,
    claimed_sweep,
    command_parser,
    end_of_sweep,
    new_folder,
    noted,
    print_saved,
    printed_log,
    resumable,
    short,
    train_one,
)

REFUTED = DOES_NOT_FIT = 1  # exit codes
_COLUMNS = (
    "client",
    "target",
    "features",
    "one_hot",
    "bounds",
    "missing",
    "target_scale",
    "labels",
    "classes",
)
_KEPT = (*_COLUMNS, "split", "time")  # settings of a table that its new clients have, too
# what these are unless they are set
_USUAL: tuple[object, ...] = (None, [], {}, "infer", "refuse", "linear", "random")
# settings of a run that its new clients may have
_ADAPTED = ("data", "finetune", "metrics", "device", "seed")


def resume(words: list[str], process: Process) -> int:
    """Continue an interrupted run or search from its last checkpoint, or the runs of a sweep that
    have not finished.

    Of a sweep those that failed are started again; those that finished stay.
    """
    parser = command_parser(resume, "of the logger: where it writes, if elsewhere", folder=True)
    options = parser.parse_intermixed_args(words)
    folder = options.folder
    overrides = options.overrides
    jobs = list[Path]()
    if not (folder / "private" / "config.yaml").is_file():
        files = folder.glob("*/private/config.yaml")
        jobs = sorted(
            (file.parents[1] for file in files), key=lambda job: (len(job.name), job.name)
        )
    elif "search" in (config := conf.stored_config(folder)):
        if process.ranks is not None or overrides:
            alone = "is resumed in one process, not torchrun"
            raise ConfigError(
                f"A search {f'has no logger; leave out {overrides[0]}' if overrides else alone}."
            )
        with process.claimed(folder, resume=True):
            return _run_search(config["search"], folder)
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
    """Continue the run in a folder, or the runs of a sweep there, ``jobs``."""
    commands = [shlex.split(command_of(job) or "")[1:] for job in jobs]
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
                config = conf.with_logger(conf.stored_config(run), run, overrides)
            with process.claimed(run, resume=True), noted(run, job, process):
                train_one(config, run, process, job=job)


def search(words: list[str]) -> int:
    """Choose the best of many configurations under one privacy budget.

    Every combination of the listed values is a candidate. A secret random number of candidates is
    drawn, trained under noise and scored under noise; the best is released. privacy.epsilon is that
    of the whole search, against outsiders, since the other clients take part in every run.
    Baselines are not run.

    examples
      fedmtl search algorithm=pmtl algorithm.lam=0.1,1,10 privacy.epsilon=4
      fedmtl search algorithm=pmtl,fedavg privacy.clip_norm=0.5,1,2 --mean 6
    """
    arguments = vars(_options(words))
    overrides = arguments.pop("overrides")
    folder = arguments.pop("folder")
    for text in overrides:
        if text.lstrip("+~").startswith("hydra"):
            raise ConfigError(
                f"{text} means nothing in a search; choose its folder with --folder DIR."
            )
    configs = candidate_configs(overrides)
    with (
        new_folder("outputs") if folder is None else nullcontext(folder) as place,
        Process().claimed(place),
    ):
        if (place / "private" / "config.yaml").exists():
            raise ConfigError(
                f"{place} already holds a run; continue it with fedmtl resume {place}, or choose "
                "another folder."
            )
        return _run_search(arguments | {"candidates": configs}, place, ["search", *words])


def _run_search(settings: Config, folder: Path, command: Sequence[str] | None = None) -> int:
    """Make the search of these ``candidates`` and arguments of a
    :class:`~fedmtl.search.PrivateSearch` in a folder that is claimed; without the words of the
    ``command`` that begins it, continue the one in the folder."""
    from ..search.search import PrivateSearch, searched

    arguments = dict(settings)
    configs = {
        name: config | {"logger": {}} for name, config in arguments.pop("candidates").items()
    }
    first = conf.build(next(iter(configs.values())), folder)  # the data are read once
    trainers = {name: replace(first, **conf.settings(config)) for name, config in configs.items()}
    progress = all(trainer.progress for trainer in trainers.values())
    private_search = PrivateSearch(
        candidates=trainers, folder=folder, progress=progress, **arguments
    )
    if command is not None:
        private_search.plan()  # what cannot be accounted is refused before anything is written
        conf.write_config(folder, command, {"search": settings})
    with printed_log(logging.WARNING), resumable(folder):
        result = searched(private_search, command is None)
    show(result.summary())
    print_saved(folder, result.privacy)
    return 0


def candidate_configs(overrides: Sequence[str]) -> dict[str, Config]:
    """Return resolved configurations by the values that differ, such as ``"algorithm.lam=0.1"``.

    Raises:
        ConfigError: no value is listed, or one twice, or one of the data: a search needs the same
            clients.
    """
    configs: dict[str, Config] = {}
    for run in conf.combinations(overrides):
        name = conf.differing(run, overrides)
        if not name:
            raise ConfigError(
                "there is nothing to search: list the values of a setting, such as "
                "algorithm.lam=0.1,1,10."
            )
        if name in configs:
            raise ConfigError(f"{name} is listed twice.")
        config = conf.resolve(conf.compose(run))
        first = next(iter(configs), name)
        if config["data"] != configs.get(first, config)["data"]:
            raise ConfigError(
                f"candidate {name!r} has other data than {first!r}; a search needs "
                "the same clients."
            )
        config["baselines"] = []
        config["logger"] = {}
        configs[name] = config
    return configs


def _options(words: list[str]) -> argparse.Namespace:
    parser = command_parser(search, "as for fedmtl -m: KEY=A,B,C")
    for name, what in (
        ("mean", "expected number of runs (default 4)"),
        ("shape", "of its law: 0 logarithmic, 1 geometric (default), inf Poisson"),
        ("score-noise", "standard deviation of the noise on a score (default 0.01)"),
        ("score-bound", "of a regression's score, 1 - min(mse, BOUND) / BOUND"),
    ):
        parser.add_argument(f"--{name}", type=float, default=argparse.SUPPRESS, help=what)
    kept = "where the search is kept; default outputs/DATE/TIME"
    parser.add_argument("--folder", type=Path, help=kept)
    return parser.parse_intermixed_args(words)


def adapt(words: list[str]) -> int:
    """Make personal models of clients that took no part in a run, from its released model.

    Every new client finetunes the model in public/ on its own records and sends nothing, so this
    costs no epsilon. Model, loss and finetuning are those of the run unless given; features and
    classes must be coded as those of the run. Of a table all settings are kept that are not given,
    such as its columns and bounds.

    examples
      fedmtl adapt outputs/2025-01-31/12-00-00 data.clients=20 data.seed=1      new clients of the
      same source fedmtl adapt outputs/2025-01-31/12-00-00 new.csv                          of
      another table with these columns fedmtl adapt outputs/2025-01-31/12-00-00 new.csv client=who
      whose clients another column names fedmtl adapt outputs/2025-01-31/12-00-00 finetune=mean
      finetune.lam=0.5 metrics=[auc]
    """
    parser = command_parser(adapt, f"of {', '.join(_ADAPTED)}", folder=True)
    goes = "where the files go; default outputs/DATE/TIME"
    parser.add_argument("--out", type=Path, help=goes)
    options = parser.parse_intermixed_args(words)
    out = options.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        state = "has files already" if out.is_dir() else "is a file"
        raise ConfigError(f"--out is {out}, which {state}; choose another folder.")
    options.overrides, kept = _of_the_same_table(options)
    config = _adapted_config(options)
    if kept:
        say(f"as in the run: {kept}")

    from ..trainer.result import Result

    objects = conf.settings(config)
    if objects["finetune"] is None and conf.of_place(options.overrides, "finetune"):
        raise ConfigError(
            "finetune is none, but new clients have nothing to do without; leave it "
            "out, or choose one."
        )
    data = conf.made(config["data"], "data")
    # an automatic model is a factory in the files
    model = None
    if objects["model"] != "auto":
        model = objects["model"]
    run = Result.load(options.folder, model, trust=TRUST.get())
    run.shared_model()  # of a run that has none nothing can start
    if not conf.of_place(options.overrides, "data"):
        raise ConfigError(
            "no setting of data is given, so these would be the clients of the run; say where the "
            "new ones are, such as data.clients=20 data.seed=1, or the path of a table, new.csv."
        )
    finetune = None
    if conf.of_place(options.overrides, "finetune"):
        finetune = objects["finetune"]
    terms = run.terms and {**run.terms, "metrics": objects["metrics"], "seed": config["seed"]}
    with new_folder("outputs") if out is None else nullcontext(out) as place:
        adapted = replace(run, terms=terms).adapt(
            data, finetune=finetune, device=config["device"], folder=place
        )
    public = "public/   the released model, covered by the epsilon of the run it comes from"
    private = "private/  covered by no epsilon: clients.csv, result.json, models.safetensors"
    show(f"{adapted.summary()}\n\nSaved in {place}\n  {public}\n  {private}")
    return 0


def _of_the_same_table(options: argparse.Namespace) -> tuple[list[str], str]:
    """Return the settings that are typed, without ``data=table`` beside a run on a table, whose
    settings are kept, and those that are kept as they are typed; empty of other data."""
    typed = list(options.overrides)
    stored = conf.stored_config(options.folder).get("data") or {}
    if not str(stored.get("_target_")).endswith(".read_table") or not conf.of_place(typed, "data"):
        return typed, ""
    words = [word for word in typed if word != "data=table"]
    if any(word.startswith("data=") for word in words):
        return typed, ""
    given = {word.partition("=")[0].lstrip("+") for word in words}
    names = [
        name for name in _COLUMNS if stored.get(name) not in _USUAL and f"data.{name}" not in given
    ]
    return words, " ".join(shlex.quote(f"data.{name}={_flow(stored[name])}") for name in names)


def _flow(value: object) -> str:
    """Return a setting in one line, as it is typed."""
    return yaml.safe_dump(
        value, default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False
    ).split("\n")[0]


def _adapted_config(options: argparse.Namespace) -> Config:
    """The settings of the run, with those of the new clients in their place."""
    folder: Path = options.folder
    config = conf.stored_config(folder)
    if "search" in config:
        raise ConfigError(
            f"{folder} holds a search; use fedmtl.personalize with the model in its public/ folder."
        )
    if not (folder / "private" / "result.json").is_file():
        raise ConfigError(f"{folder} has not finished; continue it with fedmtl resume {folder}.")
    config = conf.changed({"metrics": []} | config, options.overrides, _ADAPTED)
    return config | {"baselines": [], "replicates": 1, "epsilons": None}


def audit(words: list[str]) -> int:
    """Check the noise, the clipping, the cohorts and the charges of a configuration by experiment.

    No check proves privacy: a verdict is that the claim could not be refuted at a level, or that it
    was; then the exit code is 1.

    examples
      fedmtl audit                                        the main job
      fedmtl audit algorithm=fedavg schedule=fixed        any other configuration, written as for
      training fedmtl audit privacy.source=secure                  with the coins of the operating
      system fedmtl audit --interval rounds=100                  a lower bound on epsilon, measured
      in a run with 500 canaries
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
    if options.interval:
        options.overrides += [f"audit.canaries={options.canaries}", "baselines=[]", "logger=none"]
    config = conf.resolve(conf.compose(conf.with_automatic(options.overrides)))
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
            conf.build(config, Path(folder)), seed=options.seed, rounds=options.rounds
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
    """Train a configuration with canaries, print the interval of epsilon, and return 1 if it is
    empty."""
    with TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        trainer = conf.build(config, Path(folder))
        began = time.monotonic()
        with conf.by_key(vars(trainer)):
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
    the last released values on their public grid, and the shared model against the checkpoint. What
    cannot be confirmed is said to be not covered. With --json the output can travel with a model as
    its privacy certificate; it holds nothing private.

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
