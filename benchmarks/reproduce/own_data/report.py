"""The tables, the counts and the figure of the study, from its scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from alone import ALONE, ALONE_AVERAGED, OPEN
from scores import interval
from sweep import markdown, replace_section
from tables import AUTOMATIC, AVERAGED, BEFORE, FINETUNED, NETWORK, SHARED, SHARED_NETWORK, SOURCES

from fedmtl.report.canvas import drawing

HERE = Path(__file__).parent
EPSILON_COLOURS = {1.0: "C0", 3.0: "C2", 10.0: "C1"}
WITHIN, HAND_EPSILON, NO_WORSE = 1.05, 3.0, 1.01
Cell = tuple[str, str, float]


class Scores:
    """The errors of the study by data set, unit, epsilon, method and split.

    Args:
        frame: columns as of scores.csv.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame
        columns = ["data", "unit", "epsilon", "method", "split"]
        self.errors = frame.set_index(columns)["error"].sort_index()
        self.splits = int(frame["split"].nunique())

    def of(self, cell: Cell, method: str) -> dict[int, float]:
        """Return the error of each split; what releases nothing is the same in all cells of a data set."""
        data, unit, epsilon = cell
        unit, epsilon = ("", 0.0) if method in (ALONE, ALONE_AVERAGED, OPEN) else (unit, epsilon)
        try:
            return dict(self.errors.loc[data, unit, epsilon, method])
        except KeyError:
            return {}

    def ratio(self, cell: Cell, method: str, other: str) -> tuple[float, float] | None:
        """Return the mean over splits of error / error of ``other`` in the same split, and half its 95% interval.

        None unless all splits are there, or if ``other`` is without error in one of them.
        """
        own, base = self.of(cell, method), self.of(cell, other)
        splits = sorted(own.keys() & base.keys())
        if not all(base[split] for split in splits):
            return None
        return (
            interval(own[split] / base[split] for split in splits)
            if len(splits) == self.splits
            else None
        )

    def hand(self, cell: Cell) -> str | None:
        """Return the method tuned by hand with the least mean error on test rows, of those with all splits."""
        found = {method: self.of(cell, method) for method in (AVERAGED, FINETUNED)}
        means = {
            method: mean(errors.values())
            for method, errors in found.items()
            if len(errors) == self.splits
        }
        return min(means, key=means.__getitem__) if means else None

    def cells(self) -> list[Cell]:
        """Return data set, unit and epsilon of what was measured in all splits, in order."""
        own = self.frame[self.frame["method"] == AUTOMATIC][
            ["data", "unit", "epsilon"]
        ].drop_duplicates()
        order, cells = list(SOURCES), own.itertuples(index=False, name=None)
        whole = [cell for cell in cells if len(self.of(cell, AUTOMATIC)) == self.splits]
        return sorted(whole, key=lambda cell: (order.index(cell[0]), *cell[1:]))


def shown(ratio: tuple[float, float] | None) -> str:
    """Return ``.940 ± .012``, with ▲ where the interval is below 1 and ▼ where it is above."""
    if ratio is None:
        return ""
    (value, half), text = ratio, f"{ratio[0]:.3f} ± {ratio[1]:.3f}"
    mark = "" if not abs(value - 1) > half else " ▲" if value < 1 else " ▼"
    return f"{text}{mark}".replace("0.", ".", 1).replace("± 0.", "± .")


def table(scores: Scores) -> str:
    """Return a line for each data set, unit and epsilon."""
    lines = []
    for cell in scores.cells():
        hand = scores.hand(cell)
        lines.append(
            [
                SOURCES[cell[0]].title, cell[1], f"{cell[2]:g}", f"{mean(scores.of(cell, ALONE).values()):.4f}",
                *(shown(scores.ratio(cell, method, ALONE))
                  for method in (ALONE_AVERAGED, AUTOMATIC, SHARED, AVERAGED, FINETUNED)),
                shown(scores.ratio(cell, AUTOMATIC, hand)) if hand else "",
            ]
        )  # fmt: skip
    titles = [
        "data",
        "unit",
        "epsilon:",
        "alone, error:",
        "alone, averaged:",
        "automatic:",
        "its shared model:",
    ]
    return markdown(
        [*titles, "averaged, by hand:", "finetuned, by hand:", "automatic / better by hand:"], lines
    )


