"""The figures of runs: scores by round with the epsilon spent, by client and by epsilon.

They are computed from private test data: they belong in ``private/`` folders, and a note under the
plot says so. Every function takes the ``path`` of the figure, whose suffix is its format (png, pdf
or svg), and the width of a figure for a ``paper``, in inches. It returns the path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from .._extras import ticker
from .._rounding import number_text, percent, rounded_down, rounded_up
from ..errors import ConfigError, DataError
from ._names import UNITS, title_of
from .canvas import INK, MUTED, drawing, legend_above, legible_ticks, panels, styles_of
from .tables import DEVIATION, data_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

NOT_PRIVATE = "Measured on the clients' own test data: not private, not covered by epsilon."
BANDS = (
    "Bands: 25th to 75th and 5th to 95th percentile. "
    # each run behind a band has spent the epsilon
    "An epsilon covers one run, not the runs behind a band."
)
# The most steps of a line by client: of more clients, as many quantiles are drawn.
_STEPS = 1000
# Lines of the method of interest are drawn above those of its baselines.
_MAIN_LAYER = 3
_LAYER = 2

History = Sequence[Mapping[str, Any]]
Lines = Mapping[str, History]
Styles = Mapping[str, tuple[str, str]]
Style = dict[str, Any]
Shares = Mapping[str, tuple[float, float, float]]


def plot_rounds(
    lines: Lines,
    path: Path,
    *,
    metric: str = "accuracy",
    step: str = "round",
    finetuned: Mapping[str, float] | None = None,
    measured: float | None = None,
    paper: float | None = None,
) -> Path:
    """Draws ``metric`` by round, then the objective if the rows have it, and the epsilon spent.

    Args:
        lines: the rows of a run by its algorithm, then those of its baselines. For replicates they
            are the rows of each budget. A row is an evaluated round with ``round``, ``epsilon`` and
            numbers; None and NaN are left out. If a number X has ``X_p5``, ``X_p25``, ``X_p50``,
            ``X_p75`` and ``X_p95``, these percentiles are drawn, and no epsilon. If the first line
            has another ``global_<metric>``, a dashed line shows that of the shared model. A line
            with a single row is horizontal.
        path: of the figure.
        metric: the number that is drawn first.
        step: the name of a round.
        finetuned: the values of models that were finetuned after the last round, by their names in
            the summary; each is a diamond at the end.
        measured: the lower bound on epsilon of a run with canaries; None for a run without.
        paper: the width in inches of a figure for a paper.

    Raises:
        ConfigError: the first line has no finite value of the metric.
    """
    name, history = next(iter(lines.items()))
    if not _column(history, metric)[1]:
        raise ConfigError(f"history has no finite {metric!r}; there is nothing to plot.")
    several = "budget" in history[0]
    heights = {metric: 4.0}
    if "objective" in history[0]:
        heights["objective"] = 2.6
    numbers = list(heights)
    note = f"{BANDS} {NOT_PRIVATE}"
    if not several:
        heights["epsilon"] = 1.6
        note = NOT_PRIVATE
    finetuned = finetuned or {}
    styles = styles_of([*lines, *finetuned])
    last_round = max(float(row["round"]) for rows in lines.values() for row in rows)
    inches = list(heights.values())
    with drawing(path, 8.2, sum(inches), note, paper=paper) as figure:
        grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=inches)
        axes = dict(zip(heights, grid[:, 0], strict=True))
        for number in numbers:
            _number_panel(axes[number], lines, number, number == metric, styles)
        _shared_line(axes[metric], history, metric, title_of(name), styles[name][0])
        for label, value in finetuned.items():
            # the diamond stands on the edge of the panel, and is not cut there
            mark: Style = {"color": styles[label][0], "clip_on": False, "zorder": 4}
            mark["label"] = f"{title_of(label)} {number_text(value)}"
            axes[metric].plot([last_round], [value], "D", **mark)
        if not several:
            _epsilon_line(axes["epsilon"], history, measured)
        figure.axes[-1].set(xlabel=step, xlim=(0, last_round))
        figure.axes[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        legend_above(figure)
    return path


def plot_clients(
    scores: Mapping[str, Sequence[float]],
    path: Path,
    *,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    shares: Shares | None = None,
    paper: float | None = None,
) -> Path:
    """Draws the sorted ``metric`` of all clients, for the personal models and each baseline.

    Args:
        scores: one value for each client, by method; the first is the method of interest. A client
            with NaN is left out.
        path: of the figure.
        metric: the name of the values.
        higher_is_better: False for errors and losses.
        shares: by baseline, the shares of the clients for whom the method of interest is better,
            equal and worse; drawn as bars in a panel of their own.
        paper: the width in inches of a figure for a paper.

    Raises:
        ConfigError: no columns, no clients, or columns of different lengths.
    """
    lengths = {name: len(values) for name, values in scores.items()}
    if len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise ConfigError(f"every column needs one value for each client; lengths are {lengths}.")
    styles = styles_of(list(scores))
    count = 2 if shares else 1
    with panels(path, count, NOT_PRIVATE, paper=paper) as (axes, *others):
        axes.set(
            xlabel="share of clients, from worst to best",
            ylabel=metric.replace("_", " "),
            xlim=(0, 1),
        )
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        layer = _MAIN_LAYER  # of the method of interest
        for name, column in scores.items():
            values = np.asarray(column, dtype=np.float64)
            values = np.sort(values[np.isfinite(values)])
            if not higher_is_better:
                values = values[::-1]
            if values.size > 0:
                style = {"color": styles[name][0], "zorder": layer}
                _client_line(axes, values, title_of(name), style)
            layer = _LAYER
        # there is a second panel only with shares
        for bars in others:
            _share_bars(bars, shares or {}, title_of(next(iter(scores))))
    return path


def plot_frontier(
    groups: pd.DataFrame, path: Path, *, metric: str = "accuracy", paper: float | None = None
) -> Path:
    """Draws ``metric`` against epsilon, a line for each method.

    Every protected unit and data set has a panel of its own: the epsilons of different units (all
    data of a client, one record) do not compare, so they never share an axis. A method that
    releases nothing (epsilon 0) and one that protects nothing (epsilon inf) are horizontal lines in
    every panel of their data: bounds and not points of a curve. Settings that differ between runs
    of one method are part of its label. Seeds are averaged, with bars of one standard deviation.

    Args:
        groups: from :func:`fedmtl.report.tables.grouped`.
        path: of the figure.
        metric: one that the runs have.
        paper: the width in inches of a figure for a paper.

    Raises:
        DataError: no group has a finite value of the metric.
    """
    groups = groups[groups[metric].map(math.isfinite)]
    if groups.empty:
        raise DataError(f"no run has a finite {metric!r}; there is nothing to plot.")
    on_axis = (groups["epsilon"] > 0) & groups["epsilon"].map(math.isfinite)
    groups = groups.assign(place=groups.apply(data_text, axis=1), on_axis=on_axis)
    places = _frontier_places(groups)
    styles = _frontier_styles(groups)
    note = NOT_PRIVATE
    if groups["seeds"].max() > 1:
        note = f"{NOT_PRIVATE} Mean ± standard deviation over seeds."
    with panels(path, len(places), note, paper=paper) as drawn:
        for axes, (data, unit) in zip(drawn, places, strict=True):
            in_panel = (groups["unit"] == unit) | ~groups["on_axis"]
            own = groups[(groups["place"] == data) & in_panel]
            axes.set(ylabel=f"mean {metric.replace('_', ' ')}", title=fill(data, 70))
            axes.set_xlabel(_frontier_label(own, unit))
            _frontier_panel(axes, own, metric, styles)
    return path


def _number_panel(axes: Axes, lines: Lines, number: str, is_metric: bool, styles: Styles) -> None:
    """Draws one number of all lines by round; only the panel of the metric names the lines."""
    label = number.replace("_", " ")
    if is_metric:
        label = f"mean {label}"
    axes.set_ylabel(label)
    layer = _MAIN_LAYER  # of the first line
    for name, rows in lines.items():
        title = title_of(name) if is_metric else ""
        _curve(axes, rows, number, title, {"color": styles[name][0], "zorder": layer})
        layer = _LAYER


def _shared_line(axes: Axes, history: History, metric: str, title: str, colour: str) -> None:
    """Draws the score of the shared model, dashed, if it is not that of the personal models."""
    rounds, values = _column(history, f"global_{metric}")
    if not values or (rounds, values) == _column(history, metric):
        return
    text = f"{title} shared {number_text(values[-1])}"
    axes.plot(rounds, values, color=colour, linestyle="--", label=text)


def _curve(axes: Axes, rows: History, number: str, title: str, style: Style) -> None:
    """Draws a number by round, or its median with bands of percentiles if the rows have them.

    The legend has the last number after the ``title``; without a title it has no entry.
    """
    bands = f"{number}_p50" in rows[0]
    key = f"{number}_p50" if bands else number
    rounds, values = _column(rows, key)
    if title and values:
        label = title
        if not bands:
            label = f"{title} {number_text(values[-1])}"
        style = {**style, "label": label}
    if len(values) == 1:
        axes.axhline(values[0], **style)
    elif values:
        # markers of more rounds would cover the line
        marker = "o" if 2 < len(values) <= 30 else ""
        axes.plot(rounds, values, marker=marker, **style)
    if bands:
        at = [float(row["round"]) for row in rows]
        for low, high, alpha in ((5, 95, 0.12), (25, 75, 0.25)):
            lower = [float(row[f"{number}_p{low}"]) for row in rows]
            upper = [float(row[f"{number}_p{high}"]) for row in rows]
            axes.fill_between(at, lower, upper, color=style["color"], alpha=alpha, linewidth=0)
    lowest, highest = axes.dataLim.intervaly
    # within a single power of ten a log axis has no marks to read
    if number == "objective" and lowest > 0 and highest >= 10 * lowest:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _epsilon_line(axes: Axes, history: History, measured: float | None) -> None:
    """Draws epsilon by round, and a bar from its last value down to the ``measured`` bound.

    Without privacy the panel has a line of text instead.
    """
    axes.set_ylabel("epsilon")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    rounds, epsilons = _column(history, "epsilon")
    # an infinite epsilon has no point in the column
    if not rounds or len(rounds) < len(history):
        axes.set_yticks([])
        words = "not private: epsilon is infinite"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
        return
    # nothing is spent before the first round
    rounds = [0.0, *rounds]
    epsilons = [0.0, *epsilons]
    last = epsilons[-1]
    # between two evaluations at most the epsilon of the later one is spent
    axes.plot(rounds, epsilons, color=INK, drawstyle="steps-pre")
    axes.fill_between(rounds, epsilons, color=INK, alpha=0.08, linewidth=0, step="pre")
    top = 1.18 * max(measured or 0.0, *epsilons)
    axes.set(xlim=(0, max(rounds)), ylim=(0, top or 1))
    beside = 1.02 * rounds[-1]
    axes.text(beside, last, rounded_up(last, 3), color=INK, va="center")
    if measured is not None:
        bar = axes.vlines(rounds[-1], measured, last, color=MUTED, linewidth=4, zorder=4)
        bar.set_clip_on(False)
        words = f"at least\n{rounded_down(measured)}"
        axes.text(beside, measured, words, color=MUTED, va="top")


def _client_line(axes: Axes, values: NDArray[np.float64], title: str, style: Style) -> None:
    """Draws sorted values (n,) as steps of equal width over 0 to 1; the legend has their mean."""
    label = f"{title} {number_text(values.mean())}"
    if values.size > _STEPS:
        # the client in the middle of each of the steps
        middles = (2 * np.arange(_STEPS) + 1) * values.size // (2 * _STEPS)
        values = values[middles]
    edges = np.linspace(0.0, 1.0, values.size + 1)
    heights = np.append(values, values[-1])
    axes.plot(edges, heights, label=label, drawstyle="steps-post", **style)


def _share_bars(axes: Axes, shares: Shares, name: str) -> None:
    """Draws for each baseline a bar of the shares of clients that gain, stay equal and lose.

    The percentages stand beside the bar.
    """
    rows = range(len(shares))
    start = np.zeros(len(shares))
    parts = (("better", "#0072B2"), ("equal", "#dfe2e7"), ("worse", "#E69F00"))
    for part, (word, colour) in enumerate(parts):
        widths = np.array([three[part] for three in shares.values()])
        bars = axes.barh(rows, widths, left=start, height=0.45, color=colour, label=word)
        start = start + widths
    percentages = [percent(three) for three in shares.values()]
    axes.bar_label(bars, percentages, padding=4, color=INK)
    for row, baseline in enumerate(shares):
        axes.text(0, row - 0.3, f"vs {title_of(baseline)}", color=INK)
    axes.set(xlim=(0, 1), ylim=(len(shares) - 0.6, -0.7), yticks=[])
    axes.set_xlabel(fill(f"clients for whom {name} is better/equal/worse", 46))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3)
    axes.grid(False)
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    axes.spines["left"].set_visible(False)


def _column(rows: History, key: str) -> tuple[list[float], list[float]]:
    """Returns rounds and values of ``key``, without the rows that have no finite value."""
    rounds = []
    values = []
    for row in rows:
        if row.get(key) is None:
            continue
        value = float(row[key])
        if math.isfinite(value):
            rounds.append(float(row["round"]))
            values.append(value)
    return rounds, values


def _frontier_places(groups: pd.DataFrame) -> list[tuple[str, str]]:
    """Returns the panels as (data, unit): data without a finite epsilon have a panel of no unit."""
    points = groups[groups["on_axis"]]
    # each unit has its own axis: epsilons of different units do not compare
    places = sorted(set(zip(points["place"], points["unit"], strict=True)))
    drawn = {data for data, _ in places}
    others = {data for data in groups["place"] if data not in drawn}
    return places + [(data, "") for data in sorted(others)]


def _frontier_styles(groups: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Returns a (colour, marker) by label; a method's first label has the method's own colour."""
    # styles_of gives a name its colour: the method's for its first label, a spare one for others
    first = groups.drop_duplicates("label")
    names = first["label"].where(first["algorithm"].duplicated(), first["algorithm"])
    return dict(zip(first["label"], styles_of(list(names)).values(), strict=True))


