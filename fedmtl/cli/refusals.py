"""Errors for the inputs that Hydra refuses, by the option or the key, with the nearest names."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from .._extras import vision_models
from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import within
from .defaults import load
from .names import choices, nearest, no_setting, unknown

_BOUNDS = "data.bounds"
_SEVERAL = re.compile(r"Ambiguous value for argument '([^=']+)=(.*?)'\s")  # of Hydra's message
_OF_A_COLUMN = ("data.client", "data.time")
_SWITCHES = {  # words in the place of an option of a group, and the meaning
    "finetune=true": "finetune=auto trains every client's own model further; finetune=none does "
    "not",
    "finetune=false": "finetune=none trains no client's model further",
    "privacy=true": "privacy=client protects whole clients, privacy=record single records",
    "privacy=false": "privacy=none trains without noise",
}
_IN_QUOTES = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_PLAIN = r"[^\s,:()\[\]{}'\"]"  # of a text without quotes
_STRANGE = re.compile(rf"{_PLAIN}*[^\w\s/\\+.$%*@?|:=~,()\[\]{{}}'\"-]{_PLAIN}*", re.ASCII)
_LISTS = (
    "data.features", "data.labels", "data.one_hot", "data.missing", "baselines", "metrics"
)  # fmt: skip


@contextmanager
def refusals(words: Sequence[str] = ()) -> Iterator[None]:
    """Turns an error of Hydra in this block into one that names the option or the key, with the
    nearest names.

    Args:
        words: the settings that Hydra composes, as typed; none if it composes none.

    Raises:
        ConfigError: Hydra has refused the settings.
    """
    try:
        yield
    except FedmtlError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise _refused(error, words) from error


def _refused(error: Exception, words: Sequence[str]) -> ConfigError:
    """Returns the error of a word that cannot be read, of an option or a key that does not exist,
    or Hydra's own message for anything else."""
    for word in words:
        if word.lower() in _SWITCHES:
            return ConfigError(f"{word} is no choice: {_SWITCHES[word.lower()]}.")
    if isinstance(error, OverrideParseException):
        return _of_grammar(error)
    if several := _SEVERAL.search(str(error)):
        return _of_several(*several.groups())
    if isinstance(error, MissingConfigException) and error.options:
        return _of_option(str(error.missing_cfg_file), error.options)
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(
        cause.parent_node, DictConfig
    ):
        missing = str(cause.full_key)
        node = cause.parent_node
        key = missing
        for name in (word.lstrip("+~").partition("=")[0] for word in words):
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
    said = [shlex.join(words), " ".join(str(error).split()).rstrip(".")]
    return ConfigError(f"{': '.join(filter(None, said))}.")


def _of_option(name: str, options: Sequence[str]) -> ConfigError:
    """Returns the error of an option, ``GROUP/OPTION``, that is none of the ``options`` of its
    group."""
    group, _, option = name.rpartition("/")
    if group == "model" and _is_of_torchvision(option):
        return ConfigError(
            f"{option} is a network of torchvision: model=torchvision model.name={option}."
        )
    text = f"{group} has no option {option!r}"
    file = Path(group, f"{option}.yaml")
    if file.is_file():
        return ConfigError(f"{text}; {file} is found with --config-dir .")
    close = difflib.get_close_matches(option, options, n=1, cutoff=0.5)
    return unknown(options, close, text, "fedmtl --help")


def _is_of_torchvision(name: str) -> bool:
    """Returns True if a model is one of torchvision. It is imported for names alone that look
    like one."""
    if not re.fullmatch(r"[a-z]+_?[a-z]*\d+[a-z0-9_]*", name):
        return False
    return name in vision_models.list_models()


def _of_grammar(error: OverrideParseException) -> ConfigError:
    """Returns the error of a word that Hydra's grammar does not take: of a text that needs
    quotation marks, or of the form."""
    word = str(error.override)
    value = word.partition("=")[2]
    strange = _STRANGE.search(_IN_QUOTES.sub("", value))
    if strange is None:
        text = f"cannot read {word!r}; settings are written KEY=VALUE, such as rounds=200"
        return ConfigError(f"{text} ({first_line(error)}).")
    return ConfigError(
        f"cannot read {word!r}: a text such as {strange[0]} is written in quotation marks, "
        f'"{strange[0]}". The name of a column cannot be: bounds of one with such letters stand in '
        "a file, of which fedmtl check TABLE writes a draft."
    )


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
