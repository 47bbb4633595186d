"""Averages of linear models of a real target, and the votes of clients on their candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .weights import PARTS, Array, averaged, noise_at, prior_of_local, vote_of_errors

INTERCEPT_RIDGES = (0.0, 0.03, 0.3, 3.0, math.inf)
INTERCEPT_WEIGHTS = (0.3, 0.2, 0.2, 0.2, 0.1)
"""Penalties of an own intercept on the shared base, and their prior weights among the models on
that base."""
SLOPE_RIDGES: Array = np.array([0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, np.inf])
"""Penalties of own slopes, of equal prior weight. They are the same on every base, so that models
on the shared base differ from those of ``local`` by the base alone, and not by how far slopes may
follow a few records."""
# the prior of a feature's standard deviation: its value, and the rows that it counts for
_PRIOR_SPREAD = 0.4
_PRIOR_ROWS = 10.0
_ODDS_OF_NUMBERS = 1 / 2  # of the local models without noise, for real targets


@np.errstate(all="ignore")
def average_numbers(
    x: Array,
    y: Array,
    shared: Array,
    bias: bool,
    noise: float,
    limit: float,
    votes: Sequence[float] = (),
) -> tuple[Array, Array]:
    """Averages linear models of a real target for one client.

    Args:
        x: features of its records, (n, d).
        y: targets of its records, (n,).
        shared: [weights..., bias] of the released model, (p,).
        bias: True if the last parameter is a bias; models without one have no intercept of their
            own.
        noise: nu of the released model; infinite for ``local`` alone.
        limit: predictions are cut off at this absolute value; infinite for none.
        votes: log weights of the candidates by the votes of clients, see :attr:`Average.votes`.

    Returns:
        The model (p,), and the four weights, which add up to 1.
    """
    return Candidates.of(x, y, shared, bias, limit).average(len(x), noise, votes)


def vote_size(bias: bool) -> int:
    """Returns the length of a vote: the number of candidates, those of ``local`` as one.

    Args:
        bias: True if the model has a bias.
    """
    return 1 + len(intercept_ridges(bias)) * len(SLOPE_RIDGES)


def intercept_ridges(bias: bool) -> dict[float, float]:
    """Returns the penalties of an own intercept on the shared base, with their prior weights.

    Args:
        bias: True if the model has a bias; without one there is no intercept.
    """
    if not bias:
        return {math.inf: 1.0}
    return dict(zip(INTERCEPT_RIDGES, INTERCEPT_WEIGHTS, strict=True))


@dataclass(frozen=True)
class Candidates:
    """The linear models of a real target among which a client averages, those of ``local`` first.

    Attributes:
        models: (m, p).
        errors: mean squares of the residuals left out, with e / n, (m,).
        evidence: log evidence of each by the client's own records, (m,).
        weights: prior weight of each among those of ``local``, or among the others, (m,).
        parts: (m,), of which of the :data:`PARTS` each is.
        spread: root mean square error of the client's own mean, left out one at a time; of a client
            with a single record at most the error of the shared model.
    """

    models: Array
    errors: Array
    evidence: Array
    weights: Array
    parts: NDArray[np.int64]
    spread: float

    @classmethod
    def of(cls, x: Array, y: Array, shared: Array, bias: bool, limit: float) -> Candidates:
        """Returns the candidates of a client; see :func:`average_numbers`."""
        records = Records.of(x, y, bias, limit)
        kappa_of_own = math.inf  # there is no intercept
        if bias:
            kappa_of_own = 0.0
        own, own_errors = records.fits(np.zeros_like(shared), kappa_of_own, SLOPE_RIDGES)
        models = [own]
        errors = [own_errors]
        ridges = intercept_ridges(bias)
        for kappa in ridges:
            found, found_errors = records.fits(shared, kappa, SLOPE_RIDGES)
            models.append(found)
            errors.append(found_errors)
        floored = np.concatenate(errors) + own_errors.min() / len(x) + 1e-300
        spread = float(own_errors[-1])
        if len(x) == 1:
            # without its only record a client has no mean, and this is the error of predicting 0
            spread = min(spread, float(errors[-1][-1]))
        return cls(
            np.concatenate(models),
            floored,
            -len(x) / 4 * np.log(floored),
            *priors(ridges),
            math.sqrt(spread),
        )

    @np.errstate(all="ignore")
    def average(
        self, records: int, noise: float, votes: Sequence[float] = ()
    ) -> tuple[Array, Array]:
        """Averages the models; see :func:`average_numbers`.

        Args:
            records: n.
            noise: nu of the released model.
            votes: log weights by the votes of clients.

        Returns:
            The model (p,), and the four weights.
        """
        nu = noise_at(noise, self.spread)
        prior = prior_of_local(nu, records, self.models.shape[1], _ODDS_OF_NUMBERS)
        groups = np.where(self.parts == PARTS.index("local"), prior, 1 - prior)
        logs = self.evidence + np.log(groups * self.weights)
        if len(votes):
            logs += np.append(np.full(len(SLOPE_RIDGES), votes[0]), votes[1:])
        return averaged(self.models, logs, self.parts)

    def one(self, choice: int) -> tuple[Array, Array]:
        """Returns one of the models that are voted on, and the weights of the :data:`PARTS`.

        Args:
            choice: its number among the coordinates of a vote; 0 for ``local``, the average of its
                models for a client with a single record.
        """
        if choice == 0:
            return self.average(1, math.inf)
        logs = np.full(len(self.models), -math.inf)
        logs[len(SLOPE_RIDGES) + choice - 1] = 0.0
        return averaged(self.models, logs, self.parts)

    @np.errstate(all="ignore")
    def vote(self, records: int) -> Array:
        """Returns the vote of the client, (:func:`vote_size`,), ``local`` first as one; see
        :func:`.vote_of_errors`.

        Args:
            records: n.
        """
        own = len(SLOPE_RIDGES)
        # the evidence of an average is the mean of the evidences
        local = np.logaddexp.reduce(self.evidence[:own] + np.log(self.weights[:own]))
        errors = np.append(np.exp(-4 / records * local), self.errors[own:])
        return vote_of_errors(errors, records)


def priors(ridges: Mapping[float, float]) -> tuple[Array, NDArray[np.int64]]:
    """Returns the prior weights of the candidates within their group, (m,), and of which of the
    :data:`PARTS` each is, (m,).

    Args:
        ridges: the penalties of an own intercept with their weights, see :func:`intercept_ridges`.
    """
    size = len(SLOPE_RIDGES)
    weights = [np.full(size, 1 / size)]
    parts = [np.full(size, PARTS.index("local"))]
    for kappa, weight in ridges.items():
        part = np.full(size, PARTS.index("ridge"))
        part[-1] = PARTS.index("intercept")  # the last slopes are those of the base
        if kappa == math.inf:
            part[-1] = PARTS.index("shared")
        weights.append(np.full(size, weight / size))
        parts.append(part)
    return np.concatenate(weights), np.concatenate(parts)


@dataclass(frozen=True)
class Records:
    """The records of a client with their standardized features Z = U S V^T.

    Attributes:
        x: features, (n, d).
        y: targets, (n,).
        bias: True if models have an intercept.
        limit: absolute value at which predictions are cut off.
        center: mean of the features, (d,); zeros without a bias.
        spread: s, by which features are divided, (d,).
        u: (n, r) of the decomposition.
        s: singular values, (r,).
        vt: (r, d) of the decomposition.
    """

    x: Array
    y: Array
    bias: bool
    limit: float
    center: Array
    spread: Array
    u: Array
    s: Array
    vt: Array

    @classmethod
    def of(cls, x: Array, y: Array, bias: bool, limit: float) -> Records:
        n, d = x.shape
        if bias:
            center = x.mean(0)
        else:
            center = np.zeros(d)
        spread = np.sqrt((n * x.var(0) + _PRIOR_ROWS * _PRIOR_SPREAD**2) / (n + _PRIOR_ROWS))
        u, s, vt = np.linalg.svd((x - center) / spread, full_matrices=False)
        return cls(x, y, bias, limit, center, spread, u, s, vt)

    def fits(self, base: Array, kappa: float, lambdas: Array) -> tuple[Array, Array]:
        """Fits an intercept and slopes of the client's own on a base, for each penalty of the
        slopes.

        Args:
            base: [weights..., bias] of the base, (p,).
            kappa: penalty of the intercept, at least 0; infinite leaves that of the base.
            lambdas: penalties of the slopes, (m,); infinite leaves those of the base.

        Returns:
            The models (m, p), and the mean squares of their residuals left out one at a time, (m,).
        """
        n, d = self.x.shape
        residual = self.y - self.x @ base[:d]
        if self.bias:
            residual = residual - base[d]
        along = self.u.T @ residual
        shrunk = self.s**2 / (self.s**2 + lambdas[:, None])  # (m, r)
        intercept = residual.sum() / (n + kappa)
        fit = intercept + (shrunk * along) @ self.u.T  # (m, n)
        free = 1.0 - 1.0 / (n + kappa) - shrunk @ (self.u**2).T
        left_out = np.where(free > 1e-9, (residual - fit) / np.maximum(free, 1e-9), residual)
        predicted = np.clip(self.y - left_out, -self.limit, self.limit)
        errors = ((self.y - predicted) ** 2).mean(1)
        slopes = (
            base[:d] + (shrunk / np.where(self.s > 0, self.s, 1.0) * along) @ self.vt / self.spread
        )
        if not self.bias:
            return slopes, errors
        offset = base[d] + intercept - (slopes - base[:d]) @ self.center
        return np.concatenate([slopes, offset[:, None]], 1), errors
