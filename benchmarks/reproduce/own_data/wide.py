"""Print what declared ranges cost that are several times as wide as the values of a table.

    python benchmarks/reproduce/own_data/wide.py --data /path/to/data

The low end of a range stays, and the high end moves. Each number is the error over that with exact ranges of the same
split, mean over splits, of automatic settings and of the baseline local.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedmtl import ClientPrivacy, Trainer, load_data

WIDTHS = {
    "features": [(3, 1), (10, 1)],
    "target": [(1, 3), (1, 10)],
    "all": [(3, 3), (10, 10)],
}
"""Factors of the features and of the target."""


@dataclass(frozen=True)
class Panel:
    """A table whose ranges are made wider.

    Attributes:
        rows: without missing values.
        client: the column that names the clients.
        target: the column to predict.
        features: the columns to predict from.
    """

    rows: pd.DataFrame
    client: str
    target: str
    features: tuple[str, ...]

    def bounds(self, of_features: float, of_target: float) -> dict[str, list[float]]:
        """Return the ranges of all columns, some of them wider than the values by these factors."""
        factors = dict.fromkeys(self.features, of_features) | {self.target: of_target}
        found = {}
        for name, factor in factors.items():
            low, high = float(self.rows[name].min()), float(self.rows[name].max())
            found[name] = [low, low + factor * (high - low)]
        return found

    def errors(self, factors: tuple[float, float], epsilon: float, split: int) -> np.ndarray:
        """Return the mean squared errors of automatic settings and of local training, (2,)."""
        data = load_data(
            "table", path=self.rows, client=self.client, target=self.target, features=self.features, classes=None,
            bounds=self.bounds(*factors), seed=split, min_examples=4,
        )  # fmt: skip
        privacy = ClientPrivacy(epsilon=epsilon)
        result = Trainer(
            data=data, privacy=privacy, baselines=["local"], seed=split, progress=False
        ).fit()
        return np.array([result.metrics["mse"], result.baselines["local"].metrics["mse"]])


def panels(data: Path) -> Iterator[tuple[str, Panel]]:
    """Yield the six tables by name, four of them from files below ``data``."""
    yield "wards, made", wards()
    yield "linear, made", linear()
    wages = pd.read_csv(data / "own/wages.csv.gz")
    yield "wages", Panel(wages, "nr", "wage", ("exper", "hours", "educ", "black", "married"))
    exercise = pd.read_csv(data / "own/exercise.csv.gz")
    yield "exercise", Panel(exercise, "subject", "exercise", ("age",))
    medpar = pd.read_csv(data / "hospital/medpar.csv")
    yield (
        "medpar",
        Panel(medpar, "provnum", "los", ("hmo", "white", "died", "age80", "type2", "type3")),
    )
    azpro = pd.read_csv(data / "hospital/azpro.csv")
    azpro["hospital"] = azpro["hospital"].round(2).astype(str)
    yield "azpro", Panel(azpro, "hospital", "los", ("procedure", "sex", "age75", "admit"))


def wards() -> Panel:
    """Return days in 60 wards that differ in their level."""
    rng, tables = np.random.default_rng(0), []
    for ward in range(60):
        rows, slow = int(rng.integers(20, 60)), rng.normal()
        age, weight = rng.integers(18, 95, rows), rng.normal(75, 12, rows)
        days = 2 + 0.08 * age + slow + rng.normal(0, 2, rows)
        tables.append(
            pd.DataFrame({"ward": f"ward-{ward}", "age": age, "weight": weight, "days": days})
        )
    return Panel(pd.concat(tables, ignore_index=True), "ward", "days", ("age", "weight"))


def linear() -> Panel:
    """Return linear tasks of 60 clients whose slopes and levels differ."""
    rng, tables = np.random.default_rng(0), []
    common = rng.normal(size=4)
    for client in range(60):
        x = rng.uniform(-1, 1, (30, 4))
        y = x @ (common + 0.3 * rng.normal(size=4)) + 0.3 * rng.normal() + 0.5 * rng.normal(size=30)
        tables.append(pd.DataFrame(x, columns=list("abcd")).assign(y=y, client=f"c{client}"))
    return Panel(pd.concat(tables, ignore_index=True), "client", "y", tuple("abcd"))


def main(words: Sequence[str] | None = None) -> None:
    """Print a table of markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--splits", type=int, default=3)
    options = parser.parse_args(words)
    print("| table | epsilon | wider | 3 times | 10 times | *local*, 3 times | 10 times |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for name, panel in panels(options.data):
        for epsilon in (1.0, 3.0):
            exact = [panel.errors((1, 1), epsilon, split) for split in range(options.splits)]
            for what, widths in WIDTHS.items():
                ratios = [
                    np.mean(
                        [
                            panel.errors(width, epsilon, split) / exact[split]
                            for split in range(options.splits)
                        ],
                        0,
                    )
                    for width in widths
                ]
                cells = [f"{ratio[part]:.3f}" for part in (0, 1) for ratio in ratios]
                print(f"| {name} | {epsilon:g} | {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
