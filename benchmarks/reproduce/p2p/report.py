"""Tables and plots of peer-to-peer learning, from the rows that run.py keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from films import PAPER
from intervals import interval
from scores import AS_PUBLISHED, Role, Score, listing, plot, renew_scores, table
from sweep import markdown, replace_section, write_csv

from fedmtl.report.canvas import drawing

Row = dict[str, Any]
COLUMNS = ("part", "method", "p", "mu", "epsilon", "wakeups", "clip", "policy", "centre", "step", "vectors", "gap",
           "accuracy", "half", "largest", "median", "above", "bound", "rho", "runs")  # fmt: skip
COLOURS = {"cd": "#0072B2", "admm": "#D55E00", "sound": "#0072B2", "paper": "#D55E00", "local dp": "#CC79A7",
           "optimum": "#009E73", "local": "#6b6f76"}  # fmt: skip
NAMES = {"cd": "coordinate descent", "admm": "gossip ADMM"}
AGENTS: dict[str, tuple[str, Role]] = {
    "local": ("local models", "local"),
    "optimum": ("no privacy, exact optimum", "baseline"),
    "local dp": ("local DP on the records", "baseline"),
    "sound": ("Gaussian, valid norm", "published"),
    "paper": ("the paper's noise, epsilon as stated", "published"),
}
FILMS: dict[str, tuple[str, Role]] = {
    "local, tuned": ("local models, one tuned lambda", "local"),
    "local": ("local models, lambda 1 / m_i (the paper's)", "baseline"),
    "local, features x 0.3": ("local models, features x 0.3", "baseline"),
    "local, features x 0.1": ("local models, features x 0.1", "baseline"),
    "local, pulled to 0": ("local models, refinement of 0", "baseline"),
    "mean": ("each user's mean", "baseline"),
    "centre": ("the centre 3.5 for everything", "baseline"),
    "optimum": ("exact optimum", "baseline"),
    "optimum, refined": ("exact optimum, refined", "baseline"),
    "descent": ("100 wake-ups", "published"),
    "gaussian": ("Gaussian, delta exp(-5)", "published"),
    "gaussian, refined": ("Gaussian, delta exp(-5), refined", "published"),
    "gaussian, small delta": ("Gaussian, delta 1e-5", "published"),
    "gaussian, small delta, refined": ("Gaussian, delta 1e-5, refined", "published"),
    "laplace": ("i.i.d. Laplace, valid L1 norm, delta exp(-5)", "published"),
}
STYLES = {
    "Gaussian, delta exp(-5)": {"color": "#0072B2", "marker": "o"},
    "Gaussian, delta exp(-5), refined": {"color": "#0072B2", "marker": "o", "linestyle": "--"},
    "Gaussian, delta 1e-5": {"color": "#D55E00", "marker": "o"},
    "Gaussian, delta 1e-5, refined": {"color": "#D55E00", "marker": "o", "linestyle": "--"},
    "the paper's table": {"color": "k", "marker": "*", "linestyle": ""},
    "local models, one tuned lambda": {"color": "#6b6f76", "linestyle": "-."},
    "exact optimum": {"color": "#6b6f76", "linestyle": ":"},
}
EVENTS, VECTORS = (
    (0, 400, 1000, 2000, 4000, 8000, 16000),
    (4_000, 10_000, 20_000, 40_000, 65_000, 150_000),
)


def write(parts: dict[str, list[Row]], here: Path) -> None:
    """Every table and plot of the parts that are there."""
    readme, rows = here / "README.md", []
    if "tuning" in parts:
        replace_section(readme, "tuning", tuning_table(parts["tuning"]))
    if "curves" in parts:
        own = averaged(parts["curves"], ("method", "step"), ("gap", "accuracy", "vectors"))
        replace_section(readme, "curves", curves_table(own, parts["curves"]))
        plot_curves(own, parts["curves"], here / "curves.png")
        parts = parts | {"curves": own}
    if "dimensions" in parts:
        scores = agent_scores(parts["dimensions"])
        renew_scores(here / "scores.csv", scores)
        replace_section(readme, "dimensions", listing(scores))
    if "noise" in parts:
        own = averaged(
            parts["noise"], ("paper", "p", "epsilon", "wakeups", "step"), ("gap", "accuracy")
        )
        replace_section(readme, "noise", noise_table(own))
        parts = parts | {
            "noise": [{**r, "method": "paper" if r["paper"] else "sound"} for r in own]
        }
    if "noise" in parts and "dimensions" in parts:
        plot_private(parts["noise"], parts["dimensions"], here / "private.png")
    if "allocation" in parts:
        replace_section(readme, "allocation", allocation_table(parts["allocation"]))
    if "paper" in parts and "sound" in parts:
        scores = film_scores(parts["paper"], parts["sound"])
        renew_scores(here / "scores.csv", scores)
        settings = dict.fromkeys(score.setting for score in scores)
        for section, setting in zip(("table1", "sound", "outside"), settings, strict=True):
            replace_section(readme, section, table(scores, setting, digits=4, noiseless=True))
        note = "MovieLens-100K, 80/20 by user. Refined: a last step on the user's own ratings that is not sent. "
        plot(here / "films.png", scores, STYLES, f"{note}Epsilon is each user's.")
    if "centring" in parts:
        replace_section(readme, "centring", centring_table(parts["centring"]))
    for name in ("tuning", "curves", "noise", "allocation", "centring"):
        rows += [{**r, "part": name} for r in parts.get(name, [])]
    write_csv(here / "table.csv", rows, COLUMNS)


def averaged(rows: list[Row], keys: Sequence[str], values: Sequence[str]) -> list[Row]:
    """Means over seeds of ``values`` for rows that agree in ``keys``."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    return [
        dict(zip(keys, key, strict=True))
        | {v: float(np.mean([r[v] for r in own])) for v in values}
        | {"half": interval(r["accuracy"] for r in own)[1], "runs": len(own)}
        for key, own in groups.items()
    ]


