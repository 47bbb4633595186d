"""Tables and plots of MP-MTL, from the rows that run.py keeps."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from scores import interval
from sweep import markdown, replace_section, write_csv

from fedmtl.report.canvas import drawing, plain_ticks

Row = dict[str, Any]
COLUMNS = ("part", "method", "epsilon", "lam", "rho", "momentum", "alpha", "q", "tasks", "deals", "runs", "nmse", "auc",
           "standard_error", "pooled", "difference", "difference_error", "difference_low", "difference_high",
           "pooled_difference", "pooled_low", "pooled_high", "note")  # fmt: skip
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
PROBLEMS = {"low_rank": "low rank", "group_sparse": "group sparse", "school": "School"}
ALONE = "STL"
PRIVATE = ("DP-AGGR record_group", "DP-AGGR task", "DP-MTRL record_group", "DP-MTRL task", "DP-MTRL own task")
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


def write(parts: dict[str, list[Row]], here: Path) -> None:
    """Every table and plot of the parts that are there."""
    readme, rows = here / "README.md", []
    known = {name: parts[name] for name in PROBLEMS if name in parts}
    for name, given in known.items():
        rows += [{**r, "part": name} for r in summary(given)]
        replace_section(readme, name, tradeoff_table(summary(given)))
    if known:
        replace_section(readme, "claims", claims_table({n: summary(g) for n, g in known.items()}))
        plot_tradeoff({n: summary(g) for n, g in known.items()}, here / "tradeoff.png")
    grids = {name: parts[f"grid_{name}"] for name in PROBLEMS if f"grid_{name}" in parts}
    for name, given in grids.items():
        rows += [{**r, "part": f"grid_{name}"} for r in given]
    if grids:
        replace_section(readme, "grid", grid_table(grids))
        replace_section(readme, "variants", variants_table(grids))
    if "labels" in parts:
        means = averaged(parts["labels"], ("method", "epsilon"), "auc")
        rows += [{**r, "part": "labels"} for r in means]
        replace_section(readme, "labels", labels_table(means))
    if "allocation" in parts:
        means = averaged(parts["allocation"], ("rho", "momentum", "epsilon", "alpha", "q"))
        rows += [{**r, "part": "allocation", "method": "MP-MTL-LR"} for r in means]
        plot_allocation(means, here / "allocation.png")
        replace_section(readme, "allocation", allocation_table(means))
    if "noise" in parts:
        rows += [{**r, "part": "noise", "note": f"noise to signal {r['ratio'][-1]:.4g}"} for r in parts["noise"]]
        plot_noise(parts["noise"], here / "noise.png")
        replace_section(readme, "noise", noise_table(parts["noise"]))
    if "tasks" in parts:
        means = averaged(parts["tasks"], ("method", "epsilon", "tasks"))
        rows += [{**r, "part": "tasks"} for r in means]
        plot_tasks(means, here / "tasks.png")
        replace_section(readme, "tasks", tasks_table(means))
    if "heat" in parts:
        plot_models(parts["heat"][0], here / "models.png")
        plot_covariance(parts["heat"][1], here / "covariance.png")
    write_csv(here / "table.csv", rows, COLUMNS)


def text(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if value < 100 else f"{value:.3g}"


def name_of(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"{epsilon:g}"


def error_of(values: list[float]) -> float:
    """Standard error of the mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def bounds(values: list[float]) -> tuple[float, float]:
    """The 95% interval of the mean of paired differences, one a deal."""
    middle, half = interval(values)
    return middle - half, middle + half


def summary(rows: list[Row]) -> list[Row]:
    """Means over deals with standard errors, and the paired differences to STL on the same deals with 95% intervals."""
    alone = next(r for r in rows if r["method"] == ALONE)
    found = []
    for r in rows:
        own = r["deals"]
        paired = [a - b for a, b in zip(own, alone["deals"], strict=False)]
        pooled = [a - b for a, b in zip(r["pooled_deals"], alone["pooled_deals"], strict=False)]
        found.append(
            {
                **r,
                "nmse": mean(own),
                "standard_error": error_of(own),
                "difference": mean(paired),
                "difference_error": error_of(paired),
                "difference_low": bounds(paired)[0],
                "difference_high": bounds(paired)[1],
                "pooled": mean(r["pooled_deals"]),
                "pooled_difference": mean(pooled),
                "pooled_low": bounds(pooled)[0],
                "pooled_high": bounds(pooled)[1],
                "deals": len(own),
            }
        )
    return found


