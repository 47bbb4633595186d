"""Client-level privacy on the concatenation of all personal models, released as it is: the failure in PMTL's Figure 1.

Hu, Wu, Smith: "Private Multi-Task Learning", TMLR 2023, section 3. The output W = [w_1 .. w_K] is released whole. One
client moves its own block alone, and nothing averages over it: each model has noise of the scale of the clip, whatever
the number of clients, where the noise on a mean falls as 1 / K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedmtl import LocalSGD
from fedmtl.algorithms import (
    ClientBatch,
    ClientStates,
    ClientStore,
    Problem,
    Released,
    RoundAlgorithm,
    State,
)
from fedmtl.algorithms.clusters import blocks
from fedmtl.local import LocalSolver
from fedmtl.privacy import BoundSampler, ReleasePlan


@dataclass(frozen=True, kw_only=True)
class ConcatenatedModels(RoundAlgorithm):
    """Every client trains its own released model, and its clipped change is released with noise.

    Args:
        local: the clients' local solver.
    """

    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))

    name = "concatenated_models"

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        return (
            ReleasePlan(
                name="update", dimension=problem.clients * problem.dimension, from_training=True
            ),
        )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        models = problem.initial.expand(problem.clients, -1).clone()
        return State({"models": models}, ClientStore(problem.clients, {}))

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        place, models = c.clients.to(c.initial.device), c.public["models"]
        start = models[place]
        return {"update": blocks(c.train(self.local, start) - start, place, len(models))}, c.states

    def server_update(
        self, problem: Problem, public: Mapping[str, Tensor], released: Released
    ) -> dict[str, Tensor]:
        models = public["models"]
        change = released.values["update"].reshape(models.shape) * released.denominator
        return {"models": (models.double() + change.to(models.device)).to(models.dtype)}

    def personal_models(self, c: ClientBatch) -> Tensor:
        """The released models: every client's is public."""
        return c.public["models"][c.clients.to(c.initial.device)]
