"""The cost of privacy and the value of collaboration (Farokhi et al. 2021, sections IV and V).

    psi(theta) = f(theta) / f(theta*) - 1

is how much worse than the exact minimizer theta* a model is. With noise it behaves as

    c1 / n sqrt(sum_i 1 / eps_i^2) + c2 / n^2 sum_i 1 / eps_i^2                                     (11)

whose two constants are fitted to simulations. Everything here reads records without noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from hinge import minimize_hinge
from scipy import optimize
from torch import Tensor

from fedmtl.algorithms.async_learner.central import CentralLearner
from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.algorithms.linear.solve import Array, minimize
from fedmtl.errors import ConfigError

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
        solve = minimize_hinge if self.loss.name == "hinge" else partial(minimize, self.loss)
        found = solve(x.numpy(), y.numpy(), 2 * self.reg / share, box=self.theta_max)
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

    def _fitness(self, x: Tensor, y: Tensor) -> Fitness:
        return Fitness(x, y, LinearLoss(self.learner.loss), self.learner.reg, self.learner.theta_max)

    @cached_property
    def together(self) -> Fitness:
        """Fitness on everybody's records."""
        return self._fitness(*self._bounded.pooled())

    def alone(self, owner: int) -> Optimum:
        """theta_i*, the exact minimizer of (2) on the records of one owner."""
        return self._fitness(self._bounded.x[owner], self._bounded.y[owner]).optimum


def spread(n: float, epsilons: Sequence[float]) -> float:
    """u = sqrt(sum_i 1 / eps_i^2) / n, of which (11) is c1 u + c2 u^2; infinite budgets add nothing.

    Raises:
        ConfigError: no records, no owners or a budget that is not above 0.
    """
    values = np.asarray(epsilons, dtype=np.float64)
    if not n > 0 or values.size == 0 or not (values > 0).all():
        raise ConfigError(f"n is {n!r} and epsilons are {list(epsilons)!r}; each must be above 0.")
    return float(np.sqrt((1 / values**2).sum()) / n)


@dataclass(frozen=True)
class Forecast:
    """Equation (11): ``forecast(n, epsilons)`` is the expected psi.

    Attributes:
        c1, c2: at least 0.
        error: root mean square of the relative errors of the fit; 0 if not fitted.
    """

    c1: float
    c2: float
    error: float = 0.0

    def __call__(self, n: float, epsilons: Sequence[float]) -> float:
        """psi for ``n`` records of all owners, with a budget for each owner."""
        u = spread(n, epsilons)
        return self.c1 * u + self.c2 * u**2


def fit_forecast(n: Sequence[float], epsilons: Sequence[Sequence[float]], psi: Sequence[float]) -> Forecast:
    """c1, c2 >= 0 that minimize the sum of squared *relative* errors of (11).

    Args:
        n: (m,) records of all owners, of each simulated setting.
        epsilons: m sequences of the owners' budgets; they may differ in length.
        psi: (m,) mean psi of each setting, above 0.

    Raises:
        ConfigError: lengths that disagree, fewer than 2 settings, or a psi that is not a finite number above 0.
    """
    values = np.asarray(psi, dtype=np.float64)
    if not len(n) == len(epsilons) == values.size or values.size < 2:
        raise ConfigError(
            f"{len(n)} n, {len(epsilons)} epsilons, {values.size} psi; needed: the same number, at least 2."
        )
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"psi is {values.tolist()!r}; every one must be a finite number above 0.")
    u = np.array([spread(m, e) for m, e in zip(n, epsilons, strict=True)])
    unit = u.max()  # so that both columns are of one order
    if unit == 0:
        raise ConfigError("Every budget is infinite, so there is nothing to fit; leave noise in.")
    design = np.column_stack([u / unit, (u / unit) ** 2]) / values[:, None]
    constants, residual = optimize.nnls(design, np.ones(values.size))
    return Forecast(float(constants[0] / unit), float(constants[1] / unit**2), float(residual / math.sqrt(values.size)))


@dataclass(frozen=True)
class Slope:
    """A slope of log y against log x, with its 95% confidence interval (Student's t)."""

    slope: float
    low: float
    high: float


def log_log_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares of log y on log x; at least 3 points above 0.

    Raises:
        ConfigError: fewer points, or one that is not above 0.
    """
    from scipy.stats import linregress, t

    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.shape != b.shape or a.size < 3 or not ((a > 0).all() and (b > 0).all()):
        raise ConfigError("log_log_slope needs at least 3 pairs of numbers above 0.")
    line = linregress(np.log(a), np.log(b))
    half = t.ppf(0.975, a.size - 2) * line.stderr
    return Slope(float(line.slope), float(line.slope - half), float(line.slope + half))
