"""The fitness of a central model, its exact minimizer, and the cost of privacy (Farokhi et al. 2021, equation (2)).

Everything here reads records without noise: on private records its results are not private.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ..linear.data import LinearLoss
from ..linear.solve import Array, minimize

_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class Optimum:
    """A minimizer of the fitness.

    Attributes:
        theta: (p,) float64.
        fitness: f(theta).
        gap: an upper bound on f(theta) - min f (up to rounding of f).
    """

    theta: Tensor
    fitness: float
    gap: float


@dataclass(frozen=True, eq=False)
class Fitness:
    """f(theta) = reg ||theta||^2 + mean loss, equation (2), of one set of records.

    Args:
        x: (n, p) float64.
        y: (n,) float64.
        loss, reg, theta_max: as in :class:`~fedmtl.algorithms.async_learner.algorithm.AsyncLearner`.
    """

    x: Tensor
    y: Tensor
    loss: LinearLoss
    reg: float
    theta_max: float

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return the records, or at most p + 1 rows with the same sum of squares."""
        if self.loss.name != "squared":
            return self.x, self.y
        a, b = triangle(self.x.numpy(), self.y.numpy())
        return torch.from_numpy(a), torch.from_numpy(b)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the fitness of each model: (..., p) -> (...), float64."""
        flat = theta.detach().double().reshape(-1, theta.shape[-1])
        x, y = self._rows
        blocks = flat.split(max(1, _BLOCK_ELEMENTS // len(x)))
        sums = torch.cat([self.loss.value(block, x, y).sum(1) for block in blocks])
        values: Tensor = sums / len(self.x) + self.reg * flat.square().sum(1)
        return values.reshape(theta.shape[:-1])

    @cached_property
    def optimum(self) -> Optimum:
        """Return theta*, exact: its gap is certified."""
        (x, y), n = self._rows, len(self.x)
        share = len(x) / n  # (1/n) sum = share times the mean over the fewer rows
        found = minimize(self.loss, x.numpy(), y.numpy(), 2 * self.reg / share, box=self.theta_max)
        return Optimum(torch.from_numpy(found.theta), float(share * found.value), float(share * found.gap))

    def psi(self, theta: Tensor) -> Tensor:
        """Return f(theta) / f(theta*) - 1 of each model: (..., p) -> (...).

        Raises:
            ConfigError: f(theta*) = 0, where psi is not defined.
        """
        best = self.optimum.fitness
        if best <= 0:
            raise ConfigError("f(theta*) is 0: a relative fitness is not defined for records that are fitted exactly.")
        return self(theta) / best - 1


def triangle(x: Array, y: Array) -> tuple[Array, Array]:
    """Return at most p + 1 rows (A, b) with ||A theta - b|| = ||x theta - y|| for every theta: a QR decomposition."""
    if len(x) <= x.shape[1] + 1:
        return x, y
    factor: Array = np.linalg.qr(np.column_stack([x, y]), mode="r")  # type: ignore[assignment]
    return factor[:, :-1], factor[:, -1]
