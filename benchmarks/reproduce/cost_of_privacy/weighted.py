"""The asynchronous learner where owners answer unequally often (Farokhi et al. 2021, Remark 4), or from subsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmtl._check import Rate
from fedmtl.algorithms import Problem, State
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.one_at_a_time import Answers, client_rows
from fedmtl.privacy import GradientPlan
from fedmtl.schedules import BoundSchedule


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
        events, by_owner, n = (
            public["events"].numpy(),
            client_rows(public["events"]),
            problem.clients,
        )
        unweighted = super().serve(problem, public)
        known = None if self.frequencies is None else np.array(self.frequencies)

        def serve(answers: Answers) -> None:
            by_owner[answers.places] += 1
            if known is None:
                weights = (events[answers.runs].sum(1) + n) / (n * (by_owner[answers.places] + 1))
            else:
                weights = known.sum() / (n * known[answers.clients])
            unweighted(answers._replace(values=answers.values * weights[:, None]))

        return serve


@dataclass(frozen=True, kw_only=True)
class Sampled(AsyncLearner):
    """A learner whose answers are of secret Poisson subsamples.

    Attributes:
        batch_rate: q in (0, 1], the public probability of each record; an answer divides by the constant q n_i. The
            privacy of an answer is amplified, and its noise at equal epsilon of the release grows by 1 / q.
    """

    batch_rate: Rate = 1.0

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean gradients of subsamples."""
        (plan,) = super().plan(problem, schedule)
        return (replace(plan, rate=self.batch_rate),)
