"""Settings as they are typed: Hydra's overrides, and those of every run of a sweep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from ..errors import ConfigError
from .defaults import initialized, register
from .names import EXTRA, TRUST
from .received import HYDRA
from .refusals import refusals

_FOLDERS = {"hydra.run.dir", "hydra.sweep.dir"}


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

    @cached_property
    def single(self) -> Typed:
        """Returns the settings with one value, without those that a sweep goes through."""
        single = tuple(one for one in self.overrides if not one.is_sweep_override())
        return Typed(tuple(str(one.input_line) for one in single), single)


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


def combinations(typed: Typed) -> list[list[str]]:
    """Returns the words of each run of a sweep, in Hydra's order.

    Raises:
        ConfigError: an interval, which has no list of values.
    """
    register()
    with refusals(typed), initialized():
        # which finds the options of a glob(*)
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        (runs,) = BasicSweeper.split_arguments(parser.parse_overrides(list(typed.words)), None)
    return [list(run) for run in runs]


def differing(run: Sequence[str], typed: Typed) -> str:
    """Returns those settings of a run of a sweep that were not typed with a single value."""
    # the last counts
    keys = {one.get_key_element(): one.is_sweep_override() for one in typed.overrides}
    return " ".join(text for text in run if keys.get(text.partition("=")[0], True))


def sweeps(typed: Typed, name: str) -> bool:
    """Returns True if a file or a setting chooses Hydra's mode of a sweep, ``hydra.mode:
    MULTIRUN``, as ``-m`` does.

    Args:
        typed: the settings.
        name: of the primary configuration file.
    """
    register()
    of_hydra = {key for key in typed.values if re.split("[./]", key)[0] == HYDRA} - _FOLDERS
    if EXTRA.get() is None and not of_hydra:
        return False  # no file of the package chooses a mode, and to compose them takes time
    with initialized():
        app = GlobalHydra.instance().hydra
        return app is not None and app.get_mode(name, list(typed.words)) == RunMode.MULTIRUN


def chosen_folder(typed: Typed, name: str, key: str) -> Path | None:
    """Returns the folder that the user has chosen for a run or a sweep; None for a new one.

    Args:
        typed: the settings.
        name: of the primary configuration file.
        key: ``hydra.run.dir`` or ``hydra.sweep.dir``.

    Raises:
        ConfigError: Hydra cannot compose the configuration.
    """
    if key in typed.single.values:
        return Path(str(typed.single.values[key]))
    if HYDRA not in TRUST.get():  # else a file may choose it
        return None
    return _folder_of_file(typed.single, name, key)


def _folder_of_file(typed: Typed, name: str, key: str) -> Path | None:
    """Returns the folder that a trusted file chooses for a run or a sweep; None if it is that of
    Hydra."""
    register()
    with refusals(typed), initialized():
        composed = hydra.compose(name, list(typed.words), return_hydra_config=True)
        usual = hydra.compose(overrides=[], return_hydra_config=True)
    places = [OmegaConf.to_container(config.hydra, resolve=False) for config in (composed, usual)]
    _, group, _ = key.split(".")
    chosen, default = (
        str(place[group]["dir"])  # type: ignore[index,call-overload]
        for place in places
    )
    if chosen == default:
        return None
    return Path(chosen)
