"""The gradients and losses of an agent's records, for linear models and for any other."""

from __future__ import annotations

from abc import ABC, abstractmethod

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


class Records(ABC):
    """What the algorithm needs of the agents' records."""

    @abstractmethod
    def gradients_at(self, theta: np.ndarray) -> GradientMessage:
        """Return what agents hand to a release: the gradients of their records at their models, ``theta`` (R, n, D) of
        R repetitions, which may change from one release to the next."""

    @abstractmethod
    def mean_losses(self, agent: int, models: Tensor) -> Tensor:
        """Return the mean loss of an agent's records at ``models`` (k, D): (k,) float64; not private."""


class LinearRecords(Records):
    """Of a linear model: gradients are multiples of the rows."""

    def __init__(self, data: LinearData, loss: LinearLoss) -> None:
        self.data, self.loss = data, loss

    def gradients_at(self, theta: np.ndarray) -> GradientMessage:
        def of_one(agent: int, which: np.ndarray, runs: np.ndarray) -> np.ndarray:
            return self.loss.factors(theta[runs, agent], *self.data.arrays[agent])

        def of_all(agents: np.ndarray, runs: np.ndarray, turns: Turns) -> np.ndarray:
            records = [(*self.data.arrays[agent], times) for agent, times in turns]
            return self.loss.factors_of_all(theta[runs, agents], records)

        return ScaledRows(of_one, of_all if len(theta) > 1 else None)

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
        chunks = [rows.detach().cpu() for rows, _ in example_gradients(self.stack, x, y, self.problem.loss)]
        return torch.cat(chunks).double().view(*x.shape[:2], models.shape[1])

    def gradients_at(self, theta: np.ndarray) -> GradientMessage:
        return RecordGradients(lambda agent, which, runs: self.gradients(agent, torch.from_numpy(theta[runs, agent])))

    def mean_losses(self, agent: int, models: Tensor) -> Tensor:
        x, y = self._own(agent, len(models))
        outputs = self.stack.predict(models.to(self.problem.initial), x)
        return example_losses(self.problem.loss, outputs, y).double().mean(1).cpu()
