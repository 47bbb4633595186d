"""One client in a process of its own, as the sampler of its account."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..random import Coins
from .samplers import BoundSampler


@dataclass(frozen=True)
class BoundSingleClient(BoundSampler):
    """One client in a process of its own, which takes part when a server asks it, and is charged
    each time.

    No client can check how the server draws, so sampling amplifies nothing.

    Args:
        n, cohort: 1.
        cohorts: the server's statement on the law of its cohorts.
        max_uses: hard cap on the steps in which the client takes part; None if nothing is
            charged.
    """

    cohorts: str
    max_uses: int | None = None
    relation = "zero_out"
    per_participation = True

    @property
    def cap(self) -> int | None:
        return self.max_uses

    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        return torch.arange(self.n)

    def describe(self) -> str:
        most = ""
        if self.max_uses is not None:
            most = f", at most {self.max_uses} times"
        return f"one client, when a server asks it ({self.cohorts}){most}"
