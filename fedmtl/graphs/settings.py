"""Graphs as settings: what is built once the clients are known."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from .._check import non_negative, positive, positive_int
from ..errors import ConfigError, DataError
from .builders import clusters, complete, from_edges, knn_cosine, ring
from .graph import Graph


@runtime_checkable
class GraphSettings(Protocol):
    """What makes a graph of a dataset's clients: a frozen dataclass with ``build``.

    ``from_data`` says whether it reads the clients' records; a report then says that no epsilon covers the graph.
    """

    from_data: bool

    def build(self, data: Any) -> Graph:
        """Return the graph of ``data``, a :class:`~fedmtl.data.FederatedDataset`, rows in the order of its ids."""
        ...


@dataclass(frozen=True)
class Complete:
    """Weight 1 between all clients."""

    from_data = False

    def build(self, data: Any) -> Graph:
        """Build the graph of :func:`~fedmtl.graphs.complete`."""
        return complete(data.ids)


@dataclass(frozen=True)
class Ring:
    """Weight 1 between clients at most ``reach`` places apart on a circle, in the order of the data."""

    reach: int = 1
    from_data = False

    def __post_init__(self) -> None:
        positive_int(self, reach=self.reach)

    def build(self, data: Any) -> Graph:
        """Build the graph of :func:`~fedmtl.graphs.ring`."""
        return ring(data.ids, self.reach)


@dataclass(frozen=True)
class Clusters:
    """Public clusters of clients.

    Args:
        labels: the cluster of each client, by id.
        inside, between: weights of pairs in the same and in different clusters.
    """

    labels: Mapping[str, Any]
    inside: float = 1.0
    between: float = 0.0
    from_data = False

    def __post_init__(self) -> None:
        positive(self, inside=self.inside)
        non_negative(self, between=self.between)
        object.__setattr__(self, "labels", {str(name): label for name, label in self.labels.items()})

    def __hash__(self) -> int:
        return hash((tuple(self.labels.items()), self.inside, self.between))

    def build(self, data: Any) -> Graph:
        """Build the graph of :func:`~fedmtl.graphs.clusters`."""
        for name in self.labels:
            if name not in data.ids:
                raise ConfigError(f"Clusters.labels names {name!r}, which is no client of {data.name}.")
        for name in data.ids:
            if name not in self.labels:
                raise ConfigError(f"Clusters.labels has no cluster for client {name!r}; give one to every client.")
        labels = [self.labels[name] for name in data.ids]
        return clusters(labels, inside=self.inside, between=self.between, ids=data.ids)


@dataclass(frozen=True)
class EdgesFile:
    """A CSV file of edges by client id; see :func:`~fedmtl.graphs.from_edges`.

    Raises:
        DataError: there is no such file.
    """

    path: str
    isolated: bool = False
    digest: str = field(init=False)
    from_data = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        if not Path(self.path).is_file():
            raise DataError(f"{self.path}: no such file; edges are a CSV file with the columns agent,neighbour,weight.")
        content = Path(self.path).read_bytes()
        object.__setattr__(self, "digest", hashlib.blake2b(content, digest_size=16).hexdigest())

    def build(self, data: Any) -> Graph:
        """Read it."""
        try:
            return from_edges(self.path, data.ids, isolated=self.isolated)
        except ConfigError as error:
            raise ConfigError(str(error).replace("Graph: ", f"{self.path}: ")) from error


@dataclass(frozen=True)
class KNNCosine:
    """The k nearest by cosine between the clients' mean of target times features over their training records.

    That mean is the direction of the first gradient step of a linear model. It is computed from the raw records: no
    epsilon covers such a graph.

    Args:
        k: neighbours of each client.
    """

    k: int = 10
    from_data = True

    def __post_init__(self) -> None:
        positive_int(self, k=self.k)

    def build(self, data: Any) -> Graph:
        """Build the graph of :func:`~fedmtl.graphs.knn_cosine`.

        Raises:
            ConfigError: targets of more than one number or more than two classes, or a client without a direction.
        """
        x, y = data.gather("train", torch.arange(len(data.train)), dtype=torch.float64, device="cpu")
        if data.classes not in (None, 2) or y.numel() != len(y):
            raise ConfigError("KNNCosine takes one real target, or two classes; give the graph itself for others.")
        flat, target = x.reshape(len(y), -1).numpy(), y.reshape(-1).double().numpy()
        signed = flat * (2 * target - 1 if data.classes == 2 else target)[:, None]
        client = np.repeat(np.arange(len(data.ids)), data.train.counts.numpy())
        sums = np.zeros((len(data.ids), flat.shape[1]))
        np.add.at(sums, client, signed)
        return knn_cosine(sums, self.k, ids=data.ids)
