"""What all figures share: one style (``fedmtl.mplstyle``), colours of methods, a legend, a note, an atomic save."""

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

from matplotlib import rc_context, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from .._files import write_bytes
from ..errors import ConfigError
from ._names import METHODS

__all__ = ["FORMATS", "STYLE", "drawing", "legend_above", "panels", "save", "styles_of"]

STYLE = Path(__file__).parent / "fedmtl.mplstyle"
"""For ``matplotlib.pyplot.style.use``, too."""
FORMATS = {"png": {"Software": "fedmtl"}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
"""The suffixes of figures, with what is written into the file; no date, so that the same data give the same bytes."""
INK = "#1f2430"
MUTED = "#5c6370"
_SPARE_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#9467bd", "#8c6d1f")  # the first of them of Okabe and Ito
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def styles_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) for each name. A registered method has its colour in every figure, with finetuning a
    darker one; no two names share one."""
    spare, styles = chain(_SPARE_COLOURS, _hues()), {}
    for place, name in enumerate(dict.fromkeys(names)):
        method, _, more = name.lower().partition(" + ")
        colour = METHODS[method].colour if method in METHODS and more in ("", "finetuning") else ""
        if colour and more:
            red, green, blue = to_rgb(colour)
            colour = to_hex((0.65 * red, 0.65 * green, 0.65 * blue))
        styles[name] = (colour or next(spare), _MARKERS[place % len(_MARKERS)])
    return styles


def _hues() -> Iterator[str]:
    """Yield dark colours without end, each as far from those before as the golden ratio takes it."""
    for place in count():
        yield to_hex(colorsys.hls_to_rgb((0.05 + place * 0.6180339887) % 1.0, 0.31, 0.75))


@contextmanager
def drawing(
    path: str | os.PathLike[str], width: float, height: float, note: str = "", *, paper: float | None = None
) -> Iterator[Figure]:
    """Yield an empty figure in the package's style, outside of pyplot's registry, and write it at the end.

    Args:
        path: where it goes; the suffix, one of ``FORMATS``, is the format.
        width: in inches, and
        height: likewise.
        note: written below, in lines that are no longer than the figure is wide.
        paper: the width of a figure for a paper, in place of ``width``. Its letters have 8 points, it is at most 1.5
            times as high in proportion, and the note is left out: it belongs into the caption.

    Raises:
        ConfigError: another format, or a width that is none.
    """
    if Path(path).suffix[1:] not in FORMATS:
        raise ConfigError(f"{path} has no format of a figure; its suffix must be one of {', '.join(FORMATS)}.")
    if paper is not None and not 1 <= paper <= 50:
        raise ConfigError(
            f"a figure's width is {paper}; it must be 1 to 50 inches, such as 3.3 for a column of a paper."
        )
    size = (width, height) if paper is None else (paper, min(height, 1.5 * paper * height / width))
    with rc_context(fname=STYLE), rc_context({} if paper is None else {"font.size": 8, "lines.linewidth": 1.2}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        if paper is None:
            figure.supxlabel(fill(note, int(width * 16)), x=0.012, ha="left", color=MUTED, fontsize=8)
        for text in figure.findobj(Text):  # numbers of the axes are made later
            if "$" in text.get_text():
                text.set_parse_math(False)  # a dollar in a name is a dollar
        save(figure, path)


@contextmanager
def panels(
    path: str | os.PathLike[str], count: int, note: str = "", *, paper: float | None = None
) -> Iterator[Sequence[Axes]]:
    """Yield panels, two in a line but one below the other in a narrow figure for a paper, and write them under one
    legend; the arguments are those of :func:`drawing`."""
    columns = 1 if paper is not None and paper < 5 else min(count, 2)
    lines = math.ceil(count / columns)
    with drawing(path, 6.4 * columns, 0.4 + 4.2 * lines, note, paper=paper) as figure:
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for beyond in axes[count:]:
            beyond.remove()
        yield axes[:count]
        legend_above(figure)


def legend_above(figure: Figure) -> None:
    """Name the lines of all panels without a legend above them, in as many columns as there is room for."""
    lines: dict[str, Artist] = {}
    for axes in (axes for axes in figure.axes if axes.get_legend() is None):
        lines |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    wide = 0.45 + max(map(len, lines), default=0) * rcParams["font.size"] / 130  # inches of a column
    columns = max(1, int(figure.get_figwidth() / wide))
    figure.legend(list(lines.values()), list(lines), loc="outside upper left", ncols=columns)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``figure`` in the format of the suffix: to a temporary name in the same folder, then renamed over ``path``.

    A reader sees the old picture or the new one, never half of one; the folder is made when it is missing.
    """
    content, kind = io.BytesIO(), Path(path).suffix[1:]
    canvas = get_registered_canvas_class(kind)(figure)
    getattr(canvas, f"print_{kind}")(content, metadata=FORMATS[kind])  # savefig draws everything twice
    write_bytes(Path(path), content.getvalue())
