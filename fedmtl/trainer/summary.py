"""How scores over clients are printed: one small block for a run, its baselines and new clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

import torch

from .._rounding import number_text, rounded_up
from .metrics import Metric, distribution, shares

ByClient = Mapping[str, Mapping[str, float]]
"""Metric -> client -> number, without the clients for which it is not defined."""


@dataclass(frozen=True)
class Stage:
    """Models that are scored, one a client.

    Args:
        label: what they are.
        by_client: their scores.
        epsilon: that they cost; None where it is not said.
        diverged: ids of clients whose training did, and who have the model that it started from.
    """

    label: str
    by_client: ByClient
    epsilon: float | None = None
    diverged: Collection[str] = ()

    @property
    def left_out(self) -> set[str]:
        """Return the clients that are in no comparison: those that diverged, or have no finite loss."""
        losses = self.by_client.get("loss", {})
        return {*self.diverged, *(name for name, loss in losses.items() if not isfinite(loss))}


def spread_of(scores: Mapping[str, float], metric: Metric) -> dict[str, float]:
    """Return mean, median, worst tenth and standard deviation over the clients of ``scores``, and their number; NaN
    and 0 without any."""
    if not scores:
        return dict.fromkeys(("mean", "median", "worst_tenth", "spread"), float("nan")) | {"clients": 0}
    values = torch.tensor(list(scores.values()), dtype=torch.float64)
    return distribution(values, higher_is_better=metric.higher_is_better) | {"clients": len(values)}


def beside(own: Stage, others: Stage, metric: Metric, dtype: torch.dtype) -> tuple[float, float, float] | None:
    """Return the shares of the clients that score better, equal and worse than with other models, of those that have a
    score with both, and whose training did not diverge; None without such a client.

    Args:
        own, others: scores.
        metric: that is compared.
        dtype: of the models, which decides when two scores are equal.
    """
    first, second = (one.by_client.get(metric.name, {}) for one in (own, others))
    without = own.left_out | others.left_out
    both = [name for name in first if name in second and name not in without]
    pair = (torch.tensor([scores[name] for name in both], dtype=torch.float64) for scores in (first, second))
    found = shares(*pair, higher_is_better=metric.higher_is_better, resolution=metric.resolution(dtype))
    return found if both else None


def score_lines(
    stages: Sequence[Stage],
    metrics: Sequence[Metric],
    clients: int,
    dtype: torch.dtype,
    reference: Stage | None = None,
) -> list[str]:
    """Return the printed tables, one a metric, and what their columns mean.

    Args:
        stages: rows of a table.
        metrics: tables.
        clients: n, of all clients.
        dtype: of the models.
        reference: the models to compare with, one a client; None leaves the column out.
    """
    lines: list[str] = []
    name = "" if reference is None else reference.label
    for metric in metrics:
        known = [len(stage.by_client.get(metric.name, {})) for stage in stages]
        rows = [[metric.name, "mean", "median", "tenth", "spread", f"than {name}", "epsilon"]]
        for stage in stages:
            scores = stage.by_client.get(metric.name, {})
            found = spread_of(scores, metric)
            names = ("mean", "median", "worst_tenth", "spread")
            cells = [number_text(found[key], found["mean"]) for key in names]
            itself = reference is None or stage.by_client is reference.by_client
            compared = None if itself or reference is None else beside(stage, reference, metric, dtype)
            beyond = "-" if compared is None else percent(compared)
            epsilon = "-" if stage.epsilon is None else rounded_up(stage.epsilon, 3)
            rows.append([stage.label, *cells, beyond, epsilon])
        left_out = [
            place for place, none in ((5, reference is None), (6, all(one.epsilon is None for one in stages))) if none
        ]
        rows = [[cell for place, cell in enumerate(row) if place not in left_out] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for label, *cells in rows:
            line = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            lines.append(f"  {label:<{widths[0]}}{line}")
        few = min(known)
        if few < clients:
            most = f" to {max(known):,}" if max(known) > few else ""
            lines.append(f"  ({metric.name}: defined for {few:,}{most} of {clients:,} clients)")
    tenths = sorted({ceil(len(stage.by_client.get(m.name, {})) / 10) for stage in stages for m in metrics})
    size = "tenth of" if len(tenths) > 1 else "" if tenths == [1] else f"{tenths[0]:,}"
    who = "the client" if size == "" else f"the {size} clients"
    directions = {metric.higher_is_better for metric in metrics}
    end = "lowest" if directions == {True} else "largest" if directions == {False} else "worst"
    lines.append(f"  tenth: mean over {who} with the {end} scores")
    lines.append("  spread: standard deviation")
    if reference is not None:
        lines[-1] += f"; than {name}: % of clients better/equal/worse"
    counts = [(stage.label, len(stage.left_out)) for stage in stages]
    lost = ", ".join(f"{count:,} of {label}" for label, count in counts if count)
    lines += [f"  diverged, and in no comparison: models of clients, {lost}"] if lost else []
    return lines


def percent(values: Sequence[float]) -> str:
    """Return shares as whole percents: ``71/12/17``."""
    return "/".join(f"{value:.0%}"[:-1] for value in values)
