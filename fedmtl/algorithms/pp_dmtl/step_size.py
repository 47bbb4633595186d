"""The automatic step size of PP-DMTL, chosen in a simulation of public quantities; nothing private is read."""

from __future__ import annotations

import logging
import math
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
from ..activations import simulated_objectives
from ..base import Problem
from ..linear.data import probe_linear

if TYPE_CHECKING:
    from .algorithm import PPDMTL

logger = logging.getLogger("fedmtl")
_EVENTS, _PARTS, _RANK, _MOST = 1500, 4, 3, 0.95


def choose_step(
    algorithm: PPDMTL, problem: Problem, schedule: BoundSchedule, privacy: RecordPrivacy | None
) -> tuple[float, int]:
    """Returns a2, and the delay for which it is the largest stable step, that are best on synthetic
    tasks.

    These have the numbers of tasks, records and features of the problem, and rows as long as its
    bound whose mean loss has the curvature L that the steps rest on; the schedule, the caps and the
    noise are those of the run, on a seed of their own. Tried are half of what is stable whatever
    the delays do, 1 / ((delay + 1) L), and its multiples by 2, 4, 8, ... up to 1 / L, until two in
    a row are worse than the best. Best is the least objective (2), the mean at a quarter, half,
    three quarters and the end of the run, or of its first 1,500 events.

    Args:
        algorithm: its ``a2`` is not used; its ``delay`` is where it is given.
        problem: of which only the sizes and public bounds are read.
        schedule: who acts when.
        privacy: of the run.
    """
    seed = derive_key(problem.seed, "pp_dmtl/step") >> 1
    events = min(problem.rounds, schedule.steps, _EVENTS)
    block = schedule.events(seed, 0, events)
    smooth, delay = algorithm.curvature(problem), algorithm.delay or largest_delay(block.client)
    synthetic = replace(problem, data=synthetic_tasks(algorithm, problem, smooth, seed))
    tried: dict[tuple[float, int], float] = {}
    step = 1 / ((delay + 1) * smooth)
    while step <= 1 / smooth:
        allowed = max(1, int(2 / (step * smooth) * (1 + 1e-9)) - 1)
        candidate = replace(algorithm, a2=step, delay=allowed)
        values = simulated_objectives(candidate, synthetic, schedule, block, privacy, seed=seed, parts=_PARTS)
        tried[step, allowed] = float(values.mean()) if values.isfinite().all() else math.inf
        least = min(tried.values())
        if len(tried) > 2 and min(list(tried.values())[-2:]) > least:
            break
        step *= 2
    best = min(tried, key=lambda key: tried[key])
    logger.info("a2 = %.4g, by simulation; a step for the worst delays is %.4g", best[0], next(iter(tried))[0])
    return best


def largest_delay(clients: Tensor) -> int:
    """Returns the most events from an activation of a task to its next but one, in any replicate of
    a schedule (R, S).

    Every task starts from a common event before the first, and its last gradient is used until the
    end.
    """
    events, largest = clients.shape[1], 0
    for row in clients.numpy():
        for task in np.unique(row[row >= 0]):
            places = np.concatenate([[-1], np.flatnonzero(row == task), [events]])
            largest = max(largest, int((places[2:] - places[:-2]).max()))
    return largest


def synthetic_tasks(algorithm: PPDMTL, problem: Problem, smooth: float, seed: int) -> FederatedDataset:
    """Returns tasks of the problem's sizes, of models of rank 3, whose largest curvature is
    ``smooth`` where rows of the problem's bound can have it: they share a direction as much as that
    needs."""
    data, loss = problem.data, algorithm.linear_loss
    shape = data.spec.shape
    bias, d, counts = int(probe_linear(problem.module, shape)), math.prod(shape), data.train.counts
    size = math.sqrt(max(algorithm.largest_row(problem) ** 2 - bias, 1e-12)) * SHRINK
    draw = torch.Generator().manual_seed(seed)
    direction, *free = (torch.randn(n, d, generator=draw, dtype=torch.float64) for n in (1, *counts.tolist()))
    direction /= direction.norm()

    def rows(share: float) -> list[Tensor]:
        each = [math.sqrt(share) * direction + math.sqrt(1 - share) * x / x.norm(dim=1, keepdim=True) for x in free]
        return [size * x / x.norm(dim=1, keepdim=True) for x in each]

    def curvature(share: float) -> float:
        largest = 0.0
        for x in rows(share):
            if len(x):
                whole = torch.cat([x, torch.ones(len(x), bias, dtype=torch.float64)], dim=1)
                largest = max(largest, float(torch.linalg.matrix_norm(whole, 2)) ** 2 / len(x))
        return loss.smoothness(1.0) * largest

    low, high = 0.0, _MOST
    for _ in range(20):
        share = (low + high) / 2
        low, high = (share, high) if curvature(share) < smooth else (low, share)
    models = torch.randn(len(counts), min(_RANK, d), generator=draw, dtype=torch.float64)
    models = models @ torch.randn(min(_RANK, d), d, generator=draw, dtype=torch.float64)
    targets = []
    for x, w in zip(rows(low), models, strict=True):
        score = x @ w
        score = score / score.square().mean().sqrt().clamp(min=1e-12) if len(x) else score
        targets.append(score + 0.1 * torch.randn(len(x), generator=draw, dtype=torch.float64))
    y = torch.cat(targets)
    features = torch.cat(rows(low)).reshape(-1, *shape).float()
    own = Examples(features, y.float() if data.classes is None else (y >= 0).long(), data.train.offsets)
    return FederatedDataset(own, own, tuple(data.ids), classes=data.classes, name="synthetic tasks", domain=data.domain)
