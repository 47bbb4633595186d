"""Linear models of classes: softmax regression of C outputs, and logistic regression of one.

Accelerated full-batch steps at 1 / L, L the largest curvature of the client's own loss, need no step size and never
diverge. A model moves within the span of the client's records, so that of n records in more than n dimensions the steps
are taken in n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .solve import accelerated

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


def fit_classes(x: Array, y: Labels, bases: Array, pulls: Array, steps: int) -> Array:
    """Minimize (1 / n) sum_i loss_i(w) + (pull / 2) ||w - base||^2 from each base.

    Args:
        x, y: (n, p) with a last 1 for a bias, and labels (n,).
        bases: (m, C, p), where each of m models starts and is pulled to.
        pulls: (m,), at least 0.
        steps: how many.

    Returns:
        (m, C, p).
    """
    outputs = bases.shape[1]
    targets = np.eye(outputs)[y].T if outputs > 1 else y[None].astype(float)  # (C, n)
    start, basis = bases @ x.T, None
    if len(x) < x.shape[1]:
        basis, triangle = np.linalg.qr(x.T)
        x = triangle.T
    curvature = (0.5 if outputs > 1 else 0.25) * float(np.linalg.norm(x.T @ x, 2)) / len(x)
    pull = pulls[:, None, None]
    rate = 1.0 / (curvature + pull + 1e-12)

    def step(point: Array) -> Array:
        slope = (probabilities(start + point @ x.T) - targets) @ x / len(x) + pull * point
        moved: Array = point - rate * slope
        return moved

    # w - base, by its coordinates in the span
    point = accelerated(step, np.zeros((*bases.shape[:2], x.shape[1])), steps)
    return bases + (point if basis is None else point @ basis.T)


def layers(model: Array, width: int, bias: bool) -> Array:
    """Return the parameters [weights (C, d), biases (C,)] of a model, (C * p,), as (C, p) with the bias last."""
    outputs = len(model) // width
    if not bias:
        return model.reshape(outputs, width)
    weights = model[: outputs * (width - 1)].reshape(outputs, width - 1)
    return np.concatenate([weights, model[outputs * (width - 1) :, None]], 1)


def flat(models: Array, bias: bool) -> Array:
    """Return models (m, C, p) as rows of parameters, the inverse of :func:`layers`."""
    if not bias:
        return models.reshape(len(models), -1)
    return np.concatenate([models[:, :, :-1].reshape(len(models), -1), models[:, :, -1]], 1)


def probabilities(margins: Array) -> Array:
    """Return the probabilities of the classes, or of class 1 where there is one output: (..., C, n)."""
    if margins.shape[-2] == 1:
        return 0.5 * (1 + np.tanh(margins / 2))
    values = np.exp(margins - margins.max(-2, keepdims=True))
    return values / values.sum(-2, keepdims=True)


def log_likelihoods(x: Array, y: Labels, models: Array) -> tuple[Array, Array]:
    """Return the log likelihood of each record, and whether its most likely class is the label: (m, n) each."""
    chances = probabilities(models @ x.T)
    if models.shape[1] == 1:
        chances = np.concatenate([1 - chances, chances], 1)
    true = np.take_along_axis(chances, np.broadcast_to(y, (len(models), 1, len(y))), 1)[:, 0]
    return np.log(np.maximum(true, 1e-12)), (chances.argmax(1) == y).astype(float)
