"""Tables and plots of the cost of privacy, from the rows that run.py keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import more
import numpy as np
from collaboration import Slope, log_log_slope
from sweep import markdown, read_csv, replace_section, write_csv

from fedmtl.contrib.forecast import Forecast, noise_of
from fedmtl.report.canvas import drawing

Row = dict[str, Any]
COLUMNS = ("part", "rule", "owners", "records", "epsilon", "tick", "cap", "clip", "kappa", "runs", "psi", "q25",
           "median", "q75", "alone", "public", "zero", "worth", "foreseen")  # fmt: skip
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PARTS = (
    "bands",
    "grid",
    "unclipped",
    "value",
    "hospital",
    "hospital_bands",
    "timeline",
    "machine",
    "machine_value",
)
TABLED = ("bands", "grid", "value", "hospital", "hospital bands", "machine", "machine value")
LARGEST, ABOVE = (
    0.5,
    10.0,
)  # a slope takes psi below the first, and at least the second times its floor


def write(parts: dict[str, list[Row]], here: Path) -> None:
    """Every table and plot of the parts that are there; the rows of table.csv, the tables and plots of others stay."""
    rows: list[Row] = []
    readme = here / "README.md"
    if "bands" in parts:
        references = parts["bands"][-1]
        own = parts["bands"][:-1]
        rows += [
            {**r, "part": "bands", "rule": r["plan"], "owners": 3, "records": 3000} for r in own
        ]
        plot_bands(own, references, here / "bands.png", "Lending, 3 owners of 3,000 records")
        replace_section(readme, "bands", bands_table(own))
    if "grid" in parts:
        cells = parts["grid"] + parts.get("unclipped", [])
        rows += [{**r, "part": "grid", "owners": 3} for r in cells]
        plot_grid(parts["grid"], here / "psi.png")
        replace_section(readme, "slopes", slopes_table(cells))
        replace_section(readme, "forecasts", forecasts_table(parts["grid"]))
    if "value" in parts:
        rows += [{**r, "part": "value"} for r in parts["value"]]
        shown = [(90, 3), (90, 10), (90, 100), (300, 10)]
        plot_value(parts["value"], shown, here / "value.png", "Lending; 5 deals x 20 runs")
        replace_section(readme, "value", value_table(parts["value"]))
        replace_section(readme, "foreseen", foreseen_table(parts["value"]))
    if "hospital" in parts:
        for r in parts["hospital"]:
            owners, alone = len(r["counts"]), float(np.mean(r["alone"]))
            rows.append(
                {
                    **r,
                    "part": "hospital",
                    "owners": owners,
                    "alone": alone,
                    "worth": r["worth"] / owners,
                }
            )
        replace_section(readme, "hospital", hospital_table(parts["hospital"]))
    rows += more.write(parts, here)
    new = {row["part"] for row in rows}
    others = [row for row in read_csv(here / "table.csv") if row["part"] not in new]
    write_csv(
        here / "table.csv",
        sorted([*others, *rows], key=lambda row: TABLED.index(row["part"])),
        COLUMNS,
    )


def text(value: float) -> str:
    """Three digits; no zero before the point."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}".replace("0.", ".", 1)


def name_of(epsilon: float) -> str:
    return "clip only" if math.isinf(epsilon) else f"{epsilon:g}"


def bands_table(rows: list[Row]) -> str:
    lines = []
    for plan in dict.fromkeys(r["plan"] for r in rows):
        for epsilon in dict.fromkeys(r["epsilon"] for r in rows):
            row = [r for r in rows if r["plan"] == plan and r["epsilon"] == epsilon][-1]
            lines.append(
                [
                    plan,
                    f"{epsilon:g}",
                    f"{row['kappa']:g}",
                    *(text(row[k]) for k in ("q25", "median", "q75")),
                ]
            )
    return markdown(["answers", "epsilon:", "kappa:", "25%:", "median:", "75%:"], lines)


def floors(rows: list[Row]) -> dict[float, float]:
    """psi without noise, with clipping, by records of an owner, under the fixed kappa."""
    return {
        r["records"]: r["psi"] for r in rows if r["rule"] == "fixed" and math.isinf(r["epsilon"])
    }


