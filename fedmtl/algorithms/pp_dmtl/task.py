"""What a task of PP-DMTL does alone: its rows, and the exact fit of its own part q_t on its raw records."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...data import RowBound
from ...local.proximal import (
    Penalty,
    half_squared_norm,
    l1_norm,
    prox_half_squared,
    prox_l1,
    prox_rows,
    row_norm,
)
from ..linear.data import LinearData, LinearLoss, prepared, solve_regularized

if TYPE_CHECKING:
    from ..base import Problem

OwnPenalty = Literal["frobenius", "l1", "l2"]

LARGEST_TARGET = 2.0**40
"""Bound on targets where no smaller one is stated."""
_NEWTON_STEPS, _HALVINGS, _GRADIENT_STEPS = 100, 34, 100_000
_ELEMENTS = 1 << 22  # of the rows of all points together


def bounded_rows(problem: Problem, loss: LinearLoss, row_norm: float | None, target: float | None = None) -> LinearData:
    """The training records of every task within public bounds, enforced record by record and never fitted.

    Features are scaled down to ``||x||_2 <= row_norm``, and a bias's 1 stays; targets of the squared loss are cut off
    at abs(y) <= ``target``. A record that is not finite becomes zero features and target. Made once for each pair of
    data and model.

    Args:
        problem: the data and the model.
        loss: of the records.
        row_norm: None leaves finite features as they are.
        target: None for 2^40, within which nothing overflows.

    Raises:
        DataError: targets that do not suit the loss.
    """

    def build() -> LinearData:
        data = LinearData.of(problem)
        loss.check_targets(data.y, data.name)
        limit, width = (
            LARGEST_TARGET if target is None else min(target, LARGEST_TARGET),
            data.dimension - int(data.bias),
        )
        x, y = data.pooled()
        features = x[:, :width]
        valid = torch.isfinite(torch.linalg.vector_norm(features, dim=1)) & torch.isfinite(y)
        features = torch.where(valid[:, None], features if row_norm is None else RowBound(row_norm)(features), 0.0)
        y = torch.where(valid, y.clamp(-limit, limit) if loss.name == "squared" else y, 0.0)
        counts = data.counts.tolist()
        return LinearData(
            torch.cat([features, x[:, width:]], dim=1).split(counts), y.split(counts), data.bias, data.name
        )

    return prepared(problem, ("pp_dmtl", loss.name, row_norm, target), build)


def largest_row(problem: Problem, loss: LinearLoss, row_norm: float | None) -> float:
    """B, the bound on the norm of a record's features; without one the largest norm of the training records, which is
    for runs without privacy."""
    if row_norm is not None:
        return row_norm
    x, _ = (data := bounded_rows(problem, loss, None)).pooled()
    return max(float(x[:, : data.dimension - int(data.bias)].norm(dim=1).max()), 1e-12)


OWN_PENALTIES: dict[OwnPenalty, Penalty] = {
    "frobenius": Penalty(half_squared_norm, prox_half_squared),
    "l1": Penalty(l1_norm, prox_l1),
    "l2": Penalty(row_norm, prox_rows),
}
"""g by name, of Q^T (..., T, p): one row a task."""


def own_step(q: Tensor, gradient: Tensor, lr: float, tau: float, penalty: OwnPenalty) -> Tensor:
    """One step on l(q) + tau g(q) for rows q (k, p): as Algorithm 1 has it for the ridge, proximal for the others."""
    if penalty == "frobenius":
        return q - lr * (gradient + tau * q)
    return OWN_PENALTIES[penalty].prox(q - lr * gradient, lr * tau)


def fit_own(
    loss: LinearLoss, x: Tensor, y: Tensor, shared: Tensor, tau: float, penalty: OwnPenalty, *, tolerance: float = 1e-10
) -> Tensor:
    """Equation (8): argmin_q (1/n) sum_j l(x_j . (shared + q), y_j) + tau g(q), for one p_t or several.

    Squared loss with the ridge: a linear system. Logistic loss with the ridge: Newton's method with a line search, of
    all together. The others: accelerated proximal gradient with restarts.

    Args:
        loss: squared or logistic.
        x, y: (n, p) and (n,), the raw records of one task; nothing leaves it.
        shared: (p,), p_t, or (k, p), those of k replicates.
        tau: above 0, so that the minimum exists.
        penalty: g.
        tolerance: on the norm of the (proximal) gradient at the result.

    Returns:
        As ``shared``, float64.
    """
    rows = shared.reshape(-1, shared.shape[-1])
    if penalty != "frobenius":
        fits = torch.stack([_proximal_gradient(loss, x, y, row, tau, penalty, tolerance) for row in rows])
    elif loss.name == "squared":
        error, weight = y[:, None] - x @ rows.T, 2.0 / len(x)
        if len(x) < x.shape[1]:  # in the space of the records
            dual = solve_regularized(weight * (x @ x.T) + tau * torch.eye(len(x), dtype=x.dtype), weight * error)
            fits = (x.T @ dual).T
        else:
            left = weight * (x.T @ x) + tau * torch.eye(x.shape[1], dtype=x.dtype)
            fits = solve_regularized(left, weight * (x.T @ error)).T
    else:
        block = max(1, _ELEMENTS // x.numel())
        fits = torch.cat([_newton(loss, x, y, part, tau, tolerance) for part in rows.split(block)])
    return fits.reshape(shared.shape)


def _newton(loss: LinearLoss, x: Tensor, y: Tensor, shared: Tensor, tau: float, tolerance: float) -> Tensor:
    """Logistic loss with the ridge, at points ``shared`` (k, p): (k, p)."""
    every = torch.zeros_like(shared)
    ridge, left = tau * torch.eye(x.shape[1], dtype=x.dtype), torch.arange(len(shared))
    for _ in range(_NEWTON_STEPS):
        at, q = shared[left], every[left]
        gradient = loss.scale(at + q, x, y) @ x / len(x) + tau * q
        open_ = torch.linalg.vector_norm(gradient, dim=1) > tolerance
        if not bool(open_.any()):
            break
        left, at, q, gradient = left[open_], at[open_], q[open_], gradient[open_]
        slope = torch.sigmoid((at + q) @ x.T)
        hessian = (x * (slope * (1 - slope))[:, :, None]).transpose(1, 2) @ x / len(x) + ridge
        step = solve_regularized(hessian, gradient)
        value, decrease = _ridged(loss, x, y, at, q, tau), (gradient * step).sum(1)
        length, trial = torch.ones(len(left), dtype=x.dtype), q - step
        for _ in range(_HALVINGS):
            wanted = value - 1e-4 * length * decrease
            good = (_ridged(loss, x, y, at, trial, tau) <= wanted) | (decrease <= 1e-15 * value.abs().clamp(min=1))
            if bool(good.all()):
                break
            length = torch.where(good, length, length / 2)
            trial = q - length[:, None] * step
        every[left] = trial
    return every


def _ridged(loss: LinearLoss, x: Tensor, y: Tensor, shared: Tensor, q: Tensor, tau: float) -> Tensor:
    return loss.value(shared + q, x, y).mean(1) + tau / 2 * q.square().sum(1)


def _proximal_gradient(
    loss: LinearLoss, x: Tensor, y: Tensor, shared: Tensor, tau: float, penalty: OwnPenalty, tolerance: float
) -> Tensor:
    prox = OWN_PENALTIES[penalty].prox
    try:
        largest = float(torch.linalg.matrix_norm(x, ord=2))
    except torch.linalg.LinAlgError:  # not even an iteration that does not converge may show
        largest = float(torch.linalg.matrix_norm(x))
    curvature = loss.smoothness(1.0) * largest**2 / len(x)
    lr = 1.0 / max(curvature, 1e-12)
    q = ahead = torch.zeros_like(shared)
    weight = 1.0
    for _ in range(_GRADIENT_STEPS):
        gradient = loss.scale((shared + ahead)[None], x, y)[0] @ x / len(x)
        new = prox((ahead - lr * gradient)[None], lr * tau)[0]
        if float((new - ahead).norm()) <= lr * tolerance:
            return new
        if float((ahead - new) @ (new - q)) > 0:  # the momentum points uphill
            weight, ahead, q = 1.0, new, new
            continue
        following = (1 + math.sqrt(1 + 4 * weight**2)) / 2
        ahead = new + (weight - 1) / following * (new - q)
        q, weight = new, following
    return q
