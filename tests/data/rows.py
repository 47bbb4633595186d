"""What the tests of readers look at: a client's rows, rows in which datasets differ, and tables with a wrong value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedmtl.data import Examples, FederatedDataset


def client_rows(part: Examples, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and y of a client as they are stored."""
    own = slice(int(part.offsets[client]), int(part.offsets[client + 1]))
    return part.x[own], part.y[own]


def rows_of(data: FederatedDataset, client: int, *sides: str) -> list[tuple[float, ...]]:
    """Return a client's rows (*x, y) as they are stored, sorted, of both sides or of the given ones."""
    rows = []
    for side in sides or ("train", "test"):
        pairs = zip(*client_rows(data.side(side), client), strict=True)
        rows += [(*x.flatten().tolist(), y.item()) for x, y in pairs]
    return sorted(rows)


def moved_rows(first: FederatedDataset, second: FederatedDataset) -> int:
    """Return in how many rows of features and target two datasets differ."""
    sides = [(first.side(side), second.side(side)) for side in ("train", "test")]
    return sum(int(((a.x != b.x).any(1) | (a.y != b.y)).sum()) for a, b in sides)


def leaf(users: Mapping[str, tuple[list[Any], list[Any]]]) -> dict[str, Any]:
    """Return the content of a LEAF file of lists (x, y)."""
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in users.items()},
    }


def write_csv(path: Path, frame: pd.DataFrame) -> Path:
    """Write a table without its index and return its path."""
    frame.to_csv(path, index=False)
    return path


def spoiled(frame: pd.DataFrame, column: str, row: int, value: Any) -> pd.DataFrame:
    """Return the table with another value, or for None without the column."""
    if value is None:
        return frame.drop(columns=column)
    frame = frame.astype(object)
    frame.loc[row, column] = value
    return frame
