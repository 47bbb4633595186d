"""Tables and plots of MP-MTL, from the rows that run.py keeps."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from intervals import interval
from scores import AS_PUBLISHED, Role, Score, difference, plot, renew_scores, table
from sweep import markdown, replace_section, write_csv

from fedmtl.report.canvas import drawing

Row = dict[str, Any]
COLUMNS = ("part", "method", "epsilon", "lam", "rho", "momentum", "alpha", "q", "tasks", "deals", "nmse",
           "half", "note")  # fmt: skip
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
PROBLEMS = {"low_rank": "low rank", "group_sparse": "group sparse", "school": "School"}
POOLED = "pooled nMSE"
LABELS = f"low rank, two classes, {AS_PUBLISHED}"
ALONE = "STL"
NAMES = {
    "MP-MTL-LR 1.5": "MP-MTL-LR",
    "MP-MTL-LR 0.25": "MP-MTL-LR, ρ .25",
    "MP-MTL-GS 1.5": "MP-MTL-GS",
    "MP-MTL-GS 0.25": "MP-MTL-GS, ρ .25",
    "DP-AGGR record_group": "DP-AGGR",
    "DP-AGGR task": "DP-AGGR, noise for a task",
    "DP-MTRL record_group": "DP-MTRL",
    "DP-MTRL task": "DP-MTRL, noise for a task",
    "DP-MTRL own task": "DP-MTRL, own models",
}
SHARED = ("MP-MTL-LR", "MP-MTL-GS", "MP-MTL-LR, ρ .25", "MP-MTL-GS, ρ .25")
STYLES: dict[str, dict[str, Any]] = {
    **{name: {"color": COLOURS[place // 2], "marker": "so"[place % 2], "linestyle": ("--", "-")[place % 2]}
       for place, name in enumerate(("MP-MTL-LR, ρ .25", "MP-MTL-LR", "MP-MTL-GS, ρ .25", "MP-MTL-GS"))},
    **{name: {"color": COLOURS[2 + place], "marker": "^", "linestyle": ":"}
       for place, name in enumerate(("DP-AGGR", "DP-AGGR, noise for a task", "DP-MTRL"))},
    **{name: {"color": "#4d5158", "linewidth": 1.2, "linestyle": style}
       for name, style in ((ALONE, "-"), ("MTL-LR", "--"), ("MTL-GS", ":"))},
}  # fmt: skip


def write(parts: dict[str, list[Row]], here: Path) -> None:
    """Every table and plot of the parts that are there."""
    readme, rows = here / "README.md", []
    scores: dict[str, list[Score]] = {
        name: scores_of(parts[name], f"{PROBLEMS[name]}, {AS_PUBLISHED}")
        for name in PROBLEMS
        if name in parts
    }
    if scores:
        replace_section(readme, "claims", claims_table(scores))
        nmse = [score for own in scores.values() for score in own if score.metric == "nMSE"]
        plot(
            here / "tradeoff.png",
            nmse,
            STYLES,
            "Means over deals; STL shares nothing, MTL has no privacy. Epsilon protects a task.",
        )
    for name, own in scores.items():
        main = [score for score in own if score.metric != POOLED]
        replace_section(readme, name, table(main, main[0].setting, noiseless=True))
        renew_scores(here / "scores.csv", own)
    grids = {name: parts[f"grid_{name}"] for name in PROBLEMS if f"grid_{name}" in parts}
    for name, given in grids.items():
        rows += [{**r, "part": f"grid_{name}"} for r in given]
    if grids:
        replace_section(readme, "grid", grid_table(grids))
        replace_section(readme, "variants", variants_table(grids))
    if "labels" in parts:
        own = label_scores(parts["labels"])
        renew_scores(here / "scores.csv", own)
        replace_section(readme, "labels", table(own, own[0].setting, noiseless=True))
    if "allocation" in parts:
        means = averaged(parts["allocation"], ("rho", "momentum", "epsilon", "alpha", "q"))
        rows += [{**r, "part": "allocation", "method": "MP-MTL-LR"} for r in means]
        plot_allocation(means, here / "allocation.png")
        replace_section(readme, "allocation", allocation_table(parts["allocation"]))
    if "noise" in parts:
        rows += [
            {**r, "part": "noise", "note": f"noise to signal {r['ratio'][-1]:.4g}"}
            for r in parts["noise"]
        ]
        plot_noise(parts["noise"], here / "noise.png")
        replace_section(readme, "noise", noise_table(parts["noise"]))
    if "tasks" in parts:
        means = averaged(parts["tasks"], ("method", "epsilon", "tasks"))
        rows += [{**r, "part": "tasks"} for r in means]
        plot_tasks(means, here / "tasks.png")
        replace_section(readme, "tasks", tasks_table(parts["tasks"]))
    if "heat" in parts:
        plot_models(parts["heat"][0], here / "models.png")
        plot_covariance(parts["heat"][1], here / "covariance.png")
    write_csv(here / "table.csv", rows, COLUMNS)


def text(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if value < 100 else f"{value:.3g}"


def name_of(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"{epsilon:g}"


def scores_of(rows: list[Row], setting: str) -> list[Score]:
    """The score of every deal; of MP-MTL and of STL the pooled one, too."""
    found = []
    for r in rows:
        name, values = NAMES.get(r["method"], r["method"]), {"nMSE": r["deals"]}
        if name in (ALONE, *SHARED):
            values[POOLED] = r["pooled_deals"]
        found += [
            Score(setting, metric, False, role_of(name), name, 0.0 if role_of(name) == "local" else r["epsilon"], deal,
                  value, chosen=r["note"])
            for metric, deals in values.items()
            for deal, value in enumerate(deals)
        ]  # fmt: skip
    return found


def label_scores(rows: list[Row]) -> list[Score]:
    """The mean area under the ROC curve in every deal of tasks of two classes."""
    found, methods = [], list(dict.fromkeys(r["method"] for r in rows))
    for r in sorted(rows, key=lambda r: methods.index(r["method"])):
        name = NAMES.get(r["method"], r["method"])
        epsilon = 0.0 if role_of(name) == "local" else r["epsilon"]
        found.append(Score(LABELS, "aAUC", True, role_of(name), name, epsilon, r["deal"], r["auc"]))
    return found


def role_of(name: str) -> Role:
    return "local" if name.startswith(ALONE) else "published" if name in SHARED else "baseline"


def averaged(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    """Means over deals of rows that agree in ``keys``, with halves of their 95% intervals."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for r in rows:
        groups.setdefault(tuple(r.get(k) for k in keys), []).append(r["nmse"])
    found = []
    for key, values in groups.items():
        middle, half = interval(values)
        found.append(
            {
                **dict(zip(keys, key, strict=True)),
                "nmse": middle,
                "half": half,
                "deals": len(values),
            }
        )
    return found


