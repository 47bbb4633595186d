"""What MP-MTL lies between: tasks that learn alone (STL), and joint learning without privacy (MTL).

Objectives of Liang et al., "Model-protected multi-task learning", equations (1) to (3), for linear models:

    L_i(w) = (1 / n_i) sum_j l(x_ij . w, y_ij),    l(m, y) = (m - y)^2 / 2 or log(1 + exp(-y m))

    STL: min_w L_i(w) + (reg / 2) ||w||^2 for every task;    MTL: min_W sum_i L_i(w_i) + lam g(W),

g the nuclear norm of W or the sum of the norms of its rows (features). Models are rows here, (n, p), so W is their
transpose. No noise, and nothing is released: a task that learns alone tells nobody anything, MTL protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.algorithms.linear.stack import TaskLoss, TaskStack
from fedmtl.data import RowBound
from fedmtl.local.proximal import PENALTIES
from fedmtl.random import derive_key

REGS = tuple(10.0 ** (k / 2) for k in range(-8, 1))
"""1e-4 .. 1, by half powers of ten."""


def bounded_tasks(data: LinearData, *, feature_norm: float, target: float = math.inf) -> LinearData:
    """The records forced into a public domain: ``||x||_2 <= feature_norm`` for the whole row, with the 1 of a bias, by
    scaling it down, and ``abs(y) <= target`` by cutting it off. A record that is not finite becomes zero.
    """
    whole = replace(data, bias=False).bounded(RowBound(feature_norm), target)
    return replace(whole, bias=data.bias)


@dataclass(frozen=True, eq=False)
class SingleTask:
    """Tasks that learned alone.

    Attributes:
        models: (n, p) float64.
        reg: (n,), the regularization of each task.
    """

    models: Tensor
    reg: Tensor


def single_task(
    data: LinearData,
    *,
    loss: TaskLoss = "squared",
    reg: float | Sequence[float] = REGS,
    folds: int = 5,
    seed: int = 0,
) -> SingleTask:
    """STL: min_w L_i(w) + (reg / 2) ||w||^2, exactly, for every task.

    Args:
        data: the tasks' records; labels -1 and +1 for ``"logistic"``.
        loss: squared or logistic.
        reg: above 0; from several, every task chooses its own by the squared errors of leaving out one record at a
            time (in closed form, with the sum n_i reg kept), or for logistic loss by cross-validated log loss. It reads
            that task's records alone, so where whole tasks are protected the choice costs no privacy.
        folds: of the cross-validation, at most the number of records.
        seed: of the folds.
    """
    candidates = torch.as_tensor(reg, dtype=torch.float64).reshape(-1)
    if len(candidates) == 1:
        chosen = candidates.expand(len(data.x))
    elif loss == "squared":
        chosen = leave_one_out(data, candidates)
    else:
        scores = torch.zeros(len(candidates), len(data.x), dtype=torch.float64)
        for train, held in _folds(data, folds, seed):
            stack = TaskStack.of(train, loss)
            models = torch.stack([stack.fit(value) for value in candidates])
            scores += _losses(held, models, loss)
        chosen = candidates[scores.argmin(0)]
    return SingleTask(TaskStack.of(data, loss).fit(chosen), chosen.clone())


def leave_one_out(data: LinearData, candidates: Tensor) -> Tensor:
    """The candidate of the smallest squared leave-one-out error of each task's ridge regression: (k,) -> (n,).

    The error of record j left out is (y_j - x_j . w) / (1 - h_j), h_j its leverage x_j . (X^T X + n reg I)^-1 x_j.
    """
    chosen = []
    for x, y in zip(data.x, data.y, strict=True):
        u, s, _ = torch.linalg.svd(x, full_matrices=False)
        kept = s.square() / (s.square() + len(y) * candidates[:, None])  # (k, r)
        fitted, leverage = (kept * (u.T @ y)) @ u.T, kept @ u.T.square()
        chosen.append(int(((y - fitted) / (1 - leverage)).square().sum(1).argmin()))
    return candidates[chosen]


@dataclass(frozen=True, eq=False)
class MultiTask:
    """Tasks that learned together, for each of R regularizations.

    Attributes:
        models: (R, n, p) float64.
        objective: (R,), sum_i L_i + lam g.
        residual: the largest norm of a proximal gradient (W - prox(W - s G)) / s at the end.
    """

    models: Tensor
    objective: Tensor
    residual: float


def multi_task(
    data: LinearData,
    lam: float | Sequence[float],
    *,
    penalty: Literal["nuclear", "rows"] = "nuclear",
    loss: TaskLoss = "squared",
    tolerance: float = 1e-6,
    iterations: int = 5000,
) -> MultiTask:
    """MTL without privacy: min_W sum_i L_i(w_i) + lam g(W) by accelerated proximal gradient (FISTA: Beck, Teboulle
    2009) with restarts where the momentum points uphill. The step comes from the data: nothing here is private.

    Args:
        data: the tasks' records.
        lam: one or R regularizations, at least 0, solved as one batch.
        penalty: ``"nuclear"``, equation (2), or ``"rows"``, equation (3).
        loss: squared or logistic.
        tolerance: on the residual.
        iterations: at most.
    """
    levels = torch.as_tensor(lam, dtype=torch.float64).reshape(-1)
    return _fista(TaskStack.of(data, loss), levels, penalty, tolerance, iterations)


def choose_multi_task(
    data: LinearData,
    lam: Sequence[float],
    *,
    penalty: Literal["nuclear", "rows"] = "nuclear",
    loss: TaskLoss = "squared",
    folds: int = 5,
    seed: int = 0,
    tolerance: float = 1e-3,
) -> float:
    """The regularization with the smallest cross-validated loss, all tasks' records together: it reads everybody's
    records without noise (as the paper does for its non-private methods)."""
    levels = torch.as_tensor(lam, dtype=torch.float64)
    scores = torch.zeros(len(levels), dtype=torch.float64)
    for train, held in _folds(data, folds, seed):
        models = _fista(TaskStack.of(train, loss), levels, penalty, tolerance, 500).models
        scores += _losses(held, models, loss).sum(1)
    return float(levels[scores.argmin()])


def _fista(
    stack: TaskStack, levels: Tensor, penalty: str, tolerance: float, iterations: int
) -> MultiTask:
    g = PENALTIES["l2" if penalty == "rows" else penalty]  # of models as columns
    start = torch.zeros(len(stack.data.x), stack.data.dimension, dtype=torch.float64)
    steepest = max(float(torch.linalg.matrix_norm(bend, ord=2)) for bend in stack.curvature(start))
    step = 1 / max(steepest, 1e-12)
    w = ahead = start.expand(len(levels), -1, -1)
    weight, residual = torch.ones_like(levels), math.inf
    for _ in range(iterations):
        moved = ahead - step * stack.gradient(ahead.transpose(0, 1)).transpose(0, 1)
        new = torch.stack(
            [
                g.prox(part.mT, step * level).mT
                for part, level in zip(moved, levels.tolist(), strict=True)
            ]
        )
        residual = float((new - ahead).norm(dim=(1, 2)).max()) / step
        if residual <= tolerance:
            w = new
            break
        uphill = ((ahead - new) * (new - w)).sum((1, 2)) > 0
        following = torch.where(uphill, 1.0, (1 + (1 + 4 * weight.square()).sqrt()) / 2)
        push = torch.where(uphill, 0.0, (weight - 1) / following)
        ahead = new + push[:, None, None] * (new - w)
        w, weight = new, following
    objective = stack.value(w.transpose(0, 1)).sum(0) + levels * g.value(w.mT)
    return MultiTask(w, objective, residual)


def _folds(data: LinearData, folds: int, seed: int) -> list[tuple[LinearData, LinearData]]:
    """Pairs (without a fold, that fold), each task's records in random order; a task with one record is in no fold."""
    generator = torch.Generator().manual_seed(derive_key(seed, "folds") >> 1)
    draws = torch.rand(
        len(data.x), int(data.counts.max()), generator=generator, dtype=torch.float64
    )
    counts = data.counts.tolist()
    of = [own[:n].argsort().argsort() % folds if n > 1 else torch.tensor([-1])
          for own, n in zip(draws, counts, strict=True)]  # fmt: skip

    def those(inside: list[Tensor]) -> LinearData:
        x, y = (tuple(map(Tensor.__getitem__, side, inside)) for side in (data.x, data.y))
        return replace(data, x=x, y=y)

    return [
        (those([own != fold for own in of]), those([own == fold for own in of]))
        for fold in range(folds)
    ]


def _losses(data: LinearData, models: Tensor, loss: TaskLoss) -> Tensor:
    """Summed losses of every task, which may have no records, under models (R, n, p): (R, n)."""
    value = LinearLoss("half_squared" if loss == "squared" else loss).value
    each = zip(models.transpose(0, 1), data.x, data.y, strict=True)
    return torch.stack([value(own, x, y).sum(1) for own, x, y in each], dim=1)
