"""Averages of networks of classes, along two paths of local training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...algorithms.client_batch import AFTER, ClientBatch
from ...algorithms.problem import Problem
from ...data.examples import Examples
from ...data.rows import offsets_of, select
from ...local import BackoffSGD
from .classes import FOLDS, LIKELIHOOD, fold_of
from .weights import PARTS, Array, averaged, log_prior

_PATHS = ((True, 16), (True, 64), (False, 0), (False, 1), (False, 4), (False, 16), (False, 64))
"""Candidates of a network: True if they start from the public starting point, and their steps."""
_SPLIT = 0.5, 0.0, 0.5  # of the prior that the local ones leave, by part
_AVERAGE_ROUND = AFTER - 2


def average_networks(problem: Problem, starts: Tensor, clients: Tensor, prior: float) -> Tensor:
    """Returns clients' averages of networks of classes, followed by the weights of the
    :data:`PARTS`, (k, D + 4).

    Args:
        problem: the data, the model and the loss.
        starts: (k, D), the released model for each.
        clients: int64 (k,), each with two records or more.
        prior: weight of ``local``.
    """
    train = problem.data.train
    rows = [
        torch.arange(*train.offsets[client : client + 2].tolist()) for client in clients.tolist()
    ]
    folds = [
        torch.from_numpy(fold_of(problem, client, len(own)))
        for client, own in zip(clients.tolist(), rows, strict=True)
    ]
    scores = np.zeros((len(clients), len(_PATHS)))
    for number in range(FOLDS):
        kept = [own[fold != number] for own, fold in zip(rows, folds, strict=True)]
        models = _paths(problem, starts, clients, kept, prior)
        for place, (own, fold) in enumerate(zip(rows, folds, strict=True)):
            if len(left_out := own[fold == number]):
                scores[place] += _hits(problem, models[place], left_out)
    final = _paths(problem, starts, clients, rows, prior).double().cpu().numpy()
    parts = np.array([PARTS.index(_part_of(local, steps)) for local, steps in _PATHS])
    averages = []
    for candidates, logs in zip(final, scores, strict=True):
        _, shares = averaged(candidates, logs + log_prior(parts, prior, _SPLIT), parts)
        path = (parts == 0) == (shares[0] > 0.5)
        taken = logs[path] + log_prior(parts[path], prior, _SPLIT)
        averages.append(np.concatenate(averaged(candidates[path], taken, parts[path])))
    return torch.from_numpy(np.stack(averages)).to(starts)


def _part_of(local: bool, steps: int) -> str:
    """Returns the part of a candidate of a network."""
    if local:
        return "local"
    if steps:
        return "ridge"
    return "shared"


def _paths(
    problem: Problem, starts: Tensor, clients: Tensor, rows: Sequence[Tensor], prior: float
) -> Tensor:
    """Returns the candidates of clients by some of their training records, (k, m, D); the released
    model for those without prior weight.

    Args:
        problem: see :func:`average_networks`.
        starts: see :func:`average_networks`.
        clients: see :func:`average_networks`.
        prior: see :func:`average_networks`.
        rows: the records of each client, by their number among all.
    """
    counts = torch.zeros(problem.clients, dtype=torch.int64)
    counts[clients] = torch.tensor([len(own) for own in rows])
    index = torch.cat([rows[place] for place in clients.argsort()]).to(problem.data.train.x.device)
    part = Examples(
        select(problem.data.train.x, index), select(problem.data.train.y, index), offsets_of(counts)
    )
    data = replace(problem.data, train=part, verify=False)
    c = ClientBatch(
        replace(problem, data=data, protects_records=False, tally=None),
        clients,
        round=_AVERAGE_ROUND,
    )
    models = []
    for local, steps in _PATHS:
        trained = starts
        if local:
            trained = c.train(BackoffSGD(steps=steps), problem.initial)
        elif steps and prior < 1:
            trained = c.train(BackoffSGD(steps=steps), starts)
        models.append(trained)
    return torch.stack(models, 1)


def _hits(problem: Problem, models: Tensor, index: Tensor) -> Array:
    """Returns hits and a tenth of the log likelihood of models (m, D) on training records ``index``
    (n,): (m,)."""
    x, y = problem.data.gather("train", index, dtype=models.dtype, device=models.device)
    stack = problem.executor.stack
    outputs = torch.cat([stack.predict(stack.load(model, 1), x[None]) for model in models]).double()
    logs = (
        outputs.log_softmax(-1)
        .gather(-1, y.expand(len(models), -1)[..., None])[..., 0]
        .clamp(min=-27.6)
    )
    scores: Array = ((outputs.argmax(-1) == y) + LIKELIHOOD * logs).sum(1).cpu().numpy()
    return scores
