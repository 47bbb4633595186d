"""Graphs of agents by the similarity of their vectors: nearest neighbours by cosine, and weights by angle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array, issparse

from .._check import Below1, Count, Positive, check_arguments
from ..errors import ConfigError
from .graph import Graph


@check_arguments
def knn_cosine(vectors: Any, k: Count, ids: Sequence[str]) -> Graph:
    """Give weight 1 where one of two agents is among the k nearest of the other by cosine similarity (the paper's
    recommendation task); agents with the same similarity come in the order of the search.

    Args:
        vectors: (n, d) dense or SciPy sparse, such as the ratings of each agent; no n x n matrix is made.
        k: neighbours of each agent, below n.
        ids: of the agents.

    Raises:
        ConfigError: k is not in [1, n - 1], or a vector has no direction.
    """
    from sklearn.neighbors import kneighbors_graph  # takes a second to import

    rows, n = _unit_rows(vectors, ids), len(ids)  # of unit rows the nearest have the largest cosine
    if k >= n:
        raise ConfigError(f"knn_cosine.k is {k:,} for {n:,} agents; it must be below their number.")
    nearest = kneighbors_graph(rows, k)
    return Graph(nearest.maximum(nearest.T), tuple(ids))


@check_arguments
def exp_angle(models: ArrayLike, gamma: Positive, cut: Below1, ids: Sequence[str]) -> Graph:
    """Weigh by W_ij = exp((cos phi_ij - 1) / gamma), phi_ij the angle between two agents' models (section 5.1).

    Args:
        models: (n, p), such as the true models of a synthetic problem.
        gamma: above 0.
        cut: weights below it are left out. The paper leaves out "negligible" ones and prints no number.
        ids: of the agents.

    Raises:
        ConfigError: a model without a direction, an impossible number, an agent without a weight above the cut.
    """
    rows = _unit_rows(models, ids)
    weights = np.exp((np.clip(rows @ rows.T, -1.0, 1.0) - 1.0) / gamma)
    first, second = np.nonzero(np.triu(weights >= max(cut, 1e-300), 1))
    return Graph.from_pairs(first, second, weights[first, second], ids)


def _unit_rows(vectors: Any, ids: Sequence[str]) -> Any:
    """Scale the rows of agents to the L2 norm 1, sparse if given so.

    Raises:
        ConfigError: other than one row an agent, or an agent whose vector is zero or not finite; it has no direction.
    """
    sparse: bool = issparse(vectors)
    rows: Any = csr_array(vectors, dtype=np.float64, copy=True) if sparse else np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or len(ids) != rows.shape[0]:
        raise ConfigError(f"vectors have shape {rows.shape} for {len(ids):,} agents; one row an agent is needed.")
    norms = np.sqrt(np.asarray((rows * rows).sum(axis=1), dtype=np.float64))
    wrong = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if wrong.size:
        raise ConfigError(
            f"the vector of agent {ids[wrong[0]]!r} is zero or not finite; every agent needs a direction."
        )
    if sparse:
        rows.data /= np.repeat(norms, np.diff(rows.indptr))
        return rows
    return rows / norms[:, None]
