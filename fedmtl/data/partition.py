"""Partitions of one pool of examples among clients; every example is used at most once.

A partition is a setting whose ``deal`` turns labels into ``{client id: ascending row numbers}``;
readers of pools and :func:`from_partition` make a dataset of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .._check import Checked, Count, Positive
from ..errors import ConfigError, DataError
from ..random import keyed_generator
from .arrays import as_targets, as_tensor
from .checks import by_id, check_lengths
from .dataset import FederatedDataset
from .rows import by_number, select

Parts = dict[str, np.ndarray]
_ATTEMPTS = 100


class Partition(Protocol):
    """A law by which one pool of examples is dealt to clients, ``client-0``, ``client-1``, ...

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedmtl.data import from_partition
        >>> class Alternating:
        ...     def deal(self, y, seed=0):
        ...         return {f"client-{i}": np.arange(i, len(y), 2) for i in range(2)}
        >>> data = from_partition(torch.rand(8, 3), torch.rand(8), Alternating(), classes=None)
        >>> len(data), len(data.train) + len(data.test)
        (2, 8)
    """

    def deal(self, y: Any, seed: int = 0) -> Parts:
        """Deals examples to clients.

        Args:
            y: labels (N,), a tensor, an array or a list of whole numbers.
            seed: of the deal; another seed deals other examples.

        Returns:
            The row numbers of each client by its id: ascending int64 arrays, in which no number
            occurs twice.
        """


@dataclass(frozen=True)
class Dirichlet(Checked):
    """Labels skew: each class is divided in shares drawn from a symmetric Dirichlet distribution
    over clients.

    Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution", 2019; Li et al.,
    ICDE 2022. A draw that leaves a client with fewer than ``min_examples`` is repeated, at most 100
    times.

    Args:
        clients: number of clients.
        alpha: concentration, above 0: small for clients of few classes, large for equal shares.
        min_examples: examples that every client must get.

    Example:
        >>> from fedmtl.data import Dirichlet
        >>> parts = Dirichlet(clients=3, alpha=0.5).deal([0, 1] * 10)
        >>> sorted(row for rows in parts.values() for row in rows.tolist()) == list(range(20))
        True
    """

    clients: Count
    alpha: Positive
    min_examples: Count = 2

    def deal(self, y: Any, seed: int = 0) -> Parts:
        """Deals examples to clients, class by class.

        Args:
            y: labels (N,) of any whole numbers.
            seed: of the shares and of the order within a class.

        Returns:
            The row numbers of each client, ascending; every row is dealt.

        Raises:
            ConfigError: more clients than ``y`` allows, or settings that no draw satisfied.

        Example:
            >>> from fedmtl.data import Dirichlet
            >>> parts = Dirichlet(clients=3, alpha=0.5).deal([0, 1] * 20)
            >>> sorted(parts), sum(map(len, parts.values()))
            (['client-0', 'client-1', 'client-2'], 40)
        """
        labels = _labels(y)
        if self.clients * self.min_examples > len(labels):
            raise ConfigError(
                f"Dirichlet.clients is {self.clients:,} with min_examples {self.min_examples}, but "
                f"there are only {len(labels):,} examples; ask for fewer clients."
            )
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        # each attempt has a stream of its own, so that the result does not depend on how many draws
        # the ones before took
        for attempt in range(_ATTEMPTS):
            generator = keyed_generator(seed, "dirichlet", attempt)
            client = np.empty(len(labels), dtype=np.int64)
            for group in groups:
                shares = generator.dirichlet(np.full(self.clients, self.alpha))
                # rounded cumulated shares: the parts add up to the class, whatever the rounding
                bounds = np.rint(np.cumsum(shares)[:-1] * len(group)).astype(np.int64)
                client[generator.permutation(group)] = np.searchsorted(
                    bounds, np.arange(len(group)), side="right"
                )
            if np.bincount(client, minlength=self.clients).min() >= self.min_examples:
                return by_number(client, _ids(self.clients))
        raise ConfigError(
            f"Dirichlet.alpha is {self.alpha}: in {_ATTEMPTS} draws some of the {self.clients:,} "
            f"clients had fewer than {self.min_examples} examples; raise alpha, or ask for fewer "
            "clients or a lower min_examples."
        )


@dataclass(frozen=True)
class Shards(Checked):
    """Labels skew by shards: examples sorted by label are cut into equal shards, dealt at random.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data",
    2017.

    Args:
        clients: number of clients.
        shards_per_client: shards each client gets; shard sizes differ by at most 1.

    Example:
        >>> from fedmtl.data import Shards
        >>> parts = Shards(clients=3, shards_per_client=1).deal([0] * 4 + [1] * 4 + [2] * 4)
        >>> sorted(rows.tolist() for rows in parts.values())
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """

    clients: Count
    shards_per_client: Count = 2

    def deal(self, y: Any, seed: int = 0) -> Parts:
        """Deals shards of examples to clients.

        Args:
            y: labels (N,) of any whole numbers.
            seed: of the order within a label and of the deal.

        Returns:
            The row numbers of each client, ascending; every row is dealt.

        Raises:
            ConfigError: more shards than examples.

        Example:
            >>> from fedmtl.data import Shards
            >>> parts = Shards(clients=4, shards_per_client=1).deal([0, 1] * 4)
            >>> [len(rows) for rows in parts.values()]
            [2, 2, 2, 2]
        """
        labels = _labels(y)
        total = self.clients * self.shards_per_client
        if total > len(labels):
            raise ConfigError(
                f"Shards.clients is {self.clients:,}: with {self.shards_per_client} shards each "
                f"they need {total:,} examples, but there are only {len(labels):,}; ask for fewer."
            )
        generator = keyed_generator(seed, "shards")
        shuffled = generator.permutation(len(labels))
        # stable, so that examples of one label stay in the order of the seed
        order = shuffled[np.argsort(labels[shuffled], kind="stable")]
        dealt_to = generator.permutation(np.repeat(np.arange(self.clients), self.shards_per_client))
        client = np.empty(len(labels), dtype=np.int64)
        for shard, part in zip(dealt_to, np.array_split(order, total), strict=True):
            client[part] = shard
        return by_number(client, _ids(self.clients))


@dataclass(frozen=True)
class ByClasses(Checked):
    """Deals a few classes to each client, all of equal size, as in FedRep and CENTAUR (Shen et al.
    2023).

    Every client gets ``classes_per_client`` different classes, drawn so that all classes have as
    many clients, up to one, and the same number of examples of each of them: as many as the rarest
    class has for one of its clients. The rest of a class is not used. The classes of a client
    depend on the settings and the number of classes, so that a train and a test pool are dealt
    alike.

    Args:
        clients: number of clients.
        classes_per_client: different classes of each client.

    Example:
        >>> from fedmtl.data import ByClasses
        >>> parts = ByClasses(clients=2, classes_per_client=1).deal([0, 0, 0, 1, 1, 1])
        >>> sorted(rows.tolist() for rows in parts.values())
        [[0, 1, 2], [3, 4, 5]]
    """

    clients: Count
    classes_per_client: Count

    def deal(self, y: Any, seed: int = 0) -> Parts:
        """Deals some classes to each client.

        Args:
            y: labels (N,) in ``0 .. classes - 1``.
            seed: of the classes of each client and of the order within a class.

        Returns:
            The row numbers of each client, ascending, as many for each; rows that are left over are
            dealt to nobody.

        Raises:
            ConfigError: too few classes, or too few examples of some class.

        Example:
            >>> from fedmtl.data import ByClasses
            >>> parts = ByClasses(clients=3, classes_per_client=2).deal([0, 1, 2] * 4)
            >>> {name: len(rows) for name, rows in parts.items()}
            {'client-0': 4, 'client-1': 4, 'client-2': 4}
        """
        labels = _labels(y)
        classes = int(labels.max()) + 1
        if self.classes_per_client > classes:
            raise ConfigError(
                f"ByClasses.classes_per_client is {self.classes_per_client}, but there are only "
                f"{classes} classes."
            )
        draws, order = (
            keyed_generator(seed, f"by_classes/{purpose}") for purpose in ("classes", "rows")
        )
        places = np.zeros(classes, dtype=np.int64)  # clients that each class still takes
        extra = draws.permutation(classes)[: self.clients * self.classes_per_client % classes]
        # all classes get as many clients; the remainder goes to classes that the seed chooses
        places += self.clients * self.classes_per_client // classes
        places[extra] += 1
        groups = [order.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
        shares = [
            len(group) // count
            for group, count in zip(groups, places.tolist(), strict=True)
            if count
        ]
        if min(shares) < 1:
            rare = min(
                range(classes), key=lambda label: len(groups[label]) / max(1, int(places[label]))
            )
            raise ConfigError(
                f"ByClasses.clients is {self.clients:,}: class {rare} has {len(groups[rare]):,} "
                "examples for "
                f"{int(places[rare]):,} of them; ask for fewer clients or classes a client."
            )
        used = np.zeros(classes, dtype=np.int64)
        parts = {}
        for client in _ids(self.clients):
            # the classes with most places left, so that enough different ones remain for the last
            # clients
            own = np.lexsort((draws.random(classes), -places))[: self.classes_per_client]
            places[own] -= 1
            rows = [groups[label][used[label] : used[label] + min(shares)] for label in own]
            used[own] += min(shares)
            parts[client] = np.sort(np.concatenate(rows))
        return parts


def from_partition(
    x: Any,
    y: Any,
    parts: Mapping[str, Any] | Mapping[int, Any] | Partition,
    *,
    seed: int = 0,
    name: str = "data",
    **options: Any,
) -> FederatedDataset:
    """Returns a dataset from one pool x (N, ...), y (N, ...) and the row numbers of each client.

    Args:
        x: features; a tensor, an array or a sparse matrix.
        y: labels or targets.
        parts: row numbers by client id, or a partition such as :class:`Dirichlet`, which deals by
            y; a row may be left out, but none belongs to two clients.
        seed: of the partition and of the split.
        name: for messages and reports.
        options: as in :meth:`FederatedDataset.from_tensors`.

    Raises:
        DataError: malformed data, or a row that does not exist or is used twice.

    Example:
        >>> import torch
        >>> from fedmtl.data import Dirichlet, from_partition
        >>> x = torch.randn(60, 3)
        >>> y = torch.arange(60) % 2
        >>> data = from_partition(x, y, Dirichlet(clients=4, alpha=1.0), classes=2)
        >>> len(data), len(data.train) + len(data.test)
        (4, 60)
    """
    features = as_tensor(x, name, "x")
    targets = as_targets(y, name)
    check_lengths(features, targets, name)
    if not isinstance(parts, Mapping):
        parts = parts.deal(targets, seed)
    parts = by_id(parts, name)
    if not parts:
        raise DataError(f"{name}: parts names no clients; at least one is needed.")
    used = torch.zeros(len(targets), dtype=torch.bool)
    clients = {}
    for client, part in parts.items():
        index = _row_numbers(part, f"{name}: the part of client {client!r}")
        if len(index) and not (int(index.min()) >= 0 and int(index.max()) < len(targets)):
            raise DataError(
                f"{name}: the part of client {client!r} has a row outside 0..{len(targets) - 1}; "
                "rows must be numbers of examples."
            )
        # a record of two clients would be protected by the noise of each of them only
        if used[index].any() or len(index.unique()) != len(index):
            raise DataError(
                f"{name}: the part of client {client!r} has a row that is used twice; "
                "accepted: once."
            )
        used[index] = True
        clients[client] = select(features, index), targets[index]
    return FederatedDataset.from_tensors(clients, seed=seed, name=name, **options)


def _row_numbers(part: Any, where: str) -> Tensor:
    """Returns row numbers (K,), int64.

    Raises:
        DataError: no whole numbers, such as a mask of true and false, or several dimensions.
    """
    index = as_tensor(part, where, "rows")
    if not index.numel():
        return torch.zeros(0, dtype=torch.int64)
    if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
        kind = str(index.dtype).removeprefix("torch.")
        raise DataError(
            f"{where} is {kind} of shape {tuple(index.shape)}; accepted: a list of "
            "whole row numbers."
        )
    return index.long()


def _labels(y: Any) -> np.ndarray:
    """Returns the labels by which a pool is dealt (N,): numbers or texts."""
    if isinstance(y, Tensor):
        y = as_targets(y, "partition").cpu()
        if y.is_floating_point():
            # bfloat16 has no counterpart in NumPy
            y = y.double()
    labels = np.asarray(y)
    if labels.ndim != 1 or not len(labels):
        raise DataError(f"y has shape {labels.shape}; a partition needs one label an example.")
    return labels


def _ids(clients: int) -> list[str]:
    return [f"client-{i}" for i in range(clients)]
