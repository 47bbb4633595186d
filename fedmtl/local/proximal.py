"""Penalties of a matrix of models W (d x T, one task a column) and their proximal operators.

``prox(x, t)`` is argmin_p 1/2 ||p - x||_F^2 + t * penalty(p) (Parikh and Boyd, "Proximal algorithms", 2014). All of
them act on the last two axes and are batched over the axes before; ``t`` is a number, or a tensor of the shape of the
leading axes (a threshold for every replicate). float64 is meant; gradients are not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

Threshold = float | Tensor
_TOLERANCE = 1e-9  # relative error of a nuclear operator


def l1_norm(x: Tensor) -> Tensor:
    """Sum of |x_ij|: (..., d, T) -> (...)."""
    return x.abs().sum(dim=(-2, -1))


def row_norm(x: Tensor) -> Tensor:
    """L2,1: sum over rows (features) of their Euclidean norms: (..., d, T) -> (...)."""
    return x.norm(dim=-1).sum(dim=-1)


def column_norm(x: Tensor) -> Tensor:
    """Sum over columns (tasks) of their Euclidean norms: (..., d, T) -> (...)."""
    return x.norm(dim=-2).sum(dim=-1)


def half_squared_norm(x: Tensor) -> Tensor:
    """Return ||x||_F^2 / 2: (..., d, T) -> (...). The half makes its gradient x."""
    return x.square().sum(dim=(-2, -1)) / 2


def nuclear_norm(x: Tensor) -> Tensor:
    """Sum of singular values: (..., d, T) -> (...)."""
    return torch.linalg.svdvals(x).sum(dim=-1)


def prox_l1(x: Tensor, t: Threshold) -> Tensor:
    """Soft threshold: sign(x) max(|x| - t, 0)."""
    level = threshold_of(t, x)
    return x - torch.clamp(x, -level, level)


def prox_rows(x: Tensor, t: Threshold) -> Tensor:
    """Apply the operator of :func:`row_norm`: every row r becomes max(0, 1 - t / ||r||) r."""
    level = threshold_of(t, x)
    return x * shrinkage(x.norm(dim=-1, keepdim=True), level)


def prox_columns(x: Tensor, t: Threshold) -> Tensor:
    """Apply the operator of :func:`column_norm`: every column c becomes max(0, 1 - t / ||c||) c."""
    level = threshold_of(t, x)
    return x * shrinkage(x.norm(dim=-2, keepdim=True), level)


def prox_half_squared(x: Tensor, t: Threshold) -> Tensor:
    """Apply the operator of :func:`half_squared_norm`: x / (1 + t)."""
    return x / (1.0 + threshold_of(t, x))


def prox_nuclear(x: Tensor, t: Threshold) -> Tensor:
    """Apply the operator of :func:`nuclear_norm`: every singular value s becomes max(0, s - t).

    The decomposition G = V diag(w) V^T of the product of x with its transpose on the smaller side gives x f(G) with
    f(w) = max(0, 1 - t / sqrt(w)), and is faster than that of x. If D is the rounding error of G and of its
    decomposition, the entry of x (f(G + D) - f(G)) between a singular direction i of x and an eigenvector j of G + D is
    s_i f[w_i, w'_j] D_ij, and s_i |f[w_i, w'_j]| <= 1 / (2 t) whichever of the two lie above the threshold: the result
    is off by at most ||D||_F / (2 t). Where that may be more than 1e-9 ||x||_F, x itself is decomposed, matrix by
    matrix.

    Args:
        x: (..., d, T).
        t: threshold, a number or a tensor over the leading axes, at least 0.

    Returns:
        (..., d, T).

    Raises:
        ConfigError: x is not a finite float matrix, or t is negative or not finite.
    """
    size = threshold_of(t, x)
    norm = torch.linalg.matrix_norm(x)
    level = size[..., 0, 0]
    fine = norm * coarseness(x.shape, x.dtype) < level * (2 * _TOLERANCE)  # false where the norm is not finite
    if bool(fine.all()) and x.numel():
        return _by_gram(x, size)
    check_finite(norm)
    if x.numel() == 0 or not bool(fine.any()):
        return _by_svd(x, size)
    flat = level.expand(x.shape[:-2])
    out = torch.empty_like(x)
    for chosen, prox in ((fine, _by_gram), (~fine, _by_svd)):
        out[chosen] = prox(x[chosen], flat[chosen][..., None, None])
    return out


def coarseness(shape: torch.Size, dtype: torch.dtype) -> float:
    """Bound ||D||_F / ||x||_F^2 of :func:`prox_nuclear`: products of length max(d, T), and a backward error of
    10 min(d, T) ulps for the decomposition."""
    return (max(shape[-2:]) + 10 * min(shape[-2:])) * torch.finfo(dtype).eps


def _by_svd(x: Tensor, t: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return (u * (s - t[..., 0]).clamp_min(0.0)[..., None, :]) @ v


def _by_gram(x: Tensor, t: Tensor) -> Tensor:
    wide = x.shape[-2] <= x.shape[-1]
    w, v = torch.linalg.eigh(x @ x.mT if wide else x.mT @ x)
    factors = shrinkage(w.clamp_min(0.0).sqrt(), t[..., 0])
    side = w.shape[-1]
    if side > 64 and 2 * (rank := int((factors > 0).sum(dim=-1).max())) < side:  # cheaper through the kept directions
        v, factors = v[..., side - rank :], factors[..., side - rank :]
        return (v * factors[..., None, :]) @ (v.mT @ x) if wide else (x @ v) @ (v * factors[..., None, :]).mT
    factor = (v * factors[..., None, :]) @ v.mT
    return factor @ x if wide else x @ factor


def shrinkage(norm: Tensor, t: Threshold) -> Tensor:
    """max(0, 1 - t / norm), and 0 where the norm is 0: the factor that brings a length ``norm`` to ``norm - t``."""
    return torch.where(norm > t, 1.0 - t / norm, 0.0)


def threshold_of(t: Threshold, x: Tensor) -> Tensor:
    """Return ``t`` as a tensor (..., 1, 1) that broadcasts against x.

    Raises:
        ConfigError: x is not a float matrix, or t is negative, not finite or of another shape.
    """
    if x.dim() < 2 or not x.is_floating_point():
        raise ConfigError(f"x has shape {tuple(x.shape)} and type {x.dtype}; it must be a float tensor (..., d, T).")
    level = torch.as_tensor(t, dtype=x.dtype, device=x.device)
    if level.dim() > x.dim() - 2 or any(
        size not in (1, other) for size, other in zip(level.shape[::-1], x.shape[-3::-1], strict=False)
    ):
        raise ConfigError(f"the threshold has shape {tuple(level.shape)}; x has leading axes {tuple(x.shape[:-2])}.")
    if not bool(((level >= 0) & (level < math.inf)).all()):
        raise ConfigError(f"the threshold is {t!r}; it must be finite and at least 0.")
    return level[..., None, None]


def check_finite(norm: Tensor) -> None:
    """Raise :class:`ConfigError` unless the norms of the matrices are finite."""
    if not bool(norm.isfinite().all()):
        raise ConfigError("x holds numbers that are not finite (or whose squares are not); a finite matrix is needed.")


@dataclass(frozen=True)
class Penalty:
    """A penalty of matrices: ``value(x)`` over (..., d, T), and ``prox(x, t)``."""

    value: Callable[[Tensor], Tensor]
    prox: Callable[[Tensor, Threshold], Tensor]


PENALTIES: dict[str, Penalty] = {
    "nuclear": Penalty(nuclear_norm, prox_nuclear),
    "rows": Penalty(row_norm, prox_rows),
    "columns": Penalty(column_norm, prox_columns),
    "l1": Penalty(l1_norm, prox_l1),
    "frobenius": Penalty(half_squared_norm, prox_half_squared),
}
