"""The public states from which the clients of a round start, and the weights of late answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ConfigError
from ..privacy.clip import Clip, clip_rows
from ..schedules.block import Starts
from .client_batch import ClientBatch


def by_start(
    mine: ClientBatch,
    clients: Tensor,
    starts: Starts,
    known: Mapping[int, Mapping[str, Tensor]],
    own_starts: bool,
) -> list[tuple[ClientBatch, Tensor | None]]:
    """Returns the clients of a round whose participants started at different moments, by the public
    state from which they start.

    Args:
        mine: the clients that this process computes.
        clients: int64 (m,), ascending, all participants of the round.
        starts: their versions and weights, in the order of ``clients``.
        known: the public states that are in use, by version.
        own_starts: True for a single stack, in which each client has a shared model of its own.

    Returns:
        Batches of clients, each with its public state, and the public factors float64 (k,) of its
        clients' clipped rows; None for all 1.
    """
    if len(mine.clients) == 0:
        return [(mine, None)]  # of a rank without a client in this round
    places = mine.problem.places_here(clients)
    versions = starts.versions[places]
    weights = starts.weights[places]
    used = versions.unique()
    if own_starts and len(used) > 1:
        shared = torch.stack([known[version]["global"] for version in used.tolist()])
        rows = torch.searchsorted(used, versions)
        return [(replace(mine, public={"global": shared}, starts=rows), weights)]
    found: list[tuple[ClientBatch, Tensor | None]] = []
    for version in used.tolist():
        alike = versions == version
        some = replace(mine, clients=mine.clients[alike], public=known[version])
        found.append((some, weights[alike]))
    return found


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
        # rows of weight 1 stay as they are, to the bit; the client's own rows are not changed
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
