"""The exact fit of one client's linear model on its own records, with any of the penalties of a client's own part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...local.proximal import (
    Penalty,
    half_squared_norm,
    l1_norm,
    prox_half_squared,
    prox_l1,
    prox_rows,
    row_norm,
)
from .data import LinearLoss, solve_regularized

if TYPE_CHECKING:
    pass

OwnPenalty = Literal["frobenius", "l1", "l2"]

_NEWTON_STEPS, _HALVINGS, _GRADIENT_STEPS = 100, 34, 100_000
_ELEMENTS = 1 << 22  # of the rows of all points together


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
