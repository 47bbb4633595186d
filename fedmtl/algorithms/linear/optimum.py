"""Exact minimizers of regularized linear problems in a box, with a certified gap.

    min_{||theta||_inf <= theta_max} reg ||theta||^2 + (1/n) sum_j l(theta . x_j, y_j)

The losses are squared, logistic and hinge. Squared and logistic: Newton's method with projected line search on the free
coordinates. Hinge: the same on Huber-smoothed hinges whose width goes to 0; the slopes of the smoothed hinges are a
feasible dual point, which certifies the gap.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..._check import positive
from ...errors import ConfigError
from .data import LinearLoss

Derivatives = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Optimum:
    """A minimizer.

    Attributes:
        theta: (p,) float64.
        fitness: f(theta).
        gap: an upper bound on f(theta) - min f (up to rounding of f).
    """

    theta: Tensor
    fitness: float
    gap: float


def minimize_exactly(loss: LinearLoss, x: Tensor, y: Tensor, *, reg: float, theta_max: float) -> Optimum:
    """The minimizer of reg ||theta||^2 + mean loss over ||theta||_inf <= theta_max.

    Args:
        loss: of the records; labels -1 and +1 except for ``"squared"``.
        x: (n, p) float64 rows, all finite.
        y: (n,) float64.
        reg, theta_max: above 0.

    Raises:
        ConfigError: no records, or values that are not finite.
    """
    positive("minimize_exactly", reg=reg, theta_max=theta_max)
    if len(x) == 0 or x.ndim != 2 or y.shape != x.shape[:1]:
        raise ConfigError(f"x and y are {tuple(x.shape)} and {tuple(y.shape)}; needed: (n, p) and (n,) with n >= 1.")
    rows, targets = x.detach().double().numpy(), y.detach().double().numpy()
    if not (np.isfinite(rows).all() and np.isfinite(targets).all()):
        raise ConfigError("minimize_exactly: x or y has values that are not finite.")
    if loss.name == "hinge":
        return _hinge(rows, targets, reg, theta_max)
    if loss.name == "squared":
        rows, targets, n = *triangle(rows, targets), len(rows)
    else:
        n = len(rows)

    def value(theta: np.ndarray) -> float:
        margins = rows @ theta
        if loss.name == "squared":
            return float(reg * theta @ theta + ((margins - targets) ** 2).sum() / n)
        return float(reg * theta @ theta + np.logaddexp(0.0, -targets * margins).sum() / n)

    def derivatives(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        margins = rows @ theta
        if loss.name == "squared":
            slope, curvature = 2 * (margins - targets), np.full(len(rows), 2.0)
        else:
            tail = np.exp(-np.logaddexp(0.0, targets * margins))
            slope, curvature = -targets * tail, tail * (1 - tail)
        hessian = (rows * curvature[:, None]).T @ rows / n
        return 2 * reg * theta + rows.T @ slope / n, hessian + 2 * reg * np.eye(len(theta))

    theta, gap = projected_newton(value, derivatives, np.zeros(rows.shape[1]), theta_max, 2 * reg)
    return Optimum(torch.from_numpy(theta), value(theta), gap)


def triangle(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most p + 1 rows (A, b) with ||A theta - b|| = ||x theta - y|| for every theta: a QR decomposition."""
    if len(x) <= x.shape[1] + 1:
        return x, y
    factor: np.ndarray = np.linalg.qr(np.column_stack([x, y]), mode="r")  # type: ignore[assignment]
    return factor[:, :-1], factor[:, -1]


