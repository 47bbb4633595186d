"""The figures of runs: scores by round beside the epsilon spent, scores by client and scores by epsilon.

They are computed from private test data: they belong in ``private/`` folders and say so under the plot. Every function
takes the ``path`` of the figure, whose suffix is its format (png, pdf or svg), and the width of a figure for a
``paper``, in inches; it returns the path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from .._rounding import number_text, percent, rounded_down, rounded_up
from ..errors import ConfigError, DataError
from ._names import UNITS, title_of
from .canvas import INK, MUTED, drawing, legend_above, panels, styles_of
from .tables import DEVIATION, data_text

if TYPE_CHECKING:
    import pandas as pd

NOT_PRIVATE = "Measured on the clients' own test data: not private, not covered by epsilon."
BANDS = "Bands: 25th to 75th and 5th to 95th percentile. An epsilon covers one run, not the runs behind a band."
_STEPS = 1000  # of a line by client: more clients than that are drawn by as many quantiles

History = Sequence[Mapping[str, Any]]


def plot_rounds(
    lines: Mapping[str, History],
    path: Path,
    *,
    metric: str = "accuracy",
    step: str = "round",
    finetuned: Mapping[str, float] | None = None,
    measured: float | None = None,
    paper: float | None = None,
) -> Path:
    """Draw ``metric`` by round, above the objective where there is one, and the epsilon spent.

    Args:
        lines: the rows of a run by its algorithm, then those of its baselines; or, where runs were repeated, those of
            each budget. A row is an evaluated round with ``round``, ``epsilon`` and numbers. Of a number X that has
            ``X_p5``, ``X_p25``, ``X_p50``, ``X_p75`` and ``X_p95`` the percentiles are drawn, and then no epsilon. The
            first line has a dashed one beside it, of the shared model, where it has another ``global_<metric>``. A line
            with a single row is horizontal. None and NaN are left out.
        path: of the figure.
        metric: the number that is drawn first.
        step: what a round is called.
        finetuned: the values of models that were finetuned after the last round, by their names in the summary; each
            is a diamond at the end.
        measured: the lower bound on epsilon of a run with canaries; None for a run without.
        paper: its width in inches.

    Raises:
        ConfigError: the first line has no finite value of the metric.
    """
    name, history = next(iter(lines.items()))
    if not _column(history, metric)[1]:
        raise ConfigError(f"history has no finite {metric!r}; there is nothing to plot.")
    several = "budget" in history[0]
    heights = {metric: 4.0} | ({"objective": 2.6} if "objective" in history[0] else {})
    numbers, heights = list(heights), heights | ({} if several else {"epsilon": 1.6})
    styles = styles_of([*lines, *(finetuned or {})])
    last_round = max(float(row["round"]) for rows in lines.values() for row in rows)
    note, inches = f"{BANDS} {NOT_PRIVATE}" if several else NOT_PRIVATE, list(heights.values())
    with drawing(path, 8.2, sum(inches), note, paper=paper) as figure:
        column = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=inches)[:, 0]
        axes = dict(zip(heights, column, strict=True))
        for number in numbers:
            axes[number].set_ylabel(f"{'mean ' if number == metric else ''}{number.replace('_', ' ')}")
            for label, rows in lines.items():
                style = {"color": styles[label][0], "zorder": 3 if label == name else 2}
                _curve(axes[number], rows, number, title_of(label) if number == metric else "", style)
        shared = _column(history, f"global_{metric}")
        if shared[1] and shared != _column(history, metric):
            text = f"{title_of(name)} shared {number_text(shared[1][-1])}"
            axes[metric].plot(*shared, color=styles[name][0], linestyle="--", label=text)
        for label, value in (finetuned or {}).items():
            text, colour = f"{title_of(label)} {number_text(value)}", styles[label][0]
            axes[metric].plot([last_round], [value], "D", color=colour, label=text, clip_on=False, zorder=4)
        if not several:
            _epsilon_line(axes["epsilon"], history, measured)
        figure.axes[-1].set(xlabel=step, xlim=(0, last_round))
        figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        legend_above(figure)
    return path


def plot_clients(
    scores: Mapping[str, Sequence[float]],
    path: Path,
    *,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    shares: Mapping[str, tuple[float, float, float]] | None = None,
    paper: float | None = None,
) -> Path:
    """Draw every client's ``metric``, sorted, for the personal models against each baseline.

    Args:
        scores: method -> one value per client; the first is the method of interest. A client whose value is NaN is
            left out.
        path: of the figure.
        metric: what the values are.
        higher_is_better: False for errors and losses.
        shares: baseline -> shares of the clients for whom the method of interest is better, equal and worse; drawn as
            bars in a panel of their own.
        paper: its width in inches.

    Raises:
        ConfigError: no columns, no clients, or columns of different lengths.
    """
    lengths = {name: len(values) for name, values in scores.items()}
    if len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise ConfigError(f"every column needs one value for each client; lengths are {lengths}.")
    styles, first = styles_of(list(scores)), next(iter(scores))
    with panels(path, 2 if shares else 1, NOT_PRIVATE, paper=paper) as (axes, *others):
        axes.set(xlabel="share of clients, from worst to best", ylabel=metric.replace("_", " "), xlim=(0, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        for name, column in scores.items():
            values = np.asarray(column, dtype=np.float64)
            values = np.sort(values[np.isfinite(values)])[:: 1 if higher_is_better else -1]
            if values.size == 0:
                continue
            label = f"{title_of(name)} {number_text(values.mean())}"
            if values.size > _STEPS:
                values = values[(2 * np.arange(_STEPS) + 1) * values.size // (2 * _STEPS)]  # the middle of each step
            edges = np.linspace(0.0, 1.0, values.size + 1)
            steps: dict[str, Any] = {"drawstyle": "steps-post", "zorder": 3 if name == first else 2}
            axes.plot(edges, np.append(values, values[-1]), color=styles[name][0], label=label, **steps)
        for bars in others:
            _share_bars(bars, shares or {}, title_of(first))
    return path


def plot_frontier(groups: pd.DataFrame, path: Path, *, metric: str = "accuracy", paper: float | None = None) -> Path:
    """Draw ``metric`` against epsilon, one line a method, one panel for each protected unit and data set.

    The epsilons of different units (all data of a client, one record) do not compare, so they never share
    an axis. A method that releases nothing (epsilon 0) and one that protects nothing (epsilon inf) are
    horizontal lines in every panel of their data: bounds, not points of a curve. Settings that differ between
    runs of one method are part of its label; seeds are averaged, with bars of one standard deviation.

    Args:
        groups: from :func:`fedmtl.report.tables.grouped`.
        path: of the figure.
        metric: one that the runs have.
        paper: its width in inches.

    Raises:
        DataError: no group has a finite value of the metric.
    """
    groups = groups[groups[metric].map(math.isfinite)]
    if groups.empty:
        raise DataError(f"no run has a finite {metric!r}; there is nothing to plot.")
    on_axis = (groups["epsilon"] > 0) & groups["epsilon"].map(math.isfinite)
    groups = groups.assign(place=groups.apply(data_text, axis=1), on_axis=on_axis)
    points = groups[on_axis]
    places = sorted(set(zip(points["place"], points["unit"], strict=True)))
    places += sorted({(data, "") for data in groups["place"]} - {(data, "") for data, _ in places})
    styles = _frontier_styles(groups)
    note = f"{NOT_PRIVATE} Mean ± standard deviation over seeds." if groups["seeds"].max() > 1 else NOT_PRIVATE
    with panels(path, len(places), note, paper=paper) as drawn:
        for axes, (data, unit) in zip(drawn, places, strict=True):
            own = groups[(groups["place"] == data) & ((groups["unit"] == unit) | ~groups["on_axis"])]
            deltas = " and ".join(rounded_up(delta, 2) for delta in sorted(own["delta"].dropna().unique()))
            axes.set(ylabel=f"mean {metric.replace('_', ' ')}", title=fill(data, 70))
            at_delta = f"\nat delta {deltas}" if deltas else ""
            axes.set_xlabel(f"epsilon, protecting {UNITS.get(unit, unit or 'nothing')}{at_delta}")
            _frontier_panel(axes, own, metric, styles)
    return path


def _curve(axes: Axes, rows: History, number: str, title: str, style: dict[str, Any]) -> None:
    """Draw a number by round, or its median with bands of percentiles where the rows have them. The legend has the last
    number after the ``title``, if there is one."""
    bands = f"{number}_p50" in rows[0]
    rounds, values = _column(rows, f"{number}_p50" if bands else number)
    if title and values:
        style = style | {"label": title if bands else f"{title} {number_text(values[-1])}"}
    if len(values) == 1:
        axes.axhline(values[0], **style)
    elif values:
        axes.plot(rounds, values, marker="o" if 2 < len(values) <= 30 else "", **style)
    for low, high, alpha in ((5, 95, 0.12), (25, 75, 0.25)) if bands else ():
        lower, upper = ([float(row[f"{number}_p{mark}"]) for row in rows] for mark in (low, high))
        at = [float(row["round"]) for row in rows]
        axes.fill_between(at, lower, upper, color=style["color"], alpha=alpha, linewidth=0)
    lowest, highest = axes.dataLim.intervaly
    if number == "objective" and lowest > 0 and highest >= 10 * lowest:  # else a log axis has no marks to read
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _epsilon_line(axes: Axes, history: History, measured: float | None) -> None:
    """Draw epsilon by round with its last value beside it, and a bar down to what was ``measured``; or write that there
    is none."""
    axes.set_ylabel("epsilon")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    rounds, epsilons = _column(history, "epsilon")
    if not rounds or len(rounds) < len(history):
        axes.set_yticks([])
        words = "not private: epsilon is infinite"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
        return
    rounds, epsilons = [0.0, *rounds], [0.0, *epsilons]  # nothing is spent before the first round
    axes.plot(rounds, epsilons, color=INK, drawstyle="steps-pre")  # between evaluations no more than at the next one
    axes.fill_between(rounds, epsilons, color=INK, alpha=0.08, linewidth=0, step="pre")
    axes.set(xlim=(0, max(rounds)), ylim=(0, 1.18 * max(measured or 0.0, *epsilons) or 1))
    axes.text(1.02 * rounds[-1], epsilons[-1], rounded_up(epsilons[-1], 3), color=INK, va="center")
    if measured is not None:
        axes.vlines(rounds[-1], measured, epsilons[-1], color=MUTED, linewidth=4, zorder=4).set_clip_on(False)
        axes.text(1.02 * rounds[-1], measured, f"at least\n{rounded_down(measured)}", color=MUTED, va="top")


def _share_bars(axes: Axes, shares: Mapping[str, tuple[float, float, float]], name: str) -> None:
    """Draw, for each baseline, a bar of the shares of clients that gain, stay equal and lose, with their percentages
    beside it."""
    rows, start = range(len(shares)), np.zeros(len(shares))
    for part, (word, colour) in enumerate((("better", "#0072B2"), ("equal", "#dfe2e7"), ("worse", "#E69F00"))):
        widths = np.array([three[part] for three in shares.values()])
        bars = axes.barh(rows, widths, left=start, height=0.45, color=colour, label=word)
        start = start + widths
    axes.bar_label(bars, [percent(three) for three in shares.values()], padding=4, color=INK)
    for row, baseline in enumerate(shares):
        axes.text(0, row - 0.3, f"than {title_of(baseline)}", color=INK)
    axes.set(xlim=(0, 1), ylim=(len(shares) - 0.6, -0.7), yticks=[])
    axes.set_xlabel(fill(f"clients for whom {name} is better/equal/worse", 46))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3)
    axes.grid(False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines["left"].set_visible(False)


def _column(rows: History, key: str) -> tuple[list[float], list[float]]:
    """Return rounds and values of ``key``, without the rows where it is missing or not finite."""
    points = [(float(row["round"]), float(row[key])) for row in rows if row.get(key) is not None]
    points = [point for point in points if math.isfinite(point[1])]
    return [r for r, _ in points], [v for _, v in points]


def _frontier_styles(groups: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) by label; a method's first label has the method's own colour."""
    first = groups.drop_duplicates("label")
    names = first["label"].where(first["algorithm"].duplicated(), first["algorithm"])
    return dict(zip(first["label"], styles_of(list(names)).values(), strict=True))


