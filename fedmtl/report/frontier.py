"""Privacy against utility: accuracy by epsilon over many runs, one panel for each protected unit."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from .._rounding import number_text, rounded_up
from ..errors import DataError
from ._names import UNITS
from .canvas import INK, dress, footnote, label_ends, new_figure, save, styles_of
from .tables import Group, labels

_Ends = list[tuple[float, float, str, str]]


def plot_frontier(groups: Sequence[Group], path: str | os.PathLike[str], *, metric: str = "accuracy") -> Path:
    """Draw ``metric`` against epsilon, one line a method, one panel for each protected unit and data set.

    The epsilons of different units (all data of a client, one record) do not compare, so they never share
    an axis. A method that releases nothing (epsilon 0) and one that protects nothing (epsilon inf) are
    horizontal lines in every panel of their data: bounds, not points of a curve. Settings that differ between
    runs of one method are part of its label; seeds are averaged, with bars of one standard deviation.

    Args:
        groups: from :func:`fedmtl.report.tables.group`.
        path: where the PNG goes; written to a temporary name and renamed.
        metric: one that the runs have.

    Returns:
        ``path``.

    Raises:
        DataError: no group has a finite value of the metric.
    """
    known = [one for one in groups if math.isfinite(one.mean.get(metric, math.nan))]
    if not known:
        raise DataError(f"no run has a finite {metric!r}; there is nothing to plot.")
    by_label: dict[str, list[Group]] = {}
    for label, one in zip(labels(known), known, strict=True):
        by_label.setdefault(label, []).append(one)
    colours = _colours(by_label)
    places = sorted({(one.data, one.unit) for one in known if _on_axis(one)})
    places += sorted({(one.data, "") for one in known} - {(data, "") for data, _ in places})

    words = metric.replace("_", " ")
    rows = math.ceil(len(places) / 2)
    figure = new_figure(1.6 + 6.0 * min(len(places), 2), 0.4 + 4.2 * rows)
    panels = list(figure.subplots(rows, min(len(places), 2), squeeze=False).flat)
    for spare in panels[len(places) :]:
        spare.remove()
    panels = panels[: len(places)]
    ends: list[_Ends] = []
    for axes, (data, unit) in zip(panels, places, strict=True):
        curves = {
            label: [one for one in same if one.data == data and (one.unit == unit or not _on_axis(one))]
            for label, same in by_label.items()
        }
        dress(axes, ylabel=f"{words}, mean over clients")
        title = f"Privacy and {words}" + (f": {data}" if data else "")
        axes.set_title(fill(title, 70), loc="left", color=INK, fontsize=11, fontweight="bold", pad=8)
        drawn = [one for one in known if (one.data, one.unit) == (data, unit)]
        deltas = sorted({one.delta for one in drawn if one.delta is not None})
        at_delta = f"; delta {' and '.join(rounded_up(delta, 2) for delta in deltas)}" if deltas else ""
        axes.set_xlabel(f"epsilon, protecting {UNITS.get(unit, unit or 'nothing')}{at_delta}", fontsize=9.5)
        ends.append(_panel(axes, curves, metric, colours))
    most = max(one.seeds for one in known)
    seeds = f" Mean ± standard deviation of up to {most} seeds." if most > 1 else ""
    footnote(figure, f"Measured on the clients' own test data: not private, not covered by epsilon.{seeds}")
    figure.canvas.draw()
    for axes, end in zip(panels, ends, strict=True):
        label_ends(axes, end)
    return save(figure, path)


def _on_axis(one: Group) -> bool:
    """Return whether epsilon is finite and above 0: a point of the curve."""
    return 0 < one.epsilon < math.inf


def _colours(by_label: dict[str, list[Group]]) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) by label; a method's first label has the method's own colour."""
    taken: dict[str, str] = {}
    for label, same in by_label.items():
        method = same[0].algorithm
        taken[label] = method if method not in taken.values() else label
    styles = styles_of(list(taken.values()))
    return {label: styles[name] for label, name in taken.items()}


def _panel(axes: Axes, groups: dict[str, list[Group]], metric: str, colours: dict[str, tuple[str, str]]) -> _Ends:
    """Curves and bounds of one unit; returns what to write at the right end of each."""
    points = {
        label: sorted((one for one in same if _on_axis(one)), key=lambda one: one.epsilon)
        for label, same in groups.items()
    }
    ticks = sorted({one.epsilon for same in points.values() for one in same})
    low, high = (ticks[0], ticks[-1]) if ticks else (1.0, 1.0)
    axes.set_xscale("log")
    right = high * 1.25
    axes.set_xlim(low / 1.25, right)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    legible: list[float] = []
    for tick in ticks:  # as many of the epsilons as stay legible
        if not legible or tick > legible[-1] * 1.12:
            legible.append(tick)
    axes.xaxis.set_major_locator(FixedLocator(legible))
    axes.set_xticks(legible, [rounded_up(tick, 3) for tick in legible])

    ends: _Ends = []
    for label, same in groups.items():
        colour, marker = colours[label]
        for one in same:
            if _on_axis(one):
                continue
            level = "no privacy" if one.epsilon > 0 else "epsilon 0"
            style = (0, (1, 1.5)) if one.epsilon > 0 else "solid"
            axes.axhline(one.mean[metric], color=colour, linewidth=1.6, linestyle=style)
            ends.append((right, one.mean[metric], f"{_short(label)}, {level} {number_text(one.mean[metric])}", colour))
    for label, curve in points.items():
        if not curve:
            continue
        colour, marker = colours[label]
        mean = [one.mean[metric] for one in curve]
        axes.errorbar(
            [one.epsilon for one in curve],
            mean,
            yerr=[one.deviation[metric] for one in curve] if any(one.seeds > 1 for one in curve) else None,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=2,
            capsize=2.5,
        )
        ends.append((right, mean[-1], f"{_short(label)} {number_text(mean[-1])}", colour))
    axes.margins(y=0.1)
    return ends


def _short(label: str) -> str:
    """Return at most 40 letters, so that the names never crowd out the curves."""
    return label if len(label) <= 40 else f"{label[:39]}…"
