"""Scores of methods by seed, in one format for all studies, and the tables and intervals that are made of them.

A study writes a row for each setting, method, epsilon and seed, so that every table, interval and mark can be computed
again from the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any, Literal

import pandas as pd
from intervals import interval
from matplotlib.axes import Axes
from sweep import markdown

from fedmtl.report.canvas import drawing, legend_above

AS_PUBLISHED = "as published"
"""How the titles of settings end that reproduce the figures of a paper, for its own methods."""
FAR = 20
"""Scores whose largest is so many times the smallest are drawn on a logarithmic axis."""
NUMBERS = {"epsilon", "score", "better", "equal", "worse", "worst_tenth", "half"}
Role = Literal["local", "fedavg", "public", "baseline", "published", "new"]


@dataclass(frozen=True)
class Score:
    """The score of a method in one seed.

    Attributes:
        setting: the problem, such as ``"School, 139 schools"``.
        metric: what is measured on test rows, such as ``"accuracy"`` or ``"nMSE"``.
        larger: whether a larger score is better.
        role: ``"local"`` for tuned training alone, ``"fedavg"`` for FedAvg and FedAvg with finetuning, ``"public"`` for
            what public rows alone give, ``"published"`` for a method as its paper has it, ``"new"`` for one that is not
            in the paper, ``"baseline"`` for all others.
        method: its name in tables.
        epsilon: of the run; 0 where nothing is released, ``inf`` without privacy.
        seed: of rows, start, cohorts and noise; scores of the same seed are paired.
        score: of this run.
        better, equal, worse: shares of the clients that are better, equally and worse off than with training alone.
        worst_tenth: mean score over the tenth of the clients that score worst.
        chosen: the setting that was chosen, in words.
        half: where ``score`` is the mean of seeds that were not stored, half of its 95% interval.
    """

    setting: str
    metric: str
    larger: bool
    role: Role
    method: str
    epsilon: float
    seed: int
    score: float
    better: float = math.nan
    equal: float = math.nan
    worse: float = math.nan
    worst_tenth: float = math.nan
    chosen: str = ""
    half: float = math.nan


def summary(own: Sequence[Score]) -> tuple[float, float]:
    """Return the mean of scores and half its 95% interval, those that are stored where the seeds are not."""
    return (own[0].score, own[0].half) if len(own) == 1 else interval(score.score for score in own)


def by_client(
    own: Mapping[str, float], local: Mapping[str, float], *, larger: bool
) -> dict[str, float]:
    """Return ``better``, ``equal``, ``worse`` and ``worst_tenth`` of clients' scores beside those of training alone."""
    sign = 1.0 if larger else -1.0
    gains = [sign * (own[client] - local[client]) for client in local]
    ordered = sorted(own.values(), reverse=not larger)
    return {
        "better": mean(gain > 0 for gain in gains),
        "equal": mean(gain == 0 for gain in gains),
        "worse": mean(gain < 0 for gain in gains),
        "worst_tenth": mean(ordered[: math.ceil(len(ordered) / 10)]),
    }


def write_scores(path: Path, scores: Sequence[Score]) -> None:
    """Write one line a score, with seven significant digits."""
    rows = pd.DataFrame(list(scores)).astype({"larger": int})
    rows.to_csv(path, index=False, float_format="%.7g", lineterminator="\n")


def renew_scores(path: Path, scores: Sequence[Score]) -> list[Score]:
    """Write ``scores`` and keep those of other settings and methods in the file; return all of them."""
    new = {(score.setting, score.method) for score in scores}
    kept = (
        [score for score in read_scores(path) if (score.setting, score.method) not in new]
        if path.exists()
        else []
    )
    write_scores(path, [*kept, *scores])
    return [*kept, *scores]


def read_scores(path: Path) -> list[Score]:
    """Read what :func:`write_scores` wrote."""
    rows = pd.read_csv(path, keep_default_na=False, na_values=dict.fromkeys(NUMBERS, ""))
    rows = rows.astype({"larger": bool} | dict.fromkeys(NUMBERS & {*rows}, float))
    return [Score(**row) for row in rows.to_dict("records")]  # type: ignore[misc]


def difference(own: Iterable[Score], other: Iterable[Score]) -> tuple[float, float]:
    """Return the mean of the paired differences own - other over their common seeds, and half its 95% interval."""
    a, b = ({score.seed: score.score for score in scores} for scores in (own, other))
    return interval(a[seed] - b[seed] for seed in sorted(a.keys() & b.keys()))


