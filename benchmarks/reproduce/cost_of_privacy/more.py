"""Tables and plots of hospitals along a run, of who answers when, and of the support vector machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import report
from collaboration import log_log_slope
from sweep import markdown, replace_section

from fedmtl.report.canvas import drawing

Row = dict[str, Any]


def write(parts: dict[str, list[Row]], here: Path) -> list[Row]:
    """What is there of these parts; returns their rows of table.csv."""
    rows: list[Row] = []
    readme = here / "README.md"
    if "hospital_bands" in parts:
        own, references = parts["hospital_bands"][:-1], parts["hospital_bands"][-1]
        rows += [
            {**r, "part": "hospital bands", "rule": r["plan"], "owners": 17, "records": 3230}
            for r in own
        ]
        report.plot_bands(
            own, references, here / "hospital_bands.png", "17 hospitals with 3,230 stays"
        )
        replace_section(readme, "hospital bands", hospital_bands_table(own))
    if "timeline" in parts:
        plot_timeline(parts["timeline"], here / "timeline.png")
        replace_section(readme, "timeline", timeline_table(parts["timeline"]))
    if "machine" in parts:
        cells = [r for r in parts["machine"] if r["rule"] != "references"]
        rows += [{**r, "part": "machine", "owners": 3, "clip": 13.0} for r in parts["machine"]]
        plot_machine(parts["machine"], here / "machine.png")
        replace_section(readme, "machine", machine_table(parts["machine"]))
        replace_section(readme, "machine slopes", report.slopes_table(cells))
        replace_section(readme, "machine windows", windows_table(cells))
    if "machine_value" in parts:
        rows += [{**r, "part": "machine value", "clip": 13.0} for r in parts["machine_value"]]
        shown = [(100, 3), (100, 30), (500, 3), (500, 30)]
        report.plot_value(
            parts["machine_value"],
            shown,
            here / "machine_value.png",
            "Census income; 5 deals x 20 runs",
        )
        replace_section(readme, "machine value", report.value_table(parts["machine_value"]))
    return rows


def hospital_bands_table(rows: list[Row]) -> str:
    lines = []
    for plan in dict.fromkeys(r["plan"] for r in rows):
        for epsilon in dict.fromkeys(r["epsilon"] for r in rows):
            own = [r for r in rows if r["plan"] == plan and r["epsilon"] == epsilon]
            row, best = own[-1], min(own, key=lambda r: r["median"])
            ends = [report.text(row[k]) for k in ("q25", "median", "q75")]
            lines.append([plan, f"{epsilon:g}", str(row["cap"]), f"{row['clip']:g}", f"{row['kappa']:g}", *ends,
                          report.text(best["median"]), str(best["tick"])])  # fmt: skip
    titles = [
        "answers",
        "epsilon:",
        "made for:",
        "clip:",
        "kappa:",
        "25%:",
        "median:",
        "75%:",
        "least median:",
    ]
    return markdown([*titles, "at tick:"], lines)


def timeline_table(rows: list[Row]) -> str:
    """How evenly owners answer."""
    lines = []
    for r in rows:
        who, owners = np.array(r["who"]), r["owners"]
        cells = [r["data"], str(owners), r["plan"], str(len(who))]
        for count in (len(who) // 2, len(who)):
            answers = np.bincount(who[:count], minlength=owners)
            cells.append(f"{answers.min()}, {np.median(answers):g}, {answers.max()}")
        waits = [np.diff(np.flatnonzero(who == owner)).max(initial=0) for owner in range(owners)]
        cells.append(str(max(waits)))
        lines.append(cells)
    titles = ["data", "owners:", "plan", "ticks:", "answers by half time (least, median, most):"]
    return markdown([*titles, "at the end:", "longest silence in ticks:"], lines)


def plot_timeline(rows: list[Row], path: Path) -> None:
    """Figures 3 and 8: i_k against k."""
    with drawing(
        path, 10.0, 5.6, "Independent Poisson clocks of equal rate, one run; a mark is an answer."
    ) as figure:
        panels = figure.subplots(2, 2, gridspec_kw={"height_ratios": [1, 2.2]})
        for axes, r in zip(panels.flat, rows, strict=True):
            ticks = np.arange(1, len(r["who"]) + 1)
            axes.set(title=f"{r['data']}: {r['plan']}", xlabel="tick", ylabel="owner")
            size = 5 if len(ticks) < 100 else 2
            axes.plot(
                ticks, np.array(r["who"]) + 1, "|", markersize=2 + size, color=report.COLOURS[0]
            )
            axes.set_yticks(range(1, r["owners"] + 1, 1 if r["owners"] < 5 else 4))
            axes.set_ylim(0.3, r["owners"] + 0.7)


def machine_table(rows: list[Row]) -> str:
    """psi by records and some epsilons under the fixed kappa, beside models without noise."""
    epsilons = (0.1, 0.4, 1.6, 6.4, 25.6, math.inf)
    lines = []
    for known in (r for r in rows if r["rule"] == "references"):
        own = {
            r["epsilon"]: r["psi"]
            for r in rows
            if r["rule"] == "fixed" and r["records"] == known["records"]
        }
        cells = [
            f"**{report.text(own[e])}**" if own[e] < known["alone"] else report.text(own[e])
            for e in epsilons
        ]
        wrong = f"{known['wrong']:.3f}".lstrip("0")
        lines.append(
            [
                f"{known['records']:,}",
                *cells,
                *(report.text(known[k]) for k in ("alone", "public")),
                wrong,
            ]
        )
    titles = [f"ε {e:g}:" if math.isfinite(e) else "no noise:" for e in epsilons]
    return markdown(["records:", *titles, "alone:", "public rows:", "wrong at theta*:"], lines)


def windows_table(rows: list[Row]) -> str:
    """Slopes of log psi against records x epsilon by the size of psi, where the noise is at least 3 times the floor."""
    floor = report.floors(rows)
    own = [r for r in rows if r["rule"] == "fixed" and math.isfinite(r["epsilon"])]
    lines = []
    for low, high in ((0.02, 0.2), (0.2, 2.0), (2.0, 20.0)):
        cells = [r for r in own if low <= r["psi"] < high and r["psi"] >= 3 * floor[r["records"]]]
        x = [r["records"] * r["epsilon"] for r in cells]
        if len(set(x)) < 3:
            continue
        slopes = [
            log_log_slope(x, [r["psi"] - shift * floor[r["records"]] for r in cells])
            for shift in (0, 1)
        ]
        lines.append([f"{low:g} to {high:g}", str(len(cells)), *map(report.slope_text, slopes)])
    return markdown(["psi", "cells:", "slope of psi (95%):", "slope of psi - floor (95%):"], lines)


def plot_machine(rows: list[Row], path: Path) -> None:
    """Figure 11: psi against epsilon and against records, with (11) as it is fitted where noise dominates."""
    cells = [r for r in rows if r["rule"] == "fixed"]
    forecast = report.fitted(report.dominated(cells))
    with drawing(
        path,
        9.0,
        3.9,
        "Census income, hinge loss, 3 owners. Points: 150 runs on 3 deals. Lines: (11), fitted where noise dominates.",
    ) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        sizes, epsilons = sorted({r["records"] for r in cells})[::2], (0.1, 0.4, 1.6, 6.4)
        for axes, fixed, moving, values in ((panels[0], "records", "epsilon", sizes),
                                            (panels[1], "epsilon", "records", epsilons)):  # fmt: skip
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set(xlabel="epsilon of each owner" if moving == "epsilon" else "records of each owner",
                  title=f"by {moving}")  # fmt: skip
            for colour, value in zip(report.COLOURS, values, strict=False):
                points = [r for r in cells if r[fixed] == value and math.isfinite(r["epsilon"])]
                x = [r[moving] for r in points]
                label = f"{value:,} records" if fixed == "records" else f"epsilon {value:g}"
                axes.plot(
                    x, [r["psi"] for r in points], "o", markersize=3.5, color=colour, label=label
                )
                expected = [forecast(report.noise_in(r)) for r in points]
                axes.plot(x, expected, color=colour, linewidth=1.2)
            axes.axhline(report.LARGEST, color="#6b6f76", linewidth=1, linestyle=":")
            axes.set_ylim(2e-3, 30)
            axes.legend(fontsize=7.5)
        panels[0].set_ylabel("mean psi")
