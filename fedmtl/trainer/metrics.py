"""Metrics of multi-task learning: normalized mean squared error (nMSE) and average AUC (aAUC).

nMSE is the mean squared error over the variance of the targets, aAUC the mean over tasks of the area under the ROC
curve (Liang et al., "Model-protected multi-task learning", section 5.3, which does not say which variance). Here it is
the variance of the evaluated targets themselves (the test side's for a test error) with divisor n: so a constant
prediction at the mean of these targets scores exactly 1, and a number is comparable between methods whatever they were
trained on. Each task is normalized by its own variance; :attr:`NormalizedError.pooled` takes all examples together.

All numbers come from records without noise: on private records they are not private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, State
from ..data import Examples
from ..errors import ConfigError, DataError
from ..local.batches import max_clients
from .evaluation import evaluate_personal

Side = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class NormalizedError:
    """nMSE; the leading axes are those of the predictions.

    Attributes:
        task: float64 (..., n), each task's MSE over the variance of its own targets; NaN where they do not vary, or
            where there are none.
        pooled: float64 (...), squared errors of all examples over their squared distances from the common mean; NaN
            where no target varies.
        mse: float64 (..., n), each task's MSE; NaN without examples.
    """

    task: Tensor
    pooled: Tensor
    mse: Tensor

    @property
    def mean(self) -> Tensor:
        """float64 (...), over the tasks whose targets vary; NaN if there are none."""
        return self.task.nanmean(-1)


def nmse(predictions: Tensor, targets: Tensor, offsets: Tensor) -> NormalizedError:
    """Normalized mean squared errors.

    Args:
        predictions: (..., N), of examples in the order of the tasks.
        targets: (N,).
        offsets: int64 (n + 1,); task t has the examples ``offsets[t]:offsets[t + 1]``.
    """
    _check(predictions, targets, offsets)
    squared = (predictions.double() - targets.double()).square()
    return normalized(_sums(squared, offsets) / offsets.diff(), targets, offsets)


def normalized(mse: Tensor, targets: Tensor, offsets: Tensor) -> NormalizedError:
    """nMSE from each task's mean squared error (..., n), such as ``evaluate_personal(...).score``."""
    y = targets.double()
    counts = offsets.diff()
    mean = _sums(y, offsets) / counts
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    variance = _sums((y - mean[owner]).square(), offsets) / counts
    task = torch.where(_varies(y, offsets), mse / variance, torch.nan)
    spread = (y - y.mean()).square().sum()
    total = torch.where(counts > 0, mse * counts, 0.0).sum(-1)
    pooled = total / spread if bool((y != y[0]).any()) else torch.full_like(total, torch.nan)
    return NormalizedError(task, pooled, mse)


