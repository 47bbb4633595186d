"""The check that local steps of DP-SGD are computed from the records that were drawn for them, and from no others.

Other checks see that records are drawn as it is charged, and that what is handed to a release is clipped and noised.
Here a run's releases are recorded, and the run is repeated on other records with the releases forced to the recording,
so that every model is the same before each local step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...data import FederatedDataset
from ...data.examples import Examples
from ...data.rows import csr
from ...privacy import Channel
from ...privacy.audit import Finding
from ...privacy.audit.findings import exact, skipped
from ...privacy.channel import GRADIENT, Recording
from ...random import derive_key
from ..trainer import Trainer
from .rerun import states

_TRIES = 3  # other records in the place of one that does not move a sum

Step = dict[int, tuple[Tensor, Tensor]]
"""A local step: client -> its clipped sum (D,), and the places of the records that were drawn, int64 (k,)."""


def drawn_records(trainer: Trainer, other: Callable[[int], FederatedDataset], *, seed: int) -> list[Finding]:
    """Check the first and the last local step of the first round, of every client that takes part.

    Where all records that were not drawn for a step are replaced, its clipped sum must be the same to the last bit.
    Where one record that was drawn is replaced, first by one with another target, the sum must change.

    Args:
        trainer: a configuration with record-level privacy in rounds, on the CPU.
        other: other records for all of its clients, by a seed.
        seed: of the choice of records.
    """
    assert trainer.privacy is not None
    trainer = replace(trainer, privacy=replace(trainer.privacy, source="seeded"))
    recording: list[tuple[int, str, Tensor]] = []
    first = local_steps(trainer, trainer.data, record=recording)
    names = ("sampler: records not drawn", "sampler: records drawn")
    if not first:
        return [skipped(name, "no client makes a local step in the first round") for name in names]
    data, generator = trainer.data, torch.Generator().manual_seed(derive_key(seed, "audit/records") >> 1)
    replaced = moved = still = tried = 0

    def moves(step: int, places: Tensor, others: FederatedDataset) -> set[int]:
        """Return the clients whose sum of a local step changes where the records at ``places`` are replaced."""
        again = local_steps(trainer, mixed(data, others, places), replay=recording)[step]
        return {client for client, (total, _) in first[step].items() if not torch.equal(total, again[client][0])}

    for step in sorted({min(first), max(first)}):
        out = torch.ones(len(data.train.y), dtype=torch.bool)
        out[torch.cat([places for _, places in first[step].values()])] = False
        replaced += int(out.sum())
        moved += len(moves(step, out.nonzero()[:, 0], other(seed)))
        waiting = {client: places for client, (_, places) in first[step].items() if len(places)}
        chosen = {k: places[torch.randint(len(places), (), generator=generator)] for k, places in waiting.items()}
        tried += len(chosen)
        for number in range(_TRIES):
            places = torch.stack(list(chosen.values())) if chosen else torch.zeros(0, dtype=torch.int64)
            changed = moves(step, places, _other_targets(data, data if number == 0 else other(seed + number), number))
            chosen = {client: place for client, place in chosen.items() if client not in changed}
        still += len(chosen)
    return [
        exact(names[0], moved, f"sums of local steps that {replaced:,} records move which were not drawn for them"),
        exact(names[1], still, f"records that move no sum, of {tried:,} that were drawn"),
    ]


def local_steps(
    trainer: Trainer,
    data: FederatedDataset,
    *,
    record: list[tuple[int, str, Tensor]] | None = None,
    replay: Recording | None = None,
) -> dict[int, Step]:
    """Return the local steps of the first round of a run on ``data``, by number."""
    found: dict[int, Step] = {}
    channels: list[Channel] = []

    def tap(round: int, name: str, clients: Tensor, sums: Tensor) -> None:
        kind, _, number = name.partition("/")
        draws, local = channels[0].draws, channels[0].local
        if kind != GRADIENT or draws is None or local is None:
            return
        step = int(number)
        index, mask = draws.batch(clients, local.addresses(clients, local.own_numbers(clients, step)))
        rows = (data.train.offsets[clients][:, None] + index, mask)
        for client, total, own, there in zip(clients.tolist(), sums, *rows, strict=True):
            found.setdefault(step, {})[client] = (total.cpu().clone(), own[there])

    for _ in states(trainer, data, 1, record=record, replay=replay, tap=tap, opened=channels.append):
        pass
    return found


def mixed(data: FederatedDataset, other: FederatedDataset, places: Tensor) -> FederatedDataset:
    """Return ``data`` with the training records of ``other``, of as many, at ``places``, int64 (k,)."""
    chosen = torch.zeros(len(data.train.y), dtype=torch.bool)
    chosen[places] = True
    x, theirs, y = data.train.x, other.train.x, data.train.y.clone()
    if x.layout == torch.sparse_csr:
        entries = chosen.repeat_interleave(x.crow_indices().diff())
        x = csr(x.crow_indices(), x.col_indices(), torch.where(entries, theirs.values(), x.values()), x.shape[1])
    else:
        x = x.clone()
        x[chosen] = theirs[chosen]
    y[chosen] = other.train.y[chosen]
    return replace(data, train=Examples(x, y, data.train.offsets), notes=(), verify=False)


def _other_targets(data: FederatedDataset, of: FederatedDataset, number: int) -> FederatedDataset:
    """Return the records ``of`` with targets that are none of ``data``: the next class, or far below or above all."""
    y = data.train.y
    if data.classes is None:
        span = y.max() - y.min() + 1
        y = torch.full_like(y, float(y.min() - span if number % 2 == 0 else y.max() + span))
    else:
        y = (y + 1 + number) % data.classes
    return replace(of, train=replace(of.train, y=y.to(data.train.y.dtype)), verify=False)
