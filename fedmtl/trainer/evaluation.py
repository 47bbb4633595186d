"""Scores, losses and further metrics of personal and shared models, client by client.

The score is that of :func:`~fedmtl.trainer.metrics.main_metric`: accuracy for classes, the mean
squared error for real targets, recall at 5 for more than 5 labels an example. A client without test
examples, or without a label in any if the score is recall, has no score. Losses and scores are
sums over examples that are never all in memory; other metrics (:mod:`fedmtl.trainer.metrics`) see
all outputs of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..algorithms.base import Problem
from ..local.losses import Quantile, example_losses, link_of, linked
from ..local.stacking import batch_widths, lanes, max_clients, places, stack_sizes
from ..random import derive_key, keyed_bits
from .client_scores import RECALL_AT, example_scores, found_labels, normalized
from .metrics import Metric, further_metrics, has_nmse, invented_rows, main_metric

METRICS = (f"recall_at_{RECALL_AT}", "accuracy", "pinball", "mse")
"""The names of main metrics, the most special first."""
_EXAMPLES = 256  # columns of one stacked evaluation batch
_FLAT = 4096  # examples of one batch of the shared model
_ELEMENTS = 1 << 22  # of one batch of several models


@dataclass(frozen=True)
class Metrics:
    """The scores of one model a client.

    Attributes:
        loss: float64 (k,), mean loss over a client's own examples; NaN without any.
        score: float64 (k,), the main metric of a client's own examples; NaN if ``weight`` is 0.
        weight: float64 (k,), the number of examples behind each score, or for recall of labels
            that are there.
        others: float64 (k,) by name, the metrics that were asked for; NaN if they are not defined.
    """

    loss: Tensor
    score: Tensor
    weight: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, table: Tensor, metrics: Sequence[Metric]) -> Metrics:
        """Returns the scores that are the columns of a table.

        Args:
            table: float64 (k, 3 + m): losses, scores, weights, and further metrics.
            metrics: the m further ones.
        """
        loss, score, weight, *others = table.unbind(1)
        return cls(
            loss,
            score,
            weight,
            {metric.name: column for metric, column in zip(metrics, others, strict=True)},
        )

    def by_client(self, problem: Problem) -> dict[str, dict[str, float]]:
        """Returns the metrics of the problem's clients by name and id: the loss, the main metric,
        the nMSE of one real target, and the others.

        A client for which a metric is not defined is left out of it.
        """
        tested = problem.data.test.counts > 0
        columns = {
            "loss": (self.loss, tested),
            main_metric(problem.data.spec, problem.loss).name: (self.score, self.weight > 0),
        }
        if has_nmse(problem.data.spec, problem.loss):
            part = problem.data.test
            task, _ = normalized(self.score, problem.data.in_units(part.y.cpu()), part.offsets)
            columns["nmse"] = task, ~task.isnan()
        columns |= {name: (values, ~values.isnan()) for name, values in self.others.items()}
        return {
            name: {
                problem.data.ids[client]: value
                for client, value in zip(
                    defined.nonzero()[:, 0].tolist(), values[defined].tolist(), strict=True
                )
            }
            for name, (values, defined) in columns.items()
        }


def evaluated_clients(problem: Problem, count: int | None) -> tuple[Tensor, Problem]:
    """Returns the clients that are evaluated, int64 (k,), ascending, and the problem with the data
    of these only.

    They are ``count`` clients that have test examples, drawn without replacement by the run's seed
    and the clients' ids; all clients if it is None or not below the number of those.

    Args:
        problem: of the run.
        count: k; None for all clients.
    """
    tested = problem.data.test.counts > 0
    if count is None or count >= int(tested.sum()):
        return torch.arange(problem.clients), problem
    key = derive_key(problem.seed, "evaluated clients")
    bits = keyed_bits(key, problem.data.keys, 0, torch.zeros_like(problem.data.keys))
    # The smallest keyed numbers are a draw that does not depend on the order of the data.
    bits[~tested] = torch.iinfo(bits.dtype).max
    clients = bits.topk(count, largest=False).indices.sort().values
    owner = None
    if problem.rank_of is not None:
        owner = problem.rank_of[clients]
    return clients, replace(problem, data=problem.data.take_clients(clients), rank_of=owner)


def try_metrics(problem: Problem, metrics: Sequence[Metric]) -> None:
    """Refuses metrics that do not take the outputs of the model, before anything is charged.

    Args:
        problem: with the model and the shape of the data.
        metrics: those that were asked for.

    Raises:
        ConfigError: one that raises, or does not return a number, on invented rows.
    """
    with torch.no_grad():
        shape = tuple(
            problem.module(problem.data.spec.sample(2, problem.initial.dtype).cpu()).shape[1:]
        )
    for metric in further_metrics(metrics, problem.data.spec, problem.loss):
        metric.number(*invented_rows(problem.data.spec, shape))


def evaluate_each(
    problem: Problem,
    models: Callable[[Tensor], Tensor],
    clients: Tensor,
    requested: Sequence[Metric] = (),
) -> Metrics:
    """Returns the scores of each client's model on its own test examples.

    Blocks of clients are computed one after another, and of several ranks each computes its own
    clients.

    Args:
        problem: data, loss and executor.
        models: int64 (m,) clients -> (m, D).
        clients: int64 (k,), those that are evaluated.
        requested: metrics to measure beside the loss and the score.
    """
    metrics = further_metrics(requested, problem.data.spec, problem.loss)

    def table(here: Tensor) -> Tensor:
        blocks = here.split(max_clients(problem.dimension))
        return torch.cat(
            [_each_on_its_own(problem, models(some), some, metrics) for some in blocks]
        )

    return Metrics.of(problem.spread(table, clients), metrics)


def _each_on_its_own(
    problem: Problem, rows: Tensor, clients: Tensor, metrics: Sequence[Metric]
) -> Tensor:
    """Returns the table (k, 3 + m) of model ``rows[i]`` (k, D) on the test examples of client
    ``clients[i]`` (k,)."""
    test = problem.data.test
    counts = test.counts[clients]
    first = test.offsets[clients]
    widths = batch_widths(counts, None) * (counts > 0)
    table = _unscored(len(clients), metrics)
    # A client's own number of examples decides its shapes, and so its last bits.
    for width in widths[widths > 0].unique().tolist():
        alike = (widths == width).nonzero()[:, 0]
        grain, _ = stack_sizes(width, problem.executor.chunk)
        chosen, real = places(counts[alike], lanes(clients[alike], None), grain)
        for part in problem.executor.slices(len(chosen), width=width):
            members = alike[chosen[part]]
            own = real[part]
            mask = torch.arange(width) < counts[members][:, None]
            index = first[members][:, None] + torch.where(mask, torch.arange(width), 0)
            outputs, y, values = _predicted(
                problem, rows[members.to(rows.device)], index, _EXAMPLES
            )
            mask &= own[:, None]
            there = mask.to(outputs.device)
            scored = outputs[there][None], y[there], values[:, None, mask]
            table[members[own]] = _table(problem, *scored, counts[members[own]], metrics)[0]
    return table


def _common(problem: Problem, models: Tensor, clients: Tensor, metrics: Sequence[Metric]) -> Tensor:
    """Returns the tables (M, k, 3 + m) of M models (M, D) that ``clients``, int64 (k,), consecutive
    positions, have in common, on the test examples of each."""
    # One batch of all clients' examples: the models are the same, and a call is expensive.
    test = problem.data.test
    count = len(models)
    index = torch.arange(int(test.offsets[clients[0]]), int(test.offsets[clients[-1] + 1]))
    if not len(index):
        return _unscored(len(clients), metrics).expand(count, -1, -1)
    if count == 1:
        columns = _FLAT
    else:
        columns = max(1, _ELEMENTS // (count * problem.dimension))
    outputs, y, values = _predicted(problem, models, index[None], columns)
    return _table(problem, outputs, y[0], values, test.counts[clients], metrics)


def _predicted(
    problem: Problem, models: Tensor, index: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns predictions and targets (K, B, ...), and losses, scores and weights, float64 (3, K,
    B) on the host.

    They are those of models (K, D) on the test examples ``index``, int64 (K, B), or (1, B) for all
    of them; ``columns`` of them at once.
    """
    batches = list[tuple[Tensor, Tensor]]()
    limit = problem.data.limit
    for some in index.split(columns, 1):
        gathered = problem.data.gather("test", some, dtype=models.dtype, device=models.device)
        x, y = (part.expand(len(models), *part.shape[1:]) for part in gathered)
        batches.append((problem.executor.stack.predict(models, x), y))
    outputs, y = (torch.cat(parts, 1) for parts in zip(*batches, strict=True))
    link = link_of(problem.loss)
    predictions = linked(outputs, link).clamp(-limit, limit)
    judged = predictions if link == "identity" else outputs
    return predictions, y, torch.stack(per_example(problem, judged, predictions, y)).cpu()


