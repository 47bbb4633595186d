"""The figures of one result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ..report import figures
from .scored import beside

if TYPE_CHECKING:
    from .result import Result


def plot_result(
    result: Result, private: Path, public: Path, *, format: str = "png", width: float | None = None
) -> list[Path]:
    """Draw the scores of a run by round and by client, or the bands of its replicates, and the epsilon that it spent.

    Args:
        result: of the run.
        private: the folder of ``accuracy`` and ``clients``, or of ``bands``.
        public: the folder of ``epsilon``, which is drawn where something is spent.
        format: png, pdf or svg.
        width: in inches, of figures for a paper.

    Returns:
        The files.
    """
    metric, step, name = result.metric, result.step, result.algorithm
    measured = None if result.privacy.interval is None else result.privacy.interval["measured"]
    if result.replicates is not None:
        path = private / f"bands.{format}"
        return [figures.plot_bands(result.history, path, name=name, metric=metric, step=step, paper=width)]
    files = []
    if 0 < result.epsilon < math.inf:
        path = public / f"epsilon.{format}"
        files += [figures.plot_epsilon(result.history, path, step=step, measured=measured, paper=width)]
    if not any(math.isfinite(row[metric]) for row in result.history):
        return files
    runs = {name: result, **result.baselines}
    histories = {baseline: run.history for baseline, run in result.baselines.items()}
    finetuned = {run.stages(label)[-1].label: run.final[metric] for label, run in runs.items() if run.finetuned}
    path = private / f"accuracy.{format}"
    files += [
        figures.plot_history(
            result.history,
            histories,
            path,
            name=name,
            metric=metric,
            step=step,
            finetuned=finetuned,
            measured=measured,
            paper=width,
        )
    ]
    stages = [*result.stages(name)[::-1]]  # the final models first
    stages += [stage for label, run in result.baselines.items() for stage in run.stages(label)]
    main, dtype, ids = result.shown[0], result.personal.dtype, list(result.personal_accuracy)
    scores = {stage.label: [stage.by_client[metric][client] for client in ids] for stage in stages}
    shares = {stage.label: beside(stages[0], stage, main, dtype) for stage in stages[1:]}
    path = private / f"clients.{format}"
    files += [
        figures.plot_clients(
            scores,
            path,
            metric=metric,
            higher_is_better=main.higher_is_better,
            shares={label: three for label, three in shares.items() if three is not None},
            paper=width,
        )
    ]
    return files
