"""Scores, losses and further metrics of personal and shared models, client by client.

The score is that of :func:`~fedmtl.trainer.metrics.main_metric`: accuracy for classes, the mean squared error for real
targets, recall at 5 for more than 5 labels an example. A client without test examples, or without a label in any where
the score is recall, has no score. Losses and scores are sums over examples that are never held together; other metrics
(:mod:`fedmtl.trainer.metrics`) see all outputs of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, State
from ..data.rows import take
from ..local import StackedModule
from ..local.batches import batch_widths, max_clients
from ..local.losses import LOSSES, binary_cross_entropy, cross_entropy, example_losses, half_mse
from ..local.places import LANES, grain_of, places
from ..random import derive_key, keyed_bits
from .metrics import (
    RECALL_AT,
    Metric,
    distribution,
    example_scores,
    found_labels,
    invented_rows,
    kind_of,
    main_metric,
    normalized,
)

Side = Literal["train", "test"]
METRICS = (f"recall_at_{RECALL_AT}", "accuracy", "mse")
"""The names of main metrics, the most special first."""
_EXAMPLES = 256  # columns of one stacked evaluation batch
_FLAT = 4096  # examples of one batch of the shared model


@dataclass(frozen=True)
class Metrics:
    """Per-client numbers.

    Attributes:
        loss: float64 (..., k), mean loss over a client's own examples; NaN without any.
        score: float64 (..., k), the main metric of a client's own examples; NaN where ``weight`` is 0.
        weight: float64 (k,), what is behind each score: a number of examples, or for recall of labels that are there.
        others: float64 (..., k) by name, the metrics that were asked for; NaN where they are not defined.
    """

    loss: Tensor
    score: Tensor
    weight: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: Tensor | Sequence[Tensor], counts: Tensor, others: Mapping[str, Tensor] | None = None) -> Metrics:
        """From sums of losses (..., k), of scores (..., k) and of weights (k,) over clients' examples (k,)."""
        return cls(sums[0] / counts, sums[1] / sums[2], sums[2], others or {})

    @property
    def columns(self) -> list[Tensor]:
        """Return the losses, the scores, the weights, and the others: float64 (k,) each."""
        return [self.loss, self.score, self.weight, *self.others.values()]

    def by_client(self, problem: Problem) -> dict[str, dict[str, float]]:
        """Return every metric of every client of the problem for which it is defined, by name and id: the loss, the
        main metric, the nMSE of one real target, and the others."""
        tested = problem.data.test.counts > 0
        columns = {"loss": (self.loss, tested), metric_name(problem): (self.score, self.weight > 0)}
        if kind_of(problem.data.spec) == "number":
            part = problem.data.test
            task, _ = normalized(self.score, part.y.cpu(), part.offsets)
            columns["nmse"] = task, ~task.isnan()
        columns |= {name: (values, ~values.isnan()) for name, values in self.others.items()}
        return {name: _named(problem.data.ids, values, defined) for name, (values, defined) in columns.items()}


def _named(ids: tuple[str, ...], values: Tensor, defined: Tensor) -> dict[str, float]:
    """Values (n,) of the clients ``defined`` (n,), by id."""
    if bool(defined.all()):
        return dict(zip(ids, values.tolist(), strict=True))
    places = defined.nonzero()[:, 0].tolist()
    return {ids[place]: value for place, value in zip(places, values[defined].tolist(), strict=True)}


@dataclass(frozen=True)
class Panel:
    """The clients that are evaluated.

    Attributes:
        clients: int64 (k,), their positions, ascending.
        problem: with the data of these clients only.
        population: how many clients they stand for: those that have test examples.
        drawn: whether they were drawn, and are not all clients.
    """

    clients: Tensor
    problem: Problem
    population: int
    drawn: bool = True

    @classmethod
    def draw(cls, problem: Problem, count: int | None) -> Panel:
        """Return ``count`` clients that have test examples, drawn without replacement by the run's seed and the
        clients' ids; all clients where it is None or not below their number."""
        tested = problem.data.test.counts > 0
        population = int(tested.sum())
        if count is None or count >= population:
            return cls(torch.arange(problem.clients), problem, population, drawn=False)
        key = derive_key(problem.seed, "evaluated clients")
        bits = keyed_bits(key, problem.data.keys, 0, torch.zeros_like(problem.data.keys))
        bits[~tested] = torch.iinfo(bits.dtype).max
        clients = bits.topk(count, largest=False).indices.sort().values
        owner = None if problem.owner is None else problem.owner[clients]
        part = replace(problem, data=problem.data.subset(clients.tolist()), owner=owner)
        return cls(clients, part, population)

    @property
    def ids(self) -> tuple[str, ...] | None:
        """Ids of the clients that were drawn; None where all are evaluated."""
        return self.problem.data.ids if self.drawn else None


def metric_name(problem: Problem) -> str:
    """Return the name of the main metric: ``"accuracy"``, ``"mse"`` or ``"recall_at_5"``."""
    return main_metric(problem.data.spec).name


