"""From command-line overrides to a trainer: compose the configuration, check it, make its objects.

Hydra composes and sweeps. Its source of files, :class:`Defaults`, completes a file under
``configs/``, which lists what differs from the signature of its ``_target_``: every setting has a
key that Hydra can override, sweep and print. The objects are those that a program would make, named
by ``_target_``. A file makes nothing but what :func:`fedmtl.trainer.targets.resolved_target` lets
it name, and of Hydra's own settings it has those that :func:`fedmtl.cli.received.check_file` lets
it have.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from .._check import check_values
from .._files import read_yaml, yaml_text
from .._imports import uncollected
from .._text import shown
from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import flat, within
from ..report.tables import write_text
from .names import EXTRA, TRUST, choices, config_folders, nearest, unknown
from .received import HYDRA, check_file

if TYPE_CHECKING:
    from ..trainer import Trainer

Config = dict[str, Any]
GROUPS = ("algorithm", "data", "model", "schedule", "privacy", "finetune", "logger")
VERSION = "1.3"  # of Hydra, as whose behaviour a later one takes
_USERS_DATA = ("data=table", "data=images", "data=leaf")
_OF_THE_COMMAND = ("answers", "logger")  # settings of a run that are no argument of a trainer
_FOLDERS = {"hydra.run.dir", "hydra.sweep.dir"}
# arguments that are no settings of their class
_OF_PROGRAMS = ("folder", "callbacks", "transform", "model")
_PATHS = (
    *("data.root", "data.path", "data.images", "data.cache", "data.counts"),
    *("graph.root", "graph.path", "algorithm.clusters", "latency.source"),
)


class Defaults(FileConfigSource):
    """Configuration files in a folder, with the defaults of what they name."""

    @staticmethod
    def scheme() -> str:
        return "fedmtl"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        check_file(Path(self.path), self._normalize_file_name(config_path), result)
        folder = Path(config_path).parent.as_posix().replace("/", ".").strip(".")
        assert isinstance(result.config, DictConfig)
        add_defaults(result.config, "" if result.header.get("package") else folder)
        return result


class Folders(SearchPathPlugin):
    """Makes Hydra search the user's folder, then the package's."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in config_folders():
            search_path.append("fedmtl", f"{Defaults.scheme()}://{folder.resolve()}")


def register() -> None:
    """Register both with Hydra."""
    Plugins.instance().register(Defaults)
    Plugins.instance().register(Folders)


def load(group: str, option: str) -> DictConfig:
    """Return the settings of one option of a group as its file has them, with the defaults."""
    for folder in config_folders():
        if (folder / group / f"{option}.yaml").is_file():
            source = Defaults("fedmtl", f"{Defaults.scheme()}://{folder}")
            config: Any = source.load_config(f"{group}/{option}.yaml").config
            return config.get(group) or config  # type: ignore[no-any-return]
    return OmegaConf.create()


def add_defaults(node: DictConfig, place: str) -> None:
    """Add the arguments that a mapping does not list, in place; those of the mappings in it, too.

    An argument without a default is ``???``, Hydra's mark of a value that is required, and the seed
    of a part is that of the run.

    Args:
        node: it describes an object if it has a ``_target_``.
        place: its dotted key.

    Raises:
        ConfigError: a ``_target_`` that a file may not name.
    """
    for name in (str(name) for name in node if name != "defaults"):
        if isinstance(node._get_node(name), DictConfig):
            add_defaults(node[name], f"{place}.{name}".lstrip("."))
    if (target := node.get("_target_")) is None:
        return
    made = named(target, place)
    chosen = _chosen(node)
    for name, parameter in inspect.signature(made).parameters.items():
        default = _default(made, parameter)
        if name not in (*node, *chosen, *_OF_PROGRAMS) and _is_plain(default):
            if isinstance(default, tuple):
                value = list(default)
            else:
                value = default
            node[name] = "${seed}" if name == "seed" and place else value
        if isinstance(node._get_node(name), DictConfig) and "Mapping" in str(parameter.annotation):
            OmegaConf.set_struct(node[name], False)  # the keys are free


