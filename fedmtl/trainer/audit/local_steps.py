"""The check that local steps of DP-SGD are computed from the records that were drawn for them, and from no others.

Other checks see that records are drawn as it is charged, and that what is handed to a release is clipped and noised.
Here a run's releases are recorded, and the run is repeated on other records with the releases forced to the recording,
so that every model is the same before each local step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...data import FederatedDataset
from ...privacy.audit import Finding
from ...privacy.audit.findings import exact, skipped
from ...privacy.channel import GRADIENT, Recording
from ...random import derive_key
from ..trainer import Trainer
from .others import replaced_records
from .rerun import Releases, seeded, states

_TRIES = 3  # other records in the place of one that does not move a sum

Step = dict[int, tuple[Tensor, Tensor]]
"""A local step: client -> its clipped sum (D,), and the places of the records that were drawn, int64 (k,)."""


def drawn_records(trainer: Trainer, *, seed: int) -> list[Finding]:
    """Check the first and the last local step of the first round, of every client that takes part.

    Where all records that were not drawn for a step are replaced, its clipped sum must be the same to the last bit.
    Where one record that was drawn is replaced, first by one with another target, the sum must change.

    Args:
        trainer: a configuration with record-level privacy in rounds, on the CPU.
        seed: of the choice of records, and of others.
    """
    trainer, recording = seeded(trainer), Releases()
    first = local_steps(trainer, trainer.data, record=recording)
    names = ("sampler: records not drawn", "sampler: records drawn")
    if not first:
        return [skipped(name, "no client makes a local step in the first round") for name in names]
    data, generator = trainer.data, torch.Generator().manual_seed(derive_key(seed, "audit/records") >> 1)
    replaced = moved = still = tried = 0

    def moves(step: int, places: Tensor, shift: int | None) -> set[int]:
        """Return the clients whose sum of a local step changes where the records at ``places`` are replaced."""
        other = replaced_records(data, places, seed + (shift or 0), shift)
        again = local_steps(trainer, other, replay=recording)[step]
        return {client for client, (total, _) in first[step].items() if not torch.equal(total, again[client][0])}

    for step in sorted({min(first), max(first)}):
        out = torch.ones(len(data.train.y), dtype=torch.bool)
        out[torch.cat([places for _, places in first[step].values()])] = False
        replaced += int(out.sum())
        moved += len(moves(step, out.nonzero()[:, 0], None))
        waiting = {client: places for client, (_, places) in first[step].items() if len(places)}
        chosen = {k: int(places[torch.randint(len(places), (), generator=generator)]) for k, places in waiting.items()}
        tried += len(chosen)
        for number in range(_TRIES):
            changed = moves(step, torch.tensor(list(chosen.values()), dtype=torch.int64), number)
            chosen = {client: place for client, place in chosen.items() if client not in changed}
        still += len(chosen)
    return [
        exact(names[0], moved, f"sums of local steps that {replaced:,} records move which were not drawn for them"),
        exact(names[1], still, f"records that move no sum, of {tried:,} that were drawn"),
    ]


def local_steps(
    trainer: Trainer, data: FederatedDataset, *, record: Releases | None = None, replay: Recording | None = None
) -> dict[int, Step]:
    """Return the local steps of the first round of a run on ``data``, by number."""
    made: dict[int, Step] = {}
    channels: list[Any] = []

    def tap(round: int, name: str, clients: Tensor, sums: Tensor) -> None:
        kind, _, number = name.partition("/")
        local = channels[0].local
        if kind != GRADIENT or local is None:
            return
        index, mask = local.batch(clients)
        rows = data.train.offsets[clients][:, None] + index
        for client, total, places, drawn in zip(clients.tolist(), sums, rows, mask, strict=True):
            made.setdefault(int(number), {})[client] = (total.cpu().clone(), places[drawn])

    for _ in states(trainer, data, 1, record=record, replay=replay, tap=tap, opened=channels.append):
        pass
    return made