def paired(own: list[Row], other: list[Row]) -> tuple[float, float]:
    """The mean of the differences own - other over their common deals, and half its 95% interval."""
    others = {r["deal"]: r["nmse"] for r in other}
    return interval(r["nmse"] - others[r["deal"]] for r in own)


def claims_table(problems: dict[str, list[Score]]) -> str:
    """Where MP-MTL is better and where it is worse than STL, both by the 95% interval of the paired difference."""
    lines = []
    for name, scores in problems.items():
        for method in SHARED:
            own, pooled = (differences(scores, method, metric) for metric in ("nMSE", POOLED))
            best, worst = min(own, key=lambda e: own[e][0]), max(own, key=lambda e: own[e][0])
            alone = mean(s.score for s in scores if (s.method, s.metric) == (ALONE, "nMSE"))
            lines.append(
                [PROBLEMS[name], method, _where(own, -1), _where(own, 1), _difference(worst, *own[worst]),
                 _difference(best, *own[best]), f"{own[best][0] / alone:+.0%}", _where(pooled, -1), _where(pooled, 1)]
            )  # fmt: skip
    titles = ["problem", "method", "better at ε", "worse at ε", "largest difference:", "best difference:", "of STL:",
              "pooled: better at ε", "worse at ε"]  # fmt: skip
    return markdown(titles, lines)


