"""Automatic settings on tables that nobody tuned for: against training alone, averaging alone, and tuning by hand.

    python benchmarks/reproduce/own_data/run.py --data /path/to/data
    python benchmarks/reproduce/own_data/run.py --quick
    python benchmarks/reproduce/own_data/run.py --collect

Every score is one line of ``outputs/reproduce/own_data/rows.csv`` as soon as it is computed, and a run goes on where an
earlier one stopped. ``--quick`` takes the tables without a file, two splits and epsilon 3, and writes nothing beside
the outputs. ``--collect`` rewrites scores.csv, table and figure from the rows that there are.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "comparison")]

from alone import ALONE, OPEN, alone, open_by_hand  # noqa: E402
from report import Scores, panel_means, panel_table, report, short_table  # noqa: E402
from settings import held_out  # noqa: E402
from sweep import existing  # noqa: E402
from tables import AUTOMATIC, FINETUNED, NETWORK, SHARED, SHARED_NETWORK, SOURCES  # noqa: E402

from fedmtl import (  # noqa: E402
    Average,
    ClientPrivacy,
    FedAvg,
    FederatedDataset,
    Finetune,
    FullParticipation,
    LocalSGD,
    PoissonSampling,
    RecordPrivacy,
    Result,
    SecureAggregation,
    ServerOptimizer,
    Trainer,
    models,
)

Unit = Literal["client", "record", "record, summed"]
SUMMED: Unit = "record, summed"
"""Records in a secure sum of the gradients of all clients, of whom a third may collude."""
UNITS: tuple[Unit, ...] = ("client", "record")
EPSILONS = (3.0, 1.0, 10.0)  # in the order of the work
SPLITS, TUNING = (0, 1, 2, 3, 4), 10
COLUMNS = ("data", "unit", "epsilon", "split", "method", "error", "setting")
COHORT = 300


@dataclass(frozen=True)
class Hand:
    """A setting of FedAvg, tuned by hand.

    Attributes:
        lr: of full-batch local steps.
        clip: norm of what a client sends, or of the gradient of a record.
        rounds: T.
        lam: pull of the finetuning to the shared model; None averages models instead.
        momentum: of the server, whose step is then .3 instead of 1.
    """

    lr: float
    clip: float
    rounds: int
    lam: float | None
    momentum: float = 0.0

    def text(self) -> str:
        """Return its values in words."""
        pull = "" if self.lam is None else f", lam {self.lam:g}"
        return f"lr {self.lr:g}, clip {self.clip:g}, {self.rounds} rounds{pull}, momentum {self.momentum:g}"


def search(unit: Unit, classes: bool, lam: float | None) -> tuple[Hand, tuple[dict[str, Any], ...]]:
    """Return a first setting and the changes that are tried one after the other: with it ten settings.

    A change stays where it is better than the best setting before it.
    """
    scale = 3.0 if classes else 1.0
    lrs = [
        scale * value
        for value in ((0.01, 0.03, 0.1, 0.3) if unit == "client" else (0.03, 0.1, 0.3, 1.0))
    ]
    clips = [0.03, 0.1, 0.3, 1.0] if unit == "client" else [0.1, 0.3, 1.0, 3.0]
    first = Hand(lr=lrs[1], clip=clips[2], rounds=30, lam=lam)
    changes = (
        [{"lr": lrs[i]} for i in (2, 0, 3)]
        + [{"clip": clips[i]} for i in (1, 0, 3)]
        + [{"rounds": 60 if unit == "client" else 100}]
    )
    if lam is None:
        return first, (*changes, {"rounds": 10}, {"momentum": 0.9})
    return first, (*changes, {"lam": 0.03}, {"lam": 1.0})


def privacy_of(
    unit: Unit, epsilon: float, clip: float | None = None
) -> ClientPrivacy | RecordPrivacy:
    """Return the privacy of a cell; without a clip norm, the automatic one."""
    if unit == SUMMED:
        return RecordPrivacy(epsilon=epsilon, clip_norm=clip, aggregation=SecureAggregation())
    return (ClientPrivacy if unit == "client" else RecordPrivacy)(epsilon=epsilon, clip_norm=clip)


def by_hand(
    data: FederatedDataset, unit: Unit, epsilon: float, seed: int, setting: Hand, method: str
) -> dict[str, float]:
    """Return the error, under the name ``method``, of FedAvg with a setting, and of each client's model after it."""
    classes = data.classes is not None
    solver = LocalSGD(lr=setting.lr, steps=10 if unit == "client" else 1, batch_size=None)
    server: dict[str, Any] = {}
    if setting.momentum:
        server["server_optimizer"] = ServerOptimizer(lr=0.3, options={"momentum": setting.momentum})
    linear = models.linear_regression() if not classes else models.softmax_regression()
    if data.classes == 2:
        linear = models.logistic_regression()
    full = unit == "record" or len(data) <= COHORT
    own = LocalSGD(lr=0.3 if classes else 0.03, steps=100, batch_size=None)
    result = Trainer(
        algorithm=FedAvg(local=solver, **server),
        data=data,
        model=linear,
        schedule=FullParticipation() if full else PoissonSampling(cohort=COHORT),
        privacy=privacy_of(unit, epsilon, setting.clip),
        rounds=setting.rounds,
        finetune=Average()
        if setting.lam is None
        else Finetune(kind="mean", lam=setting.lam, local=own),
        seed=seed,
        eval_every=setting.rounds,
        progress=False,
    ).fit()
    return {method: error_of(result)}


