"""Configuration files of others: the settings of Hydra itself that a file may have, and the
settings that it may refer to.

Hydra opens log files, sends log records, sets environment variables, moves folders and imports
modules as its own settings say, and resolvers read the environment. A file of the user's folder
does none of this, as it names no class that is not trusted: it may have come from someone else. The
user may, by typing it, and ``--trust hydra`` lets files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse

from .._yaml import YAMLError, check_yaml
from ..errors import ConfigError
from .names import TRUST, config_folder

HYDRA = "hydra"
_QUIET = ("none", "disabled", None)  # kinds of logging that log nothing
_VALUES = {"mode": ("RUN", "MULTIRUN"), "output_subdir": (None,)}
_LOGGING = ("hydra/job_logging", "hydra/hydra_logging")
_ACCEPTED = (
    "hydra.mode, hydra.sweeper.params and hydra.sweeper.max_batch_size, hydra.output_subdir=null, "
    "and none for hydra/job_logging and hydra/hydra_logging"
)
_NAMED = re.compile(rf"(?:^|[^\w-]){HYDRA}(?:$|[^\w-])")  # hydra as a word of a key
# of OmegaConf, that read settings only
_RESOLVERS = ("oc.select", "oc.dict.keys", "oc.dict.values", "oc.deprecated")


def check_size(file: Path) -> None:
    """Refuses a file that is more than settings: of too many values or levels, references to
    anchors written out.

    Raises:
        ConfigError: the file and the reason.
    """
    try:
        check_yaml(file.read_text(encoding="utf-8"))
    except (OSError, YAMLError):  # Hydra says where it is missing or wrong
        return
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error


def check_file(root: Path, name: str, result: ConfigResult) -> None:
    """Refuses a file that has settings of Hydra itself, or refers to something other than a
    setting.

    Args:
        root: the folder of the groups.
        name: of the file there.
        result: its content and its package, as Hydra reads them.

    Raises:
        ConfigError: such a file; the message has the file, the key and the accepted values.
    """
    file = root / name
    ours = file.resolve().is_relative_to(config_folder().resolve())
    if ours or HYDRA in TRUST.get():
        return
    config = result.config
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file} is a list; a configuration file is a mapping of settings.")
    package = result.header.get("package")
    if HYDRA in (package or "").split("."):
        raise _refused(file, f"the package {package}")
    group = Path(name).parent
    if HYDRA in group.parts:
        raise _refused(file, f"an option of {group}")
    values: Any = OmegaConf.to_container(config, resolve=False)
    for key in _keys_of_hydra(values):
        raise _refused(file, key)
    for text in _texts(values):
        for name in resolvers(text):
            raise ConfigError(
                f"{file} has {text!r}, and a file refers to settings only, such as ${{seed}}, not "
                f"by the resolver {name}; give the value on the command line, or, if you trust the "
                f"file, add --trust {HYDRA}."
            )


def resolvers(text: str) -> Iterator[str]:
    """Yields the resolvers of a text that read something else than settings, and names that are
    made of others."""
    if "${" not in text:
        return
    try:
        nodes = [parse(text)]
    except GrammarParseError:  # OmegaConf refuses it, too
        return
    while nodes:
        node = nodes.pop()
        nodes += [
            child
            for child in getattr(node, "children", None) or ()
            if hasattr(child, "getRuleIndex")
        ]
        if isinstance(node, OmegaConfGrammarParser.InterpolationResolverContext):
            name = node.resolverName().getText()
            if "$" in name or (name.startswith("oc.") and name not in _RESOLVERS):
                yield name


def _keys_of_hydra(values: dict[str, Any]) -> Iterator[str]:
    """Yields the keys of Hydra itself that a file sets to values that are not accepted."""
    for item in values.get("defaults") or ():
        yield from _choices_of_hydra(item)
    if HYDRA not in values:
        return
    own = values[HYDRA]
    if not isinstance(own, dict):
        yield HYDRA
        return
    for name, value in own.items():
        if name == "sweeper" and isinstance(value, dict):
            yield from _keys_of_sweeper(value)
        elif name not in _VALUES or value not in _VALUES[name]:
            yield f"{HYDRA}.{name}"


def _choices_of_hydra(item: Any) -> Iterator[str]:
    """Yields the choices of Hydra's own groups in an item of a list of defaults, which is a name or
    a mapping from a group to an option."""
    choices: list[tuple[Any, Any]] = [(item, "")]
    if isinstance(item, dict):
        choices = list(item.items())
    for key, option in choices:
        group = str(key).split(" ")[-1].lstrip("/")
        # to print less is no danger, so a file may choose it
        if _NAMED.search(str(key)) and not (group in _LOGGING and option in _QUIET):
            yield f"{key}: {option}".removesuffix(": ")
        # an option can be given by a reference into Hydra's settings, too
        if isinstance(item, dict) and _NAMED.search(str(option)):
            yield f"{key}: {option}"


def _keys_of_sweeper(values: dict[str, Any]) -> Iterator[str]:
    """Yields the keys of the sweeper that a file sets, but for ``max_batch_size`` and the listed
    values of settings in ``params``, which Hydra reads as if they were typed."""
    for name, value in values.items():
        place = f"{HYDRA}.sweeper.{name}"
        if name == "params" and isinstance(value, dict):
            for key, listed in value.items():
                if _NAMED.search(str(key)) or "=" in str(key) or "${" in f"{key}{listed}":
                    yield f"{place}.{key}"
        elif not (name == "max_batch_size" and (value is None or isinstance(value, int))):
            yield place


def _texts(node: Any) -> Iterator[str]:
    """Yields all texts of a configuration; keys are never references."""
    if isinstance(node, dict):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node


def _refused(file: Path, key: str) -> ConfigError:
    return ConfigError(
        f"{file} sets {key}, which is Hydra's own, and a file sets of that only {_ACCEPTED}; give "
        f"it on the command line, or, if you trust the file, add --trust {HYDRA}."
    )
