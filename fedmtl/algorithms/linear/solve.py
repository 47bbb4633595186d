"""Exact solvers of regularized linear models.

    min over ||theta||_inf <= box of  (1/n) sum_j l(x_j . (base + theta), y_j) + (ridge / 2) ||theta||^2

with the squared or the logistic loss l. Newton's method with a projected line search finds the minimizer in a few steps
(coordinates that stand at the box and would leave it are held: Bertsekas 1982) and certifies what is missing. Penalties
without a second derivative take accelerated proximal gradient steps.

A fit reads the records that it is given and nothing else, and no finite records make it raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor

from ..._check import one_of, positive
from ...errors import ConfigError
from ...local.proximal import PENALTIES, OwnPenalty
from .data import SQUARES, LinearLoss

Array = NDArray[np.float64]

_STEPS, _HALVINGS, _PROXIMAL_STEPS = 200, 34, 100_000
_TOLERANCE, _ROUNDING = 1e-10, 1e-14
_LARGEST = 60.0  # logarithm of a ridge beside which no loss counts


@dataclass(frozen=True, eq=False)
class Minimum:
    """A minimizer.

    Attributes:
        theta: (p,).
        value: of the objective there.
        gap: an upper bound on ``value`` minus the least value, up to rounding.
    """

    theta: Array
    value: float
    gap: float


def minimize(
    loss: LinearLoss,
    x: Array,
    y: Array,
    ridge: float,
    *,
    base: Array | None = None,
    box: float = math.inf,
) -> Minimum:
    """Minimize (1/n) sum_j l(x_j . (base + theta), y_j) + (ridge / 2) ||theta||^2 over ||theta||_inf <= box.

    Args:
        loss: of the records, not the hinge; y in {-1, +1} for the logistic one.
        x, y: (n, p) and (n,) float64, finite, n at least 1.
        ridge: above 0.
        base: (p,); None: 0.
        box: bound on ||theta||_inf.

    Raises:
        ConfigError: a hinge loss, no records, or values that are not finite.
    """
    positive("minimize", ridge=ridge)
    one_of("minimize", (*SQUARES, "logistic"), loss=loss.name)
    if len(x) == 0 or x.ndim != 2 or y.shape != x.shape[:1]:
        raise ConfigError(f"x and y are {x.shape} and {y.shape}; needed: (n, p) and (n,) with n >= 1.")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ConfigError("minimize: x or y has values that are not finite.")
    with np.errstate(all="ignore"):
        offset, turn = 0.0 if base is None else x @ base, None
        if 2 * len(x) < x.shape[1] and box == math.inf:  # a combination of the rows
            across, factor = np.linalg.qr(x.T)
            if np.isfinite(across).all() and np.isfinite(factor).all():
                turn, x = across, factor.T
        minimum = newton(Objective(loss, x, y, ridge, offset), np.zeros(x.shape[1]), box, _TOLERANCE)
    return minimum if turn is None else replace(minimum, theta=turn @ minimum.theta)


def fit_own(loss: LinearLoss, x: Tensor, y: Tensor, shared: Tensor, tau: float, penalty: OwnPenalty) -> Tensor:
    """Minimize (1/n) sum_j l(x_j . (shared + q), y_j) + tau g(q) over q, for one shared model or several.

    Args:
        loss: squared or logistic.
        x, y: (n, p) and (n,), the raw records of one client; nothing leaves it.
        shared: (p,), or (k, p), those of k replicates.
        tau: above 0, so that the minimum exists.
        penalty: g, see :data:`~fedmtl.local.proximal.PENALTIES`.

    Returns:
        q as ``shared``, float64.
    """
    rows, targets = x.numpy(), y.numpy()
    if penalty == "frobenius":

        def fit(point: Array) -> Array:
            return minimize(loss, rows, targets, tau, base=point).theta

    elif penalty == "l2":

        def fit(point: Array) -> Array:
            return _fit_in_norm(loss, rows, targets, tau, point)

    else:
        try:
            largest = float(np.linalg.norm(rows, 2))
        except np.linalg.LinAlgError:  # an iteration that does not converge must not show either
            largest = float(np.linalg.norm(rows))
        rate = 1.0 / max(loss.smoothness(1.0) * largest**2 / len(rows), 1e-12)

        def fit(point: Array) -> Array:
            problem = Objective(loss, rows, targets, 0.0, rows @ point)

            def step(q: Array) -> Array:
                moved = torch.from_numpy(q - rate * problem.at(q[0])[1])
                proximal: Array = PENALTIES[penalty].prox(moved, rate * tau).numpy()
                return proximal

            return accelerated(step, np.zeros((1, len(point))), _PROXIMAL_STEPS, rate * _TOLERANCE)[0]

    points = shared.reshape(-1, shared.shape[-1]).numpy()
    return torch.from_numpy(np.stack([fit(point) for point in points])).reshape(shared.shape)


def _fit_in_norm(loss: LinearLoss, x: Array, y: Array, tau: float, base: Array) -> Array:
    """Minimize L(q) + tau ||q||_2 over q (p,), with L the mean loss at ``base`` + q.

    It is 0 if the gradient of L is no longer than tau there. Elsewhere grad L(q) + tau q / ||q|| = 0, so q is the ridge
    fit whose ridge r has r ||q|| = tau. That product is the length of the gradient at the fit, and grows with r; since
    (r / 2) ||q||^2 is at most L(0), it is at most tau at r = tau^2 / (2 L(0)).
    """
    with np.errstate(all="ignore"):
        value, gradient, _ = Objective(loss, x, y, 0.0, x @ base).at(np.zeros(len(base)))
        if not np.linalg.norm(gradient) > tau:
            return np.zeros(len(base))

        offset, fitted = x @ base, np.zeros(len(base))

        def fit(log_ridge: float) -> Array:
            """Return the ridge fit, from the last one on."""
            nonlocal fitted
            fitted = newton(Objective(loss, x, y, math.exp(log_ridge), offset), fitted, math.inf, _TOLERANCE).theta
            return fitted

        def longer(log_ridge: float) -> float:
            return math.exp(log_ridge) * float(np.linalg.norm(fit(log_ridge))) - tau

        low = math.log(max(tau**2 / (2 * value), 1e-300))
        high = low + 1.0
        while high < _LARGEST and longer(high) < 0:
            low, high = high, high + 2.0
        if high >= _LARGEST:  # the gradient is hardly longer than tau, and q hardly longer than 0
            return np.zeros(len(base))
        if longer(low) < 0:
            low = float(brentq(longer, low, high, xtol=1e-12))
        return fit(low)


def solve_regularized(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix^-1 right for positive definite systems; zero for one that rounding has made singular, so that no
    records make it fail.

    Args:
        matrix: (..., p, p).
        right: (..., p) or (..., p, k), as in ``torch.linalg.solve``.
    """
    solution, info = torch.linalg.solve_ex(matrix, right)
    dims = tuple(range(info.dim(), solution.dim()))
    solved = (info == 0) & torch.isfinite(solution).all(dims) if dims else info == 0
    return torch.where(solved.reshape(*info.shape, *[1] * len(dims)), solution, 0.0)


