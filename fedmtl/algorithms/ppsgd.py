"""PP-SGD: the sum of a private shared model and of a personal one, trained by the same gradients.

Bietti, Wei, Dudik, Langford, Wu: "Personalization Improves Privacy-Accuracy Tradeoffs in Federated Learning", ICML
2022.

    min over w and theta_1 .. theta_K of (1/K) sum_k l_k(w + theta_k)

Both parts have the gradient g of l_k at their sum. A step of a client is w <- w - lr g for its copy of w, whose
clipped change is sent, and theta_k <- theta_k - ratio lr g for its own part, which is not; so a local run is one of
the sum with the step size (1 + ratio) lr, divided between the two. ``ratio`` goes from federated averaging, 0, to
local training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from .._check import non_negative, positive
from ..errors import ConfigError
from ..local import LocalSGD
from ..privacy import BoundSampler, ReleasePlan
from .base import PERSONALIZE_ROUND, Own, Problem, Round, State
from .personal import keep_models, personal_fields
from .server import GlobalModel


@dataclass(frozen=True, kw_only=True)
class PPSGD(GlobalModel):
    """A shared plus a personal model (Bietti et al. 2022, Algorithm 1, with local runs of several steps).

    Args:
        ratio: step size of the personal part over that of the shared one (the paper's alpha), at least 0.
        local: the clients' local solver, with the step size of the shared part; :class:`LocalSGD` without weight decay.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.

    Raises:
        ConfigError: a value outside these ranges, or another solver.
    """

    ratio: float = 1.0

    name = "ppsgd"

    def __post_init__(self) -> None:
        non_negative(self, ratio=self.ratio)
        positive(self, server_lr=self.server_lr)
        if not isinstance(self.local, LocalSGD) or self.local.weight_decay:
            raise ConfigError(
                f"PPSGD.local is {self.local!r}; it must be LocalSGD without weight_decay, since the personal part "
                "follows the gradients that moved the shared one."
            )

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        return (
            ReleasePlan(
                name="update",
                dimension=problem.dimension,
                uses=problem.rounds,
                from_training=True,
            ),
        )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start from the public model, with personal parts, ``model`` in the store, at 0."""
        return State({"global": problem.initial.clone()}, problem.client_store(personal_fields(problem)))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Tensor], Own]:
        moved = self._moved(problem, public["global"] + own["model"], clients, round)
        parts = own["model"] + self.ratio / (1.0 + self.ratio) * moved
        return {"update": moved / (1.0 + self.ratio)}, keep_models(own, parts, own["model"])

    def _moved(self, problem: Problem, models: Tensor, clients: Tensor, round: Round | int) -> Tensor:
        """Return (k, D): by how much a local run moves the sums ``models`` (k, D)."""
        solver = replace(self.local, lr=(1.0 + self.ratio) * self.local.lr)
        return problem.train_locally(solver, models, clients, round=round) - models

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the sums; a client that never took part trains its own part once, from the shared model."""
        models = public["global"] + own["model"]
        new = (~own["seen"]).nonzero()[:, 0]
        if len(new) and self.ratio > 0.0:
            moved = self._moved(problem, models[new], clients[new.cpu()], PERSONALIZE_ROUND)
            models[new] += self.ratio / (1.0 + self.ratio) * moved
        return models
