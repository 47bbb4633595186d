"""Exact solvers of regularized linear models.

    min over ||theta||_inf <= box of
        (1/n) sum_j l(x_j . (base + theta), y_j) + (ridge / 2) ||theta||^2

with the squared or the logistic loss l. Newton's method with a projected line search finds the
minimizer in a few steps and bounds the rest of the gap. Coordinates at the box that would leave it
are held (Bertsekas 1982). Penalties without a second derivative take accelerated proximal gradient
steps.

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

# The most steps of Newton's method, halvings of one of them, and proximal gradient steps.
_STEPS = 200
_HALVINGS = 34
_PROXIMAL_STEPS = 100_000
_TOLERANCE = 1e-10
_ROUNDING = 1e-14
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
    """Minimizes the regularized mean loss at the head of this module over ||theta||_inf <= box.

    Args:
        loss: of the records, not the hinge; y in {-1, +1} for the logistic one.
        x: (n, p) float64, finite, n at least 1.
        y: (n,) float64, finite.
        ridge: above 0.
        base: (p,); None: 0.
        box: bound on ||theta||_inf.

    Raises:
        ConfigError: a hinge loss, no records, or values that are not finite.
    """
    positive("minimize", ridge=ridge)
    one_of("minimize", (*SQUARES, "logistic"), loss=loss.name)
    if len(x) == 0 or x.ndim != 2 or y.shape != x.shape[:1]:
        needed = "(n, p) and (n,) with n >= 1"
        raise ConfigError(f"x and y are {x.shape} and {y.shape}; needed: {needed}.")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ConfigError("minimize: x or y has values that are not finite.")
    with np.errstate(all="ignore"):
        offset: Array | float = 0.0
        if base is not None:
            offset = x @ base
        # of few records the minimizer is a combination of the rows: n numbers in place of p
        basis = None
        if 2 * len(x) < x.shape[1] and box == math.inf:
            across, factor = np.linalg.qr(x.T)
            if np.isfinite(across).all() and np.isfinite(factor).all():
                basis = across
                x = factor.T
        objective = Objective(loss, x, y, ridge, offset)
        minimum = newton(objective, np.zeros(x.shape[1]), box, _TOLERANCE)
    if basis is None:
        return minimum
    return replace(minimum, theta=basis @ minimum.theta)


def fit_own(
    loss: LinearLoss, x: Tensor, y: Tensor, shared: Tensor, tau: float, penalty: OwnPenalty
) -> Tensor:
    """Fits a client's own part q of a model for one shared model or several.

    q minimizes (1/n) sum_j l(x_j . (shared + q), y_j) + tau g(q).

    Args:
        loss: squared or logistic.
        x: (n, p), the raw records of one client; nothing leaves it.
        y: (n,), their targets.
        shared: (p,), or (k, p), those of k replicates.
        tau: above 0, so that the minimum exists.
        penalty: g, see :data:`~fedmtl.local.proximal.PENALTIES`.

    Returns:
        q as ``shared``, float64.
    """
    rows = x.numpy()
    targets = y.numpy()

    def fit(point: Array) -> Array:
        if penalty == "frobenius":
            return minimize(loss, rows, targets, tau, base=point).theta
        if penalty == "l2":
            return _fit_in_norm(loss, rows, targets, tau, point)
        return _fit_proximal(loss, rows, targets, tau, point, penalty)

    points = shared.reshape(-1, shared.shape[-1]).numpy()
    return torch.from_numpy(np.stack([fit(point) for point in points])).reshape(shared.shape)


def _fit_proximal(
    loss: LinearLoss, x: Array, y: Array, tau: float, base: Array, penalty: OwnPenalty
) -> Array:
    """Minimizes L(q) + tau g(q) over q (p,) by accelerated proximal gradient steps."""
    try:
        largest = float(np.linalg.norm(x, 2))
    except np.linalg.LinAlgError:  # no records make a fit raise: the Frobenius norm is a bound
        largest = float(np.linalg.norm(x))
    rate = 1.0 / max(loss.smoothness(1.0) * largest**2 / len(x), 1e-12)
    problem = Objective(loss, x, y, 0.0, x @ base)

    def step(q: Array) -> Array:
        _, gradient, _ = problem.at(q[0])
        moved = torch.from_numpy(q - rate * gradient)
        proximal: Array = PENALTIES[penalty].prox(moved, rate * tau).numpy()
        return proximal

    start = np.zeros((1, len(base)))
    return accelerated(step, start, _PROXIMAL_STEPS, rate * _TOLERANCE)[0]


def _fit_in_norm(loss: LinearLoss, x: Array, y: Array, tau: float, base: Array) -> Array:
    """Minimizes L(q) + tau ||q||_2 over q (p,), with L the mean loss at ``base`` + q.

    It is 0 if the gradient of L is no longer than tau there. Elsewhere grad L(q) + tau q / ||q|| =
    0, so q is the ridge fit whose ridge r has r ||q|| = tau. That product is the length of the
    gradient at the fit, and grows with r; since (r / 2) ||q||^2 is at most L(0), it is at most tau
    at r = tau^2 / (2 L(0)).
    """
    with np.errstate(all="ignore"):
        zero = np.zeros(len(base))
        offset = x @ base
        value, gradient, _ = Objective(loss, x, y, 0.0, offset).at(zero)
        if not np.linalg.norm(gradient) > tau:
            return zero
        fitted = zero

        def fit(log_ridge: float) -> Array:
            """Returns the ridge fit; Newton's method starts at the fit of the ridge before."""
            nonlocal fitted
            objective = Objective(loss, x, y, math.exp(log_ridge), offset)
            fitted = newton(objective, fitted, math.inf, _TOLERANCE).theta
            return fitted

        def longer(log_ridge: float) -> float:
            """Returns r ||q|| - tau, which grows with r and is to be 0."""
            return math.exp(log_ridge) * float(np.linalg.norm(fit(log_ridge))) - tau

        # widen the bracket of log r until the product at its upper end is at least tau
        low = math.log(max(tau**2 / (2 * value), 1e-300))
        high = low + 1.0
        while high < _LARGEST and longer(high) < 0:
            low = high
            high = high + 2.0
        if high >= _LARGEST:  # the gradient is hardly longer than tau, and q hardly longer than 0
            return np.zeros(len(base))
        if longer(low) < 0:
            low = float(brentq(longer, low, high, xtol=1e-12))
        return fit(low)