def differences(scores: list[Score], method: str, metric: str) -> dict[float, tuple[float, float]]:
    """The paired difference of a method to STL with half its 95% interval, by epsilon."""
    alone = [s for s in scores if (s.method, s.metric) == (ALONE, metric)]
    own = [
        s for s in scores if (s.method, s.metric) == (method, metric) and math.isfinite(s.epsilon)
    ]
    return {
        e: difference([s for s in own if s.epsilon == e], alone)
        for e in dict.fromkeys(s.epsilon for s in own)
    }


def _where(found: dict[float, tuple[float, float]], sign: int) -> str:
    """The budgets at which the interval of a difference lies below (-1) or above 0 (1)."""
    clear = [epsilon for epsilon, (value, half) in found.items() if sign * value > half]
    return "all" if len(clear) == len(found) else ", ".join(f"{e:g}" for e in clear) or "none"


def _difference(epsilon: float, value: float, half: float) -> str:
    return f"{value:+.4f} [{value - half:+.4f}, {value + half:+.4f}] (ε {epsilon:g})"


def grid_table(grids: dict[str, list[Row]]) -> str:
    """nMSE over that of STL, low rank, by lambda, rho and epsilon."""
    lines = []
    for name, rows in grids.items():
        alone = next(r["nmse"] for r in rows if r["method"] == ALONE)
        own = [r for r in rows if r["method"] == "MP-MTL-LR"]
        for lam in dict.fromkeys(r["lam"] for r in own):
            for rho in dict.fromkeys(r["rho"] for r in own):
                cells = [r["nmse"] / alone for r in own if (r["lam"], r["rho"]) == (lam, rho)]
                shown = [
                    f"**{c:.2f}**" if c < 0.995 else f"{c:.2f} ✗" if c > 1.005 else f"{c:.2f}"
                    for c in cells
                ]
                lines.append([PROBLEMS[name], f"{lam:g}", f"{rho:g}", *shown])
    epsilons = list(
        dict.fromkeys(r["epsilon"] for rows in grids.values() for r in rows if "epsilon" in r)
    )
    titles = [
        "problem",
        "λ / K:",
        "ρ:",
        *(f"ε {name_of(e)}:" if math.isfinite(e) else "no noise:" for e in epsilons),
    ]
    return markdown(titles, lines)


def variants_table(grids: dict[str, list[Row]]) -> str:
    lines = []
    for name, rows in grids.items():
        alone = next(r["nmse"] for r in rows if r["method"] == ALONE)
        base = [r for r in rows if r.get("lam") == 0.1]
        kinds = dict.fromkeys(r["method"] for r in rows if r["method"] != ALONE)
        for rho in (1.5, 0.25):
            for kind in kinds:
                own = [
                    r
                    for r in (base if "MP-MTL" in kind else rows)
                    if r["method"] == kind and r["rho"] == rho
                ]
                lines.append(
                    [PROBLEMS[name], f"{rho:g}", kind, *(f"{r['nmse'] / alone:.3f}" for r in own)]
                )
    epsilons = list(
        dict.fromkeys(r["epsilon"] for rows in grids.values() for r in rows if "epsilon" in r)
    )
    titles = [
        "problem",
        "ρ:",
        "variant",
        *(f"ε {name_of(e)}:" if math.isfinite(e) else "no noise:" for e in epsilons),
    ]
    return markdown(titles, lines)


WAYS = {
    "none": "no momentum, α",
    "nesterov": "Nesterov, α",
    "strongly_convex": "strongly convex, Q",
}


def allocation_table(rows: list[Row]) -> str:
    """The best exponent beside the uniform allocation, with the paired difference over deals."""
    lines = []
    for momentum, title in WAYS.items():
        key, flat = "alpha", 0.0
        if momentum == "strongly_convex":
            key, flat = "q", 1.0
        for rho in (1.5, 0.25):
            for epsilon in sorted({r["epsilon"] for r in rows}):
                own = [
                    r
                    for r in rows
                    if (r["momentum"], r["rho"], r["epsilon"]) == (momentum, rho, epsilon)
                ]
                means = averaged(own, (key,))
                best = min(means, key=lambda r: r["nmse"])[key]
                there = [r for r in own if r[key] == best]
                uniform = [r for r in own if r[key] == flat]
                gain = ""
                if best != flat:
                    gain = "{:+.4f} ± {:.4f}".format(*paired(there, uniform))
                cells = [
                    f"{text(r['nmse'])} ± {text(r['half'])}"
                    for r in averaged(there + uniform, (key,))
                ]
                lines.append(
                    [title, f"{rho:g}", f"{epsilon:g}", f"{best:.2g}", cells[0], cells[-1], gain]
                )
    titles = [
        "allocation",
        "ρ:",
        "ε:",
        "best exponent:",
        "nMSE there:",
        "nMSE uniform:",
        "difference:",
    ]
    return markdown(titles, lines)


