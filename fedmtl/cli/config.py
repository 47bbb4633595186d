"""From command-line overrides to a trainer: compose the configuration, check it, make its objects.

Hydra composes and sweeps, from files that :mod:`fedmtl.cli.defaults` completes; the objects are those that a program
would make, named by ``_target_``. A file makes nothing but what :func:`fedmtl.trainer.targets.resolved_target` lets it
name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from yaml import YAMLError

from .._check import check_values
from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import flat, within
from .names import EXTRA, config_folders, nearest, no_option, no_setting

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from ..trainer import Trainer

Config = dict[str, Any]
GROUPS = ("algorithm", "data", "model", "schedule", "privacy", "finetune", "logger")
_USERS_DATA = ("data=table", "data=images", "data=leaf")
_OF_THE_COMMAND = ("answers", "logger")  # settings of a run that are no argument of a trainer
VERSION = "1.3"  # of Hydra, as whose behaviour a later one takes


def choices() -> dict[str, dict[str, str]]:
    """Return the groups of the package, and of the user's folder. An option comes with the comment that opens its file,
    and with the name of the user's folder."""
    options: dict[str, dict[str, str]] = {}
    for folder in reversed(config_folders()):
        for file in sorted(folder.glob("*/**/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            comments = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
            words = next((line[2:] for line in comments if not line.startswith("# @")), "")
            words += f" ({folder})" if folder == EXTRA.get() else ""
            options.setdefault(group, {})[file.stem] = words.strip()
    return options


def with_automatic(words: Sequence[str]) -> list[str]:
    """Return the words of a command, in which data of the user take the automatic settings unless an algorithm, an
    experiment or a setting of the schedule is chosen."""
    places = [place for place, word in enumerate(words) if word in _USERS_DATA]
    if not places or any(word.startswith(("algorithm", "experiment=", "schedule.")) for word in words):
        return list(words)
    return [*words[: places[0]], "algorithm=auto", *words[places[0] :]]  # settings stand between the options


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep, in Hydra's order.

    Raises:
        ConfigError: an override that cannot be read, or an interval, which has no list of values.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    with refusals(overrides):
        (runs,) = BasicSweeper.split_arguments(parse(overrides), None)
    return [list(run) for run in runs]


def differing(run: Sequence[str], typed: Sequence[str]) -> str:
    """Return those overrides of a run of a sweep that were not typed with a single value."""
    keys = {override.get_key_element(): override.is_sweep_override() for override in parse(typed)}  # the last counts
    return " ".join(text for text in run if keys.get(text.partition("=")[0], True))


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra reads them.

    Raises:
        ConfigError: one that it cannot read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with refusals(overrides):
        return OverridesParser.create().parse_overrides(list(overrides))


def compose(overrides: Sequence[str], name: str = "config") -> DictConfig:
    """Return the composed configuration of one run, its interpolations unresolved.

    Args:
        overrides: as typed.
        name: of the primary configuration file.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize

    from .defaults import register

    register()
    with refusals(overrides), initialize(None, version_base=VERSION):
        return without_leftovers(hydra_compose(name, overrides=list(overrides)), overrides)


@contextmanager
def refusals(overrides: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra raises in this block into an error that names the option or the key, with the nearest names.

    Args:
        overrides: as typed.

    Raises:
        ConfigError: what Hydra refused.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except FedmtlError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise _refused(error, overrides) from error


def _refused(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Return the error of a word that cannot be read, of an option or a key that does not exist, or what Hydra says of
    anything else."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    if isinstance(error, OverrideParseException):
        if "=" not in str(error.override):
            return ConfigError(f"cannot read {error.override!r}; settings are written KEY=VALUE, such as rounds=200.")
        return ConfigError(f"cannot read {error.override!r}: {first_line(error)}.")
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return no_option(group, option, error.options)
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        missing, node = str(cause.full_key), cause.parent_node
        key = next((key for key in (one.key_or_group for one in parse(overrides)) if within(key, [missing])), missing)
        settings: Any = OmegaConf.to_container(node._get_root(), resolve=False)
        del settings["hydra"]
        near = _with_option(missing) or nearest(key, list(_leaves(settings)))
        return no_setting(key, [str(name) for name in node if name != "hydra"], near)
    return ConfigError(f"{' '.join(str(error).split()).rstrip('.')}.")


def _with_option(key: str) -> list[str]:
    """Return up to three choices of another option of a group, each of which has the setting ``key``."""
    from .defaults import load

    group, _, name = key.rpartition(".")
    having = [option for option in choices().get(group, {}) if name in list(load(group, option))]
    return [f"{group}={option} {key}" for option in having[:3]]


def _leaves(settings: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return all settings by their dotted keys, mappings among them."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        leaves |= {} if name == "_target_" else {f"{place}{name}": value}
        leaves |= _leaves(value, f"{place}{name}.") if isinstance(value, Mapping) else {}
    return leaves


def without_leftovers(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a composed configuration without settings for an option that the command line has replaced.

    An experiment sets ``algorithm.lam`` for the algorithm that it chooses; ``experiment=NAME algorithm=fedavg`` chooses
    another one. What that one has no argument for goes, and so does a value for what it describes as an object.

    Args:
        config: composed, changed in place.
        overrides: of the command line, the settings in which stay as they are.
    """
    from omegaconf import DictConfig, OmegaConf, open_dict

    from .defaults import load, named

    typed = {override.key_or_group: override.value() for override in parse(overrides)}
    for group in (group for group in GROUPS if isinstance(config.get(group), DictConfig)):
        node = config[group]
        target = OmegaConf.to_container(node, resolve=False).get("_target_")  # type: ignore[union-attr]
        if not {group, "algorithm"} & typed.keys() and target is not None:
            continue
        own = load(group, str(typed.get(group)))
        stays = {key[len(group) + 1 :].split(".")[0] for key in typed if key.startswith((f"{group}.", f"{group}/"))}
        stays |= {"_target_"}
        stays |= {"lora", "fix"} if group == "model" else set()
        accepted = () if target is None else signature(named(str(target), group)).parameters
        with open_dict(config):
            for name in [name for name in node if name not in stays]:
                if name not in accepted:
                    del node[name]
                elif isinstance(own._get_node(name), DictConfig) and not isinstance(node._get_node(name), DictConfig):
                    node[name] = own[name]
    return config


def resolve(config: DictConfig) -> Config:
    """Return plain values: nothing missing, every reference resolved, and None for an early stop, an audit or adapters
    that are off.

    Raises:
        ConfigError: a required value is missing, or a reference leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain: Any = OmegaConf.to_container(config, resolve=False)
    for missing in sorted(key for key, value in _leaves(plain).items() if value == "???"):
        raise ConfigError(f"{missing} is required; add {missing}=VALUE.")
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}; choose another, or set it.") from error
    del values["_target_"]  # of the trainer
    for node, name, switch in (
        (values, "early_stopping", "patience"),
        (values, "audit", "canaries"),
        (values["model"], "lora", "rank"),
    ):
        if isinstance(node[name], dict) and node[name][switch] is None:
            node[name] = None
    return dict(values)


def settings(config: Config) -> Config:
    """Return the objects of a resolved configuration that need no data; everything that can be checked is checked.

    Returns:
        Arguments for :class:`fedmtl.Trainer`, without ``data`` and ``folder``.

    Raises:
        ConfigError: an impossible value.
    """
    from .. import models
    from ..trainer import Trainer
    from ..trainer.inputs import check_kinds, check_replicates, named_baselines, usual_baselines
    from ..trainer.metrics import check_metrics
    from ..trainer.problem import resolve_device
    from .defaults import check_arguments

    objects = {name: value for name, value in config.items() if name not in _OF_THE_COMMAND}
    check_arguments(Trainer, list(objects), "")
    model = dict(config["model"])
    fix, lora = model.pop("fix", False), model.pop("lora", None)
    objects = {name: made(value, name) for name, value in (objects | {"model": model}).items() if name != "data"}
    if not isinstance(fix, bool):
        raise ConfigError(f"model.fix is {fix!r}; accepted: true or false.")
    if fix:
        objects["model"] = models.fix(objects["model"])
    if lora is not None:
        if not isinstance(lora, dict):
            raise ConfigError(f"model.lora is {lora!r}; give a mapping of its settings, such as model.lora.rank=VALUE.")
        objects["model"] = made(lora | {"model": objects["model"]}, "model.lora")
    baselines, objects["metrics"] = config["baselines"] or (), tuple(config["metrics"] or ())
    objects["baselines"] = () if baselines == "auto" else baselines
    automatic = objects["algorithm"] is None
    for name in ("algorithm", "schedule", "model", "rounds") if automatic else ():
        objects[name] = "auto" if objects[name] is None else objects[name]
    with by_key(Trainer, ""):
        check_values(Trainer, {name: value for name, value in objects.items() if not (automatic and value == "auto")})
    trial = SimpleNamespace(**objects, callbacks=(), folder=None)
    check_kinds(trial)
    if not automatic:
        named_baselines(objects["baselines"], objects["algorithm"])
    check_metrics(objects["metrics"])
    check_replicates(trial)
    if baselines == "auto" and config["replicates"] * len(config["epsilons"] or (0,)) == 1:
        objects["baselines"] = ("local",) if automatic else usual_baselines(objects["algorithm"])
    objects["baselines"] = tuple(objects["baselines"])
    resolve_device(config["device"])
    return objects


def made(node: Any, place: str) -> Any:
    """Return the object of a mapping with ``_target_``, its parts made before it; other values as they are.

    Args:
        node: resolved; a mapping whose ``_target_`` is null describes None, and so does a group without settings.
        place: its dotted key.

    Raises:
        ConfigError: a ``_target_`` that is neither of this package nor of a module in
            :data:`~fedmtl.cli.names.TRUST`, or one that does not take its settings.
    """
    from .defaults import check_arguments, named

    if isinstance(node, list):
        return [made(value, place) for value in node]
    if not isinstance(node, Mapping):
        return node
    if node.get("_target_", "" if place not in GROUPS else None) is None:
        for name in node.keys() - {"_target_"}:
            raise ConfigError(f"{place}.{name} means nothing here: {place} is none; choose another {place}=OPTION.")
        return None
    parts = {str(name): made(value, f"{place}.{name}") for name, value in node.items() if name != "_target_"}
    if "_target_" not in node:
        return parts
    target = named(str(node["_target_"]), place)
    check_arguments(target, list(parts), place)
    with by_key(target, place):
        return target(**parts)


@contextmanager
def by_key(made: Any, place: str) -> Iterator[None]:
    """Let errors of a class or function that is called in this block name its setting by the key: ``privacy.epsilon``
    for ``ClientPrivacy.epsilon``, of what is made at ``privacy``.

    Raises:
        FedmtlError: as it was raised; ConfigError for any other error.
    """
    try:
        yield
    except FedmtlError as error:
        text = str(error).removeprefix(f"{made.__name__}.")
        raise type(error)(f"{place}: {error}" if text == str(error) else f"{place}.{text}".lstrip(".")) from error
    except Exception as error:
        raise ConfigError(f"{place}: {first_line(error)}.") from error


def build(config: Config, folder: Path) -> Trainer:
    """Return the trainer of a resolved configuration, for which the data are read.

    Raises:
        FedmtlError: an impossible value or malformed data, named by its key, file, client or field.
    """
    from ..trainer import Trainer

    objects = settings(config)
    logger = dict(config.get("logger") or {})
    if logger.get("folder") is not None:
        logger["folder"] = str(folder / logger["folder"])
    if "parameters" in logger:
        logger["parameters"] = flat(config) | (logger["parameters"] or {})
    callback = made(logger, "logger")
    data = made(config["data"], "data")
    return Trainer(data=data, folder=folder, callbacks=() if callback is None else (callback,), **objects)


def stored_config(folder: Path) -> Config:
    """Return the settings that the command has stored in the folder of a run.

    Raises:
        ConfigError: there are none.
    """
    from omegaconf import OmegaConf

    stored = folder / "private" / "config.yaml"
    if not stored.is_file():
        raise ConfigError(f"{folder} holds no run of this command: {stored} is missing.")
    config: Any = OmegaConf.to_container(OmegaConf.load(stored))
    return {str(key): value for key, value in config.items()}


def with_logger(config: Config, folder: Path, overrides: Sequence[str]) -> Config:
    """Return the stored settings of a run with its logger, which writes into the folder of the run or where these
    overrides say: a file does not say where else numbers of private data go.

    Args:
        config: as ``private/config.yaml`` has it.
        folder: of the run.
        overrides: settings of the logger that the user gives anew.

    Raises:
        ConfigError: another setting, or a stored place outside of the run that is not given anew.
    """
    config = changed(config, overrides, ("logger",))
    if any(text.startswith("logger=") for text in overrides):
        return config
    typed, root = {text.split("=")[0] for text in overrides}, folder.resolve()
    for key, value in (config.get("logger") or {}).items():
        inside = value is None or (isinstance(value, str) and (root / value).resolve().is_relative_to(root))
        if f"logger.{key}" in typed or key not in ("folder", "tracking_uri") or (inside and key == "folder"):
            continue
        if value is not None:
            raise ConfigError(
                f"logger.{key} of {folder / 'private' / 'config.yaml'} is {value!r}, which is not in the folder of the "
                "run, and a file does not say where else a run writes. If you chose it, give it again: fedmtl resume "
                f"{folder} logger.{key}=VALUE; logger=none resumes without."
            )
    return config


def changed(config: Config, overrides: Sequence[str], places: Sequence[str]) -> Config:
    """Return stored settings with some changed: a group by another option, or one of its settings.

    Args:
        config: as stored.
        overrides: as typed.
        places: the groups and settings that may change.

    Raises:
        ConfigError: an override of something else.
    """
    from omegaconf import OmegaConf

    for text in overrides:
        if not any(of_place([text], place) for place in places):
            kept = ", ".join(f"{place}=... and {place}.KEY=..." for place in places)
            raise ConfigError(f"{text} is not taken here: settings stay as they are stored, except {kept}.")
    own = {place: of_place(overrides, place) for place in places}
    chosen = {place: texts for place, texts in own.items() if any(text.startswith(f"{place}=") for text in texts)}
    node = OmegaConf.create(config | {place: resolve(compose(texts))[place] for place, texts in chosen.items()})
    for override in parse(overrides):
        if override.key_or_group.partition(".")[0] not in chosen:
            OmegaConf.update(node, override.key_or_group, override.value())
    values: Any = OmegaConf.to_container(node)
    return dict(values)


def of_place(overrides: Sequence[str], place: str) -> list[str]:
    """Return the overrides of a group or of a setting."""
    return [text for text in overrides if text.split("=")[0].split(".")[0].lstrip("+") == place]


class _Printed(logging.Handler):
    """Writes to what standard error is at the time, as a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def printed_log(level: int) -> Iterator[None]:
    """Print what the package logs from ``level`` on as plain lines, and nothing twice, while the block runs."""
    log, handler = logging.getLogger("fedmtl"), _Printed()
    log.addHandler(handler)
    before = log.level, log.propagate
    log.propagate = False
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
