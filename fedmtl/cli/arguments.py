"""The settings of a configuration: the arguments of the class or function that it names by
``_target_``.

Those of this package stand in the file ``arguments.json`` beside this module, so that a command
that prints or refuses settings imports no PyTorch. ``python scripts/arguments.py`` writes it from
the signatures, and a test compares the two."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .build import named

REQUIRED = "???"
"""Hydra's mark of a value that is required."""
FILE = Path(__file__).with_name("arguments.json")
TRAINER = "fedmtl.Trainer"
"""The target at the root of a configuration, which no file chooses."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a class or function.

    Attributes:
        defaults: by name, in the order of the signature, of those with a default that a file can
            hold; :data:`REQUIRED` of those without a default.
        others: names of the others, such as a transform, whose default is an object.
        mappings: names of those that are mappings, whose keys are free.
    """

    defaults: dict[str, Any]
    others: list[str]
    mappings: list[str]

    @property
    def names(self) -> set[str]:
        """Returns the names of all."""
        return {*self.defaults, *self.others}


def arguments_of(target: str, place: str) -> Arguments:
    """Returns the arguments of the class or function that a configuration names at ``place``; the
    trainer's at its root.

    Raises:
        ConfigError: a name that a file may not have, or that cannot be imported.
    """
    if not place:
        target = TRAINER
    listed = _listed().get(str(target))
    if listed is not None:
        return listed
    return signed(named(target, place))


@cache
def _listed() -> dict[str, Arguments]:
    """Returns the arguments that are listed in the file, by target."""
    targets = json.loads(FILE.read_text(encoding="utf-8"))
    return {target: Arguments(**fields) for target, fields in targets.items()}


def signed(made: Callable[..., Any]) -> Arguments:
    """Returns the arguments of a class or function, by its signature."""
    defaults = {}
    others = []
    mappings = []
    for name, parameter in inspect.signature(made).parameters.items():
        default = _default(made, parameter)
        if _is_plain(default):
            defaults[name] = _listable(default)
        else:
            others.append(name)
        if "Mapping" in str(parameter.annotation):
            mappings.append(name)
    return Arguments(defaults, others, mappings)


def _default(made: Any, parameter: inspect.Parameter) -> Any:
    """Returns the default of a parameter, :data:`REQUIRED` of one that has none."""
    # the parameter itself is no plain value, so that no key is made of it
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return parameter
    field = getattr(made, "__dataclass_fields__", {}).get(parameter.name)
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if parameter.default is parameter.empty:
        return REQUIRED
    return parameter.default


def _is_plain(value: Any) -> bool:
    """Returns True if a configuration file can hold the value."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or value == {} or isinstance(value, (bool, int, float, str))


def _listable(value: Any) -> Any:
    """Returns a plain value as a file has it: a list in place of a tuple."""
    if isinstance(value, tuple):
        return list(value)
    return value