def _chosen(node: DictConfig) -> list[str]:
    """Return the keys of a file that its list of ``defaults`` fills, such as ``local`` for
    ``solver@local: sgd``."""
    entries = (entry for entry in node.get("defaults") or () if isinstance(entry, DictConfig))
    return [re.split("[@/.]", str(key))[-1] for entry in entries for key in entry]


def _default(made: Any, parameter: inspect.Parameter) -> Any:
    """Return the default of a parameter; of one that is required, ``???``."""
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return parameter
    field = getattr(made, "__dataclass_fields__", {}).get(parameter.name)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if parameter.default is parameter.empty:
        return "???"
    return parameter.default


def _is_plain(value: Any) -> bool:
    """Returns True if a configuration file can hold the value."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or value == {} or isinstance(value, (bool, int, float, str))


def named(target: str, place: str) -> Any:
    """Return the class or function that a configuration names at ``place``; the trainer at its
    root.

    Raises:
        ConfigError: one that a file may not name, or that cannot be imported.
    """
    # else the process is another's, or began before
    with uncollected(frozen="torch" not in sys.modules):
        from ..trainer import Trainer
        from ..trainer.targets import resolved_target
    if not place:
        return Trainer
    try:
        return resolved_target(target, TRUST.get(), logger=place == "logger")
    except ConfigError as error:
        raise ConfigError(f"{place}._target_ is {error}") from error


def with_automatic(words: Sequence[str]) -> list[str]:
    """Return the words of a command, in which data of the user take the automatic settings unless
    an algorithm, an experiment or a setting of the schedule is chosen."""
    places = [place for place, word in enumerate(words) if word in _USERS_DATA]
    if not places or any(
        word.startswith(("algorithm", "experiment=", "schedule.")) for word in words
    ):
        return list(words)
    # settings stand between the options
    return [*words[: places[0]], "algorithm=auto", *words[places[0] :]]


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep, in Hydra's order.

    Raises:
        ConfigError: an override that cannot be read, or an interval, which has no list of values.
    """
    register()
    parse(overrides)
    with refusals(overrides), hydra.initialize(None, version_base=VERSION):
        # which finds the options of a glob(*)
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        (runs,) = BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)
    return [list(run) for run in runs]


def differing(run: Sequence[str], typed: Sequence[str]) -> str:
    """Return those overrides of a run of a sweep that were not typed with a single value."""
    # the last counts
    keys = {override.get_key_element(): override.is_sweep_override() for override in parse(typed)}
    return " ".join(text for text in run if keys.get(text.partition("=")[0], True))


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra reads them.

    Raises:
        ConfigError: one that it cannot read, or another folder of files than that of
            ``--config-dir``.
    """
    with refusals(overrides):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for override in parsed:
        if override.get_key_element().lstrip("+~") == "hydra.searchpath":
            raise ConfigError(
                f"{override.input_line} is not taken; --config-dir DIR is the folder "
                "with own groups."
            )
    return parsed


def compose(overrides: Sequence[str], name: str = "config") -> DictConfig:
    """Return the composed configuration of one run, its interpolations unresolved.

    Args:
        overrides: as typed.
        name: of the primary configuration file.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    register()
    parse(overrides)
    with refusals(overrides), hydra.initialize(None, version_base=VERSION):
        return without_leftovers(hydra.compose(name, overrides=list(overrides)), overrides)


def sweeps(overrides: Sequence[str], name: str) -> bool:
    """Returns True if a file or an override chooses Hydra's mode of a sweep, ``hydra.mode:
    MULTIRUN``, as ``-m`` does.

    Args:
        overrides: as typed.
        name: of the primary configuration file.
    """
    register()
    keys = [override.key_or_group for override in parse(overrides)]
    of_hydra = {key for key in keys if re.split("[./]", key)[0] == HYDRA} - _FOLDERS
    if EXTRA.get() is None and not of_hydra:
        return False  # no file of the package chooses a mode, and to compose them takes time
    with hydra.initialize(None, version_base=VERSION):
        app = GlobalHydra.instance().hydra
        return app is not None and app.get_mode(name, list(overrides)) == RunMode.MULTIRUN


