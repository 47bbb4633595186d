"""Federated data: the dataset type, readers (one file a format), partitioners."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .dataset import FederatedDataset
from .examples import DataSpec, Examples
from .partition import by_column, dirichlet, from_partition, shards
from .readers.adult import adult_owners, read_adult
from .readers.digits import load_digits_clients
from .readers.hospital import hospital_owners, read_hospital
from .readers.leaf import read_femnist, read_leaf
from .readers.lending import lending_owners, read_lending
from .readers.movielens import MovieLens, RatingsGraph, movielens_users, read_movielens
from .readers.owners import Domain, OwnerData
from .readers.school import read_school
from .readers.table import read_table
from .synthetic.agents import SyntheticAgents, TargetAngles, load_synthetic_agents, make_synthetic_agents
from .synthetic.tasks import SyntheticTasks, load_synthetic_tasks, make_synthetic_tasks
from .transforms import Affine, Cast, RowBound, Transform

__all__ = [
    "Affine",
    "Cast",
    "DataSpec",
    "Domain",
    "Examples",
    "FederatedDataset",
    "MovieLens",
    "OwnerData",
    "RatingsGraph",
    "RowBound",
    "SyntheticAgents",
    "SyntheticTasks",
    "TargetAngles",
    "Transform",
    "adult_owners",
    "by_column",
    "dirichlet",
    "from_partition",
    "hospital_owners",
    "lending_owners",
    "load_data",
    "load_digits_clients",
    "load_synthetic_agents",
    "load_synthetic_tasks",
    "make_synthetic_agents",
    "make_synthetic_tasks",
    "movielens_users",
    "read_adult",
    "read_femnist",
    "read_hospital",
    "read_leaf",
    "read_lending",
    "read_movielens",
    "read_school",
    "read_table",
    "shards",
]

LOADERS: dict[str, Callable[..., FederatedDataset]] = {
    "adult": read_adult,
    "digits": load_digits_clients,
    "femnist": read_femnist,
    "hospital": read_hospital,
    "leaf": read_leaf,
    "lending": read_lending,
    "movielens": read_movielens,
    "school": read_school,
    "synthetic_agents": load_synthetic_agents,
    "synthetic_tasks": load_synthetic_tasks,
    "table": read_table,
}


def load_data(name: str, **options: Any) -> FederatedDataset:
    """Data by name, as a config gives them.

    Args:
        name: ``"adult"`` (:func:`read_adult`), ``"digits"`` (:func:`load_digits_clients`), ``"femnist"``
            (:func:`read_femnist`), ``"hospital"`` (:func:`read_hospital`), ``"leaf"`` (:func:`read_leaf`),
            ``"lending"`` (:func:`read_lending`), ``"movielens"`` (:func:`read_movielens`), ``"school"``
            (:func:`read_school`), ``"synthetic_agents"`` (:func:`load_synthetic_agents`), ``"synthetic_tasks"``
            (:func:`load_synthetic_tasks`) or ``"table"`` (:func:`read_table`).
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
