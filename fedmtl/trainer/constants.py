"""Errors of constant predictions, with which those of models are compared."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ..algorithms.base import Problem
from ..data.rows import take
from ..local.losses import (
    LOSSES,
    Loss,
    Quantile,
    binary_cross_entropy,
    cross_entropy,
    half_mse,
    mse,
)
from .metrics import kind_of

_CHUNK = 4096  # test examples in memory at a time


def constant_loss(problem: Problem) -> float | None:
    """Returns the least mean over clients of the test loss of a model that has the same outputs for
    every example; None for a loss of the caller's own, of which the least has no closed form.

    It is the entropy of the mean label for cross-entropies, and the variance of the targets for
    squared errors.
    """
    test = problem.data.test
    loss = problem.loss
    if loss not in LOSSES.values():
        return None
    # The mean over clients of means over examples weighs an example by its client's number of them.
    weights = (1 / test.counts.double() / (test.counts > 0).sum()).repeat_interleave(test.counts)
    mean = torch.zeros(())
    square = torch.zeros(())
    for index in torch.arange(len(weights)).split(_CHUNK):
        y = take(test.y, index.to(test.y.device)).cpu()
        if loss is cross_entropy:
            y = F.one_hot(y.long(), problem.data.spec.classes or 0)
        y = y.double()
        mean = mean + torch.tensordot(weights[index], y, 1)
        square = square + torch.tensordot(weights[index], y * y, 1)
    if loss is cross_entropy:
        return float(torch.special.entr(mean).sum())
    if loss is binary_cross_entropy:
        return float((torch.special.entr(mean) + torch.special.entr(1 - mean)).mean())
    return float((square - mean.square()).mean()) * (0.5 if loss is half_mse else 1.0)


def own_constants(problem: Problem) -> dict[str, float]:
    """Returns each client's main metric of predicting a constant, by id: the mean of its own
    training targets as they are stored, with the loss of a quantile their quantile.

    It is empty for other data than one real target an example. Clients without records on both
    sides are left out.
    """
    data = problem.data
    loss = problem.loss
    if kind_of(data.spec) != "number":
        return {}
    found = {}
    for client in ((data.train.counts > 0) & (data.test.counts > 0)).nonzero()[:, 0].tolist():
        own, tested = (
            part.y[slice(*part.offsets[client : client + 2].tolist())].double().cpu()
            for part in (data.train, data.test)
        )
        constant = own.mean()
        error: Loss = mse
        if isinstance(loss, Quantile):
            least = np.quantile(own.numpy(), loss.level, method="inverted_cdf")
            constant = torch.tensor(float(least), dtype=torch.float64)
            error = loss
        predictions = data.in_units(constant).expand(len(tested))
        found[data.ids[client]] = float(error(predictions, data.in_units(tested)).mean())
    return found
