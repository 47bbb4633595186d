"""Federated data: the dataset type, readers (one file a format), partitioners."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .dataset import FederatedDataset
from .digits import load_digits_clients
from .examples import DataSpec, Examples
from .leaf import read_femnist, read_leaf
from .partition import by_column, dirichlet, from_partition, shards
from .school import read_school
from .table import read_table
from .transforms import Affine, Cast, Transform

__all__ = [
    "Affine",
    "Cast",
    "DataSpec",
    "Examples",
    "FederatedDataset",
    "Transform",
    "by_column",
    "dirichlet",
    "from_partition",
    "load_data",
    "load_digits_clients",
    "read_femnist",
    "read_leaf",
    "read_school",
    "read_table",
    "shards",
]

LOADERS: dict[str, Callable[..., FederatedDataset]] = {
    "digits": load_digits_clients,
    "femnist": read_femnist,
    "leaf": read_leaf,
    "school": read_school,
    "table": read_table,
}


def load_data(name: str, **options: Any) -> FederatedDataset:
    """Data by name, as a config gives them.

    Args:
        name: ``"digits"`` (:func:`load_digits_clients`), ``"femnist"`` (:func:`read_femnist`), ``"leaf"``
            (:func:`read_leaf`), ``"school"`` (:func:`read_school`) or ``"table"`` (:func:`read_table`).
        options: arguments of that function.

    Raises:
        ConfigError: an unknown name or option, or a required option that is missing.
        DataError: malformed data.
    """
    if name not in LOADERS:
        raise ConfigError(f"data.name is {name!r}; accepted: {', '.join(map(repr, LOADERS))}.")
    accepted = inspect.signature(LOADERS[name]).parameters
    for option in options:
        if option not in accepted:
            raise ConfigError(f"data.{option} is no option of {name!r}; accepted: {', '.join(accepted)}.")
    for option, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and options.get(option) is None:
            raise ConfigError(f"data.{option} is missing; {name!r} needs it.")
    return LOADERS[name](**options)
