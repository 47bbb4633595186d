"""Comparison of the scores of two sets of models, client by client."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from .._rounding import number_text
from .._text import shown
from .metrics import Metric

_LOSERS = 3  # clients that a verdict names: those that lose most
_SMALL = 0.0095  # a share that is written with a decimal
ByClient = Mapping[str, Mapping[str, float]]
"""Metric -> client -> number, without the clients for which it is not defined."""


def distribution(scores: Tensor, *, higher_is_better: bool) -> dict[str, float]:
    """Returns the mean, median, mean of the worst tenth and standard deviation of clients' scores,
    and their number; NaN and 0 without any.

    The worst tenth are the ceil(n / 10) clients with the lowest scores, of an error those with the
    largest. The deviation has divisor n.

    Args:
        scores: (n,).
        higher_is_better: False for errors.
    """
    tenth = math.ceil(len(scores) / 10)
    ordered = torch.sort(scores, descending=not higher_is_better).values
    return {
        "mean": float(scores.mean()),
        "median": float(np.median(scores.numpy())) if len(scores) else math.nan,
        "worst_tenth": float(ordered[:tenth].mean()),
        "spread": float(scores.std(correction=0)) if len(scores) else math.nan,
        "clients": len(scores),
    }


def compared(
    scores: Tensor, others: Tensor, *, higher_is_better: bool, resolution: float = 0.0
) -> Tensor:
    """Returns the sign of each client's gain, int64 (n,): 1 if its score is better than the other
    one, 0 if they are equal and -1 if it is worse. A score that is not finite is worse than every
    number.

    Args:
        scores: (n,).
        others: (n,).
        higher_is_better: False for errors.
        resolution: relative difference up to which two scores are equal, see
            :meth:`Metric.resolution`.
    """
    sign = 1.0
    if not higher_is_better:
        sign = -1.0
    own, other = (
        torch.where(torch.isfinite(values), sign * values.double(), -1e300)
        for values in (scores, others)
    )
    # One model has other last bits on another path; rounding is no gain and no loss.
    equal = (own - other).abs() <= resolution * torch.maximum(own.abs(), other.abs())
    return torch.where(equal, 0, torch.where(own > other, 1, -1))


def shares(
    scores: Tensor, others: Tensor, *, higher_is_better: bool, resolution: float = 0.0
) -> tuple[float, float, float]:
    """Returns the shares of the clients that score better, equal and worse than with ``others``;
    for the arguments see :func:`compared`."""
    signs = compared(scores, others, higher_is_better=higher_is_better, resolution=resolution)
    better, equal, worse = ((signs == sign).double().mean().item() for sign in (1, 0, -1))
    return better, equal, worse


@dataclass(frozen=True)
class Stage:
    """The scores of one kind of model of a run, such as the shared or the finetuned one.

    Args:
        label: in tables.
        by_client: the scores by metric and id.
        epsilon: the privacy cost.
        diverged: ids of the clients whose training diverged; they have the model that it started
            from.
    """

    label: str
    by_client: ByClient
    epsilon: float = 0.0
    diverged: Collection[str] = ()

    @property
    def left_out(self) -> set[str]:
        """Returns the clients that are in no comparison: those that diverged, or have no finite
        loss."""
        losses = self.by_client.get("loss", {})
        return {*self.diverged, *(name for name, loss in losses.items() if not isfinite(loss))}


def spread_of(scores: Mapping[str, float], metric: Metric) -> dict[str, float]:
    """Returns the :func:`distribution` of a metric over the clients of ``scores``."""
    values = torch.tensor(list(scores.values()), dtype=torch.float64)
    return distribution(values, higher_is_better=metric.higher_is_better)


def beside(
    own: Stage, others: Stage, metric: Metric, dtype: torch.dtype
) -> tuple[float, float, float] | None:
    """Returns the shares of the clients that score better, equal and worse than with other models;
    None without a client to compare.

    Only clients count that have a score with both, and whose training did not diverge.

    Args:
        own: scores.
        others: scores of the other models.
        metric: that is compared.
        dtype: of the models, which decides when two scores are equal.
    """
    _, first, second = _of_both(own, others, metric)
    if not len(first):
        return None
    return shares(
        first, second, higher_is_better=metric.higher_is_better, resolution=metric.resolution(dtype)
    )


def each_beside(own: Stage, others: Stage, metric: Metric, dtype: torch.dtype) -> dict[str, str]:
    """Returns ``"better"``, ``"equal"`` or ``"worse"`` by client; for the arguments and the clients
    see :func:`beside`."""
    names, first, second = _of_both(own, others, metric)
    signs = compared(
        first, second, higher_is_better=metric.higher_is_better, resolution=metric.resolution(dtype)
    ).tolist()
    words = {1: "better", 0: "equal", -1: "worse"}
    return {name: words[sign] for name, sign in zip(names, signs, strict=True)}


def verdict(own: Stage, others: Stage, metric: Metric, dtype: torch.dtype) -> str:
    """Returns the comparison with local training in one sentence: better, the same or worse by the
    mean, how many clients gain and lose, and the clients that lose most; empty without a client to
    compare.

    Args:
        own: scores of the models of the run.
        others: scores of local training.
        metric: that is compared.
        dtype: of the models, which decides when two scores are equal.
    """
    names, first, second = _of_both(own, others, metric)
    if not names:
        return ""
    up = metric.higher_is_better
    resolution = metric.resolution(dtype)
    signs = compared(first, second, higher_is_better=up, resolution=resolution)
    better, equal, worse = (int((signs == sign).sum()) for sign in (1, 0, -1))
    mean = int(compared(first.mean(), second.mean(), higher_is_better=up, resolution=resolution))
    counts = [f"{count:,} ({count / len(names):.0%})" for count in (better, equal, worse)]
    text = (
        f"{_headline(mean, better / len(names), worse / len(names))}: "
        f"{_means(first.mean().item(), second.mean().item(), mean, metric)}; of {len(names):,} "
        f"clients {counts[0]} are better off, {counts[1]} equal, {counts[2]} worse"
    )
    if not worse:
        return text
    # An infinite error is the largest loss; a NaN would sort before it.
    if up:
        loss = second - first
    else:
        loss = first - second
    most = loss.nan_to_num(nan=inf).argsort(descending=True, stable=True)[: min(_LOSERS, worse)]
    return f"{text} (most: {', '.join(shown(names[place]) for place in most.tolist())})"


def _headline(mean: int, better: float, worse: float) -> str:
    """Returns the comparison with the non-federated baseline in words.

    Args:
        mean: 1 if the mean of the metric is better, 0 if it is equal, -1 if it is worse.
        better: share of the clients that are better off.
        worse: share of the clients that are worse off.
    """
    words = {1: "better than alone", 0: "the same as alone", -1: "worse than alone"}
    if mean <= 0 and better > 0.5:
        return f"{words[mean]} on average, but better for most clients"
    if mean >= 0 and worse > 0.5:
        return f"{words[mean]} on average, but worse for most clients"
    return words[mean]


def _means(mean: float, alone: float, sign: int, metric: Metric) -> str:
    """Returns the difference between the mean of a metric and that of the non-federated
    baseline, which are equal if ``sign`` is 0; for errors as a share."""
    if metric.higher_is_better:
        score = f"mean {metric.name}"
    else:
        score = f"mean error ({metric.name})"
    if sign == 0:
        return f"the {score} is the same"
    # The share of an error means the same in any unit; an accuracy has no such scale.
    if metric.higher_is_better or not (isfinite(mean) and 0 < alone < inf):
        return f"the {score} is {number_text(mean)}, alone {number_text(alone)}"
    share = abs(mean / alone - 1)
    side = "higher" if mean > alone else "lower"
    return f"the {score} is {share:.{int(share < _SMALL)}%} {side}"


def _of_both(own: Stage, others: Stage, metric: Metric) -> tuple[list[str], Tensor, Tensor]:
    """Returns the clients that are compared, those with both scores and no divergence, and these
    scores, float64 (k,) each."""
    first, second = (stage.by_client.get(metric.name, {}) for stage in (own, others))
    without = own.left_out | others.left_out
    both = [name for name in first if name in second and name not in without]
    one, other = (
        torch.tensor([scores[name] for name in both], dtype=torch.float64)
        for scores in (first, second)
    )
    return both, one, other
