"""The check that no client's numbers depend on another client's data except through what was released.

What counts as data. Where the protected unit is a client, its records and their number are private, and so they are in
a run without privacy; who takes part, and how many, belongs to the mechanism and is no client's data. Where the unit is
a record, and for algorithms whose clients act one at a time, the numbers of records are public.

A run's releases are recorded. It is then repeated with the data of a single client replaced and the releases forced to
the recording. Everything that another client has, keeps or hands to a release must be the same to the last bit: its
tensors in the store after every event, its row of every release, its personal model at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...algorithms.base import Problem, State
from ...data import FederatedDataset
from ...data.examples import Examples
from ...data.rows import csr, offsets_of, ranges, select
from ...privacy import RecordPrivacy
from ...privacy.audit import Finding
from ...privacy.audit.findings import exact
from ...privacy.channel import Recording
from ...random import derive_key
from ..trainer import Trainer
from .rerun import states

CHECK = "independence"


@dataclass
class Seen:
    """Holds fingerprints of everything that is a single client's in a run, by (when, what, client), ``when`` being the
    number of the event, or -1 for the start; and the clients of the ``first`` event."""

    values: dict[tuple[int, str, int], int] = field(default_factory=dict)
    first: tuple[int, ...] = ()

    def note(self, when: int, what: str, clients: Tensor, rows: Tensor) -> None:
        """Add ``rows`` (k, ...) of ``clients`` (k,)."""
        for client, mark in zip(clients.tolist(), row_marks(rows).tolist(), strict=True):
            self.values[when, what, client] = mark


def independence(trainer: Trainer, *, seed: int = 0, rounds: int) -> list[Finding]:
    """Replace one client's data, by extreme values and, where they are private, by other numbers of records; compare
    the others'.

    The trainer is on the CPU; secret coins are drawn from a seed here, so that all runs share them.
    """
    if trainer.privacy is not None and trainer.privacy.source == "secure":
        trainer = replace(trainer, privacy=replace(trainer.privacy, source="seeded"))
    recording: list[tuple[int, str, Tensor]] = []
    first = seen(trainer, trainer.data, rounds, record=recording)
    counts = trainer.data.train.counts
    client = next((k for k in first.first if int(counts[k]) > 0), int(counts.argmax()))
    sizes = {"values": int(counts[client])}
    if not trainer.algorithm.one_at_a_time and not isinstance(trainer.privacy, RecordPrivacy):
        sizes |= {"many records": 2 * int(counts.max()) + 1, "one record": 1}
    findings = []
    for kind, size in sizes.items():
        data = replaced_client(trainer.data, client, size, seed)
        again = seen(trainer, data, rounds, replay=recording)
        differing = sorted(
            key
            for key in first.values.keys() | again.values.keys()
            if key[2] != client and first.values.get(key) != again.values.get(key)
        )
        detail = "numbers of other clients that differ, one client's data replaced and releases forced"
        if differing:
            when, what, other = differing[0]
            event = "at the start" if when < 0 else f"in event {when}"
            detail = (
                f"{what} of client {trainer.data.ids[other]!r} depends on the data of client "
                f"{trainer.data.ids[client]!r} otherwise than through the releases, first {event}"
            )
        findings.append(exact(f"{CHECK}: {kind} of one client", len(differing), detail))
    return findings


def public_shape(data: FederatedDataset) -> Finding:
    """Make the data anew with other records of one client and compare what a model is built by: the shape of records
    and targets, the number of classes, the transform and the domain.

    The client has a label that no record had, or targets and features beyond all others. A data set that computes a
    public fact from its records is so caught, whatever it states; what a reader computed before it made the data set is
    in no record of it, and cannot be.
    """
    train = data.train
    own = int(train.counts.argmax())
    rows = slice(int(train.offsets[own]), int(train.offsets[own + 1]))
    x, y = train.x, train.y.clone()
    y[rows] = train.y.max() + 1
    if x.layout == torch.strided and x.is_floating_point():
        x = x.clone()
        x[rows] = 2 * x[rows].abs() + x.abs().max() + 1
    again = replace(data, train=Examples(x, y, train.offsets), verify=False)
    facts = {name: (getattr(data, name), getattr(again, name)) for name in ("spec", "transform", "domain")}
    wrong = [name for name, (one, other) in facts.items() if one != other]
    detail = "public facts that differ, one client's records replaced"
    if wrong:
        detail = f"{', '.join(wrong)} of the data depend on the records of client {data.ids[own]!r}"
    return exact(f"{CHECK}: public shape", len(wrong), detail)


def seen(
    trainer: Trainer,
    data: FederatedDataset,
    rounds: int,
    *,
    record: list[tuple[int, str, Tensor]] | None = None,
    replay: Recording | None = None,
) -> Seen:
    """Return all that single clients have, keep and hand to releases in a run on ``data``."""
    found, everybody = Seen(), torch.arange(len(data))

    def tap(step: int, name: str, clients: Tensor, rows: Tensor) -> None:
        found.note(step, f"the row of {name}", clients, rows)

    def finish(problem: Problem, state: State) -> None:
        models = trainer.algorithm.personalize(problem, state, everybody)
        found.note(rounds, "the personal model", everybody, models)
        if trainer.finetune is not None:
            start = trainer.finetune.origin(trainer.algorithm.shared(state), models)[1]
            found.note(rounds, "the finetuned model", everybody, trainer.finetune.train(problem, start, everybody))

    run = states(trainer, data, rounds, record=record, replay=replay, tap=tap, finish=finish)
    for when, (state, event) in enumerate(run):
        if event is not None and not found.first:
            clients = event.clients
            found.first = tuple(k for k in clients.flatten().tolist() if k >= 0)
        for name, rows in state.private.gather_all(everybody).items():
            found.note(when - 1, f"{name!r} in the store", everybody, rows)
    return found


def row_marks(rows: Tensor) -> Tensor:
    """Return a number for each of ``rows`` (k, ...) that changes, but for a chance of 2^-64, when any bit does: int64
    (k,)."""
    flat = rows.detach().cpu().reshape(len(rows), math.prod(rows.shape[1:])).contiguous()
    if flat.dtype == torch.bool or not flat.numel():
        flat = flat.to(torch.uint8)
    words = flat.view(torch.uint8).to(torch.int64)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(-(2**63), 2**63 - 1, (words.shape[1],), generator=generator)
    return (words * weights).sum(1)


def replaced_client(data: FederatedDataset, client: int, records: int, seed: int) -> FederatedDataset:
    """Return the same data, but ``client`` has ``records`` training examples, whose features are as large as any, or
    tiny.

    Its features are the largest and the smallest value of all, at random, in every second example a thousandth of that;
    its labels are the first or the last class, its targets the largest or the smallest.
    """
    generator = torch.Generator().manual_seed(derive_key(seed, "audit/one client") >> 1)
    train = _replaced_part(data.train, client, records, generator)
    test = _replaced_part(data.test, client, int(data.test.counts[client]), generator)
    return replace(data, train=train, test=test, notes=(), verify=False)


def _replaced_part(side: Examples, client: int, records: int, generator: torch.Generator) -> Examples:
    counts = side.counts.clone()
    index, whose = ranges(side.offsets[:-1], counts.index_fill(0, torch.tensor([client]), records))
    index[whose == client] = side.offsets[client] + torch.arange(records) % max(1, int(counts[client]))
    counts[client] = records
    own = whose == client
    x, y = select(side.x, index), side.y[index]
    if x.layout == torch.sparse_csr:
        values = x.values().clone()
        entries = torch.repeat_interleave(own, x.crow_indices().diff())
        row = torch.repeat_interleave(torch.arange(len(whose)), x.crow_indices().diff())[entries]
        values[entries] = _every_second_tiny(_extremes(side.x.values(), values[entries], generator), row - int(row[0]))
        x = csr(x.crow_indices(), x.col_indices(), values, x.shape[1])
    else:
        x = x.clone()
        x[own] = _every_second_tiny(_extremes(side.x, x[own], generator), torch.arange(records))
    y[own] = _extremes(side.y, y[own], generator)
    return Examples(x, y, offsets_of(counts))


def _every_second_tiny(values: Tensor, row: Tensor) -> Tensor:
    """Return floating ``values`` (k, ...), times 2^-10 where the number ``row`` (k,) is odd."""
    if not values.is_floating_point():
        return values
    factor = torch.where(row % 2 == 1, 2.0**-10, 1.0).to(values.dtype)
    return values * factor.reshape(-1, *[1] * (values.ndim - 1))


def _extremes(values: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return the largest and the smallest of ``values`` at random, in the shape of ``like``."""
    if not values.numel():
        return like
    choice = torch.rand(like.shape, generator=generator) < 0.5
    return torch.where(choice, values.min(), values.max())