def _unscored(clients: int, metrics: Sequence[Metric]) -> Tensor:
    """Returns the table of clients without examples: weights of 0, and no number else."""
    table = torch.full((clients, 3 + len(metrics)), torch.nan, dtype=torch.float64)
    table[:, 2] = 0.0
    return table


def _table(
    problem: Problem,
    outputs: Tensor,
    y: Tensor,
    values: Tensor,
    counts: Tensor,
    metrics: Sequence[Metric],
) -> Tensor:
    """Returns the mean losses and scores, the weights, and other metrics of k clients by M models,
    (M, k, 3 + m).

    Args:
        problem: whose units they are.
        outputs: (M, N, ...), of one client's examples after those of another.
        y: (N, ...), the targets.
        values: float64 (3, M, N), losses, scores and weights.
        counts: int64 (k,), the number of examples of each client.
        metrics: the others, m.
    """
    sums = torch.zeros(3, len(outputs), len(counts), dtype=torch.float64)
    sums.index_add_(2, torch.arange(len(counts)).repeat_interleave(counts), values)
    others = torch.full((len(metrics), *sums.shape[1:]), torch.nan, dtype=torch.float64)
    if metrics:
        whole = problem.data.in_units(outputs.detach().cpu())
        true = problem.data.in_units(y.cpu())
        sizes = counts.tolist()
        for place, (own, labels) in enumerate(
            zip(whole.split(sizes, 1), true.split(sizes), strict=True)
        ):
            # A function of the caller's is not called for a client without examples.
            for model in range(len(own)) if len(labels) else ():
                row = [metric.value(own[model], labels) for metric in metrics]
                others[:, model, place] = torch.tensor(row, dtype=torch.float64)
    return torch.stack([sums[0] / counts, sums[1] / sums[2], sums[2], *others], -1)


