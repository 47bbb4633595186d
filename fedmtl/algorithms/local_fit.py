"""Single-task learning: the exact ridge fit of every client's own records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from .._check import Positive, Range
from ..privacy import RoundChannel
from ..schedules import Block
from .base import Problem, State
from .linear.algorithm import LinearAlgorithm
from .linear.evidence import ridges_of
from .linear.solve import minimize
from .linear.stack import TaskStack


@dataclass(frozen=True, kw_only=True)
class LocalFit(LinearAlgorithm):
    """The exact ridge fit of a linear model for every client; nothing leaves a client.

    It is argmin_w L_i(w) + (ridge / 2) ||w||^2 over ||w||_inf <= theta_max for every client i.

    Args:
        loss: L_i, ``"squared"``: (1 / 2 n_i) sum (w.x - y)^2, or ``"logistic"``: the mean of log(1
            + exp(-y w.x)).
        ridge: above 0.
        own_ridge: every client scales the ridge to its own records:
            :func:`~.linear.evidence.own_ridges`.
        feature_norm: features are scaled down to this norm, also in use of the models. ``"auto"``:
            the bound that the data state. None: features stay as they are.
        target: targets of the squared loss are cut off at this absolute value. ``"auto"``: that of
            the data. None: 2^40.
        norm: of the features, ``"l2"`` or ``"l1"``.
        theta_max: bound on ||w||_inf, above 0; infinite: none.

    Example:
        >>> from fedmtl import FullParticipation, Trainer, load_data, models
        >>> from fedmtl.algorithms import LocalFit
        >>> trainer = Trainer(
        ...     algorithm=LocalFit(loss="squared", ridge=0.1),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=1,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    loss: Literal["squared", "logistic"] = "logistic"
    ridge: Positive = 0.01
    own_ridge: bool = False
    feature_norm: Positive | Literal["auto"] | None = None
    target: Positive | Literal["auto"] | None = None
    norm: Literal["l1", "l2"] = "l2"  # type: ignore[misc]
    theta_max: Annotated[float, Range(lambda v: v > 0, "a number above 0")] = math.inf

    name = "local"
    title = "Local"
    colour = "#6b6f76"
    needs_row_bound = False
    fitted_once = True

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Returns the state with all fits, which are private."""
        store = problem.client_store({"model": ((problem.dimension,), torch.float64)})
        records = self.data(problem)
        tasks = TaskStack.of(records, self.loss)
        ridges = ridges_of(tasks, self.ridge, self.own_ridge)
        fits = tasks.fit(ridges)
        # fits outside of the box are made again within it
        outside = (fits.abs().amax(1) > self.theta_max).nonzero()[:, 0]
        for client in outside.tolist():
            x = records.x[client].numpy()
            y = records.y[client].numpy()
            ridge = float(ridges[client])
            minimum = minimize(tasks.linear, x, y, ridge, box=self.theta_max)
            fits[client] = torch.from_numpy(minimum.theta)
        store.scatter("model", torch.arange(problem.clients), fits)
        return State({}, store)

    def step(self, problem: Problem, state: State, block: Block, channel: RoundChannel) -> State:
        """Returns the state as it is: the fits are made before the first round."""
        return state

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the fits of ``clients``, (k, D), in the dtype of the initial model."""
        return state.private.gather("model", clients).to(problem.initial)
