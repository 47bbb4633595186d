"""The proximal point method: clients solve the local objective of FedProx to its minimum.

Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys 2020, with exact local
solutions:

    client k sends  clip(v_k - w^t),   v_k = argmin_v l_k(v) + (mu / 2) ||v - w^t||^2
    w^(t+1) = w^t + (noised mean of the messages)

For linear models only. For a real target l_k is half the mean squared error, and the minimizer
solves a linear system. For classes it is the mean log loss, minimized by full-batch accelerated
steps at 1 / L. So no local step size has to be tuned, and none diverges.

In the first rounds the level of a real target can be learned by itself (``intercept_rounds``): a
client then sends the mean of its residuals as the change of the bias, and the server moves the bias
alone. Without these rounds a level far from 0 is first spread over all features, and clients with
little variation in their features take many rounds to undo it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .._check import Count, Positive, Whole
from ..algorithms.base import Algorithm, Problem, Public, Released
from ..algorithms.cohort import Cohort, Own, Rows
from ..algorithms.fedavg import FedAvg
from ..algorithms.linear.classes import fit_classes, flat, layers
from ..algorithms.linear.data import Array, check_linear, records_of
from ..errors import ConfigError
from ..local.losses import half_mse, mse
from ..privacy import BoundSampler, ReleasePlan
from .average import LocalAverage


@dataclass(frozen=True, kw_only=True)
class ProximalPoint(FedAvg):
    """One shared linear model by exact proximal steps of the clients.

    Args:
        mu: strength of the proximal term, above 0.
        steps: accelerated steps of a model of classes.
        intercept_rounds: number of first rounds that move the bias alone, at most half of the
            rounds; of a real target.
        averaged, server_lr, server_optimizer, weights, cap: see :class:`FedAvg`.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, ProximalPoint, Trainer
        >>> from fedmtl import load_data, models
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
    intercept_rounds: Whole = 0
    local: ClassVar[None] = None  # type: ignore[assignment, misc]  # the objective is minimized

    name = "proximal_point"
    title = "Proximal point"
    colour = "#5c6bff"
    baseline = False
    from_training = False

    def check_solver(self) -> None:
        pass

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        bias = check_linear(problem)  # refuses other models before anything is charged
        if self.intercept_rounds and not (bias and problem.loss in (mse, half_mse)):
            given = f"{type(self).__name__}.intercept_rounds is {self.intercept_rounds}"
            raise ConfigError(f"{given}, but the model has classes or no bias; leave it out.")
        return super().plan(problem, schedule)

    def local_baseline(self) -> Algorithm | None:
        return LocalAverage()

    def update(self, c: Cohort) -> tuple[Rows, Own]:
        problem = c.problem
        shared = c.shared.double().cpu().numpy()
        bias = check_linear(problem)
        rows = np.zeros((len(c.ids), len(shared)))
        for place, client in enumerate(c.ids.tolist()):
            x, y = records_of(problem, client)
            if not len(x):
                continue
            if bias:
                x = np.concatenate([x, np.ones((len(x), 1))], 1)
            # records that are too large for float64 give a row of zeros, and no error
            with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError):
                if c.round < self._first_rounds(problem):
                    rows[place, -1] = (y - x @ shared).mean()
                else:
                    rows[place] = self._change(problem, x, y, shared, bias)
        return torch.from_numpy(rows).to(c.initial), c.own

    def server(self, problem: Problem, public: Public, released: Released) -> dict[str, Tensor]:
        if released.step < self._first_rounds(problem):
            # the slopes of the release are noise alone
            update = torch.zeros_like(released.values["update"])
            update[-1] = released.values["update"][-1]
            released = replace(released, values={**released.values, "update": update})
        return super().server(problem, public, released)

    def _first_rounds(self, problem: Problem) -> int:
        return min(self.intercept_rounds, problem.rounds // 2)

    def _change(self, problem: Problem, x: Array, y: Array, shared: Array, bias: bool) -> Array:
        """Returns the change v_k - w^t (D,) of a client.

        Args:
            problem: of the run.
            x: (n, p), the client's features, with a last 1 for a bias.
            y: (n,), its targets or labels.
            shared: w^t, (D,).
            bias: True if the model has a bias.
        """
        if problem.loss in (mse, half_mse):
            # (X^T X / n + mu I) (v - w) = X^T (y - X w) / n
            system = x.T @ x / len(x) + self.mu * np.eye(len(shared))
            return np.linalg.solve(system, x.T @ (y - x @ shared) / len(x))
        start = layers(shared, x.shape[1], bias)[None]
        fit = fit_classes(x, y.astype(np.int64), start, np.array([self.mu]), self.steps)
        change: Array = flat(fit, bias)[0] - shared
        return change
