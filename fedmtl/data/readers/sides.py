"""From every client's examples, as a reader finds them in a source's train and test part, to a dataset."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import scipy.sparse
import torch

from ..._check import given, positive_int
from ...errors import ConfigError, DataError
from ...random import derive_key, keyed_bits
from ..checks import check_fraction, say_left_out
from ..dataset import Classes, FederatedDataset
from ..examples import Domain
from ..split import client_keys
from ..transforms import Transform

Pair = tuple[Any, np.ndarray]
"""A client's x (examples, ...), an array or a SciPy CSR matrix, and y (examples, ...)."""
Clients = Mapping[str, Pair]


def dataset_of(
    train: Clients,
    test: Clients,
    where: str,
    *,
    name: str,
    classes: Classes,
    test_fraction: float | None,
    seed: int,
    min_examples: int = 1,
    clients: int | None = None,
    transform: Transform | None = None,
    domain: Domain | None = None,
) -> FederatedDataset:
    """Choose the clients and the split.

    Args:
        train: each client's examples, or those for training where ``test`` has any.
        test: the source's own test examples; empty where it has none. Where its split is used, clients of this part
            only are left out.
        where: names the source in messages.
        name, classes, transform, domain: as in :class:`FederatedDataset`.
        test_fraction: share of each client's examples held out for test, train and test pooled; None keeps the source's
            own split, and without one means 0.2.
        seed: of the split and of the choice of clients, both keyed by the client's id.
        min_examples: clients with fewer examples, train and test together, are left out.
        clients: keep that many of the others, drawn at random; None keeps all.

    Raises:
        DataError: no client is left, or malformed examples.
        ConfigError: an impossible setting, or more clients than there are.
    """
    check_choice(where, test_fraction, min_examples, clients)
    pooled = merged(train, test, where)
    given = bool(test) and test_fraction is None
    trained = train if given else pooled
    kept = chosen(pooled, where, min_examples=min_examples, clients=clients, seed=seed, trained=trained)
    return FederatedDataset.from_tensors(
        {client: trained[client] for client in kept},
        test={client: test[client] for client in kept if client in test} if given else None,
        test_fraction=0.2 if test_fraction is None else test_fraction,
        seed=seed,
        classes=classes,
        transform=transform,
        domain=domain,
        name=name,
    )


def check_choice(where: str, test_fraction: float | None, min_examples: int, clients: int | None) -> None:
    """Refuse settings that no data can follow, before any file is read."""
    positive_int(where, min_examples=min_examples, **given(clients=clients))
    if test_fraction is not None:
        check_fraction(test_fraction)


def chosen(
    pooled: Clients, where: str, *, min_examples: int, clients: int | None, seed: int, trained: Container[str]
) -> list[str]:
    """Return the clients with ``min_examples`` or more of which some are for training, those in ``trained``, and of
    these ``clients`` by the smallest draw keyed by (seed, id). A line says how many others there are.

    Raises:
        DataError: none has so many.
        ConfigError: fewer than ``clients`` have.
    """
    large = [client for client, (_, y) in pooled.items() if len(y) >= min_examples]
    ids = [client for client in large if client in trained]
    if not ids:
        raise DataError(f"{where}: no client has {min_examples} or more examples (min_examples).")
    say_left_out(len(pooled) - len(large), where, f"fewer than {min_examples} examples (min_examples)")
    say_left_out(len(large) - len(ids), where, "test examples only (test_fraction=0.2 divides theirs anew)")
    if clients is None:
        return ids
    if clients > len(ids):
        raise ConfigError(f"{where}: clients is {clients:,}, but only {len(ids):,} have enough examples.")
    zero = torch.zeros(len(ids), dtype=torch.int64)
    bits = keyed_bits(derive_key(seed, "clients"), client_keys(ids), 0, zero)
    return [ids[place] for place in bits.argsort(stable=True)[:clients].sort().values.tolist()]


def merged(train: Clients, test: Clients, where: str) -> dict[str, Pair]:
    """Return the examples of both parts by client, those for training first.

    Raises:
        DataError: a client's examples have another shape in test than in train.
    """
    both = dict(train)
    for client, (x, y) in test.items():
        if client in both:
            first_x, first_y = both[client]
            if first_x.shape[1:] != x.shape[1:]:
                raise DataError(
                    f"{where}: client {client!r}, field 'x' has examples of shape {first_x.shape[1:]} in "
                    f"train and {x.shape[1:]} in test; they must agree."
                )
            join: Any = scipy.sparse.vstack if scipy.sparse.issparse(x) else np.concatenate
            x, y = join([first_x, x]), np.concatenate([first_y, y])
        both[client] = (x, y)
    return both