def mark(own: Sequence[Score], other: Sequence[Score]) -> str:
    """Return ▲ where ``own`` is better than ``other`` and the 95% interval of the difference leaves out 0, ▼ where it
    is worse by the same rule, else nothing."""
    gain, half = difference(own, other)
    if not abs(gain) > half:
        return ""
    return "▲" if (gain > 0) == own[0].larger else "▼"


def methods_of(scores: Iterable[Score]) -> list[str]:
    """Return the methods, in the order in which they come first."""
    return list(dict.fromkeys(score.method for score in scores))


def epsilons_of(scores: Iterable[Score]) -> list[float]:
    """Return the epsilons of runs that release something under noise, in ascending order."""
    return sorted({score.epsilon for score in scores if 0 < score.epsilon < math.inf})


def columns_of(scores: Sequence[Score], noiseless: bool) -> list[float]:
    """Return the columns of a table: the epsilons, and infinity where there are scores without noise to print."""
    return [
        *epsilons_of(scores),
        *([math.inf] if noiseless and any(s.epsilon == math.inf for s in scores) else []),
    ]


def by_epsilon(
    scores: Sequence[Score],
    cell: Callable[[Sequence[Score], float], str],
    *,
    noiseless: bool = False,
) -> str:
    """Return a table of a setting: a line a method, a column an epsilon, in each what ``cell`` writes of its scores.

    What does not depend on epsilon (training alone, public rows alone) has its score in every column. With
    ``noiseless`` the last column has the runs without noise.
    """
    epsilons = columns_of(scores, noiseless)
    lines = []
    for method in methods_of(scores):
        own = [score for score in scores if score.method == method]
        found = [
            [score for score in own if score.epsilon in (epsilon, 0.0)] for epsilon in epsilons
        ]
        if any(found):
            cells = zip(found, epsilons, strict=True)
            lines.append(
                [method, *(cell(some, epsilon) if some else "" for some, epsilon in cells)]
            )
    titles = [
        "no noise:" if epsilon == math.inf else f"epsilon {epsilon:g}:" for epsilon in epsilons
    ]
    return markdown(["method", *titles], lines)


def table(
    scores: Sequence[Score],
    setting: str,
    *,
    digits: int = 3,
    text: Callable[[float], str] | None = None,
    against: Sequence[str] = (),
    noiseless: bool = False,
) -> str:
    """Return a table of a setting: means with half their 95% intervals, the best of an epsilon in bold, and marks of
    the paired differences.

    Args:
        scores: of this setting and others.
        setting: its title.
        digits: after the point, where there is no ``text``, which writes a number.
        against: methods that the others are marked against, with a dot where the interval leaves 0 in; none for
            training alone, without dots.
        noiseless: a last column has the runs without noise.
    """
    own = [score for score in scores if score.setting == setting]
    write = text or (lambda value: f"{value:.{digits}f}")
    local = next((score.method for score in own if score.role == "local"), None)
    sign, dot = (1.0 if own[0].larger else -1.0), "·" if against else ""
    others = against or [local]

    def at(method: str | None, epsilon: float) -> list[Score]:
        return [
            score for score in own if score.method == method and score.epsilon in (epsilon, 0.0)
        ]

    highest = {
        epsilon: max(
            sign * mean(s.score for s in some) for m in methods_of(own) if (some := at(m, epsilon))
        )
        for epsilon in columns_of(own, noiseless)
    }

    def cell(found: Sequence[Score], epsilon: float) -> str:
        (value, half), method = summary(found), found[0].method
        shown = write(value) + ("" if math.isnan(half) else f" ± {write(half)}")
        shown = f"**{shown}**" if sign * value == highest[epsilon] else shown
        if method == local or len(found) < 2:
            return shown
        marks = [
            mark(found, at(other, epsilon)) or dot
            for other in others
            if other not in (None, method)
        ]
        return f"{shown} {''.join(marks)}".strip()

    return by_epsilon(own, cell, noiseless=noiseless)


