"""The gradients and losses of an agent's records, for linear models and for any other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ...privacy import GradientMessage, RecordGradients, ScaledRows, Turns
from ...stacked import StackedModule
from ...stacked.losses import example_losses
from ...stacked.per_example import example_gradients
from ..base import Problem
from ..linear.data import LinearData, LinearLoss

Points = Callable[[int | np.ndarray, np.ndarray], np.ndarray]
"""(agent, or those of k, repetitions (k,)) -> (k, D) float64: the models at which gradients are taken."""


class Records(ABC):
    """What the algorithm needs of the agents' records."""

    @abstractmethod
    def gradients_at(self, points: Points) -> GradientMessage:
        """Return what agents hand to a release: the gradients of their records at ``points``."""

    @abstractmethod
    def mean_losses(self, agent: int, models: Tensor) -> Tensor:
        """Return the mean loss of an agent's records at ``models`` (k, D): (k,) float64; not private."""


class LinearRecords(Records):
    """Of a linear model: gradients are multiples of the rows."""

    def __init__(self, data: LinearData, loss: LinearLoss) -> None:
        self.data, self.loss = data, loss

    def gradients_at(self, points: Points) -> GradientMessage:
        def of_one(agent: int, which: np.ndarray, where: np.ndarray) -> np.ndarray:
            return self.loss.factors(points(agent, where), *self.data.arrays[agent])

        def of_all(agents: np.ndarray, where: np.ndarray, turns: Turns) -> np.ndarray:
            models, arrays = points(agents, where), self.data.arrays
            targets = np.concatenate([arrays[agent][1] for agent, times in turns for _ in range(times)], 1)[0]
            margins, row, place = np.empty(len(targets)), 0, 0
            for agent, times in turns:
                x = arrays[agent][0]
                part = margins[place : (place := place + times * len(x))]
                if times == 1:
                    x.dot(models[row], out=part)
                else:
                    models[row : row + times].dot(x.T, out=part.reshape(times, -1))
                row += times
            return self.loss.slopes(margins, targets)

        return ScaledRows(of_one, of_all)

    def mean_losses(self, agent: int, models: Tensor) -> Tensor:
        return self.loss.value(models, self.data.x[agent], self.data.y[agent]).mean(1)


class ModelRecords(Records):
    """Of any model and loss, one gradient a record."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.offsets = problem, problem.data.train.offsets
        device, dtype = problem.initial.device, problem.initial.dtype
        self.stack = StackedModule(problem.module, capacity=1, device=device, dtype=dtype)
        if self.stack.has_dropout:
            raise ConfigError("PeerToPeer takes models without dropout: a wake-up is one exact gradient.")

    def _own(self, agent: int, copies: int) -> tuple[Tensor, Tensor]:
        initial = self.problem.initial
        index = torch.arange(int(self.offsets[agent]), int(self.offsets[agent + 1]))
        x, y = self.problem.data.gather("train", index, dtype=initial.dtype, device=initial.device)
        return x.expand(copies, *x.shape), y.expand(copies, *y.shape)

    def gradients(self, agent: int, models: Tensor) -> Tensor:
        """Return (k, m_i, D) float64, of every record at ``models`` (k, D)."""
        x, y = self._own(agent, len(models))
        self.stack.load(models.to(self.problem.initial), len(models))
        chunks = example_gradients(self.stack, x, y, self.problem.loss)
        found = torch.empty(*x.shape[:2], models.shape[1], dtype=torch.float64)
        place = torch.zeros(len(models), dtype=torch.int64)
        for rows, owner in chunks:
            for copy in owner.unique().tolist():
                own = rows[owner == copy]
                found[copy, place[copy] : place[copy] + len(own)] = own.detach().cpu().double()
                place[copy] += len(own)
        return found

    def gradients_at(self, points: Points) -> GradientMessage:
        return RecordGradients(lambda i, which, where: self.gradients(i, torch.from_numpy(points(i, where))))

    def mean_losses(self, agent: int, models: Tensor) -> Tensor:
        x, y = self._own(agent, len(models))
        outputs = self.stack.predict(models.to(self.problem.initial), x)
        return example_losses(self.problem.loss, outputs, y).double().mean(1).cpu()
