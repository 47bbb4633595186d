"""Rounds of a run that several processes compute, each for its own clients.

Every rank has a channel and hands it the rows of its own clients. The first rank alone draws
cohorts, has the account and adds noise. A round begins, and a value is released, at all ranks at
once. Sums of vectors are exact, so that the ranks add up their own and a release has the same bits
for any number of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ranks import Ranks
from .adaptive import AdaptiveClip
from .clip import RowTotal
from .noise.sources import NoiseSource
from .release import Release
from .rounds import Message, Rounds


class RankedRounds(Rounds):
    """The channel of one rank.

    Args:
        ranks: the processes that compute the run. There are no replicates.
    """

    def __init__(self, *arguments: Any, ranks: Ranks, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks

    def start(self, step: int) -> None:
        self._ranks.share(partial(super().start, step))

    def charge_remaining(self, done: int) -> None:
        self._ranks.share(partial(super().charge_remaining, done))

    def draw(self, step: int) -> Tensor:
        return self._ranks.share(partial(super().draw, step))

    def _charge(self, step: int, clients: Tensor) -> int:
        return self._ranks.share(partial(super()._charge, step, clients))

    def _senders(self, clients: Tensor) -> Tensor:
        # A client that two ranks send a row of is found at all of them.
        return torch.cat(self._ranks.gather(super()._senders(clients)))

    def _largest(self, release: Release, rows: Tensor) -> float:
        own = super()._largest(release, rows)
        if release.clip is not None:
            return own
        return max(self._ranks.gather(own))

    def _sum(self, release: Release, rows: Message, clients: Tensor) -> Tensor:
        """Returns the clipped sum of the rows of a cohort, complete at the first rank only; ignore
        it at others."""
        if isinstance(rows, RowTotal) or release.form == "vector":
            return self._ranks.sum(super()._sum(release, rows, clients))
        # Sums of products are not exact: the first rank makes them of all rows, in their order.
        each = self._ranks.gather((clients, rows.detach().cpu()))
        everyone, all_rows = (torch.cat(parts) for parts in zip(*each, strict=True))
        return super()._sum(release, all_rows, everyone)

    def _noised_sum(
        self, release: Release, total: Tensor, step: int, source: NoiseSource
    ) -> Tensor:
        return self._ranks.share(partial(super()._noised_sum, release, total, step, source))

    def _count(self, adaptive: AdaptiveClip, release: Release, rows: Tensor) -> Tensor:
        return self._ranks.sum(super()._count(adaptive, release, rows))

    def _fraction(
        self, adaptive: AdaptiveClip, release: Release, total: Tensor, step: int
    ) -> Tensor:
        return self._ranks.share(partial(super()._fraction, adaptive, release, total, step))
