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

Beside them a client averages the same models on another base, the output of the shared model that
a run has released for this loss, with five penalties of the intercept; see the head of the package
for their prior and for the votes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...local.losses import Loss, Quantile
from .classes import FOLDS
from .fits import LossRecords, distances, minimize
from .numbers import Candidates, Records, intercept_ridges, priors
from .weights import Array


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
    own = LossRecords.of(records, loss, high)
    models, errors = _candidates(own, fold, own.penalties(0.0), np.zeros(len(y)))
    logs = -len(y) / 4 * np.log(errors + errors.min() / len(y) + 1e-300)
    weights = np.exp(logs - logs.max())
    return _in_features(weights @ models / weights.sum(), records)


@np.errstate(all="ignore")
def candidates_of_loss(
    x: Array,
    y: Array,
    loss: Loss,
    shared: Array,
    bias: bool,
    fold: NDArray[np.int64],
    limit: float = np.inf,
    high: float = 1.0,
) -> Candidates:
    """Returns the candidates of a client for a loss of real targets: those of ``local`` as in
    :func:`average_of_loss`, then those on the shared model.

    Args:
        x: see :func:`average_of_loss`.
        y: see :func:`average_of_loss`.
        loss: see :func:`average_of_loss`.
        shared: [weights..., bias] of the released model, (p,), which was trained for the loss.
        bias: see :func:`average_of_loss`.
        fold: see :func:`average_of_loss`.
        limit: see :func:`average_of_loss`.
        high: see :func:`average_of_loss`.
    """
    n, d = x.shape
    records = Records.of(x, y, bias, limit)
    own = LossRecords.of(records, loss, high)
    base = x @ shared[:d]
    if bias:
        base = base + shared[d]
    models, errors = _candidates(own, fold, own.penalties(0.0), np.zeros(n))
    least = errors.min()  # of ``local``, also for models on the shared base
    found = [_in_features(models, records)]
    ridges = intercept_ridges(bias)
    on_shared = np.concatenate([own.penalties(own.worth * kappa) for kappa in ridges])
    models, others = _candidates(own, fold, on_shared, base)
    found.append(shared + _in_features(models, records))
    errors = np.concatenate([errors, others]) + least / n + 1e-300
    return Candidates(
        np.concatenate(found),
        errors,
        -n / 4 * np.log(errors),
        *priors(ridges),
        own.spread(base),
    )


def _candidates(
    own: LossRecords, fold: NDArray[np.int64], penalties: Array, base: Array
) -> tuple[Array, Array]:
    """Returns the models (m, p) for each penalty, and the mean distances of predictions from the
    records of each fold by the fit without them, (m,).

    Args:
        own: the records.
        fold: (n,), the fold of each record.
        penalties: (m, p).
        base: outputs of the base, (n,).
    """
    y = own.y
    outside = fold[None] != np.arange(FOLDS)[:, None]
    errors = np.zeros(len(penalties))
    fits = minimize(own, outside, penalties, base)
    for kept, models in zip(outside, fits, strict=True):
        outputs = (base[~kept] + (models @ own.z[~kept].T)).clip(-own.limit, own.limit)
        errors += distances(own.loss, outputs, y[~kept]).sum(1)
    errors /= len(y)
    if isinstance(own.loss, Quantile):
        errors = errors**2
    return minimize(own, np.ones((1, len(y)), bool), penalties, base)[0], errors


def _in_features(models: Array, records: Records) -> Array:
    """Returns models (..., p) of standardized features as models of the features."""
    d = records.x.shape[1]
    slopes: Array = models[..., :d] / records.spread
    if not records.bias:
        return slopes
    offset = models[..., -1] - slopes @ records.center
    return np.concatenate([slopes, offset[..., None]], -1)
