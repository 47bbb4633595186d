"""Tables and plots of PP-DMTL, from the rows that run.py keeps."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from scores import AS_PUBLISHED, Role, Score, listing, plot, renew_scores, table
from sweep import markdown, read_csv, replace_section, write_csv

from fedmtl.report.canvas import drawing

Row = dict[str, Any]
COLUMNS = ("part", "rule", "epsilon", "answers", "what", "a2", "server", "steps", "stragglers", "delay", "runs", "rank",
           "q25", "median", "q75", "to 0.2", "to 0.1", "to 0.05", "to 0.02")  # fmt: skip
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9")
MUTED = "#6b6f76"
UNITS = {"classification": "test error", "regression": "test mean squared error"}
SHOWN = (math.inf, 10.0, 3.0, 1.0)
PARTS = ("classification", "regression", "waiting")
SOUND: dict[str, tuple[str, Role]] = {
    "alone": ("single-task learning", "local"),
    "sound": ("PP-DMTL, sound", "published"),
    "bare": ("PP-DMTL, P alone", "published"),
    "waits": ("PP-DMTL, the server waits", "baseline"),
    "optimum": ("joint optimum, no noise", "baseline"),
}
SHOWN_CHOICES = ("single-task learning", "PP-DMTL, sound")
STYLES = {
    "PP-DMTL, sound": {"color": COLOURS[0], "marker": "o", "markersize": 4},
    "single-task learning": {"color": COLOURS[3], "linestyle": "-."},
    "joint optimum, no noise": {"color": COLOURS[1], "linestyle": "--"},
}


def write(parts: dict[str, list[Row]], here: Path) -> None:
    """Every table and plot of the parts that are there; the rows of table.csv, the tables and plots of others stay."""
    rows: list[Row] = []
    readme = here / "README.md"
    kinds = [kind for kind in ("classification", "regression") if kind in parts]
    for kind in kinds:
        rows += [{**r, "part": kind} for r in parts[kind]]
        replace_section(readme, kind, published_table(parts[kind]))
    if len(kinds) == 2:
        plot_objective(parts, kinds, here / "objective.png")
        plot_tasks(parts, kinds, here / "tasks.png")
    if "sound" in parts:
        scores = sound_scores(parts["sound"])
        renew_scores(here / "scores.csv", scores)
        tables = {s.setting: table(scores, s.setting, digits=4, noiseless=True) for s in scores}
        replace_section(
            readme, "sound", "\n".join(f"{title}:\n\n{text}" for title, text in tables.items())
        )
        replace_section(
            readme, "chosen", listing([s for s in scores if s.method in SHOWN_CHOICES], digits=4)
        )
        note = "Means of 10 runs on each of 5 problems; settings chosen on other problems. Epsilon of a task over the run."
        plot(here / "sound.png", scores, STYLES, note)
    if "waiting" in parts:
        for r in parts["waiting"]:
            rows.append(
                {
                    **r,
                    "part": "waiting",
                    **{key: median(r[key]) for key in r if key.startswith("to ")},
                }
            )
        replace_section(readme, "waiting", waiting_table(parts["waiting"]))
        plot_waiting(parts["waiting"], here / "waiting.png")
    others = [row for row in read_csv(here / "table.csv") if row["part"] not in parts]
    write_csv(
        here / "table.csv",
        sorted([*others, *rows], key=lambda row: PARTS.index(row["part"])),
        COLUMNS,
    )


def number(value: float) -> str:
    """Three or four digits; no zero before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}".replace("0.", ".", 1)


