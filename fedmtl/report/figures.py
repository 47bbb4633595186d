"""The figures of runs: epsilon by round, scores by round, by client and by epsilon.

``plot_epsilon`` uses the plan of a run, which is public. All others are computed from private test data: they belong in
``private/`` folders and say so under the plot.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from .._rounding import number_text, rounded_up
from ..errors import ConfigError, DataError
from ._names import UNITS, title_of
from .canvas import INK, MUTED, drawing, legend_beside, plain_ticks, styles_of
from .tables import DEVIATION, data_text

if TYPE_CHECKING:
    import pandas as pd

NOT_PRIVATE = "Measured on the clients' own test data: not private, not covered by epsilon."
COVERED = "An epsilon covers one run, not the runs behind a band."
PUBLIC = "Computed from the training plan alone: no client data enters this figure."
_STEPS = 1000  # of a line by client: more clients than that are drawn by as many quantiles

History = Sequence[Mapping[str, Any]]


def plot_history(
    history: History,
    baselines: Mapping[str, History],
    path: str | os.PathLike[str],
    *,
    name: str = "pmtl",
    metric: str = "accuracy",
    step: str = "round",
    finetuned: Mapping[str, float] | None = None,
) -> Path:
    """Draw ``metric`` by round, with each baseline's, above the epsilon spent by round.

    Args:
        history: one mapping per evaluated round with ``round``, ``epsilon`` and ``metric``;
            ``global_<metric>`` (the shared model's) is drawn as a dashed line where it is there and another.
            None and NaN are left out.
        baselines: the same for each baseline. One with a single row is a horizontal line.
        path: where the PNG goes; written to a temporary name and renamed.
        name: the algorithm of ``history``.
        metric: the column that is drawn.
        step: what a round is called.
        finetuned: the values of models that were finetuned after the last round, by their names in the summary; each
            is a diamond at the end.

    Returns:
        ``path``.

    Raises:
        ConfigError: no row of ``history`` has the metric.
    """
    rounds, values = _column(history, metric)
    if not values:
        raise ConfigError(f"history has no finite {metric!r}; there is nothing to plot.")
    after = {label: value for label, value in (finetuned or {}).items() if math.isfinite(value)}
    styles = styles_of([name, *baselines, *after])
    last_round = max([*rounds, *(r for rows in baselines.values() for r in _column(rows, metric)[0])])
    with drawing(path, 8.2, 5.6, NOT_PRIVATE) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.4, 1])
        upper.set(ylabel=f"{metric.replace('_', ' ')}, mean over clients", title=f"{_words(metric)} by {step}")
        lower.set(xlabel=step, ylabel="epsilon spent")
        _history_line(upper, history, metric, title_of(name), styles[name][0], zorder=3, linewidth=2.4)
        shared = _column(history, f"global_{metric}")
        if shared[1] and shared != (rounds, values):
            label = f"{title_of(name)} shared {number_text(shared[1][-1])}"
            upper.plot(*shared, color=styles[name][0], linewidth=1.4, linestyle=(0, (4, 2)), label=label)
        for baseline, rows in baselines.items():
            _history_line(upper, rows, metric, title_of(baseline), styles[baseline][0], linewidth=1.6)
        for label, value in after.items():
            text, diamond = f"{title_of(label)} {number_text(value)}", {"marker": "D", "markersize": 7, "linestyle": ""}
            upper.plot([last_round], [value], color=styles[label][0], label=text, clip_on=False, zorder=4, **diamond)
        upper.margins(y=0.08)
        upper.set_xlim(0, last_round)
        legend_beside(upper)
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        _epsilon_line(lower, *_column(history, "epsilon"), private=_is_private(history))
    return Path(path)


def plot_clients(
    clients_table: Mapping[str, Sequence[float]],
    path: str | os.PathLike[str],
    *,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    resolution: float = 2.0**-40,
    diverged: Mapping[str, Collection[int]] | None = None,
) -> Path:
    """Draw every client's ``metric``, sorted, for the personal models against each baseline.

    The right panel counts, for each baseline, the clients for whom the personal model is better, equal or
    worse: the same clients, compared one by one.

    Args:
        clients_table: method -> one value per client, all in the same order of clients; the first column
            is the method of interest, the others its baselines. A client whose value is NaN is left out.
        path: where the PNG goes; written to a temporary name and renamed.
        metric: what the values are.
        higher_is_better: False for errors and losses.
        resolution: relative difference up to which two values are equal.
        diverged: method -> places of clients whose training did, and who are in no comparison.

    Returns:
        ``path``.

    Raises:
        ConfigError: no columns, no clients, or columns of different lengths.
    """
    columns = {name: np.asarray(values, dtype=np.float64) for name, values in clients_table.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if not columns or len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise ConfigError(f"every column needs one value for each client; lengths are {lengths}.")
    first, *others = columns
    styles = styles_of(list(columns))
    with drawing(path, 9.6 if others else 6.4, 4.4, NOT_PRIVATE) as figure:
        panels = figure.subplots(1, 2 if others else 1, squeeze=False, width_ratios=[1.5, 1] if others else [1])[0]
        left: Axes = panels[0]
        left.set(xlabel="share of clients, from worst to best", ylabel=metric.replace("_", " "))
        left.set_title(f"{_words(metric)} by client")
        for name in [*others, first]:
            values = np.sort(columns[name][np.isfinite(columns[name])])[:: 1 if higher_is_better else -1]
            if values.size == 0:
                continue
            label = f"{title_of(name)}  mean {number_text(values.mean())}"
            if values.size > _STEPS:
                values = values[(2 * np.arange(_STEPS) + 1) * values.size // (2 * _STEPS)]  # the middle of each step
            edges = np.linspace(0.0, 1.0, values.size + 1)
            style: dict[str, Any] = {"color": styles[name][0], "linewidth": 2.6 if name == first else 1.6}
            style |= {"drawstyle": "steps-post", "solid_joinstyle": "miter", "solid_capstyle": "butt"}
            left.plot(edges, np.append(values, values[-1]), label=label, **style)  # stairs() takes ten times as long
        left.set_xlim(0.0, 1.0)
        left.xaxis.set_major_formatter(PercentFormatter(1.0))
        left.legend(loc="lower right" if higher_is_better else "upper right", reverse=True)
        if others:
            lost = {name: list((diverged or {}).get(name, ())) for name in columns}
            gains = {}
            for name in others:
                own, other = columns[first], columns[name]
                gain = (own - other) * (1.0 if higher_is_better else -1.0)
                gain[np.abs(gain) <= resolution * np.maximum(np.abs(own), np.abs(other))] = 0.0
                gain[[*lost[first], *lost[name]]] = np.nan
                gains[name] = gain
            _gain_bars(panels[1], gains, title_of(first))
    return Path(path)


def plot_epsilon(
    rounds: Sequence[int], epsilons: Sequence[float], path: str | os.PathLike[str], *, step: str = "round"
) -> Path:
    """Draw the epsilon spent by round; from public quantities only.

    Args:
        rounds: round numbers, (T,).
        epsilons: the epsilon spent after each of them, (T,); inf where nothing is protected.
        path: where the PNG goes; written to a temporary name and renamed.
        step: what a round is called.

    Returns:
        ``path``.

    Raises:
        ConfigError: the lengths differ.
    """
    if len(rounds) != len(epsilons):
        raise ConfigError(f"{len(rounds)} rounds and {len(epsilons)} epsilons; there must be one for each.")
    finite = [(r, e) for r, e in zip(rounds, epsilons, strict=True) if e is not None and math.isfinite(e)]
    private = len(finite) == len(rounds) and bool(finite)
    with drawing(path, 6.8, 3.6, PUBLIC) as figure:
        axes = figure.subplots()
        axes.set(xlabel=step, ylabel="epsilon spent", title=f"Privacy spent by {step}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _epsilon_line(axes, [r for r, _ in finite], [e for _, e in finite], private=private)
    return Path(path)


def plot_bands(
    history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    name: str,
    metric: str = "accuracy",
    step: str = "round",
) -> Path:
    """Draw the percentiles of ``metric``, and of the objective where there is one.

    Args:
        history: one mapping for each evaluated round and budget with ``round``, ``budget`` and, for a number X,
            ``X_p5``, ``X_p25``, ``X_p50``, ``X_p75`` and ``X_p95``, or ``X`` alone (one run a budget: a line).
        path: where the PNG goes; written to a temporary name and renamed.
        name: the algorithm.
        metric: the number drawn in the first panel.
        step: what a round is called.

    Returns:
        ``path``.

    Raises:
        ConfigError: no row has the metric.
    """
    if not history or metric not in history[0]:
        raise ConfigError(f"history has no {metric!r}; there is nothing to plot.")
    numbers = [metric, *(["objective"] if "objective" in history[0] else [])]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in history:
        lines.setdefault(_budget(row["budget"]), []).append(row)
    styles = styles_of(list(lines))
    note = f"Bands: 25th to 75th and 5th to 95th percentile. {COVERED} {NOT_PRIVATE}"
    with drawing(path, 0.6 + 6.4 * len(numbers), 4.2, note) as figure:
        for axes, number in zip(figure.subplots(1, len(numbers), squeeze=False)[0], numbers, strict=True):
            axes.set(xlabel=step, ylabel=number, title=f"{title_of(name)}: {number} by {step}")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            for label, rows in lines.items():
                colour, rounds = styles[label][0], [float(row["round"]) for row in rows]
                for low, high, alpha in ((5, 95, 0.12), (25, 75, 0.25)):
                    if f"{number}_p{low}" in rows[0]:
                        edges = ([float(row[f"{number}_p{mark}"]) for row in rows] for mark in (low, high))
                        axes.fill_between(rounds, *edges, color=colour, alpha=alpha, linewidth=0)
                middle = [float(row.get(f"{number}_p50", row[number])) for row in rows]
                axes.plot(rounds, middle, color=colour, marker="o" if len(rounds) <= 30 else "", label=label)
            if number == "objective" and _spans_a_decade(history, number):
                axes.set_yscale("log")
                plain_ticks(axes.yaxis)
            axes.set_xlim(0, max(row["round"] for row in history))
            axes.legend()
    return Path(path)


def plot_frontier(groups: pd.DataFrame, path: str | os.PathLike[str], *, metric: str = "accuracy") -> Path:
    """Draw ``metric`` against epsilon, one line a method, one panel for each protected unit and data set.

    The epsilons of different units (all data of a client, one record) do not compare, so they never share
    an axis. A method that releases nothing (epsilon 0) and one that protects nothing (epsilon inf) are
    horizontal lines in every panel of their data: bounds, not points of a curve. Settings that differ between
    runs of one method are part of its label; seeds are averaged, with bars of one standard deviation.

    Args:
        groups: from :func:`fedmtl.report.tables.grouped`.
        path: where the PNG goes; written to a temporary name and renamed.
        metric: one that the runs have.

    Returns:
        ``path``.

    Raises:
        DataError: no group has a finite value of the metric.
    """
    groups = groups[groups[metric].map(math.isfinite)]
    if groups.empty:
        raise DataError(f"no run has a finite {metric!r}; there is nothing to plot.")
    on_axis = (groups["epsilon"] > 0) & groups["epsilon"].map(math.isfinite)
    groups = groups.assign(place=groups.apply(data_text, axis=1), on_axis=on_axis)
    points = groups[groups["on_axis"]]
    places = sorted(set(zip(points["place"], points["unit"], strict=True)))
    places += sorted({(data, "") for data in groups["place"]} - {(data, "") for data, _ in places})
    styles = _frontier_styles(groups)
    words, columns = metric.replace("_", " "), min(len(places), 2)
    most = groups["seeds"].max()
    note = f"{NOT_PRIVATE} Mean ± standard deviation of up to {most} seeds." if most > 1 else NOT_PRIVATE
    with drawing(path, 0.4 + 7.4 * columns, 0.4 + 4.2 * math.ceil(len(places) / 2), note) as figure:
        panels = list(figure.subplots(math.ceil(len(places) / 2), columns, squeeze=False).flat)
        for spare in panels[len(places) :]:
            spare.remove()
        for axes, (data, unit) in zip(panels, places, strict=False):
            drawn = groups[(groups["place"] == data) & ((groups["unit"] == unit) | ~groups["on_axis"])]
            deltas = sorted(set(drawn.loc[drawn["on_axis"], "delta"].dropna()))
            at_delta = f"; delta {' and '.join(rounded_up(delta, 2) for delta in deltas)}" if deltas else ""
            title = f"Privacy and {words}" + (f": {data}" if data else "")
            axes.set(ylabel=f"{words}, mean over clients", title=fill(title, 70))
            axes.set_xlabel(f"epsilon, protecting {UNITS.get(unit, unit or 'nothing')}{at_delta}")
            _frontier_panel(axes, drawn, metric, styles)
    return Path(path)


def _history_line(axes: Axes, rows: History, metric: str, title: str, colour: str, **style: Any) -> None:
    """Draw one method's line, with its last value in the legend."""
    rounds, values = _column(rows, metric)
    if not values:
        return
    label = f"{title} {number_text(values[-1])}"
    if len(values) == 1:
        axes.axhline(values[0], color=colour, label=label, **style)
    else:
        axes.plot(rounds, values, color=colour, marker="o" if len(values) <= 30 else "", label=label, **style)


def _epsilon_line(axes: Axes, rounds: Sequence[float], epsilons: Sequence[float], *, private: bool) -> None:
    """Epsilon by round with its last value written beside it, or one sentence where there is none."""
    if not private:
        axes.set_yticks([])
        words = "not private: epsilon is infinite"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=10)
        return
    if rounds[0] > 0:  # nothing is spent before the first round
        rounds, epsilons = [0, *rounds], [0.0, *epsilons]
    # between evaluations no more than at the next one
    axes.plot(rounds, epsilons, color=INK, drawstyle="steps-pre")
    axes.fill_between(rounds, epsilons, color=INK, alpha=0.08, linewidth=0, step="pre")
    axes.set_xlim(0, max(rounds))
    axes.set_ylim(0.0, max(epsilons) * 1.18 if max(epsilons) > 0 else 1.0)
    axes.annotate(
        rounded_up(epsilons[-1], 3), xy=(rounds[-1], epsilons[-1]), xytext=(8, 0), textcoords="offset points",
        color=INK, fontsize=9, va="center", annotation_clip=False,
    )  # fmt: skip


