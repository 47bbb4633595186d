"""Single-task learning: the exact ridge fit of every client's own records. Nothing leaves a client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from .._check import Positive, Range
from ..privacy import Rounds
from ..schedules import Block
from .base import Problem, State
from .linear.algorithm import LinearAlgorithm
from .linear.evidence import ridges_of
from .linear.solve import minimize
from .linear.stack import TaskStack


@dataclass(frozen=True, kw_only=True)
class LocalFit(LinearAlgorithm):
    """argmin_w L_i(w) + (ridge / 2) ||w||^2 over ||w||_inf <= theta_max for every client i, of a
    linear model.

    Args:
        loss: L_i, ``"squared"``: (1 / 2 n_i) sum (w.x - y)^2, or ``"logistic"``: the mean of log(1
            + exp(-y w.x)).
        ridge: above 0.
        own_ridge: every client scales the ridge to its own records:
            :func:`~.linear.evidence.own_ridges`.
        row_norm: features are scaled down to this norm, also where the models are used; ``"auto"``:
            to the bound that the data state; None: they are not.
        target: targets of the squared loss are cut off at this absolute value; ``"auto"``: at that
            of the data; None: they are not, up to 2^40.
        norm: of the features, ``"l2"`` or ``"l1"``.
        theta_max: bound on ||w||_inf, above 0; infinite: none.
    """

    loss: Literal["squared", "logistic"] = "logistic"
    ridge: Positive = 0.01
    own_ridge: bool = False
    row_norm: Positive | Literal["auto"] | None = None
    target: Positive | Literal["auto"] | None = None
    norm: Literal["l1", "l2"] = "l2"  # type: ignore[misc]
    theta_max: Annotated[float, Range(lambda v: v > 0, "a number above 0")] = math.inf

    name, title, colour = "local", "Local", "#6b6f76"
    needs_row_bound = False

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Returns the fits, in private."""
        store = problem.client_store({"model": ((problem.dimension,), torch.float64)})
        records = self.data(problem)
        tasks = TaskStack.of(records, self.loss)
        ridges = ridges_of(tasks, self.ridge, self.own_ridge)
        fits = tasks.fit(ridges)
        for client in (fits.abs().amax(1) > self.theta_max).nonzero()[:, 0].tolist():
            x, y, own = records.x[client].numpy(), records.y[client].numpy(), float(ridges[client])
            fits[client] = torch.from_numpy(minimize(tasks.linear, x, y, own, box=self.theta_max).theta)
        store.scatter("model", torch.arange(problem.clients), fits)
        return State({}, store)

    def step(self, problem: Problem, state: State, block: Block, channel: Rounds) -> State:
        return state

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        return state.private.gather("model", clients).to(problem.initial)
