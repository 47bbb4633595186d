"""Scores, tables and figures of the PMTL study, from the files that run.py left and from ../comparison/scores.csv.

scores.csv and curve.csv keep what they show, so that one problem can be computed without the others.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from report import STYLES
from scores import Role, Score, plot, read_scores, renew_scores, table
from settings import STUDIES
from sweep import renew, replace_section

from fedmtl.report.canvas import drawing

KINDS = {
    "trained": "as trained", "vanilla": "vanilla", "mean": "mean-regularized", "kl": "symmetrized KL", "ewc": "EWC",
}  # fmt: skip
NAIVE = "all models released (naive)"
NAMES: dict[str, tuple[str, Role]] = {
    "PMTL": ("MTL", "published"), "FedAvg": ("global", "fedavg"), "concatenated": (NAIVE, "baseline"),
}  # fmt: skip
COMPARED = ("Local", "PMTL", "PMTL, finetuned", "FedAvg", "FedAvg, finetuned")
FIGURES = {
    "Figure 1": ("Local", "FedAvg", "PMTL", NAIVE),
    "Figures 3 and 7": ("Local", "PMTL", "FedAvg", "FedProx", "FedAvg, finetuned"),
    "Figure 8": ("Local", "PMTL", "PP-SGD"),
}
NOTE = "Test accuracy, means over clients, with 95% intervals over five seeds. Epsilon (delta 1e-5) protects a client."
CURVE = ("study", "seed", "round", "epsilon", "loss")


def scores_of(runs: Sequence[dict[str, Any]]) -> list[Score]:
    """The scores of PMTL and FedAvg as trained and after each kind of finetuning, and of the naive method."""
    found = []
    ordered = sorted(runs, key=lambda run: (run["study"], run["epsilon"], run["seed"]))
    for (method, (name, role)), kind in itertools.product(NAMES.items(), KINDS):
        for run in (run for run in ordered if run["method"] == method and kind in run):
            shown = name if name == NAIVE else f"{name}, {KINDS[kind]}"
            chosen = run.get("chosen", "") if kind == "trained" else run[f"{kind} chosen"]
            setting, key = STUDIES[run["study"]].title, (run["epsilon"], run["seed"])
            found.append(
                Score(setting, "accuracy", True, role, shown, *key, run[kind], chosen=chosen)
            )
    return found


def differences(own: Sequence[Score]) -> list[Score]:
    """MTL less global by kind of finetuning, of the same seeds."""
    values = {(score.method, score.epsilon, score.seed): score.score for score in own}
    found = []
    for kind in KINDS.values():
        for score in (score for score in own if score.method == f"MTL, {kind}"):
            other = values[f"global, {kind}", score.epsilon, score.seed]
            found.append(
                replace(
                    score,
                    method=f"MTL less global, {kind}",
                    score=score.score - other,
                    half=math.nan,
                )
            )
    return found


def curve_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figure 2: training loss and epsilon, a row for each study, seed and round."""
    return [
        {"study": run["study"], "seed": run["seed"], **entry}
        for run in runs
        for entry in run["rounds"]
    ]


def draw_rounds(curves: Sequence[dict[str, str]], path: Path) -> None:
    """Figure 2: training loss of the personal models and the epsilon that is spent, by round, a panel a study; means
    over seeds."""
    studies = list(dict.fromkeys(entry["study"] for entry in curves))
    with drawing(path, 4.5 * len(studies), 3.6) as figure:
        for axes, study in zip(
            figure.subplots(1, len(studies), squeeze=False)[0], studies, strict=True
        ):
            own = [entry for entry in curves if entry["study"] == study]
            rounds = list(dict.fromkeys(int(entry["round"]) for entry in own))
            epsilons, losses = (
                [
                    mean(float(entry[key]) for entry in own if int(entry["round"]) == at)
                    for at in rounds
                ]
                for key in ("epsilon", "loss")
            )
            axes.plot(rounds, losses, color="C1")
            axes.set(xlabel="round", title=f"{study}, PMTL λ {STUDIES[study].lams[-1]:g}")
            axes.set_ylabel("training loss of the personal models", color="C1")
            twin = axes.twinx()
            twin.plot(rounds, epsilons, color="C0")
            twin.set_ylabel("epsilon spent", color="C0")
            twin.grid(False)


def write_tables(out: Path, here: Path) -> None:
    """Write scores.csv, curve.csv, the figures and the tables of README.md."""
    runs = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    scores = renew_scores(
        here / "scores.csv", scores_of([run for run in runs if run["method"] != "curve"])
    )
    draw_rounds(renew(here / "curve.csv", curve_of([run for run in runs if run["method"] == "curve"]), CURVE),
                here / "rounds.png")  # fmt: skip
    compared = read_scores(here.parent / "comparison" / "scores.csv")
    drawn = []
    for study in (STUDIES["digits"], STUDIES["femnist"]):
        own, others = ([s for s in some if s.setting == study.title] for some in (scores, compared))
        for figure, methods in FIGURES.items():
            drawn += [
                replace(s, setting=f"{figure}: {study.name}")
                for s in (*others, *own)
                if s.method in methods
            ]
        local, ways = (
            [s for s in others if s.method == "Local"],
            [s for s in own if s.method != NAIVE],
        )
        for name, part in {
            "table 1": [*local, *ways],
            "differences": differences(ways),
            "table 3": [s for s in others if s.method in COMPARED],
        }.items():
            replace_section(
                here / "README.md", f"{study.name} {name}", table(part, study.title, noiseless=True)
            )
    plot(
        here / "figures.png",
        drawn,
        STYLES | {NAIVE: {"color": "C7", "marker": "x"}},
        NOTE,
        columns=len(FIGURES),
    )
