"""Percentile bands of repeated runs: median, middle half and middle nine tenths by round, a colour for each budget."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from .._rounding import rounded_up
from ..errors import ConfigError
from ._names import title_of
from .canvas import drawing, plain_ticks, styles_of
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
        lines.setdefault(_label(row["budget"]), []).append(row)
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


def _spans_a_decade(history: Sequence[Mapping[str, Any]], number: str) -> bool:
    """Return whether a logarithmic axis has marks to read: all positive, the largest at least 10 times the smallest."""
    drawn = [float(row.get(f"{number}_{mark}", row[number])) for row in history for mark in ("p5", "p50", "p95")]
    return min(drawn) > 0 and max(drawn) >= 10 * min(drawn)


def _label(budget: float | None) -> str:
    return "no budget" if budget is None else f"epsilon {rounded_up(budget, 6)}"
