"""The weights of the models that a client averages: their prior, and the average itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
PARTS = ("local", "shared", "intercept", "ridge")
"""Sources of a model: the client's records; the released model as it is, with an intercept of the
client's own, or with slopes of its own."""
_LOUD = 4.0  # the noise that doubles the odds of local models for a client with few records
_USUAL_SPREAD = 0.3  # of a client's targets, in units of half their public range


def prior_of_local(noise: float, records: int, parameters: int, odds: float) -> float:
    """Returns the prior weight of the models of a client's own records.

    Args:
        noise: nu, or the client's nu_i; infinite for a weight of 1.
        records: n.
        parameters: p.
        odds: those without noise.

    Returns:
        A number from 0 to 1, the share of all models of the client.
    """
    odds = odds * (1 + (noise / _LOUD) ** 2 * max(records / parameters, 1.0))
    return 1 - 1 / (1 + odds)


def noise_at(noise: float, spread: float) -> float:
    """Returns the noise nu_i of a client, in units of its own targets.

    Args:
        noise: nu, in units of half the public range of the target.
        spread: s_i, the root mean square error of the client's mean, left out one at a time, in the
            same units.

    Returns:
        nu_i, at least nu; infinite for targets that do not differ at all, if there is noise.
    """
    if noise == 0:
        return 0.0
    if spread == 0:
        return math.inf
    return noise * max(1.0, _USUAL_SPREAD / spread)


@np.errstate(divide="ignore")  # of a prior of 0
def log_prior(
    parts: NDArray[np.int64], prior: float, others: Sequence[float] = (5 / 9, 2 / 9, 2 / 9)
) -> Array:
    """Returns the logarithms of the prior weights of models of classes, (m,).

    Models of a part have equal shares of its prior.

    Args:
        parts: (m,), of which of the :data:`PARTS` each model is.
        prior: weight of ``local``.
        others: shares of the other parts in the rest of the prior.
    """
    priors = np.array([prior, *(np.array(others) * (1 - prior))])
    logs: Array = np.log(priors / np.maximum(np.bincount(parts, minlength=len(PARTS)), 1))[parts]
    return logs


@np.errstate(all="ignore")  # of models that are not finite
def averaged(models: Array, logs: Array, parts: NDArray[np.int64]) -> tuple[Array, Array]:
    """Averages models by their log weights.

    Args:
        models: (m, p).
        logs: log weight of each model, (m,), with that of its prior.
        parts: (m,), of which of the :data:`PARTS` each model is.

    Returns:
        The average (p,), and the weight of each of the :data:`PARTS`, (4,).
    """
    finite = np.isfinite(models).all(1) & np.isfinite(logs)
    weights = np.where(finite, np.exp(logs - logs[finite].max(initial=-np.inf)), 0.0)
    weights /= weights.sum()
    shares: Array = np.bincount(parts, weights, minlength=len(PARTS)).astype(float)
    return weights @ np.where(finite[:, None], models, 0.0), shares


@np.errstate(all="ignore")  # of errors that are not finite
def vote_of_errors(errors: Array, records: int) -> Array:
    """Returns the vote of a client on its candidates: how far the error of each is below their
    mean, as a vector of length 1.

    Args:
        errors: of the candidates for records that were left out, (m,).
        records: n; a client with a single one knows nothing without it, and casts no vote.

    Returns:
        (m,); zeros of a single record, if a candidate is not finite, or if all are alike.
    """
    gains = errors.mean() - errors
    length = np.linalg.norm(gains)
    if records == 1 or not 0 < length < np.inf:
        return np.zeros_like(gains)
    direction: Array = gains / length
    return direction