def metric_of(row: Mapping[str, object]) -> str:
    """The main metric that a row of the history has."""
    return next(name for name in METRICS if name in row)


def try_metrics(problem: Problem, metrics: Sequence[Metric]) -> None:
    """Refuse metrics that do not take the outputs of the model, before anything is charged.

    Raises:
        ConfigError: one that raises, or does not return a number, on invented rows.
    """
    if not metrics:
        return
    with torch.no_grad():
        shape = tuple(problem.module(problem.data.spec.sample(2, problem.initial.dtype).cpu()).shape[1:])
    for metric in metrics:
        metric.try_out(*invented_rows(problem.data.spec, shape))


def evaluate_personal(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    side: Side = "test",
    metrics: Sequence[Metric] = (),
    clients: Tensor | None = None,
) -> Metrics:
    """Clients' personal models on their own examples, a block of clients at a time.

    Args:
        problem, algorithm, state: of the run.
        side: which examples.
        metrics: to measure beside the loss and the score.
        clients: int64 (k,); None for all.
    """
    everyone = torch.arange(problem.clients) if clients is None else clients
    return evaluate_each(problem, lambda own: algorithm.personalize(problem, state, own), everyone, side, metrics)


def evaluate_each(
    problem: Problem,
    models: Callable[[Tensor], Tensor],
    clients: Tensor,
    side: Side = "test",
    metrics: Sequence[Metric] = (),
) -> Metrics:
    """The model of each of ``clients``, int64 (k,), on its own examples, a block of clients at a time; of several ranks
    each computes its own clients.

    Args:
        problem: data, loss and executor.
        models: int64 (m,) clients -> (m, D).
        clients: who is evaluated.
        side: which examples.
        metrics: to measure beside the loss and the score.
    """
    place = problem.own(clients)
    each = [
        evaluate_rows(problem, models(some), some, side, metrics)
        for some in clients[place].split(max_clients(problem.dimension))
    ]
    columns = [torch.cat(parts) for parts in zip(*(scores.columns for scores in each), strict=True)]
    loss, score, weight, *others = problem.ranks.join(torch.stack(columns, 1), place, len(clients)).unbind(1)
    return Metrics(loss, score, weight, {metric.name: column for metric, column in zip(metrics, others, strict=True)})


def evaluate_rows(
    problem: Problem, rows: Tensor, clients: Tensor, side: Side, metrics: Sequence[Metric] = ()
) -> Metrics:
    """Model ``rows[i]`` on the examples of client ``clients[i]``.

    Args:
        problem: data, loss and executor.
        rows: (k, D).
        clients: int64 (k,).
        side: which examples.
        metrics: to measure beside the loss and the score.
    """
    examples = problem.data.side(side)
    counts, first = examples.counts[clients], examples.offsets[clients]
    widths = batch_widths(counts, None) * (counts > 0)
    sums = torch.zeros(3, len(clients), dtype=torch.float64)
    others = _undefined(metrics, len(clients))
    for width in widths[widths > 0].unique().tolist():  # a client's own number of examples decides its shapes
        alike, grain = (widths == width).nonzero()[:, 0], grain_of(width, problem.executor.chunk)
        chosen, real = places(counts[alike], clients[alike] % LANES, grain)

        def work(
            stack: StackedModule,
            part: slice,
            place: Tensor = alike[chosen],
            real: Tensor = real,
            width: int = width,
        ) -> None:
            members, own = place[part], real[part]
            n, mine = counts[members], members[own]
            parameters = rows[members.to(rows.device)]
            outcomes: list[tuple[Tensor, Tensor]] = []
            for begin in range(0, width, _EXAMPLES):
                column = torch.arange(begin, min(begin + _EXAMPLES, width))
                mask = column < n[:, None]
                index = first[members][:, None] + torch.where(mask, column, 0)
                x, y = problem.data.gather(side, index, dtype=rows.dtype, device=rows.device)
                outputs = stack.predict(parameters, x)
                for total, values in zip(sums, per_example(problem, outputs, y), strict=True):
                    total[mine] += torch.where(mask, values.cpu(), 0.0).sum(1)[own]
                if metrics:
                    outcomes.append((outputs.detach().cpu(), y.cpu()))
            if outcomes:
                whole, true = (torch.cat(parts, 1)[own] for parts in zip(*outcomes, strict=True))
                for row, (member, count) in enumerate(zip(mine.tolist(), n[own].tolist(), strict=True)):
                    _measure(metrics, others, member, whole[row, :count], true[row, :count])

        problem.executor.map(work, len(chosen), grain=grain)
    return Metrics.of(sums, counts, others)


