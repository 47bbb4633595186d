"""Fits of linear models for the losses of Huber, of a quantile and of counts.

The minimizer of

    sum_i l(b_i + v . z_i, y_i) + (1 / 2) sum_j lambda_j v_j^2,

with b_i the outputs of a base, is found by Newton steps, in which a loss without a useful second
derivative has that of a parabola that touches it and lies above it (Hunter and Lange, "Quantile
regression via an MM algorithm", J. Computational and Graphical Statistics 2000). A step is halved
until the objective falls, so none diverges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...local.losses import Huber, Loss, Poisson, Quantile, is_counts
from .numbers import SLOPE_RIDGES, Records
from .weights import Array

_STEPS = 100
_HALVINGS = 8  # of a step
_NUMBERS = 1 << 20  # of products at a time
_LARGEST = 2.0  # change of the logarithm of a mean in a step
_TOLERANCE = 1e-9  # of the objective, relative
_CORNER = 1e-3  # of a quantile's loss, in units of the spread of the targets
_NONE = 1e12  # penalty of slopes that are left out


@dataclass(frozen=True)
class LossRecords:
    """The records of a client, with targets as a loss takes them.

    Attributes:
        z: standardized features, (n, p), with a last 1 for an intercept.
        y: targets of Huber's loss or a quantile's, counts of that of counts, (n,).
        loss: to minimize.
        bias: True if the last parameter is an intercept, which has no penalty.
        limit: absolute value at which predictions are cut off; infinite of counts.
        half: half a count, in units of y.
    """

    z: Array
    y: Array
    loss: Loss
    bias: bool
    limit: float
    half: float

    @classmethod
    def of(cls, records: Records, loss: Loss, high: float) -> LossRecords:
        """Returns the records of a client; ``high`` is the upper end of the public range of counts
        that are stored as shares."""
        z = (records.x - records.center) / records.spread
        limit = records.limit
        if isinstance(loss, Poisson):
            limit = np.inf
        if records.bias:
            z = np.concatenate([z, np.ones((len(z), 1))], 1)
        return replace(cls.of_rows(z, records.y, loss, high), bias=records.bias, limit=limit)

    @classmethod
    def of_rows(cls, z: Array, y: Array, loss: Loss, high: float) -> LossRecords:
        """Returns records with all of their features, without an intercept or a limit."""
        if not isinstance(loss, Poisson):
            return cls(z, y, loss, False, np.inf, 0.0)
        if not loss.mapped:
            return cls(z, y, loss, False, np.inf, 0.5)
        return cls(z, (y + 1) / 2, loss, False, np.inf, 0.5 / high)

    @property
    def worth(self) -> float:
        """Returns the penalty of an intercept that counts as much as one record: one count of those
        of counts, in units of y."""
        if isinstance(self.loss, Poisson):
            return 2 * self.half
        return 1.0

    def spread(self, base: Array) -> float:
        """Returns the root mean square error of the client's own mean, left out one at a time, that
        of counts over the mean; of a single record at most the error of the base, and without an
        intercept that of predicting 0.

        Args:
            base: outputs of the shared model, (n,).
        """
        y = self.y
        predicted = base
        unit = 1.0
        if isinstance(self.loss, Poisson):
            predicted = np.exp(base)
            unit = max(float(y.mean()), self.half / len(y))
        if len(y) == 1:
            return float(min(abs(y[0]), abs(y[0] - predicted[0]))) / unit
        left_out = (y - y.mean()) * len(y) / (len(y) - 1)
        if not (self.bias or isinstance(self.loss, Poisson)):
            left_out = y  # a model without an intercept has no mean
        return float(np.sqrt((left_out**2).mean())) / unit

    def penalties(self, kappa: float) -> Array:
        """Returns the penalties of the parameters for each of the :data:`SLOPE_RIDGES`, (m, p).

        Args:
            kappa: penalty of the intercept, infinite for none of its own.
        """
        penalties = np.repeat(np.minimum(SLOPE_RIDGES, _NONE)[:, None], self.z.shape[1], 1)
        if self.bias:
            penalties[:, -1] = min(kappa, _NONE)
        return penalties

    def targets(self, used: NDArray[np.bool_]) -> Array:
        """Returns the targets of sets of records, (sets, n). A set without a single count has
        half a one in all, since the logarithm of a mean of 0 is none.

        Args:
            used: (sets, n), the records of each set.
        """
        targets = np.repeat(self.y[None], len(used), 0)
        if isinstance(self.loss, Poisson):
            none = ~(used & (targets > 0)).any(1)
            share = self.half / np.maximum(used.sum(1), 1)
            targets = targets + (none * share)[:, None]
        return targets


@np.errstate(all="ignore")
def proximal_change(
    x: Array, y: Array, loss: Loss, shared: Array, mu: float, high: float = 1.0
) -> Array:
    """Returns v - w (p,) of the minimizer v of the mean loss + (mu / 2) ||v - w||^2.

    Args:
        x: features, with a last 1 for a bias, (n, p), n at least 1.
        y: targets as they are stored, (n,).
        loss: see :func:`.losses.average_of_loss`.
        shared: w, (p,).
        mu: strength of the proximal term; of counts in units of the mean that w predicts.
        high: see :func:`.losses.average_of_loss`.
    """
    own = LossRecords.of_rows(x, y, loss, high)
    base = x @ shared
    if isinstance(loss, Poisson):
        mu = mu * float(np.exp(base).mean())
    penalties = np.full((1, len(shared)), mu * len(y))
    change: Array = minimize(own, np.ones((1, len(y)), bool), penalties, base)[0, 0]
    return change


@np.errstate(all="ignore")
def level_change(outputs: Array, y: Array, loss: Loss, high: float = 1.0) -> float:
    """Returns the number which, added to the outputs, minimizes the mean loss.

    Args:
        outputs: of the shared model, (n,), n at least 1.
        y: targets as they are stored, (n,).
        loss: see :func:`.losses.average_of_loss`.
        high: see :func:`.losses.average_of_loss`.
    """
    own = LossRecords.of_rows(np.ones((len(y), 1)), y, loss, high)
    used = np.ones((1, len(y)), bool)
    return float(minimize(own, used, np.zeros((1, 1)), outputs)[0, 0, 0])


def half_range(loss: str | Loss, target_range: tuple[float, float] | None) -> float:
    """Returns half the length of the public range of a real target, in units of the outputs of a
    model. That of counts is logarithmic, from half a one on; those of other losses are 1.

    Args:
        loss: of the run, or its name.
        target_range: of the counts, from 0 to HIGH; None for no public range.
    """
    if not is_counts(loss) or target_range is None:
        return 1.0
    return max(1.0, math.log(2 * target_range[1]) / 2)


def minimize(own: LossRecords, used: NDArray[np.bool_], penalties: Array, offset: Array) -> Array:
    """Returns the minimizers for each set of records and each penalty, (sets, penalties, p).

    Args:
        own: the records.
        used: (sets, n), the records of each set.
        penalties: of the parameters, (m, p).
        offset: outputs of the base to which the model is added, (n,).
    """
    z = own.z
    shape = (len(used), *penalties.shape)
    # one problem for each pair of a set and a penalty
    kept = np.repeat(used, len(penalties), 0).astype(float)
    y = np.repeat(own.targets(used), len(penalties), 0)
    penalties = np.tile(penalties, (len(used), 1))
    corner = _CORNER
    if own.y.std() > 0:
        corner = _CORNER * float(own.y.std())
    models = np.zeros(penalties.shape)
    outputs = np.repeat(offset[None], len(models), 0)

    def objective(of: NDArray[np.int64], point: Array, reached: Array) -> Array:
        losses = kept[of] * _values(own.loss, reached, y[of], corner)
        total: Array = losses.sum(-1) + (penalties[of] * point**2).sum(-1) / 2
        return np.where(np.isfinite(total), total, np.inf)

    left = np.arange(len(models))  # the problems that are not solved yet
    least = objective(left, models, outputs)
    for _ in range(_STEPS):
        first, second = _derivatives(own.loss, outputs[left], y[left], corner)
        slope = (kept[left] * first) @ z + penalties[left] * models[left]
        bend = _products(kept[left] * second, z)
        # the small part keeps a set without records solvable
        bend += (penalties[left] + 1e-9)[..., None] * np.eye(z.shape[1])
        change = -np.linalg.solve(bend, slope[..., None])[..., 0]
        moved = change @ z.T
        if isinstance(own.loss, Poisson):
            most = np.abs(moved).max(-1, keepdims=True)
            share = np.minimum(1.0, _LARGEST / np.maximum(most, 1e-12))
            change *= share
            moved *= share
        before = least[left]
        trying = np.arange(len(left))
        for _ in range(_HALVINGS):
            of = left[trying]
            point = models[of] + change[trying]
            reached = outputs[of] + moved[trying]
            found = objective(of, point, reached)
            falls = found <= least[of]
            done = of[falls]
            models[done] = point[falls]
            outputs[done] = reached[falls]
            least[done] = found[falls]
            trying = trying[~falls]
            if not len(trying):
                break
            change[trying] /= 2
            moved[trying] /= 2
        gain = before - least[left]
        left = left[gain > _TOLERANCE * (1e-3 + np.abs(least[left]))]
        if not len(left):
            break
    return models.reshape(shape)


def _products(weights: Array, z: Array) -> Array:
    """Returns Z^T diag(w) Z for rows w of weights (m, n), (m, p, p)."""
    n, p = z.shape
    products = np.empty((len(weights), p, p))
    # so many rows at a time, for the memory
    size = max(1, _NUMBERS // (n * p))
    for first in range(0, len(weights), size):
        some = slice(first, first + size)
        products[some] = (weights[some, None, :] * z.T) @ z
    return products


def _values(loss: Loss, outputs: Array, y: Array, corner: float) -> Array:
    """Returns the losses that are minimized, of the shape of the outputs (..., n)."""
    errors = outputs - y
    if isinstance(loss, Huber):
        inside = np.minimum(np.abs(errors), loss.delta)
        return inside * (np.abs(errors) - inside / 2)
    if isinstance(loss, Quantile):
        # Hunter and Lange: a logarithm rounds the corner, and the parabolas below touch it
        distance = np.abs(errors)
        rounded = distance - corner * np.log1p(distance / corner)
        return rounded / 2 + (0.5 - loss.level) * errors
    values: Array = np.exp(outputs) - y * outputs
    return values


def _derivatives(loss: Loss, outputs: Array, y: Array, corner: float) -> tuple[Array, Array]:
    """Returns the first derivative of the losses by the outputs, and the second one of a parabola
    that lies above them, or of the loss of counts."""
    errors = outputs - y
    if isinstance(loss, Huber):
        weights = np.minimum(1.0, loss.delta / np.maximum(np.abs(errors), 1e-300))
        return weights * errors, weights
    if isinstance(loss, Quantile):
        weights = 0.5 / (corner + np.abs(errors))
        return weights * errors + 0.5 - loss.level, weights
    means = np.exp(outputs)
    return means - y, means


def distances(loss: Loss, outputs: Array, y: Array) -> Array:
    """Returns the distances of predictions from targets: 0 for a perfect one."""
    if isinstance(loss, Huber):
        return _values(loss, outputs, y, 0.0)
    if isinstance(loss, Quantile):
        errors = y - outputs
        pinball: Array = np.maximum(loss.level * errors, (loss.level - 1) * errors)
        return pinball
    # the deviance of counts, without its factor 2
    logs = np.log(np.maximum(y, 1e-300)) - outputs
    deviance = np.exp(outputs) - y + np.where(y > 0, y * logs, 0.0)
    # it is 0 at least, but for rounding
    return np.maximum(deviance, 0.0)
