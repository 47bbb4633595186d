"""The style of all figures: ``fedmtl.mplstyle``, colours, a legend, a note and an atomic save."""

from __future__ import annotations

import colorsys
import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from textwrap import fill
from typing import Any

from .._extras import extras
from .._files import write_bytes
from ..errors import ConfigError
from ._names import METHODS

with extras():
    from matplotlib import rc_context, rcParams
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import get_registered_canvas_class
    from matplotlib.colors import to_hex, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.text import Text

__all__ = [
    "FORMATS",
    "STYLE",
    "drawing",
    "legend_above",
    "legible_ticks",
    "panels",
    "save",
    "styles_of",
]

STYLE = Path(__file__).parent / "fedmtl.mplstyle"
"""For ``matplotlib.pyplot.style.use``, too."""
FORMATS = {"png": {"Software": "fedmtl"}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""The suffixes of figures, each with the metadata of the file.

They have no date, so that the same data give the same bytes.
"""
INK = "#1f2430"
MUTED = "#5c6370"
# The first three are of the palette of Okabe and Ito, which colour-blind readers can tell apart.
_SPARE_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#9467bd", "#8c6d1f")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def styles_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns a (colour, marker) for each name, of which no two are alike.

    Args:
        names: of methods, perhaps with `` + finetuning``. A registered method has its own colour in
            every figure, and with finetuning a darker one.
    """
    spare = chain(_SPARE_COLOURS, _hues())
    styles = {}
    for place, name in enumerate(dict.fromkeys(names)):
        colour = _own_colour(name) or next(spare)
        styles[name] = (colour, _MARKERS[place % len(_MARKERS)])
    return styles


def _own_colour(name: str) -> str:
    """Returns the colour of a registered method, darker with finetuning; empty for other names."""
    method, _, addition = name.lower().partition(" + ")
    if method not in METHODS or addition not in ("", "finetuning"):
        return ""
    colour = METHODS[method].colour
    if not colour or not addition:
        return colour
    red, green, blue = to_rgb(colour)
    return to_hex((0.65 * red, 0.65 * green, 0.65 * blue))


def _hues() -> Iterator[str]:
    """Yields dark colours without end, each a golden ratio of the circle after the one before."""
    for place in count():
        yield to_hex(colorsys.hls_to_rgb((0.05 + place * 0.6180339887) % 1.0, 0.31, 0.75))


@contextmanager
def drawing(
    path: str | os.PathLike[str],
    width: float,
    height: float,
    note: str = "",
    *,
    paper: float | None = None,
) -> Iterator[Figure]:
    """Yields an empty figure in the package's style and writes it at the end.

    The figure is outside of pyplot's registry.

    Args:
        path: of the file; its suffix, one of ``FORMATS``, is the format.
        width: in inches.
        height: in inches.
        note: a text below the figure, broken into lines that are no longer than the figure is wide.
        paper: the width in inches of a figure for a paper, in place of ``width``. Its letters have
            8 points, it is at most 1.5 times as high in proportion, and the note is left out: it
            belongs into the caption.

    Raises:
        ConfigError: the suffix is no format, or the width is not between 1 and 50 inches.
    """
    if Path(path).suffix[1:] not in FORMATS:
        formats = ", ".join(FORMATS)
        raise ConfigError(f"{path} has no format of a figure; its suffix must be one of {formats}.")
    size = (width, height)
    style: Any = {}
    if paper is not None:
        if not 1 <= paper <= 50:
            accepted = "1 to 50 inches, such as 3.3 for a column of a paper"
            raise ConfigError(f"a figure's width is {paper}; it must be {accepted}.")
        size = (paper, min(height, 1.5 * paper * height / width))
        style = {"font.size": 8, "lines.linewidth": 1.2}
    with rc_context(fname=STYLE), rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        if paper is None:
            lines = fill(note, int(width * 16))
            figure.supxlabel(lines, x=0.012, ha="left", color=MUTED, fontsize=8)
        # a dollar in a name is a dollar and opens no formula; the numbers of the axes are made
        # later
        for text in figure.findobj(Text):
            if "$" in text.get_text():
                text.set_parse_math(False)
        save(figure, path)


@contextmanager
def panels(
    path: str | os.PathLike[str], count: int, note: str = "", *, paper: float | None = None
) -> Iterator[Sequence[Axes]]:
    """Yields panels and writes them under one legend.

    Two panels stand in a line; in a narrow figure for a paper they stand one below the other.

    Args:
        path: of the file, as in :func:`drawing`.
        count: number of panels.
        note: as in :func:`drawing`.
        paper: as in :func:`drawing`.
    """
    columns = min(count, 2)
    if paper is not None and paper < 5:
        columns = 1
    lines = math.ceil(count / columns)
    with drawing(path, 6.4 * columns, 0.4 + 4.2 * lines, note, paper=paper) as figure:
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        # an odd number of panels leaves one place of the last line empty
        for beyond in axes[count:]:
            beyond.remove()
        yield axes[:count]
        legend_above(figure)


def legend_above(figure: Figure) -> None:
    """Names the lines of all panels without a legend above them.

    The legend has as many columns as there is room for.
    """
    lines: dict[str, Artist] = {}
    for axes in figure.axes:
        if axes.get_legend() is not None:
            continue
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines[label] = line
    longest = max(map(len, lines), default=0)
    wide = 0.45 + longest * rcParams["font.size"] / 130  # inches of a column
    columns = max(1, int(figure.get_figwidth() / wide))
    figure.legend(list(lines.values()), list(lines), loc="outside upper left", ncols=columns)


def legible_ticks(epsilons: Sequence[float], inches: float) -> list[float]:
    """Returns those of the sorted ``epsilons`` that are legible on a log axis ``inches`` wide."""
    # the axis spans this factor, and the text of a tick takes 0.4 inches of it
    span = 1.25**2 * epsilons[-1] / epsilons[0]
    apart = span ** (0.4 / inches)
    ticks: list[float] = []
    for epsilon in epsilons:
        if not ticks or epsilon > ticks[-1] * apart:
            ticks.append(epsilon)
    return ticks


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes ``figure`` in the format of the suffix.

    It is written to a temporary name in the same folder, which is then renamed over ``path``: a
    reader sees the old picture or the new one. A missing folder is made.
    """
    kind = Path(path).suffix[1:]
    content = io.BytesIO()
    canvas = get_registered_canvas_class(kind)(figure)
    # Figure.savefig would draw everything twice
    getattr(canvas, f"print_{kind}")(content, metadata=FORMATS[kind])
    write_bytes(Path(path), content.getvalue())
