"""Scores of the repetitions of a private search, and the choice of the best."""

from __future__ import annotations

import torch
from torch import Tensor


def client_scores(values: Tensor, bound: float | None) -> Tensor:
    """Returns each client's score in [0, 1].

    Args:
        values: (n,) test accuracies, or mean errors if there is a bound.
        bound: b of ``1 - min(error, b) / b``, or None for accuracies.

    Returns:
        (n,) float64; 0 for a value that is not a number.
    """
    wide = values.double()
    if bound is None:
        scores = wide.clamp(0.0, 1.0)
    else:
        scores = 1.0 - wide.clamp(0.0, bound) / bound
    return torch.nan_to_num(scores, nan=0.0)


def best_of(scores: list[float]) -> int | None:
    """Returns the first repetition with the highest score, or None without one.

    Repetitions have one law and are independent, so the first of several equal ones has the law of
    one drawn at random: the rule that breaks ties tells nothing.
    """
    if not scores:
        return None
    return max(range(len(scores)), key=scores.__getitem__)
