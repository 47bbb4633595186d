"""The tables and the picture of what is recorded of the three servers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from intervals import interval
from sweep import markdown, replace_section

from fedmtl.report.canvas import drawing, legend_above

SERVERS = ("waiting", "deadline", "not waiting")
AMONG = ("waiting", "deadline")
"""The servers that the one that does not wait is compared with."""
NEAR = 0.01
"""How much less accurate than the chosen run of the server that waits a shorter run may be."""


def write_report(
    folder: Path, scores: Sequence[Mapping[str, str]], spreads: Sequence[Mapping[str, str]]
) -> None:
    """Writes the tables of README.md and the picture beside it.

    Args:
        folder: of the study.
        scores: rows of scores.csv.
        spreads: rows of spreads.csv.
    """
    page = folder / "README.md"
    every = frame(scores)
    for name in every["study"].unique():
        own = every[every["study"] == name]
        replace_section(page, str(name), by_method(own[own["chosen"] == 1]))
    replace_section(page, "near", near(every))
    replace_section(page, "slow", slow(every[every["chosen"] == 1]))
    replace_section(page, "chosen", chosen(every))
    replace_section(page, "spreads", by_law(frame(spreads)))
    draw(folder / "time.png", every)


def frame(rows: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """Returns rows with their numbers as numbers."""
    found = pd.DataFrame(list(rows))
    texts = {"study", "method", "server"}
    return found.astype({name: float for name in found.columns if name not in texts})


def noise(epsilon: float) -> str:
    """Returns an epsilon as tables have it."""
    if math.isinf(epsilon):
        return "none"
    return f"{epsilon:g}"


def of(rows: pd.DataFrame, server: str, column: str) -> pd.Series:
    """Returns a column of a server, by seed."""
    return rows[rows["server"] == server].set_index("seed")[column]


def mean(rows: pd.DataFrame, server: str, column: str) -> float:
    """Returns the mean over seeds."""
    return float(of(rows, server, column).mean())


def gain(rows: pd.DataFrame, over: str, column: str) -> str:
    """Returns by how much not waiting is better than another server, paired by seed."""
    pairs = of(rows, "not waiting", column) - of(rows, over, column)
    value, half = interval(pairs)
    mark = ""
    if abs(value) > half:
        mark = " ▲" if value > 0 else " ▼"
    return f"{value:+.3f} ± {half:.3f}{mark}"


def by_method(rows: pd.DataFrame) -> str:
    """Returns accuracies, their paired differences and times, by method and epsilon."""
    lines = []
    for (method, epsilon), own in rows.groupby(["method", "epsilon"], sort=False):
        cells = [f"{mean(own, server, 'accuracy'):.3f}" for server in SERVERS]
        cells += [gain(own, over, "accuracy") for over in AMONG]
        cells += [f"{mean(own, server, 'time'):,.0f}" for server in SERVERS]
        lines.append([method, noise(epsilon), *cells])
    titles = ["method", "epsilon", "waiting:", "deadline:", "not waiting:"]
    titles += ["less waiting:", "less deadline:"]
    return markdown([*titles, *(f"time, {server}:" for server in SERVERS)], lines)


def by_length(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of FedAvg on the digits at epsilons at which other lengths than the chosen
    one are scored."""
    own = rows[(rows["study"] == "digits") & (rows["method"] == "FedAvg, finetuned")]
    return own[own["epsilon"].isin(own[own["chosen"] == 0]["epsilon"])]


def near(rows: pd.DataFrame) -> str:
    """Returns the time of the shortest runs that are nearly as good as waiting."""
    own = by_length(rows)
    lines = []
    for epsilon, some in own.groupby("epsilon"):
        means = some.groupby(["server", "steps", "share", "chosen"])[["accuracy", "time"]].mean()
        means = means.reset_index()
        best = means[(means["server"] == "waiting") & (means["chosen"] == 1)]
        aim = float(best["accuracy"].iloc[0]) - NEAR
        times = []
        for server in SERVERS:
            good = means[(means["server"] == server) & (means["accuracy"] >= aim)]
            times.append(float(good["time"].min()))
        cells = ["never" if math.isnan(time) else f"{time:,.0f}" for time in times]
        lines.append([noise(float(epsilon)), f"{aim:.3f}", *cells])
    return markdown(["epsilon", "accuracy:", *(f"{server}:" for server in SERVERS)], lines)


