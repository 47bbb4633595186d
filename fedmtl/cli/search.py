"""``fedmtl search``: choose the best of many configurations under one privacy budget."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .config import Config, build, combinations, compose, differing, resolve, settings
from .options import add_settings, command_parser, new_folder, print_saved, resumable, write_config

if TYPE_CHECKING:
    from ..search import PrivateSearch

_ARGUMENTS = ("mean", "shape", "score_noise", "score_bound")  # of a PrivateSearch


def search(words: list[str]) -> int:
    """Choose the best of many configurations under one privacy budget.

    Every combination of the listed values is a candidate. A secret random number of candidates is drawn, trained under
    noise and scored under noise; the best is released. privacy.epsilon is that of the whole search, against outsiders,
    since the other clients take part in every run. Baselines are not run.

    examples
      fedmtl search algorithm=pmtl algorithm.lam=0.1,1,10 privacy.epsilon=4
      fedmtl search algorithm=pmtl,fedavg privacy.clip_norm=0.5,1,2 --mean 6
    """
    options = _options(words)
    for text in options.overrides:
        if text.lstrip("+~").startswith("hydra"):
            raise ConfigError(f"{text} means nothing in a search; choose its folder with --folder DIR.")
    configs = candidate_configs(options.overrides)
    _refuse_other_data(configs)
    arguments = {name: value for name, value in vars(options).items() if name in _ARGUMENTS}
    folder = options.folder or new_folder()
    if (folder / "private" / "config.yaml").exists():
        raise ConfigError(
            f"{folder} already holds a run; continue it with fedmtl resume {folder}, or choose another folder."
        )
    private_search = _build(configs, arguments, folder)
    private_search.plan()  # what cannot be accounted is refused before anything is written
    write_config(folder, ["search", *words], {"search": arguments | {"candidates": configs}})
    _fit(private_search, folder, resume=False)
    return 0


def resume_search(config: Config, folder: Path) -> int:
    """Continue the search whose ``private/config.yaml`` holds ``config``."""
    arguments = {name: value for name, value in config["search"].items() if name != "candidates"}
    candidates = {name: candidate | {"logger": {}} for name, candidate in config["search"]["candidates"].items()}
    _fit(_build(candidates, arguments, folder), folder, resume=True)
    return 0


def candidate_configs(overrides: Sequence[str]) -> dict[str, Config]:
    """Return resolved configurations by the values that differ, such as ``"algorithm.lam=0.1"``.

    Raises:
        ConfigError: no value is listed, or one twice.
    """
    configs: dict[str, Config] = {}
    for run in combinations(overrides):
        name = differing(run, overrides)
        if not name:
            raise ConfigError(
                "there is nothing to search: list the values of a setting, such as algorithm.lam=0.1,1,10."
            )
        if name in configs:
            raise ConfigError(f"{name} is listed twice.")
        config = resolve(compose(run))
        config["baselines"], config["logger"] = [], {}
        configs[name] = config
    return configs


def _options(words: list[str]) -> argparse.Namespace:
    parser = command_parser(search)
    add_settings(parser, "KEY=A,B,C", "as for fedmtl -m")
    for name, what in (
        ("mean", "expected number of runs (default 4)"),
        ("shape", "of its law: 0 logarithmic, 1 geometric (default), inf Poisson"),
        ("score-noise", "standard deviation of the noise on a score (default 0.01)"),
        ("score-bound", "of a regression's score, 1 - min(mse, BOUND) / BOUND"),
    ):
        parser.add_argument(f"--{name}", type=float, default=argparse.SUPPRESS, help=what)
    parser.add_argument("--folder", type=Path, help="where the search is kept; default outputs/DATE/TIME")
    return parser.parse_intermixed_args(words)


def _refuse_other_data(configs: dict[str, Config]) -> None:
    (first, common), *others = configs.items()
    for name, config in others:
        if config["data"] != common["data"]:
            raise ConfigError(f"candidate {name!r} has other data than {first!r}; a search needs the same clients.")


def _build(configs: dict[str, Config], arguments: dict[str, Any], folder: Path) -> PrivateSearch:
    """Return the search, for which the data are read once."""
    from ..search import PrivateSearch

    first = build(next(iter(configs.values())), folder)
    trainers = {name: replace(first, **settings(config)) for name, config in configs.items()}
    progress = all(trainer.progress for trainer in trainers.values())
    return PrivateSearch(candidates=trainers, folder=folder, progress=progress, **arguments)


def _fit(search: PrivateSearch, folder: Path, *, resume: bool) -> None:
    """Search and print the summary."""
    with resumable(folder, logging.WARNING):
        result = search.fit(resume=resume)
    print(result.summary())
    print_saved(folder, result.privacy, "every candidate's run, the scores, how many there were")
