"""The strength of the ridge that every task finds most plausible, from its own records.

Under w = S v, v ~ N(0, (noise variance) / (n ridge) I), the records of a task have a density, the evidence of the
ridge. A task that chooses by it needs no records held out, and nothing leaves it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .solve import minimize
from .stack import TaskStack

Array = NDArray[np.float64]

FACTORS: Array = np.exp2(np.arange(-6.0, 7.0))


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
    chosen = np.full(len(tasks.counts), ridge)
    evidence = _squared if tasks.loss == "squared" else _logistic
    for i in range(len(chosen)):
        within = np.eye(tasks.dimension) if scale is None else scale[i].numpy()
        with np.errstate(all="ignore"):
            values = evidence(tasks, i, ridges, within) + prior
        if np.isfinite(values).any():
            chosen[i] = ridges[np.argmax(np.where(np.isfinite(values), values, -np.inf))]
    return torch.from_numpy(chosen)


def _squared(tasks: TaskStack, i: int, ridges: Array, within: Array) -> Array:
    n = int(tasks.counts[i])
    if tasks.moments is not None:
        gram, cross, square = (part[i].numpy() for part in tasks.moments)
    else:
        x, y = tasks.x[i].numpy(), tasks.y[i].numpy()
        gram, cross, square = x.T @ x / n, x.T @ y / n, y @ y / n
    try:
        sizes, vectors = np.linalg.eigh(within.T @ gram @ within)
    except np.linalg.LinAlgError:
        return np.full(len(ridges), np.nan)
    along = (vectors.T @ (within.T @ cross)) ** 2
    left = square - (along / (sizes + ridges[:, None])).sum(1)
    rounding = 1e-15 * square + 1e-300
    spread: Array = np.log1p(np.maximum(sizes, 0.0) / ridges[:, None]).sum(1)
    return -n / 2 * np.log(np.maximum(left, rounding)) - spread / 2


def _logistic(tasks: TaskStack, i: int, ridges: Array, within: Array) -> Array:
    x, y = tasks.x[i].numpy() @ within, tasks.y[i].numpy()
    theta = minimize(tasks.linear, x, y, float(ridges[len(ridges) // 2])).theta
    slope = 1 / (1 + np.exp(y * (x @ theta)))
    bend = (x * (slope * (1 - slope))[:, None]).T @ x / len(y)
    pull = bend @ theta + (y * slope) @ x / len(y)
    try:
        sizes, vectors = np.linalg.eigh(bend)
    except np.linalg.LinAlgError:
        return np.full(len(ridges), np.nan)
    gain: Array = ((vectors.T @ pull) ** 2 / (sizes + ridges[:, None])).sum(1)
    spread: Array = np.log1p(np.maximum(sizes, 0.0) / ridges[:, None]).sum(1)
    return len(y) / 2 * gain - spread / 2
