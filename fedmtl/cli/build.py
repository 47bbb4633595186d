"""The objects of a resolved configuration, as a program would make them, named by ``_target_``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._imports import uncollected
from ..errors import ConfigError, FedmtlError, first_line
from ..report._settings import flat
from .names import GROUPS, TRUST, nearest, no_setting

if TYPE_CHECKING:
    from ..trainer import Trainer
    from ..trainer.run_settings import Settings

Config = dict[str, Any]
_OF_THE_COMMAND = ("data", "logger", "per_client")  # no settings of a trainer, or made apart
_OF_A_RUN = {"Settings": "", "Trainer": ""}  # whose settings have keys without a place


def settings(config: Config) -> Settings:
    """Returns the settings of a resolved configuration, of which everything is checked that needs
    no data, such as before a sweep.

    Raises:
        ConfigError: an impossible value.
    """
    import_trainer()
    from ..trainer.run_settings import Settings

    with by_key(_OF_A_RUN):
        return Settings(**objects(config))


def objects(config: Config) -> Config:
    """Returns the arguments of :class:`fedmtl.Trainer` of a resolved configuration, apart from
    ``data``, ``folder`` and ``callbacks``.

    Raises:
        ConfigError: a setting that does not exist, or an impossible value of a part.
    """
    from .. import models
    from ..local.executor import resolve_device
    from ..trainer import Trainer

    given = {name: value for name, value in config.items() if name not in _OF_THE_COMMAND}
    _check_arguments(Trainer, given, "")
    model = dict(config["model"])
    # they are no arguments of the model: they change the model that is made
    fix = model.pop("fix", False)
    lora = model.pop("lora", None)
    # The algorithm first, as its module may bring a law of noise that privacy.mechanism names.
    nodes = {"algorithm": given["algorithm"]} | given | {"model": model}
    parts = {name: made(value, name) for name, value in nodes.items()}
    if not isinstance(fix, bool):
        raise ConfigError(f"model.fix is {fix!r}; accepted: true or false.")
    if fix:
        parts["model"] = models.fix(parts["model"])
    if lora is not None:
        if not isinstance(lora, dict):
            raise ConfigError(
                f"model.lora is {lora!r}; give a mapping of its settings, such as "
                "model.lora.rank=VALUE."
            )
        parts["model"] = made(lora | {"model": parts["model"]}, "model.lora")
    for name in ("baselines", "metrics"):
        parts[name] = parts[name] or ()
    # files have null for the settings that an automatic algorithm chooses
    if parts["algorithm"] is None:
        for name in ("algorithm", "schedule", "model", "rounds"):
            if parts[name] is None:
                parts[name] = "auto"
    elif parts["model"] is None:
        raise ConfigError(
            "model=auto is a choice of algorithm=auto alone; beside another algorithm leave the "
            "model out for the usual one of the data, or name one, as model=linear_regression."
        )
    # a device that is not there is refused before data are read, too
    resolve_device(config["device"])
    return parts


def made(node: Any, place: str) -> Any:
    """Returns the object of a mapping with ``_target_``, its parts made before it; other values as
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
    target, parts = arguments(node, place)
    with by_key({target.__name__: place}, place):
        return target(**parts)


def arguments(node: Mapping[str, Any], place: str) -> tuple[Callable[..., Any], Config]:
    """Returns the class or function of a mapping, ``dict`` without a ``_target_``, and its
    arguments, made.

    Raises:
        ConfigError: see :func:`made`.
    """
    parts = {
        str(name): made(value, f"{place}.{name}")
        for name, value in node.items()
        if name != "_target_"
    }
    if "_target_" not in node:
        return dict, parts
    target = named(str(node["_target_"]), place)
    _check_arguments(target, parts, place)
    return target, parts


def named(target: str, place: str) -> Any:
    """Returns the class or function that a configuration names at ``place``; the trainer at its
    root.

    Raises:
        ConfigError: one that a file may not name, or that cannot be imported.
    """
    import_trainer()
    from ..trainer import Trainer
    from ..trainer.targets import resolved_target

    if not place:
        return Trainer
    try:
        return resolved_target(target, TRUST.get(), logger=place == "logger")
    except ConfigError as error:
        raise ConfigError(f"{place}._target_ is {error}") from error


def _check_arguments(target: Any, values: Config, place: str) -> None:
    """Refuses an argument that a class or function does not have.

    Args:
        target: the class or function.
        values: of the arguments by name.
        place: the dotted key of the object that it makes; empty for the trainer.

    Raises:
        ConfigError: the setting by its key, with the nearest ones.
    """
    parameters = inspect.signature(target).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in (name for name in values if name not in parameters and not free):
        key, *near = (
            f"{place}.{key}".lstrip(".") for key in (name, *nearest(name, list(parameters)))
        )
        raise no_setting(key, list(parameters), near, f" of {target.__name__}")


@contextmanager
def by_key(places: Mapping[str, str], place: str = "") -> Iterator[None]:
    """Lets errors in this block name settings by their keys: ``privacy.epsilon`` for
    ``ClientPrivacy.epsilon``.

    Args:
        places: the dotted key of each object that is made, by its class or function.
        place: that of the only one, by which errors that name no setting are found.

    Raises:
        FedmtlError: of the class that was raised, with the key in its message; ConfigError for any
            other error of ``place``.
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


def keys(parts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys of the arguments of a trainer by the classes of these, for
    :func:`by_key`."""
    return {type(value).__name__: name for name, value in parts.items()} | _OF_A_RUN


def build(config: Config, folder: Path) -> Trainer:
    """Returns the trainer of a resolved configuration, which reads the data once its other settings
    are checked.

    Raises:
        FedmtlError: an impossible value or malformed data, named by its key, file, client or field.
    """
    from ..trainer import Trainer

    parts = objects(config)
    logger = dict(config.get("logger") or {})
    if logger.get("folder") is not None:
        logger["folder"] = str(folder / logger["folder"])
    if "parameters" in logger:
        logger["parameters"] = flat(config) | (logger["parameters"] or {})
    callback = made(logger, "logger")
    callbacks = []
    if callback is not None:
        callbacks.append(callback)
    data: Any = partial(made, config["data"], "data")
    with by_key(keys(parts)):
        return Trainer(data=data, folder=folder, callbacks=callbacks, **parts)


def import_trainer() -> None:
    """Imports the trainer, and PyTorch with it, for a command that is about to use them."""
    # else the process is another's, or began before
    with uncollected(frozen="torch" not in sys.modules):
        import_module("fedmtl.trainer")
