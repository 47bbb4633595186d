"""What is public of the clients: who they are, and the shape of a record."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..data import FederatedDataset
from ..data.dataset import Examples
from ..data.examples import DataSpec, Domain
from ..errors import DataError

TRUST = (
    "the messages of clients before noise: every client clips its own, the server adds them up and adds the noise, so "
    "clients trust it with what they send, and an observer of the network can tell which clients were asked"
)

OWN_ACCOUNTS = (
    "the accounts of the nodes: every node adds noise to its own local steps and charges its own ledger, by which it "
    "protects its records from the server too; this folder has no account, and says nothing of theirs"
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
    """Return data that have no records: the population from which cohorts are drawn, as a server knows it.

    Every client stands there with one record of zeros, on which no model is trained.

    Args:
        names: of all clients, distinct; fixed for the whole run, connected or not.
        shape: of one record's features, as the model takes them.
        classes: number of classes, None for real targets.
        targets: shape of one record's target, () for one label or number.
        integer: whether features are whole numbers, such as tokens.
        public: examples that belong to no client, where the algorithm takes some.
        domain: public bounds that every record keeps, where there are any.
        name: for messages and reports.

    Raises:
        DataError: names that are not distinct texts, or shapes that are none.
    """
    names, n = tuple(names), len(names)
    if not n or any(size < 1 for size in (*shape, *targets)):
        raise DataError(f"{name}: a population has at least one name, and shapes of positive numbers.")
    x = torch.zeros(n, *shape, dtype=torch.int64 if integer else torch.float32)
    y = torch.zeros(n, *targets, dtype=torch.float32 if classes is None else torch.int64)
    same = Examples(x, y, torch.arange(n + 1))
    return FederatedDataset(same, same, names, classes=classes, name=name, public=public, domain=domain, notes=(TRUST,))


def check_records(data: FederatedDataset, name: str, expected: DataSpec) -> None:
    """Refuse records that are not those of one client, or not of the population's shape.

    Raises:
        DataError: named; it says nothing of their values.
    """
    if len(data) != 1:
        raise DataError(f"the data of node {name!r} are of {len(data)} clients; a node has one.")
    for field in ("shape", "classes", "targets", "integer", "inputs"):
        here, there = getattr(data.spec, field), getattr(expected, field)
        if here != there:
            raise DataError(f"the records of node {name!r} have {field} {here!r}; the population's is {there!r}.")