def _frontier_panel(axes: Axes, groups: pd.DataFrame, metric: str, styles: Mapping[str, tuple[str, str]]) -> None:
    """Draw the curves and bounds of one unit."""
    epsilons = sorted(groups.loc[groups["on_axis"], "epsilon"]) or [1.0]
    ticks, inches = list[float](), axes.bbox.width / axes.figure.dpi
    for epsilon in epsilons:  # as many of them as stay legible
        if not ticks or epsilon > ticks[-1] * (1.25**2 * epsilons[-1] / epsilons[0]) ** (0.4 / inches):
            ticks.append(epsilon)
    axes.set_xscale("log")
    axes.set_xlim(epsilons[0] / 1.25, epsilons[-1] * 1.25)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [rounded_up(tick, 3) for tick in ticks])
    for label, same in groups.groupby("label", sort=False):
        colour, marker = styles[str(label)]
        name = str(label) if len(str(label)) <= 40 else f"{str(label)[:39]}…"  # so that it leaves room for the curves
        for _, bound in same[~same["on_axis"]].iterrows():
            level, style = ("no privacy", "dotted") if bound["epsilon"] > 0 else ("epsilon 0", "solid")
            axes.axhline(bound[metric], color=colour, linestyle=style, label=f"{name}, {level}")
        curve = same[same["on_axis"]].sort_values("epsilon")
        if len(curve):
            bars = curve[f"{metric}{DEVIATION}"] if (curve["seeds"] > 1).any() else None
            axes.errorbar(
                curve["epsilon"], curve[metric], yerr=bars, color=colour, marker=marker, capsize=2, label=name
            )
