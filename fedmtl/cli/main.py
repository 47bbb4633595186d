"""The ``fedmtl`` command.

Exit codes: 0, done; 1, a run failed; 2, the request or its input is wrong; 130, interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import ConfigError, DataError, FedmtlError, ModelError, PrivacyError, ResumeError
from ..report import CHOICE_NOT_COVERED
from .adapt import adapt
from .check import check as check_data
from .config import (
    Config,
    all_choices,
    build,
    check,
    combinations,
    compose,
    hydra_base,
    parse,
    printed_log,
    refusals,
    resolve,
    searched,
    with_automatic,
    with_logger,
    without_leftovers,
)
from .inspect import audit, report, verify
from .names import TRUST
from .options import INTERRUPTED, command_parser, make_paths_absolute, resumable, say, told_to_end, write_config
from .search import resume_search, search
from .sweep import STORED, Job, jobs, left, marked, unlike

if TYPE_CHECKING:
    from ..ranks import Ranks
    from ..trainer import Result, Trainer

FAILED, REFUSED = 1, 2
_FULL_ERROR = "HYDRA_FULL_ERROR"
_REQUEST = (ConfigError, DataError, ModelError, PrivacyError)  # the user's to fix, known before training

_USAGE = """\
usage: fedmtl [KEY=VALUE ...]            train; without settings: private personal models of embedded digits
       fedmtl -m [KEY=A,B,C ...]         train every combination
       fedmtl report FOLDER...           a table and a plot of runs; --html: one page; --format, --width: for a paper
       fedmtl search KEY=A,B,C ...       choose the best combination under one privacy budget
       fedmtl resume FOLDER              continue an interrupted run, sweep or search
       fedmtl adapt FOLDER [KEY=VALUE]   models of new clients, from the released model of a run
       fedmtl audit [KEY=VALUE ...]      check by experiment what a configuration claims; --interval: measure epsilon
       fedmtl check data=... [KEY=VALUE] say before training whether sharing can help
       fedmtl verify FOLDER              what the files of a finished run confirm
       torchrun --nproc-per-node=4 -m fedmtl [-m] [KEY=VALUE ...]   train, sweep or resume in several processes
"""
_EXAMPLES = """\
examples
  fedmtl privacy.epsilon=2 rounds=200
  fedmtl algorithm=pmtl                            personal models pulled to a private mean instead
  fedmtl privacy=none                              no clipping, no noise
  fedmtl -m algorithm=pmtl,fedavg finetune=kl privacy.epsilon=1,2,4,8 baselines=[local]
  fedmtl experiment=pmtl_femnist data.root=/path/to/femnist.zip
  fedmtl algorithm=pp_dmtl replicates=100 epsilons=[1,3,10]     percentile bands, as one batched program

common settings
  rounds, seed, replicates, epsilons, baselines, metrics, device, execution, scale
  privacy.epsilon, privacy.delta, privacy.clip_norm, schedule.cohort, audit.canaries
  algorithm.lam, algorithm.local.lr, algorithm.local.epochs, algorithm.local.batch_size

options
  -m, --multirun      run every combination of listed values
  --cfg job           print all settings and stop; with --resolve: what references lead to
  --config-dir DIR    a folder with your own groups, searched first
  --trust MODULE      call what files name in this module too, such as an algorithm of yours; every command takes it
  --debug             show tracebacks
  --version, --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: words after the program's name; default ``sys.argv[1:]``.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    before = TRUST.set(())
    try:
        ranks: Ranks | None = None
        with _errors_in_one_line(debug) as codes:
            words = _trusting(words)
            ranks = _launched(words)
            codes.append(_dispatch(words, debug, ranks))
        if ranks is not None:
            ranks.leave()
        return max(codes)
    except KeyboardInterrupt:
        say("interrupted.")
        return INTERRUPTED
    finally:
        TRUST.reset(before)


def _taken(words: list[str], *names: str) -> tuple[list[str], list[str]]:
    """Return the values of every option of one of these names, and the other words."""
    values, left, rest = [], [], iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if name in names:
            values.append(value or next(rest, ""))
        else:
            left.append(word)
    return values, left


def _trusting(words: list[str]) -> list[str]:
    """Trust the modules of every ``--trust MODULE``, and return the other words.

    Raises:
        ConfigError: no name of a module follows.
    """
    modules, left = _taken(words, "--trust")
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(f"--trust is {module!r}; give the name of a module, such as --trust my_feddyn.")
    TRUST.set((*TRUST.get(), *modules))
    return left


