"""The asynchronous learner where owners answer unequally often (Farokhi et al. 2021, Remark 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner, Updates


class WeightedUpdates(Updates):
    """Updates by answers that are weighted by 1 / (N frequency of the owner), after the noise.

    Attributes:
        known: frequencies of the owners, (N,), or None for those so far, (k_i + 1) / (k + N).
    """

    known: np.ndarray | None

    def __init__(self, learner: Weighted, *arguments: Any) -> None:
        super().__init__(learner, *arguments)
        self.known = None if learner.frequencies is None else np.array(learner.frequencies)
        runs, n, _ = self.theta.shape
        self.events = np.zeros((runs + 1, n))  # the last row is for no owner

    def update(self, at: np.ndarray, answers: np.ndarray) -> None:
        """Weigh the answers, and take them."""
        n = self.events.shape[1]
        runs, owners = np.divmod(at, n)
        if self.known is None:
            self.events[runs, owners] += 1
            weights = (self.events[runs].sum(1) + n) / (n * (self.events[runs, owners] + 1))
        else:
            weights = self.known.sum() / (n * self.known[owners])
        super().update(at, answers * weights[:, None])


@dataclass(frozen=True, kw_only=True)
class Weighted(AsyncLearner):
    """The learner of Remark 4.

    Attributes:
        frequencies: how often owners answer, a public number of each; None counts them.
    """

    frequencies: tuple[float, ...] | None = None

    def updates(self, counts: np.ndarray, events: int, public: Mapping[str, torch.Tensor]) -> WeightedUpdates:
        """Return the weighted updates."""
        return WeightedUpdates(self, self.effective_step(len(counts), events), counts, public)
