"""What every figure shares: colours, type sizes, direct labels and an atomic save."""

from __future__ import annotations

import colorsys
import io
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .._files import write_bytes

__all__ = ["dress", "footnote", "label_ends", "new_figure", "plain_ticks", "save", "spread_out", "styles_of"]

INK = "#1f2430"
MUTED = "#5c6370"
GRID = "#e4e6ea"

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
    "private_prior": "#ad1457",
    "prior_layers": "#e91e90",
    "fedavg + finetuning": "#8a3d00",
    "pmtl + finetuning": "#004a73",
}
_SPARE_COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#9467bd", "#8c6d1f")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def styles_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a (colour, marker) for each name; known methods always get the same colour, no two share one."""
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


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of ``width`` x ``height`` inches, drawn by Agg, outside pyplot's registry."""
    figure = Figure(figsize=(width, height), dpi=140, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, *, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """Light grid behind the data, no box, labels in words."""
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.grid(False, which="minor")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b4b8bf")
    axes.tick_params(colors=MUTED, labelsize=9, length=3)
    axes.set_xlabel(xlabel, color=MUTED, fontsize=9.5)
    axes.set_ylabel(ylabel, color=MUTED, fontsize=9.5)
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", pad=8)


def footnote(figure: Figure, text: str) -> None:
    """Write a muted note under the figure, in lines that are no longer than it is wide."""
    letters = int(figure.get_figwidth() * 16)
    figure.supxlabel(fill(text, letters), x=0.012, ha="left", color=MUTED, fontsize=8)


def plain_ticks(axis: Axis) -> None:
    """Write the ticks of a logarithmic axis as numbers, such as 0.01."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def spread_out(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart by at least ``gap`` while they stay in order and within [low, high].

    Where the range is too short for that gap, the labels share it evenly.
    """
    if not positions:
        return []
    if len(positions) > 1:
        gap = min(gap, (high - low) / (len(positions) - 1))
    order = sorted(range(len(positions)), key=lambda place: positions[place])
    blocks: list[tuple[float, int]] = []  # least squares in order: (mean of position - rank * gap, members)
    for rank, place in enumerate(order):
        mean, members = positions[place] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            before, more = blocks.pop()
            mean, members = (mean * members + before * more) / (members + more), members + more
        blocks.append((mean, members))
    starts = [mean for mean, members in blocks for _ in range(members)]
    highest = high - (len(positions) - 1) * gap
    result = [0.0] * len(positions)
    for rank, (place, start) in enumerate(zip(order, starts, strict=True)):
        result[place] = min(max(start, low), highest) + rank * gap
    return result


def arrange(figure: Figure) -> None:
    """Give the axes of a new figure the places that they have when it is drawn."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its right end: (x, y, text, colour), moved apart where they would touch."""
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height / axes.figure.dpi  # inches
    gap = (high - low) * (0.17 / max(height, 0.5))
    heights = spread_out([y for _, y, _, _ in ends], gap, low, high)
    for (x, y, text, colour), where in zip(ends, heights, strict=True):
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(8, (where - y) / (high - low) * height * 72),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            ha="left",
            annotation_clip=False,
        )


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write ``figure`` as a PNG: to a temporary name in the same folder, then renamed over ``path``.

    A reader sees the old picture or the new one, never half of one; the folder is made when it is missing.
    """
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content, metadata={"Software": "fedmtl"})  # savefig draws everything twice
    write_bytes(Path(path), content.getvalue())
    return Path(path)
