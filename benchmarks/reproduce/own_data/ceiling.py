"""How near clients can come to an analyst without privacy, and how much of the distance is noise or choice.

    python benchmarks/reproduce/own_data/ceiling.py --data /path/to/data
    python benchmarks/reproduce/own_data/ceiling.py --print

For each cell of counted.csv the error of the best method of a list, with its hyperparameters, one for all clients and
splits by the error on the test rows. No rule sees these rows, so the best of the list bounds any rule that makes one
choice from it for all clients. ceiling.csv has the scores, and ``--print`` prints the table of them.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "comparison")]

from alone import INTERCEPTS, OPEN, pooled  # noqa: E402
from released import SUMMED, UNITS, USUAL, Clients, released  # noqa: E402
from sweep import existing, markdown  # noqa: E402
from tables import AUTOMATIC, SOURCES  # noqa: E402

from fedmtl.contrib.average import SLOPE_RIDGES, Records, average_numbers  # noqa: E402

Array = np.ndarray
EPSILONS, SPLITS = (1.0, 3.0, 10.0), (0, 1, 2)
HOME, ALL = "own, hindsight", "own and released, hindsight"
EXACT, EXACT_AVERAGE = "exact, chosen alone", "exact, averaged alone"
CHOSEN_USUAL, CHOSEN = "usual, chosen jointly", "released in hindsight, chosen jointly"
COLUMNS = ("data", "unit", "epsilon", "split", "method", "error", "setting")
CHUNK = 64  # bases at a time
WITHIN = 1.05


@dataclass(frozen=True)
class Fits:
    """The own models of one client on many bases, by base (b), penalty of the intercept (k) and of the slopes (m).

    Attributes:
        left_out: mean squares of residuals left out one at a time, (b, k, m).
        predicted: predictions of the test rows, not cut off, (b, k, m, t).
    """

    left_out: Array
    predicted: Array

    @classmethod
    def of(cls, records: Records, x_test: Array, bases: Array) -> Fits:
        """Fit a client's own intercepts and slopes on all bases, as Records.fits does on one."""
        n, kappas = len(records.y), np.array(INTERCEPTS)
        residual = records.y - bases[:, :-1] @ records.x.T - bases[:, -1:]
        along = residual @ records.u
        shrunk = records.s**2 / (records.s**2 + SLOPE_RIDGES[:, None])
        intercept = residual.sum(1)[:, None] / (n + kappas)
        slopes = along[:, None] * shrunk
        free = 1 - 1 / (n + kappas)[:, None, None] - shrunk @ (records.u**2).T
        fit = intercept[:, :, None, None] + (slopes @ records.u.T)[:, None]
        whole = np.broadcast_to(residual[:, None, None], fit.shape)
        left_out = np.where(free > 1e-9, (whole - fit) / np.maximum(free, 1e-9), whole)
        kept = np.clip(records.y - left_out, -records.limit, records.limit) - records.y
        places = ((x_test - records.center) / records.spread) @ records.vt.T
        places = places / np.where(records.s > 0, records.s, 1.0)
        predicted = (bases[:, :-1] @ x_test.T + bases[:, -1:])[:, None, None]
        predicted = predicted + intercept[:, :, None, None] + (slopes @ places.T)[:, None]
        return cls((kept**2).mean(-1), predicted)


@dataclass
class Errors:
    """Means over clients of the candidates of a cell: own intercepts and slopes on released models.

    Attributes:
        names: of the models, (b).
        tests: errors on test rows, (b, k, m).
        left_out: errors of training rows left out one at a time, (b, k, m).
    """

    names: list[str]
    tests: Array
    left_out: Array

    def name(self, place: int) -> str:
        """Return the setting of a place among all errors."""
        base, kappa, slope = np.unravel_index(place, self.tests.shape)
        own = f"own intercept {INTERCEPTS[kappa]:g}, own slopes {SLOPE_RIDGES[slope]:g}"
        return f"{self.names[base]}; {own}"

    def chosen(self, home: Errors) -> Array:
        """Return the errors of one choice for all clients by rows left out, on each model or without it, (b,)."""
        free = home.left_out[0, 0]  # own models have a free intercept
        found = []
        for tests, left_out in zip(self.tests, self.left_out, strict=True):
            both = np.append(left_out, free)
            found.append(np.append(tests, home.tests[0, 0])[both.argmin()])
        return np.array(found)