def digits(value: float, places: int = 3) -> str:
    """No zero before the point."""
    text = f"{value:.{places}f}"
    return text.replace("0.", ".", 1) if text.startswith("0.") else text


def with_half(row: Row, key: str, places: int = 3) -> str:
    return f"{digits(row[key], places)} ± {digits(row['half'], places)}"


def small(value: float) -> str:
    return f"{value:.1e}" if value < 0.01 else f"{value:.2f}"


def epsilon_text(value: float) -> str:
    return "none" if math.isinf(value) else "no messages" if value == 0 else f"{value:g}"


def tuning_table(rows: list[Row]) -> str:
    mus = list(dict.fromkeys(r["mu"] for r in rows))
    lines = []
    for p in dict.fromkeys(r["p"] for r in rows):
        own = [r for r in rows if r["p"] == p]
        most = max(r["accuracy"] for r in own)
        lines.append([str(p), *(f"**{digits(r['accuracy'])}**" if r["accuracy"] == most else digits(r["accuracy"])
                                for r in own)])  # fmt: skip
    return markdown(["p:", *(f"mu = {mu:g}:" for mu in mus)], lines)


def at(rows: list[Row], method: str, key: str, value: float) -> Row | None:
    """The last row of a method whose ``key`` is at most ``value``; None where its run ended before."""
    own = [r for r in rows if r["method"] == method]
    return None if value > 1.05 * own[-1][key] else [r for r in own if r[key] <= value * 1.001][-1]


def curves_table(rows: list[Row], raw: list[Row]) -> str:
    lines = []
    for title, key, values in (("iterations", "step", EVENTS), ("vectors", "vectors", VECTORS)):
        for value in values:
            cells = [f"{value:,} {title}"]
            for method in ("cd", "admm"):
                row = at(rows, method, key, value)
                cells += ["", ""] if row is None else [small(row["gap"]), digits(row["accuracy"])]
            lines.append(cells)
    best, local = (
        digits(float(np.mean([r[k] for r in raw if r["step"] == 0]))) for k in ("best", "local")
    )
    settings = f"mu = {raw[0]['mu']:g}, rho = {raw[0]['rho']:g} W_ij"
    head = f"Accuracy of the exact optimum {best}, of local models {local}; {settings}.\n\n"
    return head + markdown(
        ["after", "Q / Q* - 1, descent:", "accuracy:", "Q / Q* - 1, ADMM:", "accuracy:"], lines
    )


