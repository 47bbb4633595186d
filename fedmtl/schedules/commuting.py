"""Blocks of events that commute, so that they can be computed together."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from .._check import positive_int
from ..errors import ConfigError

_CHUNK, _QUERIES = 1 << 13, 1 << 21


@dataclass(frozen=True, eq=False)
class Adjacency:
    """Which pairs of clients conflict, ready for :func:`block_bounds`: made once for many tables.

    Attributes:
        clients: n.
        indptr, indices: rows of the symmetric pattern without its diagonal, as in a ``csr_array``.
        most: the most neighbours of a client.
    """

    clients: int
    indptr: NDArray[np.integer[Any]]
    indices: NDArray[np.integer[Any]]
    most: int

    @classmethod
    def of(cls, conflicts: csr_array) -> Adjacency:
        """Make it of the entries (i, j) of an (n, n) array that are not 0, in either direction.

        Raises:
            ConfigError: it is not square.
        """
        if conflicts.shape[0] != conflicts.shape[1]:
            raise ConfigError(f"conflicts has shape {conflicts.shape}; it must be (n, n).")
        entries = conflicts.tocoo()
        nonzero = (entries.data != 0) & (entries.row != entries.col)
        row, column = entries.row[nonzero], entries.col[nonzero]
        ends = (np.concatenate([row, column]), np.concatenate([column, row]))
        pattern = csr_array((np.ones(len(ends[0]), np.int64), ends), shape=conflicts.shape)
        pattern.sum_duplicates()
        most = int(np.diff(pattern.indptr).max(initial=1))
        return cls(conflicts.shape[0], pattern.indptr, pattern.indices, most)


Conflicts = Literal["none", "all"] | csr_array | Adjacency


def block_bounds(clients: Tensor, conflicts: Conflicts, limit: int) -> Tensor:
    """Return where to cut activations so that the events within a block commute: each block is as long as it can be.

    Two events of one client never share a block. With R replicates the cuts are common: a block ends where the first
    of the replicates has a conflict.

    Args:
        clients: int64 (R, S), who acts in S events of R replicates; -1 is nobody.
        conflicts: "none": events of different clients commute; "all": no two events do; or a sparse adjacency (n, n):
            events of clients i and j do not commute where its entry (i, j) or (j, i) is not 0; an :class:`Adjacency`
            of it saves time where there are many tables.
        limit: the most events of a block.

    Returns:
        int64 (B + 1,) rising from 0 to S; block b is events ``bounds[b]`` to ``bounds[b + 1] - 1``.

    Raises:
        ConfigError: ``conflicts`` is none of the three, or its shape does not fit the clients.
    """
    positive_int("block_bounds", limit=limit)
    events = clients.shape[1]
    if isinstance(conflicts, str) and conflicts == "all":
        return torch.arange(events + 1)
    graph = _neighbours(conflicts, int(clients.max()) if events else -1)
    chunk = _CHUNK if graph is None else max(1, min(_CHUNK, _QUERIES // graph.most))
    latest = np.full(events, -1, np.int64)
    for client in clients.numpy():
        for start in range(0, events, chunk):
            past = max(0, start - limit)  # what is further back is in no block of these events
            conflict = _last_conflict(client[past : start + chunk], start - past, graph)
            part = latest[start : start + chunk]
            np.maximum(part, np.where(conflict >= 0, conflict + past, -1), out=part)
    reach = np.maximum.accumulate(latest).tolist() if events else []
    return torch.from_numpy(_cuts(reach, limit))


def bounds_of_each(clients: Tensor, conflicts: Conflicts, limit: int) -> list[NDArray[np.int64]]:
    """Return :func:`block_bounds` of every replicate by itself; the arguments are the same."""
    if len(clients) < 2 or not isinstance(conflicts, str) or conflicts != "none":
        return [block_bounds(row[None], conflicts, limit).numpy() for row in clients]
    positive_int("bounds_of_each", limit=limit)
    given, (replicates, events) = clients.numpy(), clients.shape
    replicate = np.arange(replicates)[:, None]
    apart = np.where(given < 0, -1, given + (given.max(initial=0) + 1) * replicate)  # no client is in two replicates
    latest = _last_conflict(apart.ravel(), 0, None).reshape(replicates, events) - events * replicate
    return [_cuts(reach, limit) for reach in np.maximum.accumulate(latest, axis=1).tolist()]


def _cuts(reach: list[int], limit: int) -> NDArray[np.int64]:
    """Return greedy cuts: a block from b ends at the first event whose latest conflict is at b or after it.

    ``reach`` is the running maximum of the latest conflicts. Events up to b have theirs before b, so the first entry
    of at least b is that event.
    """
    cuts = [0]
    while (start := cuts[-1]) < len(reach):
        cuts.append(bisect_left(reach, start, start + 1, min(len(reach), start + limit)))
    return np.array(cuts, np.int64)


def _neighbours(conflicts: Conflicts, most: int) -> Adjacency | None:
    """Return the symmetric pattern of an adjacency, without the diagonal; None for "none"."""
    if isinstance(conflicts, str):
        if conflicts != "none":
            raise ConfigError(f"conflicts is {conflicts!r}; accepted: 'none', 'all' or a sparse adjacency.")
        return None
    graph = conflicts if isinstance(conflicts, Adjacency) else Adjacency.of(conflicts)
    if graph.clients <= most:
        raise ConfigError(f"conflicts is of {graph.clients:,} clients; it must be (n, n) with n above client {most}.")
    return graph


def _last_conflict(client: NDArray[np.int64], first: int, graph: Adjacency | None) -> NDArray[np.int64]:
    """Return, for the events from ``first`` on, the latest earlier event of the same or an adjacent client, or -1."""
    events = len(client)
    latest = np.full(events, -1, np.int64)
    order = np.argsort(client, kind="stable")
    order = order[client[order] >= 0]
    acting = client[order]
    again = acting[1:] == acting[:-1]
    latest[order[1:][again]] = order[:-1][again]
    if graph is None:
        return latest[first:]
    address = acting * events + order  # rises: sorted by client, then by event
    queries = order[order >= first]
    degree = np.diff(graph.indptr)[client[queries]]
    queries, degree = queries[degree > 0], degree[degree > 0]
    if not len(queries):
        return latest[first:]
    start = np.cumsum(degree) - degree
    inner = np.arange(degree.sum()) - np.repeat(start, degree)
    other = graph.indices[np.repeat(graph.indptr[client[queries]], degree) + inner].astype(np.int64)
    place = np.searchsorted(address, other * events + np.repeat(queries, degree)) - 1
    adjacent = (place >= 0) & (acting[place] == other)
    newest = np.maximum.reduceat(np.where(adjacent, order[place], -1), start)
    latest[queries] = np.maximum(latest[queries], newest)
    return latest[first:]
