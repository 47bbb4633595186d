"""The cost of privacy and the value of collaboration (Farokhi et al. 2021, sections IV and V).

    psi(theta) = f(theta) / f(theta*) - 1

is how much worse than the exact minimizer theta* a model is. Everything here reads records without noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from hinge import minimize_hinge
from scipy.stats import linregress, t
from torch import Tensor

from fedmtl.algorithms.async_learner.central import CentralLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.algorithms.linear.solve import Minimum, minimize


@dataclass(frozen=True, eq=False)
class Collaboration:
    """Owners and the problem they might solve together.

    Args:
        learner: settings of the problem (loss, reg, theta_max, domain).
        data: the owners' records; forced into the learner's domain where it has one.
    """

    learner: CentralLearner
    data: LinearData

    @cached_property
    def _bounded(self) -> LinearData:
        return self.learner.bounded(self.data)

    def _minimum(self, x: Tensor, y: Tensor) -> Minimum:
        learner = self.learner
        solve = (
            minimize_hinge if learner.loss == "hinge" else partial(minimize, learner.linear_loss)
        )
        return solve(x.numpy(), y.numpy(), 2 * learner.reg, box=learner.theta_max)

    @cached_property
    def optimum(self) -> Minimum:
        """theta*, the exact minimizer of (2) on everybody's records; its gap is certified."""
        return self._minimum(*self._bounded.pooled())

    def alone(self, owner: int) -> Minimum:
        """theta_i*, that on the records of one owner."""
        return self._minimum(self._bounded.x[owner], self._bounded.y[owner])

    def psi(self, theta: Tensor) -> Tensor:
        """f(theta) / f(theta*) - 1 of models (R, p), on everybody's records: (R,)."""
        return self.learner.fitness(self._bounded, theta) / self.optimum.value - 1


@dataclass(frozen=True)
class Slope:
    """A slope of log y against log x, with its 95% confidence interval (Student's t)."""

    slope: float
    low: float
    high: float


def log_log_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares of log y on log x; at least 3 points above 0."""
    line = linregress(np.log(x), np.log(y))
    half = t.ppf(0.975, len(x) - 2) * line.stderr
    return Slope(float(line.slope), float(line.slope - half), float(line.slope + half))