@dataclass(frozen=True, eq=False)
class Objective:
    """f(theta) = mean of l(offset_j + x_j . theta) + (ridge / 2) ||theta||^2, for offset (n,) or 0.

    With ``limits`` (n,), above 0, the slope of every record's loss is cut off at its limit in absolute value, and the
    loss goes on linearly from there: of the squared loss that is Huber's.
    """

    loss: LinearLoss
    x: Array
    y: Array
    ridge: float
    offset: Array | float = 0.0
    limits: Array | None = None

    def at(self, theta: Array) -> tuple[float, Array, Array]:
        """Return the value, the gradient (p,) and the second derivatives of the losses (n,)."""
        margins = self.x @ theta + self.offset
        within = margins if self.limits is None else self.curved(margins, self.limits)
        value, slope, bend = self.losses(within)
        if self.limits is not None:
            beyond = margins != within
            value = value + slope * (margins - within)
            bend = np.where(beyond, 0.0, bend)
        return value.mean() + self.ridge / 2 * theta @ theta, slope @ self.x / len(self.y) + self.ridge * theta, bend

    def curved(self, margins: Array, limits: Array) -> Array:
        """Return the nearest margins (n,) at which the slopes of the losses are within ``limits`` (n,)."""
        if curvature := SQUARES.get(self.loss.name):
            reach = limits / curvature
            return np.clip(margins, self.y - reach, self.y + reach)
        steep = np.minimum(limits, 1.0)  # which the slope of the logistic loss never reaches
        return self.y * np.maximum(self.y * margins, np.log1p(-steep) - np.log(steep))

    def losses(self, margins: Array) -> tuple[Array, Array, Array]:
        """Return every record's squared or logistic loss, and its first and second derivative, (n,) each."""
        if curvature := SQUARES.get(self.loss.name):
            error = margins - self.y
            return curvature / 2 * error * error, curvature * error, np.full(self.y.shape, curvature)
        against = -self.y * margins
        small = np.exp(-np.abs(against))
        pull = np.where(against < 0, small, 1.0) / (1 + small)  # the slope is -y times it
        return np.maximum(against, 0.0) + np.log1p(small), -self.y * pull, pull * (1 - pull)

    def hessian(self, bend: Array) -> Array:
        """Return (p, p), from the second derivatives of the losses."""
        matrix: Array = (self.x.T * (bend / len(self.y))) @ self.x
        matrix[np.diag_indices_from(matrix)] += self.ridge
        return matrix

    def missing(self, theta: Array, gradient: Array, box: float) -> float:
        """Return r: the gradient's norm, or what it would be without the box at the same gap r^2 / (2 ridge).

        The gap is -min over the box of gradient . (z - theta) + (ridge / 2) ||z - theta||^2.
        """
        if box == math.inf:
            return math.sqrt(gradient @ gradient)
        move = np.clip(theta - gradient / self.ridge, -box, box) - theta
        gap = -(gradient @ move + self.ridge / 2 * move @ move)
        return math.sqrt(2 * self.ridge * np.maximum(gap, 0.0))


