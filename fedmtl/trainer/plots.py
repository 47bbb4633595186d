"""The figures of one result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._rounding import rounded_up
from ..report import figures
from ..report._names import title_of
from .comparison import beside
from .stages import stages_of

if TYPE_CHECKING:
    from .result import Result


def plot_result(
    result: Result, folder: Path, *, format: str = "png", width: float | None = None
) -> list[Path]:
    """Draws the scores of a run by round and by client, with the epsilon that it spent, or the
    bands of its replicates.

    Args:
        result: of the run.
        folder: of ``accuracy`` and ``clients``, or of ``bands``; private.
        format: png, pdf or svg.
        width: in inches, of figures for a paper.

    Returns:
        The files.
    """
    metric = result.metric
    name = result.algorithm
    about: dict[str, Any] = {"metric": metric, "step": result.step, "paper": width}
    if result.replicates is not None:
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in result.history:
            budget = "no budget"
            if row["budget"] is not None:
                budget = f"epsilon {rounded_up(row['budget'], 6)}"
            lines.setdefault(f"{title_of(name)}, {budget}", []).append(row)
        return [figures.plot_rounds(lines, folder / f"bands.{format}", **about)]
    # A server scores nobody, and has nothing to draw.
    if not any(math.isfinite(row[metric]) for row in result.history):
        return []
    runs = {name: result, **result.baselines}
    lines = {label: run.history for label, run in runs.items()}
    finetuned = {
        stages_of(run, label)[-1].label: run.final[metric]
        for label, run in runs.items()
        if run.finetuned
    }
    measured = None
    if result.privacy.interval is not None:
        measured = result.privacy.interval["measured"]
    stages = [*stages_of(result, name)[::-1]]  # the final models first
    stages += [stage for label, run in result.baselines.items() for stage in stages_of(run, label)]
    main = result.shown[0]
    dtype = result.personal.dtype
    # Clients without test examples have no bar.
    ids = list(result.personal_accuracy)
    scores = {stage.label: [stage.by_client[metric][client] for client in ids] for stage in stages}
    shares = {stage.label: beside(stages[0], stage, main, dtype) for stage in stages[1:]}
    return [
        figures.plot_rounds(
            lines, folder / f"accuracy.{format}", finetuned=finetuned, measured=measured, **about
        ),
        figures.plot_clients(
            scores,
            folder / f"clients.{format}",
            metric=metric,
            higher_is_better=main.higher_is_better,
            shares={label: three for label, three in shares.items() if three is not None},
            paper=width,
        ),
    ]
