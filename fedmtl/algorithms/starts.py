"""The public states from which the clients of a round start, and the weights of late answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ConfigError
from ..privacy.clip import Clip, clip_rows
from ..schedules import Block
from .cohort import Cohort


def starts(
    mine: Cohort, block: Block, known: Mapping[int, Mapping[str, Tensor]], own_starts: bool
) -> list[Cohort]:
    """Returns the clients of a round by the public state from which they start.

    Args:
        mine: the clients that this process computes.
        block: the round, with its clients in ascending order.
        known: the public states that are in use, by version.
        own_starts: True for a single stack, in which each client has a shared model of its own.
    """
    if block.asked is None:
        return [mine]
    if len(mine.ids) == 0:
        return [mine]  # of a rank without a client in this round
    versions = block.asked.versions[mine.problem.own(block.cohort)]
    cohorts = []
    used = versions.unique()
    if own_starts and len(used) > 1:
        shared = torch.stack([known[version]["global"] for version in used.tolist()])
        return [replace(mine, public={"global": shared}, starts=torch.searchsorted(used, versions))]
    for version in used.tolist():
        ids = mine.ids[versions == version]
        cohorts.append(replace(mine, ids=ids, public=known[version]))
    return cohorts


def weighted(
    rows: Mapping[str, Tensor], weights: Tensor, clips: Mapping[str, Clip | None]
) -> dict[str, Tensor]:
    """Returns the clipped rows times their weights.

    The weight follows the clip, so that it counts for long rows, too. The channel clips the product
    once more, which bounds it whatever the weight is.

    Args:
        rows: (k, D) by release.
        weights: float64 (k,), public.
        clips: of the releases.
    """
    sent = {}
    for name, part in rows.items():
        factors = weights.to(part)[:, None]
        late = factors[:, 0] < 1
        sent[name] = part
        # what has the weight 1 stays as it is, to the bit; the client's own rows are not changed
        if bool(late.all()):
            sent[name] = clip_rows(part, clips[name]).mul_(factors)
        elif bool(late.any()):
            sent[name] = part.clone()
            sent[name][late] = clip_rows(part[late], clips[name]).mul_(factors[late])
    return sent


def one_start_needed(method: str) -> ConfigError:
    """Returns the refusal of clients that start from different public states.

    Args:
        method: its name.
    """
    return ConfigError(
        f"{method} needs one public state for all clients of a round; accepted: a schedule that "
        "waits for them, such as PoissonSampling(cohort=100), not Buffered(...)."
    )
