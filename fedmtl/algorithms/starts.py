"""The public states from which the clients of a round start, and the weights of late answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ConfigError
from ..privacy.clip import Clip, clip_rows
from ..schedules import Block
from ..schedules.block import Asked
from .cohort import Cohort


@dataclass(frozen=True, eq=False)
class Start:
    """Clients of a round that are computed from one public state.

    Attributes:
        cohort: the clients, with that state.
        weights: float64 (k,), public factors of their clipped rows; None for all 1.
    """

    cohort: Cohort
    weights: Tensor | None = None

    def weighted(self, ids: Tensor, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the rows of some of the clients as they count in the releases.

        Args:
            ids: int64 (j,), the clients, some of the cohort's.
            rows: their rows (j, D), by release.
        """
        if self.weights is None:
            return rows
        weights = self.weights[torch.searchsorted(self.cohort.ids, ids)]
        return weighted(rows, weights, self.cohort.clips)


def starts(
    mine: Cohort,
    block: Block,
    asked: Asked,
    known: Mapping[int, Mapping[str, Tensor]],
    own_starts: bool,
) -> list[Start]:
    """Returns the clients of a round whose participants were asked at different moments, by the
    public state from which they start.

    Args:
        mine: the clients that this process computes.
        block: the round, with its clients in ascending order.
        asked: the moments, in the order of the block.
        known: the public states that are in use, by version.
        own_starts: True for a single stack, in which each client has a shared model of its own.
    """
    if len(mine.ids) == 0:
        return [Start(mine)]  # of a rank without a client in this round
    places = mine.problem.places_here(block.cohort)
    versions = asked.versions[places]
    weights = asked.weights[places]
    used = versions.unique()
    if own_starts and len(used) > 1:
        shared = torch.stack([known[version]["global"] for version in used.tolist()])
        rows = torch.searchsorted(used, versions)
        return [Start(replace(mine, public={"global": shared}, starts=rows), weights)]
    found = []
    for version in used.tolist():
        alike = versions == version
        cohort = replace(mine, ids=mine.ids[alike], public=known[version])
        found.append(Start(cohort, weights[alike]))
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
