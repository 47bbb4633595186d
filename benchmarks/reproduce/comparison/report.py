"""Tables and figure of the comparison, from the files that run.py left."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from scores import Role, Score, by_client, difference, interval, read_scores, write_scores
from settings import STUDIES, Study
from sweep import markdown, renew, replace_section

COLUMNS = (
    "study", "method", "epsilon", "seeds", "score", "half_width", "worst_tenth", "against_local",
    "against_local_half_width", "against_finetuned", "against_finetuned_half_width", "better", "equal", "worse",
    "chosen",
)  # fmt: skip
REFERENCE = "FedAvg, finetuned"


ROLES: dict[str, Role] = {
    "Local": "local", "FedAvg": "fedavg", "FedAvg, finetuned": "fedavg", "FedProx": "fedavg", "PMTL": "published",
    "PMTL, finetuned": "published", "MP-MTL": "published",
}  # fmt: skip


def scores_of(out: Path) -> list[Score]:
    """The scores of the runs in ``out``, in the order of studies, methods, epsilons and seeds."""
    runs = [json.loads(file.read_text()) for file in out.glob("*.json")]
    local = {(run["study"], run["seed"]): run["clients"] for run in runs if run["method"] == "Local"}
    found = []
    for study in STUDIES.values():
        order = list(study.methods())
        own = [run for run in runs if run["study"] == study.name and (study.name, run["seed"]) in local]
        for run in sorted(own, key=lambda run: (order.index(run["method"]), run["epsilon"], run["seed"])):
            found.append(
                Score(
                    setting=study.title,
                    metric=study.metric,
                    larger=study.larger,
                    role=ROLES.get(run["method"], "baseline"),
                    method=run["method"],
                    epsilon=run["epsilon"],
                    seed=run["seed"],
                    score=run["score"],
                    chosen=run["chosen"],
                    **by_client(run["clients"], local[study.name, run["seed"]], larger=study.larger),
                )
            )
    return found


def collect(scores: list[Score]) -> list[dict[str, Any]]:
    """A row for each study, epsilon and method; Local, which costs no epsilon, once for each epsilon."""
    found: dict[tuple[str, str, float], list[Score]] = {}
    for score in scores:
        found.setdefault((score.setting, score.method, score.epsilon), []).append(score)
    rows = []
    for study in STUDIES.values():
        local = found.get((study.title, "Local", 0.0), [])
        for epsilon in sorted({e for title, _, e in found if title == study.title} - {0.0}):
            reference = found.get((study.title, REFERENCE, epsilon), [])
            for method in study.methods():
                runs = local if method == "Local" else found.get((study.title, method, epsilon), [])
                if not runs:
                    continue
                score, half = interval(run.score for run in runs)
                row = {"study": study.name, "method": method, "epsilon": epsilon, "seeds": len(runs), "score": score,
                       "half_width": half}  # fmt: skip
                for key, other in (("local", local), ("finetuned", reference)):
                    if other:
                        row[f"against_{key}"], row[f"against_{key}_half_width"] = difference(runs, other)
                for key in ("worst_tenth", "better", "equal", "worse"):
                    row[key] = mean(getattr(run, key) for run in runs)
                row["chosen"] = "; ".join(run.chosen for run in runs)
                rows.append(row)
    return rows


def mark(study: Study, row: dict[str, Any], key: str) -> str:
    """▲ better and ▼ worse than the other method where the interval of the paired difference leaves out 0."""
    difference, half = row.get(f"against_{key}", 0.0), row.get(f"against_{key}_half_width", math.nan)
    if not abs(difference) > half:
        return ""
    return "▲" if (difference > 0) == study.larger else "▼"


def shown(study: Study, value: float) -> str:
    """Accuracies with three digits, squared errors in thousandths."""
    return f"{value:.3f}".replace("0.", ".", 1) if study.larger else f"{1000 * value:.2f}"


def table_of(rows: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    """A line a method, a column an epsilon; empty where there is no run."""
    epsilons = sorted({row["epsilon"] for row in rows})
    found = {(row["method"], row["epsilon"]): cell(row) for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    lines = [[method, *(found.get((method, epsilon), "") for epsilon in epsilons)] for method in methods]
    return markdown(["method", *(f"epsilon {e:g}:" for e in epsilons)], lines)


def score_table(study: Study, rows: list[dict[str, Any]]) -> str:
    """Mean, half-width of its interval, marks against Local and FedAvg with finetuning."""

    def cell(row: dict[str, Any]) -> str:
        others = [other["score"] for other in rows if other["epsilon"] == row["epsilon"]]
        text = f"{shown(study, row['score'])} ± {shown(study, row['half_width'])}"
        text = f"**{text}**" if row["score"] == (max if study.larger else min)(others) else text
        if row["method"] == "Local":
            return text
        first, second = (mark(study, row, key) or "·" for key in ("local", "finetuned"))
        return f"{text} {first}{second if row['method'] != REFERENCE else ''}"

    return table_of(rows, cell)


def client_table(study: Study, rows: list[dict[str, Any]]) -> str:
    """Shares of clients better and worse than Local, and the worst tenth."""

    def cell(row: dict[str, Any]) -> str:
        tenth = shown(study, row["worst_tenth"])
        return tenth if row["method"] == "Local" else f"{row['better']:.0%} / {row['worse']:.0%}, {tenth}"

    return table_of(rows, cell)


STYLES = {
    "Local": ("0.35", "--", ""), "FedAvg": ("C0", "-", "o"), "FedProx": ("C0", ":", "v"), "IFCA": ("C9", "-", "P"),
    "FedAvg, finetuned": ("C3", "-", "D"), "PMTL": ("C2", "-", "o"), "PMTL, finetuned": ("C2", "--", "D"),
    "Ditto": ("C1", "-", "s"), "APFL": ("C4", "-", "^"), "pFedMe": ("C5", "-", "X"), "PP-SGD": ("C6", "-", "*"),
    "FedRep": ("C7", "-", "h"), "MP-MTL": ("C8", "-", "d"),
}  # fmt: skip


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel a study: the score by epsilon, with 95% intervals."""
    studies = [study for study in STUDIES.values() if any(row["study"] == study.name for row in rows)]
    figure, axes = plt.subplots(1, len(studies), figsize=(5.2 * len(studies), 5.4), squeeze=False, layout="constrained")
    for axis, study in zip(axes[0], studies, strict=True):
        for place, method in enumerate(study.methods()):
            own = [row for row in rows if (row["study"], row["method"]) == (study.name, method)]
            if not own:
                continue
            color, line, marker = STYLES[method]
            scale = 1.0 if study.larger else 1000.0
            if method == "Local":
                axis.axhline(scale * own[0]["score"], color=color, linestyle=line, label="Local (no release)")
                continue
            axis.errorbar(
                [row["epsilon"] * 1.02 ** (place - 6) for row in own],
                [scale * row["score"] for row in own],
                [scale * row["half_width"] for row in own],
                color=color, linestyle=line, marker=marker, markersize=5, linewidth=1.4, elinewidth=0.7, label=method,
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xticks([0.3, 1, 3, 10], labels=["0.3", "1", "3", "10"])
        axis.minorticks_off()
        axis.set_xlabel(f"epsilon of a {study.unit} (delta 1e-5)")
        axis.set_ylabel("test accuracy, mean over clients" if study.larger else "test MSE x 1000, mean over schools")
        axis.set_title(study.title, fontsize=10)
        axis.grid(alpha=0.3)
        if not study.larger:
            local = next(1000 * row["score"] for row in rows if (row["study"], row["method"]) == (study.name, "Local"))
            least = min(1000 * (row["score"] - row["half_width"]) for row in rows if row["study"] == study.name)
            axis.set_ylim(0.99 * least, 1.04 * local)
    handles = {
        label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=7, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_report(out: Path, here: Path) -> None:
    """Write scores.csv, table.csv, the figure and the tables of README.md from ``out``; keep other studies."""
    found = scores_of(out)
    if not found:
        raise SystemExit(f"{out} holds no finished run.")
    file, settings = here / "scores.csv", {score.setting for score in found}
    kept = [score for score in read_scores(file) if score.setting not in settings] if file.exists() else []
    write_scores(file, [*kept, *found])
    rows = [numbers(row) for row in renew(here / "table.csv", collect([*kept, *found]), COLUMNS)]
    draw(rows, here / "epsilon.png")
    for study in STUDIES.values():
        own = [row for row in rows if row["study"] == study.name]
        if own:
            replace_section(here / "README.md", study.name, score_table(study, own))
            replace_section(here / "README.md", f"{study.name} clients", client_table(study, own))


def numbers(row: dict[str, str]) -> dict[str, Any]:
    """A row of table.csv with its numbers."""
    words = ("study", "method", "chosen")
    return {key: value if key in words else float(value or "nan") for key, value in row.items()}
