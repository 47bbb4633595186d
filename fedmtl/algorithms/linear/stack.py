"""Linear models of all tasks: losses, gradients and local fits, for several repetitions at once.

L_i(w) = (1 / (2 n_i)) ||X_i w - y_i||^2, or the mean logistic loss of task i. Squared losses of few parameters are kept
as their sufficient statistics, and these are stacked. Otherwise every task is computed by itself, on memory of its own:
what one has does not show in the last bits of another's numbers, and the fit of a task stops where that task has
converged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..base import Problem, State
from ..cohort import Cohort, Own
from .data import LinearAlgorithm, LinearData, LinearLoss, prepared
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
        moments: of squared losses, where they are small, by the numbers of tasks and parameters: (n, D, D)
            X^T X / n_i, (n, D) X^T y / n_i and (n,) mean y^2; else None.
    """

    loss: TaskLoss
    data: LinearData
    moments: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, data: LinearData, loss: TaskLoss) -> TaskStack:
        """Return the tasks of ``data``, whose rows are taken as they are."""
        # copies begin where memory is aligned, wherever the records of others end
        x, y = (tuple(part.clone() for part in parts) for parts in (data.x, data.y))
        size, moments = data.dimension, None
        if loss == "squared" and size <= _STATISTICS_WIDEST and 8 * len(y) * size**2 <= _STATISTICS_LARGEST:
            pairs = list(zip(x, y, strict=True))
            gram, cross = [a.T @ a / len(a) for a in x], [a.T @ b / len(a) for a, b in pairs]
            moments = torch.stack(gram), torch.stack(cross), torch.stack([b.square().mean() for b in y])
        return cls(loss, replace(data, x=x, y=y), moments)

    def gradient(self, w: Tensor) -> Tensor:
        """Return gradients of the L_i without the ridge: (n, R, D) -> (n, R, D), float64."""
        if self.moments is not None:
            gram, cross = (part.numpy() for part in self.moments[:2])
            return torch.from_numpy(w.numpy() @ gram - cross[:, None, :])  # of small matrices faster than torch's
        out = torch.empty_like(w, memory_format=torch.contiguous_format)
        for i, (x, y) in enumerate(zip(self.data.x, self.data.y, strict=True)):
            out[i] = self.linear.scale(w[i], x, y) @ x / len(x)
        return out

    def value(self, w: Tensor) -> Tensor:
        """Return the L_i without the ridge: (n, R, D) -> (n, R), float64."""
        if self.moments is not None:
            gram, cross, squares = self.moments
            quadratic = ((w @ gram) * w).sum(-1) / 2
            return quadratic - (w @ cross[:, :, None])[..., 0] + squares[:, None] / 2
        each = zip(w, self.data.x, self.data.y, strict=True)
        return torch.stack([self.linear.value(own, x, y).mean(1) for own, x, y in each])

    def fit(self, ridge: float | Tensor, scale: Tensor | None = None) -> Tensor:
        """Fit every task by itself: argmin_w L_i(w) + (ridge / 2) ||w||^2, or (ridge / 2) ||v||^2 for w = S_i v.

        From the moments these are linear systems, else each task is minimized by itself.

        Args:
            ridge: above 0, for all or of each task, (n,).
            scale: (n, D, D) the S_i, under which the prior of w_i has the covariance S_i S_i^T in place of the
                identity; None: the identity.

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
            fits = solve_regularized(gram + ridges[:, None, None] * torch.eye(self.data.dimension), cross)
        else:
            thetas = []
            for i, (x, y) in enumerate(zip(self.data.x, self.data.y, strict=True)):
                rows = x.numpy() if scale is None else x.numpy() @ scale[i].numpy()
                thetas.append(minimize(self.linear, rows, y.numpy(), float(ridges[i])).theta)
            fits = torch.from_numpy(np.stack(thetas))
        return fits if scale is None else torch.from_numpy((scale.numpy() @ fits.numpy()[:, :, None])[:, :, 0])

    def curvature(self, w: Tensor) -> Iterator[Tensor]:
        """Yield the second derivative of every L_i, (D, D) float64; for the logistic loss that of its quadratic upper
        bound about the margins of the row of ``w`` (n, D): tanh(m / 2) / (2 m) a record (Jaakkola and Jordan 2000)."""
        if self.moments is not None:
            yield from self.moments[0]
            return
        for own, x in zip(w, self.data.x, strict=True):
            if self.loss == "squared":
                yield x.T @ x / len(x)
            else:
                margin = (x @ own).abs().clamp_min(1e-6)
                yield (x * (torch.tanh(margin / 2) / (2 * margin))[:, None]).T @ x / len(x)

    @property
    def linear(self) -> LinearLoss:
        """Return the loss of a record, of which L_i is the mean."""
        return LinearLoss("half_squared" if self.loss == "squared" else self.loss)


class TaskAlgorithm(LinearAlgorithm):
    """A method for linear models that computes all tasks at once, in the order of the data.

    Attributes:
        loss: of the tasks.
    """

    all_at_once = True
    loss: TaskLoss

    def fits(self, own: Own) -> Tensor:
        """Return the models (n, R, D) float64 of tasks that keep ``own``, in every repetition."""
        return own["model"]

    def personal(self, c: Cohort) -> Tensor:
        """Return the models of the tasks in repetition 0."""
        return self.fits(c.own)[:, 0].to(c.initial)

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return the models of the tasks ``clients`` in every repetition, (R, k, D) float64."""
        return self.fits(state.private.gather_all(clients)).transpose(0, 1)

    def tasks(self, problem: Problem) -> TaskStack:
        """Return the tasks, within the bounds on records; made once for data and model."""
        data = self.data(problem)
        return prepared(problem, (data, self.loss), lambda: TaskStack.of(data, self.loss))

    def features(self, problem: Problem) -> int:
        """Return d, the length of a model without its bias."""
        data = self.data(problem)
        return data.dimension - int(data.bias)
