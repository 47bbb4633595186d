"""Scores and losses of personal and shared models, client by client.

The score is accuracy for classes and the mean squared error for real targets. Where an example has more than
:data:`RECALL_AT` labels it is recall at 5, the share of the labels that are there which are among the 5 largest
outputs, of all examples of a client together: the metric of StackOverflow tag prediction (Reddi et al., "Adaptive
federated optimization", ICLR 2021). A client without test examples, or without a label in any, has no score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
RECALL_AT = 5
METRICS = ("accuracy", "mse", f"recall_at_{RECALL_AT}")
"""The names that :func:`metric_name` gives."""
_EXAMPLES = 256  # columns of one stacked evaluation batch
_FLAT = 4096  # examples of one batch of the shared model


@dataclass(frozen=True)
class Metrics:
    """Per-client numbers.

    Attributes:
        loss: float64 (..., k), mean loss over a client's own examples; NaN without any.
        score: float64 (..., k), :func:`metric_name` of a client's own examples; NaN where ``weight`` is 0.
        weight: float64 (k,), what is behind each score: a number of examples, or for recall of labels that are there.
    """

    loss: Tensor
    score: Tensor
    weight: Tensor

    @classmethod
    def of(cls, sums: Tensor | Sequence[Tensor], counts: Tensor) -> Metrics:
        """From sums of losses (..., k), of scores (..., k) and of weights (k,) over clients' examples (k,)."""
        return cls(sums[0] / counts, sums[1] / sums[2], sums[2])

    def by_client(self, ids: Sequence[str]) -> dict[str, float]:
        """The score of every client that has one, by its id."""
        scored = (self.weight > 0).tolist()
        return {name: score for name, score, one in zip(ids, self.score.tolist(), scored, strict=True) if one}


def metric_name(problem: Problem) -> str:
    """``"mse"`` for real targets, ``"recall_at_5"`` for more than 5 labels an example, else ``"accuracy"``."""
    if problem.data.classes is None:
        return "mse"
    return f"recall_at_{RECALL_AT}" if problem.data.spec.labels > RECALL_AT else "accuracy"


def metric_of(row: Mapping[str, object]) -> str:
    """The metric that a row of the history has."""
    return next(name for name in METRICS if name in row)


def evaluate_personal(problem: Problem, algorithm: Algorithm, state: State, side: Side = "test") -> Metrics:
    """Every client's personal model on its own examples, a block of clients at a time."""
    each = [
        evaluate_rows(problem, algorithm.personalize(problem, state, clients), clients, side)
        for clients in torch.arange(problem.clients).split(max_clients(problem.dimension))
    ]
    return Metrics(*(torch.cat([getattr(one, name) for one in each]) for name in ("loss", "score", "weight")))


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
    sums = torch.zeros(3, len(clients), dtype=torch.float64)

    def work(stack: StackedModule, part: slice) -> None:
        members = order[part]
        n = counts[members]
        parameters = rows[members.to(rows.device)]
        for begin in range(0, int(n.max()), _EXAMPLES):
            place = torch.arange(begin, min(begin + _EXAMPLES, int(n.max())))
            mask = place < n[:, None]
            index = first[members][:, None] + torch.where(mask, place, 0)
            index = index.clamp(max=len(examples) - 1)  # of the last client, where it has none
            x, y = problem.data.gather(side, index, dtype=rows.dtype, device=rows.device)
            for total, values in zip(sums, per_example(problem, stack.predict(parameters, x), y), strict=True):
                total[members] += torch.where(mask, values.cpu(), 0.0).sum(1)

    problem.executor.map(work, len(clients))
    return Metrics.of(sums, counts)


def evaluate_shared(problem: Problem, row: Tensor, side: Side = "test") -> Metrics:
    """One model (D,) on every client's examples."""
    examples = problem.data.side(side)
    counts = examples.counts
    owner = torch.repeat_interleave(torch.arange(problem.clients), counts)
    sums = torch.zeros(3, problem.clients, dtype=torch.float64)
    with problem.executor.stack() as stack:
        for index in torch.arange(len(owner)).split(_FLAT):
            x, y = problem.data.gather(side, index[None], dtype=row.dtype, device=row.device)
            for total, values in zip(sums, per_example(problem, stack.predict(row[None], x), y), strict=True):
                total.index_add_(0, owner[index], values[0].cpu())
    return Metrics.of(sums, counts)


def summarize(scores: Tensor, counts: Tensor, *, metric: str, prefix: str = "") -> dict[str, float]:
    """Mean over clients, over examples, of the worst tenth of clients, and the standard deviation over clients.

    Args:
        scores: float64 (n,).
        counts: (n,), examples behind each score; a client with 0 is left out.
        metric: its name; of ``"mse"`` the largest tenth is the worst.
        prefix: put before every key.
    """
    scores, counts = scores[counts > 0], counts[counts > 0]
    tenth = max(1, math.ceil(len(scores) / 10))
    ordered = torch.sort(scores, descending=metric == "mse").values
    return {
        f"{prefix}{metric}": float(scores.mean()),
        f"{prefix}weighted_{metric}": float((scores * counts).sum() / counts.sum()),
        f"{prefix}worst_tenth": float(ordered[:tenth].mean()),
        f"{prefix}spread": float(scores.std(correction=0)),
    }


def per_example(problem: Problem, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, score and weight of every example: (K, B, ...), (K, B, ...) -> float64 (K, B) three times.

    The score of several examples is the sum of their scores over that of their weights, which are 1, or for recall the
    number of labels that are there.
    """
    losses = example_losses(problem.loss, outputs, y).to(torch.float64)
    if problem.data.spec.labels > RECALL_AT:
        flat = y.flatten(2)
        first = outputs.reshape(flat.shape).topk(RECALL_AT, -1).indices
        return losses, flat.gather(-1, first).sum(-1).to(torch.float64), flat.sum(-1).to(torch.float64)
    return losses, _scores(problem, outputs, y), torch.ones_like(losses)


def _scores(problem: Problem, outputs: Tensor, y: Tensor) -> Tensor:
    """Accuracy or squared error of every example, float64 (K, B)."""
    if problem.data.classes is None:
        shaped = outputs.reshape(y.shape) if outputs.numel() == y.numel() else outputs
        errors = (shaped - y).to(torch.float64).square()
        return errors.reshape(*y.shape[:2], -1).mean(-1)
    if y.dim() == 2:
        outputs = outputs.unsqueeze(-1) if outputs.dim() == 2 else outputs
        guess = outputs[..., 0] > 0 if outputs.shape[-1] == 1 else outputs.argmax(-1)  # one logit, or one a class
        return (guess == y).to(torch.float64)
    return ((outputs > 0) == (y > 0.5)).to(torch.float64).reshape(*y.shape[:2], -1).mean(-1)


def shares(scores: Tensor, others: Tensor, *, metric: str) -> tuple[float, float, float]:
    """Shares of the clients that score better, equal and worse than ``others``, (n,) each; of ``"mse"`` less is
    better. Clients without a score on both sides are left out."""
    gap = scores.double() - others.double()
    gap = gap[torch.isfinite(gap)] * (-1.0 if metric == "mse" else 1.0)
    if not len(gap):
        return 0.0, 0.0, 0.0
    better, worse = float((gap > 1e-9).double().mean()), float((gap < -1e-9).double().mean())
    return better, float((gap.abs() <= 1e-9).double().mean()), worse
