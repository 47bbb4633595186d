"""Earlier private multi-task learning, made to protect whole tasks: DP-AGGR and DP-MTRL.

Both perturb outputs of local fits and protect single records; Liang et al. ("Model-protected multi-task learning",
section 5.1 and Proposition 3) run them at (eps / N, delta / (N exp(eps))), N the largest number of records of a task:
by group privacy (k records at (e, d) have (k e, k exp(k e) d)) the task's records together then have (eps, delta).
The relation is replace-one: a task has other records, the numbers of records n_i are public.

*Sensitivity.* Let w minimize F over a convex set, F sigma-strongly convex, and w' minimize F' = F + h over the same
set. The variational inequalities grad F(w).(w' - w) >= 0 and grad F'(w').(w - w') >= 0 and strong convexity of F' give

    sigma ||w - w'||^2 <= (grad F'(w) - grad F'(w')).(w - w') <= grad h(w).(w - w'),

so ||w - w'|| <= ||grad h(w)|| / sigma. Replacing one record of n changes the mean loss by h = (l' - l) / n, and with
||grad l|| <= G where w may be, w moves by at most 2 G / (n sigma); replacing all of them, by 2 G / sigma; and never by
more than the diameter 2 B of the ball ||w|| <= B that holds the minimizers. Squared loss (m - y)^2 / 2 with
||x|| <= X and abs(y) <= Y has G = X (X B + Y), B the least of a given radius and Y / sqrt(sigma): there
F(w) <= F(0) <= Y^2 / 2, where F(0) has no other term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedmtl.algorithms.linear.data import LinearData
from fedmtl.algorithms.linear.stack import TaskStack
from fedmtl.privacy import L2LaplaceNoise, NoiseLaw, NoiseSource, PrivacyCost

from .mp_mtl import bounded_tasks

Unit = Literal["record_group", "task"]


@dataclass(frozen=True, kw_only=True)
class TaskBudget:
    """The budget of a whole task, over all releases of a run.

    Args:
        epsilon: above 0; infinite for no noise.
        delta: in (0, 1).
        unit: ``"record_group"``, the published way: noise for one record at
            :meth:`record_level`; ``"task"``: noise for the whole task at once, from the sensitivity to all of its
            records. Both give the task (epsilon, delta).
    """

    epsilon: float
    delta: float = 1e-5
    unit: Unit = "record_group"

    def record_level(self, records: int) -> tuple[float, float]:
        """(eps / N, delta / (N exp(eps))), Proposition 3."""
        return self.epsilon / records, self.delta * math.exp(-self.epsilon) / records

    def law(self, records: int, dimension: int, uses: int) -> NoiseLaw | None:
        """The noise of each of ``uses`` releases of a vector of ``dimension``, in units of the sensitivity that
        belongs to the unit, of the law of the published methods (density prop. to exp(-||v||_2 / b)); None where
        epsilon is infinite. The composition is that of all other releases, by the privacy loss, not Theorem 3.5 of
        Kairouz et al., which needs more noise.

        Args:
            records: N, the largest number of records of a task.
            dimension: of a release.
            uses: releases that depend on a record.

        Raises:
            ConfigError: no noise reaches the budget.
        """
        if self.epsilon == math.inf:
            return None
        epsilon, delta = (
            self.record_level(records)
            if self.unit == "record_group"
            else (self.epsilon, self.delta)
        )
        return L2LaplaceNoise(
            PrivacyCost(law="l2_laplace", sizes=(dimension,), delta=delta).multiplier(epsilon, uses)
        )

    def replaced(self, counts: Tensor) -> Tensor:
        """Share of a task's mean loss that one protected unit can replace: (n,), 1 / n_i or 1."""
        return (
            1 / counts.double()
            if self.unit == "record_group"
            else torch.ones(len(counts), dtype=torch.float64)
        )


@dataclass(frozen=True)
class Ball:
    """Where the minimizers of a task are, and how steep its losses are there.

    Args:
        radius: B.
        slope: G.
    """

    radius: Tensor
    slope: Tensor

    @classmethod
    def of(cls, sigma: Tensor, radius: float, feature_norm: float, target: float) -> Ball:
        """For the strong convexity ``sigma`` (...) and the enforced ``radius``; ``target`` bounds the targets."""
        ball = torch.minimum(target / sigma.sqrt(), torch.full_like(sigma, radius))
        return cls(ball, feature_norm * (feature_norm * ball + target))

    def sensitivity(self, sigma: Tensor, replaced: Tensor) -> Tensor:
        """L2 sensitivity of the minimizer, (...)."""
        return torch.minimum(2 * self.slope * replaced / sigma, 2 * self.radius)


