"""Settings of graphs that are built from the clients of a dataset."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from scipy.sparse import csr_array

from .._check import Checked, Count
from .._files import csv_rows
from ..errors import ConfigError, DataError
from .graph import Graph, knn_cosine


@runtime_checkable
class GraphSettings(Protocol):
    """A setting from which the graph of a dataset's clients is built: a frozen dataclass with
    ``build``.

    ``from_data`` is True if it reads the clients' records. A report then says that no epsilon
    covers the graph.

    Example:
        >>> import numpy as np
        >>> from dataclasses import dataclass
        >>> from fedmtl import load_data
        >>> from fedmtl.graphs import Graph, GraphSettings
        >>> @dataclass(frozen=True)
        ... class Star:
        ...     from_data = False
        ...     def build(self, data):  # the first client with all others
        ...         others = np.arange(1, len(data.ids))
        ...         return Graph.from_pairs(np.zeros_like(others), others, 1.0, data.ids)
        >>> isinstance(Star(), GraphSettings)
        True
        >>> Star().build(load_data("digits", clients=4)).degrees.tolist()
        [3, 1, 1, 1]
    """

    from_data: bool

    def build(self, data: Any) -> Graph:
        """Returns the graph of the clients of a dataset.

        Args:
            data: a :class:`~fedmtl.data.FederatedDataset` of n clients.

        Returns:
            The graph of n agents, in the order of the ids.
        """
        ...


@dataclass(frozen=True)
class Complete:
    """Connects all clients with weight 1.

    Example:
        >>> from fedmtl import load_data
        >>> from fedmtl.graphs import Complete
        >>> Complete().build(load_data("digits", clients=4)).degrees.tolist()
        [3, 3, 3, 3]
    """

    from_data = False

    def build(self, data: Any) -> Graph:
        """Connects all pairs of the clients of a dataset.

        Args:
            data: of n clients; the graph stores n (n - 1) numbers.

        Returns:
            The graph, in the order of the ids.
        """
        n = len(data.ids)
        return Graph(csr_array(np.ones((n, n)) - np.eye(n)), data.ids)


@dataclass(frozen=True)
class Ring(Checked):
    """Connects clients at a distance of at most ``reach`` places on a circle, in the order of the
    data, with weight 1.

    Example:
        >>> from fedmtl import load_data
        >>> from fedmtl.graphs import Ring
        >>> Ring(reach=2).build(load_data("digits", clients=10)).degrees.tolist()
        [4, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    """

    reach: Count = 1
    from_data = False

    def build(self, data: Any) -> Graph:
        """Connects each client of a dataset with its ``reach`` neighbours on either side.

        Args:
            data: of n clients, in the order of the circle.

        Returns:
            The graph, in the order of the ids.

        Raises:
            ConfigError: a reach that goes around: 2 reach must be below n.
        """
        n = len(data.ids)
        if 2 * self.reach >= n and (n, self.reach) != (2, 1):
            raise ConfigError(
                f"Ring.reach is {self.reach:,} for {n:,} clients; 2 reach must be "
                "below their number."
            )
        place = np.tile(np.arange(n), self.reach)
        return Graph.from_pairs(
            place, (place + np.repeat(np.arange(1, self.reach + 1), n)) % n, 1.0, data.ids
        )


@dataclass(frozen=True)
class EdgesFile:
    """Reads a graph from a CSV file with the columns ``agent,neighbour,weight`` or
    ``agent,neighbour`` (weight 1), by client id.

    Every pair of agents stands in the file once, in either order, or twice with the same weight.

    Args:
        path: a text file, or one compressed with gzip (``.gz``).

    Raises:
        DataError: there is no such file.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedmtl import load_data
        >>> from fedmtl.graphs import EdgesFile
        >>> data = load_data("digits", clients=3)
        >>> with TemporaryDirectory() as folder:
        ...     with Path(folder, "edges.csv").open("w") as file:
        ...         print("agent,neighbour", file=file)
        ...         for one, other in zip(data.ids, data.ids[1:]):
        ...             print(one, other, sep=",", file=file)
        ...     graph = EdgesFile(Path(folder, "edges.csv")).build(data)
        >>> graph.degrees.tolist()
        [1, 2, 1]
    """

    path: str
    digest: str = field(init=False)
    from_data = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        if not Path(self.path).is_file():
            raise DataError(
                f"{self.path}: no such file; edges are a CSV file with the columns "
                "agent,neighbour,weight."
            )
        # The digest stands in the fingerprint of a run: another file is another run.
        content = Path(self.path).read_bytes()
        object.__setattr__(self, "digest", hashlib.blake2b(content, digest_size=16).hexdigest())

    def build(self, data: Any) -> Graph:
        """Reads the edges between the clients of a dataset.

        Args:
            data: whose ids are the agents of the file.

        Returns:
            The graph, in the order of the ids.

        Raises:
            DataError: a malformed row; the message names it.
            ConfigError: an unknown agent, a pair with two different weights, or a client without
                neighbours.
        """
        place = {name: i for i, name in enumerate(data.ids)}
        weights: dict[tuple[int, int], float] = {}
        for where, cells in csv_rows(
            Path(self.path), "agent,neighbour,weight", "agent,neighbour", subject="edges are"
        ):
            for name in cells[:2]:
                if name not in place:
                    raise ConfigError(
                        f"{where}: there is no agent {name!r}; the agents are the "
                        "clients of the data."
                    )
            weight = 1.0
            if len(cells) == 3:
                try:
                    weight = float(cells[2])
                except ValueError:  # refused below with the text of the cell
                    weight = math.nan
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(
                    f"{where}: the weight is {cells[2]!r}; it must be a finite number above 0."
                )
            first, second = sorted(place[name] for name in cells[:2])
            if first == second:
                raise ConfigError(
                    f"{where}: agent {cells[0]!r} is its own neighbour; an edge has two ends."
                )
            if weights.setdefault((first, second), weight) != weight:
                raise ConfigError(
                    f"{where}: the pair {cells[0]!r}, {cells[1]!r} has the weight {weight:g} here "
                    f"and {weights[first, second]:g} before; weights must be symmetric."
                )
        # An empty file makes (2, 0); the graph then refuses agents without neighbours.
        pairs = np.array(list(weights), dtype=np.int64).reshape(-1, 2).T
        try:
            return Graph.from_pairs(pairs[0], pairs[1], list(weights.values()), data.ids)
        except ConfigError as error:
            raise ConfigError(str(error).replace("Graph: ", f"{self.path}: ")) from error


@dataclass(frozen=True)
class KNNCosine(Checked):
    """Connects each client with its k nearest by cosine, of the means of target times features over
    the clients' training records.

    That mean is the direction of the first gradient step of a linear model. It is computed from the
    raw records: no epsilon covers such a graph.

    Args:
        k: neighbours of each client.

    Example:
        >>> from fedmtl import load_data
        >>> from fedmtl.graphs import KNNCosine
        >>> graph = KNNCosine(k=1).build(load_data("synthetic_tasks", tasks=4))
        >>> bool((graph.degrees >= 1).all())
        True
    """

    k: Count = 10
    from_data = True

    def build(self, data: Any) -> Graph:
        """Connects the clients of a dataset by :func:`~fedmtl.graphs.knn_cosine` of their means.

        Args:
            data: with one real target or two classes; its training records are read.

        Returns:
            The graph, in the order of the ids; not private.

        Raises:
            ConfigError: targets of more than one number or more than two classes, or a client
                without a direction.
        """
        x, y = data.gather(
            "train", torch.arange(len(data.train)), dtype=torch.float64, device="cpu"
        )
        if data.classes not in (None, 2) or y.numel() != len(y):
            raise ConfigError(
                "KNNCosine takes one real target, or two classes; give the graph itself for others."
            )
        flat = x.reshape(len(y), -1).numpy()
        target = y.reshape(-1).double().numpy()
        if data.classes == 2:
            target = 2 * target - 1  # classes are the signs of a linear model
        signed = flat * target[:, None]
        # Unnormalized sums: the cosine does not depend on the number of records.
        client = np.repeat(np.arange(len(data.ids)), data.train.counts.numpy())
        sums = np.zeros((len(data.ids), flat.shape[1]))
        np.add.at(sums, client, signed)
        return knn_cosine(sums, self.k, ids=data.ids)