def chosen_folder(overrides: Sequence[str], name: str, key: str) -> Path | None:
    """Return the folder that the user has chosen for a run or a sweep; None for a new one.

    Args:
        overrides: as typed.
        name: of the primary configuration file.
        key: ``hydra.run.dir`` or ``hydra.sweep.dir``.

    Raises:
        ConfigError: Hydra cannot compose the configuration.
    """
    kept = [override for override in parse(overrides) if not override.is_sweep_override()]
    typed = [override.value() for override in kept if override.key_or_group == key]
    if typed:
        return Path(str(typed[-1]))
    if HYDRA not in TRUST.get():  # else a file may choose it
        return None
    return _folder_of_file([str(override.input_line) for override in kept], name, key)


def _folder_of_file(overrides: Sequence[str], name: str, key: str) -> Path | None:
    """Return the folder that a trusted file chooses for a run or a sweep; None where it is that of
    Hydra."""
    register()
    with refusals(overrides), hydra.initialize(None, version_base=VERSION):
        composed = hydra.compose(name, list(overrides), return_hydra_config=True)
        usual = hydra.compose(overrides=[], return_hydra_config=True)
    places = [OmegaConf.to_container(config.hydra, resolve=False) for config in (composed, usual)]
    _, group, _ = key.split(".")
    chosen, default = (str(place[group]["dir"]) for place in places)  # type: ignore[index,call-overload]
    if chosen == default:
        return None
    return Path(chosen)


def printed(config: DictConfig, place: str | None, *, resolve: bool) -> str:
    """Returns the output of ``--cfg job``. Hydra's own would have the leftovers of options that
    are replaced.

    Args:
        config: composed.
        place: the dotted key of the only part to be printed, of ``--package``.
        resolve: whether values take the place of the references to them.

    Raises:
        ConfigError: nothing is at ``place``, or a reference leads nowhere.
    """
    with refusals(()):
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


@contextmanager
def refusals(overrides: Sequence[str]) -> Iterator[None]:
    """Turn what Hydra raises in this block into an error that names the option or the key, with the
    nearest names.

    Args:
        overrides: as typed.

    Raises:
        ConfigError: what Hydra refused.
    """
    try:
        yield
    except FedmtlError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise _refused(error, overrides) from error


