"""``fedmtl search``: the best of several configurations under one privacy budget."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError
from . import build
from .around import printed_log, resumable
from .build import Config
from .config import combinations, compose, differing, read, resolve
from .folders import new_folder
from .output import show
from .parsers import command_parser
from .process import Process
from .run import print_saved
from .stored import write_config
from .words import understood


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
    overrides = understood(arguments.pop("overrides"), automatic=False)
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
        return run_search(arguments | {"candidates": configs}, place, ["search", *words])


def run_search(settings: Config, folder: Path, command: Sequence[str] | None = None) -> int:
    """Makes the search of these ``candidates`` and arguments of a
    :class:`~fedmtl.search.PrivateSearch` in a folder that is claimed; without the words of the
    ``command`` that begins it, continue the one in the folder."""
    from ..search.search import PrivateSearch, searched

    arguments = dict(settings)
    configs = {
        name: config | {"logger": {}} for name, config in arguments.pop("candidates").items()
    }
    first = build.build(next(iter(configs.values())), folder)  # the data are read once
    trainers = {name: replace(first, **build.objects(config)) for name, config in configs.items()}
    progress = all(trainer.progress for trainer in trainers.values())
    private_search = PrivateSearch(
        candidates=trainers, folder=folder, progress=progress, **arguments
    )
    if command is not None:
        private_search.plan()  # refuses a search without an accountant before a file is written
        write_config(folder, command, {"search": settings})
    with printed_log(logging.WARNING), resumable(folder):
        result = searched(private_search, command is None)
    show(result.summary())
    print_saved(folder, result.privacy)
    return 0


def candidate_configs(overrides: Sequence[str]) -> dict[str, Config]:
    """Returns resolved configurations by the values that differ, such as ``"algorithm.lam=0.1"``.

    Raises:
        ConfigError: no value is listed, or one twice, or one of the data: a search needs the same
            clients.
    """
    configs: dict[str, Config] = {}
    typed = read(overrides)
    for run in combinations(typed):
        name = differing(run, typed)
        if not name:
            raise ConfigError(
                "there is nothing to search: list the values of a setting, such as "
                "algorithm.lam=0.1,1,10."
            )
        if name in configs:
            raise ConfigError(f"{name} is listed twice.")
        config = resolve(compose(run))
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
    for name, text in (
        ("mean", "expected number of runs (default 4)"),
        ("shape", "of its law: 0 logarithmic, 1 geometric (default), inf Poisson"),
        ("score-noise", "standard deviation of the noise on a score (default 0.01)"),
        ("score-bound", "of a regression's score, 1 - min(ERROR, BOUND) / BOUND"),
    ):
        parser.add_argument(f"--{name}", type=float, default=argparse.SUPPRESS, help=text)
    kept = "where the search is kept; default outputs/DATE/TIME"
    parser.add_argument("--folder", type=Path, help=kept)
    return parser.parse_intermixed_args(words)
