"""The registry of readers, and :func:`load_data`, which finds them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ..errors import ConfigError
from .dataset import FederatedDataset

LOADERS: dict[str, Callable[..., FederatedDataset]] = {}
"""The registered readers by the name that :func:`load_data` takes."""

Reader = TypeVar("Reader", bound=Callable[..., FederatedDataset])
Settings = TypeVar("Settings")
P = ParamSpec("P")


def reader(name: str) -> Callable[[Reader], Reader]:
    """Registers a function that returns a dataset, so that :func:`load_data` finds it by name.

    The modules of ``fedmtl/data/readers`` are imported with the package; a module elsewhere
    registers its readers when it is imported.

    Args:
        name: by which :func:`load_data` finds the function, and ``data=name`` the file of its
            settings.

    Returns:
        A decorator that returns the function as it is.

    Raises:
        ConfigError: another function has the name.

    Example:
        >>> import torch
        >>> from fedmtl import FederatedDataset, load_data
        >>> from fedmtl.data import reader
        >>> @reader("coins")
        ... def read_coins(purses=2):
        ...     purse = torch.ones(6, 2), torch.arange(6) % 2
        ...     rows = {f"purse-{number}": purse for number in range(purses)}
        ...     return FederatedDataset.from_tensors(rows, classes=2, name="coins")
        >>> load_data("coins", purses=3).ids
        ('purse-0', 'purse-1', 'purse-2')
    """

    def register(function: Reader) -> Reader:
        first = LOADERS.setdefault(name, function)
        if (first.__module__, first.__qualname__) != (function.__module__, function.__qualname__):
            raise ConfigError(
                f"data {name!r} is read by {first.__module__}.{first.__qualname__}; "
                "choose another name."
            )
        LOADERS[name] = function  # a module may be loaded again
        return function

    return register


def with_settings(
    kind: Callable[P, Settings],
) -> Callable[[Callable[[Settings], FederatedDataset]], Callable[P, FederatedDataset]]:
    """Makes a reader of a settings object one that takes the settings themselves.

    Args:
        kind: the settings, a frozen dataclass, which refuses impossible ones when it is made.

    Returns:
        The reader with the signature and the annotations of ``kind``. The command takes its keys
        and their defaults from these, type checkers the arguments, and
        :func:`~fedmtl._check.check_arguments` the accepted values.
    """

    def wrap(function: Callable[[Settings], FederatedDataset]) -> Callable[P, FederatedDataset]:
        signature = inspect.signature(kind).replace(return_annotation=FederatedDataset)

        @wraps(function)
        def read(*args: P.args, **kwargs: P.kwargs) -> FederatedDataset:
            # bound here, so that the error of an unknown argument does not name the settings
            bound = signature.bind(*args, **kwargs)
            return function(kind(*bound.args, **bound.kwargs))

        read.__signature__ = signature  # type: ignore[attr-defined]
        read.__annotations__ = {
            name: parameter.annotation for name, parameter in signature.parameters.items()
        }
        return read

    return wrap


def load_data(name: str, **options: Any) -> FederatedDataset:
    """Reads the data that a name stands for, as a configuration gives them.

    Args:
        name: of a registered reader: ``"digits"`` is :func:`load_digits_clients`,
            ``"synthetic_agents"`` and ``"synthetic_tasks"`` are :func:`load_synthetic_agents` and
            :func:`load_synthetic_tasks`, and the others are ``read_NAME``: ``"celeba"``,
            ``"cifar"``, ``"femnist"``, ``"images"``, ``"leaf"``, ``"movielens"``, ``"school"``,
            ``"stackoverflow"``, ``"table"``.
        options: arguments of that function.

    Returns:
        The dataset; its public facts are in :attr:`FederatedDataset.spec`, its features and targets
        as the reader states them.

    Raises:
        ConfigError: an unknown name or option, or a required option that is missing.
        DataError: malformed data.

    Example:
        >>> from fedmtl import load_data
        >>> len(load_data("digits", clients=10))
        10
    """
    if name not in LOADERS:
        raise ConfigError(
            f"data.name is {name!r}; accepted: {', '.join(map(repr, sorted(LOADERS)))}."
        )
    accepted = inspect.signature(LOADERS[name]).parameters
    for option in options:
        if option not in accepted:
            raise ConfigError(
                f"data.{option} is no option of {name!r}; accepted: {', '.join(accepted)}."
            )
    for option, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and options.get(option) is None:
            raise ConfigError(f"data.{option} is missing; {name!r} needs it.")
    return LOADERS[name](**options)
