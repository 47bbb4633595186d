"""The asynchronous learner where owners answer unequally often (Farokhi et al. 2021, Remark 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmtl.algorithms import Problem, State
from fedmtl.algorithms.activations import Answers, client_rows
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner


@dataclass(frozen=True, kw_only=True)
class Weighted(AsyncLearner):
    """The learner of Remark 4: answers are weighted by 1 / (N frequency of the owner), after the noise.

    Attributes:
        frequencies: how often owners answer, a public number of each; None for those so far, (k_i + 1) / (k + N).
    """

    frequencies: tuple[float, ...] | None = None

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start from no answers: ``events`` (R, N) counts them."""
        state = super().init(problem, replicates)
        state.public["events"] = torch.zeros(replicates, problem.clients, dtype=torch.float64)
        return state

    def serve(self, problem: Problem, public: Mapping[str, Tensor]) -> Callable[[Answers], None]:
        """Weigh the answers, and take them."""
        events, by_owner, n = public["events"].numpy(), client_rows(public["events"]), problem.clients
        unweighted = super().serve(problem, public)
        known = None if self.frequencies is None else np.array(self.frequencies)

        def serve(answers: Answers) -> None:
            by_owner[answers.at] += 1
            if known is None:
                weights = (events[answers.runs].sum(1) + n) / (n * (by_owner[answers.at] + 1))
            else:
                weights = known.sum() / (n * known[answers.clients])
            unweighted(answers._replace(values=answers.values * weights[:, None]))

        return serve