def errors_of(
    clients: Clients, named: list[tuple[str, Array]]
) -> tuple[Errors, Errors, dict[str, float]]:
    """Return the errors on a base of zero, on the named models, and of what is exact or chosen alone."""
    exact = [pooled(clients.train, within) for within in (False, True)]
    bases = np.stack([np.zeros_like(exact[0]), *exact, *(model for _, model in named)])
    bases = np.nan_to_num(bases, posinf=0.0, neginf=0.0)
    tests = np.zeros((len(bases), len(INTERCEPTS), len(SLOPE_RIDGES)))
    left_out, averaged, alone = np.zeros_like(tests), np.zeros(2), 0.0
    for (x, y), (x_test, y_test) in zip(clients.train, clients.test, strict=True):
        records = Records.of(x, y, True, clients.limit)
        for start in range(0, len(bases), CHUNK):
            part = slice(start, start + CHUNK)
            fits = Fits.of(records, x_test, bases[part])
            errors = (np.clip(fits.predicted, -clients.limit, clients.limit) - y_test) ** 2
            tests[part] += errors.mean(-1)
            left_out[part] += fits.left_out
            if start == 0:
                own = fits.left_out[:3].copy()
                own[0, 1:] = math.inf
                alone += float(errors[:3].mean(-1).ravel()[own.argmin()])
        for place, base in enumerate(exact):
            w, _ = average_numbers(x, y, base, True, 0.0, clients.limit)
            predicted = np.clip(x_test @ w[:-1] + w[-1], -clients.limit, clients.limit)
            averaged[place] += np.mean((predicted - y_test) ** 2)
    count = len(clients.train)
    home, both, others = (
        Errors(names, tests[part] / count, left_out[part] / count)
        for names, part in (
            (["own"], slice(0, 1)),
            (["pooled", "within"], slice(1, 3)),
            ([name for name, _ in named], slice(3, None)),
        )
    )
    whole = Errors(
        ["exact"],
        *(each.reshape(1, -1, len(SLOPE_RIDGES)) for each in (both.tests, both.left_out)),
    )
    found = {
        OPEN: float(whole.chosen(home)[0]),
        EXACT: alone / count,
        EXACT_AVERAGE: float(averaged.min() / count),
    }
    return home, others, found


def measure(name: str, folder: Path, splits: Sequence[int]) -> list[dict[str, object]]:
    """Return the rows of ceiling.csv of a data set."""
    homes, exacts = [], []
    cells: dict[tuple[str, float], list[Errors]] = {}
    for split in splits:
        clients = Clients.of(SOURCES[name].load(folder / SOURCES[name].file, split))
        named: list[tuple[str, Array]] = []
        places = {}
        for number, (unit, epsilon) in enumerate(product(UNITS, EPSILONS)):
            rng = np.random.default_rng([split, number])
            models = list(released(clients, unit, epsilon, rng))
            places[unit, epsilon] = slice(len(named), len(named) + len(models))
            named += models
        home, found, exact = errors_of(clients, named)
        homes.append(home)
        exacts.append(exact)
        for cell, part in places.items():
            of_cell = Errors(found.names[part], found.tests[part], found.left_out[part])
            cells.setdefault(cell, []).append(of_cell)
    opened = np.array([exact[OPEN] for exact in exacts])
    rows = []
    for method in (OPEN, EXACT, EXACT_AVERAGE):
        rows += _lines((name, "", 0.0), splits, method, [exact[method] for exact in exacts], "")
    own = _best(np.stack([home.tests.ravel() for home in homes]), opened)
    rows += _lines((name, "", 0.0), splits, HOME, own[0], homes[0].name(own[1]))
    for (unit, epsilon), of_splits in cells.items():
        cell = (name, unit, epsilon)
        errors, place = _best(np.stack([each.tests.ravel() for each in of_splits]), opened)
        setting = of_splits[0].name(place)
        if np.mean(own[0] / opened) < np.mean(errors / opened):
            errors, setting = own[0], homes[0].name(own[1])
        rows += _lines(cell, splits, ALL, errors, setting)
        chosen = np.stack([each.chosen(home) for each, home in zip(of_splits, homes, strict=True)])
        errors, place = _best(chosen, opened)
        rows += _lines(cell, splits, CHOSEN, errors, of_splits[0].names[place])
        place = of_splits[0].names.index(USUAL[unit])
        rows += _lines(cell, splits, CHOSEN_USUAL, chosen[:, place], USUAL[unit])
    return rows


