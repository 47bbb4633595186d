"""The public facts about the clients: their names, and the shape of a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..data import FederatedDataset
from ..data.dataset import Examples
from ..data.examples import Domain
from ..data.units import TargetScale
from ..errors import DataError

TRUST = (
    "the messages of clients before noise: every client clips its own, the server adds them up and "
    "adds the noise, so clients trust it with what they send, and an observer of the network can "
    "tell which clients were asked"
)

OWN_ACCOUNTS = (
    "the accounts of the nodes: every node adds noise to its own local steps and charges its own "
    "ledger, by which it protects its records from the server too; this folder has no account, and "
    "says nothing of theirs"
)

LATENCIES = (
    "when nodes answer, which decides whose answers a round takes: epsilon holds if that does not "
    "depend on their data"
)


def population(
    names: Sequence[str],
    shape: Sequence[int],
    *,
    classes: int | None,
    targets: Sequence[int] = (),
    integer: bool = False,
    public: Examples | None = None,
    domain: Domain | None = None,
    name: str = "population",
) -> FederatedDataset:
    """Makes the population from which a server draws cohorts: data without records.

    Every client has one record of zeros, on which no model is trained.

    Args:
        names: of all clients, distinct; fixed for the whole run, connected or not.
        shape: of one record's features, as the model takes them.
        classes: number of classes, None for real targets.
        targets: shape of one record's target, () for one label or number.
        integer: True if features are whole numbers, such as tokens.
        public: examples that belong to no client, for an algorithm that takes some.
        domain: public bounds that every record keeps, if there are any.
        name: for messages and reports.

    Returns:
        A dataset of n clients with one record of zeros each, for the ``data`` of a trainer of
        :func:`server_app`.

    Raises:
        DataError: names that are not distinct texts, or shapes without positive numbers.

    Example:
        >>> from fedmtl.flower import population
        >>> clients = population(["anna", "ben"], shape=[4], classes=2)
        >>> len(clients), clients.spec.shape
        (2, (4,))
    """
    names = tuple(names)
    n = len(names)
    if not n or any(size < 1 for size in (*shape, *targets)):
        needs = "at least one name, and shapes of positive numbers"
        raise DataError(f"{name}: a population has {needs}.")
    # one record for each client: x (n, *shape), y (n, *targets)
    x = torch.zeros(n, *shape, dtype=torch.int64 if integer else torch.float32)
    y = torch.zeros(n, *targets, dtype=torch.float32 if classes is None else torch.int64)
    records = Examples(x, y, torch.arange(n + 1))
    return FederatedDataset(
        records,
        records,
        names,
        classes=classes,
        name=name,
        public=public,
        domain=domain,
        notes=(TRUST,),
    )


def with_target_range(
    clients: FederatedDataset, low: float, high: float, scale: TargetScale = "linear"
) -> FederatedDataset:
    """Returns a population whose real target has a public range, as the tables of its nodes.

    Every node maps the range to [-1, 1], and one with another range or scale takes no part.

    Args:
        clients: the population.
        low: least target in its own units, as in ``data.bounds`` of each node.
        high: largest target.
        scale: as ``data.target_scale`` of each node; ``"log"`` maps the logarithm of the range.

    Raises:
        DataError: a range that is not above 0 with ``"log"``.
    """
    ends = (float(low), float(high))
    return replace(clients, target_range=ends, target_scale=scale, limit=1.0, verify=False)


def check_records(data: FederatedDataset, name: str, expected: FederatedDataset) -> None:
    """Refuses records that are not those of one client, not of the population's shape, or with
    targets that are stored in another way.

    Args:
        data: the records of a node.
        name: of the node's client.
        expected: the population.

    Raises:
        DataError: the records differ from the population. The message has none of their values.
    """
    if len(data) != 1:
        raise DataError(f"the data of node {name!r} are of {len(data)} clients; a node has one.")
    # a model of the population takes no other records
    for field in ("shape", "classes", "targets", "integer", "inputs"):
        here = getattr(data.spec, field)
        there = getattr(expected.spec, field)
        if here != there:
            found = f"the records of node {name!r} have {field} {here!r}"
            raise DataError(f"{found}; the population's is {there!r}.")
    # Models of targets in other units, or of their logarithms, are no models of one thing.
    for field in ("target_range", "target_scale"):
        here = getattr(data, field)
        there = getattr(expected, field)
        if here != there:
            raise DataError(
                f"the records of node {name!r} have {field} {here!r}; the population's is "
                f"{there!r}. Give all nodes one range in data.bounds and one data.target_scale, "
                "and the population the same, with_target_range(population(...), LOW, HIGH)."
            )