def projected_newton(
    value: Callable[[np.ndarray], float],
    derivatives: Derivatives,
    start: np.ndarray,
    bound: float,
    sigma: float,
    *,
    tolerance: float = 1e-14,
    iterations: int = 200,
) -> tuple[np.ndarray, float]:
    """Minimize a sigma-strongly convex function over the box ||theta||_inf <= bound.

    Coordinates that stand at a bound and would leave it are held; the others take a Newton step, projected, halved
    until it descends (Bertsekas 1982). Ends at a gap of ``tolerance`` (1 + abs(value)), or where rounding stops it.

    Returns:
        theta (p,) and the gap: -min over the box of grad . (z - theta) + (sigma / 2) ||z - theta||^2.
    """

    def gap_of(theta: np.ndarray, gradient: np.ndarray) -> float:
        move = np.clip(theta - gradient / sigma, -bound, bound) - theta
        return float(-(gradient * move + sigma / 2 * move**2).sum())

    theta = np.clip(start, -bound, bound)
    best, best_gap, stalled = theta, np.inf, False
    for _ in range(iterations):
        gradient, hessian = derivatives(theta)
        gap, now = gap_of(theta, gradient), value(theta)
        if gap < best_gap:
            best, best_gap = theta, gap
        if best_gap <= tolerance * (1 + abs(now)):
            break
        near = np.minimum(1e-8 * bound, np.abs(gradient))
        free = ~(((theta <= near - bound) & (gradient > 0)) | ((theta >= bound - near) & (gradient < 0)))
        newton = -gradient / np.diag(hessian)
        with suppress(np.linalg.LinAlgError):  # where rounding swallows the regularization, the scaled gradient stays
            newton[free] = -np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        moved = _descend(value, theta, now, gradient, newton, bound)
        if moved is None:
            moved = _descend(value, theta, now, gradient, -gradient / np.trace(hessian), bound)
        if moved is None and stalled:
            break
        if moved is None:  # rounding hides the descent: one last full step, kept if it lowers the gap
            moved, stalled = np.clip(theta + newton, -bound, bound), True
        theta = moved
    return best, best_gap


def _descend(
    value: Callable[[np.ndarray], float],
    theta: np.ndarray,
    now: float,
    gradient: np.ndarray,
    direction: np.ndarray,
    bound: float,
) -> np.ndarray | None:
    """A projected step that descends enough (Armijo), or None."""
    for halvings in range(40):
        moved = np.clip(theta + 0.5**halvings * direction, -bound, bound)
        promised = float(gradient @ (moved - theta))
        if promised < 0 and value(moved) < now + 1e-4 * promised:
            return moved
    return None


def _hinge(x: np.ndarray, y: np.ndarray, reg: float, bound: float) -> Optimum:
    signed, n = x * y[:, None], len(y)

    def exact(theta: np.ndarray) -> float:
        return float(reg * theta @ theta + np.maximum(0.0, 1 - signed @ theta).sum() / n)

    def dual(weights: np.ndarray) -> float:
        """min over the box of the Lagrangian; ``weights`` in [0, 1] of each record's hinge."""
        pull = signed.T @ weights / n
        theta = np.clip(pull / (2 * reg), -bound, bound)
        return float(weights.sum() / n + reg * theta @ theta - pull @ theta)

    theta, lower = np.zeros(x.shape[1]), dual(np.zeros(n))
    best, best_value = theta, exact(theta)
    for width in 10.0 ** -np.arange(0, 11):
        theta = _smoothed(signed, theta, reg, bound, width)
        lower = max(lower, dual(np.clip((1 - signed @ theta) / width, 0.0, 1.0)))
        if exact(theta) < best_value:
            best, best_value = theta, exact(theta)
        if best_value - lower <= 1e-10 * (1 + best_value):
            break
    return Optimum(torch.from_numpy(best), best_value, max(best_value - lower, 0.0))


def _smoothed(signed: np.ndarray, start: np.ndarray, reg: float, bound: float, width: float) -> np.ndarray:
    """Minimizer with hinges h(z) = z^2 / (2 width) for z in [0, width], z - width / 2 beyond."""
    n = len(signed)

    def value(theta: np.ndarray) -> float:
        z = 1 - signed @ theta
        part = np.clip(z, 0.0, width)
        return float(reg * theta @ theta + (part**2 / (2 * width) + np.maximum(z - width, 0.0)).sum() / n)

    def derivatives(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = 1 - signed @ theta
        inside = signed[(z > 0) & (z < width)]
        slope = np.clip(z / width, 0.0, 1.0)
        hessian = inside.T @ inside / (n * width) + 2 * reg * np.eye(len(theta))
        return 2 * reg * theta - signed.T @ slope / n, hessian

    return projected_newton(value, derivatives, start, bound, 2 * reg, tolerance=1e-3 * width)[0]
