"""The strength of the ridge by maximum evidence, from a task's own records.

Under w = S v, v ~ N(0, (noise variance) / (n ridge) I), the records of a task have a density, the evidence of the
ridge. A task that chooses by it needs no records held out, and nothing leaves it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .solve import Objective, minimize
from .stack import TaskStack

Array = NDArray[np.float64]

FACTORS: Array = np.exp2(np.arange(-6.0, 7.0))


def ridges_of(tasks: TaskStack, ridge: float, own: bool, scale: Tensor | None = None) -> Tensor:
    """Return the ridge of every task, (n,) float64: ``ridge``, or where each has its ``own`` :func:`own_ridges`."""
    if own:
        return own_ridges(tasks, ridge, scale)
    return torch.full((len(tasks.data.y),), ridge, dtype=torch.float64)


def own_ridges(tasks: TaskStack, ridge: float, scale: Tensor | None = None) -> Tensor:
    """Return the ridge of every task, (n,) float64: ``ridge`` times the most plausible power of two from 1/64 to 64,
    under a normal prior of standard deviation 1 on the logarithm of the factor.

    For the squared loss the variance of the noise is the most plausible one; with n records, the eigenvalues e_j of
    S^T X^T X S / n and the coordinates c_j of S^T X^T y / n along its eigenvectors, the logarithm of the evidence is

        -(n / 2) log(mean y^2 - sum_j c_j^2 / (e_j + ridge)) - (1 / 2) sum_j log(1 + e_j / ridge).

    For the logistic loss it is (n / 2) sum_j c_j^2 / (e_j + ridge) less the same logarithms, with e and c of the
    quadratic function that the loss is about the fit with ``ridge`` (Laplace's approximation).

    Args:
        tasks: with their records or moments.
        ridge: above 0, where all begin.
        scale: (n, D, D), the S of every task; None: the identity.
    """
    ridges: Array = ridge * FACTORS
    prior: Array = -(np.log(FACTORS) ** 2) / 2
    chosen = np.full(len(tasks.data.y), ridge)
    for i, y in enumerate(tasks.data.y):
        within = np.eye(tasks.data.dimension) if scale is None else scale[i].numpy()
        with np.errstate(all="ignore"):
            values = _evidence(*_quadratic(tasks, i, ridge, within), len(y), ridges) + prior
        if np.isfinite(values).any():
            chosen[i] = ridges[np.argmax(np.where(np.isfinite(values), values, -np.inf))]
    return torch.from_numpy(chosen)


def _quadratic(tasks: TaskStack, i: int, ridge: float, within: Array) -> tuple[Array, Array, float | None]:
    """Return S^T X^T X S / n, S^T X^T y / n and mean y^2 of task i; for the logistic loss those of the quadratic
    function that it is about the fit, and None."""
    x, y = tasks.data.x[i].numpy(), tasks.data.y[i].numpy()
    if tasks.loss == "squared":
        if tasks.moments is None:
            gram, cross, square = x.T @ x / len(y), x.T @ y / len(y), y @ y / len(y)
        else:
            gram, cross, square = (part[i].numpy() for part in tasks.moments)
        return within.T @ gram @ within, within.T @ cross, square
    objective = Objective(tasks.linear, x @ within, y, ridge=0.0)
    theta = minimize(tasks.linear, objective.x, y, ridge).theta
    _, gradient, bend = objective.at(theta)
    curvature = objective.hessian(bend)
    return curvature, curvature @ theta - gradient, None


def _evidence(curvature: Array, cross: Array, square: float | None, n: int, ridges: Array) -> Array:
    """Return the logarithm of the evidence of every ridge; NaN where rounding leaves no eigenvalues."""
    try:
        sizes, vectors = np.linalg.eigh(curvature)
    except np.linalg.LinAlgError:
        return np.full(len(ridges), np.nan)
    gain: Array = ((vectors.T @ cross) ** 2 / (sizes + ridges[:, None])).sum(1)
    spread: Array = np.log1p(np.maximum(sizes, 0.0) / ridges[:, None]).sum(1)
    if square is not None:
        gain = -np.log(np.maximum(square - gain, 1e-15 * square + 1e-300))
    return n / 2 * gain - spread / 2
