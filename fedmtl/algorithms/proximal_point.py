"""The proximal point method: clients solve the local objective of FedProx to its minimum.

Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys 2020, with exact local solutions:

    client k sends  clip(v_k - w^t),   v_k = argmin_v l_k(v) + (mu / 2) ||v - w^t||^2
    w^(t+1) = w^t + (noised mean of what is sent)

For linear models only. Of a real target l_k is half the mean squared error, and the minimizer a linear system; of
classes it is the mean log loss, minimized by full-batch accelerated steps at 1 / L. So no local step size has to be
tuned, and none diverges.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from .._check import Count, Positive
from ..local.losses import half_mse, mse
from ..privacy import BoundSampler, ReleasePlan
from .average import LocalAverage
from .base import Algorithm, Problem
from .cohort import Cohort, Own, Rows
from .fedavg import FedAvg
from .linear.classes import fit_classes, flat, layers
from .linear.data import Array, check_linear, records_of


@dataclass(frozen=True, kw_only=True)
class ProximalPoint(FedAvg):
    """One shared linear model by exact proximal steps of the clients.

    Args:
        mu: strength of the proximal term, above 0.
        steps: accelerated steps of a model of classes.
        averaged, server_lr, server_optimizer, weights, cap: see :class:`FedAvg`.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, ProximalPoint, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=ProximalPoint(mu=0.03),
        ...     data=load_data("synthetic_tasks", tasks=4, problem="regression"),
        ...     model=models.linear_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.3, epsilon=8.0),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 29])
    """

    mu: Positive = 0.03
    steps: Count = 20
    local: ClassVar[None] = None  # type: ignore[assignment, misc]  # the objective is minimized

    name, title, colour = "proximal_point", "Proximal point", "#5c6bff"
    baseline = False
    from_training = False

    def check_solver(self) -> None:
        pass

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        check_linear(problem)  # refuses other models before anything is charged
        return super().plan(problem, schedule)

    def local_baseline(self) -> Algorithm | None:
        return LocalAverage()

    def update(self, c: Cohort) -> tuple[Rows, Own]:
        problem, shared = c.problem, c.shared.double().cpu().numpy()
        bias, rows = check_linear(problem), np.zeros((len(c.ids), len(shared)))
        for place, client in enumerate(c.ids.tolist()):
            x, y = records_of(problem, client)
            if not len(x):
                continue
            x = np.concatenate([x, np.ones((len(x), 1))], 1) if bias else x
            with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError):  # too large for float64: zero, and no end
                rows[place] = self._change(problem, x, y, shared, bias)
        return torch.from_numpy(rows).to(c.initial), c.own

    def _change(self, problem: Problem, x: Array, y: Array, shared: Array, bias: bool) -> Array:
        """Return v_k - w^t (D,) of a client with records x (n, p), with a last 1 for a bias, and y (n,)."""
        if problem.loss in (mse, half_mse):
            system = x.T @ x / len(x) + self.mu * np.eye(len(shared))
            return np.linalg.solve(system, x.T @ (y - x @ shared) / len(x))
        start = layers(shared, x.shape[1], bias)[None]
        fit = fit_classes(x, y.astype(np.int64), start, np.array([self.mu]), self.steps)
        change: Array = flat(fit, bias)[0] - shared
        return change
