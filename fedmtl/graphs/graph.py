"""The weighted graph of a peer-to-peer network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, issparse

from .._check import Count, check_arguments
from .._extras import neighbors
from ..errors import ConfigError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Graph:
    """Symmetric weights W_ij >= 0 between n agents, without loops (Bellet et al. 2018, section
    2.1).

    Args:
        weights: (n, n) sparse or dense, such as ``networkx.to_scipy_sparse_array(graph)`` of a
            graph of networkx, whose nodes are then ``ids``; stored as a float64 ``csr_array`` with
            sorted columns and no stored zeros.
        ids: the agents' ids, in the order of the rows.

    Raises:
        ConfigError: ids that are not distinct or not n; weights that are not square, not finite,
            negative, on the diagonal, or different in the two directions; agents without
            neighbours. The message names the agents.

    Example:
        >>> import numpy as np
        >>> from fedmtl.graphs import Graph
        >>> weights = np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
        >>> graph = Graph(weights, ("a", "b", "c"))
        >>> graph.edges, graph.normalization.tolist()
        (2, [1.5, 1.0, 0.5])
    """

    weights: csr_array
    ids: tuple[str, ...]

    @classmethod
    def from_pairs(
        cls, first: ArrayLike, second: ArrayLike, weight: ArrayLike, ids: Sequence[str]
    ) -> Graph:
        """Returns the graph of pairs of agents, by their places in ``ids``.

        One that is given in both orders is one pair, with the larger weight.

        Args:
            first: (m,) places of one end of each edge.
            second: (m,) places of the other end; no pair is repeated.
            weight: one for each pair, or one for all.
            ids: of the graph.
        """
        places = np.stack([np.asarray(first), np.asarray(second)])
        n = len(ids)
        pairs = csr_array(
            (np.broadcast_to(weight, places.shape[1:]).astype(np.float64), tuple(places)),
            shape=(n, n),
        )
        return cls(pairs.maximum(pairs.T.tocsr()), tuple(ids))

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(str(name) for name in self.ids))
        object.__setattr__(self, "weights", self._checked(self.weights))

    def _checked(self, weights: Any) -> csr_array:
        matrix: Any = csr_array(weights, copy=True).astype(np.float64)
        n = len(self.ids)
        if len(set(self.ids)) != n:
            twice = next(name for name in self.ids if self.ids.count(name) > 1)
            raise ConfigError(f"Graph.ids has {twice!r} twice; ids must be distinct.")
        if matrix.shape != (n, n):
            raise ConfigError(
                f"Graph.weights has shape {matrix.shape} for {n:,} agents; it must be ({n}, {n})."
            )
        # Pairs that are stored twice are one weight, and zeros are no edges.
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        row, column = matrix.nonzero()  # data in the order of the rows
        for wrong, fault in (
            (~np.isfinite(matrix.data), "is not finite"),
            (matrix.data < 0, "is negative"),
            (row == column, "is of an agent with itself"),
        ):
            if wrong.any():
                k = int(np.flatnonzero(wrong)[0])
                raise ConfigError(
                    f"Graph.weights: the weight {matrix.data[k]:g} of "
                    f"{self._pair(row[k], column[k])} {fault}; weights are finite numbers above 0 "
                    f"between different agents."
                )
        # The remaining weights are stored in one direction, or with another value in the other.
        one_way = (matrix - matrix.T.tocsr()).tocoo()
        one_way.eliminate_zeros()
        if one_way.nnz:
            i = int(one_way.row[0])
            j = int(one_way.col[0])
            raise ConfigError(
                f"Graph.weights of {self._pair(i, j)} is {matrix[i, j]:g} in one direction and "
                f"{matrix[j, i]:g} in the other; weights must be symmetric."
            )
        lonely = np.flatnonzero(np.diff(matrix.indptr) == 0)
        if lonely.size:
            raise ConfigError(
                f"Graph: {self.ids[lonely[0]]!r} has no neighbours (agents without any: "
                f"{lonely.size:,}); connect every agent."
            )
        return cast(csr_array, matrix)

    def _pair(self, i: int, j: int) -> str:
        return f"agents {self.ids[i]!r} and {self.ids[j]!r}"

    def __len__(self) -> int:
        """Returns n."""
        return len(self.ids)

    @cached_property
    def normalization(self) -> Array:
        """Returns D_ii = sum_j W_ij, (n,) float64."""
        return np.asarray(self.weights.sum(axis=1), dtype=np.float64)

    @cached_property
    def degrees(self) -> Ints:
        """Returns the number of neighbours of each agent, (n,) int64."""
        return np.diff(self.weights.indptr).astype(np.int64)

    @property
    def edges(self) -> int:
        """Returns the number of pairs that are connected."""
        return int(self.weights.nnz) // 2

    def ordered(self, ids: Sequence[str]) -> Graph:
        """Returns the same graph with its rows in another order.

        Args:
            ids: the same agents in the order of the new rows.

        Raises:
            ConfigError: an agent of ``ids`` that is not in the graph, or the other way round.
        """
        wanted = tuple(ids)
        if wanted == self.ids:
            return self
        rows = {name: i for i, name in enumerate(self.ids)}
        for name in sorted(rows.keys() ^ set(wanted)):
            has = "the data has"
            lacks = "the graph has not"
            if name in rows:
                has = "the graph has"
                lacks = "the data has not"
            raise ConfigError(f"Graph: {has} agent {name!r}, and {lacks}; agents are the clients.")
        order = np.array([rows[name] for name in wanted])
        return Graph(self.weights[order][:, order], wanted)

    def describe(self) -> str:
        """Returns one phrase for the report."""
        least = int(self.degrees.min())
        most = int(self.degrees.max())
        span = f"{least} to {most}"
        if least == most:
            span = str(most)
        return f"a graph of {len(self):,} agents and {self.edges:,} edges, {span} neighbours each"


@check_arguments
def knn_cosine(vectors: Any, k: Count, ids: Sequence[str]) -> Graph:
    """Builds the graph of k nearest neighbours by cosine similarity.

    Two agents have weight 1 if one of them is among the k nearest of the other (section 5.2 of
    Bellet et al. 2018). Agents with the same similarity come in the order of the search.

    Args:
        vectors: (n, d) dense or SciPy sparse, such as the ratings of each agent; no n x n matrix is
            made.
        k: neighbours of each agent, below n.
        ids: of the agents.

    Returns:
        The graph; an agent has at least k neighbours.

    Raises:
        ConfigError: other than one row an agent, an agent whose vector is zero or not finite, or k
            is not in [1, n - 1].

    Example:
        >>> from fedmtl.graphs import knn_cosine
        >>> vectors = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]
        >>> knn_cosine(vectors, k=1, ids=("a", "b", "c", "d")).edges
        2
    """
    rows = vectors
    if not issparse(vectors):
        rows = np.asarray(vectors)
    if rows.ndim != 2 or len(ids) != rows.shape[0]:
        raise ConfigError(
            f"vectors have shape {rows.shape} for {len(ids):,} agents; one row an agent is needed."
        )
    sizes = np.asarray(abs(rows).sum(axis=1), dtype=np.float64).ravel()
    wrong = np.flatnonzero(~(np.isfinite(sizes) & (sizes > 0)))
    if wrong.size:
        raise ConfigError(
            f"the vector of agent {ids[wrong[0]]!r} is zero or not finite; every agent needs a "
            "direction."
        )
    if k >= len(ids):
        raise ConfigError(
            f"knn_cosine.k is {k:,} for {len(ids):,} agents; it must be below their number."
        )
    # One of two agents near the other is enough; the larger weight is 1.
    nearest = neighbors.kneighbors_graph(rows, k, metric="cosine")
    return Graph(nearest.maximum(nearest.T), tuple(ids))
