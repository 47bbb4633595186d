"""Federated data: the dataset type, readers (one file a format), partitioners."""

from __future__ import annotations

from .dataset import FederatedDataset
from .examples import DataSpec, Domain, Examples
from .loaders import LOADERS, load_data, reader
from .partition import ByClasses, Dirichlet, Partition, Shards, from_partition
from .readers.adult import read_adult
from .readers.celeba import read_celeba
from .readers.cifar import read_cifar
from .readers.digits import load_digits_clients
from .readers.femnist import read_femnist
from .readers.hospital import read_hospital
from .readers.images import read_images
from .readers.leaf import read_leaf
from .readers.lending import read_lending
from .readers.movielens import RatingsGraph, read_movielens
from .readers.school import read_school
from .readers.stackoverflow import read_stackoverflow
from .readers.table import read_table
from .readers.table_settings import TableSettings
from .synthetic.agents import TargetAngles, load_synthetic_agents
from .synthetic.tasks import load_synthetic_tasks
from .transforms import Affine, Cast, Integers, Packed, RowBound, Transform

__all__ = [
    "LOADERS",
    "Affine",
    "ByClasses",
    "Cast",
    "DataSpec",
    "Dirichlet",
    "Domain",
    "Examples",
    "FederatedDataset",
    "Integers",
    "Packed",
    "Partition",
    "RatingsGraph",
    "RowBound",
    "Shards",
    "TableSettings",
    "TargetAngles",
    "Transform",
    "from_partition",
    "load_data",
    "load_digits_clients",
    "load_synthetic_agents",
    "load_synthetic_tasks",
    "read_adult",
    "read_celeba",
    "read_cifar",
    "read_femnist",
    "read_hospital",
    "read_images",
    "read_leaf",
    "read_lending",
    "read_movielens",
    "read_school",
    "read_stackoverflow",
    "read_table",
    "reader",
]
