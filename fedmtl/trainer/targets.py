"""The names that a file may use: reading a configuration or the folder of a run must not run the
code that it names.

A file may name the settings, readers, networks and loggers of this package and the modules of
:mod:`torch.nn`. Anything else must be defined in a module that the user trusts by name, on the
command line or as an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import isclass, isfunction
from typing import Any

from torch import nn

from .. import models
from ..data.loaders import LOADERS
from ..errors import ConfigError, first_line
from .callbacks import Callback

_SETTINGS = tuple(
    f"fedmtl.{name}"
    for name in (
        "algorithms",
        "contrib",
        "data",
        "graphs",
        "local",
        "privacy",
        "schedules",
        "audit.lower_bound",
        "trainer.stopping",
    )
)


def resolved_target(
    target: str, trust: Sequence[str] = (), *, logger: bool = False
) -> Callable[..., Any]:
    """Returns the class or function that a file names.

    Nothing is imported before its name is checked, and an object that another module defines is
    refused under every name: ``fedmtl.trainer.folder.Path`` is not of this package.

    Args:
        target: such as ``"fedmtl.LocalSGD"`` or ``"torch.nn.Linear"``.
        trust: names of modules of which everything may be called, with the modules in them.
        logger: True if a logger is asked for; they write files, and are in no other part of a
            configuration.

    Raises:
        ConfigError: something else, or a name that cannot be imported.
    """
    # The check comes before the import, which would run the module's code.
    module, _, name = target.rpartition(".")
    trusted = _within(module, trust)
    public = not any(part.startswith("_") for part in target.split("."))
    if not trusted and not (public and (_within(module, ("fedmtl",)) or module == "torch.nn")):
        raise _refused(target)
    try:
        value = getattr(import_module(module), name)
    except Exception as error:  # also those of a module of the user's own
        raise ConfigError(
            f"{target!r}, which cannot be imported ({first_line(error)}); it must be MODULE.NAME, "
            "with the module's folder on PYTHONPATH."
        ) from error
    if not (isclass(value) or isfunction(value)):
        raise _refused(target)
    if not (_within(value.__module__, trust) if trusted else _may_be_named(value, name, logger)):
        raise _refused(target)
    return value  # type: ignore[no-any-return]


def restored(description: Any, trust: Sequence[str] = ()) -> Any:
    """Returns settings from their description by :func:`~fedmtl.trainer.run_fingerprint.describe`.

    Dataclasses are made of their class and fields, and factories of :mod:`fedmtl.models` of their
    functions and settings.

    Args:
        description: plain values.
        trust: names of modules of which classes may be made.

    Raises:
        ConfigError: an object that its description does not give back, or a class that is neither
            of this package nor of a module in ``trust``.
    """
    if isinstance(description, Mapping):
        values = {str(name): restored(value, trust) for name, value in description.items()}
        if "class" not in values:
            return values
        name = str(values.pop("class"))
        places = (
            "fedmtl.algorithms",
            "fedmtl.contrib",
            "fedmtl.data",
            "fedmtl.local",
            "fedmtl.models",
            *trust,
        )
        # A description has the class without its module: files outlive the layout of a package.
        place = next((place for place in places if hasattr(import_module(place), name)), None)
        if place is None:
            raise ConfigError(
                f"{name!r} is no class of {', '.join(places)}; name its module: trust=[MODULE]."
            )
        kind = resolved_target(f"{place}.{name}", trust)
        try:
            return kind(**values)
        except Exception as error:
            raise ConfigError(f"{name!r} cannot be made from its description: {error}") from error
    if isinstance(description, list):
        return tuple(restored(item, trust) for item in description)
    return description


def _within(module: str, trust: Sequence[str]) -> bool:
    """Returns True if a module is one of ``trust``, or lies in a package that is."""
    return any(module == name or module.startswith(f"{name}.") for name in trust)


def _may_be_named(value: Any, name: str, logger: bool) -> bool:
    """Returns True if a class or function may be part of a configuration, by whatever name it
    was reached."""
    if isfunction(value):
        return value in LOADERS.values() or (
            name in models.__all__ and getattr(models, name) is value
        )
    if _within(value.__module__, ("torch.nn.modules", "fedmtl.models")):
        return issubclass(value, nn.Module)
    if _within(value.__module__, ("fedmtl.trainer.callbacks",)):
        return logger and issubclass(value, Callback)
    return _within(value.__module__, _SETTINGS) and dataclasses.is_dataclass(value)


def _refused(target: str) -> ConfigError:
    """Returns the refusal of a name, with the option that would allow it."""
    root = target.split(".")[0]
    hint = f" If you trust the code of {root}, say so: --trust {root}, in Python trust=[{root!r}]."
    return ConfigError(
        f"{target!r}, which a file may not name; accepted: settings, readers, networks and loggers "
        f"of fedmtl, and modules of torch.nn.{'' if root in ('fedmtl', 'torch') else hint}"
    )
