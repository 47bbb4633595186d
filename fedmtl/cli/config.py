"""The settings of a run, from the words of a command: Hydra composes the files that they choose.

Hydra's source of files is :class:`fedmtl.cli.defaults.Defaults`; :mod:`fedmtl.cli.build` makes the
objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, first_line
from .build import Config
from .defaults import Defaults, Loader
from .names import EXTRA, TRUST, config_folder
from .received import HYDRA
from .refusals import dotted, refusals

FOLDERS = {RunMode.RUN: "hydra.run.dir", RunMode.MULTIRUN: "hydra.sweep.dir"}
_VERSION = "1.3"  # of Hydra, as whose behaviour a later one takes


@dataclass(frozen=True)
class Typed:
    """Settings as they are typed, which :func:`read` reads once.

    Attributes:
        words: ``KEY=VALUE`` each.
        overrides: the same as Hydra reads them.
    """

    words: tuple[str, ...]
    overrides: tuple[Override, ...]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Returns the values by dotted key or group; the last one counts."""
        return {override.key_or_group: override.value() for override in self.overrides}

    @property
    def single(self) -> dict[str, Any]:
        """Returns the values without those that a sweep goes through."""
        single = (one for one in self.overrides if not one.is_sweep_override())
        return {one.key_or_group: one.value() for one in single}


def read(words: Sequence[str]) -> Typed:
    """Returns settings as Hydra reads them.

    Raises:
        ConfigError: one that it cannot read, or another folder of files than that of
            ``--config-dir``.
    """
    with refusals():
        overrides = OverridesParser.create().parse_overrides(list(words))
    for override in overrides:
        if override.get_key_element().lstrip("+~") == "hydra.searchpath":
            raise ConfigError(
                f"{override.input_line} is not taken; --config-dir DIR is the folder "
                "with own groups."
            )
    return Typed(tuple(words), tuple(overrides))


def of_place(words: Sequence[str], place: str) -> list[str]:
    """Returns the settings of a group or of a setting."""
    return [text for text in words if text.split("=")[0].split(".")[0].lstrip("+") == place]


def differing(run: Sequence[str], typed: Typed) -> str:
    """Returns those settings of a run of a sweep that were not typed with a single value."""
    # the last counts
    keys = {one.get_key_element(): one.is_sweep_override() for one in typed.overrides}
    return " ".join(text for text in run if keys.get(text.partition("=")[0], True))


@contextmanager
def composing(typed: Typed) -> Iterator[Hydra]:
    """Lets Hydra, which it yields, compose the files of :mod:`fedmtl.cli.defaults` in this block.

    Args:
        typed: the settings that it composes, for the names in its refusals.

    Raises:
        ConfigError: settings that Hydra cannot read or compose.
    """
    version.setbase(_VERSION)
    Plugins.instance().register(Defaults)
    places = create_config_search_path(f"{Defaults.scheme()}://{config_folder().resolve()}")
    folder = EXTRA.get()
    if folder is not None:
        path = f"{Defaults.scheme()}://{folder.resolve()}"
        places.prepend("user", path, SearchPathQuery(provider="main"))
    with refusals(typed.words):
        yield Hydra("fedmtl", Loader(places))


def compose(words: Sequence[str], name: str = "config") -> DictConfig:
    """Returns the composed configuration of one run, its interpolations unresolved.

    Args:
        words: the settings as typed.
        name: of the primary configuration file.

    Raises:
        ConfigError: Hydra cannot read or compose them.
    """
    with composing(read(words)) as app:
        config = app.compose_config(name, list(words), RunMode.RUN)
    with open_dict(config):
        del config[HYDRA]
    return config


def combinations(typed: Typed) -> list[list[str]]:
    """Returns the words of each run of a sweep, in Hydra's order.

    Raises:
        ConfigError: an interval, which has no list of values.
    """
    with composing(typed) as app:
        # which finds the options of a glob(*)
        parser = OverridesParser.create(app.config_loader)
        (runs,) = BasicSweeper.split_arguments(parser.parse_overrides(list(typed.words)), None)
    return [list(run) for run in runs]


def mode_and_folder(typed: Typed, name: str, *, multirun: bool) -> tuple[RunMode, Path | None]:
    """Returns the mode, a run or a sweep, and the folder that the user has chosen, None for a new
    one.

    A setting, or a file of the user's, chooses the mode of a sweep, ``hydra.mode: MULTIRUN``, as
    ``-m`` does. A file that is trusted also chooses a folder.

    Args:
        typed: the settings.
        name: of the primary configuration file.
        multirun: True with ``-m``.

    Raises:
        ConfigError: Hydra cannot compose the configuration of a sweep or of its folder.
    """
    of_hydra = {key for key in typed.values if re.split("[./]", key)[0] == HYDRA}
    settings = None
    # no file of the package chooses a mode, and to compose them takes time
    if EXTRA.get() is not None or of_hydra - set(FOLDERS.values()):
        settings = _of_hydra(typed, name)
        multirun = multirun or settings["mode"] == RunMode.MULTIRUN
    mode = RunMode.RUN
    if multirun:
        mode = RunMode.MULTIRUN
    key = FOLDERS[mode]
    chosen = typed.single.get(key)
    if chosen is None and settings is not None and HYDRA in TRUST.get():
        kind = key.split(".")[1]
        chosen = settings[kind]["dir"]
        if chosen == _of_hydra(read(()), "config")[kind]["dir"]:
            chosen = None
    if chosen is None:
        return mode, None
    return mode, Path(str(chosen))


def _of_hydra(typed: Typed, name: str) -> Config:
    """Returns Hydra's own settings, with their references, of a command that may be a sweep."""
    with composing(typed) as app:
        composed = app.compose_config(
            name, list(typed.words), RunMode.MULTIRUN, validate_sweep_overrides=False
        )
        settings: Any = OmegaConf.to_container(composed[HYDRA], resolve=False)
    return dict(settings)


def printed(config: DictConfig, place: str | None, *, resolve: bool) -> str:
    """Returns the output of ``--cfg job``.

    Args:
        config: composed.
        place: the dotted key of the only part to be printed, of ``--package``.
        resolve: True if values take the place of the references to them.

    Raises:
        ConfigError: nothing is at ``place``, or a reference leads nowhere.
    """
    with refusals():
        if resolve:
            OmegaConf.resolve(config)
        if place:
            part = OmegaConf.select(config, place)
        else:
            part = config
    if part is None:
        raise ConfigError(
            f"--package is {place}, and no setting is there; fedmtl --cfg job prints all."
        )
    head = ""
    if place:
        head = f"# @package {place}\n"
    if OmegaConf.is_config(part):
        return head + OmegaConf.to_yaml(part)
    return f"{part}\n"


def resolve(config: DictConfig) -> Config:
    """Returns plain values: nothing missing, every reference resolved, and None for an early stop,
    an audit or adapters that are off.

    Raises:
        ConfigError: a required value is missing, or a reference leads nowhere.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    for missing in sorted(key for key, value in dotted(plain).items() if value == "???"):
        raise ConfigError(f"{missing} is required; add {missing}=VALUE.")
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key}: {first_line(error)}; choose another, or set it."
        ) from error
    del values["_target_"]  # of the trainer
    for node, name, switch in (
        (values, "early_stopping", "patience"),
        (values, "audit", "canaries"),
        (values["model"], "lora", "rank"),
    ):
        if isinstance(node[name], dict) and node[name][switch] is None:
            node[name] = None
    return dict(values)
