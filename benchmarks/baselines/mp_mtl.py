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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmtl._check import non_negative, one_of, positive, positive_int
from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.algorithms.linear.solve import minimize
from fedmtl.data import RowBound
from fedmtl.errors import ConfigError
from fedmtl.local.proximal import PENALTIES
from fedmtl.random import derive_key

TaskLoss = Literal["squared", "logistic"]
TASK_LOSSES: tuple[TaskLoss, ...] = ("squared", "logistic")
REGS = tuple(10.0 ** (k / 2) for k in range(-8, 1))
"""1e-4 .. 1, by half powers of ten."""

_CURVATURE = {"squared": 1.0, "logistic": 0.25}


def bounded_tasks(data: LinearData, *, row_norm: float, target: float = math.inf) -> LinearData:
    """The records forced into a public domain: ``||x||_2 <= row_norm`` for the whole row, with the 1 of a bias, by
    scaling it down, and ``abs(y) <= target`` by cutting it off. A record that is not finite becomes zero.

    Raises:
        ConfigError: a bound of 0 or below.
    """
    positive("bounded_tasks", row_norm=row_norm)
    if not target > 0:
        raise ConfigError(f"bounded_tasks.target is {target!r}; it must be above 0.")
    whole = replace(data, bias=False).bounded(RowBound(row_norm), target)
    return replace(whole, bias=data.bias)


@dataclass(frozen=True, eq=False)
class PaddedTasks:
    """All records of n tasks in one array, with rows of zeros behind the last record of a task.

    Attributes:
        x: (n, m, p) float64.
        y: (n, m) float64, zeros where there is no record.
        weight: (n, m), 1 / n_i at a record of task i, else 0.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, data: LinearData) -> PaddedTasks:
        """The records of ``data``."""
        longest = int(data.counts.max())
        x = torch.zeros(len(data.x), longest, data.dimension, dtype=torch.float64)
        y, weight = x.new_zeros(x.shape[:2]), x.new_zeros(x.shape[:2])
        for i, (rows, targets) in enumerate(zip(data.x, data.y, strict=True)):
            x[i, : len(targets)], y[i, : len(targets)], weight[i, : len(targets)] = rows, targets, 1 / len(targets)
        return cls(x, y, weight)

    @property
    def gram(self) -> Tensor:
        """(n, p, p), X_i^T X_i / n_i."""
        return self.x.mT @ (self.x * self.weight[..., None])

    @property
    def moment(self) -> Tensor:
        """(n, p), X_i^T y_i / n_i."""
        return torch.einsum("nmp,nm->np", self.x, self.weight * self.y)

    def losses(self, models: Tensor, loss: TaskLoss) -> Tensor:
        """L_i of models (..., n, p): (..., n)."""
        margins = torch.einsum("...np,nmp->...nm", models, self.x)
        each = (margins - self.y).square() / 2 if loss == "squared" else F.softplus(-margins * self.y)
        return (each * self.weight).sum(-1)

    def gradients(self, models: Tensor, loss: TaskLoss) -> Tensor:
        """Gradients of :meth:`losses`: (..., n, p)."""
        margins = torch.einsum("...np,nmp->...nm", models, self.x)
        slope = margins - self.y if loss == "squared" else -self.y * torch.sigmoid(-margins * self.y)
        return torch.einsum("...nm,nmp->...np", slope * self.weight, self.x)


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

    Raises:
        ConfigError: an impossible setting.
        DataError: targets that do not suit the loss.
    """
    candidates = _candidates("single_task.reg", reg)
    _check_loss(data, loss)
    positive_int("single_task", folds=folds)
    if loss == "squared":
        chosen = leave_one_out(data, candidates) if len(candidates) > 1 else candidates[:1].expand(len(data.x))
        stack = PaddedTasks.of(data)
        ridge = chosen[:, None, None] * torch.eye(data.dimension, dtype=torch.float64)
        return SingleTask(torch.linalg.solve(stack.gram + ridge, stack.moment), chosen.clone())
    stack = PaddedTasks.of(data)
    if len(candidates) == 1:
        chosen = candidates.expand(len(data.x))
    else:
        scores = torch.zeros(len(candidates), len(data.x), dtype=torch.float64)
        for train, held in _folds(stack, folds, seed):
            models = torch.stack([logistic_ridge(train, value.expand(len(data.x))) for value in candidates])
            scores += held.losses(models, loss)
        chosen = candidates[scores.argmin(0)]
    return SingleTask(logistic_ridge(stack, chosen), chosen.clone())


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


