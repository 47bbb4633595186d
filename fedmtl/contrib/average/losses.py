"""Averages of linear models of a real target for the losses of Huber, of a quantile and of counts.

They are the models of a client's own records, the baseline ``local``: an own intercept, and slopes
under each of the penalties lambda of ``local`` for squared errors,

    min over a, v of  sum_i l(a + v . z_i, y_i) + (lambda / 2) ||v||^2,

with z_i the standardized features of :class:`~.numbers.Records`. Each lambda is judged by the mean
loss e of records that are left out, in five folds, and the models are averaged with the weights

    w_m  ~  (e_m + e / n)^(-n / 4),

e being the least of them. That is the weight of squared errors, see the head of the package.
Huber's loss and the deviance of counts are squares near a perfect prediction. The loss of a
quantile is an absolute value there, so that its square stands for e_m: the likelihood of n
asymmetric Laplace errors whose scale is the most plausible one is e_m^(-n), again tempered by 2.

The minimizer is found by Newton steps, in which a loss without a useful second derivative has that
of a parabola that touches it and lies above it (Hunter and Lange, "Quantile regression via an MM
algorithm", J. Computational and Graphical Statistics 2000). A step is halved until the objective
falls, so none diverges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...local.losses import Huber, Loss, Poisson, Quantile
from .classes import FOLDS
from .numbers import SLOPE_RIDGES, Records
from .weights import Array

_STEPS = 100
_SHARES: Array = np.array([1.0, 0.5, 0.25, 0.1, 0.02, 0.0])  # of a step, of which the best is taken
_LARGEST = 2.0  # change of the logarithm of a mean in a step
_TOLERANCE = 1e-9  # of the objective, relative
_CORNER = 1e-3  # of a quantile's loss, in units of the spread of the targets
_NONE = 1e12  # penalty of slopes that are left out


@dataclass(frozen=True)
class Own:
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
    def of(cls, records: Records, loss: Loss, high: float) -> Own:
        """Returns the records of a client; ``high`` is the upper end of the public range of counts
        that are stored as shares."""
        z = (records.x - records.center) / records.spread
        if records.bias:
            z = np.concatenate([z, np.ones((len(z), 1))], 1)
        if not isinstance(loss, Poisson):
            return cls(z, records.y, loss, records.bias, records.limit, 0.0)
        if not loss.mapped:
            return cls(z, records.y, loss, records.bias, np.inf, 0.5)
        return cls(z, (records.y + 1) / 2, loss, records.bias, np.inf, 0.5 / high)

    def targets(self, used: NDArray[np.bool_]) -> Array:
        """Returns the targets of sets of records, (sets, 1, n). A set without a single count has
        half a one in all, since the logarithm of a mean of 0 is none.

        Args:
            used: (sets, n), the records of each set.
        """
        targets = np.repeat(self.y[None], len(used), 0)
        if isinstance(self.loss, Poisson):
            none = ~(used & (targets > 0)).any(1)
            share = self.half / np.maximum(used.sum(1), 1)
            targets = targets + (none * share)[:, None]
        return targets[:, None]


@np.errstate(all="ignore")
def average_of_loss(
    x: Array,
    y: Array,
    loss: Loss,
    bias: bool,
    fold: NDArray[np.int64],
    limit: float = np.inf,
    high: float = 1.0,
) -> Array:
    """Averages linear models of a client's own records for a loss of real targets.

    Args:
        x: features, (n, d), n at least 1.
        y: targets as they are stored, (n,).
        loss: :class:`~fedmtl.local.losses.Huber`, :class:`~fedmtl.local.losses.Quantile` or
            :class:`~fedmtl.local.losses.Poisson`.
        bias: True if the last parameter is a bias; models without one have no intercept.
        fold: (n,), the fold of each record, see :func:`.classes.fold_of`.
        limit: predictions are cut off at this absolute value; infinite for none.
        high: the upper end of the public range of counts that are stored as shares.

    Returns:
        The model (p,).
    """
    records = Records.of(x, y, bias, limit)
    own = Own.of(records, loss, high)
    used = np.concatenate([fold[None] != np.arange(FOLDS)[:, None], np.ones((1, len(y)), bool)])
    # every penalty for the records outside of each fold, then for all
    fits = _minimize(own, used)
    errors = np.zeros(len(SLOPE_RIDGES))
    for kept, models in zip(used[:FOLDS], fits, strict=False):
        outputs = (models @ own.z[~kept].T).clip(-own.limit, own.limit)
        errors += _distances(loss, outputs, own.y[~kept]).sum(1)
    errors /= len(y)
    logs = -len(y) / 4 * np.log(errors + errors.min() / len(y) + 1e-300)
    weights = np.exp(logs - logs.max())
    model: Array = weights @ fits[-1] / weights.sum()
    slopes: Array = model[: x.shape[1]] / records.spread
    if not bias:
        return slopes
    return np.append(slopes, model[-1] - slopes @ records.center)


def _minimize(own: Own, used: NDArray[np.bool_]) -> Array:
    """Returns the minimizers for each set of records and each penalty, (sets, penalties, p).

    Args:
        own: the records.
        used: (sets, n), the records of each set.
    """
    z = own.z
    p = z.shape[1]
    penalties = np.repeat(np.minimum(SLOPE_RIDGES, _NONE)[:, None], p, 1)
    if own.bias:
        penalties[:, -1] = 0.0
    kept = used[:, None].astype(float)  # (sets, 1, n)
    y = own.targets(used)
    corner = _CORNER
    if own.y.std() > 0:
        corner = _CORNER * float(own.y.std())
    models = np.zeros((len(used), len(SLOPE_RIDGES), p))

    def objective(point: Array) -> Array:
        losses = kept * _values(own.loss, point @ z.T, y, corner)
        total: Array = losses.sum(-1) + (penalties * point**2).sum(-1) / 2
        return total

    least = objective(models)
    for _ in range(_STEPS):
        first, second = _derivatives(own.loss, models @ z.T, y, corner)
        slope = (kept * first) @ z + penalties * models
        # one set at a time, for the memory; the small part keeps a set without records solvable
        bend = np.stack([z.T @ (weights[..., None] * z) for weights in kept * second])
        bend += (penalties + 1e-9)[..., None] * np.eye(p)
        change = -np.linalg.solve(bend, slope[..., None])[..., 0]
        if isinstance(own.loss, Poisson):
            moved = np.abs(change @ z.T).max(-1, keepdims=True)
            change *= np.minimum(1.0, _LARGEST / np.maximum(moved, 1e-12))
        tried = np.stack([objective(models + share * change) for share in _SHARES])
        best = np.where(np.isfinite(tried), tried, np.inf).argmin(0)
        models = models + _SHARES[best][..., None] * change
        before = least
        least = np.take_along_axis(tried, best[None], 0)[0]
        if (before - least <= _TOLERANCE * (1e-3 + np.abs(least))).all():
            break
    return models


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


def _distances(loss: Loss, outputs: Array, y: Array) -> Array:
    """Returns the distances of predictions from targets: 0 for a perfect one, a square near it."""
    if isinstance(loss, Huber):
        return _values(loss, outputs, y, 0.0)
    if isinstance(loss, Quantile):
        errors = y - outputs
        pinball: Array = np.maximum(loss.level * errors, (loss.level - 1) * errors)
        return pinball**2
    # the deviance of counts, without its factor 2
    logs = np.log(np.maximum(y, 1e-300)) - outputs
    deviance: Array = np.exp(outputs) - y + np.where(y > 0, y * logs, 0.0)
    return deviance
