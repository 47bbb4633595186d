"""The strength of the ridge by maximum evidence, from a task's own records.

Under w = S v, v ~ N(0, (noise variance) / (n ridge) I), the records of a task have a density, the
evidence of the ridge. A task that chooses by it needs no records held out, and nothing leaves it.
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
    """Returns the ridge of every task, (n,) float64.

    Args:
        tasks: with their records or moments.
        ridge: above 0.
        own: False gives ``ridge`` to every task; True its own, see :func:`own_ridges`.
        scale: see :func:`own_ridges`.
    """
    if own:
        return own_ridges(tasks, ridge, scale)
    return torch.full((len(tasks.data.y),), ridge, dtype=torch.float64)


def own_ridges(tasks: TaskStack, ridge: float, scale: Tensor | None = None) -> Tensor:
    """Returns the ridge of the largest evidence of every task, (n,) float64.

    It is ``ridge`` times the most plausible power of two from 1/64 to 64, under a normal prior of
    standard deviation 1 on the logarithm of the factor.

    For the squared loss the variance of the noise is the most plausible one; with n records, the
    eigenvalues e_j of S^T X^T X S / n and the coordinates c_j of S^T X^T y / n along its
    eigenvectors, the logarithm of the evidence is

        -(n / 2) log(mean y^2 - sum_j c_j^2 / (e_j + ridge)) - (1 / 2) sum_j log(1 + e_j / ridge).

    For the logistic loss it is (n / 2) sum_j c_j^2 / (e_j + ridge) less the same logarithms. Its e
    and c are those of the quadratic approximation of the loss at the fit with ``ridge`` (Laplace's
    method).

    Args:
        tasks: with their records or moments.
        ridge: above 0, the center of the powers of two.
        scale: (n, D, D), the S of every task; None: the identity.
    """
    ridges: Array = ridge * FACTORS
    prior: Array = -(np.log(FACTORS) ** 2) / 2
    chosen = np.full(len(tasks.data.y), ridge)
    for i, y in enumerate(tasks.data.y):
        within = np.eye(tasks.data.dimension)
        if scale is not None:
            within = scale[i].numpy()
        # records that are too large give values that are not finite, which are passed over
        with np.errstate(all="ignore"):
            curvature, cross, square = _quadratic(tasks, i, ridge, within)
            values = _evidence(curvature, cross, square, len(y), ridges) + prior
        finite = np.isfinite(values)
        if finite.any():
            chosen[i] = ridges[np.argmax(np.where(finite, values, -np.inf))]
    return torch.from_numpy(chosen)


def _quadratic(
    tasks: TaskStack, i: int, ridge: float, within: Array
) -> tuple[Array, Array, float | None]:
    """Returns S^T X^T X S / n, S^T X^T y / n and mean y^2 of task i.

    For the logistic loss they are those of its quadratic approximation at the fit, and None.
    """
    x = tasks.data.x[i].numpy()
    y = tasks.data.y[i].numpy()
    if tasks.loss == "squared":
        if tasks.moments is None:
            gram = x.T @ x / len(y)
            cross = x.T @ y / len(y)
            square = y @ y / len(y)
        else:
            gram, cross, square = (part[i].numpy() for part in tasks.moments)
        return within.T @ gram @ within, within.T @ cross, square
    # the curvature H and the linear term H theta - gradient of the loss at the fit theta
    objective = Objective(tasks.linear, x @ within, y, ridge=0.0)
    theta = minimize(tasks.linear, objective.x, y, ridge).theta
    _, gradient, bend = objective.at(theta)
    curvature = objective.hessian(bend)
    return curvature, curvature @ theta - gradient, None


def _evidence(curvature: Array, cross: Array, square: float | None, n: int, ridges: Array) -> Array:
    """Returns the logarithm of the evidence of every ridge; NaN without eigenvalues."""
    try:
        sizes, vectors = np.linalg.eigh(curvature)
    except np.linalg.LinAlgError:
        return np.full(len(ridges), np.nan)
    # sum_j c_j^2 / (e_j + ridge), and sum_j log(1 + e_j / ridge)
    gain: Array = ((vectors.T @ cross) ** 2 / (sizes + ridges[:, None])).sum(1)
    spread: Array = np.log1p(np.maximum(sizes, 0.0) / ridges[:, None]).sum(1)
    if square is not None:
        gain = -np.log(np.maximum(square - gain, 1e-15 * square + 1e-300))
    return n / 2 * gain - spread / 2
