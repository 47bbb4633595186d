"""Privacy against utility: accuracy by epsilon over many runs, one panel for each protected unit."""

from __future__ import annotations

import math
import os
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from .._rounding import number_text, rounded_up
from ..errors import DataError
from ._names import UNITS
from .canvas import drawing, legend_beside, styles_of
from .figures import NOT_PRIVATE
from .tables import DEVIATION, data_text

if TYPE_CHECKING:
    import pandas as pd


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
    styles = _styles(groups)
    words, columns = metric.replace("_", " "), min(len(places), 2)
    most = groups["seeds"].max()
    note = f"{NOT_PRIVATE} Mean ± standard deviation of up to {most} seeds." if most > 1 else NOT_PRIVATE
    with drawing(path, 0.4 + 7.4 * columns, 0.4 + 4.2 * math.ceil(len(places) / 2), note) as figure:
        panels = list(figure.subplots(math.ceil(len(places) / 2), columns, squeeze=False).flat)
        for spare in panels[len(places) :]:
            spare.remove()
        for axes, (data, unit) in zip(panels, places, strict=False):
            shown = groups[(groups["place"] == data) & ((groups["unit"] == unit) | ~groups["on_axis"])]
            deltas = sorted(set(shown.loc[shown["on_axis"], "delta"].dropna()))
            at_delta = f"; delta {' and '.join(rounded_up(delta, 2) for delta in deltas)}" if deltas else ""
            title = f"Privacy and {words}" + (f": {data}" if data else "")
            axes.set(ylabel=f"{words}, mean over clients", title=fill(title, 70))
            axes.set_xlabel(f"epsilon, protecting {UNITS.get(unit, unit or 'nothing')}{at_delta}")
            _panel(axes, shown, metric, styles)
    return Path(path)


def _styles(groups: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) by label; a method's first label has the method's own colour."""
    first = groups.drop_duplicates("label")
    names = first["label"].where(first["algorithm"].duplicated(), first["algorithm"])
    styles = styles_of(list(names))
    return {label: styles[name] for label, name in zip(first["label"], names, strict=True)}


def _panel(axes: Axes, groups: pd.DataFrame, metric: str, styles: dict[str, tuple[str, str]]) -> None:
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
