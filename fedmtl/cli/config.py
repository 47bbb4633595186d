"""From command-line overrides to a trainer: compose the configuration, check it, make its objects.

Hydra composes and sweeps, from files that :mod:`fedmtl.cli.defaults` completes; the objects are those that a program
would make, named by ``_target_``. A file makes nothing but what :func:`fedmtl.trainer.targets.resolved_target` lets it
name.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .._check import check_values
from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import flat
from .names import EXTRA, GUESSED, REMOVED, TRUST, config_folder, nearest, no_setting

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from ..trainer import Trainer

Config = dict[str, Any]
GROUPS = ("algorithm", "data", "model", "schedule", "privacy", "finetune", "logger")
_USERS_DATA = ("data=table", "data=images", "data=leaf")
_OF_THE_COMMAND = ("answers", "logger")  # settings of a run that are no argument of a trainer


def choices(extra: Path | None = None) -> dict[str, dict[str, str]]:
    """Return the groups of the package, and of the user's folder, ``extra``. An option comes with the comment that
    opens its file, and with the name of the user's folder.

    Raises:
        ConfigError: the user's is no folder.
    """
    if extra is not None and not extra.is_dir():
        raise ConfigError(
            f"--config-dir is {extra}, which is no folder; give one with groups, such as mine/algorithm/."
        )
    options: dict[str, dict[str, str]] = {}
    for folder in (config_folder(), *filter(None, [extra])):
        for file in sorted(folder.glob("*/**/*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            comments = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
            words = next((line[2:] for line in comments if not line.startswith("# @")), "")
            options.setdefault(group, {})[file.stem] = f"{words} ({extra})".lstrip() if folder == extra else words
    return options


def check(
    overrides: Sequence[str], *, multirun: bool = False, extra: Path | None = None, name: str = "config"
) -> list[Config]:
    """Return the resolved configuration of each run, after refusing overrides that no run can use.

    Args:
        overrides: as typed.
        multirun: every combination of listed values is checked.
        extra: a folder with further configuration files, searched first.
        name: of the primary configuration file.

    Raises:
        ConfigError: the first problem, naming the key.
    """
    configs = [resolve(compose(run, extra, name)) for run in combinations(overrides, multirun=multirun)]
    for config in configs:
        settings(config)
    return configs


def with_automatic(words: Sequence[str]) -> list[str]:
    """Return the words of a command, in which data of the user take the automatic settings unless an algorithm, an
    experiment or a setting of the schedule is chosen."""
    places = [place for place, word in enumerate(words) if word in _USERS_DATA]
    if not places or any(word.startswith(("algorithm", "experiment=", "schedule.")) for word in words):
        return list(words)
    return [*words[: places[0]], "algorithm=auto", *words[places[0] :]]  # settings stand between the options


def combinations(overrides: Sequence[str], *, multirun: bool) -> list[list[str]]:
    """Return the overrides of each run of a sweep, in Hydra's order; the only ones if nothing is swept.

    Raises:
        ConfigError: an override that cannot be read; without ``multirun``, one that lists several values.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    parsed = parse(overrides)
    swept = [text for text, override in zip(overrides, parsed, strict=True) if override.is_sweep_override()]
    if swept and not multirun:
        listed = f", or write {swept[0].replace('=', '=[')}] for a list" if swept[0].startswith("epsilons=") else ""
        raise ConfigError(f"{swept[0]} lists several values; add -m to run each of them{listed}.")
    if not swept:
        return [list(overrides)]
    try:
        (runs,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise ConfigError(f"{first_line(error)}; write KEY=A,B,C or KEY=range(1,4).") from error
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
    from hydra.errors import HydraException

    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            raise ConfigError(f"cannot read {text!r}: {first_line(error)}.") from error
    return parsed


def hydra_base() -> dict[str, Any]:
    """Return the argument by which Hydra 1.3 behaves as later versions do, which warn of it."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


def compose(overrides: Sequence[str], extra: Path | None = None, name: str = "config") -> DictConfig:
    """Return the composed configuration of one run, its interpolations unresolved.

    Args:
        overrides: as typed.
        extra: a folder with further configuration files, searched first.
        name: of the primary configuration file.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize

    with searched(extra), refusals(overrides, name), initialize(None, **hydra_base()):
        return without_leftovers(hydra_compose(name, overrides=list(overrides)), overrides)


@contextmanager
def searched(extra: Path | None) -> Iterator[None]:
    """Make Hydra search the folder ``extra``, then that of the package, in this block."""
    from .defaults import register

    register()
    if extra is not None:
        choices(extra)  # refuses what is no folder
    before = EXTRA.set(extra)
    try:
        yield
    finally:
        EXTRA.reset(before)


@contextmanager
def refusals(overrides: Sequence[str], name: str = "config") -> Iterator[None]:
    """Turn what Hydra raises in this block into the first option or key that there is not, with the nearest names.

    Args:
        overrides: of one run, as typed.
        name: of the primary configuration file.

    Raises:
        ConfigError: what Hydra refused.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except FedmtlError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _missing(overrides, name) or ConfigError(f"{first_line(error)}.") from error


def _missing(overrides: Sequence[str], name: str) -> ConfigError | None:
    """Return the error of the first option or key among the overrides that does not exist, None if all do."""
    options, chosen, keys = choices(EXTRA.get()), [], []
    for text, override in zip(overrides, parse(overrides), strict=True):
        group, value = override.key_or_group, override.value()
        if group not in options:
            keys.append(override)
        elif text in REMOVED and value not in options[group]:
            return ConfigError(f"{text} is gone: {REMOVED[text]}.")
        elif isinstance(value, str) and value not in options[group]:
            close = difflib.get_close_matches(value, options[group], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}? " if close else ""
            return ConfigError(f"{group} has no option {value!r}; {hint}accepted: {', '.join(options[group])}.")
        else:
            chosen.append(text)
    if not keys:
        return None
    config: Any = _plain(compose(chosen, EXTRA.get(), name))
    for key in (override.key_or_group for override in keys if not override.is_add()):
        node, place = config, ""
        for word in key.split("."):
            if not isinstance(node, Mapping):
                if key in REMOVED:
                    return no_setting(key, ())
                return ConfigError(f"{key} cannot be set alone: {place} is {node}; write '{place}={{{word}: VALUE}}'.")
            if word not in node and not key.startswith("hydra"):
                leaves = list(_leaves(config))
                near = [f"{place}.{name}" for name in difflib.get_close_matches(word, list(node))]
                return no_setting(key, node, nearest(key, leaves) if not place or word in GUESSED else near)
            node, place = node.get(word), f"{place}.{word}".lstrip(".")
    return None


def _leaves(config: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return all settings of a configuration by their dotted keys, mappings among them."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        leaves |= {} if name == "_target_" else {f"{place}{name}": value}
        leaves |= _leaves(value, f"{place}{name}.") if isinstance(value, Mapping) else {}
    return leaves


def _plain(config: Any) -> Config:
    """Return the composed settings as they are written, interpolations included, without Hydra's own."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=False)
    return {str(name): value for name, value in values.items() if name != "hydra"}


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
        if group not in typed and target is not None:
            continue
        own = load(group, str(typed.get(group)))
        stays = {key.split(".")[1] for key in typed if key.startswith(f"{group}.")} | {"_target_"}
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
    """Return plain values: nothing missing, every reference resolved.

    Raises:
        ConfigError: a required value is missing, or a reference leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    missing = sorted(key for key, value in _leaves(_plain(config)).items() if value == "???")
    if missing:
        raise ConfigError(f"{missing[0]} is required; add {missing[0]}=VALUE.")
    values: Config = {}
    try:
        for name in (str(name) for name in config if name not in ("hydra", "_target_")):
            node = config[name]
            values[name] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {first_line(error)}; choose another, or set it.") from error
    return values


def settings(config: Config) -> Config:
    """Return the objects of a resolved configuration that need no data; everything that can be checked is checked.

    Returns:
        Arguments for :class:`fedmtl.Trainer`, without ``data`` and ``folder``.

    Raises:
        ConfigError: an impossible value.
    """
    from .defaults import trainer_settings

    accepted = (*trainer_settings(), *_OF_THE_COMMAND)
    for name in config:
        if name not in accepted:
            raise no_setting(name, accepted, nearest(name, accepted))

    from .. import models
    from ..local import Execution
    from ..trainer import EarlyStopping, Interval, Trainer
    from ..trainer.inputs import check_kinds, check_replicates, named_baselines, usual_baselines
    from ..trainer.metrics import check_metrics
    from ..trainer.problem import resolve_device

    older: Config = {"audit": None, "metrics": ()}  # folders of earlier versions have neither
    config = older | config
    objects = {name: value for name, value in config.items() if name not in (*_OF_THE_COMMAND, "data")}
    model = dict(config["model"])
    fix, lora = (model.pop(name, None) for name in ("fix", "lora"))
    for group in ("algorithm", "schedule", "privacy", "finetune"):
        objects[group] = made(config.get(group), group)
    objects["model"] = made(model, "model")
    if not isinstance(fix or False, bool):
        raise ConfigError(f"model.fix is {fix!r}; accepted: true or false.")
    if fix:
        objects["model"] = models.fix(objects["model"])
    if lora is not None:
        adapted = partial(models.lora, objects["model"])
        objects["model"] = adapted(**_arguments(lora, adapted, "model.lora"))
    objects["execution"] = Execution(**_arguments(config["execution"], Execution, "execution"))
    if config["early_stopping"] is not None:
        objects["early_stopping"] = EarlyStopping(
            **_arguments(config["early_stopping"], EarlyStopping, "early_stopping")
        )
    audit = _arguments(config["audit"], Interval, "audit")
    objects["audit"] = None if audit.get("canaries") is None else Interval(**audit)
    baselines = config["baselines"] or ()
    objects["metrics"] = tuple(config["metrics"] or ())
    objects["baselines"] = () if baselines == "auto" else baselines
    _import_trusted()
    automatic = objects["algorithm"] is None
    for name in ("algorithm", "schedule", "model", "rounds") if automatic else ():
        objects[name] = "auto" if objects[name] is None else objects[name]
    check_values(Trainer, {name: value for name, value in objects.items() if not (automatic and value == "auto")})
    trial = SimpleNamespace(**objects, callbacks=())
    if not automatic:
        check_kinds(trial)
        named_baselines(objects["baselines"], objects["algorithm"])
    check_metrics(objects["metrics"])
    check_replicates(trial)
    if baselines == "auto" and config["replicates"] * len(config["epsilons"] or (0,)) == 1:
        objects["baselines"] = ("local",) if automatic else usual_baselines(objects["algorithm"])
    objects["baselines"] = tuple(objects["baselines"])
    resolve_device(config["device"])
    return objects


def _import_trusted() -> None:
    """Import the trusted modules, whose methods may be baselines.

    Raises:
        ConfigError: one that cannot be imported.
    """
    for module in TRUST.get():
        try:
            import_module(module)
        except Exception as error:  # of a module of the user's own
            raise ConfigError(
                f"--trust is {module!r}, which cannot be imported ({first_line(error)}); its folder must be on "
                "PYTHONPATH."
            ) from error


def _arguments(values: Any, kind: Any, place: str) -> Config:
    """Return the settings of a class or function that is named by its place, without a ``_target_``; null has none.

    Raises:
        ConfigError: no mapping, or a setting that it does not have.
    """
    from .defaults import check_arguments

    if not isinstance(values or {}, Mapping):
        names = ", ".join(signature(kind).parameters)
        raise ConfigError(f"{place} is {values!r}; accepted: null, or a mapping of {names}.")
    check_arguments(kind, list(values or {}), place)
    return dict(values or {})


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
    try:
        return target(**parts)
    except FedmtlError as error:
        raise type(error)(f"{place}: {error}") from error
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


def changed(config: Config, overrides: Sequence[str], places: Sequence[str], extra: Path | None = None) -> Config:
    """Return stored settings with some changed: a group by another option, or one of its settings.

    Args:
        config: as stored.
        overrides: as typed.
        places: the groups and settings that may change.
        extra: a folder with further configuration files, searched first.

    Raises:
        ConfigError: an override of something else.
    """
    from omegaconf import OmegaConf

    for text in overrides:
        if not any(of_place([text], place) for place in places):
            raise ConfigError(f"{text} is not taken here; accepted: {', '.join(f'{place}=...' for place in places)}.")
    changes = {place: of_place(overrides, place) for place in places}
    config = dict(config)
    for place, own in changes.items():
        if any(text.startswith(f"{place}=") for text in own):
            config[place] = resolve(compose(own, extra))[place]
        elif own:
            node = OmegaConf.create({place: config.get(place)})
            for override in parse(own):
                OmegaConf.update(node, override.key_or_group, override.value())
            config[place] = OmegaConf.to_container(node)[place]  # type: ignore[index, call-overload]
    return config


def of_place(overrides: Sequence[str], place: str) -> list[str]:
    """Return the overrides of a group or of a setting."""
    return [text for text in overrides if text.split("=")[0].split(".")[0].lstrip("+") == place]


class _Printed(logging.StreamHandler[Any]):
    """Writes to what standard error is at the time, as a progress bar takes its place."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


@contextmanager
def printed_log(level: int) -> Iterator[None]:
    """Print what the package logs from ``level`` on as plain lines, and nothing twice, while the block runs."""
    log, handler = logging.getLogger("fedmtl"), _Printed()
    handler.setFormatter(logging.Formatter("%(message)s"))
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