def agent_scores(rows: list[Row]) -> list[Score]:
    """The accuracy on every problem; what is chosen, and what epsilon the paper's noise has."""
    found = []
    for r in sorted(rows, key=lambda r: (r["p"], list(AGENTS).index(r["method"]))):
        name, role = AGENTS[r["method"]]
        words = [f"epsilon {r['honest']:.3g} holds"] if r["method"] == "paper" else []
        words += (
            [f"mu {r['mu']:g}, {r['wakeups']} wake-ups, clip {r['clip']:g}"]
            if "wakeups" in r
            else []
        )
        setting = f"p = {r['p']}, {AS_PUBLISHED}"
        found += [
            Score(
                setting,
                "accuracy",
                True,
                role,
                name,
                r["epsilon"],
                seed,
                value,
                chosen="; ".join(words),
            )
            for seed, value in enumerate(r["values"])
        ]
    return found


def film_scores(paper: list[Row], sound: list[Row]) -> list[Score]:
    """The test error on every split, in the three settings; and the paper's table."""
    title = f"MovieLens, each user's mean removed, {AS_PUBLISHED}"
    rows = [(title, r["method"], r) for r in paper]
    for r in sound:
        public, _, method = r["method"].partition(": ")
        method = method.replace("gaussian", "gaussian, small delta")
        rows.append((f"MovieLens, {public}, {AS_PUBLISHED}", method, r))
    order = list(FILMS)
    found = [Score(title, "RMSE", False, "published", "the paper's table", epsilon, 0, value)
             for epsilon, value in PAPER.items() if epsilon > 0]  # fmt: skip
    for setting in dict.fromkeys(setting for setting, _, _ in rows):
        own = [(method, r) for other, method, r in rows if other == setting]
        for method, r in sorted(own, key=lambda pair: order.index(pair[0])):
            about = [
                f"{key} {r[key]:g}" for key in ("ridge", "pull", "clip", "wakeups") if key in r
            ]
            name, role = FILMS[method]
            found += [
                Score(
                    setting,
                    "RMSE",
                    False,
                    role,
                    name,
                    r["epsilon"],
                    seed,
                    value,
                    chosen=", ".join(about),
                )
                for seed, value in enumerate(r["values"])
            ]
    return found


def noise_table(rows: list[Row]) -> str:
    lines = []
    for r in rows:
        if r["step"] == 100 * r["wakeups"]:
            law = (
                f"the paper's noise, epsilon {r['epsilon']:g}"
                if r["paper"]
                else f"valid norm, epsilon {r['epsilon']:g}"
            )
            lines.append(
                [
                    f"{law}, p = {r['p']}",
                    str(r["wakeups"]),
                    small(r["gap"]),
                    with_half(r, "accuracy"),
                ]
            )
    return markdown(["noise", "wake-ups:", "Q / Q* - 1:", "accuracy:"], lines)


def allocation_table(rows: list[Row]) -> str:
    lines = []
    names = {
        "uniform": "uniform",
        "optimal": "optimal, from public bounds",
        "paper": "paper, as printed",
        "0.5": "tilt 0.5: less at the end",
    }
    for policy in dict.fromkeys(r["policy"] for r in rows):
        own = [r for r in rows if r["policy"] == policy]
        name = names[policy] if policy in names else f"tilt {float(policy):g}: more at the end"
        cells = [f"{digits(r['gap'])} ± {digits(r['gap_half'])}" for r in own] + [
            digits(r["accuracy"]) for r in own
        ]
        lines.append([name, *(cells[i] for i in (0, 2, 1, 3))])
    titles = [
        f"{what}, {r['wakeups']} wake-ups:"
        for r in rows[: len(lines) + 1 : len(lines)]
        for what in ("Q / Q* - 1", "accuracy")
    ]
    return markdown(["allocation", *titles], lines)


def centring_table(rows: list[Row]) -> str:
    lines = [
        [f"{r['clip']:g}", "the user's mean" if r["centre"] == "user" else "public", f"{r['median']:.2f}",
         f"{r['largest']:.2f}", f"{r['above']:.0%}", f"{r['bound']:.1f}"]
        for r in rows
    ]  # fmt: skip
    return markdown(["clip:", "centre", "median:", "largest:", "above 1:", "a bound:"], lines)