def panel_table(scores: Scores) -> str:
    """Return a line for each panel, unit and epsilon: automatic settings over each client's average of own models, the
    settings before over the same, and automatic settings over its own tuned ridge regression and over what an analyst
    without privacy does. Cells without scores of the settings before have not changed since; columns of which the file
    has no scores are left out."""
    methods = set(scores.frame["method"])
    lines = []
    for cell in scores.cells():
        name, unit, epsilon = cell
        now = shown(scores.ratio(cell, AUTOMATIC, ALONE_AVERAGED))
        ratios = [now]
        if BEFORE in methods:
            ratios.append(shown(scores.ratio(cell, BEFORE, ALONE_AVERAGED)) or now)
        ratios.append(shown(scores.ratio(cell, AUTOMATIC, ALONE)))
        if OPEN in methods:
            ratios.append(shown(scores.ratio(cell, AUTOMATIC, OPEN)))
        shared = scores.ratio(cell, SHARED, ALONE_AVERAGED)
        lines.append(
            [
                SOURCES[name].title,
                unit,
                f"{epsilon:g}",
                *ratios,
                f"{shared[0]:.2f}" if shared else "",
            ]
        )
    titles = ["data", "unit", "epsilon:", "automatic / local:"]
    if BEFORE in methods:
        titles.append("before / local:")
    titles.append("/ own ridge:")
    if OPEN in methods:
        titles.append("/ by hand, not private:")
    return markdown([*titles, "its shared model / local:"], lines)


def panel_means(scores: Scores) -> str:
    """Return a line for each unit and epsilon, and for each unit: the geometric mean over cells of automatic settings
    over each client's average of own models, the largest, and the number above 1.01."""
    found: dict[tuple[str, float], list[float]] = {}
    for cell in scores.cells():
        ratio = scores.ratio(cell, AUTOMATIC, ALONE_AVERAGED)
        if ratio is not None:
            for epsilon in (cell[2], math.inf):
                found.setdefault((cell[1], epsilon), []).append(ratio[0])
    lines = []
    for (unit, epsilon), values in sorted(found.items()):
        above = sum(value > NO_WORSE for value in values)
        geometric = math.exp(mean(map(math.log, values)))
        numbers = [str(len(values)), f"{geometric:.3f}", f"{max(values):.3f}", str(above)]
        lines.append([unit, f"{epsilon:g}".replace("inf", "all"), *numbers])
    titles = ["unit", "epsilon:", "cells:", "automatic / local, mean:", "largest:", "above 1.01:"]
    return markdown(titles, lines)


def short_table(scores: Scores) -> str:
    """Return a line for each data set and unit: automatic settings over training alone, by epsilon, and over the better
    of the methods tuned by hand."""
    cells = scores.cells()
    epsilons = sorted({cell[2] for cell in cells})
    lines = []
    for data, unit in dict.fromkeys(cell[:2] for cell in cells):
        values = [
            shown(scores.ratio((data, unit, epsilon), AUTOMATIC, ALONE)) for epsilon in epsilons
        ]
        hand = scores.hand(at := (data, unit, HAND_EPSILON))
        found = scores.ratio(at, AUTOMATIC, hand) if hand else None
        lines.append([SOURCES[data].title, unit, *values, shown(found)])
    return markdown(
        [
            "data",
            "unit",
            *(f"epsilon {e:g}:" for e in epsilons),
            f"over tuned by hand, epsilon {HAND_EPSILON:g}:",
        ],
        lines,
    )


def counts(scores: Scores) -> str:
    """Return in how many cells automatic settings are better and worse than each of the others."""
    groups = {
        "all": scores.cells(),
        "data sets that chose constants": [
            cell for cell in scores.cells() if SOURCES[cell[0]].chosen
        ],
        "the others": [cell for cell in scores.cells() if not SOURCES[cell[0]].chosen],
    }
    lines = []
    for title, cells in groups.items():
        for name, other in (
            ("alone", ALONE),
            ("alone, averaged", ALONE_AVERAGED),
            ("better by hand", None),
        ):
            found = [
                ratio
                for cell in cells
                if (method := other or scores.hand(cell))
                and (ratio := scores.ratio(cell, AUTOMATIC, method))
            ]
            if found:
                lines.append([title, name, *_counted(found)])
    titles = [
        "data",
        "automatic against",
        "cells:",
        "significantly better:",
        "significantly worse:",
    ]
    return markdown(
        [*titles, "at most 5% worse:", "significantly over 5% worse:", "mean ratio:", "largest:"],
        lines,
    )