def solve_regularized(matrix: Tensor, right: Tensor) -> Tensor:
    """Solves positive definite systems: returns matrix^-1 right.

    The solution of a system that rounding has made singular is zero: no records make it fail.

    Args:
        matrix: (..., p, p).
        right: (..., p) or (..., p, k), as in ``torch.linalg.solve``.
    """
    solution, info = torch.linalg.solve_ex(matrix, right)
    dims = tuple(range(info.dim(), solution.dim()))  # the dimensions of one solution
    solved = info == 0
    if dims:
        solved = solved & torch.isfinite(solution).all(dims)
    return torch.where(solved.reshape(*info.shape, *[1] * len(dims)), solution, 0.0)


@dataclass(frozen=True, eq=False)
class Objective:
    """f(theta) = mean of l(offset_j + x_j . theta) + (ridge / 2) ||theta||^2, for offset (n,) or 0.

    With ``limits`` (n,), above 0, the slope of every record's loss is cut off at its limit in
    absolute value, and the loss goes on linearly from there: of the squared loss that is Huber's.
    """

    loss: LinearLoss
    x: Array
    y: Array
    ridge: float
    offset: Array | float = 0.0
    limits: Array | None = None

    def at(self, theta: Array) -> tuple[float, Array, Array]:
        """Returns the value, the gradient (p,) and the second derivatives of the losses (n,)."""
        margins = self.x @ theta + self.offset
        if self.limits is None:
            value, slope, bend = self.losses(margins)
        else:
            within = self.curved(margins, self.limits)
            value, slope, bend = self.losses(within)
            # beyond the limits the loss goes on linearly
            value = value + slope * (margins - within)
            bend = np.where(margins != within, 0.0, bend)
        total = value.mean() + self.ridge / 2 * theta @ theta
        gradient = slope @ self.x / len(self.y) + self.ridge * theta
        return total, gradient, bend

    def curved(self, margins: Array, limits: Array) -> Array:
        """Returns the nearest margins (n,) with slopes of the losses within ``limits`` (n,)."""
        curvature = SQUARES.get(self.loss.name)
        if curvature is not None:
            reach = limits / curvature
            return np.clip(margins, self.y - reach, self.y + reach)
        steep = np.minimum(limits, 1.0)  # which the slope of the logistic loss never reaches
        return self.y * np.maximum(self.y * margins, np.log1p(-steep) - np.log(steep))

    def losses(self, margins: Array) -> tuple[Array, Array, Array]:
        """Returns every record's loss, and its first and second derivative, (n,) each."""
        curvature = SQUARES.get(self.loss.name)
        if curvature is not None:
            error = margins - self.y
            bend = np.full(self.y.shape, curvature)
            return curvature / 2 * error * error, curvature * error, bend
        against = -self.y * margins
        small = np.exp(-np.abs(against))
        pull = np.where(against < 0, small, 1.0) / (1 + small)  # the slope is -y times it
        value = np.maximum(against, 0.0) + np.log1p(small)
        return value, -self.y * pull, pull * (1 - pull)

    def hessian(self, bend: Array) -> Array:
        """Returns (p, p), from the second derivatives of the losses."""
        matrix: Array = (self.x.T * (bend / len(self.y))) @ self.x
        matrix[np.diag_indices_from(matrix)] += self.ridge
        return matrix

    def missing(self, theta: Array, gradient: Array, box: float) -> float:
        """Returns r, the gradient's norm; in a box the norm of the same gap r^2 / (2 ridge).

        The gap is -min over the box of gradient . (z - theta) + (ridge / 2) ||z - theta||^2.
        """
        if box == math.inf:
            return math.sqrt(gradient @ gradient)
        move = np.clip(theta - gradient / self.ridge, -box, box) - theta
        gap = -(gradient @ move + self.ridge / 2 * move @ move)
        return math.sqrt(2 * self.ridge * np.maximum(gap, 0.0))


