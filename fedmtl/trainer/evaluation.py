"""Accuracy and loss of personal and shared models, client by client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, State
from ..local.batches import max_clients
from ..local.executor import by_decreasing
from ..stacked import StackedModule
from ..stacked.losses import example_losses

Side = Literal["train", "test"]
_EXAMPLES = 256  # columns of one stacked evaluation batch
_FLAT = 4096  # examples of one batch of the shared model


@dataclass(frozen=True)
class Metrics:
    """Per-client numbers.

    Attributes:
        loss: float64 (k,), mean loss over a client's own examples.
        score: float64 (k,), mean accuracy (classification) or mean squared error (regression).
    """

    loss: Tensor
    score: Tensor


def metric_name(problem: Problem) -> str:
    """``"accuracy"`` for classification, ``"mse"`` for regression."""
    return "mse" if problem.data.classes is None else "accuracy"


def evaluate_personal(problem: Problem, algorithm: Algorithm, state: State, side: Side = "test") -> Metrics:
    """Every client's personal model on its own examples, a block of clients at a time."""
    loss, score = (torch.zeros(problem.clients, dtype=torch.float64) for _ in range(2))
    for clients in torch.arange(problem.clients).split(max_clients(problem.dimension)):
        rows = algorithm.personalize(problem, state, clients)
        metrics = evaluate_rows(problem, rows, clients, side)
        loss[clients], score[clients] = metrics.loss, metrics.score
    return Metrics(loss, score)


def evaluate_rows(problem: Problem, rows: Tensor, clients: Tensor, side: Side) -> Metrics:
    """Model ``rows[i]`` on the examples of client ``clients[i]``.

    Args:
        problem: data, loss and executor.
        rows: (k, D).
        clients: int64 (k,).
        side: which examples.
    """
    examples = problem.data.side(side)
    counts, first = examples.counts[clients], examples.offsets[clients]
    order = by_decreasing(counts)
    loss, score = (torch.zeros(len(clients), dtype=torch.float64) for _ in range(2))

    def work(stack: StackedModule, part: slice) -> None:
        members = order[part]
        n = counts[members]
        parameters = rows[members.to(rows.device)]
        for begin in range(0, int(n.max()), _EXAMPLES):
            place = torch.arange(begin, min(begin + _EXAMPLES, int(n.max())))
            mask = place < n[:, None]
            index = first[members][:, None] + torch.where(mask, place, 0)
            x, y = problem.data.gather(side, index, dtype=rows.dtype, device=rows.device)
            values, scores = per_example(problem, stack.predict(parameters, x), y)
            loss[members] += torch.where(mask, values.cpu(), 0.0).sum(1)
            score[members] += torch.where(mask, scores.cpu(), 0.0).sum(1)

    problem.executor.map(work, len(clients))
    return Metrics(loss / counts, score / counts)


def evaluate_shared(problem: Problem, row: Tensor, side: Side = "test") -> Metrics:
    """One model (D,) on every client's examples."""
    examples = problem.data.side(side)
    counts = examples.counts
    owner = torch.repeat_interleave(torch.arange(problem.clients), counts)
    loss, score = (torch.zeros(problem.clients, dtype=torch.float64) for _ in range(2))
    with problem.executor.stack() as stack:
        for index in torch.arange(len(owner)).split(_FLAT):
            x, y = problem.data.gather(side, index[None], dtype=row.dtype, device=row.device)
            values, scores = per_example(problem, stack.predict(row[None], x), y)
            loss.index_add_(0, owner[index], values[0].cpu())
            score.index_add_(0, owner[index], scores[0].cpu())
    return Metrics(loss / counts, score / counts)


def summarize(scores: Tensor, counts: Tensor, *, metric: str, prefix: str = "") -> dict[str, float]:
    """Mean over clients, over examples, of the worst tenth of clients, and the standard deviation over clients.

    Args:
        scores: float64 (n,).
        counts: int64 (n,), examples behind each score.
        metric: its name; of ``"mse"`` the largest tenth is the worst.
        prefix: put before every key.
    """
    tenth = max(1, math.ceil(len(scores) / 10))
    ordered = torch.sort(scores, descending=metric == "mse").values
    return {
        f"{prefix}{metric}": float(scores.mean()),
        f"{prefix}weighted_{metric}": float((scores * counts).sum() / counts.sum()),
        f"{prefix}worst_tenth": float(ordered[:tenth].mean()),
        f"{prefix}spread": float(scores.std(correction=0)),
    }


def per_example(problem: Problem, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and score of every example: (K, B, ...), (K, B, ...) -> float64 (K, B) twice."""
    losses = example_losses(problem.loss, outputs, y).to(torch.float64)
    if problem.data.classes is None:
        shaped = outputs.reshape(y.shape) if outputs.numel() == y.numel() else outputs
        errors = (shaped - y).to(torch.float64).square()
        return losses, errors.reshape(*y.shape[:2], -1).mean(-1)
    if y.dim() == 2:
        outputs = outputs.unsqueeze(-1) if outputs.dim() == 2 else outputs
        guess = outputs[..., 0] > 0 if outputs.shape[-1] == 1 else outputs.argmax(-1)  # one logit, or one a class
        return losses, (guess == y).to(torch.float64)
    return losses, ((outputs > 0) == (y > 0.5)).to(torch.float64).reshape(*y.shape[:2], -1).mean(-1)