@dataclass(frozen=True, kw_only=True)
class DPAggr:
    """DP-AGGR: the average of output-perturbed local models, the same for every task (Pathak, Rane, Raj 2010), with
    the squared loss, also for two classes.

    w_i = argmin L_i(w) + (reg / 2) ||w||^2 with ||w|| <= radius on the task's own records, and

        w = (1 / n) sum_i w_i + noise,    sensitivity max_i min(2 G / (n_i reg), 2 B) / n for one record of a task.

    The paper's noise, made for 2 / (min_i n_i n reg), is that of the logistic loss with ||x|| <= 1.

    Args:
        reg: above 0.
        feature_norm: X, bound on ``||x||_2`` of a whole row; enforced.
        target: Y, bound on the target; enforced.
        radius: bound on ``||w||_2``; enforced.
    """

    reg: float
    feature_norm: float = 1.0
    target: float = 1.0
    radius: float = math.inf

    name = "dp_aggr"

    def local(self, data: LinearData) -> Tensor:
        """The local models, without noise: (n, p)."""
        gram, moment = moments_of(
            bounded_tasks(data, feature_norm=self.feature_norm, target=self.target)
        )
        sigma = torch.full((len(data.x),), self.reg, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(gram)
        rotated = torch.einsum("npk,np->nk", vectors, moment)
        return torch.einsum(
            "npk,nk->np", vectors, ball_ridge(values, rotated, sigma, self._ball(sigma).radius)
        )

    def sensitivity(self, counts: Tensor, budget: TaskBudget) -> float:
        """L2 sensitivity of the average."""
        sigma = torch.full((len(counts),), self.reg, dtype=torch.float64)
        return float(self._ball(sigma).sensitivity(sigma, budget.replaced(counts)).max()) / len(
            counts
        )

    def fit(self, data: LinearData, budget: TaskBudget, sources: Sequence[NoiseSource]) -> Tensor:
        """The models of all tasks, once for each of R sources of noise: (R, n, p) float64."""
        mean = self.local(data).mean(0)
        law = budget.law(int(data.counts.max()), data.dimension, 1)
        sensitivity = self.sensitivity(data.counts, budget)
        noise = np.zeros((len(sources), data.dimension))
        if law is not None:
            noise = sensitivity * np.stack(
                [law.draw(source, self.name, 0, data.dimension) for source in sources]
            )
        return (mean + torch.from_numpy(noise))[:, None].expand(-1, len(data.x), -1).clone()

    def _ball(self, sigma: Tensor) -> Ball:
        return Ball.of(sigma, self.radius, self.feature_norm, self.target)


@dataclass(frozen=True, kw_only=True)
class DPMTRL:
    """DP-MTRL: multi-task relationship learning with perturbed outputs (Gupta, Rana, Venkatesh 2016, after Zhang,
    Yeung 2010), with the squared loss, also for two classes.

        sum_i L_i(w_i) + (lam1 / 2) ||W||^2 + (lam2 / 2) tr(W P W^T),    P = (n Omega)^-1, tr(Omega) = 1.

    (lam2 is n times that of the paper.) In each of ``iterations`` rounds, from Omega = I / n and released what_i = 0:

    1. every task solves for its own model with what is released of the others,
       w_i = argmin_{||w|| <= radius} L_i(w) + (sigma_i / 2) ||w||^2 + lam2 w . sum_{j != i} P_ij what_j,
       sigma_i = lam1 + lam2 P_ii;
    2. what_i = w_i + noise, the only release, of sensitivity min(2 G / (n_i sigma_i), 2 radius) for one record;
    3. Omega = (What^T What)^(1/2) / tr((What^T What)^(1/2)) and P = (n Omega + jitter I)^-1.

    The description in Liang et al. (output perturbation of the model matrix in each outer iteration, closed-form
    solutions only, the composition of all iterations, the losses' Lipschitz constants) leaves open what is decided
    here: tasks are solved one by one against released models, so that a record is in one model a round; the ball, a
    closed form but for one number, without which the loss has no Lipschitz constant; ``jitter``, since Omega has at
    most rank p; and sensitivities that hold (theirs are estimates "smaller than the true value").

    Args:
        lam1: above 0.
        lam2: at least 0.
        iterations: rounds T: a record is in T releases.
        feature_norm, target: as for :class:`DPAggr`.
        radius: B, finite: the linear term of the others moves the minimizers, so that targets do not bound them.
        jitter: share of the identity in Omega, above 0.
        output: ``"noised"``, the released models as published; ``"own"``: every task keeps what it solves for next
            from its own raw records and the released models, without noise, since nobody else sees it.
    """

    lam1: float
    lam2: float
    radius: float
    iterations: int = 2
    feature_norm: float = 1.0
    target: float = 1.0
    jitter: float = 0.1
    output: Literal["noised", "own"] = "noised"

    name = "dp_mtrl"

    def precision(self, released: Tensor) -> tuple[Tensor, Tensor]:
        """From released models (R, n, p): the diagonal of P, (R, n), and P What, (R, n, p)."""
        tasks = released.shape[1]
        u, s, v = torch.linalg.svd(released, full_matrices=False)
        total = s.sum(-1, keepdim=True)
        size = torch.where(
            total > 0, tasks * s / total, 1.0
        )  # of n Omega; all models zero: its start
        shrunk = 1 / (size + self.jitter)
        rest = torch.where(total > 0, 1 / self.jitter, 1 / (1 + self.jitter))
        diagonal = rest + torch.einsum("rnk,rk->rn", u.square(), shrunk - rest)
        return diagonal, (u * (shrunk * s)[:, None]) @ v

    def sensitivity(self, sigma: Tensor, counts: Tensor, budget: TaskBudget) -> Tensor:
        """L2 sensitivity of the minimizers with strong convexity ``sigma`` (..., n)."""
        slope = self.feature_norm * (self.feature_norm * self.radius + self.target)
        ball = Ball(torch.full_like(sigma, self.radius), torch.full_like(sigma, slope))
        return ball.sensitivity(sigma, budget.replaced(counts))

    def fit(self, data: LinearData, budget: TaskBudget, sources: Sequence[NoiseSource]) -> Tensor:
        """The models of all tasks, once for each of R sources of noise: (R, n, p) float64."""
        gram, moment = moments_of(
            bounded_tasks(data, feature_norm=self.feature_norm, target=self.target)
        )
        law = budget.law(int(data.counts.max()), data.dimension, self.iterations)
        values, vectors = torch.linalg.eigh(gram)
        keys = torch.arange(len(data.x))
        released = torch.zeros(len(sources), len(data.x), data.dimension, dtype=torch.float64)
        for use in range(self.iterations):
            released, sensitivity = self._solve(
                moment, values, vectors, released, data.counts, budget
            )
            if law is not None:
                noise = [
                    law.draw_rows(source, self.name, use, keys, data.dimension)
                    for source in sources
                ]
                released = released + sensitivity[..., None] * torch.from_numpy(np.stack(noise))
        if self.output == "own":
            released, _ = self._solve(moment, values, vectors, released, data.counts, budget)
        return released

    def _solve(
        self,
        moment: Tensor,
        values: Tensor,
        vectors: Tensor,
        released: Tensor,
        counts: Tensor,
        budget: TaskBudget,
    ) -> tuple[Tensor, Tensor]:
        """Step 1: models (R, n, p) and their sensitivities (R, n)."""
        diagonal, applied = self.precision(released)
        sigma = self.lam1 + self.lam2 * diagonal
        right = moment - self.lam2 * (applied - diagonal[..., None] * released)
        rotated = torch.einsum("npk,rnp->rnk", vectors, right)
        solved = ball_ridge(values, rotated, sigma, torch.full_like(sigma, self.radius))
        return torch.einsum("npk,rnk->rnp", vectors, solved), self.sensitivity(
            sigma, counts, budget
        )


def moments_of(data: LinearData) -> tuple[Tensor, Tensor]:
    """X_i^T X_i / n_i (n, p, p) and X_i^T y_i / n_i (n, p) of tasks of at most 64 features."""
    moments = TaskStack.of(data, "squared").moments
    assert moments is not None
    return moments[0], moments[1]


def ball_ridge(values: Tensor, rotated: Tensor, sigma: Tensor, radius: Tensor) -> Tensor:
    """argmin_{||w|| <= radius} w . A w / 2 + sigma ||w||^2 / 2 - b . w in the coordinates of A's eigenvectors.

    w = b / (values + sigma + nu), with nu >= 0 the root of ||w|| = radius where the minimizer lies outside, by Newton's
    method on 1 / ||w||, which is concave in nu: it converges from below (More, Sorensen 1983).

    Args:
        values: (..., p) eigenvalues, at least 0.
        rotated: (..., p), b.
        sigma, radius: (...), above 0; an infinite radius is no bound.

    Returns:
        (..., p) with norm at most radius.
    """
    radius = radius * (1 - 2.0**-40)  # also after a rotation
    curvature = values.clamp(min=0) + sigma[..., None]
    nu = torch.zeros_like(sigma)
    for _ in range(100):
        w = rotated / (curvature + nu[..., None])
        norm = w.norm(dim=-1)
        outside = norm > radius * (1 + 1e-13)
        if not bool(outside.any()):
            break
        slope = (w.square() / (curvature + nu[..., None])).sum(-1)
        step = norm.square() / slope * (norm / radius - 1)
        nu = torch.where(outside, nu + step, nu)
    return w * (radius / norm.clamp(min=1e-300)).clamp(max=1.0)[..., None]
