"""The pictures of one run: epsilon by round, accuracy by round, accuracy by client.

``plot_epsilon`` uses the plan alone. ``plot_history`` and ``plot_clients`` are computed from private test data: they
belong in a run's ``private/`` folder and say so under the plot.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .._rounding import number_text, rounded_up
from ..errors import ConfigError
from ._names import title_of
from .canvas import INK, MUTED, drawing, legend_beside, styles_of

NOT_PRIVATE = "Measured on the clients' own test data: not private, not covered by epsilon."
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
            shown = np.sort(columns[name][np.isfinite(columns[name])])[:: 1 if higher_is_better else -1]
            if shown.size == 0:
                continue
            label = f"{title_of(name)}  mean {number_text(shown.mean())}"
            if shown.size > _STEPS:
                shown = shown[(2 * np.arange(_STEPS) + 1) * shown.size // (2 * _STEPS)]  # the middle of each step
            edges = np.linspace(0.0, 1.0, shown.size + 1)
            style: dict[str, Any] = {"color": styles[name][0], "linewidth": 2.6 if name == first else 1.6}
            style |= {"drawstyle": "steps-post", "solid_joinstyle": "miter", "solid_capstyle": "butt"}
            left.plot(edges, np.append(shown, shown[-1]), label=label, **style)  # stairs() takes ten times as long
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
