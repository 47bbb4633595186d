"""Averages of linear models of classes, by their predictions of records in five folds."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...algorithms.linear.classes import fit_classes, flat, layers, log_likelihoods
from ...algorithms.problem import Problem
from ...random import derive_key, keyed_bits
from .weights import PARTS, Array, averaged, log_prior

PULLS: Array = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
"""Strengths lambda of the pull of the candidates."""
FOLDS = 5
STEPS = 100  # of a fit
ODDS_OF_CLASSES = 1 / 9  # of the local models without noise
LIKELIHOOD = 0.1  # weight of the log likelihood beside the hits


@np.errstate(all="ignore")
def average_classes(
    x: Array, y: NDArray[np.int64], shared: Array, bias: bool, prior: float, fold: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Averages linear models of classes for one client.

    Args:
        x: (n, d), its records.
        y: (n,), their labels.
        shared: (p,), the parameters [weights (C, d), biases (C)] of the released model; C = 1 for a
            logistic one.
        bias: True if the model has biases.
        prior: weight of ``local``, see :func:`.prior_of_local`.
        fold: (n,), the fold of each record, see :func:`fold_of`.

    Returns:
        The model (p,), and the weights of the :data:`PARTS`, which add up to 1.
    """
    if bias:
        rows = np.concatenate([x, np.ones((len(x), 1))], 1)
    else:
        rows = x
    start = layers(shared, rows.shape[1], bias)
    bases = np.stack([np.zeros_like(start)] * len(PULLS) + [start] * (len(PULLS) + 1))
    pulls = np.concatenate([PULLS, PULLS, [np.inf]])
    trained = len(bases) - 1
    if prior == 1:
        trained = len(PULLS)  # the others have no weight
    used = np.concatenate(
        [fold[None] != np.arange(FOLDS)[:, None], np.ones((1, len(x)), dtype=bool)]
    )
    fits = np.stack([bases] * (FOLDS + 1))  # of the records outside of each fold, then of all
    for row, fit in zip(used, fits, strict=True):
        if row.any():
            fit[:trained] = fit_classes(rows[row], y[row], bases[:trained], pulls[:trained], STEPS)
    scores = np.zeros(len(bases))
    for row, fit in zip(~used[:FOLDS], fits, strict=False):
        log_likelihood, hits = log_likelihoods(rows[row], y[row], fit)
        scores += hits.sum(1) + LIKELIHOOD * log_likelihood.sum(1)
    parts = np.repeat(
        [PARTS.index(name) for name in ("local", "ridge", "shared")], [len(PULLS), len(PULLS), 1]
    )
    return averaged(flat(fits[-1], bias), scores + log_prior(parts, prior), parts)


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
