"""The asynchronous learner with equation (7) and noise as printed (Farokhi et al. 2021).

    theta_L = Proj[ tbar - a ((N - 1) / N) grad g(tbar) ]                                        (7)

Together with (5) it minimizes another function than f; the paper's own proof (eta = 1 / (2 N), f_L
= (1 - eta N) g) gives 1/2, as in (7'). They agree for N = 2 only, and (7) reads no data. By Theorem
1 every owner's noise is made for T answers, all ticks of the run. It gives about T / N of them:
epsilon holds, and the noise is N times too large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...algorithms.async_learner.algorithm import AsyncLearner
from ...algorithms.base import Problem
from ...privacy import GradientPlan
from ...schedules import BoundSchedule


@dataclass(frozen=True, kw_only=True)
class PublishedAsyncLearner(AsyncLearner):
    """Algorithm 1 with equation (7) and the noise of Theorem 1.

    It needs ``mechanism="laplace"`` with ``delta=0``. Settings are those of
    :class:`~fedmtl.AsyncLearner`.

    Args:
        kappa: None: 100, for rows of unit norm in 10 dimensions, whose curvature is a tenth of that
            of whitened ones.
    """

    usual_kappa = 100.0
    name = "async_learner_published"
    title = "Asynchronous learner, published"

    def central_share(self, owners: int) -> float:
        """Returns (N - 1) / N of equation (7), for N = ``owners``."""
        return (owners - 1) / owners

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans noise for T answers of every owner."""
        (plan,) = super().plan(problem, schedule)
        answers = self.horizon or problem.rounds  # T
        return (replace(plan, caps=np.full(problem.clients, answers)),)
