"""FedAvg and FedProx: one global model.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, with the
client-level release of McMahan et al.: "Learning Differentially Private Recurrent Language Models", ICLR 2018.
Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys 2020 (FedProx).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .._check import non_negative, positive
from ..local import LocalSolver
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.channel import Message
from .base import Own, Problem, Round, State
from .server import GlobalModel
from .store import ClientStore


@dataclass(frozen=True, kw_only=True)
class FedAvg(GlobalModel):
    """Federated averaging with uniform client weights.

    Args:
        local: the clients' local solver.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.
    """

    name = "fedavg"

    def __post_init__(self) -> None:
        positive(self, server_lr=self.server_lr)
        LocalSolver.check_given(self, self.local, self.proximal_strength)

    @property
    def proximal_strength(self) -> float:
        """Return the weight of (1/2) ||w - w_global||^2 in the local objective: 0 for FedAvg."""
        return 0.0

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
        return State({"global": problem.initial.clone()}, ClientStore(problem.clients, {}))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Message], Own]:
        model = public["global"]
        update = problem.send_change(
            "update", self.local, model, clients, round=round, lam=self.proximal_strength, anchor=model, less=model
        )
        return {"update": update}, own

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the global model, for everyone."""
        return public["global"].expand(len(clients), -1)


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg whose local objective adds (mu / 2) ||w - w_global||^2.

    Args:
        mu: strength of the proximal term.
        local, server_lr, server_optimizer: see :class:`FedAvg`.
    """

    mu: float = 0.1

    name = "fedprox"

    def __post_init__(self) -> None:
        non_negative(self, mu=self.mu)
        super().__post_init__()

    @property
    def proximal_strength(self) -> float:
        return self.mu
