"""Aggregates of scores over clients and over replicates: the numbers of an evaluated round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..algorithms.base import Problem
from .client_scores import normalized
from .comparison import distribution
from .evaluation import Metrics
from .metrics import has_nmse, main_metric

PERCENTILES = (5, 25, 50, 75, 95)  # of replicates, in the history


def summarize(problem: Problem, scores: Metrics, prefix: str = "") -> dict[str, float]:
    """Returns the aggregates of scores over clients by name.

    They are the main metric's mean over clients, over examples and of the worst tenth of clients,
    its standard deviation over clients, and the mean of every further metric over the clients for
    which it is defined.

    Args:
        problem: whose clients are scored.
        scores: of one model a client; clients whose weight is 0 are left out.
        prefix: put before every key.
    """
    main = main_metric(problem.data.spec, problem.loss)
    counted = scores.weight > 0
    values = scores.score[counted]
    weights = scores.weight[counted]
    spread = distribution(values, higher_is_better=main.higher_is_better)
    numbers = {
        main.name: spread["mean"],
        f"weighted_{main.name}": float((values * weights).sum() / weights.sum()),
        "worst_tenth": spread["worst_tenth"],
        "spread": spread["spread"],
    }
    numbers |= {name: float(column.nanmean()) for name, column in scores.others.items()}
    return {f"{prefix}{name}": value for name, value in numbers.items()}


def numbers_of(problem: Problem, metrics: Metrics) -> dict[str, float]:
    """Returns the numbers of a row of the history: the mean loss, the aggregates of the scores, and
    for one real target the nMSE of tasks and of all examples as one task.

    Args:
        problem: whose clients are scored.
        metrics: the scores of all clients, (n,) each.
    """
    numbers = {"loss": float(metrics.loss[problem.data.test.counts > 0].mean())} | summarize(
        problem, metrics
    )
    if has_nmse(problem.data.spec, problem.loss):
        part = problem.data.test
        y = problem.data.in_units(part.y.cpu())
        tasks, pooled = normalized(metrics.score, y, part.offsets)
        numbers["nmse"] = float(tasks.nanmean(-1))
        numbers["pooled_nmse"] = float(pooled)
    return numbers


def bands(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of every number of the runs of one budget under its name, and of several
    runs its percentiles under NAME_p5, ..."""
    share = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
    row: dict[str, float] = {}
    for name in runs[0]:
        values = torch.tensor([run[name] for run in runs], dtype=torch.float64)
        row[name] = float(values.mean())
        if len(runs) > 1:
            names = (f"{name}_p{mark}" for mark in PERCENTILES)
            row |= dict(zip(names, values.quantile(share).tolist(), strict=True))
    return row
