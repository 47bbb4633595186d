"""The solver of regularized linear models.

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
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._check import one_of, positive
from ...errors import ConfigError
from ...local.proximal import PENALTIES, Penalty
from .data import LinearLoss

Array = NDArray[np.float64]
OwnPenalty = Literal["frobenius", "l1", "l2"]
OWN_PENALTIES: dict[OwnPenalty, Penalty] = {
    "frobenius": PENALTIES["frobenius"],
    "l1": PENALTIES["l1"],
    "l2": PENALTIES["rows"],
}
"""Penalties g of a client's own part by name, of Q^T (..., T, p): one row a task."""

_STEPS, _HALVINGS, _PROXIMAL_STEPS = 200, 34, 100_000
_TOLERANCE, _ROUNDING = 1e-10, 1e-14
_ELEMENTS = 1 << 22  # of the rows of all bases together


@dataclass(frozen=True, eq=False)
class Minimum:
    """A minimizer.

    Attributes:
        theta: (p,), or (k, p) of k bases.
        value: of the objective there, () or (k,).
        gap: an upper bound on ``value`` minus the least value, up to rounding; likewise.
    """

    theta: Array
    value: Array
    gap: Array


def minimize(
    loss: LinearLoss,
    x: Array,
    y: Array,
    ridge: float,
    *,
    base: Array | None = None,
    box: float = math.inf,
    steps: int = _STEPS,
) -> Minimum:
    """Minimize (1/n) sum_j l(x_j . (base + theta), y_j) + (ridge / 2) ||theta||^2 over ||theta||_inf <= box.

    Args:
        loss: of the records; y in {-1, +1} except for ``"squared"``.
        x, y: (n, p) and (n,) float64, finite, n at least 1.
        ridge: above 0.
        base: (p,), or (k, p) for k minimizers on the same records; None: 0.
        box: bound on ||theta||_inf.
        steps: of Newton's method, at most.

    Raises:
        ConfigError: a hinge loss, no records, or values that are not finite.
    """
    positive("minimize", ridge=ridge)
    one_of("minimize", ("squared", "logistic"), loss=loss.name)
    if len(x) == 0 or x.ndim != 2 or y.shape != x.shape[:1]:
        raise ConfigError(f"x and y are {x.shape} and {y.shape}; needed: (n, p) and (n,) with n >= 1.")
    if np.count_nonzero(np.isfinite(x)) < x.size or np.count_nonzero(np.isfinite(y)) < y.size:
        raise ConfigError("minimize: x or y has values that are not finite.")
    with np.errstate(all="ignore"):
        turn = None
        offset = 0.0 if base is None else np.atleast_2d(base) @ x.T
        if 2 * len(x) < x.shape[1] and box == math.inf:  # a combination of the rows
            across, factor = np.linalg.qr(x.T)
            if np.isfinite(across).all() and np.isfinite(factor).all():
                turn, x = across, factor.T
        problem = Objective(loss, x, y, ridge, offset)
        start = np.zeros((1 if base is None else len(np.atleast_2d(base)), x.shape[1]))
        found = newton(problem, start, box, _TOLERANCE, steps)
    theta = found.theta if turn is None else found.theta @ turn.T
    if base is None or base.ndim == 1:
        return Minimum(theta[0], found.value[0], found.gap[0])
    return replace(found, theta=theta)