def _refused(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Return the error of a word that cannot be read, of an option or a key that does not exist, or
    what Hydra says of anything else."""
    if isinstance(error, OverrideParseException):
        text = f"cannot read {error.override!r}; settings are written KEY=VALUE, such as rounds=200"
        return ConfigError(f"{text} ({first_line(error)}).")
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        text = f"{group} has no option {option!r}"
        file = Path(group, f"{option}.yaml")
        if file.is_file():
            return ConfigError(f"{text}; {file} is found with --config-dir .")
        close = difflib.get_close_matches(option, error.options, n=1, cutoff=0.5)
        return unknown(error.options, close, text, "fedmtl --help")
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(
        cause.parent_node, DictConfig
    ):
        missing = str(cause.full_key)
        node = cause.parent_node
        key = next(
            (
                key
                for key in (one.key_or_group for one in parse(overrides))
                if within(key, [missing])
            ),
            missing,
        )
        settings: Any = OmegaConf.to_container(node._get_root(), resolve=False)
        del settings["hydra"]
        near = _with_option(missing) or nearest(key, list(_leaves(settings)))
        return _no_setting(key, [str(name) for name in node if name != "hydra"], near)
    words = [shlex.join(overrides), " ".join(str(error).split()).rstrip(".")]
    return ConfigError(f"{': '.join(filter(None, words))}.")


def _no_setting(
    key: str, accepted: Sequence[str], near: Sequence[str], of: str = ""
) -> ConfigError:
    """Return the error of a setting that does not exist, ``of`` a class."""
    names = [name for name in accepted if name != "_target_"]
    return unknown(names, near, f"{key} is no setting{of}", "fedmtl --cfg job")


def _with_option(key: str) -> list[str]:
    """Return up to three choices of another option of a group, each of which has the setting
    ``key``."""
    group, _, name = key.rpartition(".")
    having = [option for option in choices().get(group, {}) if name in list(load(group, option))]
    return [f"{group}={option} {key}" for option in having[:3]]


def _leaves(settings: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return all settings by their dotted keys, mappings among them."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        if name != "_target_":
            leaves[f"{place}{name}"] = value
        if isinstance(value, Mapping):
            leaves.update(_leaves(value, f"{place}{name}."))
    return leaves


def without_leftovers(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a composed configuration without settings for an option that the command line has
    replaced.

    An experiment sets ``algorithm.lam`` for the algorithm that it chooses;
    ``experiment=NAME algorithm=fedavg`` chooses another one. What that one has no argument for
    goes, and so does a value for what it describes as an object.

    Args:
        config: composed, changed in place.
        overrides: of the command line, the settings in which stay as they are.
    """
    typed = {override.key_or_group: override.value() for override in parse(overrides)}
    keys = [re.split("[./]", key) for key in typed]
    for group in (group for group in GROUPS if isinstance(config.get(group), DictConfig)):
        node = config[group]
        target = config[group].get("_target_")
        if target is not None and not {group, "algorithm"} & typed.keys():
            continue
        own = load(group, str(typed.get(group)))
        accepted: Collection[str] = ()
        if target is not None:
            accepted = inspect.signature(named(target, group)).parameters
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
    """Return plain values: nothing missing, every reference resolved, and None for an early stop,
    an audit or adapters that are off.

    Raises:
        ConfigError: a required value is missing, or a reference leads nowhere.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    for missing in sorted(key for key, value in _leaves(plain).items() if value == "???"):
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


def settings(config: Config) -> Config:
    """Return the objects of a resolved configuration that need no data; everything that can be
    checked is checked.

    Returns:
        Arguments for :class:`fedmtl.Trainer`, without ``data`` and ``folder``.

    Raises:
        ConfigError: an impossible value.
    """
    from .. import models
    from ..trainer import Trainer
    from ..trainer.problem import resolve_device
    from ..trainer.setting_checks import check_settings

    objects = {name: value for name, value in config.items() if name not in _OF_THE_COMMAND}
    _check_arguments(Trainer, objects, "")
    model = dict(config["model"])
    fix = model.pop("fix", False)
    lora = model.pop("lora", None)
    objects = {
        name: made(value, name)
        for name, value in (objects | {"model": model}).items()
        if name != "data"
    }
    if not isinstance(fix, bool):
        raise ConfigError(f"model.fix is {fix!r}; accepted: true or false.")
    if fix:
        objects["model"] = models.fix(objects["model"])
    if lora is not None:
        if not isinstance(lora, dict):
            raise ConfigError(
                f"model.lora is {lora!r}; give a mapping of its settings, such as "
                "model.lora.rank=VALUE."
            )
        objects["model"] = made(lora | {"model": objects["model"]}, "model.lora")
    objects |= {name: objects[name] or () for name in ("baselines", "metrics")}
    for name in (
        ("algorithm", "schedule", "model", "rounds") if objects["algorithm"] is None else ()
    ):
        objects[name] = "auto" if objects[name] is None else objects[name]
    with _by_key({"Trainer": ""}):
        check_values(Trainer, objects)
        check_settings(SimpleNamespace(**objects, callbacks=(), folder=None))
    resolve_device(config["device"])
    return objects


def made(node: Any, place: str) -> Any:
    """Return the object of a mapping with ``_target_``, its parts made before it; other values as
    they are.

    Args:
        node: resolved; a mapping whose ``_target_`` is null describes None, and so does a group
            without settings.
        place: its dotted key.

    Raises:
        ConfigError: a ``_target_`` that is neither of this package nor of a module in
            :data:`~fedmtl.cli.names.TRUST`, or one that does not take its settings.
    """
    if isinstance(node, list):
        return [made(value, place) for value in node]
    if not isinstance(node, Mapping):
        return node
    if node.get("_target_", "" if place not in GROUPS else None) is None:
        for name in node.keys() - {"_target_"}:
            raise ConfigError(
                f"{place}.{name} means nothing here: {place} is none; choose another "
                f"{place}=OPTION."
            )
        return None
    parts = {
        str(name): made(value, f"{place}.{name}")
        for name, value in node.items()
        if name != "_target_"
    }
    if "_target_" not in node:
        return parts
    target = named(str(node["_target_"]), place)
    _check_arguments(target, parts, place)
    with _by_key({target.__name__: place}, place):
        if isinstance(target, type) and dataclasses.is_dataclass(target):
            # before checks of its own, which may compare a text with a number
            check_values(target, parts)
        return target(**parts)


def _check_arguments(made: Any, values: Config, place: str) -> None:
    """Refuse an argument that a class or function does not have.

    Args:
        made: the class or function.
        values: of the arguments by name.
        place: the dotted key of what it makes; empty for the trainer.

    Raises:
        ConfigError: the setting by its key, with the nearest ones.
    """
    parameters = inspect.signature(made).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in (name for name in values if name not in parameters and not free):
        key, *near = (
            f"{place}.{key}".lstrip(".") for key in (name, *nearest(name, list(parameters)))
        )
        raise _no_setting(key, list(parameters), near, f" of {made.__name__}")


@contextmanager
def _by_key(places: Mapping[str, str], place: str = "") -> Iterator[None]:
    """Let errors in this block name settings by their keys: ``privacy.epsilon`` for
    ``ClientPrivacy.epsilon``.

    Args:
        places: the dotted key of what is made, by its class or function.
        place: that of the only one, by which errors that name no setting are found.

    Raises:
        FedmtlError: as it was raised; ConfigError for any other error of ``place``.
    """
    try:
        yield
    except FedmtlError as error:
        name, _, rest = str(error).partition(".")
        if name not in places and not place:
            raise
        if name in places:
            text = f"{places[name]}.{rest}"
        else:
            text = f"{place}: {error}"
        raise type(error)(text.lstrip(".")) from error
    except Exception as error:
        if not place:
            raise
        raise ConfigError(f"{place}: {first_line(error)}.") from error


def by_key(objects: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let errors in a block name the settings of these arguments of a trainer by their keys."""
    return _by_key(
        {type(value).__name__: name for name, value in objects.items()} | {"Trainer": ""}
    )


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
    callbacks = []
    if callback is not None:
        callbacks.append(callback)
    with by_key(objects):
        return Trainer(data=data, folder=folder, callbacks=callbacks, **objects)


def write_config(folder: Path, words: Sequence[str], config: Config) -> None:
    """Write the configuration that a resume reads, under the command that it came from, with paths
    that lead to the same files from everywhere."""
    text = yaml_text(with_absolute_paths(config))
    write_text(
        folder / "private" / "config.yaml", f"# {shown(shlex.join(['fedmtl', *words]))}\n{text}"
    )


def with_absolute_paths(node: Any, place: str = "") -> Any:
    """Return a resolved configuration in which the paths of data, clusters, graphs and latencies
    are absolute."""
    if isinstance(node, dict):
        return {name: with_absolute_paths(value, f"{place}.{name}") for name, value in node.items()}
    if place.endswith(_PATHS) and isinstance(node, str):
        return os.path.abspath(node)
    return node


def stored_config(folder: Path) -> Config:
    """Return the settings that the command has stored in the folder of a run.

    Raises:
        ConfigError: there are none, or only a part of them.
    """
    stored = folder / "private" / "config.yaml"
    if not stored.is_file():
        raise ConfigError(f"{folder} holds no run of this command: {stored} is missing.")
    config = read_yaml(stored)
    if not isinstance(config, dict) or not config.keys() & {"algorithm", "search"}:
        raise ConfigError(
            f"{stored} has no 'algorithm', and was cut off or changed; restore it, "
            "or start a new run."
        )
    return {str(key): value for key, value in config.items()}


def with_logger(config: Config, folder: Path, overrides: Sequence[str]) -> Config:
    """Return the stored settings of a run with its logger, which writes into the folder of the run
    or where these overrides say: a file does not say where else numbers of private data go.

    Args:
        config: as ``private/config.yaml`` has it.
        folder: of the run.
        overrides: settings of the logger that the user gives anew.

    Raises:
        ConfigError: another setting, or a stored place outside of the run that is not given anew.
    """
    config = changed(config, overrides, ("logger",))
    typed = {text.partition("=")[0] for text in overrides}
    for key, value in () if "logger" in typed else _places_elsewhere(config, folder, typed):
        raise ConfigError(
            f"logger.{key} of {folder / 'private' / 'config.yaml'} is {value!r}, which is not in "
            "the folder of the run, and a file does not say where else a run writes. If you chose "
            f"it, give it again: fedmtl resume {folder} logger.{key}=VALUE; logger=none resumes "
            "without."
        )
    return config


def check_logger(config: Config, folder: Path, overrides: Sequence[str]) -> None:
    """Refuse a logger that writes or sends elsewhere than into the folder of the run, unless the
    user has typed where: a file does not say where numbers of private data go.

    Args:
        config: resolved.
        folder: of the run.
        overrides: as typed.

    Raises:
        ConfigError: the place, by its key.
    """
    typed = {override.get_key_element().lstrip("+~") for override in parse(overrides)}
    for key, value in _places_elsewhere(config, folder, typed):
        raise ConfigError(
            f"logger.{key} is {value!r} in a file, which is not in the folder of the run, and a "
            "file does not say where else a run writes. If you choose it, give it on the command "
            f"line: logger.{key}=VALUE."
        )


def _places_elsewhere(
    config: Config, folder: Path, typed: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a logger, with their values, that lead out of the folder of a run and
    are not ``typed``."""
    logger = config.get("logger") or {}
    root = folder.resolve()
    for key in ("folder", "tracking_uri"):
        value = logger.get(key)
        inside = (
            key == "folder"
            and isinstance(value, str)
            and (root / value).resolve().is_relative_to(root)
        )
        if not (value is None or inside or f"logger.{key}" in typed):
            yield key, value


def changed(config: Config, overrides: Sequence[str], places: Sequence[str]) -> Config:
    """Return stored settings with some changed: a group by another option, or one of its settings.

    Args:
        config: as stored.
        overrides: as typed.
        places: the groups and settings that may change.

    Raises:
        ConfigError: an override of something else.
    """
    for text in overrides:
        if not any(of_place([text], place) for place in places):
            kept = ", ".join(f"{place}=... and {place}.KEY=..." for place in places)
            raise ConfigError(
                f"{text} is not taken here: settings stay as they are stored, except {kept}."
            )
    own = {place: of_place(overrides, place) for place in places}
    chosen = {
        place: texts
        for place, texts in own.items()
        if any(text.startswith(f"{place}=") for text in texts)
    }
    new = {place: resolve(compose(texts))[place] for place, texts in chosen.items()}
    values = copy.deepcopy(config | new)
    for override in parse(overrides):
        if override.key_or_group.partition(".")[0] not in chosen:
            _set(values, override.key_or_group, override.value())
    return values


def _set(values: Config, key: str, value: Any) -> None:
    """Set a value of nested mappings, in place, by its dotted key."""
    *places, name = key.split(".")
    for place in places:
        if not isinstance(values.get(place), dict):
            values[place] = {}
        values = values[place]
    values[name] = value


def of_place(overrides: Sequence[str], place: str) -> list[str]:
    """Return the overrides of a group or of a setting."""
    return [text for text in overrides if text.split("=")[0].split(".")[0].lstrip("+") == place]