def automatic(
    data: FederatedDataset, unit: Unit, epsilon: float, seed: int, *, network: bool = False
) -> dict[str, float]:
    """Return the errors of automatic settings, of a linear model or of a perceptron with a hidden layer."""
    model: dict[str, Any] = {"model": "mlp"} if network else {}
    result = Trainer(
        data=data, privacy=privacy_of(unit, epsilon), seed=seed, progress=False, **model
    ).fit()
    names = (NETWORK, SHARED_NETWORK) if network else (AUTOMATIC, SHARED)
    return dict(zip(names, (error_of(result), error_of(result, shared=True)), strict=True))


def error_of(result: Result, *, shared: bool = False) -> float:
    """Return the mean over clients of the squared error, or of the share of wrong labels, on test rows."""
    classes = "accuracy" in result.by_client
    scores = result.shared_by_client if shared else result.by_client
    assert scores is not None
    values = list(scores["accuracy" if classes else "mse"].values())
    mean = sum(values) / len(values)
    return 1 - mean if classes else mean


class Rows:
    """The scores so far, one line each; what is there is not computed again."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self.found[self._key(row)] = row
        else:
            self._append(dict(zip(COLUMNS, COLUMNS, strict=True)))

    def get(
        self, where: dict[str, Any], compute: Callable[[], dict[str, float]], setting: str = ""
    ) -> float:
        """Return the error of ``where["method"]``, computed with those of its companions where it is missing."""
        key = self._key(where)
        if key not in self.found:
            for method, error in compute().items():
                row = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in where.items()}
                row |= {"method": method, "error": f"{error:.7g}", "setting": setting}
                self.found[self._key(row)] = row
                self._append(row)
                print(*(row[name] for name in COLUMNS), flush=True)
        return float(self.found[key]["error"])

    def has(self, where: dict[str, Any]) -> bool:
        """Return whether the error of ``where["method"]`` is there."""
        return self._key(where) in self.found

    def _append(self, row: dict[str, str]) -> None:
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow([row[name] for name in COLUMNS])

    def frame(self) -> pd.DataFrame:
        """Return the scores without those of tuning, in order."""
        own = pd.read_csv(self.path, keep_default_na=False)
        own = own[~own["method"].str.startswith("tune ")]
        order = own["data"].map(list(SOURCES).index)
        return own.assign(order=order).sort_values(["order", *COLUMNS[1:5]]).drop(columns="order")

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["data"], row["unit"], float(row["epsilon"]), int(row["split"]), row["method"]


def tuned(rows: Rows, where: dict[str, Any], data: FederatedDataset, method: str) -> Hand:
    """Return the best of ten settings by the validation rows of the tuning split."""
    lam = 0.2 if method == FINETUNED else None
    best, changes = search(where["unit"], data.classes is not None, lam)

    def score(setting: Hand) -> float:
        at = where | {"split": TUNING, "method": f"tune {method}: {setting.text()}"}
        train = partial(
            by_hand, data, where["unit"], where["epsilon"], TUNING, setting, at["method"]
        )
        error = rows.get(at, train)
        return error if math.isfinite(error) else math.inf

    least = score(best)
    for change in changes:
        setting = replace(best, **change)
        if (error := score(setting)) < least:
            best, least = setting, error
    return best


def measure(
    rows: Rows,
    name: str,
    folder: Path,
    epsilons: Sequence[float],
    splits: Sequence[int],
    units: Sequence[Unit] = UNITS,
) -> None:
    """Compute what is missing of a data set without tuning: the clients without others, and automatic settings."""
    for split in splits:
        where = {"data": name, "unit": "", "epsilon": 0.0, "split": split, "method": ALONE}
        rows.get(where, partial(alone, cached(name, folder, split)))
        if not SOURCES[name].by_hand:
            rows.get(where | {"method": OPEN}, partial(open_by_hand, cached(name, folder, split)))
    for epsilon, unit, split in product(epsilons, units, splits):
        where = {
            "data": name,
            "unit": unit,
            "epsilon": epsilon,
            "split": split,
            "method": AUTOMATIC,
        }
        rows.get(where, partial(automatic, cached(name, folder, split), unit, epsilon, split))
    networks = cached(name, folder, splits[0]).classes is not None and SOURCES[name].by_hand
    if not networks or "client" not in units:
        return
    for epsilon, split in product(epsilons, splits):
        where = {
            "data": name,
            "unit": "client",
            "epsilon": epsilon,
            "split": split,
            "method": NETWORK,
        }
        rows.get(
            where,
            partial(automatic, cached(name, folder, split), "client", epsilon, split, network=True),
        )


def measure_by_hand(
    rows: Rows, name: str, folder: Path, epsilon: float, splits: Sequence[int]
) -> None:
    """Compute what is missing of a data set of settings tuned by hand."""
    validation = held_out(cached(name, folder, TUNING), TUNING)
    for unit, method in product(UNITS, SOURCES[name].by_hand):
        where = {"data": name, "unit": unit, "epsilon": epsilon}
        if all(rows.has(where | {"split": split, "method": method}) for split in splits):
            continue
        best = tuned(rows, where, validation, method)
        for split in splits:
            train = partial(
                by_hand, cached(name, folder, split), unit, epsilon, split, best, method
            )
            rows.get(where | {"split": split, "method": method}, train, best.text())


@cache
def cached(name: str, folder: Path, split: int) -> FederatedDataset:
    """Return a data set of a split."""
    return SOURCES[name].load(folder / SOURCES[name].file, split)


def main() -> None:
    """Parse the command line, compute what is missing, write table and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=existing, help="the folder with the files of the data sets")
    parser.add_argument(
        "--sources", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="NAME"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tables without a file, two splits, epsilon 3"
    )
    parser.add_argument(
        "--collect",
        action="store_true",
        help="rewrite table and figure from the rows that there are",
    )
    parser.add_argument("--automatic", action="store_true", help="leave tuning by hand out")
    parser.add_argument(
        "--panels",
        type=existing,
        metavar="CSV",
        help="print the table of panels of a file of scores, and means over cells",
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS), metavar="E")
    parser.add_argument(
        "--units", nargs="+", choices=get_args(Unit), default=list(UNITS), metavar="UNIT"
    )
    parser.add_argument("--splits", nargs="+", type=int, default=list(SPLITS), metavar="SPLIT")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/own_data"))
    arguments = parser.parse_args()
    if arguments.panels:
        scores = Scores(pd.read_csv(arguments.panels, keep_default_na=False))
        print(panel_table(scores), panel_means(scores), sep="\n")
        return
    if not (arguments.quick or arguments.collect or arguments.data):
        parser.error("--data is needed, except with --quick and --collect")
    logging.getLogger("fedmtl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names, epsilons, splits = arguments.sources, arguments.epsilons, arguments.splits
    if arguments.quick:
        names, epsilons, splits = [name for name in names if not SOURCES[name].file], (3.0,), (0, 1)
    rows, folder = (
        Rows(arguments.out / ("quick.csv" if arguments.quick else "rows.csv")),
        arguments.data or Path(),
    )
    if not arguments.collect:
        for name in names:
            measure(rows, name, folder, epsilons, splits, arguments.units)
        tuned_names = [] if arguments.automatic else names
        for epsilon, name in product(epsilons, tuned_names):
            measure_by_hand(rows, name, folder, epsilon, splits)
    if arguments.quick:
        print(short_table(Scores(rows.frame())))
        return
    scores = rows.frame()
    if scores.empty:
        parser.error(f"{rows.path} has no scores yet")
    scores.to_csv(HERE / "scores.csv", index=False, lineterminator="\n")
    report(Scores(scores))


if __name__ == "__main__":
    main()
