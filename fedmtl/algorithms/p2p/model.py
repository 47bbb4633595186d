"""The gradients and losses of an agent's records, of any model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ...local import StackedModule
from ...local.losses import example_losses
from ...local.per_example import example_gradients
from ..base import Problem


class ModelRecords:
    """The agents' records under any model and loss, one gradient a record."""

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

    def gradients(self, agent: int, models: np.ndarray) -> Tensor:
        """Return (k, m_i, D) float64, of every record at ``models`` (k, D)."""
        x, y = self._own(agent, len(models))
        self.stack.load(torch.from_numpy(models).to(self.problem.initial), len(models))
        chunks = [rows.detach().cpu() for rows, _ in example_gradients(self.stack, x, y, self.problem.loss)]
        return torch.cat(chunks).double().view(*x.shape[:2], models.shape[1])

    def mean_losses(self, agent: int, models: Tensor) -> Tensor:
        """Return the mean loss of an agent's records at ``models`` (k, D): (k,) float64; not private."""
        x, y = self._own(agent, len(models))
        outputs = self.stack.predict(models.to(self.problem.initial), x)
        return example_losses(self.problem.loss, outputs, y).double().mean(1).cpu()