def noise_table(rows: list[Row]) -> str:
    epsilons = list(dict.fromkeys(r["epsilon"] for r in rows))
    lines = []
    for method, title in (("MP-MTL", "MP-MTL, covariance"), ("DP-MTRL record_group", "DP-MTRL, models"),
                          ("DP-MTRL task", "DP-MTRL, models, noise for a task")):  # fmt: skip
        own = [r["ratio"][0] for r in rows if r["method"] == method]
        lines.append([title, *(f"{v:.2g}" if v < 1000 else f"{v:.1e}" for v in own)])
    return markdown(["noise over signal, first iteration", *(f"ε {e:g}:" for e in epsilons)], lines)


def tasks_table(rows: list[Row]) -> str:
    """Means by number of tasks, marked where the paired difference to STL leaves out 0."""
    counts = list(dict.fromkeys(r["tasks"] for r in rows))
    alone = [r for r in rows if r["method"] == ALONE]
    lines = []
    for method, epsilon in dict.fromkeys((r["method"], r["epsilon"]) for r in rows):
        cells = []
        for count in counts:
            own = [
                r
                for r in rows
                if (r["method"], r["epsilon"], r["tasks"]) == (method, epsilon, count)
            ]
            (row,) = averaged(own, ("tasks",))
            cells.append(f"{text(row['nmse'])} ± {text(row['half'])}")
            if method != ALONE:
                cells[-1] += _mark(*paired(own, [r for r in alone if r["tasks"] == count]))
        lines.append(
            [NAMES.get(method, method), "" if method == ALONE else name_of(epsilon), *cells]
        )
    return markdown(["nMSE of the first 20 tasks", "ε:", *(f"{c} tasks:" for c in counts)], lines)


def _mark(value: float, half: float) -> str:
    """Better or worse, where the interval of a difference of errors leaves out 0."""
    if abs(value) <= half:
        return ""
    if value < 0:
        return " ▲"
    return " ▼"


def plot_allocation(rows: list[Row], path: Path) -> None:
    """Figure 4."""
    with drawing(
        path,
        9.0,
        3.8,
        "Low rank; 5 deals x 10 repetitions, 95% intervals. The composed total is that of every allocation.",
    ) as figure:
        panels = figure.subplots(1, 2)
        for axes, key, label in (
            (panels[0], "alpha", "α of ε_t ∝ t^α"),
            (panels[1], "q", "Q of ε_t ∝ Q^-t"),
        ):
            axes.set(xlabel=label, title="convex" if key == "alpha" else "strongly convex")
            place = 0
            for rho in (1.5, 0.25):
                for epsilon in sorted({r["epsilon"] for r in rows}):
                    for momentum, style in (
                        ("none", "o-"),
                        ("nesterov", "s--"),
                        ("strongly_convex", "d-"),
                    ):
                        own = [
                            r
                            for r in rows
                            if (r["momentum"], r["rho"], r["epsilon"]) == (momentum, rho, epsilon)
                        ]
                        own = [r for r in own if r[key] is not None]
                        if own:
                            name = {"none": ", no momentum", "nesterov": ", Nesterov"}.get(
                                momentum, ""
                            )
                            axes.errorbar([r[key] for r in own], [r["nmse"] for r in own],
                                          [r["half"] for r in own], fmt=style, markersize=3,
                                          color=COLOURS[place], label=f"ε {epsilon:g}, ρ {rho:g}{name}")  # fmt: skip
                    place += 1
            axes.legend(fontsize=6, framealpha=0.9, edgecolor="white")
        panels[0].set_ylabel("nMSE")