def dominated(rows: list[Row]) -> list[Row]:
    """Rows of the fixed kappa where noise dominates the floor, and psi is below 1/2."""
    floor = floors(rows)
    return [
        r
        for r in rows
        if r["rule"] == "fixed" and r["psi"] < LARGEST and r["psi"] >= ABOVE * floor[r["records"]]
    ]  # fmt: skip


def lines_of(
    rows: list[Row], fixed: str, moving: str, least: int
) -> dict[float, tuple[list[float], list[Row]]]:
    """Points of each line: ``moving`` and rows, by the value of ``fixed``; lines of at least ``least`` points."""
    found: dict[float, tuple[list[float], list[Row]]] = {}
    for value in sorted({r[fixed] for r in rows}):
        own = [r for r in rows if r[fixed] == value]
        if len(own) >= least:
            found[value] = [r[moving] for r in own], own
    return found


def slope_text(slope: Slope) -> str:
    return f"{slope.slope:.2f} ({slope.low:.2f}, {slope.high:.2f})"


def slopes_table(rows: list[Row]) -> str:
    """Slopes of log psi, and of log (psi - floor), along lines of one size or one epsilon, and over all cells."""
    own, floor = dominated(rows), floors(rows)
    lines = []
    for title, fixed, moving in (
        ("records of an owner", "records", "epsilon"),
        ("epsilon", "epsilon", "records"),
    ):
        for value, (x, points) in lines_of(own, fixed, moving, 3).items():
            slopes = [log_log_slope(x, [r["psi"] for r in points]),
                      log_log_slope(x, [r["psi"] - floor[r["records"]] for r in points])]  # fmt: skip
            held = f"{title} = {value:.3g}" if fixed == "epsilon" else f"{title} = {value}"
            lines.append([f"{moving}, {held}", str(len(x)), *map(slope_text, slopes)])
    x = [r["records"] * r["epsilon"] for r in own]
    slopes = [
        log_log_slope(x, [r["psi"] for r in own]),
        log_log_slope(x, [r["psi"] - floor[r["records"]] for r in own]),
    ]
    lines.append(["records x epsilon, all cells", str(len(x)), *map(slope_text, slopes)])
    for rule, title in (
        ("unclipped", "same noise without clipping"),
        ("chosen", "kappa chosen for each cell"),
    ):
        other = [r for r in rows if r["rule"] == rule]
        least = {r["records"]: r["psi"] for r in other if math.isinf(r["epsilon"])}
        own = [r for r in other if ABOVE * least[r["records"]] <= r["psi"] < LARGEST]
        if len(own) < 3:
            continue
        x = [r["records"] * r["epsilon"] for r in own]
        shifts = (dict.fromkeys(least, 0.0), least)
        slopes = [
            log_log_slope(x, [r["psi"] - shift[r["records"]] for r in own]) for shift in shifts
        ]
        lines.append([f"records x epsilon, {title}", str(len(own)), *map(slope_text, slopes)])
    return markdown(
        ["along", "cells:", "slope of psi (95%):", "slope of psi - floor (95%):"], lines
    )


def noise_in(row: Row, owners: int = 3) -> float:
    """u of (11) in a cell, whose owners have as many records each."""
    return noise_of([row["epsilon"]] * owners, owners * row["records"])


def fitted(rows: list[Row]) -> Forecast:
    return Forecast.fit([noise_in(r) for r in rows], [r["psi"] for r in rows])


def error_of(forecast: Forecast, rows: list[Row]) -> float:
    """Root mean square of relative errors."""
    errors = [forecast(noise_in(r)) / r["psi"] - 1 for r in rows]
    return float(np.sqrt(np.mean(np.square(errors))))