def averaged(rows: list[Row], keys: tuple[str, ...], value: str = "nmse") -> list[Row]:
    """Means over deals of rows that agree in ``keys``."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for r in rows:
        groups.setdefault(tuple(r.get(k) for k in keys), []).append(r[value])
    return [
        {**dict(zip(keys, key, strict=True)), value: mean(values), "standard_error": error_of(values),
         "deals": len(values)}
        for key, values in groups.items()
    ]  # fmt: skip


def epsilons_of(rows: list[Row]) -> list[float]:
    return sorted({r["epsilon"] for r in rows if "MP-MTL" in r["method"]})


def tradeoff_table(rows: list[Row]) -> str:
    epsilons = epsilons_of(rows)
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = {r["epsilon"]: r for r in rows if r["method"] == method}
        if list(own) == [math.inf]:
            cells = [f"{text(own[math.inf]['nmse'])}"] * len(epsilons)
            cells = ["", *[""] * (len(epsilons) - 2), cells[0]]
        else:
            cells = [_cell(own[e]) if e in own else "" for e in epsilons]
        lines.append([NAMES.get(method, method), *cells])
    return markdown(["nMSE", *(f"ε {name_of(e)}:" if math.isfinite(e) else "no noise:" for e in epsilons)], lines)


def _cell(row: Row) -> str:
    value = text(row["nmse"])
    return f"**{value}**" if row["difference_high"] < 0 else f"{value} ✗" if row["difference_low"] > 0 else value


def claims_table(problems: dict[str, list[Row]]) -> str:
    """Where MP-MTL is better and where it is worse than STL, both by the 95% interval of the paired difference."""
    lines = []
    for name, rows in problems.items():
        for method in ("MP-MTL-LR 1.5", "MP-MTL-GS 1.5", "MP-MTL-LR 0.25", "MP-MTL-GS 0.25"):
            own = [r for r in rows if r["method"] == method and math.isfinite(r["epsilon"])]
            best = min(own, key=lambda r: r["difference"])
            lines.append(
                [PROBLEMS[name], NAMES[method], _where(own, "difference", -1), _where(own, "difference", 1),
                 _difference(max(own, key=lambda r: r["difference"])), _difference(best),
                 f"{best['difference'] / (best['nmse'] - best['difference']):+.0%}",
                 _where(own, "pooled", -1), _where(own, "pooled", 1)]
            )  # fmt: skip
    titles = ["problem", "method", "better at ε", "worse at ε", "largest difference:", "best difference:", "of STL:",
              "pooled: better at ε", "worse at ε"]  # fmt: skip
    return markdown(titles, lines)


def _where(rows: list[Row], key: str, sign: int) -> str:
    """The budgets at which the interval of a difference lies below (-1) or above 0 (1)."""
    found = [r["epsilon"] for r in rows if (r[f"{key}_high"] < 0 if sign < 0 else r[f"{key}_low"] > 0)]
    return "all" if len(found) == len(rows) else ", ".join(f"{e:g}" for e in found) or "none"


def _difference(row: Row) -> str:
    low, high = row["difference_low"], row["difference_high"]
    return f"{row['difference']:+.4f} [{low:+.4f}, {high:+.4f}] (ε {row['epsilon']:g})"


def grid_table(grids: dict[str, list[Row]]) -> str:
    """nMSE over that of STL, low rank, by lambda, rho and epsilon."""
    lines = []
    for name, rows in grids.items():
        alone = next(r["nmse"] for r in rows if r["method"] == ALONE)
        own = [r for r in rows if r["method"] == "MP-MTL-LR"]
        for lam in dict.fromkeys(r["lam"] for r in own):
            for rho in dict.fromkeys(r["rho"] for r in own):
                cells = [r["nmse"] / alone for r in own if (r["lam"], r["rho"]) == (lam, rho)]
                shown = [f"**{c:.2f}**" if c < 0.995 else f"{c:.2f} ✗" if c > 1.005 else f"{c:.2f}" for c in cells]
                lines.append([PROBLEMS[name], f"{lam:g}", f"{rho:g}", *shown])
    epsilons = list(dict.fromkeys(r["epsilon"] for rows in grids.values() for r in rows if "epsilon" in r))
    titles = ["problem", "λ / K:", "ρ:", *(f"ε {name_of(e)}:" if math.isfinite(e) else "no noise:" for e in epsilons)]
    return markdown(titles, lines)


def variants_table(grids: dict[str, list[Row]]) -> str:
    lines = []
    for name, rows in grids.items():
        alone = next(r["nmse"] for r in rows if r["method"] == ALONE)
        base = [r for r in rows if r.get("lam") == 0.1]
        kinds = dict.fromkeys(r["method"] for r in rows if r["method"] != ALONE)
        for rho in (1.5, 0.25):
            for kind in kinds:
                own = [r for r in (base if "MP-MTL" in kind else rows) if r["method"] == kind and r["rho"] == rho]
                lines.append([PROBLEMS[name], f"{rho:g}", kind, *(f"{r['nmse'] / alone:.3f}" for r in own)])
    epsilons = list(dict.fromkeys(r["epsilon"] for rows in grids.values() for r in rows if "epsilon" in r))
    titles = ["problem", "ρ:", "variant", *(f"ε {name_of(e)}:" if math.isfinite(e) else "no noise:" for e in epsilons)]
    return markdown(titles, lines)


WAYS = {"none": "no momentum, α", "nesterov": "Nesterov, α", "strongly_convex": "strongly convex, Q"}


def allocation_table(rows: list[Row]) -> str:
    lines = []
    for momentum, title in WAYS.items():
        key = "q" if momentum == "strongly_convex" else "alpha"
        for rho in (1.5, 0.25):
            for epsilon in sorted({r["epsilon"] for r in rows}):
                own = [r for r in rows if (r["momentum"], r["rho"], r["epsilon"]) == (momentum, rho, epsilon)]
                best = min(own, key=lambda r: r["nmse"])
                flat = next(r for r in own if r[key] == (1.0 if key == "q" else 0.0))
                lines.append([title, f"{rho:g}", f"{epsilon:g}", f"{best[key]:.2g}", text(best["nmse"]),
                              text(flat["nmse"]), text(flat["standard_error"])])  # fmt: skip
    titles = ["allocation", "ρ:", "ε:", "best exponent:", "nMSE there:", "nMSE uniform:", "± se:"]
    return markdown(titles, lines)


def labels_table(rows: list[Row]) -> str:
    epsilons = list(dict.fromkeys(r["epsilon"] for r in rows if "MP-MTL" in r["method"]))
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = {r["epsilon"]: r for r in rows if r["method"] == method}
        cells = [f"{text(own[e]['auc'])} ± {text(own[e]['standard_error'])}" if e in own else "" for e in epsilons]
        lines.append([NAMES.get(method, method), *cells])
    return markdown(["aAUC", *(f"ε {name_of(e)}:" if math.isfinite(e) else "no noise:" for e in epsilons)], lines)


def noise_table(rows: list[Row]) -> str:
    epsilons = list(dict.fromkeys(r["epsilon"] for r in rows))
    lines = []
    for method, title in (("MP-MTL", "MP-MTL, covariance"), ("DP-MTRL record_group", "DP-MTRL, models"),
                          ("DP-MTRL task", "DP-MTRL, models, noise for a task")):  # fmt: skip
        own = [r["ratio"][0] for r in rows if r["method"] == method]
        lines.append([title, *(f"{v:.2g}" if v < 1000 else f"{v:.1e}" for v in own)])
    return markdown(["noise over signal, first iteration", *(f"ε {e:g}:" for e in epsilons)], lines)


def tasks_table(rows: list[Row]) -> str:
    counts = list(dict.fromkeys(r["tasks"] for r in rows))
    lines = []
    for method, epsilon in dict.fromkeys((r["method"], r["epsilon"]) for r in rows):
        own = [r for r in rows if (r["method"], r["epsilon"]) == (method, epsilon)]
        cells = [f"{text(r['nmse'])} ± {text(r['standard_error'])}" for r in own]
        lines.append([NAMES.get(method, method), "" if method == ALONE else name_of(epsilon), *cells])
    return markdown(["nMSE of the first 20 tasks", "ε:", *(f"{c} tasks:" for c in counts)], lines)


def plot_tradeoff(problems: dict[str, list[Row]], path: Path) -> None:
    """Figures 6 and 9: a panel a problem."""
    with drawing(
        path,
        4.2 * len(problems) + 1.8,
        4.0,
        "Mean over deals of the data; bars are standard errors. STL shares nothing, MTL has no privacy.",
    ) as figure:
        panels = np.atleast_1d(figure.subplots(1, len(problems)))
        for axes, (name, rows) in zip(panels, problems.items(), strict=True):
            axes.set(xlabel="epsilon of a task", title=PROBLEMS[name])
            axes.set_xscale("log")
            for place, method in enumerate(("MP-MTL-LR 1.5", "MP-MTL-LR 0.25", "MP-MTL-GS 1.5", "MP-MTL-GS 0.25")):
                own = [r for r in rows if r["method"] == method and math.isfinite(r["epsilon"])]
                style = "o-" if "1.5" in method else "s--"
                axes.errorbar([r["epsilon"] for r in own], [r["nmse"] for r in own], [r["standard_error"] for r in own],
                              fmt=style, markersize=3.5, color=COLOURS[place // 2], label=NAMES[method])  # fmt: skip
            for place, method in enumerate(("DP-AGGR record_group", "DP-AGGR task", "DP-MTRL record_group")):
                own = [r for r in rows if r["method"] == method]
                axes.plot([r["epsilon"] for r in own], [r["nmse"] for r in own], "^:", markersize=3.5,
                          color=COLOURS[2 + place], label=NAMES[method])  # fmt: skip
            for method, style in ((ALONE, "-"), ("MTL-LR", "--"), ("MTL-GS", ":")):
                value = next(r["nmse"] for r in rows if r["method"] == method)
                axes.axhline(value, color="#4d5158", linewidth=1.2, linestyle=style, label=method)
            low = min(r["nmse"] for r in rows)
            axes.set_ylim(low * 0.95, 1.15)
        panels[0].set_ylabel("nMSE")
        panels[-1].legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def plot_allocation(rows: list[Row], path: Path) -> None:
    """Figure 4."""
    with drawing(
        path, 9.0, 3.8, "Synthetic, low rank; 5 deals x 10 repetitions. The composed total is that of every allocation."
    ) as figure:
        panels = figure.subplots(1, 2)
        for axes, key, label in ((panels[0], "alpha", "α of ε_t ∝ t^α"), (panels[1], "q", "Q of ε_t ∝ Q^-t")):
            axes.set(xlabel=label, title="convex" if key == "alpha" else "strongly convex")
            place = 0
            for rho in (1.5, 0.25):
                for epsilon in sorted({r["epsilon"] for r in rows}):
                    for momentum, style in (("none", "o-"), ("nesterov", "s--"), ("strongly_convex", "d-")):
                        own = [r for r in rows if (r["momentum"], r["rho"], r["epsilon"]) == (momentum, rho, epsilon)]
                        own = [r for r in own if r[key] is not None]
                        if own:
                            name = {"none": ", no momentum", "nesterov": ", Nesterov"}.get(momentum, "")
                            axes.errorbar([r[key] for r in own], [r["nmse"] for r in own],
                                          [r["standard_error"] for r in own], fmt=style, markersize=3,
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
        path, 7.6, 3.8, "Synthetic, low rank; 10 deals x 10 repetitions; bars are standard errors over deals."
    ) as figure:
        axes = figure.subplots()
        axes.set(xlabel="tasks that learn", title="nMSE of the first 20 tasks")
        counts = sorted({r["tasks"] for r in rows})
        axes.set_xscale("log")
        axes.set_xticks(counts)
        axes.minorticks_off()
        plain_ticks(axes.xaxis)
        lines = dict.fromkeys((r["method"], r["epsilon"]) for r in rows)
        lines.pop(("MP-MTL-LR 0.25", math.inf), None)  # without noise rho has no meaning
        for place, (method, epsilon) in enumerate(lines):
            own = [r for r in rows if (r["method"], r["epsilon"]) == (method, epsilon)]
            budget = f"ε {epsilon:g}" if math.isfinite(epsilon) else name_of(epsilon)
            label = method if method == ALONE else f"{NAMES[method]}, {budget}"
            axes.errorbar([r["tasks"] for r in own], [r["nmse"] for r in own], [r["standard_error"] for r in own],
                          fmt="o-", markersize=3.5, color=COLOURS[place], label=label)  # fmt: skip
        axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def plot_models(row: Row, path: Path) -> None:
    """Figure 2: models of ten tasks, the last one unlike the others."""
    with drawing(path, 9.0, 2.9, "Absolute entries over the largest of each task.") as figure:
        panels = figure.subplots(1, 3)
        shown = (("true", "true models"), ("leak", "MTL: the last task leaks"), ("protected", "MP-MTL, ε 1"))
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
        path, 10.5, 5.4, "Synthetic tasks in 3 clusters with signs, in the order of the clusters; epsilon 10."
    ) as figure:
        panels = figure.subplots(2, len(names))
        for place, name in enumerate(names):
            for axes, matrix in ((panels[0, place], np.array(row[f"{name} covariance"])),
                                 (panels[1, place], np.array(row[name]).T)):  # fmt: skip
                limit = 1.0 if axes is panels[0, place] else float(np.quantile(np.abs(matrix), 0.98))
                axes.imshow(matrix, cmap="RdBu_r", aspect="auto", vmin=-limit, vmax=limit)
                axes.set(xlabel="", title=name if axes is panels[0, place] else "")
                axes.grid(visible=False)
                axes.set_xticks([])
                axes.set_yticks([])
        panels[0, 0].set_ylabel("correlation of tasks")
        panels[1, 0].set_ylabel("models")