def newton(problem: Objective, start: Array, box: float, goal: float) -> Minimum:
    """Minimizes by Newton's method with a line search.

    It ends if r of :meth:`Objective.missing` is at most ``goal``, or if rounding hides further
    progress.

    Args:
        problem: the function.
        start: (p,).
        box: bound on ||theta||_inf; infinite for none.
        goal: for r.
    """
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
            # rounding hides the progress in the value; the gradient still shows it
            lost = promised <= _ROUNDING * max(1.0, abs(value))
            if lost or new <= value - 1e-4 * promised:
                break
            step = step / 2
        else:
            break
        after = problem.missing(trial, slope, box)
        if lost and not after < r:
            break
        last = lost and not after < r / 2
        theta = trial
        value = new
        gradient = slope
        bend = bends
        r = after
        if last:
            break
    return Minimum(theta, float(value), r**2 / (2 * problem.ridge))


def _direction(hessian: Array, theta: Array, gradient: Array, box: float) -> Array:
    """Returns Newton's step (p,), to be subtracted.

    Coordinates at the box that would leave it take a gradient step. All do if rounding has made the
    Hessian singular.
    """
    if box != math.inf:
        near = np.minimum(1e-8 * box, np.abs(gradient))
        at_lower = (theta <= near - box) & (gradient > 0)
        at_upper = (theta >= box - near) & (gradient < 0)
        held = at_lower | at_upper
        # held coordinates are cut off from the others: only their diagonal stays
        across = (held[:, None] | held) & ~np.eye(len(theta), dtype=bool)
        hessian = np.where(across, 0.0, hessian)
    step: Array
    try:
        step = np.linalg.solve(hessian, gradient)  # type: ignore[assignment]
    except np.linalg.LinAlgError:
        step = gradient / np.diagonal(hessian)
    return step


def accelerated(
    step: Callable[[Array], Array], start: Array, steps: int, tolerance: float = 0.0
) -> Array:
    """Makes proximal gradient steps of m problems with Nesterov's momentum.

    The momentum starts again in a problem in which it points uphill (O'Donoghue and Candes 2015).

    Args:
        step: a step of all problems, (m, ...) -> (m, ...).
        start: (m, ...).
        steps: the most steps.
        tolerance: the norm of a step at which they end.

    Returns:
        (m, ...).
    """
    point = ahead = start
    axes = tuple(range(1, start.ndim))
    weight = np.ones((len(start), *[1] * len(axes)))
    for _ in range(steps):
        new = step(ahead)
        # a step of zero length is a fixed point, the minimizer
        if tolerance and float(np.linalg.norm(new - ahead)) <= tolerance:
            return new
        uphill = ((ahead - new) * (new - point)).sum(axes, keepdims=True) > 0
        following = np.where(uphill, 1.0, (1 + np.sqrt(1 + 4 * weight**2)) / 2)
        ahead = new + np.where(uphill, 0.0, (weight - 1) / following) * (new - point)
        point = new
        weight = following
    return point
