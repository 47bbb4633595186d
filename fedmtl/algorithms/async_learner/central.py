"""The base class of learners of one linear model, with owners that answer one at a time.

    min_{||theta||_inf <= theta_max} f(theta) = g(theta) + (1/n) sum_j l(theta . x_j, y_j)

over all records j, with g = reg ||theta||^2. The protected unit is a record; neighbours replace
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..._check import Positive
from ..base import Problem, State
from ..linear.data import LinearData
from ..local_fit import LocalFit
from ..one_at_a_time import OneAtATime

_BLOCK_ELEMENTS = 1 << 20  # the losses of several models on all records that are held at once


@dataclass(frozen=True, kw_only=True)
class CentralLearner(OneAtATime):
    """A learner of one linear model; all settings are public.

    Args:
        reg: g = reg ||theta||^2 (the bias included), above 0.
        theta_max: bound on ||theta||_inf, above 0.
        feature_norm: a public bound on the L1 norm of a record's features (the 1 of a bias stays),
            to which they are scaled down in training and wherever the models are used. ``"auto"``:
            the bound that the data state, if any. None: features stay as they are.
        target: a public bound on abs(y) of the squared loss, at which training targets are cut off;
            likewise.
    """

    reg: Positive = 1e-5
    theta_max: Positive = 10.0
    feature_norm: Positive | Literal["auto"] | None = None
    target: Positive | Literal["auto"] | None = None

    norm = "l1"
    needs_row_bound = False

    def shared(self, state: State) -> Tensor | None:
        """Returns theta_L, (p,) float64, a copy."""
        # The next step writes into the state.
        return state.public["theta_l"][0].clone()

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns theta_L of every replicate for every client, (R, k, p), an expanded view of
        a copy."""
        shared = state.public["theta_l"].to(problem.initial, copy=True)
        return shared[:, None].expand(-1, len(clients), -1)

    def local_baseline(self) -> LocalFit | None:
        """Returns an owner's minimizer on its own bounded records, under the same constraint.

        There is none for the hinge.
        """
        if self.loss == "hinge":
            return None
        # g = reg ||theta||^2 and the squared loss have no 1/2 here, and have it in the fit
        ridge = 2 * self.reg
        if self.loss == "squared":
            ridge = self.reg
        return LocalFit(
            loss=self.loss,  # type: ignore[arg-type]
            ridge=ridge,
            theta_max=self.theta_max,
            feature_norm=self.feature_norm,
            norm=self.norm,  # type: ignore[arg-type]
            target=self.target,
        )

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Returns f(theta_L), equation (2), on the training records, (R,) float64; not private."""
        return self.fitness(self.data(problem), state.public["theta_l"])

    def fitness(self, data: LinearData, theta: Tensor) -> Tensor:
        """Returns f of equation (2) on the records of all owners, (R,) float64; not private.

        Args:
            data: the records.
            theta: (R, p), the models.
        """
        x, y = data.pooled()
        blocks = theta.split(max(1, _BLOCK_ELEMENTS // len(x)))
        means = [self.linear_loss.value(block, x, y).mean(1) for block in blocks]
        return torch.cat(means) + self.reg * theta.square().sum(1)
