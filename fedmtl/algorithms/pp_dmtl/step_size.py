"""The automatic step size of PP-DMTL, by simulation on synthetic tasks; no records are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...data import Examples, FederatedDataset
from ...data.transforms import SHRINK
from ...privacy import RecordPrivacy
from ...random import derive_key
from ...schedules import BoundSchedule
from ..base import Problem
from ..linear.data import probe_linear
from ..one_at_a_time import simulated_objectives

if TYPE_CHECKING:
    from .algorithm import PPDMTL

logger = logging.getLogger("fedmtl")
_ACTIVATIONS = 1500  # the most activations of a simulation
_PARTS = 4  # the objective is the mean over the ends of so many parts
_RANK = 3  # of the synthetic models
_MOST = 0.95  # the largest share of a common direction in the synthetic rows


def choose_step(
    algorithm: PPDMTL, problem: Problem, schedule: BoundSchedule, privacy: RecordPrivacy | None
) -> tuple[float, int]:
    """Chooses the step size a2 that is best on synthetic tasks.

    The tasks have the numbers of tasks, records and features of the problem. Their rows are as long
    as its bound, and their mean loss has the curvature L on which the steps rest. The schedule, the
    caps and the noise are those of the run, on a seed of their own. The candidates are 1 / ((delay
    + 1) L), half of the largest step that is stable for all delays, and its multiples by 2, 4, 8,
    ... up to 1 / L, until two in a row are worse than the best. The best one has the least
    objective (2), the mean at a quarter, half, three quarters and the end of the run, or of its
    first 1,500 activations.

    Args:
        algorithm: its ``a2`` is not used; its ``delay`` is, if it is given.
        problem: only its sizes and public bounds are read.
        schedule: of the run.
        privacy: of the run.

    Returns:
        a2, and the delay for which it is the largest stable step.
    """
    seed = derive_key(problem.seed, "pp_dmtl/step") >> 1
    activations = min(problem.rounds, schedule.steps, _ACTIVATIONS)
    block = schedule.activations(seed, 0, activations)
    smooth = algorithm.curvature(problem)
    delay = algorithm.delay or largest_delay(block.client)
    synthetic = replace(problem, data=synthetic_tasks(algorithm, problem, smooth, seed))
    tried: dict[tuple[float, int], float] = {}
    step = 1 / ((delay + 1) * smooth)
    while step <= 1 / smooth:
        allowed = max(1, int(2 / (step * smooth) * (1 + 1e-9)) - 1)
        candidate = replace(algorithm, a2=step, delay=allowed)
        values = simulated_objectives(
            candidate, synthetic, schedule, block, privacy, seed=seed, parts=_PARTS
        )
        objective = math.inf  # of a run that diverges
        if values.isfinite().all():
            objective = float(values.mean())
        tried[step, allowed] = objective
        objectives = list(tried.values())
        if len(tried) > 2 and min(objectives[-2:]) > min(objectives):
            break
        step *= 2
    best = min(tried, key=tried.__getitem__)
    worst_case, _ = next(iter(tried))
    said = "a2 = %.4g, by simulation; a step for the worst delays is %.4g"
    logger.info(said, best[0], worst_case)
    return best


def largest_delay(clients: Tensor) -> int:
    """Returns the most activations from one activation of a task to its next but one.

    Every task starts from a common activation before the first, and its last gradient is used until
    the end.

    Args:
        clients: int64 (R, S), the acting task of every activation in each replicate; -1 for none.

    Example:
        >>> import torch
        >>> from fedmtl.algorithms import largest_delay
        >>> largest_delay(torch.tensor([[0, 1, 0, 1, 1]]))  # task 0 at activations 0 and 2 of 5
        5
    """
    activations = clients.shape[1]
    largest = 0
    for row in clients.numpy():
        for task in np.unique(row[row >= 0]):
            places = np.concatenate([[-1], np.flatnonzero(row == task), [activations]])
            ages = places[2:] - places[:-2]
            largest = max(largest, int(ages.max()))
    return largest


def synthetic_tasks(
    algorithm: PPDMTL, problem: Problem, smooth: float, seed: int
) -> FederatedDataset:
    """Returns synthetic tasks of the problem's sizes, with models of rank 3.

    Their rows share a direction, so strongly that the largest curvature of a task is ``smooth``, or
    as near to it as rows of the problem's bound allow.

    Args:
        algorithm: its loss and bounds.
        problem: only its sizes and public bounds are read.
        smooth: L, the curvature.
        seed: of the draws.
    """
    data = problem.data
    shape = data.spec.shape
    d = math.prod(shape)
    counts = data.train.counts
    bias = int(probe_linear(problem.module, shape))
    size = math.sqrt(max(algorithm.largest_row(problem) ** 2 - bias, 1e-12)) * SHRINK
    draw = torch.Generator().manual_seed(seed)
    direction = torch.randn(1, d, generator=draw, dtype=torch.float64)
    free = [torch.randn(n, d, generator=draw, dtype=torch.float64) for n in counts.tolist()]
    direction /= direction.norm()
    # The curvature grows with the share of the common direction, so bisection finds the share.
    low = 0.0
    high = _MOST
    for _ in range(20):
        share = (low + high) / 2
        tried = _mixed_rows(free, direction, share, size)
        if algorithm.linear_loss.smoothness(1.0) * _largest_curvature(tried, bias) < smooth:
            low = share
        else:
            high = share
    # Models of rank 3, (T, d).
    models = torch.randn(len(counts), min(_RANK, d), generator=draw, dtype=torch.float64)
    models = models @ torch.randn(min(_RANK, d), d, generator=draw, dtype=torch.float64)
    rows = _mixed_rows(free, direction, low, size)
    scores = torch.cat([_scores(x, w, draw) for x, w in zip(rows, models, strict=True)])
    y = scores.float()
    if data.classes is not None:
        y = (scores >= 0).long()
    features = torch.cat(rows).reshape(-1, *shape).float()
    records = Examples(features, y, data.train.offsets)
    return FederatedDataset(
        records,
        records,
        tuple(data.ids),
        classes=data.classes,
        name="synthetic tasks",
        domain=data.domain,
    )


def _mixed_rows(
    free: Sequence[Tensor], direction: Tensor, share: float, size: float
) -> list[Tensor]:
    """Returns the tasks' rows of length ``size`` with a share of the common direction.

    Args:
        free: (n_t, d) for each task, the rows' own directions.
        direction: (1, d), of length 1.
        share: in [0, 1).
        size: the length.
    """
    made = []
    for x in free:
        own = math.sqrt(1 - share) * x / x.norm(dim=1, keepdim=True)
        mixed = math.sqrt(share) * direction + own
        made.append(size * mixed / mixed.norm(dim=1, keepdim=True))
    return made


def _largest_curvature(rows: Sequence[Tensor], bias: int) -> float:
    """Returns the largest eigenvalue of X^T X / n of any task, with ``bias`` columns of ones."""
    largest = 0.0
    for x in rows:
        if len(x):
            ones = torch.ones(len(x), bias, dtype=torch.float64)
            whole = torch.cat([x, ones], dim=1)
            norm = float(torch.linalg.matrix_norm(whole, 2))
            largest = max(largest, norm**2 / len(x))
    return largest


def _scores(x: Tensor, w: Tensor, draw: torch.Generator) -> Tensor:
    """Returns the scores of a task's rows under its model, of mean square 1, with noise of 0.1."""
    score = x @ w
    if len(x):
        score = score / score.square().mean().sqrt().clamp(min=1e-12)
    return score + 0.1 * torch.randn(len(x), generator=draw, dtype=torch.float64)
