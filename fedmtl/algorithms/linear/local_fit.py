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
from ..async_learner.algorithm import AsyncLearner
from ..base import Algorithm, AnyAlgorithm, Problem, State
from ..mp_mtl.algorithm import MPMTL
from ..mp_mtl.tasks import TaskStack
from ..pp_dmtl.algorithm import PPDMTL


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


def single_task(algorithm: AnyAlgorithm) -> LocalFit | None:
    """What the clients of a linear method have alone, with its loss, its ridge and its bound on rows; else None.

    The constants are those under which both minimize the same function of one client's records: PP-DMTL and the
    asynchronous learner have squared losses without 1/2, and the latter's g is reg ||w||^2, without 1/2 too.
    """
    if isinstance(algorithm, MPMTL):
        ridge = algorithm.start_ridge or algorithm.ridge or 0.01  # of its start
        return LocalFit(loss=algorithm.loss, ridge=ridge, **_bounds(algorithm))
    if isinstance(algorithm, PPDMTL):
        tau = algorithm.refine_tau or algorithm.tau or 0.01
        ridge = tau / (2 if algorithm.loss == "squared" else 1)
        return LocalFit(loss=algorithm.loss, ridge=ridge, **_bounds(algorithm))
    if isinstance(algorithm, AsyncLearner) and algorithm.loss != "hinge":
        return LocalFit(loss=algorithm.loss, ridge=algorithm.reg * (1 if algorithm.loss == "squared" else 2))
    return None


def _bounds(algorithm: MPMTL | PPDMTL) -> dict[str, float | None]:
    """Its bounds on records that are numbers; the ones that the data state hold for the records as they are."""
    given = {"row_norm": algorithm.row_norm, "target": algorithm.target}
    return {name: None if value == "auto" else value for name, value in given.items()}  # type: ignore[misc]
