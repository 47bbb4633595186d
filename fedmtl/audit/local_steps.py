"""The check that local steps of DP-SGD are computed from the records that were drawn for them, and
from no others.

Other checks compare the drawn records with the charges, and see that the gradients handed to a
release are clipped and noised. Here a round is repeated on other records with the releases forced
to the recording, so that every model is the same before each local step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..privacy.records import GRADIENT
from ..random import derive_key
from ..trainer.trainer import Trainer
from .findings import Finding, exact, skipped
from .other_clients import replaced_records
from .rerun import differing, watched

_TRIES = 3  # other records in the place of one that does not move a sum


def drawn_records(trainer: Trainer, *, seed: int) -> list[Finding]:
    """Checks the first and the last local step of the first round, of every client that takes part.

    If all records that were not drawn for a step are replaced, its clipped sum must be the same
    to the last bit. If one record that was drawn is replaced, first by one with another target,
    the sum must change.

    Args:
        trainer: a configuration with record-level privacy in rounds, on the CPU.
        seed: of the choice of records, and of others.
    """
    trainer = replace(trainer, finetune=None)
    first = watched(trainer, 1)
    names = ("sampler: records not drawn", "sampler: records drawn")
    if not first.drawn:
        return [skipped(name, "no client makes a local step in the first round") for name in names]
    data = trainer.data
    generator = torch.Generator().manual_seed(derive_key(seed, "audit/records") >> 1)
    replaced = moved = still = tried = 0

    def moves(step: int, places: Tensor, shift: int | None) -> set[int]:
        """Returns the clients whose sum of a local step changes if the records at ``places`` are
        replaced."""
        other = replaced_records(data, places, seed + (shift or 0), shift)
        again = watched(trainer, 1, data=other, replay=first.releases)
        row = f"the row of {GRADIENT}/{step}"
        return {
            client for _, name, client in differing(first.messages, again.messages) if name == row
        }

    steps = [step for _, step, _ in first.drawn]
    for step in sorted({min(steps), max(steps)}):
        drawn = {
            client: places for (_, number, client), places in first.drawn.items() if number == step
        }
        out = torch.ones(len(data.train.y), dtype=torch.bool)
        out[torch.cat(list(drawn.values()))] = False
        replaced += int(out.sum())
        moved += len(moves(step, out.nonzero()[:, 0], None))
        chosen = {
            client: int(places[torch.randint(len(places), (), generator=generator)])
            for client, places in drawn.items()
            if len(places)
        }
        tried += len(chosen)
        for number in range(_TRIES):
            if not chosen:
                break  # every record moves its sum
            changed = moves(step, torch.tensor(list(chosen.values()), dtype=torch.int64), number)
            chosen = {client: place for client, place in chosen.items() if client not in changed}
        still += len(chosen)
    return [
        exact(
            names[0],
            moved,
            f"sums of local steps that {replaced:,} records move which were not drawn for them",
        ),
        exact(names[1], still, f"records that move no sum, of {tried:,} that were drawn"),
    ]
