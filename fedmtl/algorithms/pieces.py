"""The pieces of a round: where their clients start, and their messages as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..privacy import Rounds
from ..privacy.clip import RowTotal
from ..privacy.mechanism import Message
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
    # rows have weights, so they are not added up as they are made
    mine = replace(mine, total=None)
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
    messages: Mapping[str, Message], clients: Tensor, weights: Tensor, channel: Rounds
) -> dict[str, Message]:
    """Returns the clipped rows times their weights, in ascending order of the clients.

    The weight follows the clip, so that it counts for long rows, too. The channel clips the product
    once more, which bounds it whatever the weight is.

    Args:
        messages: rows (k, D) by release.
        clients: int64 (k,), of the rows.
        weights: float64 (k,), public, in ascending order of the clients.
        channel: clips.
    """
    places = torch.argsort(clients)
    sent: dict[str, Message] = {}
    for name, message in messages.items():
        assert isinstance(message, Tensor)  # without a total
        rows = message[places]
        factors = weights.to(rows)[:, None]
        # what has the weight 1 stays as it is, to the bit
        late = factors[:, 0] < 1
        rows[late] = factors[late] * channel.clip(name, rows[late])
        sent[name] = rows
    return sent


def joined(parts: list[Any]) -> Message:
    """Joins the messages of consecutive pieces to one: rows (..., k, D), or their sum.

    Args:
        parts: a message of each piece; a sum is the same object in all. Rows are taken out of the
            list, so that none is in memory twice.
    """
    first: Message = parts[0]
    if isinstance(first, RowTotal) or len(parts) == 1:
        return first
    count = sum(part.shape[-2] for part in parts)
    whole = first.new_empty(*first.shape[:-2], count, first.shape[-1])
    start = 0
    while parts:
        part = parts.pop(0)
        end = start + part.shape[-2]
        whole[..., start:end, :] = part
        start = end
    return whole


def one_start_needed(method: str) -> ConfigError:
    """Returns the refusal of clients that start from different public states.

    Args:
        method: its name.
    """
    return ConfigError(
        f"{method} needs one public state for all clients of a round; accepted: a schedule that "
        "waits for them, such as PoissonSampling(cohort=100), not Buffered(...)."
    )
