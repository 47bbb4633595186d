"""Settings as they are typed: Hydra's overrides, those of every run of a sweep, and the errors of
what it refuses, with the nearest names."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import within
from .defaults import initialized, load, register
from .names import EXTRA, TRUST, choices, nearest, unknown
from .received import HYDRA

_USERS_DATA = ("data=table", "data=images", "data=leaf")
_FOLDERS = {"hydra.run.dir", "hydra.sweep.dir"}


def with_automatic(words: Sequence[str]) -> list[str]:
    """Returns the words of a command, in which data of the user take the automatic settings unless
    an algorithm, an experiment or a setting of the schedule is chosen."""
    places = [place for place, word in enumerate(words) if word in _USERS_DATA]
    if not places or any(
        word.startswith(("algorithm", "experiment=", "schedule.")) for word in words
    ):
        return list(words)
    # settings stand between the options
    return [*words[: places[0]], "algorithm=auto", *words[places[0] :]]


def combinations(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each run of a sweep, in Hydra's order.

    Raises:
        ConfigError: an override that cannot be read, or an interval, which has no list of values.
    """
    register()
    parse(overrides)
    with refusals(overrides), initialized():
        # which finds the options of a glob(*)
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        (runs,) = BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)
    return [list(run) for run in runs]


def differing(run: Sequence[str], typed: Sequence[str]) -> str:
    """Returns those overrides of a run of a sweep that were not typed with a single value."""
    # the last counts
    keys = {override.get_key_element(): override.is_sweep_override() for override in parse(typed)}
    return " ".join(text for text in run if keys.get(text.partition("=")[0], True))


def parse(overrides: Sequence[str]) -> list[Override]:
    """Returns the overrides as Hydra reads them.

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
    with initialized():
        app = GlobalHydra.instance().hydra
        return app is not None and app.get_mode(name, list(overrides)) == RunMode.MULTIRUN


def chosen_folder(overrides: Sequence[str], name: str, key: str) -> Path | None:
    """Returns the folder that the user has chosen for a run or a sweep; None for a new one.

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
    """Returns the folder that a trusted file chooses for a run or a sweep; None where it is that of
    Hydra."""
    register()
    with refusals(overrides), initialized():
        composed = hydra.compose(name, list(overrides), return_hydra_config=True)
        usual = hydra.compose(overrides=[], return_hydra_config=True)
    places = [OmegaConf.to_container(config.hydra, resolve=False) for config in (composed, usual)]
    _, group, _ = key.split(".")
    chosen, default = (str(place[group]["dir"]) for place in places)  # type: ignore[index,call-overload]
    if chosen == default:
        return None
    return Path(chosen)


@contextmanager
def refusals(overrides: Sequence[str]) -> Iterator[None]:
    """Turns what Hydra raises in this block into an error that names the option or the key, with
    the nearest names.

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
    """Returns the error of a word that cannot be read, of an option or a key that does not exist,
    or what Hydra says of anything else."""
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
        near = _with_option(missing) or nearest(key, list(dotted(settings)))
        return no_setting(key, [str(name) for name in node if name != "hydra"], near)
    words = [shlex.join(overrides), " ".join(str(error).split()).rstrip(".")]
    return ConfigError(f"{': '.join(filter(None, words))}.")


def no_setting(key: str, accepted: Sequence[str], near: Sequence[str], of: str = "") -> ConfigError:
    """Returns the error of a setting that does not exist, ``of`` a class."""
    names = [name for name in accepted if name != "_target_"]
    return unknown(names, near, f"{key} is no setting{of}", "fedmtl --cfg job")


def _with_option(key: str) -> list[str]:
    """Returns up to three choices of another option of a group, each of which has the setting
    ``key``."""
    group, _, name = key.rpartition(".")
    having = [option for option in choices().get(group, {}) if name in list(load(group, option))]
    return [f"{group}={option} {key}" for option in having[:3]]


def dotted(settings: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Returns all settings by their dotted keys, mappings among them."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        if name != "_target_":
            leaves[f"{place}{name}"] = value
        if isinstance(value, Mapping):
            leaves.update(dotted(value, f"{place}{name}."))
    return leaves


def of_place(overrides: Sequence[str], place: str) -> list[str]:
    """Returns the overrides of a group or of a setting."""
    return [text for text in overrides if text.split("=")[0].split(".")[0].lstrip("+") == place]
