"""The checks that a client's numbers depend on other clients' data through releases only.

A run's releases are recorded. It is repeated with the data of a single client replaced and the
releases forced to the recording: everything that another client has, keeps or hands to a release
must be the same to the last bit, its tensors in the store after every block, its row of every
release, its personal model at the end.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..data import FederatedDataset
from ..privacy import RecordPrivacy
from ..trainer.trainer import Trainer
from .findings import Finding, exact
from .other_clients import replaced_client
from .rerun import Notes, differing, watched, when


def independence(trainer: Trainer, first: Notes, *, seed: int = 0, rounds: int) -> list[Finding]:
    """Replaces one client's data, by extreme values and, if they are private, by other numbers
    of records, and compares the others' numbers with those of the ``first`` run, which has the same
    coins. Replaces those of all others, and compares the client's numbers. This finds every
    dependence of all clients on the data of one, whichever that is."""
    counts = trainer.data.train.counts
    ids = trainer.data.ids
    # one that acted first, since its data can reach every later number; without one, that of the
    # most records
    client = next((k for k in first.first if int(counts[k]) > 0), int(counts.argmax()))
    sizes: dict[str, int | None] = {"values": None}
    # if the unit is a record, and of clients that act one at a time, numbers of records are
    # public
    if private := not trainer.algorithm.one_at_a_time and not isinstance(
        trainer.privacy, RecordPrivacy
    ):
        sizes["many records"] = 2 * int(counts.max()) + 1
        sizes["one record"] = 1
    changes = [
        (f"{kind} of one client", torch.tensor([client]), size) for kind, size in sizes.items()
    ]
    # all at once, so that the one that influences the client is among them
    rest = torch.tensor([k for k in range(len(ids)) if k != client], dtype=torch.int64)
    changes.append(("all clients but one", rest, 1 if private else None))
    findings = []
    for kind, clients, size in changes:
        data = replaced_client(trainer.data, clients, size, seed)
        changed = set(clients.tolist())
        # with the releases of the first run, so that no difference comes through them
        again = watched(trainer, rounds, data=data, replay=first.releases)
        pairs = differing(first.store, again.store) + differing(first.messages, again.messages)
        whose = "other clients"
        if client in changed:
            whose = f"client {ids[client]!r}"
        wrong = [
            f"{value} of client {ids[other]!r} depends on the data of {whose} otherwise than "
            f"through the releases, first {when(block)}"
            for block, value, other in sorted(key for key in pairs if key[2] not in changed)
        ]
        detail = (
            "numbers of clients whose data stay that differ, the data of others replaced and "
            "releases forced"
        )
        findings.append(exact(f"independence: {kind}", wrong, detail))
    return findings


def public_shape(data: FederatedDataset) -> Finding:
    """Makes the data anew with other records of one client and compares the public facts that a
    model is built from: the shape of records and targets, the number of classes, the transform and
    the domain.

    The client has a label that no record had, or targets and features beyond all others. So a data
    set that computes a public fact from its records is caught, whatever it states. A fact that a
    reader computed before it made the data set is not.
    """
    train = data.train
    client = int(train.counts.argmax())
    rows = slice(int(train.offsets[client]), int(train.offsets[client + 1]))
    x = train.x
    y = train.y.clone()
    # a class that no record had, or a target beyond all others
    y[rows] = train.y.max() + 1
    # whole numbers may be tokens, whose range is that of a vocabulary
    if x.layout == torch.strided and x.is_floating_point():
        x = x.clone()
        x[rows] = 2 * x[rows].abs() + x.abs().max() + 1
    again = replace(data, train=replace(train, x=x, y=y), verify=False)
    facts = {
        name: (getattr(data, name), getattr(again, name))
        for name in ("spec", "transform", "domain")
    }
    strange = [name for name, (before, other) in facts.items() if before != other]
    wrong = [
        f"{name} of the data depends on the records of client {data.ids[client]!r}"
        for name in strange
    ]
    return exact(
        "independence: public shape",
        wrong,
        "public facts that differ, one client's records replaced",
    )
