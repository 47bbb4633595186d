"""Errors for the inputs that Hydra refuses, by the option or the key, with the nearest names."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import within
from .defaults import load
from .names import choices

if TYPE_CHECKING:
    from .words import Typed

_BOUNDS = "data.bounds"


_SEVERAL = re.compile(r"Ambiguous value for argument '([^=']+)=(.*?)'\s")  # of Hydra's message
_OF_A_COLUMN = ("data.client", "data.time")
_LISTS = (
    "data.features", "data.labels", "data.one_hot", "data.missing", "baselines", "metrics"
)  # fmt: skip
_MANY = 12  # names in a message
GUESSED = {  # the names of settings in other programs
    "lr": "algorithm.local.lr",
    "eps": "privacy.epsilon",
    "label": "data.target",
    "fraction": "schedule.cohort",
    "optimizer": "algorithm.local",
}
SHORT = GUESSED | {"epsilon": "privacy.epsilon", "delta": "privacy.delta"}
"""The same for an option with dashes."""


@contextmanager
def refusals(typed: Typed | None = None) -> Iterator[None]:
    """Turns an error of Hydra in this block into one that names the option or the key, with the
    nearest names.

    Args:
        typed: the settings that Hydra composes; None if it composes none.

    Raises:
        ConfigError: Hydra has refused the settings.
    """
    try:
        yield
    except FedmtlError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise _refused(error, typed) from error


def _refused(error: Exception, typed: Typed | None) -> ConfigError:
    """Returns the error of a word that cannot be read, of an option or a key that does not exist,
    or Hydra's own message for anything else."""
    if isinstance(error, OverrideParseException):
        text = f"cannot read {error.override!r}; settings are written KEY=VALUE, such as rounds=200"
        return ConfigError(f"{text} ({first_line(error)}).")
    if several := _SEVERAL.search(str(error)):
        return _of_several(*several.groups())
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
        key = missing
        for name in () if typed is None else typed.values:
            if within(name, [missing]):
                key = name
                break
        if key.startswith(f"{_BOUNDS}.") and not len(node):
            column = key.removeprefix(f"{_BOUNDS}.")
            return ConfigError(
                f"{key} is no setting, as no bounds are declared yet; accepted: those of all "
                f"columns, '{_BOUNDS}={{{column}: [LOW, HIGH]}}', of which fedmtl check writes a "
                f"draft, or one column more, +{key}=[LOW,HIGH]."
            )
        settings: Any = OmegaConf.to_container(node._get_root(), resolve=False)
        del settings["hydra"]
        near = _with_option(missing) or nearest(key, list(dotted(settings)))
        return no_setting(key, [str(name) for name in node if name != "hydra"], near)
    words = [" ".join(str(error).split()).rstrip(".")]
    if typed is not None:
        words.insert(0, shlex.join(typed.words))
    return ConfigError(f"{': '.join(filter(None, words))}.")


def _of_several(key: str, text: str) -> ConfigError:
    """Returns the error of a setting with several values, as of a sweep, in a command for one
    run."""
    first = text.partition(",")[0].strip()
    sweep = "-m (--multirun) for a run with each"
    if key in _OF_A_COLUMN:
        accepted = f"one column, as {key}={first}; two have to be joined to one in the table first"
    elif key in _LISTS:
        accepted = f"a list, as '{key}=[{text}]', or {sweep}"
    else:
        accepted = f"one value, as {key}={first}, or {sweep}"
    return ConfigError(f"{key}={text} has several values; accepted: {accepted}.")


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


def unknown(accepted: Collection[str], near: Sequence[str], text: str, printed: str) -> ConfigError:
    """Returns the error of a name that does not exist, with the nearest names, and the accepted
    ones or the command that prints them.

    Args:
        accepted: the names in its place.
        near: those that may be meant.
        text: the fault.
        printed: the command that prints all, if they are many.
    """
    hint = ""
    if near:
        hint = f"did you mean {' or '.join(near)}? "
    every = ", ".join(accepted) or "nothing"
    if near and len(accepted) > _MANY:
        rest = f"{printed} prints all"
    else:
        rest = f"accepted: {every}"
    return ConfigError(f"{text}; {hint}{rest}.")


def nearest(key: str, accepted: Sequence[str]) -> list[str]:
    """Returns up to three accepted keys that ``key`` may have meant: the same last word anywhere,
    then a similar one in its place; of a key without a place else one anywhere."""
    place, _, name = key.rpartition(".")
    last_words = {
        other: other.rpartition(".")[2] for other in accepted if not key.startswith(f"{other}.")
    }
    if name in GUESSED:
        meant = GUESSED[name]
        choose = {"algorithm": "algorithm=fedavg ", "schedule": "schedule=poisson "}.get(
            meant.split(".")[0], ""
        )
        # automatic settings lack both
        if meant in accepted:
            return [meant]
        return [f"{choose}{meant}"] * bool(choose)
    beside = [word for other, word in last_words.items() if other == f"{place}.{word}".lstrip(".")]
    near = [other for other, word in last_words.items() if word == name]
    near += [f"{place}.{word}".lstrip(".") for word in difflib.get_close_matches(name, beside)]
    if not near and not place:
        close = difflib.get_close_matches(name, last_words.values(), n=1)
        near = [other for other, word in last_words.items() if word in close]
    return list(dict.fromkeys(near))[:3]