def newton(problem: Objective, start: Array, box: float, goal: float) -> Minimum:
    """Minimize from ``start`` (p,) until r of :meth:`Objective.missing` is at most ``goal``, or until rounding hides
    further progress."""
    theta = np.clip(start, -box, box)
    value, gradient, bend = problem.at(theta)
    r = problem.missing(theta, gradient, box)
    for _ in range(_STEPS):
        if not r > goal:
            break
        step = _direction(problem.hessian(bend), theta, gradient, box)
        for _ in range(_HALVINGS):
            trial = np.clip(theta - step, -box, box)
            new, slope, bends = problem.at(trial)
            promised = abs(gradient @ (theta - trial))
            lost = promised <= _ROUNDING * max(1.0, abs(value))  # the gradient shows progress there, and not the value
            if lost or new <= value - 1e-4 * promised:
                break
            step = step / 2
        else:
            break
        after = problem.missing(trial, slope, box)
        if lost and not after < r:
            break
        last = lost and not after < r / 2
        theta, value, gradient, bend, r = trial, new, slope, bends, after
        if last:
            break
    return Minimum(theta, float(value), r**2 / (2 * problem.ridge))


def _direction(hessian: Array, theta: Array, gradient: Array, box: float) -> Array:
    """Return Newton's step (p,), to be subtracted; coordinates at the box that would leave it take a gradient step, and
    so do all where rounding has made the Hessian singular."""
    if box != math.inf:
        near = np.minimum(1e-8 * box, np.abs(gradient))
        held = ((theta <= near - box) & (gradient > 0)) | ((theta >= box - near) & (gradient < 0))
        hessian = np.where((held[:, None] | held) & ~np.eye(len(theta), dtype=bool), 0.0, hessian)
    step: Array
    try:
        step = np.linalg.solve(hessian, gradient)  # type: ignore[assignment]
    except np.linalg.LinAlgError:
        step = gradient / np.diagonal(hessian)
    return step


def accelerated(step: Callable[[Array], Array], start: Array, steps: int, tolerance: float = 0.0) -> Array:
    """Make proximal gradient steps of m problems (m, ...) with Nesterov's momentum, which starts again in a problem
    where it points uphill (O'Donoghue and Candes 2015), until all of a step is at most ``tolerance`` long.

    Args:
        step: a step of all, (m, ...) -> (m, ...).
        start: (m, ...).
        steps: at most so many.
        tolerance: on the norm of a step.
    """
    point = ahead = start
    axes = tuple(range(1, start.ndim))
    weight = np.ones((len(start), *[1] * len(axes)))
    for _ in range(steps):
        new = step(ahead)
        if tolerance and float(np.linalg.norm(new - ahead)) <= tolerance:
            return new
        uphill = ((ahead - new) * (new - point)).sum(axes, keepdims=True) > 0
        following = np.where(uphill, 1.0, (1 + np.sqrt(1 + 4 * weight**2)) / 2)
        ahead = new + np.where(uphill, 0.0, (weight - 1) / following) * (new - point)
        point, weight = new, following
    return point