def listing(scores: Sequence[Score], *, digits: int = 3) -> str:
    """Return a table with a line a setting, method and epsilon: the mean with half its 95% interval, how much better
    than training alone it is in paired differences, and what was chosen.

    Args:
        scores: of one metric.
        digits: after the point.
    """
    groups: dict[tuple[str, str, float], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.setting, score.method, score.epsilon), []).append(score)
    lines = []
    for (setting, method, epsilon), own in groups.items():
        local = [score for score in scores if score.setting == setting and score.role == "local"]
        (value, half), sign, gain = summary(own), 1 if own[0].larger else -1, ""
        if local and own[0].role != "local" and len(own) > 1:
            less, gap = difference(
                own, [score for score in local if score.method == local[0].method]
            )
            gain = f"{sign * less:+.{digits}f} ± {gap:.{digits}f} {mark(own, local)}".strip()
        budget = "" if epsilon == 0 else "no noise" if epsilon == math.inf else f"{epsilon:g}"
        title = setting.removesuffix(f", {AS_PUBLISHED}")
        lines.append(
            [title, method, budget, f"{value:.{digits}f} ± {half:.{digits}f}", gain, own[0].chosen]
        )
    metric = scores[0].metric
    return markdown(
        ["setting", "method", "epsilon:", f"{metric}:", "better than alone by:", "chosen"], lines
    )


def plot_line(
    axes: Axes, own: Sequence[Score], *, scale: float = 1.0, shift: float = 1.0, **style: Any
) -> None:
    """Draw the mean of a method by epsilon with 95% intervals; a level line where it does not depend on epsilon.

    Args:
        axes: a panel.
        own: scores of one method in one setting; without any nothing is drawn.
        scale: of the scores.
        shift: of the epsilons, so that methods do not hide one another.
        style: of the line.
    """
    epsilons = epsilons_of(own)
    if own and not epsilons:
        axes.axhline(
            scale * mean(score.score for score in own),
            **{k: v for k, v in style.items() if k != "marker"},
        )
    elif own:
        points = [
            summary([score for score in own if score.epsilon == epsilon]) for epsilon in epsilons
        ]
        means, halves = zip(*points, strict=True)
        y, bars = ([scale * value for value in values] for values in (means, halves))
        axes.errorbar([shift * epsilon for epsilon in epsilons], y, bars, **style)


def plot(
    path: Path,
    scores: Sequence[Score],
    styles: Mapping[str, Mapping[str, Any]],
    note: str,
    *,
    columns: int = 0,
) -> None:
    """Draw the means of methods by epsilon with 95% intervals, a panel a setting, on one axis if all have one metric,
    else each on its own, a logarithmic one where scores are far apart. Errors that are more than 25% above those of
    training alone are outside.

    Args:
        path: of the figure.
        scores: of one metric in each setting.
        styles: of the line of each method.
        note: below the figure; it says what epsilon protects.
        columns: panels in a row; 0: all.
    """
    settings = list(dict.fromkeys(score.setting for score in scores))
    shared, columns = len({score.metric for score in scores}) == 1, columns or len(settings)
    rows = math.ceil(len(settings) / columns)
    with drawing(path, max(6.0, 4.0 * columns), 4.6 * rows, note) as figure:
        panels = list(figure.subplots(rows, columns, sharey=shared, squeeze=False).flat)
        for axes in panels[len(settings) :]:
            axes.remove()
        for place, (axes, setting) in enumerate(zip(panels, settings, strict=False)):
            own = [score for score in scores if score.setting == setting]
            for number, (method, style) in enumerate(styles.items()):
                shift = 1.02 ** (number - len(styles) / 2)
                plot_line(
                    axes, [s for s in own if s.method == method], shift=shift, label=method, **style
                )
            epsilon_axis(axes, epsilons_of(own))
            axes.set(xlabel="epsilon", title=fill(setting.removesuffix(f", {AS_PUBLISHED}"), 40))
            axes.set_ylabel("" if shared and place % columns else own[0].metric)
            values = [score.score for score in own]
            if not shared and max(values) > FAR * min(values) > 0:
                axes.set_yscale("log")
        for axes, setting in zip(panels, settings, strict=False):  # when all lines are there
            local = [
                s.score
                for s in scores
                if s.role == "local" and not s.larger and (shared or s.setting == setting)
            ]
            if local:
                axes.set_ylim(top=min(axes.get_ylim()[1], 1.25 * max(local)))
        legend_above(figure)


def epsilon_axis(axes: Axes, epsilons: Sequence[float]) -> None:
    """Give a panel a logarithmic axis with the epsilons as its marks."""
    axes.set_xscale("log")
    axes.set_xticks(epsilons, labels=[f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()
    if len(epsilons) == 1:
        axes.set_xlim(epsilons[0] / 2, 2 * epsilons[0])
