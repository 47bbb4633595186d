"""Federated data: the dataset type, readers (one file a format), partitioners."""

from __future__ import annotations

from .dataset import FederatedDataset
from .examples import DataSpec, Domain, Examples
from .loaders import LOADERS, load_data, reader
from .partition import ByClasses, Dirichlet, Partition, Shards, from_partition
from .readers.adult import AdultSettings, read_adult
from .readers.celeba import CelebASettings, read_celeba
from .readers.cifar import read_cifar
from .readers.digits import load_digits_clients
from .readers.femnist import read_femnist
from .readers.hospital import read_hospital
from .readers.images import ImagesSettings, read_images
from .readers.leaf import read_leaf
from .readers.lending import LendingSettings, read_lending
from .readers.movielens import MovieLensSettings, RatingsGraph, read_movielens
from .readers.school import read_school
from .readers.stackoverflow import StackOverflowSettings, read_stackoverflow
from .readers.table import read_table
from .readers.table_settings import TableSettings
from .synthetic.agents import TargetAngles, load_synthetic_agents
from .synthetic.tasks import SyntheticTasks, load_synthetic_tasks
from .transforms import Affine, Cast, Integers, Packed, RowBound, Transform

__all__ = [
    "LOADERS",
    "AdultSettings",
    "Affine",
    "ByClasses",
    "Cast",
    "CelebASettings",
    "DataSpec",
    "Dirichlet",
    "Domain",
    "Examples",
    "FederatedDataset",
    "ImagesSettings",
    "Integers",
    "LendingSettings",
    "MovieLensSettings",
    "Packed",
    "Partition",
    "RatingsGraph",
    "RowBound",
    "Shards",
    "StackOverflowSettings",
    "SyntheticTasks",
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
