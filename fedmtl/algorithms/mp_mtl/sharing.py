"""The linear map of MP-MTL: a function of the noised covariance of the tasks' models.

The proximal operator of t ||W||_* is W -> M W with M = U diag(s) U^T, s_j = max(0, 1 - t /
sqrt(l_j)), where U diag(l) U^T = W W^T; that of t ||W||_{2,1} (norms of rows) has M diagonal, s_j =
max(0, 1 - t / sqrt((W W^T)_jj)). Both need W only through W W^T, and every task can apply M to its
own model.

The noised matrix is moved up by a public shift and floored at 0. With a shift of at least 1.25
sigma sqrt(2 d), where sigma is the standard deviation of a diagonal entry of the noise, noise of
any size leaves all l_j positive, and large noise makes M the identity: every task keeps its own
model. Without the shift about half of the eigenvalues fall below 0, and each of them deletes a
direction of every model.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...local.proximal import SharedPenalty, shrinkage
from ...privacy.cost import normalized
from ...privacy.release import Form
from ..rounds import Released

Momentum = Literal["none", "nesterov", "strongly_convex"]

FORMS: dict[SharedPenalty, Form] = {"nuclear": "symmetric", "l21": "diagonal"}
"""The form of the release by the penalty: the whole covariance of the models, or its diagonal."""
_BLOCK = 8  # rows of a product


def shifted_covariance(released: Released, name: str, form: Form, rho: float) -> Tensor:
    """Returns the released sum over the tasks with a shift of rho sigma sqrt(2 d).

    Args:
        released: the releases of the round.
        name: of the covariance among them.
        form: of the release.
        rho: the public shift, in multiples of sigma sqrt(2 d).

    Returns:
        (R, d, d) float64, or the diagonal (R, d).
    """
    # the release is divided by m: here are the sum and the noise on it
    total = released.values[name] * released.denominator
    sigma = released.noise_std[name] * released.denominator
    d = total.shape[-1]
    shift = (rho * (2 * d) ** 0.5 * sigma)[:, None]
    if form == "diagonal":
        return total.reshape(-1, d) + shift
    shifted = total.reshape(-1, *total.shape[-2:]).clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
    return shifted


def map_of(covariance: Tensor, form: Form, threshold: float) -> Tensor:
    """Returns M, the proximal operator of ``threshold`` times the penalty as a linear map.

    Args:
        covariance: (..., d, d) = U diag(l) U^T, or its diagonal (..., d).
        form: of the release.
        threshold: t, at least 0.

    Returns:
        U diag(s) U^T, (..., d, d), or the diagonal (..., d); the identity for a threshold of 0.
    """
    if form == "diagonal":
        return factors(covariance, threshold)
    if threshold == 0:
        return torch.eye(covariance.shape[-1], dtype=covariance.dtype).expand_as(covariance)
    values, vectors = torch.linalg.eigh(covariance)
    return _product(vectors * factors(values, threshold)[..., None, :], vectors.mT)


def factors(values: Tensor, threshold: float) -> Tensor:
    """Returns s = max(0, 1 - t / sqrt(l)); 0 for l <= 0, and 1 everywhere for t = 0."""
    if threshold == 0:
        return torch.ones_like(values)
    return shrinkage(values.clamp_min(0.0).sqrt(), threshold)


def mapped(map: Tensor, rows: Tensor) -> Tensor:
    """Returns M w_i for models as rows (..., K, d), with M (..., d, d), or its diagonal (..., d).

    Products are of blocks of rows, filled up with zeros. Products of other numbers of rows are
    rounded in another way: the bits of a client's model would depend on the number of clients that
    a process computes.
    """
    if map.dim() < rows.dim():
        return rows * map[..., None, :]
    count = rows.shape[-2]
    blocks = pad(rows, (0, 0, 0, -count % _BLOCK)).unflatten(-2, (-1, _BLOCK))
    products = _product(blocks, map[..., None, :, :])
    return products.flatten(-3, -2)[..., :count, :]


def _product(a: Tensor, b: Tensor) -> Tensor:
    # products of small matrices are faster in NumPy than in torch
    return torch.from_numpy(a.numpy() @ b.numpy())


def budget_weights(
    rounds: int,
    *,
    momentum: Momentum = "none",
    condition: float = 0.0,
    alpha: float | None = None,
    q: float | None = None,
) -> tuple[float, ...]:
    """Returns the parts of the budget of rounds t = 1 .. T, scaled to mean 1.

    They are eps_t prop. to t^alpha or q^-t. Without ``alpha`` and ``q`` they minimize the utility
    bound (Theorem 6): sum_t a_t / sqrt(eps_t) with a_t = 1 for a convex loss, t with Nesterov's
    momentum, Q0^-t for a strongly convex loss with Q0 = 1 - mu / L, and Q0^(-t/2) with its momentum
    and Q0 = 1 - sqrt(mu / L). Composition bounds sum eps_t^2, so eps_t is prop. to a_t^(2/5): alpha
    = 0, 2/5, q = Q0^(2/5) and Q0^(1/5).

    Args:
        rounds: T.
        momentum: of the iterations.
        condition: mu / L, in [0, 1); needed above 0 by ``"strongly_convex"``.
        alpha: of a user's own parts t^alpha; None without.
        q: of a user's own parts q^-t; None without, and if ``alpha`` is given.
    """
    power = 2 / 5
    if alpha is None and q is None:
        if momentum == "strongly_convex":
            q = (1 - math.sqrt(condition)) ** (power / 2)
        elif momentum == "nesterov":
            alpha = power
        elif condition > 0:
            q = (1 - condition) ** power
        else:
            alpha = 0.0
    if q is not None:
        logs = [-t * math.log(q) for t in range(1, rounds + 1)]
    else:
        assert alpha is not None
        logs = [alpha * math.log(t) for t in range(1, rounds + 1)]
    # relative to the largest, and above 0 for many rounds: no part may vanish
    top = max(logs)
    return normalized([math.exp(max(value - top, -600.0)) for value in logs])


def momentum_weight(momentum: Momentum, step: int, condition: float) -> float:
    """Returns the momentum b_t of iteration t = ``step`` + 1.

    It is 0, (t - 1) / (t + 2), or (1 - sqrt(mu / L)) / (1 + sqrt(mu / L)), with ``condition`` mu /
    L. In the first iteration, with wh^(0) = wh^(1), it is 0.
    """
    if momentum == "none" or step == 0:
        return 0.0
    if momentum == "nesterov":
        return step / (step + 3)
    root = math.sqrt(condition)
    return (1 - root) / (1 + root)