def _launched(words: list[str]) -> Ranks | None:
    """Return the ranks that torchrun started; None, without importing PyTorch, where it started one or did not.

    Raises:
        ConfigError: several, for a command that runs in one process.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return None
    command = next((word for word in words if word in _COMMANDS), "resume")
    if command != "resume":
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(REFUSED)
        raise ConfigError(f"{command} runs in one process, and {size} were started; start it without torchrun.")
    from ..ranks import Ranks

    return Ranks.of_launch()


def _dispatch(words: list[str], debug: bool, ranks: Ranks | None) -> int:
    if words == ["help"] or ({"-h", "--help"} & set(words) and words[0] not in _COMMANDS):
        print(help_text(_train_options([word for word in words if word not in ("-h", "--help", "help")]).config_dir))
        return 0
    if words[:1] == ["--version"]:
        print(f"fedmtl {__version__}")
        return 0
    if words and "=" not in words[0] and words[0][:1] not in ("-", "~", "+"):
        if words[0] not in _COMMANDS:
            close = difflib.get_close_matches(words[0], _COMMANDS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            accepted = ", ".join(_COMMANDS)
            raise ConfigError(
                f"unknown command {words[0]!r}; {hint}accepted: {accepted}, or settings written KEY=VALUE."
            )
        if words[0] == "resume":
            return _resume(words[1:], debug, ranks)
        return _COMMANDS[words[0]](words[1:])
    return _train(words, debug, ranks)


def help_text(extra: Path | None = None) -> str:
    """Return the page of ``fedmtl --help``, with the groups and options found in the configuration folder, and in the
    user's own, ``extra``."""
    lines = [_USAGE, "groups: choose with GROUP=OPTION"]
    for group, options in all_choices(extra).items():
        if "/" in group:
            continue
        width = max(18, *map(len, options))
        lines.append(f"  {group}")
        lines += [f"    {name:<{width}} {words}" for name, words in options.items()]
    return "\n".join([*lines, "", _EXAMPLES])


def _train(words: list[str], debug: bool, ranks: Ranks | None) -> int:
    """Hand over to Hydra, which composes, sweeps and names the folders; check every run of a sweep before."""
    words = with_automatic(words)
    options, (folders, words) = _train_options(words), _taken(words, "--config-dir", "-cd")
    extra = Path(folders[-1]) if folders else None
    sweep: list[tuple[Job, list[str]]] = []
    with _agreed(ranks):
        runs = [] if _by_plugin(options.overrides) else combinations(options.overrides, multirun=options.multirun)
        if options.multirun and runs:
            configs = check(options.overrides, multirun=True, extra=extra, name=options.config_name)
            sweep = jobs(options.overrides, Path())
            if _writes(ranks) and (warning := unlike(configs)):
                say(warning)
        elif ranks is not None:
            compose(options.overrides, extra, options.config_name)  # what is refused is refused by all in one line
    if ranks is not None:  # one folder for all, whose name is a time
        place, name = ("multirun", "hydra.sweep.dir=") if options.multirun else ("outputs", "hydra.run.dir=")
        when = ranks.share(lambda: time.strftime("%Y-%m-%d/%H-%M-%S"))
        words = words if any(word.startswith(name) for word in words) else [*words, f"{name}{place}/{when}"]
    codes = [0]

    def task(config: Any) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        hydra, job = HydraConfig.get(), None
        overrides, folder = list(hydra.overrides.task), Path(hydra.runtime.output_dir)
        if sweep:  # in Hydra's order
            job = replace(sweep[hydra.job.num][0], sweep=Path(hydra.sweep.dir))
        elif options.multirun:
            job = Job(int(hydra.job.num), None, " ".join(overrides), Path(hydra.sweep.dir))
        with _errors_in_one_line(debug, codes, job), _ending_for_all(job, ranks), _without_empty(folder):
            with _agreed(ranks):
                resolved = resolve(without_leftovers(config, overrides))
            result = _begin(resolved, folder, shlex.join(["fedmtl", *overrides]), job, ranks)
            return float(result.final[result.metric])
        return None

    with _agreed(ranks) if options.shows else nullcontext(), searched(extra):
        _hydra(words, (lambda config: None) if options.shows else task, options)
    return _end_of_sweep(codes, ranks) if options.multirun else max(codes)


def _by_plugin(overrides: Sequence[str]) -> bool:
    """Return whether another sweeper than Hydra's basic one chooses the runs."""
    return any(override.key_or_group == "hydra/sweeper" for override in parse(overrides))


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


def _end_of_sweep(codes: list[int], ranks: Ranks | None) -> int:
    """Return the exit code of a sweep, after a note on what the choice among its runs costs."""
    if _writes(ranks):
        print(f"\n{CHOICE_NOT_COVERED}", flush=True)
    return max(codes)