def _frontier_label(groups: pd.DataFrame, unit: str) -> str:
    """Returns the label of the epsilon axis: the unit and, if there is one, delta."""
    label = f"epsilon, protecting {UNITS.get(unit, unit or 'nothing')}"
    deltas = [rounded_up(delta, 2) for delta in sorted(groups["delta"].dropna().unique())]
    if not deltas:
        return label
    return f"{label}\nat delta {' and '.join(deltas)}"


def _frontier_panel(axes: Axes, groups: pd.DataFrame, metric: str, styles: Styles) -> None:
    """Draws the curves and bounds of one unit."""
    epsilons = sorted(groups.loc[groups["on_axis"], "epsilon"]) or [1.0]
    axes.set_xscale("log")
    axes.set_xlim(epsilons[0] / 1.25, epsilons[-1] * 1.25)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    ticks = legible_ticks(epsilons, axes.bbox.width / axes.figure.dpi)
    axes.set_xticks(ticks, [rounded_up(tick, 3) for tick in ticks])
    for label, same in groups.groupby("label", sort=False):
        colour, marker = styles[str(label)]
        name = str(label)
        if len(name) > 40:
            name = f"{name[:39]}…"  # leaves room for the curves
        # epsilon is 0 or infinite there: bounds on the method's scores
        for _, bound in same[~same["on_axis"]].iterrows():
            if bound["epsilon"] > 0:
                line: Style = {"linestyle": "dotted", "label": f"{name}, no privacy"}
            else:
                line = {"linestyle": "solid", "label": f"{name}, epsilon 0"}
            axes.axhline(bound[metric], color=colour, **line)
        curve = same[same["on_axis"]].sort_values("epsilon")
        if curve.empty:
            continue
        bars = None
        if (curve["seeds"] > 1).any():
            bars = curve[f"{metric}{DEVIATION}"]
        style: Style = {"color": colour, "marker": marker, "capsize": 2, "label": name}
        axes.errorbar(curve["epsilon"], curve[metric], yerr=bars, **style)
