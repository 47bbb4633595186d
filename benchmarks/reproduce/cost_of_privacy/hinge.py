"""The exact minimizer of the hinge loss, beside which the support vector machine is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fedmtl.algorithms.linear.data import LinearLoss
from fedmtl.algorithms.linear.solve import Array, Minimum, Objective, newton


@dataclass(frozen=True, eq=False)
class Hinges(Objective):
    """The objective with hinges smoothed over ``width``: z^2 / (2 width) for z = 1 - y m in [0, width], z - width / 2
    beyond."""

    width: float = 0.0

    def losses(self, margins: Array) -> tuple[Array, Array, Array]:
        """Return every record's loss, and its first and second derivative."""
        z = np.maximum(1 - self.y * margins, 0.0)
        if self.width == 0:
            return z, -self.y * (z > 0), np.zeros_like(z)
        part = np.minimum(z, self.width)
        value = part * (part / (2 * self.width)) + (z - part)
        return value, part * (self.y / -self.width), ((part > 0) & (part < self.width)) / self.width

    def hessian(self, bend: Array) -> Array:
        """Return the second derivative from the few records where the loss bends."""
        bends = bend > 0
        rows: Array = self.x[bends]
        matrix: Array = (rows.T * (bend[bends] / len(self.y))) @ rows + self.ridge * np.eye(
            rows.shape[1]
        )
        return matrix


def minimize_hinge(x: Array, y: Array, ridge: float, box: float) -> Minimum:
    """Minimize the mean hinge + (ridge / 2) ||theta||^2 over ||theta||_inf <= box.

    Newton's method solves smoothed hinges whose width goes to 0; their slopes are a feasible point of the dual problem,
    whose value certifies the gap.
    """
    problem, n = Hinges(LinearLoss("hinge"), x, y, ridge), len(y)

    def dual(weights: Array) -> float:
        """Return the Lagrangian's least value over the box; ``weights`` (n,) in [0, 1] of each record's hinge."""
        pull = (y * weights) @ x / n
        theta = np.clip(pull / ridge, -box, box)
        return float(weights.sum() / n + ridge / 2 * theta @ theta - pull @ theta)

    theta, lower = np.zeros(x.shape[1]), dual(np.zeros(n))
    best, best_value = theta, problem.at(theta)[0]
    for width in 10.0 ** -np.arange(0, 11):
        smooth = replace(problem, width=float(width))
        theta = newton(smooth, theta, box, math.sqrt(2e-3 * ridge * width)).theta
        lower = max(lower, dual(np.clip((1 - y * (x @ theta)) / width, 0.0, 1.0)))
        value = problem.at(theta)[0]
        if value < best_value:
            best, best_value = theta, value
        if best_value - lower <= 1e-10 * (1 + best_value):
            break
    return Minimum(best, best_value, max(best_value - lower, 0.0))
