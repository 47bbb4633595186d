"""The configuration of a run, as Hydra composes it: without leftovers, resolved, or printed.

Hydra's source of files is :class:`fedmtl.cli.defaults.Defaults`; :mod:`fedmtl.cli.build` makes the
objects."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, first_line
from .arguments import arguments_of
from .defaults import VERSION, load, register
from .names import EXTRA, TRUST
from .received import HYDRA
from .refusals import dotted, refusals
from .words import Typed, read

Config = dict[str, Any]
FOLDERS = {"run": "hydra.run.dir", "sweep": "hydra.sweep.dir"}
GROUPS = ("algorithm", "data", "model", "schedule", "privacy", "finetune", "logger")


@contextmanager
def composing(typed: Typed) -> Iterator[Hydra]:
    """Lets Hydra, which it yields, compose the files of :mod:`fedmtl.cli.defaults` in this block.

    Args:
        typed: the settings that it composes, for the names in its refusals.

    Raises:
        ConfigError: settings that Hydra cannot read or compose.
    """
    register()
    # The module holds Hydra's own files, which are searched anyhow. Without one Hydra looks for a
    # folder beside the caller, and reads the source of every caller of the caller for it.
    module = hydra.initialize_config_module("hydra.conf", job_name="fedmtl", version_base=VERSION)
    with refusals(typed), module:
        app = GlobalHydra.instance().hydra
        assert app is not None
        yield app


def compose(words: Sequence[str], name: str = "config") -> DictConfig:
    """Returns the composed configuration of one run, its interpolations unresolved.

    Args:
        words: the settings as typed.
        name: of the primary configuration file.

    Raises:
        ConfigError: Hydra cannot read or compose them.
    """
    typed = read(words)
    with composing(typed):
        return without_leftovers(hydra.compose(name, overrides=list(words)), typed)


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


def mode_and_folder(typed: Typed, name: str, *, multirun: bool) -> tuple[bool, Path | None]:
    """Returns True for a sweep, and the folder that the user has chosen, None for a new one.

    A setting, or a file of the user's, chooses Hydra's mode of a sweep, ``hydra.mode: MULTIRUN``,
    as ``-m`` does. A file that is trusted also chooses a folder.

    Args:
        typed: the settings.
        name: of the primary configuration file.
        multirun: True with ``-m``.

    Raises:
        ConfigError: Hydra cannot compose the configuration of a sweep or of its folder.
    """
    of_hydra = {key for key in typed.values if re.split("[./]", key)[0] == HYDRA}
    own = None
    # no file of the package chooses a mode, and to compose them takes time
    if EXTRA.get() is not None or of_hydra - set(FOLDERS.values()):
        own = _of_hydra(typed, name)
        multirun = multirun or own["mode"] == RunMode.MULTIRUN
    kind = "run"
    if multirun:
        kind = "sweep"
    chosen = typed.single.get(FOLDERS[kind])
    if chosen is None and own is not None and HYDRA in TRUST.get():
        chosen = own[kind]["dir"]
        if chosen == _of_hydra(read(()), "config")[kind]["dir"]:
            chosen = None
    if chosen is None:
        return multirun, None
    return multirun, Path(str(chosen))


def _of_hydra(typed: Typed, name: str) -> Config:
    """Returns Hydra's own settings, with their references, of a command that may be a sweep."""
    with composing(typed) as app:
        composed = app.compose_config(
            name,
            list(typed.words),
            run_mode=RunMode.MULTIRUN,
            validate_sweep_overrides=False,
        )
        settings: Any = OmegaConf.to_container(composed[HYDRA], resolve=False)
    return dict(settings)


def printed(config: DictConfig, place: str | None, *, resolve: bool) -> str:
    """Returns the output of ``--cfg job``. Hydra's own would have the leftovers of options that
    are replaced.

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


def without_leftovers(config: DictConfig, typed: Typed) -> DictConfig:
    """Returns a composed configuration without settings for an option that the command line has
    replaced.

    An experiment sets ``algorithm.lam`` for the algorithm that it chooses;
    ``experiment=NAME algorithm=fedavg`` chooses another one. Settings for which
    that one has no argument are dropped, and so is a value for an argument that is an object.

    Args:
        config: composed, changed in place.
        typed: the settings of the command line, which stay as they are.
    """
    keys = [re.split("[./]", key) for key in typed.values]
    for group in (group for group in GROUPS if isinstance(config.get(group), DictConfig)):
        node = config[group]
        target = config[group].get("_target_")
        # only a choice on the command line leaves settings of another option behind
        if target is not None and not {group, "algorithm"} & typed.values.keys():
            continue
        own = load(group, str(typed.values.get(group)))
        accepted: Collection[str] = ()
        if target is not None:
            accepted = arguments_of(target, group).names
        stays = {
            "_target_",
            "lora",
            "fix",
            *(key[1] for key in keys if key[0] == group and len(key) > 1),
        }
        with open_dict(config):
            for name in [name for name in node if name not in stays]:
                if name not in accepted:
                    del node[name]
                elif isinstance(own._get_node(name), DictConfig) and not isinstance(
                    node._get_node(name), DictConfig
                ):
                    node[name] = own[name]
    return config


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