def _hydra(words: list[str], task: Callable[[Any], float | None], options: argparse.Namespace) -> None:
    """Call ``hydra.main`` over the packaged configuration, with ``words`` as the command line."""
    import hydra

    before, sys.argv = sys.argv, ["fedmtl", *words]
    full = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"  # errors come here, and are not printed by Hydra
    try:
        with refusals(options.overrides, options.config_name):
            hydra.main(**hydra_base(), config_path=None, config_name="config")(task)()
    except OSError as error:  # not of the run, which is another block
        raise ConfigError(
            f"the folder of the run cannot be made: {error}; choose another with hydra.run.dir=FOLDER."
        ) from error
    finally:
        sys.argv = before
        if full is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = full


def _begin(config: Config, folder: Path, command: str, job: Job | None, ranks: Ranks | None = None) -> Result:
    """Make a run of a resolved configuration.

    Raises:
        ResumeError: the folder has one already.
    """
    from ..trainer.folder import RunFolder

    with _agreed(ranks):
        if _writes(ranks) and RunFolder(folder).started:
            shown = _short(folder)
            raise ResumeError(
                f"{shown} already holds a run; continue it with fedmtl resume {shown}, or choose another folder."
            )
    with marked(folder) if _writes(ranks) and job is not None else nullcontext():
        with _agreed(ranks):
            with printed_log(logging.INFO) if _writes(ranks) and job is None else nullcontext():
                trainer = build(config, folder)
            make_paths_absolute(config)
            if _writes(ranks):
                write_config(folder, command, config)
        with marked(folder) if _writes(ranks) else nullcontext():
            return _fit(trainer, folder, resume=False, job=job, ranks=ranks)


def _go_on(config: Config, folder: Path, job: Job | None, ranks: Ranks | None) -> None:
    """Continue a run that has begun."""
    with marked(folder) if _writes(ranks) else nullcontext():
        with _agreed(ranks):
            trainer = build(config, folder)
        _fit(trainer, folder, resume=True, job=job, ranks=ranks)


def _resume_sweep(sweep: Path, overrides: Sequence[str], debug: bool, ranks: Ranks | None) -> int:
    """Finish the jobs of a sweep, with ``overrides`` of their loggers: those that finished stay, others continue or
    start, also those that failed."""
    codes = [0]
    with _agreed(ranks):
        every = list(left(sweep))
    for one in every:
        if one.config is None:
            if _writes(ranks):
                print(f"{one.job}: finished before, {_short(one.folder)}", flush=True)
            continue
        with _errors_in_one_line(debug, codes, one.job), _ending_for_all(one.job, ranks):
            with _agreed(ranks):
                config = with_logger(one.config, one.folder, overrides)
            if one.begun:
                _go_on(config, one.folder, one.job, ranks)
            else:
                _begin(config, one.folder, one.command, one.job, ranks)
    return _end_of_sweep(codes, ranks)


def _resume(words: list[str], debug: bool = False, ranks: Ranks | None = None) -> int:
    description = "Continue an interrupted run from its last checkpoint, or the runs of a sweep that have not finished."
    parser = command_parser("resume", description)
    parser.add_argument("folder", type=Path, help="of a run or sweep, such as outputs/2025-01-31/12-00-00")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="logger.KEY=VALUE", help="where a logger writes, if elsewhere"
    )
    options = parser.parse_intermixed_args(words)
    folder, overrides = options.folder, options.overrides
    stored = folder / "private" / "config.yaml"
    if (folder / STORED).is_file() and not stored.is_file():
        return _resume_sweep(folder, overrides, debug, ranks)
    with _agreed(ranks):
        if not stored.is_file():
            raise ConfigError(f"{folder} holds no run of this command: {stored} is missing.")
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(stored))
    assert isinstance(config, dict)
    stored_settings = {str(key): value for key, value in config.items()}
    if "search" in stored_settings:
        if ranks is not None or overrides:
            wrong = (
                f"has no logger; leave out {overrides[0]}" if overrides else "is resumed in one process, not torchrun"
            )
            raise ConfigError(f"A search {wrong}.")
        return resume_search(stored_settings, folder)
    with _agreed(ranks):
        given = with_logger(stored_settings, folder, overrides)
    _go_on(given, folder, None, ranks)
    return 0


def _writes(ranks: Ranks | None) -> bool:
    """Return whether this process is the one that writes and prints."""
    return ranks is None or ranks.first


