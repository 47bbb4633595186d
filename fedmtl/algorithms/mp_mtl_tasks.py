"""The tasks of MP-MTL stacked: losses, gradients and local fits of all tasks (and repetitions) in a few operations.

L_i(w) = (1 / (2 n_i)) ||X_i w - y_i||^2, or the mean logistic loss of task i. Squared losses of few parameters are kept
as their sufficient statistics. Otherwise the records are padded, among tasks of similar sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import LinearData, LinearLoss, prepared, solve_regularized
from .pp_dmtl_task import bounded_rows

if TYPE_CHECKING:
    from .base import Problem

TaskLoss = Literal["squared", "logistic"]

_STATISTICS_LARGEST = 1 << 28  # bytes of all second moments together
_FIT_STEPS = 20_000


@dataclass(frozen=True, eq=False)
class Block:
    """Tasks of similar numbers of records, padded with zero rows and targets.

    Attributes:
        tasks: (k,) int64.
        x: (k, m, D) float64.
        y: (k, m) float64.
        scale: (k,) one over the number of records.
    """

    tasks: Tensor
    x: Tensor
    y: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class TaskStack:
    """All tasks of a linear problem.

    Attributes:
        loss: ``"squared"`` (with its 1/2) or ``"logistic"``.
        blocks: the records.
        moments: of squared losses, where they are small: (n, D, D) X^T X / n_i and (n, D) X^T y / n_i; else None.
        squares: (n,) mean y^2.
        dimension: D, with the bias.
        bias: whether the last parameter is a bias.
    """

    loss: TaskLoss
    blocks: tuple[Block, ...]
    moments: tuple[Tensor, Tensor] | None
    squares: Tensor
    dimension: int
    bias: bool

    @classmethod
    def of(cls, problem: Problem, loss: TaskLoss, row_norm: float | None, target: float | None = None) -> TaskStack:
        """The training records within the bounds of :func:`bounded_rows`; made once for data and model.

        Raises:
            ModelError: the model is not linear.
            DataError: targets that do not suit the loss.
        """

        def build() -> TaskStack:
            return cls.stack(bounded_rows(problem, LinearLoss(loss), row_norm, target), loss)

        return prepared(problem, ("mp_mtl", loss, row_norm, target), build)

    @classmethod
    def stack(cls, data: LinearData, loss: TaskLoss) -> TaskStack:
        """The tasks of ``data``, whose rows are taken as they are."""
        blocks = tuple(_block(data, part) for part in _similar(data.counts))
        squares = torch.tensor([float(y.square().sum()) / max(1, len(y)) for y in data.y], dtype=torch.float64)
        size = data.dimension
        small = 8 * len(data.y) * size**2 <= _STATISTICS_LARGEST and size <= 2 * int(data.counts.max())
        moments = _moments(data) if loss == "squared" and small else None
        return cls(loss, blocks, moments, squares, size, data.bias)

    def smoothness(self, row_norm: float) -> float:
        """Lipschitz constant of the gradient of L_i over the domain: B^2, a quarter of it for the logistic loss, with
        B^2 = row_norm^2, and 1 more with a bias."""
        return (row_norm**2 + int(self.bias)) * (1.0 if self.loss == "squared" else 0.25)

    def gradient(self, w: Tensor) -> Tensor:
        """Gradients of the L_i without the ridge: (n, R, D) -> (n, R, D), float64."""
        if self.moments is not None:
            product = w.numpy() @ self.moments[0].numpy()  # of small matrices numpy's products are faster than torch's
            product -= self.moments[1][:, None, :].numpy()
            return torch.from_numpy(product)
        out = torch.empty_like(w, memory_format=torch.contiguous_format)
        for block in self.blocks:
            y = block.y[:, None, :]
            margins = w[block.tasks] @ block.x.mT
            slopes = margins - y if self.loss == "squared" else -y * torch.sigmoid(-y * margins)
            out[block.tasks] = (slopes @ block.x) * block.scale[:, None, None]
        return out

    def value(self, w: Tensor) -> Tensor:
        """The L_i without the ridge: (n, R, D) -> (n, R), float64."""
        if self.moments is not None:
            gram, cross = self.moments
            quadratic = ((w @ gram) * w).sum(-1) / 2
            return quadratic - (w @ cross[:, :, None])[..., 0] + self.squares[:, None] / 2
        out = w.new_empty(w.shape[:2])
        for block in self.blocks:
            y = block.y[:, None, :]
            margins = w[block.tasks] @ block.x.mT
            losses = (margins - y).square() / 2 if self.loss == "squared" else F.softplus(-y * margins) * (y != 0)
            out[block.tasks] = losses.sum(-1) * block.scale[:, None]
        return out

    def fit(self, ridge: float, *, tolerance: float = 1e-10) -> Tensor:
        """Every task alone: argmin_w L_i(w) + (ridge / 2) ||w||^2.

        Squared loss: linear systems. Logistic loss: accelerated gradient descent of all tasks together.

        Args:
            ridge: above 0.
            tolerance: on the norm of the largest gradient.

        Returns:
            (n, D) float64.
        """
        if self.loss == "logistic":
            return self._descend(ridge, tolerance)
        if self.moments is not None:
            gram, cross = self.moments
            return solve_regularized(gram + ridge * torch.eye(self.dimension, dtype=gram.dtype), cross)
        out = torch.empty(len(self.squares), self.dimension, dtype=torch.float64)
        for block in self.blocks:  # in the space of the records
            kernel = block.x @ block.x.mT * block.scale[:, None, None]
            kernel.diagonal(dim1=1, dim2=2).add_(ridge)
            dual = solve_regularized(kernel, block.y)
            out[block.tasks] = (dual[:, None, :] @ block.x)[:, 0] * block.scale[:, None]
        return out

    def _descend(self, ridge: float, tolerance: float) -> Tensor:
        largest = max(float((b.x.square().sum((1, 2)) * b.scale).max()) for b in self.blocks)
        lipschitz = largest / 4 + ridge
        pull = (1 - (ridge / lipschitz) ** 0.5) / (1 + (ridge / lipschitz) ** 0.5)
        w = ahead = torch.zeros(len(self.squares), 1, self.dimension, dtype=torch.float64)
        for _ in range(_FIT_STEPS):
            gradient = self.gradient(ahead) + ridge * ahead
            if float(gradient.norm(dim=2).max()) <= tolerance:
                break
            new = ahead - gradient / lipschitz
            ahead, w = new + pull * (new - w), new
        return ahead[:, 0]


def _similar(counts: Tensor) -> Iterator[Tensor]:
    """Tasks by increasing numbers of records, cut where these have doubled."""
    order = torch.argsort(counts, stable=True)
    sizes = counts[order].tolist()
    start = 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sizes[stop] > 2 * max(1, sizes[start]):
            yield order[start:stop]
            start = stop


def _block(data: LinearData, tasks: Tensor) -> Block:
    members = tasks.tolist()
    longest = max(1, max(len(data.y[i]) for i in members))
    x = torch.zeros(len(members), longest, data.dimension, dtype=torch.float64)
    y = torch.zeros(len(members), longest, dtype=torch.float64)
    for place, i in enumerate(members):
        x[place, : len(data.y[i])], y[place, : len(data.y[i])] = data.x[i], data.y[i]
    return Block(tasks, x, y, 1.0 / data.counts[tasks].clamp(min=1).double())


def _moments(data: LinearData) -> tuple[Tensor, Tensor]:
    gram = torch.stack([x.T @ x / max(1, len(x)) for x in data.x])
    return gram, torch.stack([x.T @ y / max(1, len(y)) for x, y in zip(data.x, data.y, strict=True)])