def plot_noise(rows: list[Row], path: Path) -> None:
    """Figure 5."""
    with drawing(path, 6.0, 3.8) as figure:
        axes = figure.subplots()
        axes.set(xlabel="epsilon of a task", title="noise over signal, in Frobenius norm")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for place, (method, title) in enumerate((("MP-MTL", "MP-MTL, covariance, first iteration"),
                                                 ("DP-MTRL record_group", "DP-MTRL, models"),
                                                 ("DP-MTRL task", "DP-MTRL, models, noise for a task"))):  # fmt: skip
            own = [r for r in rows if r["method"] == method]
            axes.plot([r["epsilon"] for r in own], [r["ratio"][0] for r in own], "o-", markersize=3.5,
                      color=COLOURS[place], label=title)  # fmt: skip
        axes.axhline(1.0, color="#6b6f76", linewidth=1, linestyle=":")
        axes.legend(fontsize=7.5)


def plot_tasks(rows: list[Row], path: Path) -> None:
    """Figure 8."""
    with drawing(
        path,
        7.6,
        3.8,
        "Synthetic, low rank; 10 deals x 10 repetitions; bars are 95% intervals over deals.",
    ) as figure:
        axes = figure.subplots()
        axes.set(xlabel="tasks that learn", title="nMSE of the first 20 tasks")
        counts = sorted({r["tasks"] for r in rows})
        axes.set_xscale("log")
        axes.set_xticks(counts)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        lines = dict.fromkeys((r["method"], r["epsilon"]) for r in rows)
        lines.pop(("MP-MTL-LR 0.25", math.inf), None)  # without noise rho has no meaning
        for place, (method, epsilon) in enumerate(lines):
            own = [r for r in rows if (r["method"], r["epsilon"]) == (method, epsilon)]
            budget = f"ε {epsilon:g}" if math.isfinite(epsilon) else name_of(epsilon)
            label = method if method == ALONE else f"{NAMES[method]}, {budget}"
            axes.errorbar([r["tasks"] for r in own], [r["nmse"] for r in own], [r["half"] for r in own],
                          fmt="o-", markersize=3.5, color=COLOURS[place], label=label)  # fmt: skip
        axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def plot_models(row: Row, path: Path) -> None:
    """Figure 2: models of ten tasks, the last one unlike the others."""
    with drawing(path, 9.0, 2.9, "Absolute entries over the largest of each task.") as figure:
        panels = figure.subplots(1, 3)
        shown = (
            ("true", "true models"),
            ("leak", "MTL: the last task leaks"),
            ("protected", "MP-MTL, ε 1"),
        )
        for axes, (key, title) in zip(panels, shown, strict=True):
            models = np.abs(np.array(row[key])).T
            axes.imshow(models / models.max(axis=0), cmap="viridis", aspect="auto", vmin=0, vmax=1)
            axes.set(xlabel="task", title=title)
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.set_yticks([])
        panels[0].set_ylabel("feature")


def plot_covariance(row: Row, path: Path) -> None:
    """Figure 3: covariances of tasks in clusters, and model matrices."""
    names = ("true", "STL", "DP-MTRL", "MP-MTL")
    with drawing(
        path,
        10.5,
        5.4,
        "Synthetic tasks in 3 clusters with signs, in the order of the clusters; epsilon 10.",
    ) as figure:
        panels = figure.subplots(2, len(names))
        for place, name in enumerate(names):
            for axes, matrix in ((panels[0, place], np.array(row[f"{name} covariance"])),
                                 (panels[1, place], np.array(row[name]).T)):  # fmt: skip
                limit = (
                    1.0 if axes is panels[0, place] else float(np.quantile(np.abs(matrix), 0.98))
                )
                axes.imshow(matrix, cmap="RdBu_r", aspect="auto", vmin=-limit, vmax=limit)
                axes.set(xlabel="", title=name if axes is panels[0, place] else "")
                axes.grid(visible=False)
                axes.set_xticks([])
                axes.set_yticks([])
        panels[0, 0].set_ylabel("correlation of tasks")
        panels[1, 0].set_ylabel("models")
