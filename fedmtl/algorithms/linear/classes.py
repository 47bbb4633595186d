"""Linear models of classes: softmax regression of C outputs, and logistic regression of one.

Accelerated full-batch steps at 1 / L, L the largest curvature of the client's own loss, need no
step size and never diverge. A model moves within the span of the client's records: if n records
have more than n dimensions, the steps are taken in n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .solve import accelerated

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


def fit_classes(x: Array, y: Labels, bases: Array, pulls: Array, steps: int) -> Array:
    """Minimizes (1 / n) sum_i loss_i(w) + (pull / 2) ||w - base||^2 from each base.

    Args:
        x: (n, p), with a last 1 for a bias.
        y: (n,), labels.
        bases: (m, C, p), the starts of m models, to which they are pulled.
        pulls: (m,), at least 0.
        steps: number of steps.

    Returns:
        (m, C, p).
    """
    outputs = bases.shape[1]
    if outputs > 1:
        targets = np.eye(outputs)[y].T  # (C, n)
        bend = 0.5  # the largest second derivative of the softmax loss in its margins
    else:
        targets = y[None].astype(float)  # (1, n)
        bend = 0.25
    start = bases @ x.T
    basis = None
    if len(x) < x.shape[1]:
        basis, triangle = np.linalg.qr(x.T)
        x = triangle.T
    curvature = bend * float(np.linalg.norm(x.T @ x, 2)) / len(x)
    pull = pulls[:, None, None]
    rate = 1.0 / (curvature + pull + 1e-12)

    def step(point: Array) -> Array:
        slope = (probabilities(start + point @ x.T) - targets) @ x / len(x) + pull * point
        moved: Array = point - rate * slope
        return moved

    # w - base, by its coordinates in the span
    point = accelerated(step, np.zeros((*bases.shape[:2], x.shape[1])), steps)
    if basis is not None:
        point = point @ basis.T
    return bases + point


def layers(model: Array, width: int, bias: bool) -> Array:
    """Returns the parameters of a model as a matrix (C, p), with the bias last.

    Args:
        model: (C * p,), the parameters [weights (C, d), biases (C,)].
        width: p.
        bias: False for a model without biases.
    """
    outputs = len(model) // width
    if not bias:
        return model.reshape(outputs, width)
    weights = model[: outputs * (width - 1)].reshape(outputs, width - 1)
    return np.concatenate([weights, model[outputs * (width - 1) :, None]], 1)


def flat(models: Array, bias: bool) -> Array:
    """Returns models (m, C, p) as rows of parameters, the inverse of :func:`layers`."""
    if not bias:
        return models.reshape(len(models), -1)
    return np.concatenate([models[:, :, :-1].reshape(len(models), -1), models[:, :, -1]], 1)


def probabilities(margins: Array) -> Array:
    """Returns the probabilities of the classes, (..., C, n); of class 1 if there is one output."""
    if margins.shape[-2] == 1:
        return 0.5 * (1 + np.tanh(margins / 2))
    # differences to the largest margin, so that nothing overflows
    values = np.exp(margins - margins.max(-2, keepdims=True))
    return values / values.sum(-2, keepdims=True)


def log_likelihoods(x: Array, y: Labels, models: Array) -> tuple[Array, Array]:
    """Returns the log likelihood and the accuracy of each record, (m, n) each.

    The accuracy is 1 if the most likely class is the label, else 0.
    """
    chances = probabilities(models @ x.T)
    if models.shape[1] == 1:
        chances = np.concatenate([1 - chances, chances], 1)
    true = np.take_along_axis(chances, np.broadcast_to(y, (len(models), 1, len(y))), 1)[:, 0]
    return np.log(np.maximum(true, 1e-12)), (chances.argmax(1) == y).astype(float)
