"""Sums of the gradients of single records by client, at models that do not move: the client's part
of a gradient step that a server makes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..privacy import GradientPlan, SeededSource
from ..privacy.records import Records
from .executor import Executor
from .per_example import MICROBATCH
from .train import LocalTraining, PlainStep, address_of

if TYPE_CHECKING:
    from ..privacy import LocalSteps

_RECORDS_AT_ONCE = 1024  # of a client, without privacy


def clipped_gradient_sums(
    training: LocalTraining, executor: Executor, clients: Tensor, local_steps: LocalSteps
) -> Iterator[Tensor]:
    """Yields the sums of clipped gradients of the records that the next local step draws, (d, D) of
    the next clients: with noise of each client's own, or private ones for a secure sum.

    Args:
        training: the data, the loss and the models.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        local_steps: of the round, which cover the sums: with noise of each client's own, or for a
            secure sum.
    """
    width = executor.examples_at_once(float(local_steps.plan.expected.max(initial=0.0)))
    everybody = torch.arange(len(clients))
    for part in executor.slices(len(clients), width=MICROBATCH):
        place = everybody[part]
        executor.stack.load(training.start, len(place), place=place)
        step = next(training.on_records(executor.stack, clients[part], local_steps, width))
        if local_steps.in_secure_sum:
            yield local_steps.grid_sums(clients[part], step.gradients())
        else:
            yield local_steps.noised_sums(clients[part], step.gradients())


def plain_sums(
    training: LocalTraining, executor: Executor, clients: Tensor, plan: GradientPlan, seed: int
) -> Iterator[Tensor]:
    """Yields the sums of the gradients of the records that a plan draws, neither clipped nor
    noised, (d, D) of the next clients.

    Args:
        training: the data, the loss and the models.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        plan: of the records that are drawn.
        seed: of the draw; the round of ``training`` addresses it, too.
    """
    stack = executor.stack
    records = Records(plan, [SeededSource(seed)], None, bound=math.inf, law=None)
    index, mask = records.batch(clients, torch.full_like(clients, training.round))
    first = training.data.train.offsets[clients]
    everybody = torch.arange(len(clients))
    for part in executor.slices(len(clients)):
        place = everybody[part]
        rows = stack.load(training.start, len(place), place=place)
        sums = torch.zeros_like(rows)
        address = None
        if stack.has_dropout:
            address = address_of(training.data.keys[clients[part]], training.round, 0)
        for columns in torch.arange(index.shape[1]).split(_RECORDS_AT_ONCE):
            chosen = first[part, None] + index[part][:, columns]
            x, y = training.data.gather("train", chosen, dtype=rows.dtype, device=rows.device)
            weight = mask[part][:, columns].to(rows)
            none = torch.zeros(0, dtype=torch.int64)
            step = PlainStep(len(place), none, stack, training.loss, x, y, weight, address, None)
            step.descend(sums, keep=1.0, rate=-1.0)
        yield sums