def per_example(
    problem: Problem, outputs: Tensor, predictions: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, the score and the weight of every example, float64 (K, B) each.

    The score of several examples is the sum of their scores over that of their weights, which are
    1, or for recall the number of labels that are there.

    Args:
        problem: with the loss and the units of the targets.
        outputs: (K, B, ...), of K models.
        predictions: (K, B, ...), made of the outputs.
        y: (K, B, ...), the targets.
    """
    losses = example_losses(problem.loss, outputs, y).to(torch.float64)
    if problem.data.spec.labels > RECALL_AT:
        return losses, *found_labels(predictions, y)
    data = problem.data
    if isinstance(problem.loss, Quantile):
        units = (data.in_units(predictions), data.in_units(y))
        scores = example_losses(problem.loss, *units).to(torch.float64)
    elif data.target_scale == "log":
        scores = example_scores(data.in_units(predictions), data.in_units(y))
    else:
        scores = example_scores(predictions, y)
        if y.is_floating_point():
            scores = scores * data.unit**2
    return losses, scores, torch.ones_like(losses)


def evaluate_models(
    problem: Problem, models: Tensor, requested: Sequence[Metric] = ()
) -> list[Metrics]:
    """Returns the test scores of M models of every client.

    If the clients have the same model, several of them make a batch, and the ranks take batches in
    turn.

    Args:
        problem: data, loss and executor.
        models: (M, n, D); expanded along the clients if they have the same model.
        requested: metrics to measure beside the loss and the score.
    """
    clients = torch.arange(problem.clients)
    ranks = problem.ranks
    common = len(clients) == 1 or models.stride(1) == 0
    if not common and len(models) <= len(clients):  # the fewer calls
        return [evaluate_each(problem, rows.__getitem__, clients, requested) for rows in models]
    begins = torch.div(problem.data.test.offsets[:-1], _FLAT, rounding_mode="floor")
    sizes = 1
    if common:
        sizes = torch.unique_consecutive(begins, return_counts=True)[1].tolist()
    metrics = further_metrics(requested, problem.data.spec, problem.loss)
    groups = clients.split(sizes)[ranks.rank :: ranks.size]
    tables = [_common(problem, models[:, one[0]], one, metrics).transpose(0, 1) for one in groups]
    empty = torch.zeros(0, len(models), 3 + len(metrics), dtype=torch.float64)
    table = ranks.join(torch.cat([empty, *tables]), torch.cat([clients[:0], *groups]), len(clients))
    return [Metrics.of(rows, metrics) for rows in table.unbind(1)]