def plot_curves(rows: list[Row], raw: list[Row], path: Path) -> None:
    """Figure 1: objective and accuracy by iterations, by vectors over edges, and by messages sent."""
    with drawing(
        path,
        11.5,
        6.2,
        "Synthetic agents, n = 100, p = 100, from the local models; means of 5 problems. No privacy.",
    ) as figure:
        panels = figure.subplots(2, 3, sharey="row")
        best = float(np.mean([r["best"] for r in raw if r["step"] == 0]))
        for column, (title, limit) in enumerate(
            (
                ("iterations", 8000),
                ("vectors over edges", 160_000),
                ("messages, a broadcast is one", 16_000),
            )
        ):
            for line, key in enumerate(("gap", "accuracy")):
                axes = panels[line, column]
                axes.set(xlabel=title)
                axes.set_xlim(0, limit)
                axes.set_xticks(
                    [limit * part // 4 for part in range(5)],
                    [f"{limit * part // 4:,}" for part in range(5)],
                )
                for method in ("cd", "admm"):
                    own = [r for r in rows if r["method"] == method]
                    messages = [r["step"] * (1 if method == "cd" else 4) for r in own]
                    x = ([r["step"] for r in own], [r["vectors"] for r in own], messages)[column]
                    axes.plot(
                        x,
                        [r[key] for r in own],
                        color=COLOURS[method],
                        linewidth=1.8,
                        label=NAMES[method],
                    )
                if key == "gap":
                    axes.set_yscale("log")
                    axes.set_ylim(1e-4, 5)
                else:
                    axes.axhline(
                        best,
                        color=COLOURS["optimum"],
                        linewidth=1.2,
                        linestyle="--",
                        label="exact optimum",
                    )
        panels[0, 0].set_ylabel("Q / Q* - 1")
        panels[1, 0].set_ylabel("test accuracy")
        panels[1, 0].legend(fontsize=8, loc="lower right")


def plot_private(noise: list[Row], dimensions: list[Row], path: Path) -> None:
    """Figure 2: accuracy along the run, and by dimension."""
    with drawing(
        path,
        11.5,
        3.7,
        "Synthetic agents, n = 100; means of 5 problems. An epsilon is stated of an agent's whole run.",
    ) as figure:
        panels = figure.subplots(1, 3)
        shades = ("#56B4E9", "#0072B2", "#003f63")
        for axes, paper in ((panels[0], False), (panels[1], True)):
            own = [r for r in noise if r["paper"] is paper]
            law = "the paper's noise, epsilon 1" if paper else "valid norm, epsilon 10"
            axes.set(xlabel="wake-ups of an agent", title=f"{law}, p = {own[0]['p']}")
            for shade, wakeups in zip(
                shades, dict.fromkeys(r["wakeups"] for r in own), strict=True
            ):
                line = [r for r in own if r["wakeups"] == wakeups]
                axes.plot([r["step"] / 100 for r in line], [r["accuracy"] for r in line], color=shade, linewidth=1.8,
                          label=f"T = {wakeups}")  # fmt: skip
            axes.set_ylim(0.45, 1)
        panels[0].set_ylabel("test accuracy")
        panels[0].legend(fontsize=7.5, loc="lower right")
        axes = panels[2]
        axes.set(xlabel="p", title="by dimension")
        # fmt: off
        lines = [("optimum", math.inf, "no privacy", "-"), ("local", 0.0, "local models", "-."),
                 *(("sound", e, f"valid norm, epsilon {e:g}", s) for e, s in ((100.0, "-"), (10.0, "--"), (1.0, ":"))),
                 ("paper", 1.0, "the paper's noise, epsilon 1", ":"), ("local dp", 10.0, "local DP, epsilon 10", ":")]
        # fmt: on
        for method, epsilon, label, style in lines:
            own = [r for r in dimensions if r["method"] == method and r["epsilon"] == epsilon]
            means = [np.mean(r["values"]) for r in own]
            axes.plot([r["p"] for r in own], means, style, color=COLOURS[method], linewidth=1.8, marker="o",
                      markersize=3.5, label=label)  # fmt: skip
        axes.set_ylim(0.25, 1)
        axes.legend(fontsize=6.5, framealpha=0.9, edgecolor="white", loc="lower left", ncols=2)
