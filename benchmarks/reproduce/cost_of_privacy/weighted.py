"""The asynchronous learner where owners answer unequally often (Farokhi et al. 2021, Remark 4), or from subsets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fedmtl._check import Rate
from fedmtl.algorithms import Problem, State
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner, StepSizes
from fedmtl.algorithms.one_at_a_time import Answer, Arrays
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

    by_client = ("theta", "events")

    def server_update(
        self, constants: StepSizes, server: Arrays, own: Arrays, answer: Answer
    ) -> tuple[Arrays, Arrays]:
        """Weigh the answer, and take it."""
        so_far = own["events"] + 1  # k_i + 1, this answer included
        owners = server["events"].shape[-1]
        if self.frequencies is None:
            weight = (server["events"].sum(-1) + 1 + owners) / (owners * (so_far + 1))
        else:
            known = np.array(self.frequencies)
            weight = known.sum() / (owners * known[answer.client])
        weighed = answer._replace(gradient=answer.gradient * weight[..., None])
        new_server, new_own = super().server_update(constants, server, own, weighed)
        return new_server, {**new_own, "events": so_far}


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
