"""Graphs from vectors, from a file of edges, and of simple shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, issparse

from .._check import positive, positive_int
from .._files import csv_rows
from ..errors import ConfigError, DataError
from .graph import Graph

_ROWS = 1 << 22
"""Entries of the block of cosines that :func:`exp_angle` has in memory at once."""


def _ids(ids: Sequence[str] | None, count: int, where: str) -> tuple[str, ...]:
    if ids is None:
        return tuple(str(i) for i in range(count))
    if len(ids) != count:
        raise ConfigError(f"{where}: {len(ids)} ids for {count} agents; give one to each.")
    return tuple(ids)


def _unit_rows(vectors: Any, ids: tuple[str, ...], where: str) -> Any:
    """Scale rows to the L2 norm 1, sparse if given so.

    Raises:
        ConfigError: an agent whose vector is zero or not finite; it has no direction.
    """
    sparse: bool = issparse(vectors)
    rows: Any = csr_array(vectors).astype(np.float64) if sparse else np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2:
        raise ConfigError(f"{where}: vectors have shape {rows.shape}; one row an agent is needed.")
    norms = np.sqrt(np.asarray((rows * rows).sum(axis=1), dtype=np.float64))
    wrong = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if wrong.size:
        raise ConfigError(
            f"{where}: the vector of agent {ids[wrong[0]]!r} is zero or not finite; every agent needs a direction."
        )
    if isinstance(rows, csr_array):
        scaled = rows.copy()
        scaled.data /= np.repeat(norms, np.diff(scaled.indptr))
        return scaled
    return rows / norms[:, None]


def knn_cosine(vectors: Any, k: int = 10, *, ids: Sequence[str] | None = None) -> Graph:
    """Give weight 1 where one of two agents is among the k nearest of the other by cosine similarity (the paper's
    recommendation task); agents with the same similarity come in the order of the search.

    Args:
        vectors: (n, d) dense or SciPy sparse, such as the ratings of each agent; no n x n matrix is made.
        k: neighbours of each agent, below n.
        ids: of the agents; None for "0", "1", ...

    Raises:
        ConfigError: k is not in [1, n - 1], or a vector has no direction.
    """
    from sklearn.neighbors import NearestNeighbors  # takes a second to import

    n = vectors.shape[0]
    named = _ids(ids, n, "knn_cosine")
    positive_int("knn_cosine", k=k)
    if k >= n:
        raise ConfigError(f"knn_cosine.k is {k:,} for {n:,} agents; it must be below their number.")
    rows = _unit_rows(vectors, named, "knn_cosine")  # of unit rows the nearest have the largest cosine
    nearest = NearestNeighbors(n_neighbors=k).fit(rows).kneighbors(return_distance=False)
    pairs = csr_array((np.ones(n * k), (np.repeat(np.arange(n), k), nearest.ravel())), shape=(n, n))
    return Graph(pairs.maximum(pairs.T.tocsr()), named)


def exp_angle(
    models: ArrayLike,
    gamma: float = 0.1,
    *,
    cut: float = 1e-3,
    ids: Sequence[str] | None = None,
    isolated: bool = False,
) -> Graph:
    """Weigh by W_ij = exp((cos phi_ij - 1) / gamma), phi_ij the angle between two agents' models (section 5.1).

    Args:
        models: (n, p), such as the true models of a synthetic problem.
        gamma: above 0.
        cut: weights below it are left out. The paper leaves out "negligible" ones and prints no number.
        ids: of the agents; None for "0", "1", ...
        isolated: accept agents all of whose weights are cut.

    Raises:
        ConfigError: a model without a direction, an impossible number, an agent that the cut leaves alone.
    """
    positive("exp_angle", gamma=gamma)
    if not 0 <= cut < 1:
        raise ConfigError(f"exp_angle.cut is {cut!r}; it must be at least 0 and below 1.")
    vectors = np.asarray(models, dtype=np.float64)
    named = _ids(ids, len(vectors), "exp_angle")
    rows = _unit_rows(vectors, named, "exp_angle")
    n, edges = len(rows), []
    block = max(1, _ROWS // max(1, n))
    for start in range(0, n, block):
        w = np.exp((np.clip(rows[start : start + block] @ rows.T, -1.0, 1.0) - 1.0) / gamma)
        i, j = np.nonzero(w >= max(cut, 1e-300))
        above = i + start < j
        edges.append((i[above] + start, j[above], w[i[above], j[above]]))
    row, column, weight = (np.concatenate(part) for part in zip(*edges, strict=True))
    return _symmetric(row, column, weight, named, isolated=isolated)


def from_edges(path: str | Path, ids: Sequence[str], *, isolated: bool = False) -> Graph:
    """Return a graph from a CSV file with the columns ``agent,neighbour,weight`` or ``agent,neighbour`` (weight 1).

    Every pair of agents stands in the file once, in either order, or twice with the same weight.

    Args:
        path: a text file, or one compressed with gzip (``.gz``).
        ids: of all agents.
        isolated: accept agents that the file does not have.

    Raises:
        DataError: a missing file or a malformed row; the message names the row.
        ConfigError: an unknown agent, or a pair with two different weights.
    """
    place = {name: i for i, name in enumerate(ids)}
    weights: dict[tuple[int, int], float] = {}
    for where, cells in csv_rows(Path(path), "agent,neighbour,weight", "agent,neighbour", what="edges are"):
        pair, weight = _edge(cells, place, where)
        if weights.setdefault(pair, weight) != weight:
            raise ConfigError(
                f"{where}: the pair {cells[0]!r}, {cells[1]!r} has the weight {weight:g} here and "
                f"{weights[pair]:g} before; weights must be symmetric."
            )
    ends = np.array(sorted(weights), dtype=np.int64).reshape(-1, 2)
    values = np.array([weights[i, j] for i, j in ends.tolist()])
    return _symmetric(ends[:, 0], ends[:, 1], values, tuple(ids), isolated=isolated)


def _edge(cells: list[str], place: dict[str, int], where: str) -> tuple[tuple[int, int], float]:
    for name in cells[:2]:
        if name not in place:
            raise ConfigError(f"{where}: there is no agent {name!r}; the agents are the clients of the data.")
    try:
        weight = float(cells[2]) if len(cells) == 3 else 1.0
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise DataError(f"{where}: the weight is {cells[2]!r}; it must be a finite number above 0.")
    i, j = sorted((place[cells[0]], place[cells[1]]))
    if i == j:
        raise ConfigError(f"{where}: agent {cells[0]!r} is its own neighbour; an edge has two ends.")
    return (i, j), weight


def complete(ids: int | Sequence[str]) -> Graph:
    """Give weight 1 to all pairs of agents (n (n - 1) stored numbers)."""
    named = _named(ids, "complete")
    n = len(named)
    return Graph(csr_array(np.ones((n, n)) - np.eye(n)), named)


def ring(ids: int | Sequence[str], reach: int = 1) -> Graph:
    """Give weight 1 to agents at most ``reach`` places apart on a circle, in the order of ``ids``.

    Raises:
        ConfigError: a reach that goes around: 2 reach must be below n.
    """
    named = _named(ids, "ring")
    n = len(named)
    positive_int("ring", reach=reach)
    if 2 * reach >= n and not (n == 2 and reach == 1):
        raise ConfigError(f"ring.reach is {reach:,} for {n:,} agents; 2 reach must be below their number.")
    row = np.tile(np.arange(n), reach)
    column = (row + np.repeat(np.arange(1, reach + 1), n)) % n
    if n == 2:
        row, column = row[:1], column[:1]
    return _symmetric(row, column, np.ones(len(row)), named)


def clusters(
    labels: Sequence[Any], *, inside: float = 1.0, between: float = 0.0, ids: Sequence[str] | None = None
) -> Graph:
    """Give weight ``inside`` to pairs of one cluster, ``between`` (at least 0) to others.

    Raises:
        ConfigError: a cluster of one agent with ``between`` 0: it has no neighbours.
    """
    named = _ids(ids, len(labels), "clusters")
    positive("clusters", inside=inside)
    if not (math.isfinite(between) and between >= 0):
        raise ConfigError(f"clusters.between is {between!r}; it must be a finite number of at least 0.")
    number = np.unique([str(label) for label in labels], return_inverse=True)[1]
    if between > 0:
        dense = np.where(number[:, None] == number[None, :], inside, between)
        np.fill_diagonal(dense, 0.0)
        return Graph(csr_array(dense), named)
    pairs = []
    for label in range(int(number.max()) + 1):
        members = np.flatnonzero(number == label)
        i, j = np.triu_indices(len(members), 1)
        pairs.append((members[i], members[j]))
    row, column = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return _symmetric(row, column, np.full(len(row), float(inside)), named)


def _named(ids: int | Sequence[str], where: str) -> tuple[str, ...]:
    named = tuple(str(i) for i in range(ids)) if isinstance(ids, int) else tuple(ids)
    if len(named) < 2:
        raise ConfigError(f"{where}: {len(named)} agents; a graph has at least 2.")
    return named


def _symmetric(
    row: NDArray[Any], column: NDArray[Any], weight: NDArray[Any], ids: tuple[str, ...], *, isolated: bool = False
) -> Graph:
    """Return the graph of edges of which every pair is given once."""
    n = len(ids)
    ends = (np.concatenate([row, column]), np.concatenate([column, row]))
    return Graph(csr_array((np.concatenate([weight, weight]), ends), shape=(n, n)), ids, isolated)
