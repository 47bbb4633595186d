"""The checks that numbers depend on data through what was released, and in no other way.

What counts as data. Where the protected unit is a client, its records and their number are private, and so they are in
a run without privacy; who takes part, and how many, belongs to the mechanism and is no client's data. Where the unit is
a record, and for algorithms whose clients act one at a time, the numbers of records are public.

A run's releases are recorded. It is then repeated with other data and the releases forced to the recording. With the
data of all clients replaced, the public state must be the same to the last bit (the transcript). With the data of a
single client replaced, so must be everything that another client has, keeps or hands to a release (independence): its
tensors in the store after every event, its row of every release, its personal model at the end.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...algorithms.local import Local
from ...data import FederatedDataset
from ...privacy import RecordPrivacy
from ...privacy.audit import Finding
from ...privacy.audit.findings import exact, skipped
from ...random import derive_key
from ..trainer import Trainer
from .others import replaced_client, replaced_data
from .rerun import differing, seeded, watched, when

ROUNDS = 10


def transcript(trainer: Trainer, *, seed: int = 0, rounds: int = ROUNDS) -> Finding:
    """Check that the public state is a function of the releases.

    A run's releases are recorded; the run is repeated with every client's examples and numbers of examples replaced,
    the secret coins drawn anew, and the releases forced to the recording. The public state, the shared model and the
    clip norms must be bit-identical from the start to the last round. Secret coins are the cohorts; under record-level
    privacy who takes part when and the numbers of examples are public and stay, the coins are the subsamples of
    records, and the tensors that clients keep must be bit-identical too.
    """
    check, records = "transcript: public state", isinstance(trainer.privacy, RecordPrivacy)
    first = watched(trainer, trainer.data, rounds)
    store = records and not isinstance(trainer.algorithm, Local)
    if not first.public and not (store and first.store):
        return skipped(check, "the algorithm has no public state")
    data, coins = replaced_data(trainer.data, seed, counts=not records), derive_key(seed, "audit/coins") >> 1
    again = watched(trainer, data, rounds, replay=first.releases, coins=coins)
    wrong = differing(first.public, again.public) + (differing(first.store, again.store) if store else [])
    detail = f"tensors that differ of {len(first.public):,}, data replaced, coins drawn anew and releases forced"
    if wrong:
        first_of = when(min(wrong)[0])
        detail = (
            f"the public state depends on private data or coins otherwise than through the releases, first {first_of}"
        )
    return exact(check, len(wrong), detail)


def independence(trainer: Trainer, *, seed: int = 0, rounds: int) -> list[Finding]:
    """Replace one client's data, by extreme values and, where they are private, by other numbers of records; compare
    the others'.

    The trainer is on the CPU; secret coins are drawn from a seed here, so that all runs share them.
    """
    trainer = seeded(trainer)
    first = watched(trainer, trainer.data, rounds, messages=True)
    counts, ids = trainer.data.train.counts, trainer.data.ids
    client = next((k for k in first.first if int(counts[k]) > 0), int(counts.argmax()))
    sizes = {"values": int(counts[client])}
    if not trainer.algorithm.one_at_a_time and not isinstance(trainer.privacy, RecordPrivacy):
        sizes |= {"many records": 2 * int(counts.max()) + 1, "one record": 1}
    findings = []
    for kind, size in sizes.items():
        data = replaced_client(trainer.data, client, size, seed)
        again = watched(trainer, data, rounds, replay=first.releases, messages=True)
        pairs = differing(first.store, again.store) + differing(first.messages, again.messages)
        wrong = sorted(key for key in pairs if key[2] != client)
        detail = "numbers of other clients that differ, one client's data replaced and releases forced"
        if wrong:
            event, what, other = wrong[0]
            detail = (
                f"{what} of client {ids[other]!r} depends on the data of client {ids[client]!r} otherwise than "
                f"through the releases, first {when(event)}"
            )
        findings.append(exact(f"independence: {kind} of one client", len(wrong), detail))
    return findings


def public_shape(data: FederatedDataset) -> Finding:
    """Make the data anew with other records of one client and compare what a model is built by: the shape of records
    and targets, the number of classes, the transform and the domain.

    The client has a label that no record had, or targets and features beyond all others. A data set that computes a
    public fact from its records is so caught, whatever it states; what a reader computed before it made the data set is
    in no record of it, and cannot be.
    """
    train = data.train
    client = int(train.counts.argmax())
    rows = slice(int(train.offsets[client]), int(train.offsets[client + 1]))
    x, y = train.x, train.y.clone()
    y[rows] = train.y.max() + 1
    if x.layout == torch.strided and x.is_floating_point():
        x = x.clone()
        x[rows] = 2 * x[rows].abs() + x.abs().max() + 1
    again = replace(data, train=replace(train, x=x, y=y), verify=False)
    facts = {name: (getattr(data, name), getattr(again, name)) for name in ("spec", "transform", "domain")}
    wrong = [name for name, (before, other) in facts.items() if before != other]
    detail = "public facts that differ, one client's records replaced"
    if wrong:
        detail = f"{', '.join(wrong)} of the data depend on the records of client {data.ids[client]!r}"
    return exact("independence: public shape", len(wrong), detail)