def forecasts_table(rows: list[Row]) -> str:
    """Constants of (11) fitted to cells, and their errors there and on the owners' records."""
    finite = [r for r in rows if math.isfinite(r["epsilon"]) and r["psi"] < LARGEST]
    private = [r for r in finite if r["rule"] == "fixed"]
    strong = dominated(rows)
    public = [r for r in finite if r["rule"] == "public"]
    cells = {(r["records"], r["epsilon"]) for r in strong}
    chosen = [r for r in finite if r["rule"] == "chosen"]
    public_strong = [r for r in public if (r["records"], r["epsilon"]) in cells]
    lines = []
    for title, fit, test in (
        ("owners' records, psi < .5", private, private),
        ("owners' records, noise dominates", strong, strong),
        ("public records, noise dominates", public_strong, strong),
        ("owners' records, kappa chosen by setting, psi < .5", chosen, chosen),
    ):  # fmt: skip
        forecast = fitted(fit)
        errors = [f"{error_of(forecast, cells):.0%}" for cells in (fit, test)]
        lines.append([title, str(len(fit)), f"{forecast.c1:.3g}", f"{forecast.c2:.3g}", *errors])
    return markdown(
        ["fitted to", "cells:", "c1:", "c2:", "error there:", "error on owners' records:"], lines
    )


def value_table(rows: list[Row]) -> str:
    epsilons = list(dict.fromkeys(r["epsilon"] for r in rows))
    lines = []
    for size, owners in dict.fromkeys((r["records"], r["owners"]) for r in rows):
        own = [r for r in rows if (r["records"], r["owners"]) == (size, owners)]
        cells = [f"**{text(r['psi'])}**" if r["psi"] < r["alone"] else text(r["psi"]) for r in own]
        cells = [f"{c} †" if r["psi"] < r["public"] else c for c, r in zip(cells, own, strict=True)]
        first = own[0]
        lines.append(
            [str(size), str(owners), *cells, *(text(first[k]) for k in ("alone", "public", "zero"))]
        )
    titles = [
        "records:",
        "owners:",
        *(f"ε {name_of(e)}:" if math.isfinite(e) else "clip only:" for e in epsilons),
    ]
    return markdown([*titles, "alone:", "public rows:", "theta = 0:"], lines)


def foreseen_table(rows: list[Row]) -> str:
    """Forecasts from public rows alone against what happened."""
    finite = [r for r in rows if math.isfinite(r["epsilon"])]
    lines = []
    for size in dict.fromkeys(r["records"] for r in rows):
        own = [r for r in finite if r["records"] == size]
        fit = [r for r in own if r["foreseen"] < LARGEST]
        forecast = Forecast.fit(
            [noise_in(r, r["owners"]) for r in fit], [r["foreseen"] for r in fit]
        )
        for title, foreseen in (
            ("simulation of the setting itself", {id(r): r["foreseen"] for r in own}),
            ("(11) fitted to these simulations", {id(r): forecast(noise_in(r, r["owners"])) for r in own}),
        ):  # fmt: skip
            errors = [foreseen[id(r)] / r["psi"] - 1 for r in own]
            right = sum((foreseen[id(r)] < r["alone"]) == (r["psi"] < r["alone"]) for r in own)
            error = f"{math.sqrt(float(np.mean(np.square(errors)))):.0%}"
            lines.append([str(size), title, error, f"{right} of {len(own)}"])
    return markdown(
        ["records:", "forecast from public rows", "relative error:", "right about the mean owner:"],
        lines,
    )


def hospital_table(rows: list[Row]) -> str:
    lines = [
        [name_of(r["epsilon"]), str(r["cap"]), f"{r['clip']:g}", f"{r['kappa']:g}",
         *(text(r[k]) for k in ("psi", "q25", "median", "q75")), f"{r['worth']} of {len(r['counts'])}",
         text(float(np.median(r["alone"]))), text(r["public"])]
        for r in rows
    ]  # fmt: skip
    titles = [
        "epsilon:",
        "answers:",
        "clip:",
        "kappa:",
        "psi:",
        "25%:",
        "median:",
        "75%:",
        "hospitals that gain:",
    ]
    return markdown([*titles, "alone (median):", "public rows:"], lines)