def _gain_bars(axes: Axes, gains: Mapping[str, np.ndarray], name: str) -> None:
    """Draw, for each baseline, a bar of the shares of clients that gain, stay equal and lose."""
    finite = [gain[np.isfinite(gain)] for gain in gains.values()]
    shares = np.array(
        [[np.mean(np.sign(gain) == sign) if gain.size else 0.0 for sign in (1, 0, -1)] for gain in finite]
    )
    starts = np.cumsum(shares, axis=1) - shares
    rows = range(len(gains))
    for part, (word, colour, ink) in enumerate(
        (("better", "#0072B2", "white"), ("equal", "#dfe2e7", INK), ("worse", "#E69F00", INK))
    ):
        bars = axes.barh(rows, shares[:, part], left=starts[:, part], height=0.52, color=colour, label=word)
        words = [f"{share:.0%}" if share >= 0.07 else "" for share in shares[:, part]]
        axes.bar_label(bars, words, label_type="center", color=ink, fontsize=9)
    axes.set_xlabel("share of clients")
    axes.grid(False)
    axes.set_title(fill(f"Clients for whom {name} is", 24, break_long_words=False), pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3, handlelength=1, columnspacing=1.6)
    axes.set_yticks(rows, [f"than {title_of(baseline)}" for baseline in gains])
    axes.set_ylim(len(gains) - 0.4, -0.6)
    axes.set_xlim(0.0, 1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def _column(rows: History, key: str) -> tuple[list[float], list[float]]:
    """Rounds and values of ``key``, without the rows where it is missing or not finite."""
    points = [
        (float(row["round"]), float(row[key]))
        for row in rows
        if row.get(key) is not None and math.isfinite(float(row[key]))
    ]
    return [r for r, _ in points], [v for _, v in points]


def _is_private(history: History) -> bool:
    """Return whether every row has a finite epsilon."""
    return bool(history) and len(_column(history, "epsilon")[1]) == len(history)


def _words(metric: str) -> str:
    words = metric.replace("_", " ")
    return words.upper() if words == "mse" else words.capitalize()


def _spans_a_decade(history: Sequence[Mapping[str, Any]], number: str) -> bool:
    """Return whether a logarithmic axis has marks to read: all positive, the largest at least 10 times the smallest."""
    drawn = [float(row.get(f"{number}_{mark}", row[number])) for row in history for mark in ("p5", "p50", "p95")]
    return min(drawn) > 0 and max(drawn) >= 10 * min(drawn)


def _budget(budget: float | None) -> str:
    return "no budget" if budget is None else f"epsilon {rounded_up(budget, 6)}"


def _frontier_styles(groups: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) by label; a method's first label has the method's own colour."""
    first = groups.drop_duplicates("label")
    names = first["label"].where(first["algorithm"].duplicated(), first["algorithm"])
    styles = styles_of(list(names))
    return {label: styles[name] for label, name in zip(first["label"], names, strict=True)}


def _frontier_panel(axes: Axes, groups: pd.DataFrame, metric: str, styles: dict[str, tuple[str, str]]) -> None:
    """Draw the curves and bounds of one unit, and name each with its last value."""
    points = groups[groups["on_axis"]]
    ticks: list[float] = []
    for epsilon in sorted(points["epsilon"]):  # as many of the epsilons as stay legible
        if not ticks or epsilon > ticks[-1] * 1.12:
            ticks.append(epsilon)
    axes.set_xscale("log")
    axes.set_xlim(points["epsilon"].min() / 1.25 if ticks else 0.8, points["epsilon"].max() * 1.25 if ticks else 1.25)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.set_xticks(ticks, [rounded_up(tick, 3) for tick in ticks])
    for label, same in groups.groupby("label", sort=False):
        colour, marker = styles[str(label)]
        for _, bound in same[~same["on_axis"]].iterrows():
            level, style = ("no privacy", (0, (1, 1.5))) if bound["epsilon"] > 0 else ("epsilon 0", "solid")
            text = f"{_short(str(label))}, {level} {number_text(bound[metric])}"
            axes.axhline(bound[metric], color=colour, linewidth=1.6, linestyle=style, label=text)
        curve = same[same["on_axis"]].sort_values("epsilon")
        if len(curve):
            text = f"{_short(str(label))} {number_text(curve[metric].iloc[-1])}"
            bars = curve[f"{metric}{DEVIATION}"] if (curve["seeds"] > 1).any() else None
            axes.errorbar(curve["epsilon"], curve[metric], yerr=bars, color=colour, marker=marker, markersize=5,
                          capsize=2.5, label=text)  # fmt: skip
    axes.margins(y=0.1)
    legend_beside(axes)


def _short(label: str) -> str:
    """Return at most 40 letters, so that the names never crowd out the curves."""
    return label if len(label) <= 40 else f"{label[:39]}…"
