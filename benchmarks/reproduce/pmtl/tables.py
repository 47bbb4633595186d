"""Tables and figures of the PMTL study, from the files that run.py left and from ../comparison/table.csv.

finetuning.csv and curve.csv keep what the figures show, so that one problem can be computed without the others.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from report import STYLES
from scores import interval
from settings import STUDIES, Study
from sweep import markdown, read_csv, renew, replace_section

TITLES = {
    "trained": "as trained", "vanilla": "vanilla", "mean": "mean-regularized", "kl": "symmetrized KL", "ewc": "EWC",
}  # fmt: skip
KINDS = tuple(TITLES)[1:]
COLUMNS = ("study", "method", "epsilon", "finetuning", "seeds", "accuracy", "half_width")
CURVE = ("study", "round", "epsilon", "loss")
Rows = list[dict[str, str]]
Cells = dict[tuple[str, str, float], dict[int, dict[str, Any]]]


def read(out: Path) -> Cells:
    """Runs by (study, method, epsilon) and seed."""
    found: Cells = {}
    for file in sorted(out.glob("*.json")):
        run = json.loads(file.read_text())
        found.setdefault((run["study"], run["method"], run["epsilon"]), {})[run["seed"]] = run
    return found


def text(value: float, half: float = math.nan) -> str:
    return (f"{value:.3f}" if math.isnan(half) else f"{value:.3f} ± {half:.3f}").replace("0.", ".")


def name(epsilon: float) -> str:
    return "no privacy" if math.isinf(epsilon) else f"epsilon {epsilon:g}"


def finetuning_table(cells: Cells, study: str) -> str:
    """Table 1: MTL and global by kind of finetuning and epsilon; bold where the paired interval leaves out 0."""
    epsilons = sorted({e for s, method, e in cells if (s, method) == (study, "FedAvg")})
    lines = []
    for kind in TITLES:
        line = [TITLES[kind]]
        for epsilon in epsilons:
            own = {m: cells.get((study, m, epsilon), {}) for m in ("PMTL", "FedAvg")}
            both = sorted(own["PMTL"].keys() & own["FedAvg"].keys())
            difference, half = interval(own["PMTL"][seed][kind] - own["FedAvg"][seed][kind] for seed in both)
            for method, sign in (("PMTL", 1), ("FedAvg", -1)):
                shown = text(mean(own[method][seed][kind] for seed in both))
                line.append(f"**{shown}**" if sign * difference > half else shown)
        lines.append(line)
    titles = ["finetuning", *(f"{m}, {name(e)}:" for e in epsilons for m in ("MTL", "global"))]
    return markdown(titles, lines)


def local_table(compared: Rows, study: str) -> str:
    """Table 3: training alone, PMTL and FedAvg, and both finetuned."""
    cells = {(row["method"], float(row["epsilon"])): row for row in compared if row["study"] == study}
    epsilons = sorted({epsilon for method, epsilon in cells if method == "PMTL"})
    lines = []
    for method in ("Local", "PMTL", "PMTL, finetuned", "FedAvg", "FedAvg, finetuned"):
        line = ["Local, epsilon 0" if method == "Local" else method]
        for epsilon in epsilons:
            row = cells[method, epsilon]
            gain, half = float(row["against_local"]), float(row["against_local_half_width"])
            mark = "" if not abs(gain) > half else " ▲" if gain > 0 else " ▼"
            line.append(text(float(row["score"]), float(row["half_width"])) + mark)
        lines.append(line)
    return markdown(["method", *(f"{name(e)}:" for e in epsilons)], lines)


def rows_of(cells: Cells) -> list[dict[str, Any]]:
    """A row for each study, method, epsilon and way of finetuning."""
    rows = []
    for (study, method, epsilon), runs in sorted(cells.items()):
        for kind in (key for key in TITLES if key in next(iter(runs.values()))):
            value, half = interval(run[kind] for run in runs.values())
            rows.append({"study": study, "method": method, "epsilon": epsilon, "finetuning": kind, "seeds": len(runs),
                         "accuracy": value, "half_width": half})  # fmt: skip
    return rows


def curve_of(cells: Cells) -> list[dict[str, Any]]:
    """Figure 2: the means over seeds of training loss and epsilon, a row for each study and round."""
    rows = []
    for (study, method, _), runs in sorted(cells.items()):
        for entries in zip(*(run["rounds"] for run in runs.values()), strict=True) if method == "curve" else ():
            rows.append({"study": study, **{key: mean(entry[key] for entry in entries) for key in CURVE[1:]}})
    return rows


def line(axis: Any, rows: Rows, key: str, study: str, method: str, style: tuple[str, str, str], label: str) -> None:
    """Accuracy by epsilon with 95% intervals."""
    found = [row for row in rows if (row["study"], row["method"]) == (study, method)]
    points = sorted((float(row["epsilon"]), float(row[key]), float(row["half_width"])) for row in found)
    points = [point for point in points if point[0] < math.inf]
    if points:
        color, dash, marker = style
        epsilons, means, halves = zip(*points, strict=True)
        axis.errorbar(epsilons, means, halves, color=color, linestyle=dash, marker=marker, markersize=5, label=label)


def dress(axis: Any, title: str) -> None:
    axis.set_xscale("log")
    axis.set_xticks([0.3, 1, 3, 10], labels=["0.3", "1", "3", "10"])
    axis.minorticks_off()
    axis.set(xlabel="epsilon of a client (delta 1e-5)", ylabel="test accuracy, mean over clients")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def draw(cells: Rows, curves: Rows, compared: Rows, studies: list[Study], path: Path) -> None:
    """A row of panels a study: Figures 1, 2, 3 with 7, and 8 of the paper."""
    figure, axes = plt.subplots(len(studies), 4, figsize=(19, 4.6 * len(studies)), squeeze=False, layout="constrained")
    naive = [row for row in cells if row["method"] == "concatenated" and row["finetuning"] == "trained"]
    for row, study in zip(axes, studies, strict=True):
        local = next(float(r["score"]) for r in compared if (r["study"], r["method"]) == (study.name, "Local"))
        for axis in (row[0], row[2], row[3]):
            axis.axhline(local, color="0.35", linestyle="--", label="Local (no release)")
        line(row[0], compared, "score", study.name, "FedAvg", STYLES["FedAvg"], "FedAvg")
        line(row[0], compared, "score", study.name, "PMTL", STYLES["PMTL"], "PMTL")
        line(row[0], naive, "accuracy", study.name, "concatenated", ("C7", "-", "x"), "all models released (naive)")
        dress(row[0], f"Figure 1: {study.name}")
        curve = [entry for entry in curves if entry["study"] == study.name]
        rounds, epsilons, losses = ([float(entry[key]) for entry in curve] for key in CURVE[1:])
        row[1].plot(rounds, losses, color="C1")
        row[1].set_ylabel("training loss of the personal models", color="C1")
        twin = row[1].twinx()
        twin.plot(rounds, epsilons, color="C0")
        twin.set_ylabel("epsilon spent", color="C0")
        row[1].set_xlabel("round")
        row[1].set_title(f"Figure 2: {study.name}, PMTL λ {study.lams[-1]:g}", fontsize=10)
        for method in ("PMTL", "FedAvg", "FedProx", "FedAvg, finetuned"):
            line(row[2], compared, "score", study.name, method, STYLES[method], method)
        dress(row[2], f"Figures 3 and 7: {study.name}")
        for method in ("PMTL", "PP-SGD"):
            line(row[3], compared, "score", study.name, method, STYLES[method], method)
        dress(row[3], f"Figure 8: {study.name}")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def write_tables(out: Path, here: Path) -> None:
    """Write finetuning.csv, curve.csv, the figure and the tables of README.md."""
    cells, compared = read(out), read_csv(here.parent / "comparison" / "table.csv")
    if not cells:
        raise SystemExit(f"{out} holds no finished run.")
    kept = renew(here / "finetuning.csv", rows_of(cells), COLUMNS)
    curves = renew(here / "curve.csv", curve_of(cells), CURVE)
    studies = [study for study in STUDIES.values() if study.larger]
    draw(kept, curves, compared, studies, here / "figures.png")
    for study in studies:
        if (study.name, "FedAvg", math.inf) in cells:
            replace_section(here / "README.md", f"{study.name} table 1", finetuning_table(cells, study.name))
        replace_section(here / "README.md", f"{study.name} table 3", local_table(compared, study.name))
