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

__all__ = ["STYLE", "drawing", "legend_beside", "plain_ticks", "save", "styles_of"]

STYLE = Path(__file__).parent / "fedmtl.mplstyle"
"""For ``matplotlib.pyplot.style.use``, too."""
INK = "#1f2430"
MUTED = "#5c6370"

# Okabe and Ito's palette, told apart with every common colour vision, and darker colours beside it.
# A method keeps its colour in every figure.
_METHOD_COLOURS = {
    "pmtl": "#0072B2",
    "local": "#6b6f76",
    "fedavg": "#D55E00",
    "fedprox": "#009E73",
    "ditto": "#7a4fa3",
    "apfl": "#b8860b",
    "pfedme": "#8c564b",
    "ppsgd": "#17808c",
    "fedrep": "#c2187a",
    "fedper": "#6a8f00",
    "mp_mtl": "#c1272d",
    "mp_mtl_layers": "#e05a5f",
    "pp_dmtl": "#3f51b5",
    "async_learner": "#00796b",
    "public_start": "#1b8a7a",
    "moments": "#558b2f",
    "p2p": "#a0522d",
    "clustered_pmtl": "#4a8fd0",
    "ifca": "#5d4037",
    "scaffold": "#006b8f",
    "private_prior": "#ad1457",
    "prior_layers": "#e91e90",
    "fedavg + finetuning": "#8a3d00",
    "pmtl + finetuning": "#004a73",
}
_SPARE_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#9467bd", "#8c6d1f")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def styles_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) for each name; a known method has one colour in every figure, and no two share one."""
    spare = (colour for colours in (_SPARE_COLOURS, _hues()) for colour in colours)
    styles: dict[str, tuple[str, str]] = {}
    for place, name in enumerate(dict.fromkeys(names)):
        colour = _METHOD_COLOURS.get(name.lower()) or next(spare)
        styles[name] = (colour, _MARKERS[place % len(_MARKERS)])
    return styles


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
