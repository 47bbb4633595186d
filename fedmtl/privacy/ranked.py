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
from .adaptive import AdaptiveClip, CountBelowNorm
from .clip import RowTotal
from .mechanism import ClippedSum, Inner, Mechanism, MechanismAround, Message
from .mechanism_choice import mechanism_of
from .receipt import Receipt
from .release import Release
from .round_channel import RoundChannel


class RankedRounds(RoundChannel):
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

    def _mechanism(self, release: Release) -> Mechanism:
        return RankedSum(mechanism_of(release, self.source), self._ranks)

    def _count(self, adaptive: AdaptiveClip, release: Release) -> Mechanism:
        return RankedCount(CountBelowNorm(release, adaptive.settings, self.source), self._ranks)


class _Ranked(MechanismAround[Inner]):
    """A mechanism whose rows are divided over ranks.

    Args:
        mechanism: that of one process, which adds its noise at the first rank.
        ranks: the processes of the run.
    """

    def __init__(self, mechanism: Inner, ranks: Ranks) -> None:
        super().__init__(mechanism)
        self._ranks = ranks

    def _spend(self, clients: Tensor, receipt: Receipt) -> None:
        """Spends the receipt of this rank on the rows of all ranks: a client that two ranks send a
        row of is found at all of them."""
        senders = torch.cat(self._ranks.gather(clients.cpu().reshape(-1)))
        receipt.spend(self.name, senders)


class RankedSum(_Ranked[ClippedSum]):
    """The noised sum of rows that are divided over ranks."""

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        self.check(rows, clients)
        self._spend(clients, receipt)
        total = self._total(rows, clients)
        return self._ranks.share(partial(self._mechanism.noised_mean, total, receipt))

    def _total(self, rows: Message, clients: Tensor) -> Tensor:
        """Returns the clipped sum of the rows of all ranks, complete at the first rank only; ignore
        it at others."""
        mechanism = self._mechanism
        if isinstance(rows, RowTotal):
            return self._ranks.sum(mechanism.total(rows, clients))
        if self.release.form == "vector":
            width = mechanism.width
            # Without a clip the rows set the grid, which is one for all ranks.
            if width is None:
                width = max(self._ranks.gather(mechanism.width_of(rows)))
            return self._ranks.sum(mechanism.total(rows, clients, width))
        assert isinstance(rows, Tensor)  # see check
        # Sums of products are not exact: the first rank makes them of all rows, in their order.
        each = self._ranks.gather((clients, rows.detach().cpu()))
        everyone, all_rows = (torch.cat(parts) for parts in zip(*each, strict=True))
        return mechanism.total(all_rows, everyone)


class RankedCount(_Ranked[CountBelowNorm]):
    """The noised count of rows that are divided over ranks."""

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        self.check(rows, clients)
        self._spend(clients, receipt)
        total = self._ranks.sum(self._mechanism.total(rows))
        return self._ranks.share(partial(self._mechanism.fraction, total, receipt))
