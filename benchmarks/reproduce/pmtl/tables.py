"""Tables and figures of the PMTL study, from the files that run.py left and from ../comparison/scores.csv.

finetuning.csv and curve.csv keep what the figures show, so that one problem can be computed without the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from report import STYLES
from scores import Score, epsilon_axis, epsilons_of, interval, mark, plot_line, read_scores
from settings import STUDIES, Study
from sweep import markdown, renew, replace_section

from fedmtl.report.canvas import drawing

TITLES = {
    "trained": "as trained", "vanilla": "vanilla", "mean": "mean-regularized", "kl": "symmetrized KL", "ewc": "EWC",
}  # fmt: skip
KINDS = tuple(TITLES)[1:]
SHOWN = ("Local", "PMTL", "PMTL, finetuned", "FedAvg", "FedAvg, finetuned")
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


def local_table(compared: Sequence[Score]) -> str:
    """Table 3: training alone, PMTL and FedAvg, and both finetuned."""
    own = {method: [score for score in compared if score.method == method] for method in SHOWN}
    epsilons = epsilons_of(own["PMTL"])
    lines = []
    for method, scores in own.items():
        line = ["Local, epsilon 0" if method == "Local" else method]
        for epsilon in epsilons:
            found = [score for score in scores if score.epsilon in (epsilon, 0.0)]
            line.append(f"{text(*interval(score.score for score in found))} {mark(found, own['Local'])}".strip())
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


def draw(cells: Rows, curves: Rows, compared: Sequence[Score], studies: list[Study], path: Path) -> None:
    """A row of panels a study: Figures 1, 2, 3 with 7, and 8 of the paper."""
    figures = (
        ("Figure 1", ("FedAvg", "PMTL")),
        ("Figures 3 and 7", ("PMTL", "FedAvg", "FedProx", "FedAvg, finetuned")),
        ("Figure 8", ("PMTL", "PP-SGD")),
    )
    with drawing(path, 19, 4.6 * len(studies)) as figure:
        for row, study in zip(figure.subplots(len(studies), 4, squeeze=False), studies, strict=True):
            own = [score for score in compared if score.setting == study.title]
            for axes, (title, methods) in zip(row[[0, 2, 3]], figures, strict=True):
                for method in ("Local", *methods):
                    label = "Local (no release)" if method == "Local" else method
                    found = [score for score in own if score.method == method]
                    plot_line(axes, found, label=label, **STYLES[method])
                if title == "Figure 1":
                    naive = [entry for entry in cells if entry["method"] == "concatenated"]
                    points = [
                        [float(entry[key]) for key in ("epsilon", "accuracy", "half_width")]
                        for entry in naive
                        if (entry["study"], entry["finetuning"]) == (study.name, "trained")
                    ]
                    finite = sorted(point for point in points if math.isfinite(point[0]))
                    if finite:
                        axes.errorbar(*zip(*finite, strict=True), color="C7", marker="x",
                                      label="all models released (naive)")  # fmt: skip
                epsilon_axis(axes, epsilons_of(own))
                axes.set(xlabel="epsilon of a client (delta 1e-5)", ylabel="test accuracy, mean over clients")
                axes.set_title(f"{title}: {study.name}")
                axes.legend()
            curve = [entry for entry in curves if entry["study"] == study.name]
            rounds, epsilons, losses = ([float(entry[key]) for entry in curve] for key in CURVE[1:])
            row[1].plot(rounds, losses, color="C1")
            row[1].set_ylabel("training loss of the personal models", color="C1")
            twin = row[1].twinx()
            twin.plot(rounds, epsilons, color="C0")
            twin.set_ylabel("epsilon spent", color="C0")
            twin.grid(False)
            row[1].set(xlabel="round", title=f"Figure 2: {study.name}, PMTL λ {study.lams[-1]:g}")


def write_tables(out: Path, here: Path) -> None:
    """Write finetuning.csv, curve.csv, the figure and the tables of README.md."""
    cells, compared = read(out), read_scores(here.parent / "comparison" / "scores.csv")
    if not cells:
        raise SystemExit(f"{out} holds no finished run.")
    kept = renew(here / "finetuning.csv", rows_of(cells), COLUMNS)
    curves = renew(here / "curve.csv", curve_of(cells), CURVE)
    studies = [study for study in STUDIES.values() if study.larger]
    draw(kept, curves, compared, studies, here / "figures.png")
    for study in studies:
        if (study.name, "FedAvg", math.inf) in cells:
            replace_section(here / "README.md", f"{study.name} table 1", finetuning_table(cells, study.name))
        replace_section(
            here / "README.md", f"{study.name} table 3", local_table([s for s in compared if s.setting == study.title])
        )