def name_of(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"{epsilon:g}"


def band(row: Row) -> str:
    if row["q25"] == row["q75"]:
        return number(row["median"])
    return f"{number(row['median'])} ({number(row['q25'])}, {number(row['q75'])})"


def pick(rows: list[Row], **wanted: Any) -> list[Row]:
    return [r for r in rows if all(r[key] == value for key, value in wanted.items())]


def published_table(rows: list[Row]) -> str:
    """At the last answer, by epsilon of an iteration; the exact optimum and single-task learning beside it."""
    last = max(r["answers"] for r in rows)
    lines = []
    for rule, title in (("optimum", "exact optimum of (2)"), ("alone", "single-task learning")):
        (objective,), (error,) = (
            pick(rows, rule=rule, what=what) for what in ("objective", "error")
        )
        lines.append([title, "", "", band(objective), band(error), f"{objective['rank']}"])
    run = pick(rows, rule="published", answers=last)
    for epsilon in dict.fromkeys(r["epsilon"] for r in run):
        (objective,), (error,) = (
            pick(run, epsilon=epsilon, what=what) for what in ("objective", "error")
        )
        claim = (
            ["", ""] if math.isinf(epsilon) else [f"{2 * epsilon:g}", f"{2 * epsilon * last:,.0f}"]
        )
        lines.append(
            [name_of(epsilon), *claim, band(objective), band(error), f"{objective['rank']:.3g}"]
        )
    titles = [
        "epsilon",
        "claimed of one iteration:",
        f"of {last:,} iterations:",
        "objective:",
        "error:",
        "rank of P:",
    ]
    return markdown(titles, lines)


def sound_scores(rows: list[Row]) -> list[Score]:
    """The error on every problem."""
    found = []
    for r in sorted(rows, key=lambda r: (r["records"], list(SOUND).index(r["rule"]))):
        name, role = SOUND[r["rule"]]
        epsilon = (
            {"alone": 0.0, "optimum": math.inf}.get(r["rule"])
            if "epsilon" not in r
            else r["epsilon"]
        )
        words = [f"{r['answers']} answers, a2 {r['a2']:g}"] if "answers" in r else []
        words += [f"lambda {r['lam']:g}"] if "lam" in r else []
        words += ["P alone" if r["ridge"] is None else f"ridge {r['ridge']:g}"]
        setting = f"{r['records']:,} records a task, {AS_PUBLISHED}"
        found += [
            Score(
                setting,
                "test error",
                False,
                role,
                name,
                epsilon,
                seed,
                error,
                chosen=", ".join(words),
            )
            for seed, error in enumerate(r["problems"])
        ]
    return found


def seconds(values: list[float]) -> str:
    middle = median(values)
    return "not reached" if math.isinf(middle) else f"{middle:.2f}"


def waiting_table(rows: list[Row]) -> str:
    """Virtual seconds until the objective is near its optimum."""
    targets = [key for key in rows[0] if key.startswith("to ")]
    lines = []
    for slow in dict.fromkeys(r["stragglers"] for r in rows):
        for steps in ("equal", "own"):
            for r in pick(rows, stragglers=slow, steps=steps):
                lines.append(
                    [
                        str(slow),
                        r["server"],
                        str(r["delay"]),
                        f"{r['a2']:.3g}",
                        *(seconds(r[key]) for key in targets),
                    ]
                )
    titles = [f"{float(key[3:]):.0%} above:" for key in targets]
    return markdown(["stragglers:", "server", "delay:", "a2:", *titles], lines)


def _lines(axes: Axes, rows: list[Row], what: str) -> None:
    for colour, epsilon in zip(
        COLOURS, dict.fromkeys(r["epsilon"] for r in pick(rows, rule="published")), strict=False
    ):
        own = pick(rows, rule="published", epsilon=epsilon, what=what)
        at = [r["answers"] for r in own]
        axes.fill_between(
            at, [r["q25"] for r in own], [r["q75"] for r in own], color=colour, alpha=0.3, lw=0
        )
        axes.plot(
            at, [r["median"] for r in own], color=colour, linewidth=1.7, label=name_of(epsilon)
        )


def plot_objective(parts: dict[str, list[Row]], kinds: list[str], path: Path) -> None:
    """Figures 2a and 2c: objective by iteration and epsilon."""
    with drawing(
        path,
        9.0,
        3.8,
        "Algorithm 1 as published, on synthetic tasks. Median and quartiles of 10 runs.",
    ) as figure:
        for axes, kind in zip(figure.subplots(1, 2), kinds, strict=True):
            rows = parts[kind]
            axes.set(xlabel="answers of each task", title=kind)
            axes.set_xscale("log")
            axes.set_yscale("log")
            _lines(axes, rows, "objective")
            for rule, style in (("optimum", "--"), ("alone", ":")):
                (row,) = pick(rows, rule=rule, what="objective")
                axes.axhline(row["median"], color=MUTED, linewidth=1.2, linestyle=style, label=rule)
        figure.axes[0].legend(fontsize=8, title="epsilon of an iteration", title_fontsize=8)
        figure.axes[0].set_ylabel("objective (2)")


def plot_tasks(parts: dict[str, list[Row]], kinds: list[str], path: Path) -> None:
    """Figures 3 and 5: errors of the first five tasks, a panel an epsilon."""
    with drawing(
        path,
        11.5,
        5.6,
        "Algorithm 1 as published, on synthetic tasks. Median and quartiles of 10 runs.",
    ) as figure:
        panels = figure.subplots(len(kinds), len(SHOWN), sharex=True, sharey="row")
        for line, kind in zip(panels, kinds, strict=True):
            for axes, epsilon in zip(line, SHOWN, strict=True):
                title = "no noise" if math.isinf(epsilon) else f"epsilon {epsilon:g} an iteration"
                axes.set(title=title if kind == kinds[0] else "")
                axes.set_xscale("log")
                if kind == "regression":
                    axes.set_yscale("log")
                for task, colour in enumerate(COLOURS[:5]):
                    own = pick(parts[kind], rule="published", epsilon=epsilon, what=f"task {task}")
                    at = [r["answers"] for r in own]
                    axes.fill_between(
                        at,
                        [r["q25"] for r in own],
                        [r["q75"] for r in own],
                        color=colour,
                        alpha=0.2,
                        lw=0,
                    )
                    axes.plot(
                        at,
                        [r["median"] for r in own],
                        color=colour,
                        linewidth=1.5,
                        label=f"task {task + 1}",
                    )
            line[0].set_ylabel(UNITS[kind])
        for axes in panels[-1]:
            axes.set_xlabel("answers of each task")
        panels[0][0].legend(fontsize=7.5, ncols=2)


def plot_waiting(rows: list[Row], path: Path) -> None:
    """The objective's distance from its optimum in virtual time."""
    slows = list(dict.fromkeys(r["stragglers"] for r in rows))
    with drawing(
        path, 10.5, 3.6, "No noise; latencies uniform between 0 and 15 ms, means of 5 schedules."
    ) as figure:
        for axes, slow in zip(figure.subplots(1, len(slows), sharey=True), slows, strict=True):
            title = "no straggler" if not slow else f"{slow} of 20 tasks ten times slower"
            axes.set(xlabel="virtual seconds", title=title)
            axes.set_yscale("log")
            for steps, style in (("equal", "-"), ("own", "--")):
                for server, colour in (("never waits", COLOURS[0]), ("waits", COLOURS[3])):
                    (row,) = pick(rows, stragglers=slow, steps=steps, server=server)
                    label = f"{server}, {'a2 = 0.1' if steps == 'equal' else 'its own a2'}"
                    curve = [point for point in row["curve"] if point[1] > 1e-4]
                    axes.plot(
                        *zip(*curve, strict=True),
                        color=colour,
                        linestyle=style,
                        linewidth=1.6,
                        label=label,
                    )
            axes.set_xscale("log")
        figure.axes[0].set_ylabel("objective over its optimum, minus 1")
        figure.axes[0].legend(fontsize=8, loc="lower left")