def slow(rows: pd.DataFrame) -> str:
    """Returns the mean accuracies of the slow clients under FedAvg, finetuned."""
    lines = []
    own = rows[rows["method"] == "FedAvg, finetuned"]
    for (study, epsilon), some in own.groupby(["study", "epsilon"], sort=False):
        cells = [f"{mean(some, server, 'slow'):.3f}" for server in SERVERS]
        cells += [gain(some, over, "slow") for over in AMONG]
        lines.append([study, noise(epsilon), *cells])
    titles = ["data", "epsilon", "waiting:", "deadline:", "not waiting:"]
    return markdown([*titles, "less waiting:", "less deadline:"], lines)


def chosen(rows: pd.DataFrame) -> str:
    """Returns the chosen settings, a line for each method and epsilon."""
    lines = []
    picked = rows[(rows["chosen"] == 1) & (rows["seed"] == 0)]
    for (study, method, epsilon), own in picked.groupby(["study", "method", "epsilon"], sort=False):
        cells = []
        for server in SERVERS:
            (row,) = own[own["server"] == server].to_dict("records")
            text = f"clip {row['clip']:g}"
            if row["lam"]:
                text += f", lambda {row['lam']:g}"
            text += f", {row['steps']:g} steps"
            if row["share"] < 1:
                text += f", {row['share']:.0%} in time"
            cells.append(text)
        lines.append([study, method, noise(epsilon), *cells])
    return markdown(["data", "method", "epsilon", *SERVERS], lines)


def by_law(rows: pd.DataFrame) -> str:
    """Returns times and paired differences of the accuracy, by law of latencies and epsilon."""
    lines = []
    for (spread, factor, epsilon), own in rows.groupby(["spread", "slow", "epsilon"], sort=False):
        writers = "none"
        if factor > 1:
            writers = f"a tenth, {factor:g} times"
        cells = [f"{mean(own, server, 'time'):,.0f}" for server in SERVERS]
        cells += [gain(own, over, "accuracy") for over in AMONG]
        lines.append((spread, factor, epsilon, [f"{spread:g}", writers, noise(epsilon), *cells]))
    titles = ["sigma", "slow writers", "epsilon"]
    titles += [f"time, {server}:" for server in SERVERS]
    titles += ["not waiting, less waiting:", "less deadline:"]
    return markdown(titles, [line for *_, line in sorted(lines)])


def draw(file: Path, rows: pd.DataFrame) -> None:
    """Draws the accuracy after finetuning of runs of several lengths by their simulated time."""
    own = by_length(rows)
    epsilons = sorted(own["epsilon"].unique())
    with drawing(file, 3.2 * len(epsilons), 3.2) as figure:
        panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
        for (axes, epsilon), server in itertools.product(
            zip(panels, epsilons, strict=True), SERVERS
        ):
            some = own[(own["epsilon"] == epsilon) & (own["server"] == server)]
            points = []
            for _, run in some.groupby(["steps", "share"]):
                accuracy, half = interval(run["accuracy"])
                points.append((float(run["time"].mean()), accuracy, half))
            times, values, halves = zip(*sorted(points), strict=True)
            axes.errorbar(times, values, halves, marker="o", markersize=3, label=server)
            axes.set_xscale("log")
            title = "no noise" if math.isinf(epsilon) else f"epsilon {epsilon:g}"
            axes.set_title(title)
            axes.set_xlabel("simulated time (median latencies)")
        panels[0].set_ylabel("accuracy, finetuned")
        legend_above(figure)
