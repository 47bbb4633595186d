"""Tables and figure of the comparison, from the files that run.py left and from scores.csv."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from scores import Role, Score, by_client, by_epsilon, plot, renew_scores, table
from settings import STUDIES, Study
from sweep import replace_section

REFERENCE = "FedAvg, finetuned"
ROLES: dict[str, Role] = {
    "Local": "local", "FedAvg": "fedavg", "FedAvg, finetuned": "fedavg",
    "FedProx": "fedavg", "Automatic": "new", "PMTL": "published",
    "PMTL, finetuned": "published", "MP-MTL": "published",
}  # fmt: skip


def scores_of(out: Path) -> list[Score]:
    """The scores of the runs in ``out``, in the order of studies, methods, epsilons and seeds."""
    runs = [json.loads(file.read_text()) for file in out.glob("*.json")]
    local = {
        (run["study"], run["seed"]): run["clients"] for run in runs if run["method"] == "Local"
    }
    found = []
    for study in STUDIES.values():
        order = list(study.methods())
        own = [
            run for run in runs if run["study"] == study.name and (study.name, run["seed"]) in local
        ]
        for run in sorted(
            own, key=lambda run: (order.index(run["method"]), run["epsilon"], run["seed"])
        ):
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
                    **by_client(
                        run["clients"], local[study.name, run["seed"]], larger=study.larger
                    ),
                )
            )
    return found


def shown(study: Study, value: float) -> str:
    """Accuracies with three digits, squared errors in thousandths."""
    return f"{value:.3f}".replace("0.", ".", 1) if study.larger else f"{1000 * value:.2f}"


def client_table(study: Study, scores: Sequence[Score]) -> str:
    """Shares of clients better and worse than Local, and the worst tenth."""

    def cell(found: Sequence[Score], epsilon: float) -> str:
        better, worse, tenth = (
            mean(getattr(s, key) for s in found) for key in ("better", "worse", "worst_tenth")
        )
        shares = "" if found[0].method == "Local" else f"{better:.0%} / {worse:.0%}, "
        return shares + shown(study, tenth)

    return by_epsilon(scores, cell)


STYLES = {
    method: {"color": color, "linestyle": line, "marker": marker}
    for method, (color, line, marker) in {
        "Local": ("0.35", "--", ""), "FedAvg": ("C0", "-", "o"), "FedProx": ("C0", ":", "v"), "IFCA": ("C9", "-", "P"),
        "FedAvg, finetuned": ("C3", "-", "D"),
        "Automatic": ("#0000ff", "-", "o"), "PMTL": ("C2", "-", "o"), "PMTL, finetuned": ("C2", "--", "D"),
        "Ditto": ("C1", "-", "s"), "APFL": ("C4", "-", "^"), "pFedMe": ("C5", "-", "X"), "PP-SGD": ("C6", "-", "*"),
        "FedRep": ("C7", "-", "h"), "MP-MTL": ("C8", "-", "d"),
    }.items()
}  # fmt: skip
NOTE = (
    "Accuracy and mean squared error of test rows, means over clients, with 95% intervals over seeds. Local releases "
    "nothing. Epsilon (delta 1e-5) protects a client, in the panel that says so a record."
)


def write_report(out: Path, here: Path) -> None:
    """Write scores.csv, the figure and the tables of README.md from ``out``; keep other studies."""
    scores = renew_scores(here / "scores.csv", scores_of(out))
    drawn = [
        score for study in STUDIES.values() for score in scores if score.setting == study.title
    ]
    plot(here / "epsilon.png", drawn, STYLES, NOTE)
    for study in STUDIES.values():
        own = [score for score in scores if score.setting == study.title]
        if own:
            text = table(own, study.title, text=lambda value, study=study: shown(study, value),
                         against=("Local", REFERENCE))  # fmt: skip
            replace_section(here / "README.md", study.name, text)
            replace_section(here / "README.md", f"{study.name} clients", client_table(study, own))
