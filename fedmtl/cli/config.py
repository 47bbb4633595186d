"""The configuration of a run, as Hydra composes it: without leftovers, resolved, or printed.

Hydra's source of files is :class:`fedmtl.cli.defaults.Defaults`; :mod:`fedmtl.cli.build` makes the
objects."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, first_line
from .arguments import arguments_of
from .defaults import initialized, load, register
from .refusals import dotted, refusals
from .typed import Typed, read

Config = dict[str, Any]
GROUPS = ("algorithm", "data", "model", "schedule", "privacy", "finetune", "logger")


def compose(words: Sequence[str], name: str = "config") -> DictConfig:
    """Returns the composed configuration of one run, its interpolations unresolved.

    Args:
        words: the settings as typed.
        name: of the primary configuration file.

    Raises:
        ConfigError: Hydra cannot read or compose them.
    """
    return composed(read(words), name)


def composed(typed: Typed, name: str) -> DictConfig:
    """Returns the composed configuration of settings that are read, see :func:`compose`."""
    register()
    with refusals(typed), initialized():
        return without_leftovers(hydra.compose(name, overrides=list(typed.words)), typed)


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
