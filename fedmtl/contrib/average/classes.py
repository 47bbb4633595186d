"""Averages of linear models of classes, by their predictions of records in five folds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...algorithms.linear.classes import fit_classes, flat, layers, log_likelihoods
from ...algorithms.problem import Problem
from ...random import derive_key, keyed_bits
from .weights import PARTS, Array, averaged, log_prior, vote_of_errors

PULLS: Array = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
"""Strengths lambda of the pull of the candidates."""
FOLDS = 5
STEPS = 100  # of a fit
ODDS_OF_CLASSES = 1 / 9  # of the local models without noise
LIKELIHOOD = 0.1  # weight of the log likelihood beside the hits
CLASS_VOTES = len(PULLS) + 2
"""Length of a vote: the models of ``local`` as one, those pulled to the shared model, and that
model."""


@dataclass(frozen=True)
class ClassCandidates:
    """The linear models of classes among which a client averages, those of ``local`` first.

    Attributes:
        models: (m, p), parameters [weights (C, d), biases (C)]; C = 1 for logistic models.
        scores: of the records of each fold by the fit without them, hits + .1 log likelihood, (m,).
        parts: (m,), of which of the :data:`PARTS` each is.
    """

    models: Array
    scores: Array
    parts: NDArray[np.int64]

    @classmethod
    @np.errstate(all="ignore")
    def of(
        cls,
        x: Array,
        y: NDArray[np.int64],
        shared: Array,
        bias: bool,
        fold: NDArray[np.int64],
        *,
        alone: bool = False,
    ) -> ClassCandidates:
        """Returns the candidates of a client.

        Args:
            x: (n, d), its records.
            y: (n,), their labels.
            shared: (p,), the parameters of the released model.
            bias: True if the model has biases.
            fold: (n,), the fold of each record, see :func:`fold_of`.
            alone: True if the others than ``local`` have no weight and are not fitted.
        """
        if bias:
            rows = np.concatenate([x, np.ones((len(x), 1))], 1)
        else:
            rows = x
        start = layers(shared, rows.shape[1], bias)
        bases = np.stack([np.zeros_like(start)] * len(PULLS) + [start] * (len(PULLS) + 1))
        pulls = np.concatenate([PULLS, PULLS, [np.inf]])
        trained = len(bases) - 1
        if alone:
            trained = len(PULLS)
        used = np.concatenate(
            [fold[None] != np.arange(FOLDS)[:, None], np.ones((1, len(x)), dtype=bool)]
        )
        fits = np.stack([bases] * (FOLDS + 1))  # of the records outside of each fold, then of all
        for row, fit in zip(used, fits, strict=True):
            if row.any():
                fit[:trained] = fit_classes(
                    rows[row], y[row], bases[:trained], pulls[:trained], STEPS
                )
        scores = np.zeros(len(bases))
        for row, fit in zip(~used[:FOLDS], fits, strict=False):
            log_likelihood, hits = log_likelihoods(rows[row], y[row], fit)
            scores += hits.sum(1) + LIKELIHOOD * log_likelihood.sum(1)
        parts = np.repeat(
            [PARTS.index(name) for name in ("local", "ridge", "shared")],
            [len(PULLS), len(PULLS), 1],
        )
        return cls(flat(fits[-1], bias), scores, parts)

    def average(self, prior: float, votes: Sequence[float] = ()) -> tuple[Array, Array]:
        """Averages the models.

        Args:
            prior: weight of ``local``, see :func:`.prior_of_local`.
            votes: log weights of the candidates by the votes of clients, see
                :attr:`Average.votes`.

        Returns:
            The model (p,), and the weights of the :data:`PARTS`, which add up to 1.
        """
        logs = self.scores + log_prior(self.parts, prior)
        if len(votes):
            logs = logs + np.append(np.full(len(PULLS), votes[0]), votes[1:])
        return averaged(self.models, logs, self.parts)

    @np.errstate(all="ignore")
    def vote(self, records: int) -> Array:
        """Returns the vote of the client, (:data:`CLASS_VOTES`,), ``local`` first as one; see
        :func:`.vote_of_errors`.

        The error of a candidate is its mean score below a perfect one, and that of ``local`` has
        the mean weight of its models.

        Args:
            records: n.
        """
        own = len(PULLS)
        local = np.logaddexp.reduce(self.scores[:own]) - math.log(own)
        scores = np.append(local, self.scores[own:])
        return vote_of_errors(1 - scores / records, records)


def fold_of(problem: Problem, client: int, count: int) -> NDArray[np.int64]:
    """Returns the fold of each record of a client, by a permutation that its id and its number of
    records decide.

    Args:
        problem: of the run, for the seed and the client's key.
        client: its position in the data.
        count: n, the number of its records.

    Returns:
        int64 (n,), from 0 to :data:`FOLDS` - 1.
    """
    bits = keyed_bits(
        derive_key(problem.seed, "folds"), problem.data.keys[client], 0, torch.arange(count)
    )
    folds: NDArray[np.int64] = bits.argsort().argsort().numpy() % FOLDS
    return folds