def logistic_ridge(stack: PaddedTasks, reg: Tensor) -> Tensor:
    """min_w L_i(w) + (reg_i / 2) ||w||^2 of every task with the logistic loss: (n, p).

    Args:
        stack: the records.
        reg: (n,), above 0.
    """
    fits = []
    for x, y, weight, own in zip(stack.x, stack.y, stack.weight, reg.tolist(), strict=True):
        here = weight > 0
        fits.append(minimize(LinearLoss("logistic"), x[here].numpy(), y[here].numpy(), own).theta)
    return torch.from_numpy(np.stack(fits))


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
    _check_loss(data, loss)
    return _fista(PaddedTasks.of(data), _levels(lam), penalty, loss, tolerance, iterations)


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
    _check_loss(data, loss)
    levels, stack = _levels(lam), PaddedTasks.of(data)
    scores = torch.zeros(len(levels), dtype=torch.float64)
    for train, held in _folds(stack, folds, seed):
        models = _fista(train, levels, penalty, loss, tolerance, 500).models
        scores += held.losses(models, loss).sum(1)
    return float(levels[scores.argmin()])


def _fista(
    stack: PaddedTasks, levels: Tensor, penalty: str, loss: TaskLoss, tolerance: float, iterations: int
) -> MultiTask:
    one_of("multi_task", ("nuclear", "rows"), penalty=penalty)
    positive("multi_task", tolerance=tolerance)
    g, gram = PENALTIES["l2" if penalty == "rows" else penalty], stack.gram  # of models as columns
    moment = stack.moment
    step = 1 / max(_CURVATURE[loss] * float(torch.linalg.matrix_norm(gram, ord=2).max()), 1e-12)

    def gradient(w: Tensor) -> Tensor:
        if loss == "squared":
            return torch.einsum("npq,rnq->rnp", gram, w) - moment
        return stack.gradients(w, loss)

    w = ahead = gram.new_zeros(len(levels), *moment.shape)
    weight, residual = torch.ones_like(levels), math.inf
    for _ in range(iterations):
        moved = ahead - step * gradient(ahead)
        new = torch.stack(
            [g.prox(part.mT, step * level).mT for part, level in zip(moved, levels.tolist(), strict=True)]
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
    objective = stack.losses(w, loss).sum(1) + levels * g.value(w.mT)
    return MultiTask(w, objective, residual)


def _folds(stack: PaddedTasks, folds: int, seed: int) -> list[tuple[PaddedTasks, PaddedTasks]]:
    """Pairs (without a fold, that fold), each task's records in random order; the weights of the fold are 1, so that
    its losses are sums, and a task with one record is in no fold."""
    generator = torch.Generator().manual_seed(derive_key(seed, "folds") >> 1)
    here = stack.weight > 0
    order = torch.where(here, torch.rand(here.shape, generator=generator, dtype=torch.float64), 2.0).argsort(1)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(here.shape[1]).expand_as(order))
    pairs = []
    for fold in range(folds):
        held = here & (rank % folds == fold) & (here.sum(1, keepdim=True) > 1)
        train = here & ~held
        weight = train / train.sum(1, keepdim=True)
        empty = torch.zeros_like(stack.y)
        pairs.append(
            (
                PaddedTasks(stack.x, torch.where(train, stack.y, empty), weight),
                PaddedTasks(stack.x, torch.where(held, stack.y, empty), held.double()),
            )
        )
    return pairs


def _candidates(where: str, reg: float | Sequence[float]) -> Tensor:
    values = [reg] if isinstance(reg, int | float) else list(reg)
    if not values:
        raise ConfigError(f"{where} is empty; give a number, or several to choose from.")
    for value in values:
        positive(where.split(".")[0], reg=value)
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _levels(lam: float | Sequence[float]) -> Tensor:
    values = [lam] if isinstance(lam, int | float) else list(lam)
    if not values:
        raise ConfigError("multi_task.lam is empty; give a number, or several.")
    for value in values:
        non_negative("multi_task", lam=value)
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _check_loss(data: LinearData, loss: TaskLoss) -> None:
    one_of("loss", TASK_LOSSES, loss=loss)
    LinearLoss(loss).check_targets(data.y, data.name)
