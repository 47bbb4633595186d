"""The fitness of a central model, its exact minimizer, and the cost of privacy (Farokhi et al. 2021, equation (2)).

Everything here reads records without noise: on private records its results are not private.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import ConfigError
from ..linear.data import LinearLoss
from ..linear.optimum import Optimum, minimize_exactly, triangle

_BLOCK_ELEMENTS = 1 << 20


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
        """The records, or at most p + 1 rows with the same sum of squares."""
        if self.loss.name != "squared":
            return self.x, self.y
        a, b = triangle(self.x.numpy(), self.y.numpy())
        return torch.from_numpy(a), torch.from_numpy(b)

    def __call__(self, theta: Tensor) -> Tensor:
        """Fitness of each model: (..., p) -> (...), float64."""
        flat = theta.detach().double().reshape(-1, theta.shape[-1])
        x, y = self._rows
        blocks = flat.split(max(1, _BLOCK_ELEMENTS // len(x)))
        sums = torch.cat([self.loss.value(block, x, y).sum(1) for block in blocks])
        values: Tensor = sums / len(self.x) + self.reg * flat.square().sum(1)
        return values.reshape(theta.shape[:-1])

    @cached_property
    def optimum(self) -> Optimum:
        """theta*, exact: its gap is certified."""
        return minimize_exactly(self.loss, self.x, self.y, reg=self.reg, theta_max=self.theta_max)

    def psi(self, theta: Tensor) -> Tensor:
        """f(theta) / f(theta*) - 1 of each model: (..., p) -> (...).

        Raises:
            ConfigError: f(theta*) = 0, where psi is not defined.
        """
        best = self.optimum.fitness
        if best <= 0:
            raise ConfigError("f(theta*) is 0: a relative fitness is not defined for records that are fitted exactly.")
        return self(theta) / best - 1
