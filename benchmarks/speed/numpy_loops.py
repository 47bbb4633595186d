"""Asynchronous methods as plain NumPy loops: one event after another, one run after another.

What a careful user would write for a single run: every product is a NumPy product, nothing is computed twice, noise
comes from ``numpy.random``. It imports nothing of fedmtl. Constants of the records are prepared once, apart from the
loop, which takes who acts, and how to draw noise, so that it can be checked against other code on the same events and
the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
Noise = Callable[[int, int], Array]
"""(number of the event, who acts) -> noise of one answer."""
Loop = Callable[[Sequence[int], Noise], Array]
"""(who answers, in order, noise of the answers) -> the models at the end."""


def laplace(rng: np.random.Generator, scales: Array, size: int) -> Noise:
    """Independent Laplace noise of an owner's scale on every coordinate."""
    return lambda event, owner: rng.laplace(0.0, scales[owner], size)


def gaussian(rng: np.random.Generator, scales: Array, size: int) -> Noise:
    """Independent normal noise of an owner's deviation on every coordinate."""
    return lambda event, owner: scales[owner] * rng.standard_normal(size)


def l2_laplace(rng: np.random.Generator, scales: Array, size: int) -> Noise:
    """Density proportional to exp(-||v||_2 / scale): a uniform direction, and a Gamma radius."""

    def draw(event: int, task: int) -> Array:
        vector = rng.standard_normal(size)
        vector *= rng.gamma(size, scales[task]) / np.sqrt(vector @ vector)
        return vector

    return draw


def central_learner(
    x: Sequence[Array], y: Sequence[Array], *, a: float, reg: float, top: float, clip: float
) -> Loop:
    """Farokhi et al., Algorithm 1 with (5), (6), (7'), squared loss: a loop that gives the central model theta_L (p,).

    Args:
        x, y: records of every owner, (n_i, p) and (n_i,).
        a, reg, top: step, g = reg ||theta||^2, and the largest abs(theta).
        clip: bound on the L1 norm of a record's gradient.
    """
    owners, total = len(x), sum(len(rows) for rows in x)
    limits = [clip / np.abs(rows).sum(1) for rows in x]  # of the factor of a row
    share = [a * owners * len(rows) / total for rows in x]

    def run(who: Sequence[int], noise: Noise) -> Array:
        central, own = np.zeros(x[0].shape[1]), np.zeros((owners, x[0].shape[1]))
        for event, i in enumerate(who):
            point = (central + own[i]) / 2
            factor = 2 * (x[i] @ point - y[i])
            np.minimum(np.maximum(factor, -limits[i], out=factor), limits[i], out=factor)
            mean = factor @ x[i] / len(factor) + noise(event, i)
            moved = point * (1 - a * reg) - share[i] * mean
            own[i] = np.minimum(np.maximum(moved, -top), top)
            moved = point * (1 - a * reg)
            central = np.minimum(np.maximum(moved, -top), top)
        return central

    return run


def pp_dmtl(
    x: Sequence[Array], y: Sequence[Array], *, a2: float, threshold: float, clip: float
) -> Loop:
    """Xie et al., Algorithm 1 with q_t = 0, logistic loss, nuclear norm: a loop that gives P (p, T).

    Args:
        x, y: records of every task, (n_t, p) and (n_t,) in {-1, +1}.
        a2, threshold: step of P, and that of the proximal operator.
        clip: bound on the L2 norm of a record's gradient.
    """
    shape = x[0].shape[1], len(x)
    limits = [clip / np.sqrt((rows**2).sum(1)) for rows in x]

    def run(who: Sequence[int], noise: Noise) -> Array:
        shared, stale, returned = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for event, t in enumerate(who):
            margins = y[t] * (x[t] @ returned[:, t])
            factor = -y[t] / (1 + np.exp(np.minimum(margins, 700.0)))
            np.minimum(np.maximum(factor, -limits[t], out=factor), limits[t], out=factor)
            stale[:, t] = factor @ x[t] / len(factor) + noise(event, t)
            u, s, v = np.linalg.svd(shared - a2 * stale, full_matrices=False)
            shared = (u * np.maximum(s - threshold, 0.0)) @ v
            returned[:, t] = shared[:, t]
        return shared

    return run