def plot_bands(rows: list[Row], references: Row, path: Path, data: str) -> None:
    """Figures 2 and 7: a panel a plan, median and quartiles by tick."""
    plans = list(dict.fromkeys(r["plan"] for r in rows))
    with drawing(
        path, 9.0, 3.7, f"{data}; median and quartiles of 100 runs. An epsilon is of a whole run."
    ) as figure:
        panels = figure.subplots(1, len(plans), sharey=True)
        for axes, plan in zip(panels, plans, strict=True):
            axes.set(xlabel="ticks (answers of all owners)", title=plan)
            axes.set_yscale("log")
            for colour, epsilon in zip(
                COLOURS, dict.fromkeys(r["epsilon"] for r in rows), strict=False
            ):
                own = [r for r in rows if r["plan"] == plan and r["epsilon"] == epsilon]
                ticks = [r["tick"] for r in own]
                axes.fill_between(
                    ticks,
                    [r["q25"] for r in own],
                    [r["q75"] for r in own],
                    color=colour,
                    alpha=0.25,
                    lw=0,
                )
                axes.plot(
                    ticks,
                    [r["median"] for r in own],
                    color=colour,
                    linewidth=1.8,
                    label=f"epsilon {epsilon:g}",
                )
            for value, name, style in (
                (references["zero"], "theta = 0", ":"),
                (references["public"], "public rows", "--"),
                (float(np.mean(references["alone"])), "alone", "-."),
            ):
                axes.axhline(value, color="#6b6f76", linewidth=1.2, linestyle=style, label=name)
        panels[0].set_ylabel("psi")
        panels[1].legend(fontsize=8, framealpha=1, edgecolor="white", loc=(0.03, 0.2))


def plot_grid(rows: list[Row], path: Path) -> None:
    """Figures 4 and 5: psi against epsilon and against records, with (11) as it is fitted where noise dominates."""
    with drawing(
        path,
        9.0,
        3.9,
        "Lending, 3 owners. Points: 300 runs on 3 deals, one kappa. Lines: (11), fitted where noise dominates.",
    ) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        own = [r for r in rows if r["rule"] == "fixed" and math.isfinite(r["epsilon"])]
        forecast = fitted(dominated(rows))
        sizes, epsilons = (
            sorted({r["records"] for r in own})[::2],
            sorted({r["epsilon"] for r in own})[2::4],
        )
        for axes, fixed, moving, values in (
            (panels[0], "records", "epsilon", sizes),
            (panels[1], "epsilon", "records", epsilons),
        ):
            axes.set(xlabel="epsilon of each owner" if moving == "epsilon" else "records of each owner",
                  title=f"by {moving}")  # fmt: skip
            axes.set_xscale("log")
            axes.set_yscale("log")
            for colour, value in zip(COLOURS, values, strict=False):
                points = [r for r in own if r[fixed] == value]
                x = [r[moving] for r in points]
                label = f"{value:g} records" if fixed == "records" else f"epsilon {value:.2g}"
                axes.plot(
                    x, [r["psi"] for r in points], "o", markersize=3.5, color=colour, label=label
                )
                expected = [forecast(noise_in(r)) for r in points]
                axes.plot(x, expected, color=colour, linewidth=1.2)
            axes.axhline(LARGEST, color="#6b6f76", linewidth=1, linestyle=":")
            axes.set_ylim(2e-3, 20)
            axes.legend(fontsize=7.5)
        panels[0].set_ylabel("mean psi")


def plot_value(rows: list[Row], shown: list[tuple[int, int]], path: Path, data: str) -> None:
    """Figure 6: the learner against models without noise, by epsilon; a panel for (records, owners)."""
    with drawing(
        path,
        11.5,
        3.5,
        f"{data}. Only the private learner has noise; psi 0 is the exact model of all records.",
    ) as figure:
        panels = figure.subplots(1, len(shown), sharey=True)
        for axes, (size, owners) in zip(panels, shown, strict=True):
            own = [
                r
                for r in rows
                if (r["records"], r["owners"]) == (size, owners) and math.isfinite(r["epsilon"])
            ]
            axes.set(xlabel="epsilon of each owner", title=f"{owners} owners of {size}")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.plot(
                [r["epsilon"] for r in own],
                [r["psi"] for r in own],
                "o-",
                color=COLOURS[0],
                label="private learner",
            )
            for key, name, colour, style in (
                ("zero", "theta = 0", "#6b6f76", ":"),
                ("alone", "alone", COLOURS[1], "-."),
                ("public", "public rows only", COLOURS[2], "--"),
            ):
                axes.axhline(own[0][key], color=colour, linestyle=style, linewidth=1.5, label=name)
        panels[0].set_ylabel("mean psi on everybody's records")
        panels[0].legend(fontsize=8, loc="lower left")
