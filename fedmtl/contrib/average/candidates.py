"""The candidates of a client of a run, its vote on them, and the choice by the votes of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from ...algorithms.base import Problem
from ...algorithms.linear.data import prepared, records_of
from ...local.losses import is_of_numbers
from .classes import CLASS_VOTES, ClassCandidates, fold_of
from .losses import candidates_of_loss
from .numbers import Candidates, vote_size
from .weights import Array

_KEPT_NUMBERS = 1 << 18  # in one model of every client, up to which its candidates are kept
Kept = TypeVar("Kept", Candidates, ClassCandidates)
_BY_CHANCE = 1 / 740  # of noise alone choosing a model for single records


def candidates_of(problem: Problem, client: int, shared: Array, bias: bool) -> Candidates:
    """Returns the candidates of a client for the loss of a real target of a run.

    Args:
        problem: of the run.
        client: its position in the data, with one record or more.
        shared: the parameters of the released model, (p,).
        bias: True if the model has a bias.
    """
    x, y = records_of(problem, client)
    if not is_of_numbers(problem.loss):
        return Candidates.of(x, y, shared, bias, problem.data.limit)

    def build() -> Candidates:
        fold = fold_of(problem, client, len(x))
        limit = problem.data.limit
        high = high_of(problem)
        return candidates_of_loss(x, y, problem.loss, shared, bias, fold, limit=limit, high=high)

    return _kept(problem, (problem.loss, client, shared.tobytes()), build)


def class_candidates_of(
    problem: Problem, client: int, shared: Array, bias: bool, *, alone: bool = False
) -> ClassCandidates:
    """Returns the candidates of a client for the classes of a run.

    Args:
        problem: of the run.
        client: its position in the data, with one record or more.
        shared: the parameters of the released model, (p,).
        bias: True if the model has biases.
        alone: True if the others than ``local`` have no weight.
    """

    def build() -> ClassCandidates:
        x, y = records_of(problem, client)
        fold = fold_of(problem, client, len(x))
        return ClassCandidates.of(x, y.astype(np.int64), shared, bias, fold, alone=alone)

    return _kept(problem, (client, shared.tobytes(), alone), build)


def _kept(problem: Problem, key: tuple[Hashable, ...], build: Callable[[], Kept]) -> Kept:
    """Returns the candidates of a client, which are the same in both rounds of votes and in the
    average after them. Those of many clients or of large models are built anew each time, for the
    memory: the numbers of clients and of parameters decide."""
    if problem.clients * problem.dimension > _KEPT_NUMBERS:
        return build()
    return prepared(problem, ("candidates", *key), build)


def vote_on(problem: Problem, client: int, shared: Array, bias: bool) -> Array:
    """Returns the vote of a client on its candidates, (:func:`votes_on`,).

    Args:
        problem: of the run.
        client: its position in the data, with one record or more.
        shared: the parameters of the released model, (p,).
        bias: True if the model has a bias.
    """
    count = int(problem.data.train.counts[client])
    if problem.data.classes is None:
        return candidates_of(problem, client, shared, bias).vote(count)
    return class_candidates_of(problem, client, shared, bias).vote(count)


def votes_on(problem: Problem, bias: bool) -> int:
    """Returns the length of a vote: the number of candidates, those of ``local`` as one.

    Args:
        problem: of the run.
        bias: True if the model has a bias.
    """
    if problem.data.classes is None:
        return vote_size(bias)
    return CLASS_VOTES


def high_of(problem: Problem) -> float:
    """Returns the upper end of the public range of the target; 1 without one."""
    if problem.data.target_range is None:
        return 1.0
    return problem.data.target_range[1]


def choice_by_votes(votes: Sequence[float], noise: float) -> int:
    """Returns the number of the model with the largest mean vote; 0, that of ``local``, if noise
    alone explains how far that vote is above the vote for ``local``.

    Each difference of two votes has sqrt(2) times the standard deviation of one, and the largest of
    M - 1 such differences is above the level by chance M - 1 times as often as one of them, at
    most (Bonferroni).

    Args:
        votes: mean votes, (M,), that for ``local`` first.
        noise: standard deviation of the noise of one.
    """
    best = max(range(len(votes)), key=lambda place: votes[place])
    level = NormalDist().inv_cdf(1 - _BY_CHANCE / (len(votes) - 1))
    if votes[best] - votes[0] > level * math.sqrt(2) * noise:
        return best
    return 0