def networks(scores: Scores) -> str:
    """Return a line for each data set of classes and epsilon: networks under automatic settings, over each client's own
    tuned linear model and over the linear models of automatic settings."""
    lines = []
    for cell in scores.cells():
        ratios = [
            scores.ratio(cell, method, ALONE) for method in (NETWORK, SHARED_NETWORK, AUTOMATIC)
        ]
        if ratios[0] is not None:
            texts = map(shown, [*ratios, scores.ratio(cell, NETWORK, AUTOMATIC)])
            lines.append([SOURCES[cell[0]].title, f"{cell[2]:g}", *texts])
    titles = [
        "data",
        "epsilon:",
        "network:",
        "its shared network:",
        "linear model:",
        "network / linear model:",
    ]
    return markdown(titles, lines)


def _counted(found: Sequence[tuple[float, float]]) -> list[str]:
    numbers: list[Any] = [
        len(found),
        sum(value + half < 1 for value, half in found),
        sum(value - half > 1 for value, half in found),
        sum(value <= WITHIN for value, _ in found),
        sum(value - half > WITHIN for value, half in found),
    ]
    geometric = math.exp(mean(math.log(value) for value, _ in found))
    return [*map(str, numbers), f"{geometric:.3f}", f"{max(value for value, _ in found):.3f}"]


def figure(scores: Scores, path: Path) -> None:
    """Draw error over that of training alone: a row a data set, a colour an epsilon, a panel a unit."""
    cells = scores.cells()
    names = list(dict.fromkeys(cell[0] for cell in cells))
    units = list(dict.fromkeys(cell[1] for cell in cells))
    note = (
        "Test error over that of each client's own tuned model, means over splits with 95% intervals of paired ratios. "
        "Crosses: the better of two methods tuned by hand, of FEMNIST one. Grey bars: averaging without sharing."
    )
    with drawing(path, 5.0 * len(units), 0.5 * len(names) + 1.7, note) as canvas:
        panels = canvas.subplots(1, len(units), sharey=True, squeeze=False)[0]
        for axes, unit in zip(panels, units, strict=True):
            axes.axvline(1.0, color="0.35", lw=1)
            for place, name in enumerate(names):
                for shift, (epsilon, colour) in zip(
                    (-0.22, 0.0, 0.22), EPSILON_COLOURS.items(), strict=True
                ):
                    cell = (name, unit, epsilon)
                    if (found := scores.ratio(cell, AUTOMATIC, ALONE)) is not None:
                        label = f"automatic, epsilon {epsilon:g}" if place == 0 else None
                        style = {"fmt": "o", "ms": 4, "lw": 1.2, "color": colour, "label": label}
                        axes.errorbar([found[0]], [place + shift], xerr=[found[1]], **style)
                    hand = scores.hand(cell)
                    if hand and (found := scores.ratio(cell, hand, ALONE)):
                        axes.plot([found[0]], [place + shift], "x", ms=5, color=colour)
                if (found := scores.ratio((name, unit, 0.0), ALONE_AVERAGED, ALONE)) is not None:
                    axes.plot([found[0]] * 2, [place - 0.35, place + 0.35], color="0.6", lw=2)
            axes.set_title(f"epsilon of a {unit}")
            axes.set_xlabel("error / error of training alone")
            axes.set_xlim(0.4, 1.3)
        panels[0].set_yticks(range(len(names)), labels=[SOURCES[name].title for name in names])
        panels[0].invert_yaxis()
        canvas.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8
        )


def report(scores: Scores) -> None:
    """Write the tables of the README and the figure."""
    replace_section(HERE / "README.md", "counts", counts(scores))
    replace_section(HERE / "README.md", "networks", networks(scores))
    replace_section(HERE / "README.md", "errors", table(scores))
    figure(scores, HERE / "errors.png")