def fit_own(
    loss: LinearLoss, x: Tensor, y: Tensor, shared: Tensor, tau: float, penalty: OwnPenalty, *, tolerance: float = 1e-10
) -> Tensor:
    """Minimize (1/n) sum_j l(x_j . (shared + q), y_j) + tau g(q) over q, for one shared model or several.

    Args:
        loss: squared or logistic.
        x, y: (n, p) and (n,), the raw records of one client; nothing leaves it.
        shared: (p,), or (k, p), those of k replicates.
        tau: above 0, so that the minimum exists.
        penalty: g, see :data:`OWN_PENALTIES`.
        tolerance: on the norm of the proximal gradient at the result, for penalties without a second derivative.

    Returns:
        q as ``shared``, float64.
    """
    points, rows, targets = shared.reshape(-1, shared.shape[-1]), x.numpy(), y.numpy()
    if penalty == "frobenius":
        blocks = points.split(max(1, _ELEMENTS // rows.size))
        fits = [minimize(loss, rows, targets, tau, base=block.numpy()).theta for block in blocks]
        return torch.from_numpy(np.concatenate(fits)).reshape(shared.shape)
    prox = OWN_PENALTIES[penalty].prox
    try:
        largest = float(np.linalg.norm(rows, 2))
    except np.linalg.LinAlgError:  # not even an iteration that does not converge may show
        largest = float(np.linalg.norm(rows))
    rate = 1.0 / max(loss.smoothness(1.0) * largest**2 / len(rows), 1e-12)
    fits = []
    for point in points.numpy():
        problem = Objective(loss, rows, targets, 0.0, (rows @ point)[None])
        fits.append(
            _accelerated(
                lambda q, problem=problem: problem.at(q)[1]()[0],  # type: ignore[misc]
                np.zeros((1, len(point))),
                rate,
                _PROXIMAL_STEPS,
                prox=lambda q: prox(torch.from_numpy(q), rate * tau).numpy(),
                tolerance=tolerance,
            )
        )
    return torch.from_numpy(np.concatenate(fits)).reshape(shared.shape)


def own_step(q: Tensor, gradient: Tensor, lr: float, tau: float, penalty: OwnPenalty) -> Tensor:
    """Take one step on l(q) + tau g(q) for rows q (k, p): of the gradient for the ridge, proximal for the others."""
    if penalty == "frobenius":
        return q - lr * (gradient + tau * q)
    return OWN_PENALTIES[penalty].prox(q - lr * gradient, lr * tau)


def solve_regularized(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix^-1 right for positive definite systems; zero for one that rounding has made singular, so that no
    records make it fail.

    Args:
        matrix: (..., p, p).
        right: (..., p) or (..., p, k), as in ``torch.linalg.solve``.
    """
    found, info = torch.linalg.solve_ex(matrix, right)
    dims = tuple(range(info.dim(), found.dim()))
    solved = (info == 0) & torch.isfinite(found).all(dims) if dims else info == 0
    return torch.where(solved.reshape(*info.shape, *[1] * len(dims)), found, 0.0)


def losses(loss: LinearLoss, margins: Array, y: Array) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
    """Return every record's squared or logistic loss, and a function that returns its first and second derivative.

    ``margins`` are (..., n), the targets ``y`` (n,). Returned are (..., n) each; the second derivative is (n,) where it
    is constant.
    """
    if loss.name == "squared":
        error = margins - y
        return error * error, lambda: (2 * error, np.full(y.shape, 2.0))
    away = -y * margins
    small = np.exp(-np.abs(away))
    value = np.maximum(away, 0.0) + np.log1p(small)
    pull = np.where(away < 0, small, 1.0) / (1 + small)  # the slope is -y times it
    return value, lambda: (-y * pull, pull * (1 - pull))


@dataclass(frozen=True, eq=False)
class Objective:
    """f(theta) = mean of l(offset_j + x_j . theta) + (ridge / 2) ||theta||^2 at k points: theta (k, p), offset (k, n)
    or 0."""

    loss: LinearLoss
    x: Array
    y: Array
    ridge: float
    offset: Array | float = 0.0

    def at(self, theta: Array) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
        """Return values (k,), and a function that returns the gradients (k, p) and the second derivatives of the
        losses: (k, n), or (n,) if they are constant."""
        margins, n = theta @ self.x.T + self.offset, len(self.y)
        each, slopes = self.losses(margins)

        def rest() -> tuple[Array, Array]:
            slope, bend = slopes()
            return slope @ self.x / n + self.ridge * theta, bend

        return np.add.reduce(each, 1) / n + (self.ridge / 2) * np.add.reduce(theta * theta, 1), rest

    def losses(self, margins: Array) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
        """Return :func:`losses` at the ``margins`` (k, n)."""
        return losses(self.loss, margins, self.y)

    def hessian(self, bend: Array) -> Array:
        """Return (k, p, p), or (p, p) of constant second derivatives or a single point."""
        x, bend = self.x, bend[0] if bend.ndim == 2 and len(bend) == 1 else bend
        matrix: Array = (x.T * (bend / len(self.y))[..., None, :]) @ x
        matrix.reshape(-1, x.shape[1] ** 2)[:, :: x.shape[1] + 1] += self.ridge
        return matrix

    def missing(self, theta: Array, gradient: Array, box: float) -> Array:
        """Return r, (k,): the gradient's norm, or what it would be without the box at the same gap r^2 / (2 ridge).

        The gap is -min over the box of gradient . (z - theta) + (ridge / 2) ||z - theta||^2.
        """
        if box == math.inf:
            return np.sqrt(np.add.reduce(gradient * gradient, 1))
        move = np.clip(theta - gradient / self.ridge, -box, box) - theta
        gap = -np.add.reduce(gradient * move + self.ridge / 2 * move**2, 1)
        return np.sqrt(2 * self.ridge * np.maximum(gap, 0.0))


def newton(problem: Objective, start: Array, box: float, goal: float, steps: int) -> Minimum:
    """Minimize from every row of ``start`` (k, p) until r of :meth:`Objective.missing` is at most ``goal``, or until
    rounding hides further progress."""
    theta = start if box == math.inf else np.clip(start, -box, box)
    value, rest = problem.at(theta)
    gradient, bend = rest()
    r = problem.missing(theta, gradient, box)
    goes_on = r > goal
    for _ in range(steps):
        if not (count := np.count_nonzero(goes_on)):
            break
        step = _direction(problem.hessian(bend), theta, gradient, box)
        if count < len(goes_on):
            step = np.where(goes_on[:, None], step, 0.0)
        rounding = _ROUNDING * np.maximum(1.0, np.abs(value))
        for _ in range(_HALVINGS):
            trial = theta - step if box == math.inf else np.clip(theta - step, -box, box)
            new, rest = problem.at(trial)
            promised = np.abs(np.add.reduce(gradient * (step if box == math.inf else theta - trial), 1))
            lost = promised <= rounding
            good = lost | (new <= value - 1e-4 * promised)
            if np.count_nonzero(good) == len(good):
                break
            step = np.where(good[:, None], step, step / 2)
        slope, bends = rest()
        after = problem.missing(trial, slope, box)
        accepted, goes_on = good, good & (after > goal)
        if np.count_nonzero(lost):  # there the gradient is what shows progress
            accepted, goes_on = good & (~lost | (after < r)), goes_on & (~lost | (after < r / 2))
        if np.count_nonzero(accepted) < len(accepted):
            keep = accepted[:, None]
            trial, slope = np.where(keep, trial, theta), np.where(keep, slope, gradient)
            new, after = np.where(accepted, new, value), np.where(accepted, after, r)
            bends = bends if bends.ndim == 1 else np.where(keep, bends, bend)
        theta, value, gradient, bend, r = trial, new, slope, bends, after
    return Minimum(theta, value, r**2 / (2 * problem.ridge))


def _direction(hessian: Array, theta: Array, gradient: Array, box: float) -> Array:
    """Return Newton's step (k, p), to be subtracted; coordinates at the box that would leave it take a gradient step,
    and so does a point whose Hessian rounding has made singular."""
    if box != math.inf:
        near = np.minimum(1e-8 * box, np.abs(gradient))
        held = ((theta <= near - box) & (gradient > 0)) | ((theta >= box - near) & (gradient < 0))
        if held.any():
            apart = (held[:, :, None] | held[:, None, :]) & ~np.eye(theta.shape[1], dtype=bool)
            hessian = np.where(apart, 0.0, hessian)
    step: Array
    try:
        if hessian.ndim == 2:
            step = np.linalg.solve(hessian, gradient.T).T  # type: ignore[assignment]
        else:
            step = np.linalg.solve(hessian, gradient[:, :, None])[:, :, 0]  # type: ignore[assignment]
    except np.linalg.LinAlgError:
        each = np.broadcast_to(hessian, (len(gradient), *hessian.shape[-2:])).copy()
        step = solve_regularized(torch.from_numpy(each), torch.from_numpy(gradient)).numpy()
        step = np.where(step.any(1, keepdims=True), step, gradient / np.diagonal(each, axis1=1, axis2=2))
    return step


def _accelerated(
    gradient: Callable[[Array], Array],
    start: Array,
    rate: float,
    steps: int,
    *,
    prox: Callable[[Array], Array],
    tolerance: float,
) -> Array:
    """Make accelerated proximal gradient steps (k, p), ``steps`` at most, whose momentum grows and starts again where
    it points uphill, until the proximal gradient is at most ``tolerance`` long."""
    point = ahead = start
    weight = 1.0
    for _ in range(steps):
        new = prox(ahead - rate * gradient(ahead))
        if float(np.linalg.norm(new - ahead)) <= rate * tolerance:
            return new
        uphill = float(((ahead - new) * (new - point)).sum()) > 0
        following = 1.0 if uphill else (1 + math.sqrt(1 + 4 * weight**2)) / 2
        push, weight = 0.0 if uphill else (weight - 1) / following, following
        ahead, point = new + push * (new - point), new
    return point