def evaluate_shared(problem: Problem, row: Tensor, side: Side = "test", metrics: Sequence[Metric] = ()) -> Metrics:
    """One model (D,) on every client's examples: those of several clients together, which a rank takes in turn."""
    examples, ranks = problem.data.side(side), problem.ranks
    counts = examples.counts
    owner = torch.repeat_interleave(torch.arange(problem.clients), counts)
    first = torch.div(examples.offsets[: problem.clients], _FLAT, rounding_mode="floor")  # where clients begin
    groups = torch.unique_consecutive(first, return_counts=True)[1].tolist()
    groups = torch.arange(problem.clients).split(groups)[ranks.rank :: ranks.size]
    sums = torch.zeros(3, problem.clients, dtype=torch.float64)
    others = _undefined(metrics, problem.clients)
    with problem.executor.stack() as stack:
        for clients in groups:
            begin, end = int(examples.offsets[clients[0]]), int(examples.offsets[clients[-1]] + counts[clients[-1]])
            outcomes: list[tuple[Tensor, Tensor]] = []
            for index in torch.arange(begin, end).split(_FLAT):
                x, y = problem.data.gather(side, index[None], dtype=row.dtype, device=row.device)
                outputs = stack.predict(row[None], x)
                for total, values in zip(sums, per_example(problem, outputs, y), strict=True):
                    total.index_add_(0, owner[index], values[0].cpu())
                if metrics:
                    outcomes.append((outputs[0].detach().cpu(), y[0].cpu()))
            if outcomes:
                parts = counts[clients].tolist()
                pieces = (torch.cat(tensors).split(parts) for tensors in zip(*outcomes, strict=True))
                for client, own, labels in zip(clients.tolist(), *pieces, strict=True):
                    _measure(metrics, others, client, own, labels)
    mine = torch.cat(groups) if groups else torch.zeros(0, dtype=torch.int64)
    table = torch.stack([*sums, *others.values()], 1)
    columns = ranks.join(table[mine], mine, problem.clients).unbind(1)
    return Metrics.of(columns[:3], counts, dict(zip(others, columns[3:], strict=True)))


def _undefined(metrics: Sequence[Metric], clients: int) -> dict[str, Tensor]:
    return {metric.name: torch.full((clients,), torch.nan, dtype=torch.float64) for metric in metrics}


def _measure(
    metrics: Sequence[Metric], others: Mapping[str, Tensor], place: int, outputs: Tensor, targets: Tensor
) -> None:
    """Write what one client's rows give into its place of ``others``; nothing without rows."""
    for metric in metrics if len(targets) else ():
        others[metric.name][place] = metric.value(outputs, targets)


def summarize(scores: Tensor, counts: Tensor, *, metric: str, prefix: str = "") -> dict[str, float]:
    """Mean over clients, over examples, of the worst tenth of clients, and the standard deviation over clients.

    Args:
        scores: float64 (n,).
        counts: (n,), examples behind each score; a client with 0 is left out.
        metric: its name; of ``"mse"`` the largest tenth is the worst.
        prefix: put before every key.
    """
    scores, counts = scores[counts > 0], counts[counts > 0]
    spread = distribution(scores, higher_is_better=metric != "mse")
    return {
        f"{prefix}{metric}": spread["mean"],
        f"{prefix}weighted_{metric}": float((scores * counts).sum() / counts.sum()),
        f"{prefix}worst_tenth": spread["worst_tenth"],
        f"{prefix}spread": spread["spread"],
    }


def means(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Return the mean of every metric that was asked for, over the clients for which it is defined."""
    return {f"{prefix}{name}": float(values.nanmean()) for name, values in metrics.others.items()}


def constant_loss(problem: Problem) -> float | None:
    """Return the least mean over clients of the test loss of a model that has the same outputs for every example; None
    for a loss of the caller's own, whose least is not known in closed form."""
    test, loss = problem.data.test, problem.loss
    if loss not in LOSSES.values():
        return None
    weights = (1 / test.counts.double() / (test.counts > 0).sum()).repeat_interleave(test.counts)
    mean, square = torch.zeros(()), torch.zeros(())
    for index in torch.arange(len(weights)).split(_FLAT):
        y = take(test.y, index.to(test.y.device)).cpu()
        y = (F.one_hot(y.long(), problem.data.spec.classes or 0) if loss is cross_entropy else y).double()
        mean, square = (
            total + torch.tensordot(weights[index], part, 1) for total, part in ((mean, y), (square, y * y))
        )
    if loss is cross_entropy:
        return float(torch.special.entr(mean).sum())
    if loss is binary_cross_entropy:
        return float((torch.special.entr(mean) + torch.special.entr(1 - mean)).mean())
    return float((square - mean.square()).mean()) * (0.5 if loss is half_mse else 1.0)


def per_example(problem: Problem, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, score and weight of every example: (K, B, ...), (K, B, ...) -> float64 (K, B) three times.

    The score of several examples is the sum of their scores over that of their weights, which are 1, or for recall the
    number of labels that are there.
    """
    losses = example_losses(problem.loss, outputs, y).to(torch.float64)
    if problem.data.spec.labels > RECALL_AT:
        return losses, *found_labels(outputs, y)
    return losses, example_scores(outputs, y), torch.ones_like(losses)
