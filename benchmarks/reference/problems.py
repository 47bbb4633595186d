"""The data of the table: where they lie, and how they are divided by a seed."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pandas as pd

from benchmarks.reproduce.comparison.settings import half_size, held_out
from fedmtl import FederatedDataset, load_data

from .settings import TUNING, Problem

DIGITS = Problem("digits", "digits: 1,000 writers, 10 images each", "", "accuracy", True)
FEMNIST = Problem(
    "femnist",
    "FEMNIST sample: 206 writers, 24 images each",
    "femnist/leaf_femnist_206.json.zip",
    "accuracy",
    True,
)
SCHOOL = Problem(
    "school",
    "School: 139 schools, 33 pupils each",
    "school/school.mat",
    "mse",
    False,
    bias=False,
)
FARES = Problem(
    "fares", "air fares: 1,146 routes, 1 to 3 years each", "own/fares.csv.gz", "mse", False
)
PROBLEMS = (DIGITS, FEMNIST, SCHOOL, FARES)

# Public facts of the table, wider than its values: no declared range is read off the rows.
_FARE_BOUNDS = {
    "year": [1997, 2000],
    "dist": [0, 3000],
    "passen": [0, 9000],
    "bmktshr": [0, 1],
    "fare": [0, 600],
}


def missing(problem: Problem, folder: Path) -> str | None:
    """Returns what is missing of the data of a problem, in words; None if nothing is."""
    if problem.file and not (folder / problem.file).exists():
        return f"{folder} has no {problem.file}; --data or FEDMTL_DATA names the folder of the data"
    return None


@lru_cache(maxsize=8)
def load(problem: Problem, folder: Path, seed: int) -> FederatedDataset:
    """Returns the data of a seed, divided into training and test rows.

    Those of the tuning seed are training rows only, divided again: settings are compared on rows
    that are no test rows of any kind.
    """
    data = _load(problem, folder / problem.file, seed)
    if seed == TUNING:
        return held_out(data, seed)
    return data


def _load(problem: Problem, path: Path, seed: int) -> FederatedDataset:
    if problem == DIGITS:
        return load_data("digits", seed=seed)
    if problem == FEMNIST:
        return half_size(load_data("femnist", root=path, seed=seed))
    if problem == SCHOOL:
        return load_data(
            "school",
            root=path,
            seed=seed,
            test_fraction=0.7,
            standardize="client",
            targets="centred",
            unit_rows=True,
            min_examples=4,
        )
    data = load_data(
        "table",
        path=pd.read_csv(path).dropna(),
        client="route",
        target="fare",
        features=[name for name in _FARE_BOUNDS if name != "fare"],
        bounds=_FARE_BOUNDS,
        classes=None,
        seed=seed,
        min_examples=2,
    )
    # Errors stay in units in which the declared range of fares is [-1, 1].
    return replace(data, target_range=None)
