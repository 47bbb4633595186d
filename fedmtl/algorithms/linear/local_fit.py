"""Single-task learning: the exact ridge fit of every client's own records. Nothing leaves a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..._check import one_of, positive
from ...data import RowBound
from ...privacy import BoundSampler, Channel, ReleasePlan
from ...schedules import Event
from ..base import Algorithm, Problem, State
from .stack import TaskStack


@dataclass(frozen=True, kw_only=True)
class LocalFit(Algorithm):
    """argmin_w L_i(w) + (ridge / 2) ||w||^2 for every client i, of a linear model.

    Args:
        loss: L_i, ``"squared"``: (1 / 2 n_i) sum (w.x - y)^2, or ``"logistic"``: the mean of log(1 + exp(-y w.x)).
        ridge: above 0.
        row_norm: features are scaled down to this L2 norm, also where the models are used; None: they are not.
        target: targets of the squared loss are cut off at this absolute value; None: they are not, up to 2^40.
    """

    loss: Literal["squared", "logistic"] = "logistic"
    ridge: float = 0.01
    row_norm: float | None = None
    target: float | None = None

    name = "local"

    def __post_init__(self) -> None:
        one_of(self, ("squared", "logistic"), loss=self.loss)
        positive(self, ridge=self.ridge)
        for name in ("row_norm", "target"):
            if getattr(self, name) is not None:
                positive(self, **{name: getattr(self, name)})

    def row_bound(self, problem: Problem) -> RowBound | None:
        """The bound on features, which holds where the models are used too."""
        return None if self.row_norm is None else RowBound(self.row_norm)

    def plan(self, problem: Problem, sampler: BoundSampler) -> tuple[ReleasePlan, ...]:
        return ()

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """The fits, in private."""
        store = problem.client_store({"model": ((problem.dimension,), torch.float64)})
        tasks = TaskStack.of(problem, self.loss, self.row_norm, self.target)
        store.scatter("model", torch.arange(problem.clients), tasks.fit(self.ridge))
        return State({}, store)

    def step(self, problem: Problem, state: State, event: Event, channel: Channel) -> State:
        return state

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        return state.private.gather("model", clients).to(problem.initial)

    def shared(self, state: State) -> Tensor | None:
        return None


def given_bound(value: float | str | None) -> float | None:
    """A bound that is a number; the ``"auto"`` one holds for the records as they are."""
    return None if isinstance(value, str) or value is None else float(value)
