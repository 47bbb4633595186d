"""Linear models of all tasks: losses, gradients and local fits, for several replicates at once.

L_i(w) = (1 / (2 n_i)) ||X_i w - y_i||^2, or the mean logistic loss of task i. Squared losses of few
parameters are kept as their sufficient statistics, and these are stacked. Otherwise every task is
computed by itself, on memory of its own: the records of one do not show in the last bits of
another's numbers, and the fit of a task stops when that task has converged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..base import Problem, State
from ..client_batch import ClientBatch, ClientStates
from ..rounds import RoundAlgorithm
from .algorithm import LinearAlgorithm
from .data import LinearData, LinearLoss, prepared
from .solve import minimize, solve_regularized

TaskLoss = Literal["squared", "logistic"]

_STATISTICS_LARGEST = 1 << 28  # bytes of all second moments
_STATISTICS_WIDEST = 64  # parameters; of more, few records are cheaper than their moments


@dataclass(frozen=True, eq=False)
class TaskStack:
    """All tasks of a linear problem.

    Attributes:
        loss: ``"squared"`` (with its 1/2) or ``"logistic"``.
        data: the records of every task, (n_i, D).
        moments: the sufficient statistics of squared losses of few tasks and parameters:
            (n, D, D) X^T X / n_i, (n, D) X^T y / n_i and (n,) mean y^2; else None.
    """

    loss: TaskLoss
    data: LinearData
    moments: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, data: LinearData, loss: TaskLoss) -> TaskStack:
        """Returns the tasks of ``data``, whose rows are taken as they are."""
        # copies are aligned in memory, so their bits do not depend on the records of other clients
        x = tuple(rows.clone() for rows in data.x)
        y = tuple(targets.clone() for targets in data.y)
        size = data.dimension
        few = size <= _STATISTICS_WIDEST and 8 * len(y) * size**2 <= _STATISTICS_LARGEST
        moments = None
        if loss == "squared" and few:
            gram = [a.T @ a / len(a) for a in x]
            cross = [a.T @ b / len(a) for a, b in zip(x, y, strict=True)]
            squares = [b.square().mean() for b in y]
            moments = (torch.stack(gram), torch.stack(cross), torch.stack(squares))
        return cls(loss, replace(data, x=x, y=y), moments)

    def gradient(self, w: Tensor) -> Tensor:
        """Returns gradients of the L_i without the ridge: (n, R, D) -> (n, R, D), float64."""
        if self.moments is not None:
            gram, cross, _ = self.moments
            # products of small matrices are faster in NumPy than in torch
            return torch.from_numpy(w.numpy() @ gram.numpy() - cross.numpy()[:, None, :])
        out = torch.empty_like(w, memory_format=torch.contiguous_format)
        for i, (x, y) in enumerate(zip(self.data.x, self.data.y, strict=True)):
            out[i] = self.linear.factors_of(w[i], x, y) @ x / len(x)
        return out

    def value(self, w: Tensor) -> Tensor:
        """Returns the L_i without the ridge: (n, R, D) -> (n, R), float64."""
        if self.moments is not None:
            gram, cross, squares = self.moments
            quadratic = ((w @ gram) * w).sum(-1) / 2
            return quadratic - (w @ cross[:, :, None])[..., 0] + squares[:, None] / 2
        each = zip(w, self.data.x, self.data.y, strict=True)
        return torch.stack([self.linear.value(own, x, y).mean(1) for own, x, y in each])

    def fit(self, ridge: float | Tensor, scale: Tensor | None = None) -> Tensor:
        """Fits every task by itself: argmin_w L_i(w) + (ridge / 2) ||w||^2.

        With a ``scale`` the penalty is (ridge / 2) ||v||^2 for w = S_i v. With the moments these
        are linear systems; else each task is minimized by itself.

        Args:
            ridge: above 0, for all or of each task, (n,).
            scale: (n, D, D) the S_i, under which the prior of w_i has the covariance S_i S_i^T in
                place of the identity; None: the identity.

        Returns:
            (n, D) float64.
        """
        ridges = torch.as_tensor(ridge, dtype=torch.float64).expand(len(self.data.y))
        if self.moments is not None:
            gram, cross, _ = self.moments
            if scale is not None:
                within = scale.numpy()  # one product a task
                gram = torch.from_numpy(within.swapaxes(1, 2) @ gram.numpy() @ within)
                cross = torch.from_numpy((cross.numpy()[:, None, :] @ within)[:, 0])
            penalty = ridges[:, None, None] * torch.eye(self.data.dimension)
            fits = solve_regularized(gram + penalty, cross)
        else:
            thetas = []
            for i, (x, y) in enumerate(zip(self.data.x, self.data.y, strict=True)):
                rows = x.numpy()
                if scale is not None:
                    rows = rows @ scale[i].numpy()
                thetas.append(minimize(self.linear, rows, y.numpy(), float(ridges[i])).theta)
            fits = torch.from_numpy(np.stack(thetas))
        if scale is None:
            return fits
        scaled = scale.numpy() @ fits.numpy()[:, :, None]  # w_i = S_i v_i
        return torch.from_numpy(scaled[:, :, 0])

    def curvature(self, w: Tensor) -> Iterator[Tensor]:
        """Yields the second derivative of every L_i, (D, D) float64.

        For the logistic loss it is that of its quadratic upper bound about the margins m of the row
        of ``w`` (n, D): tanh(m / 2) / (2 m) for each record (Jaakkola and Jordan 2000).
        """
        if self.moments is not None:
            yield from self.moments[0]
            return
        for own, x in zip(w, self.data.x, strict=True):
            if self.loss == "squared":
                yield x.T @ x / len(x)
                continue
            margin = (x @ own).abs().clamp_min(1e-6)
            bend = torch.tanh(margin / 2) / (2 * margin)
            yield (x * bend[:, None]).T @ x / len(x)

    @property
    def linear(self) -> LinearLoss:
        """Returns the loss of a record, of which L_i is the mean."""
        if self.loss == "squared":
            return LinearLoss("half_squared")
        return LinearLoss(self.loss)


class TaskAlgorithm(LinearAlgorithm, RoundAlgorithm):
    """A method for linear models that computes all tasks at once, in the order of the data.

    Attributes:
        loss: of the tasks.
    """

    all_at_once = True
    loss: TaskLoss

    def fits(self, states: ClientStates) -> Tensor:
        """Returns the models (n, R, D) float64 of tasks with these states, in all runs."""
        return states["model"]

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the models of the tasks in replicate 0."""
        return self.fits(c.states)[:, 0].to(c.initial)

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the models of the tasks ``clients`` in all replicates, (R, k, D) float64."""
        return self.fits(state.private.gather_all(clients)).transpose(0, 1)

    def tasks(self, problem: Problem) -> TaskStack:
        """Returns the tasks, within the bounds on records; made once for data and model."""
        data = self.data(problem)
        return prepared(problem, (data, self.loss), lambda: TaskStack.of(data, self.loss))

    def features(self, problem: Problem) -> int:
        """Returns d, the length of a model without its bias."""
        data = self.data(problem)
        return data.dimension - int(data.bias)
