r"""Train private, personalized models of federated clients, from the command line.

usage: fedmtl [KEY=VALUE ...]            train; without settings: personal models of embedded digits
       fedmtl visits.csv client=ward target=days   train on a table; fedmtl check drafts its bounds
       fedmtl -m [KEY=A,B,C ...]         train every combination
       fedmtl report FOLDER...           a table and a plot of runs; --html: one page;
                                         --format, --width: for a paper
       fedmtl search KEY=A,B,C ...       choose the best combination under one privacy budget
       fedmtl resume FOLDER              continue an interrupted run, sweep or search
       fedmtl adapt FOLDER [KEY=VALUE]   models of new clients, from the released model of a run
       fedmtl audit [KEY=VALUE ...]      check by experiment the claims of a configuration;
                                         --interval: measure epsilon
       fedmtl predict FOLDER new.csv     the target of new rows of a table, in its units;
                                         --client, --probabilities
       fedmtl export FOLDER model.onnx   a model of a table as a program that needs no fedmtl;
                                         or model.pt2
       fedmtl check data=... [KEY=VALUE] say before training whether the noise allows sharing
       fedmtl verify FOLDER              check a finished run by its files
       fedmtl identity NAME              the key of a node for secure aggregation
       torchrun --nproc-per-node=4 -m fedmtl [-m] [KEY=VALUE ...]
                                         train, sweep or resume in several processes

examples
  fedmtl privacy.epsilon=2 rounds=200
  fedmtl algorithm=pmtl                            personal models pulled to a private mean instead
  fedmtl privacy=none                              no clipping, no noise
  fedmtl -m algorithm=pmtl,fedavg finetune=kl privacy.epsilon=1,2,4,8 baselines=[local]
  fedmtl experiment=pmtl_femnist data.root=/path/to/femnist.zip
  fedmtl algorithm=pp_dmtl replicates=100 epsilons=[1,3,10]     bands, as one batched program

common settings
  rounds, seed, replicates, epsilons, baselines, metrics, device, execution
  privacy.epsilon, privacy.delta, privacy.clip_norm, schedule.cohort, audit.canaries
  algorithm.lam, algorithm.local.lr, algorithm.local.epochs, algorithm.local.batch_size

options
  -m, --multirun      run every combination of listed values
  --cfg job           print all settings and stop; with --resolve: references resolved
  --config-dir DIR    a folder with your own groups, searched first; every command takes it
  --trust MODULE      call objects of this module by name, too, such as your own algorithm;
                      every command takes it
  --debug             show tracebacks
  --version, --help

exit codes
  0, done; 1, a run failed; 2, the request or its input is wrong; 130, interrupted
  A reader that leaves, as in fedmtl ... | head -1, changes neither the run nor the code.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from importlib import import_module
from pathlib import Path

from .. import __version__
from ..errors import ConfigError, first_line
from .adapt import adapt
from .check import check
from .commands import audit, identity, report, resume, verify
from .names import EXTRA, TRUST, choices, unknown
from .output import lost, outputs, say, show
from .parsers import USAGE, Parser
from .predict import export, predict
from .process import FAILED, INTERRUPTED, Process
from .run import train
from .search import search
from .words import is_setting


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: words after the program's name; default ``sys.argv[1:]``.

    Returns:
        The exit code.
    """
    words = [
        "--config-dir" if word == "-cd" else word
        for word in (sys.argv[1:] if argv is None else argv)
    ]
    with outputs() as out:
        # in a context of its own: a program that calls the command twice trusts nothing of the
        # first call
        code = copy_context().run(_run, words, Process("--debug" in words))
    if missing := lost(out):
        say(f"error: {missing}")
        return max(code, FAILED)
    return code


def _run(words: list[str], process: Process) -> int:
    """Runs the command with its trusted modules and searched folders, and returns its exit code."""
    parser = Parser(prog="fedmtl", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--trust", action="append", nargs="?", const="", default=[])
    parser.add_argument("--config-dir", type=Path)
    try:
        with process.errors():
            options, words = parser.parse_known_args(words)
            _import(options.trust)
            TRUST.set(tuple(options.trust))
            if options.config_dir is not None and not options.config_dir.is_dir():
                raise ConfigError(
                    f"--config-dir is {options.config_dir}, which is no folder; give one with "
                    "groups, such as mine/algorithm/."
                )
            EXTRA.set(options.config_dir)
            process.codes.append(_dispatch(words, process))
        if process.ranks is not None:
            process.ranks.leave()
        return max(process.codes)
    except KeyboardInterrupt:
        say("interrupted.")
        return INTERRUPTED


def _import(modules: Sequence[str]) -> None:
    """Imports the trusted modules, whose methods may be baselines.

    Raises:
        ConfigError: one that cannot be imported.
    """
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # of a module of the user's own
            raise ConfigError(
                f"--trust is {module!r}, which cannot be imported ({first_line(error)}); give the "
                "name of a module whose folder is on PYTHONPATH, such as --trust my_feddyn."
            ) from error


def _dispatch(words: list[str], process: Process) -> int:
    """Runs the command that the first word names, a training if it is a setting, and returns its
    exit code."""
    first = ""
    if words:
        first = words[0]
    if first == "help" or (
        {"-h", "--help"} & set(words) and first != "resume" and first not in _COMMANDS
    ):
        show(help_text())
        return 0
    if first == "--version":
        show(f"fedmtl {__version__}")
        return 0
    # settings without a command are those of a training, as Hydra has them
    if not first or is_setting(first) or first[0] in "-~+":
        process.join()
        return train(words, process)
    if first == "resume":
        process.join()
        return resume(words[1:], process)
    if first in _COMMANDS:
        process.refuse_others(first)
        return _COMMANDS[first](words[1:])
    names = [*_COMMANDS, "resume"]
    close = difflib.get_close_matches(first, names, n=1)
    accepted = [*names, "or settings written KEY=VALUE"]
    raise unknown(accepted, close, f"unknown command {first!r}", "fedmtl --help")


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command
    for command in (report, adapt, predict, export, search, audit, verify, check, identity)
}


def help_text() -> str:
    """Returns the page of ``fedmtl --help``: this module's docstring, with the groups and options
    that are found in the configuration folder and in the user's own."""
    lines = [__doc__ or "", "groups: choose with GROUP=OPTION"]
    for group, options in choices().items():
        if "/" in group:
            continue
        width = max(18, *map(len, options))
        lines.append(f"  {group}")
        lines += [f"    {name:<{width}} {words}" for name, words in options.items()]
    return "\n".join(lines)
