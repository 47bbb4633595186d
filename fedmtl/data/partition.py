"""Dealing one pool of examples to clients: every example is used exactly once.

Each partitioner returns ``{client id: ascending row numbers}``, which :func:`from_partition` makes a dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .._check import positive, positive_int
from ..errors import ConfigError, DataError
from ..random import keyed_generator
from .assemble import as_tensor
from .checks import by_id, check_lengths
from .dataset import Classes, FederatedDataset
from .rows import by_number, select
from .transforms import Transform

Parts = dict[str, np.ndarray]

_ATTEMPTS = 100


def dirichlet(y: Any, clients: int, alpha: float, seed: int = 0, *, min_examples: int = 2) -> Parts:
    """Deal with label skew: each class goes in shares drawn from a symmetric Dirichlet distribution over clients.

    Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution", 2019; Li et al., ICDE 2022.
    A draw that leaves a client with fewer than ``min_examples`` is repeated, at most 100 times.

    Args:
        y: labels (N,).
        clients: number of clients; their ids are ``client-0``, ``client-1``, ...
        alpha: concentration, above 0: small for clients of few classes, large for equal shares.
        seed: of the draws.
        min_examples: examples that every client must get.

    Raises:
        ConfigError: an impossible setting, or one that no draw satisfied.
    """
    positive_int("dirichlet", clients=clients, min_examples=min_examples)
    positive("dirichlet", alpha=alpha)
    labels = _labels(y, "dirichlet")
    if clients * min_examples > len(labels):
        raise ConfigError(
            f"dirichlet.clients is {clients:,} with min_examples {min_examples}, but there are only "
            f"{len(labels):,} examples; ask for fewer clients."
        )
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for attempt in range(_ATTEMPTS):
        generator = keyed_generator(seed, "dirichlet", attempt)
        client = np.empty(len(labels), dtype=np.int64)
        for group in groups:
            shares = generator.dirichlet(np.full(clients, alpha))
            bounds = np.rint(np.cumsum(shares)[:-1] * len(group)).astype(np.int64)
            client[generator.permutation(group)] = np.searchsorted(bounds, np.arange(len(group)), side="right")
        if np.bincount(client, minlength=clients).min() >= min_examples:
            return by_number(client, [f"client-{i}" for i in range(clients)])
    raise ConfigError(
        f"dirichlet: in {_ATTEMPTS} draws with alpha {alpha} some of the {clients:,} clients had fewer than "
        f"{min_examples} examples; raise alpha, or ask for fewer clients or a lower min_examples."
    )


def shards(y: Any, clients: int, shards_per_client: int = 2, seed: int = 0) -> Parts:
    """Deal with label skew by shards: examples sorted by label are cut into equal shards, dealt at random.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017.

    Args:
        y: labels (N,).
        clients: number of clients; their ids are ``client-0``, ``client-1``, ...
        shards_per_client: shards each client gets; shard sizes differ by at most 1.
        seed: of the shuffle within a label and of the deal.

    Raises:
        ConfigError: an impossible setting, or more shards than examples.
    """
    positive_int("shards", clients=clients, shards_per_client=shards_per_client)
    labels = _labels(y, "shards")
    total = clients * shards_per_client
    if total > len(labels):
        raise ConfigError(
            f"shards: {clients:,} clients with {shards_per_client} shards each need {total:,} examples, but "
            f"there are only {len(labels):,}; ask for fewer."
        )
    generator = keyed_generator(seed, "shards")
    shuffled = generator.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    dealt_to = generator.permutation(np.repeat(np.arange(clients), shards_per_client))
    client = np.empty(len(labels), dtype=np.int64)
    for shard, part in zip(dealt_to, np.array_split(order, total), strict=True):
        client[part] = shard
    return by_number(client, [f"client-{i}" for i in range(clients)])


def by_classes(y: Any, clients: int, classes_per_client: int, seed: int = 0, *, classes: int) -> Parts:
    """Deal to clients of equal size a few classes each, as in FedRep and CENTAUR (Shen et al. 2023).

    Every client gets ``classes_per_client`` different classes, drawn so that all classes have as many clients, up to
    one, and the same number of examples of each of them: as many as the rarest class has for one of its clients. What
    is left of a class is not used. Which classes a client has depends on the arguments and not on ``y``, so that a
    train and a test pool are dealt alike.

    Args:
        y: labels (N,) in ``0 .. classes - 1``.
        clients: number of clients; their ids are ``client-0``, ``client-1``, ...
        classes_per_client: different classes of each client.
        seed: of the draws.
        classes: number of classes.

    Raises:
        ConfigError: an impossible setting, or too few examples of some class.
    """
    positive_int("by_classes", clients=clients, classes_per_client=classes_per_client, classes=classes)
    labels = _labels(y, "by_classes")
    if classes_per_client > classes:
        raise ConfigError(f"by_classes: {classes_per_client} classes a client, but there are only {classes}.")
    draws, order = (keyed_generator(seed, f"by_classes/{purpose}") for purpose in ("classes", "rows"))
    places = np.zeros(classes, dtype=np.int64)  # clients that each class still takes
    extra = draws.permutation(classes)[: clients * classes_per_client % classes]
    places += clients * classes_per_client // classes
    places[extra] += 1
    groups = [order.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    shares = [len(group) // count for group, count in zip(groups, places.tolist(), strict=True) if count]
    if min(shares) < 1:
        rare = min(range(classes), key=lambda label: len(groups[label]) / max(1, int(places[label])))
        raise ConfigError(
            f"by_classes: class {rare} has {len(groups[rare]):,} examples for {int(places[rare]):,} clients; ask for "
            "fewer clients or classes a client."
        )
    used, parts = np.zeros(classes, dtype=np.int64), {}
    for client in range(clients):
        # the classes with most places left, so that enough different ones remain for the last clients
        own = np.lexsort((draws.random(classes), -places))[:classes_per_client]
        places[own] -= 1
        rows = [groups[label][used[label] : used[label] + min(shares)] for label in own]
        used[own] += min(shares)
        parts[f"client-{client}"] = np.sort(np.concatenate(rows))
    return parts


def by_column(values: Any) -> Parts:
    """Make one client of each distinct value of ``values`` (N,); ids are the values as text, in sorted order."""
    column = np.asarray(values)
    if column.ndim != 1 or not len(column):
        raise DataError(f"by_column: values have shape {column.shape}; they must be one value an example.")
    ids, client = np.unique(column.astype(str), return_inverse=True)
    return by_number(client, ids)


def from_partition(
    x: Any,
    y: Any,
    parts: Mapping[str, Any] | Mapping[int, Any],
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    classes: Classes = "infer",
    transform: Transform | None = None,
    name: str = "data",
) -> FederatedDataset:
    """Return a dataset from one pool x (N, ...), y (N, ...) and the row numbers of each client.

    Args:
        x: features; a tensor, an array or a sparse matrix.
        y: labels or targets.
        parts: row numbers by client id; a row may be left out, but none belongs to two clients.
        test_fraction: share of each client's examples held out for test.
        seed: of the split.
        classes: as in :meth:`FederatedDataset.from_tensors`.
        transform: from storage to float.
        name: for messages and reports.

    Raises:
        DataError: malformed data, or a row that does not exist or is used twice.
    """
    parts = by_id(parts, name)
    features, targets = as_tensor(x, name, "x"), as_tensor(y, name, "y")
    check_lengths(features, targets, name)
    if not parts:
        raise DataError(f"{name}: parts names no clients; at least one is needed.")
    used, clients = torch.zeros(len(targets), dtype=torch.bool), {}
    for client, part in parts.items():
        index = torch.as_tensor(np.asarray(part, dtype=np.int64))
        if len(index) and not (int(index.min()) >= 0 and int(index.max()) < len(targets)):
            raise DataError(
                f"{name}: the part of client {client!r} has a row outside 0..{len(targets) - 1}; "
                "rows must be numbers of examples."
            )
        if used[index].any() or len(index.unique()) != len(index):
            raise DataError(f"{name}: the part of client {client!r} has a row that is used twice; accepted: once.")
        used[index] = True
        clients[client] = select(features, index), targets[index]
    return FederatedDataset.from_tensors(
        clients, test_fraction=test_fraction, seed=seed, classes=classes, transform=transform, name=name
    )


def _labels(y: Any, where: str) -> np.ndarray:
    labels = np.asarray(y)
    if labels.ndim != 1 or not len(labels):
        raise DataError(f"{where}: y has shape {labels.shape}; it must be one label an example.")
    return labels
