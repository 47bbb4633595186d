"""What all figures share: one style (``fedmtl.mplstyle``), a colour for each method, a note below, an atomic save."""

from __future__ import annotations

import colorsys
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from textwrap import fill

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .._files import write_bytes
from ._names import METHODS

__all__ = ["STYLE", "drawing", "legend_beside", "plain_ticks", "save", "styles_of"]

STYLE = Path(__file__).parent / "fedmtl.mplstyle"
"""For ``matplotlib.pyplot.style.use``, too."""
INK = "#1f2430"
MUTED = "#5c6370"

# Okabe and Ito's palette, which all common kinds of colour vision can distinguish, and darker colours beside it.
_SPARE_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#9467bd", "#8c6d1f")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def styles_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) for each name. A registered method has its colour in every figure, with finetuning a
    darker one; no two names share one."""
    spare = (colour for colours in (_SPARE_COLOURS, _hues()) for colour in colours)
    styles: dict[str, tuple[str, str]] = {}
    for place, name in enumerate(dict.fromkeys(names)):
        method, _, more = name.lower().partition(" + ")
        own = METHODS[method].colour if method in METHODS and more in ("", "finetuning") else ""
        colour = (_darker(own) if own and more else own) or next(spare)
        styles[name] = (colour, _MARKERS[place % len(_MARKERS)])
    return styles


def _darker(colour: str) -> str:
    """Return a colour ``#rrggbb`` with 65% of its light."""
    return "#" + "".join(f"{round(0.648 * int(colour[at : at + 2], 16)):02x}" for at in (1, 3, 5))


def _hues() -> Iterator[str]:
    """Yield dark colours without end, each as far from those before as the golden ratio takes it."""
    for place in count():
        parts = colorsys.hls_to_rgb((0.05 + place * 0.6180339887) % 1.0, 0.31, 0.75)
        yield "#" + "".join(f"{round(255 * part):02x}" for part in parts)


@contextmanager
def drawing(path: str | os.PathLike[str], width: float, height: float, note: str = "") -> Iterator[Figure]:
    """Yield an empty figure in the package's style, outside of pyplot's registry, and write it as a PNG at the end.

    Args:
        path: where the PNG goes.
        width: in inches, and
        height: likewise.
        note: written below, in lines that are no longer than the figure is wide.
    """
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.supxlabel(fill(note, int(width * 16)), x=0.012, ha="left", color=MUTED, fontsize=8)
        save(figure, path)


def legend_beside(axes: Axes) -> None:
    """Name the lines of a panel at its right, outside of it."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0)


def plain_ticks(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as numbers, such as 0.01."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``figure`` as a PNG: to a temporary name in the same folder, then renamed over ``path``.

    A reader sees the old picture or the new one, never half of one; the folder is made when it is missing.
    """
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content, metadata={"Software": "fedmtl"})  # savefig draws everything twice
    write_bytes(Path(path), content.getvalue())
