"""The figure of epsilons between pairs of agents on a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from .._rounding import rounded_up
from .canvas import INK, MUTED, panels

NOTE = (
    "Against one agent, or a set, that sees its own messages alone. The dashed line is the epsilon "
    "against everybody, with all messages; it is the claim of the run."
)
_LEAST = 0.01  # of the epsilon against everybody
Array = NDArray[np.float64]


def plot_pairs(
    epsilon: Array,
    distance: Array,
    path: Path,
    *,
    local: float,
    delta: float,
    paper: float | None = None,
) -> Path:
    """Draws epsilons as a matrix, and against the distance on the graph.

    In the matrix agents that are near each other on the graph stand near each other.

    Args:
        epsilon: (k, n) of n agents against k sets of agents; NaN for their members.
        distance: (k, n), the edges between them.
        path: of the figure.
        local: the epsilon against everybody.
        delta: of all epsilons.
        paper: the width in inches of a figure for a paper.

    Returns:
        The path.
    """
    outside = ~np.isnan(epsilon)
    with panels(path, 2, NOTE, paper=paper) as (matrix, by_distance):
        shown = epsilon
        if epsilon.shape[0] == epsilon.shape[1]:
            # neighbours on the graph stand near each other
            order = reverse_cuthill_mckee(csr_array(distance == 1), symmetric_mode=True)
            shown = epsilon[np.ix_(order, order)]
        picture = matrix.imshow(shown, vmin=0.0, vmax=local, cmap="viridis", aspect="auto")
        matrix.set(xlabel="agent whose record changes", ylabel="agent that looks on")
        matrix.set(xticks=[], yticks=[])
        matrix.grid(False)
        matrix.figure.colorbar(picture, ax=matrix, label=f"epsilon at delta = {rounded_up(delta)}")
        finite = outside & np.isfinite(distance) & np.isfinite(epsilon)
        edges = np.unique(distance[finite])
        # beyond these every epsilon is negligible
        seen = distance[finite & (epsilon > _LEAST * local)].max(initial=1.0)
        edges = edges[edges <= seen + 1]
        # pairs of one distance stand beside each other in the order of their epsilons
        for place in edges.tolist():
            values = np.sort(epsilon[finite & (distance == place)])
            beside = place + np.linspace(-0.3, 0.3, values.size)
            by_distance.plot(beside, values, ".", color=MUTED, markersize=4)
        medians = [np.median(epsilon[finite & (distance == place)]) for place in edges]
        by_distance.plot(edges, medians, "o-", color=INK, label="median of the pairs")
        by_distance.axhline(local, color=INK, linestyle="--", label="against everybody")
        by_distance.set(xlabel="edges between the two agents", ylabel="epsilon", ylim=(0, None))
    return path
