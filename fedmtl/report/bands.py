"""Percentile bands of repeated runs: median, middle half and middle nine tenths by round, a colour for each budget."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from .._rounding import rounded_up
from ..errors import ConfigError
from ._names import title_of
from .canvas import dress, footnote, label_ends, new_figure, plain_ticks, save, styles_of
from .figures import NOT_PRIVATE

COVERED = "An epsilon covers one run, not the runs behind a band."


def plot_bands(
    history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    name: str,
    metric: str = "accuracy",
    step: str = "round",
) -> Path:
    """Draw the percentiles of ``metric``, and of the objective or the cost of privacy where they are there.

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
    shown = [metric, *[extra for extra in ("psi", "objective") if extra in history[0]][:1]]
    figure = new_figure(0.6 + 6.4 * len(shown), 4.2)
    panels: list[Axes] = list(figure.subplots(1, len(shown), squeeze=False)[0])
    lines: dict[Any, list[Mapping[str, Any]]] = {}
    for row in history:
        lines.setdefault(row["budget"], []).append(row)
    labels = {budget: _label(budget) for budget in lines}
    styles = styles_of(list(labels.values()))
    ends = []
    for axes, number in zip(panels, shown, strict=True):
        words = {"psi": "cost of privacy psi", "objective": "objective"}.get(number, number)
        dress(axes, xlabel=step, ylabel=words, title=f"{title_of(name)}: {words} by {step}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if number in ("psi", "objective") and _spans_a_decade(history, number):
            axes.set_yscale("log")
            plain_ticks(axes.yaxis)
        own = []
        for budget, rows in lines.items():
            colour = styles[labels[budget]][0]
            own.append(_band(axes, rows, number, colour, labels[budget]))
        ends.append(own)
        axes.set_xlim(0, max(row["round"] for row in history) * 1.0)
    footnote(figure, f"Bands: 25th to 75th and 5th to 95th percentile. {COVERED} {NOT_PRIVATE}")
    figure.canvas.draw()
    for axes, own in zip(panels, ends, strict=True):
        if axes.get_yscale() == "linear":
            label_ends(axes, own)
        else:
            axes.legend(frameon=False, fontsize=9)
    return save(figure, path)


def _band(
    axes: Axes, rows: Sequence[Mapping[str, Any]], number: str, colour: str, label: str
) -> tuple[float, float, str, str]:
    """Draw one budget's band, and return what to write at its end."""
    rounds = [float(row["round"]) for row in rows]
    middle = [float(row.get(f"{number}_p50", row[number])) for row in rows]
    for low, high, alpha in ((5, 95, 0.12), (25, 75, 0.25)):
        if f"{number}_p{low}" in rows[0]:
            below, above = ([float(row[f"{number}_p{mark}"]) for row in rows] for mark in (low, high))
            axes.fill_between(rounds, below, above, color=colour, alpha=alpha, linewidth=0)
    axes.plot(rounds, middle, color=colour, linewidth=2, marker="o" if len(rounds) <= 30 else "", ms=3, label=label)
    return rounds[-1], middle[-1], label, colour


def _spans_a_decade(history: Sequence[Mapping[str, Any]], number: str) -> bool:
    """Return whether a logarithmic axis has marks to read: all positive, the largest at least 10 times the smallest."""
    drawn = [float(row.get(f"{number}_{mark}", row[number])) for row in history for mark in ("p5", "p50", "p95")]
    return min(drawn) > 0 and max(drawn) >= 10 * min(drawn)


def _label(budget: float | None) -> str:
    return "no budget" if budget is None else f"epsilon {rounded_up(budget, 6)}"
