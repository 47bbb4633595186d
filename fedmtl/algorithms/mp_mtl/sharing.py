"""What the tasks of MP-MTL learn from each other: a public linear map of models, made of their noised covariance.

The proximal operator of t ||W||_* is W -> M W with M = U diag(s) U^T, s_j = max(0, 1 - t / sqrt(l_j)), where
U diag(l) U^T = W W^T; that of t ||W||_{2,1} (norms of rows) has M diagonal, s_j = max(0, 1 - t / sqrt((W W^T)_jj)).
Both need W only through W W^T, and every task can apply M to its own model.

The noised matrix is moved up by a public shift and floored at 0. With a shift of at least 1.25 sigma sqrt(2 d), where
sigma is the standard deviation of a diagonal entry of the noise, noise of any size leaves all l_j positive, and large
noise makes M the identity: every task keeps its own model. Without the shift about half of the eigenvalues fall below
0, and each of them deletes a direction of every model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...local.proximal import PENALTIES, shrinkage
from ...privacy.price import normalized
from ...privacy.release import Form
from ..base import Released

SharedPenalty = Literal["nuclear", "l21"]
Momentum = Literal["none", "nesterov", "strongly_convex"]


@dataclass(frozen=True)
class Sharing:
    """A penalty that tasks share, through what is released for it.

    Attributes:
        form: of the release: the whole covariance, or its diagonal.
        penalty: name in :data:`fedmtl.local.proximal.PENALTIES`, of W (d, K).
    """

    form: Form
    penalty: str

    def value(self, rows: Tensor) -> Tensor:
        """Return g(W) of models as rows: (..., K, d) -> (...)."""
        return PENALTIES[self.penalty].value(rows.mT)

    def map(self, covariance: Tensor, threshold: float) -> Tensor:
        """Return M of the proximal operator of ``threshold`` g.

        Args:
            covariance: (..., d, d) symmetric, or (..., d) of a diagonal release; what is below 0 counts as 0.
            threshold: at least 0; 0 is the identity.

        Returns:
            (..., d, d), or the diagonal (..., d).
        """
        if self.form == "diagonal":
            return torch.ones_like(covariance) if threshold == 0 else _factors(covariance, threshold)
        if threshold == 0:
            return torch.eye(covariance.shape[-1], dtype=covariance.dtype).expand_as(covariance)
        values, vectors = torch.linalg.eigh(covariance)
        return _product(vectors * _factors(values, threshold)[..., None, :], vectors.mT)

    def apply(self, map: Tensor, rows: Tensor) -> Tensor:
        """Return M w_i for models as rows (..., K, d)."""
        if self.form == "diagonal":
            return rows * map[..., None, :]
        return _product(rows, map)

    def of_release(self, released: Released, name: str, rho: float, threshold: float) -> dict[str, Tensor]:
        """Return ``covariance`` (R, d, d), or (R, d), and ``map``, M, of a release of the sum over the tasks, with a
        shift of ``rho`` sigma sqrt(2 d)."""
        total, axes = released.values[name] * released.denominator, 1 if self.form == "diagonal" else 2
        total = total.reshape(-1, *total.shape[-axes:])
        sigma = released.noise_std(name) * released.denominator
        covariance = self.shifted(total, rho * (2 * total.shape[-1]) ** 0.5 * sigma)
        return {"covariance": covariance, "map": self.map(covariance, threshold)}

    def shifted(self, covariance: Tensor, shift: Tensor) -> Tensor:
        """Return ``covariance + shift I`` for shifts (R,) of (R, d, d), or of the diagonals (R, d)."""
        if self.form == "diagonal":
            return covariance + shift[:, None]
        out = covariance.clone()
        out.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        return out


SHARING: dict[SharedPenalty, Sharing] = {"nuclear": Sharing("symmetric", "nuclear"), "l21": Sharing("diagonal", "rows")}


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(a.numpy() @ b.numpy())  # of small matrices numpy's products are faster than torch's


def _factors(values: Tensor, threshold: float) -> Tensor:
    """Return max(0, 1 - t / sqrt(l)), and 0 where l <= 0."""
    return shrinkage(values.clamp_min(0.0).sqrt(), threshold)


def budget_weights(
    rounds: int,
    *,
    momentum: Momentum = "none",
    condition: float = 0.0,
    alpha: float | None = None,
    q: float | None = None,
) -> tuple[float, ...]:
    """Return the parts of the budget of rounds t = 1 .. T: eps_t prop. to t^alpha or q^-t, scaled to mean 1.

    Without ``alpha`` and ``q`` they minimize the utility bound (Theorem 6): sum_t a_t / sqrt(eps_t), where a_t is 1 for
    a convex loss, t with Nesterov's momentum, Q0^-t for a strongly convex loss with Q0 = 1 - mu / L, and Q0^(-t/2) with
    its momentum and Q0 = 1 - sqrt(mu / L). What composition bounds is sum eps_t^2, so eps_t is prop. to a_t^(2/5):
    alpha = 0, 2/5, q = Q0^(2/5) and Q0^(1/5).

    Args:
        rounds: T.
        momentum: of the iterations.
        condition: mu / L, in [0, 1); needed above 0 by ``"strongly_convex"``.
        alpha, q: the user's own, one of them at most.
    """
    power = 2 / 5
    if alpha is None and q is None:
        if momentum == "strongly_convex":
            q = (1 - math.sqrt(condition)) ** (power / 2)
        elif momentum == "none" and condition > 0:
            q = (1 - condition) ** power
        else:
            alpha = power if momentum == "nesterov" else 0.0
    if q is not None:
        logs = [-t * math.log(q) for t in range(1, rounds + 1)]
    else:
        assert alpha is not None
        logs = [alpha * math.log(t) for t in range(1, rounds + 1)]
    top = max(logs)
    return normalized([math.exp(max(value - top, -600.0)) for value in logs])


def momentum_weight(momentum: Momentum, step: int, condition: float) -> float:
    """Return b_t of iteration t = ``step`` + 1: 0, (t - 1) / (t + 2), or (1 - sqrt(mu / L)) / (1 + sqrt(mu / L)); 0 in
    the first, where what^(0) = what^(1)."""
    if momentum == "none" or step == 0:
        return 0.0
    if momentum == "nesterov":
        return step / (step + 3)
    root = math.sqrt(condition)
    return (1 - root) / (1 + root)
