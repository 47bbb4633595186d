"""Penalties of matrices and their proximal operators.

``prox(x, t)`` is argmin_p 1/2 ||p - x||_F^2 + t * penalty(p) (Parikh and Boyd, "Proximal
algorithms", 2014), for t of at least 0. All of them act on the last two axes and are batched over
the axes before. float64 is meant; gradients are not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError


def l1_norm(x: Tensor) -> Tensor:
    """Returns the sum of |x_ij|: (..., m, n) -> (...)."""
    return x.abs().sum(dim=(-2, -1))


def sum_of_row_norms(x: Tensor) -> Tensor:
    """Returns the sum over rows of their Euclidean norms: (..., m, n) -> (...)."""
    return x.norm(dim=-1).sum(dim=-1)


def sum_of_column_norms(x: Tensor) -> Tensor:
    """Returns the sum over columns of their Euclidean norms: (..., m, n) -> (...)."""
    return x.norm(dim=-2).sum(dim=-1)


def half_squared_norm(x: Tensor) -> Tensor:
    """Returns ||x||_F^2 / 2: (..., m, n) -> (...). The half makes its gradient x."""
    return x.square().sum(dim=(-2, -1)) / 2


def nuclear_norm(x: Tensor) -> Tensor:
    """Returns the sum of singular values: (..., m, n) -> (...)."""
    return torch.linalg.svdvals(x).sum(dim=-1)


def prox_l1(x: Tensor, t: float) -> Tensor:
    """Applies the soft threshold, the operator of :func:`l1_norm`: sign(x) max(|x| - t, 0)."""
    return x - x.clamp(-t, t)


def prox_rows(x: Tensor, t: float) -> Tensor:
    """Applies the operator of :func:`sum_of_row_norms`: row r becomes max(0, 1 - t / ||r||) r."""
    return x * shrinkage(x.norm(dim=-1, keepdim=True), t)


def prox_columns(x: Tensor, t: float) -> Tensor:
    """Applies the operator of :func:`sum_of_column_norms`: column c becomes
    max(0, 1 - t / ||c||) c."""
    return x * shrinkage(x.norm(dim=-2, keepdim=True), t)


def prox_half_squared(x: Tensor, t: float) -> Tensor:
    """Applies the operator of :func:`half_squared_norm`: x / (1 + t)."""
    return x / (1.0 + t)


def prox_nuclear(x: Tensor, t: float) -> Tensor:
    """Applies the operator of :func:`nuclear_norm`: every singular value s becomes max(0, s - t).

    For several matrices, G = V diag(w) V^T, the product of x with its transpose on the smaller
    side, is decomposed: x f(G) with f(w) = max(0, 1 - t / sqrt(w)) is the value, and is faster than
    by the decomposition of x. If D is the rounding error of G and of its decomposition, the entry
    of x (f(G + D) - f(G)) between a singular direction i of x and an eigenvector j of G + D is
    s_i f[w_i, w'_j] D_ij, and s_i |f[w_i, w'_j]| <= 1 / (2 t) whichever of the two lie above the
    threshold: the result is off by at most ||D||_F / (2 t). If that may be more than 1e-9 ||x||_F,
    x itself is decomposed.

    Raises:
        ConfigError: x holds numbers that are not finite.
    """
    # A number that is not finite shows in the sum; a sum alone may also overflow.
    if not math.isfinite(x.sum()) and not bool(x.isfinite().all()):
        raise ConfigError("x holds numbers that are not finite; a finite matrix is needed.")
    rows, columns = x.shape[-2:]
    if x.numel() > rows * columns and _is_exact_enough(x, t):
        wide = rows <= columns
        if wide:
            gram = x @ x.mT
        else:
            gram = x.mT @ x
        w, v = torch.linalg.eigh(gram)
        factor = (v * shrinkage(w.clamp_min(0.0).sqrt(), t)[..., None, :]) @ v.mT
        if wide:
            return factor @ x
        return x @ factor
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    # singular values are never negative, so this is max(0, s - t)
    shrunk = u.mul_(F.softshrink(s, t).unsqueeze(-2))
    # the general product takes twice as long for one small matrix
    if x.dim() == 3:
        return torch.bmm(shrunk, v)
    return shrunk @ v


def _is_exact_enough(x: Tensor, t: float) -> bool:
    """Returns True if the operator of threshold ``t`` is exact to 1e-9 ||x||_F by the product of
    every matrix of x with its transpose, see :func:`prox_nuclear`."""
    small, large = sorted(x.shape[-2:])
    # ||D||_F / ||x||_F^2: products of length `large`, and a backward error of 10 `small` ulps for
    # the decomposition
    coarseness = (large + 10 * small) * torch.finfo(x.dtype).eps
    return bool((torch.linalg.matrix_norm(x) * coarseness <= 2e-9 * t).all())


def shrinkage(norm: Tensor, t: float) -> Tensor:
    """Returns the factor that brings a length ``norm`` to ``norm - t``: max(0, 1 - t / norm), and 0
    for a length of 0."""
    return torch.where(norm > t, 1.0 - t / norm, 0.0)


@dataclass(frozen=True)
class Penalty:
    """A penalty of matrices: ``value(x)`` over (..., m, n), and ``prox(x, t)``."""

    value: Callable[[Tensor], Tensor]
    prox: Callable[[Tensor, float], Tensor]


SharedPenalty = Literal["nuclear", "l21"]
"""Penalties of the part that tasks share, see :data:`PENALTIES`."""
OwnPenalty = Literal["frobenius", "l1", "l2"]
"""Penalties of a task's own part."""
PENALTIES: dict[str, Penalty] = {
    "nuclear": Penalty(nuclear_norm, prox_nuclear),
    "l2": Penalty(sum_of_row_norms, prox_rows),
    "l21": Penalty(sum_of_column_norms, prox_columns),
    "l1": Penalty(l1_norm, prox_l1),
    "frobenius": Penalty(half_squared_norm, prox_half_squared),
}
"""Penalties by name, of models as rows (..., T, p): one row a task, one column a feature."""