def task_auc(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
    """Area under the ROC curve of each task: the probability that a positive example scores above a negative one,
    with 1/2 for a tie.

    Args:
        scores: (..., N), higher for positive examples; in the order of the tasks.
        labels: (N,), positive where above 0.5: 0 and 1, or -1 and +1.
        offsets: int64 (n + 1,).

    Returns:
        float64 (..., n); NaN for a task whose examples are all of one class, where it is not defined.

    Raises:
        DataError: a score that is not finite.
    """
    _check(scores, labels, offsets)
    flat = scores.detach().double().cpu().reshape(-1, scores.shape[-1]).numpy()
    if not np.isfinite(flat).all():
        raise DataError("task_auc: a score is not finite; an order of examples needs finite scores.")
    positive = (labels > 0.5).cpu().numpy()
    out = np.full((len(flat), len(offsets) - 1), np.nan)
    for task, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        own = positive[first:last]
        up, down = int(own.sum()), int((~own).sum())
        if up and down:
            ranks = rankdata(flat[:, first:last], axis=1)[:, own].sum(1)
            out[:, task] = (ranks - up * (up + 1) / 2) / (up * down)
    return torch.from_numpy(out).reshape(*scores.shape[:-1], len(offsets) - 1)


def average_auc(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
    """aAUC, float64 (...): the mean of :func:`task_auc` over the tasks that have both classes; NaN if none has."""
    return task_auc(scores, labels, offsets).nanmean(-1)


def linear_outputs(models: Tensor, examples: Examples) -> Tensor:
    """Predictions of linear models on the examples of their tasks.

    Args:
        models: (..., n, D) with D = d, or d + 1 where the last parameter is a bias; float.
        examples: of n tasks, features (N, d).

    Returns:
        (..., N) in the dtype of ``models``.

    Raises:
        ConfigError: another number of tasks or parameters.
    """
    width, tasks = examples.x.shape[1], len(examples.offsets) - 1
    if models.ndim < 2 or models.shape[-2] != tasks or models.shape[-1] not in (width, width + 1):
        raise ConfigError(
            f"models have shape {tuple(models.shape)}; needed: (..., {tasks}, {width}) or (..., {tasks}, {width + 1})."
        )
    flat = models.reshape(-1, *models.shape[-2:])
    out = models.new_empty(len(flat), len(examples.x))
    for task, (first, last) in enumerate(
        zip(examples.offsets[:-1].tolist(), examples.offsets[1:].tolist(), strict=True)
    ):
        out[:, first:last] = flat[:, task, :width] @ examples.x[first:last].to(models.dtype).T
        if models.shape[-1] > width:
            out[:, first:last] += flat[:, task, width:]
    return out.reshape(*models.shape[:-2], len(examples.x))


def evaluate_nmse(problem: Problem, algorithm: Algorithm, state: State, side: Side = "test") -> NormalizedError:
    """nMSE of every client's personal model, whatever the algorithm and the model: task (n,).

    Raises:
        DataError: not a regression with one target an example.
    """
    part = problem.data.side(side)
    if problem.data.classes is not None or part.y.ndim != 1:
        raise DataError(f"{problem.data.name}: nMSE is for a regression with one target an example.")
    return normalized(evaluate_personal(problem, algorithm, state, side).score, part.y.cpu(), part.offsets)


def normalized_numbers(problem: Problem, mse: Tensor) -> dict[str, Tensor]:
    """``nmse`` and ``pooled_nmse`` (...) of clients' test errors (..., n), for rows of numbers; empty for other
    problems than a regression with one target an example."""
    part = problem.data.test
    if problem.data.classes is not None or part.y.ndim != 1:
        return {}
    errors = normalized(mse, part.y.cpu(), part.offsets)
    return {"nmse": errors.mean, "pooled_nmse": errors.pooled}


def evaluate_auc(problem: Problem, algorithm: Algorithm, state: State, side: Side = "test") -> Tensor:
    """AUC of every client's personal model, whatever the algorithm and the model: float64 (n,), NaN for one class.

    The score of an example is the model's output: its only one, or the second logit minus the first.

    Raises:
        DataError: not two classes with one label an example.
    """
    part = problem.data.side(side)
    if problem.data.classes != 2 or part.y.ndim != 1:
        raise DataError(f"{problem.data.name}: AUC is for two classes with one label an example.")
    clients = torch.arange(problem.clients)
    scores = torch.cat(
        [
            _scores(problem, algorithm.personalize(problem, state, block), block, side)
            for block in clients.split(max_clients(problem.dimension))
        ]
    )
    return task_auc(scores, part.y.cpu(), part.offsets)


def _scores(problem: Problem, rows: Tensor, clients: Tensor, side: Side) -> Tensor:
    """Scores (N,) of the examples of ``clients``, in their order, under models (k, D)."""
    part, scores = problem.data.side(side), []
    with problem.executor.stack() as stack:
        for row, client in zip(rows, clients.tolist(), strict=True):
            index = torch.arange(int(part.offsets[client]), int(part.offsets[client + 1]))
            x, _ = problem.data.gather(side, index[None], dtype=rows.dtype, device=rows.device)
            outputs = stack.predict(row[None], x)[0].reshape(len(index), -1)
            if outputs.shape[1] > 2:
                raise DataError(
                    f"The model has {outputs.shape[1]} outputs; AUC needs one, or one for each of 2 classes."
                )
            scores.append((outputs[:, -1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs[:, 0]).double().cpu())
    return torch.cat(scores)


def _sums(values: Tensor, offsets: Tensor) -> Tensor:
    """(..., N) float64 -> sums of tasks (..., n)."""
    owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff()).to(values.device)
    return values.new_zeros(*values.shape[:-1], len(offsets) - 1).index_add_(-1, owner, values)


def _varies(y: Tensor, offsets: Tensor) -> Tensor:
    """bool (n,): whether the targets of a task differ."""
    first = y[torch.repeat_interleave(offsets[:-1], offsets.diff())]
    return _sums((y != first).double(), offsets) > 0


def _check(values: Tensor, targets: Tensor, offsets: Tensor) -> None:
    count = int(offsets[-1])
    if values.ndim < 1 or values.shape[-1] != count or targets.shape != (count,):
        raise ConfigError(
            f"values {tuple(values.shape)} and targets {tuple(targets.shape)}; offsets end at {count}, so needed: "
            f"(..., {count}) and ({count},)."
        )
    if not count:
        raise ConfigError("no task has examples; at least one needs some.")