def _best(errors: Array, opened: Array) -> tuple[Array, int]:
    """Return the errors by split, and the place, of the candidate with the least mean ratio to the open choice."""
    place = int((errors / opened[:, None]).mean(0).argmin())
    return errors[:, place], place


def _lines(
    cell: tuple[str, str, float],
    splits: Sequence[int],
    method: str,
    errors: Iterable[float],
    setting: str,
) -> list[dict[str, object]]:
    """Return a line of ceiling.csv for each split; the first one has the setting of all."""
    name, unit, epsilon = cell
    lines = []
    for split, error in zip(splits, errors, strict=True):
        shown = setting if split == splits[0] else ""
        values = (name, unit, f"{epsilon:g}", split, method, f"{error:.6g}", shown)
        lines.append(dict(zip(COLUMNS, values, strict=True)))
    return lines


def table(rows: pd.DataFrame, counted: pd.DataFrame) -> str:
    """Return how many cells of counted.csv are within 5% of the open choice, by unit, ranges and epsilon.

    Args:
        rows: of ceiling.csv.
        counted: of counted.csv.
    """
    where = ["data", "split"]
    opened = rows[rows["method"] == OPEN].set_index(where)["error"].rename("open")
    everywhere = (HOME, EXACT, EXACT_AVERAGE)
    methods = (HOME, EXACT, EXACT_AVERAGE, CHOSEN_USUAL, CHOSEN, ALL)
    now = counted[counted["method"] == AUTOMATIC].astype({"epsilon": float})
    cells = now.groupby(["data", "unit", "epsilon"]).size().reset_index(name="splits")
    cells = cells[cells["splits"] == now["split"].nunique()]
    summed = cells[cells["unit"] == "record"].assign(unit=SUMMED)
    cells = pd.concat([cells, summed])[["data", "unit", "epsilon"]]
    cells = cells.assign(ranges=np.where(cells["data"].str.endswith("10"), "10 times", "exact"))
    near = {}
    for method in (AUTOMATIC, *methods):
        found = now if method == AUTOMATIC else rows[rows["method"] == method]
        ratios = found.join(opened, on=where).assign(ratio=lambda all: all["error"] / all["open"])
        keys = ["data"] if method in everywhere else ["data", "unit", "epsilon"]
        ratio = ratios.groupby(keys)["ratio"].mean().rename("ratio")
        near[method] = cells.join(ratio, on=keys)["ratio"]
    cells = cells.reset_index(drop=True)
    groups = [((unit, "all", "all"), of_unit) for unit, of_unit in cells.groupby("unit")]
    for (unit, ranges, epsilon), part in cells.groupby(["unit", "ranges", "epsilon"]):
        groups.append(((unit, ranges, f"{epsilon:g}"), part))
    groups.sort(key=lambda group: (UNITS.index(group[0][0]), group[0][1] == "all"))
    lines = []
    for names, part in groups:
        line = [*names, str(len(part))]
        for ratios in near.values():
            ratio = ratios.iloc[part.index]
            shown = f"{int((ratio <= WITHIN).sum())} ({np.exp(np.log(ratio).mean()):.2f})"
            line.append("" if ratio.isna().all() else shown)
        lines.append(line)
    return markdown(["unit", "ranges", "epsilon:", "cells:", *(f"{name}:" for name in near)], lines)


def main() -> None:
    """Parse the command line, compute the missing data sets, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=existing, help="the folder with the files of the data sets")
    parser.add_argument("--print", action="store_true", help="print the table of ceiling.csv")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, metavar="NAME")
    parser.add_argument("--splits", nargs="+", type=int, default=SPLITS, metavar="SPLIT")
    parser.add_argument("--out", type=Path, default=HERE / "ceiling.csv")
    arguments = parser.parse_args()
    if not (arguments.print or arguments.data):
        parser.error("--data is needed, except with --print")
    counted = pd.read_csv(HERE / "counted.csv", keep_default_na=False)
    if not arguments.print:
        names = arguments.sources or list(dict.fromkeys(counted["data"]))
        done = set(pd.read_csv(arguments.out)["data"]) if arguments.out.exists() else set()
        for name in names:
            if name in done:
                continue
            rows = measure(name, arguments.data, arguments.splits)
            first = not arguments.out.exists()
            with open(arguments.out, "a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if first:
                    writer.writeheader()
                writer.writerows(rows)
            print(name, flush=True)
    print(table(pd.read_csv(arguments.out, keep_default_na=False), counted))


if __name__ == "__main__":
    main()