def _agreed(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Raise at all ranks what the block raises at any."""
    return nullcontext() if ranks is None else ranks.agree()


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "report": report,
    "adapt": adapt,
    "search": search,
    "resume": _resume,
    "audit": audit,
    "verify": verify,
    "check": check_data,
}


def _fit(trainer: Trainer, folder: Path, *, resume: bool, job: Job | None = None, ranks: Ranks | None = None) -> Result:
    """Train and print the summary; of the job of a sweep one line."""
    shown = _short(folder)
    if ranks is not None and not ranks.first:
        with printed_log(logging.CRITICAL):
            return trainer.fit(resume=resume, ranks=ranks)
    if job is not None:
        trainer = replace(trainer, progress=trainer.progress and job.watched)
        began = time.monotonic()
        sweep = _short(job.sweep)
        with resumable(sweep, logging.WARNING), told_to_end(sweep) if ranks is not None else nullcontext():
            result = trainer.fit(resume=resume, ranks=ranks)
        print(job.line(result, began, shown), flush=True)
        return result
    with resumable(shown, logging.INFO), told_to_end(shown) if ranks is not None else nullcontext():
        result = trainer.fit(resume=resume, ranks=ranks)
    print(f"{result.summary()}\n\nSaved in {shown}")
    several = result.replicates is not None
    plotted = not several and 0 < result.epsilon < float("inf")
    public = ["privacy.json", *["epsilon.png"] * plotted, *["model.safetensors"] * (result.shared is not None)]
    public += [*["releases.safetensors"] * bool(result.released), "manifest.json"]
    private = "bands.png, metrics.csv, replicates.csv, personal models and checkpoint of the first run"
    if not several:
        own = "personal models, " * (folder / "private" / "models.safetensors").is_file()
        private = f"accuracy.png, clients.png, {own}metrics.csv, checkpoint, ledger"
    print(f"  public/   {', '.join(public)}\n            {result.privacy.publication}")
    print(f"  private/  {private}\n            covered by no epsilon")
    if result.privacy.source == "secure":
        from ..trainer.folder import RunFolder

        print(f"  seal      {RunFolder(folder).seal}\n            publish it: it shows if a file is altered later")
    return result


def _train_options(words: list[str]) -> argparse.Namespace:
    """Return the overrides among the words and the options that matter before Hydra sees them."""
    parser = argparse.ArgumentParser(prog="fedmtl", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("-cd", "--config-dir", type=Path)
    parser.add_argument("-cn", "--config-name", default="config")
    for flags in (("--info", "-i"), ("--hydra-help",), ("--shell-completion", "-sc")):
        parser.add_argument(*flags, dest="shows", nargs="?", const="yes")
    parser.add_argument("overrides", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0]
        raise ConfigError(f"unknown option {unknown[0]}; settings are written without dashes: {name}=VALUE.")
    options.shows = options.shows or options.cfg
    return options


@contextmanager
def _errors_in_one_line(debug: bool, codes: list[int] | None = None, job: Job | None = None) -> Iterator[list[int]]:
    """Print an error as one line, with the job of a sweep whose it is, and append its exit code, unless ``debug`` asks
    for the traceback."""
    codes = [] if codes is None else codes
    whose, rank = "" if job is None else f"{job}: ", int(os.environ.get("RANK", "0"))

    def tell(error: Exception, text: str) -> None:
        if rank == 0 or not getattr(error, "agreed", False):  # else the first rank says it
            say(f"error: {whose}{f'rank {rank}: ' if rank else ''}{text}")

    try:
        yield codes
    except FedmtlError as error:
        if debug:
            raise
        tell(error, " ".join(str(error).split()))
        codes.append(REFUSED if isinstance(error, _REQUEST) else FAILED)
    except BrokenPipeError:  # the reader of the output has gone, as with "| head"
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        codes.append(FAILED)
    except Exception as error:
        if debug:
            raise
        tell(error, f"{type(error).__name__}: {' '.join(str(error).split())} (--debug shows the traceback)")
        codes.append(FAILED)


@contextmanager
def _ending_for_all(job: Job | None, ranks: Ranks | None) -> Iterator[None]:
    """End this process of several where the job of a sweep has an error that the others do not have: they wait for it
    in that job, and hear that it has ended."""
    try:
        yield
    except Exception as error:
        if job is None or ranks is None or getattr(error, "agreed", False):
            raise
        say(f"error: {job}: rank {ranks.rank}: {type(error).__name__}: {' '.join(str(error).split())}")
        raise SystemExit(FAILED) from error


def _short(folder: Path) -> Path:
    """Return the folder relative to where the user is, when it lies below."""
    try:
        return folder.resolve().relative_to(Path.cwd())
    except ValueError:
        return folder
