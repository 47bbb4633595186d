"""Gradients of a client's own training records, which stay with it: no clip and no noise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ModelError
from ..local import check_examples
from ..local.losses import LOSSES
from ..local.per_example import ALIKE, DropoutKeys, example_gradients
from ..local.stacking import batch_widths
from ..local.train import address_of
from .client_batch import AFTER
from .problem import Problem

FINETUNE_ROUND = AFTER - 1
"""The round number that addresses the batches and dropout masks of finetuning."""


def own_gradients(
    problem: Problem, models: Tensor, clients: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yields the gradients of each client's own training records at its model.

    A few records are computed at a time. Clients are computed one after another, so that the
    numbers of one do not depend on the data of another.

    Args:
        problem: the data, the model and the loss.
        models: (k, D) or (D,), the points of the gradients.
        clients: int64 (k,), each with a training record or more.

    Yields:
        The place of a client among the k, and gradients of some of its records, (n, D).
    """
    train = problem.data.train
    stack = problem.executor.stack
    width = _examples_at_once(problem)
    pairs = zip(clients.split(1), models.expand(len(clients), -1), strict=True)
    for place, (client, model) in enumerate(pairs):
        count = int(train.counts[client])
        first = int(train.offsets[client])
        # the batch is filled up to a width that many clients share
        position = torch.arange(int(batch_widths(train.counts[client], None)))
        mask = position < count
        index = first + torch.where(mask, position, 0)
        rows = stack.load(model, 1)
        x, y = problem.data.gather("train", index[None], dtype=rows.dtype, device=rows.device)
        dropout = None
        if stack.has_dropout:
            address = address_of(problem.data.keys[client], FINETUNE_ROUND, 0)
            dropout = DropoutKeys(address, position[None])
        parts = example_gradients(
            stack, x, y, problem.loss, mask=mask[None], width=width, dropout=dropout
        )
        for gradients, _ in parts:
            yield place, gradients


def fisher_diagonals(problem: Problem, models: Tensor, clients: Tensor) -> Tensor:
    """Returns the mean squares of the gradients of each client's own training records at its model.

    Args:
        problem: the data, the model and the loss.
        models: (k, D), the points of the gradients.
        clients: int64 (k,), each with a training record or more.

    Returns:
        (k, D).
    """
    # F_kj = mean_i (d l_i / d w_j)^2
    result = torch.zeros_like(models)
    for place, gradients in own_gradients(problem, models, clients):
        result[place] += gradients.square().sum(0)
    return result / problem.data.train.counts[clients].to(result)[:, None]


def _examples_at_once(problem: Problem) -> int:
    """Returns the ``width`` of :func:`~fedmtl.local.example_gradients` for one client's records."""
    stack = problem.executor.stack
    if not problem.executor.batched:
        return 1
    if stack.network is not None and problem.loss in LOSSES.values():
        return ALIKE
    dtype = stack.rows.dtype
    sample = problem.data.spec.sample(2, dtype)
    first = torch.zeros(2, dtype=torch.int64)
    _, targets = problem.data.gather("train", first, dtype=dtype, device="cpu")
    try:
        check_examples(problem.module, sample, problem.loss, targets)
    except ModelError:  # of a layer or a loss without a batching rule
        return 1
    return ALIKE
