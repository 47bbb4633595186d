"""FedRep and FedPer: a shared representation, and heads that never leave their clients.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021 (FedRep); Arivazhagan et al.: "Federated Learning with Personalization Layers", 2019 (FedPer). With the
client-level release of the representation alone it is CENTAUR, Shen et al.: "Share Your Representation Only:
Guaranteed Improvement of the Privacy-Utility Tradeoff in Federated Learning", ICLR 2023.

    min over phi and h_1 .. h_K of (1/K) sum_k l_k(phi, h_k)

A member of a cohort receives phi, fits its head h_k to it, trains phi with this head, and sends the clipped change of
phi. The release has as many coordinates as phi, so the noise falls on nothing else, and the clip is spent on nothing
else. Where single records are protected, every training is charged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._check import positive
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver
from ..privacy import BoundSampler, ReleasePlan
from .base import PERSONALIZE_ROUND, Algorithm, Own, Problem, Released, Round, State
from .personal import personal_fields
from .server import ServerOptimizer, apply_update


@dataclass(frozen=True, kw_only=True)
class FedRep(Algorithm):
    """Alternating local training of a private head and of the shared representation (Collins et al. 2021, Algorithm 1).

    Args:
        head: names of the modules or parameters that stay with the client, ``*`` allowed, see
            :meth:`fedmtl.stacked.Layout.places`; ``"auto"`` is the network's last layer. All others are shared. An
            empty sequence shares everything, which is federated averaging.
        local: the clients' local solver of the representation.
        head_local: that of the head; None: ``local``. Where single records are protected, both make the steps of
            ``local``.
        server_lr: step size of the server.
        server_optimizer: used instead of the plain server step.

    Raises:
        ConfigError: a value outside these ranges; later, a name that the network does not have, or a head that is the
            whole network.
    """

    head: str | Sequence[str] = "auto"
    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))
    head_local: LocalSolver | None = None
    server_lr: float = 1.0
    server_optimizer: ServerOptimizer | None = None

    name = "fedrep"

    def __post_init__(self) -> None:
        if self.head != "auto" and (isinstance(self.head, str) or not isinstance(self.head, Iterable)):
            raise ConfigError(
                f"{type(self).__name__}.head is {self.head!r}; give 'auto', or a sequence of names, such as ['fc']."
            )
        if not isinstance(self.head, str):
            object.__setattr__(self, "head", tuple(self.head))
        positive(self, server_lr=self.server_lr)
        LocalSolver.check_given(self, self.local)
        if self.head_local is not None:
            LocalSolver.check_given(self, self.head_local, name="head_local")

    def shared_places(self, problem: Problem) -> Tensor:
        """Return (D,) bool, on the host: which of the flat parameters are shared.

        Raises:
            ConfigError: a name that the network does not have, or nothing is shared.
        """
        names = (problem.layout.last,) if isinstance(self.head, str) else self.head
        shared = ~problem.layout.places(names, f"{type(self).__name__}.head")
        if not bool(shared.any()):
            raise ConfigError(
                f"{type(self).__name__}.head is all that is trained ({', '.join(problem.layout.names)}), so nothing is "
                "shared; name some of these parameters, train more of the network, or use algorithm=local."
            )
        return shared

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        size, rounds = int(self.shared_places(problem).sum()), problem.rounds
        trainings = self._trainings(problem)
        return (ReleasePlan(name="update", dimension=size, uses=rounds, from_training=True, trainings=trainings),)

    def _trainings(self, problem: Problem) -> int:
        return 1 if bool(self.shared_places(problem).all()) else 2

    def init(self, problem: Problem, replicates: int = 1) -> State:
        size = problem.dimension - int(self.shared_places(problem).sum())
        fields = {**personal_fields(problem), "head": ((size,), problem.initial.dtype)}
        del fields["model"]
        return State({"model": problem.initial.clone()}, problem.client_store(fields))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, Tensor], Own]:
        shared = self.shared_places(problem)
        start = self._models(problem, public, own, shared)
        models = self._train(problem, start, clients, round, shared)
        finite = torch.isfinite(models).all(dim=1)
        heads = torch.where(finite[:, None], models, start)[:, _numbers(~shared, models)]
        return {"update": (models - start)[:, _numbers(shared, models)]}, {
            "head": heads,
            "seen": torch.ones_like(own["seen"]),
            "trained": own["trained"] | finite,
        }

    def _train(self, problem: Problem, start: Tensor, clients: Tensor, round: Round | int, shared: Tensor) -> Tensor:
        """Return the cohort's models after a round: the head first, with the received representation, then that."""
        if not bool(shared.all()):
            start = self._train_head(problem, start, clients, round, shared)
        return problem.train_locally(self.local, start, clients, round=round, moving=shared)

    def _train_head(
        self, problem: Problem, start: Tensor, clients: Tensor, round: Round | int, shared: Tensor
    ) -> Tensor:
        return problem.train_locally(self.head_local or self.local, start, clients, round=round, moving=~shared)

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        update = torch.zeros(problem.dimension, dtype=torch.float64)
        update[self.shared_places(problem)] = released.values["update"].cpu()
        return apply_update(public, "model", update, lr=self.server_lr, optimizer=self.server_optimizer)

    def personal(self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor) -> Tensor:
        """Return the shared representation with each client's head; a client that never took part fits one to it."""
        shared = self.shared_places(problem)
        models = self._models(problem, public, own, shared)
        new = (~own["seen"]).nonzero()[:, 0]
        if len(new) and not bool(shared.all()):
            ids = clients[new.cpu()]
            models[new] = self._train_head(problem, models[new], ids, PERSONALIZE_ROUND, shared)
        return models

    def _models(self, problem: Problem, public: Mapping[str, Tensor], own: Own, shared: Tensor) -> Tensor:
        """Return (k, D): the public representation, with the clients' heads, or the public start's for a new client."""
        models = public["model"].expand(len(own["seen"]), -1).clone()
        head = _numbers(~shared, models)
        models[:, head] = torch.where(own["seen"][:, None], own["head"], problem.initial[head])
        return models

    def shared(self, state: State) -> Tensor | None:
        """Return the released representation, with the public head that everybody started from."""
        return state.public["model"]


def _numbers(chosen: Tensor, like: Tensor) -> Tensor:
    """Return the numbers of the coordinates that are ``chosen``, bool (D,) on the host, on the device of ``like``."""
    return chosen.nonzero()[:, 0].to(like.device)


@dataclass(frozen=True, kw_only=True)
class FedPer(FedRep):
    """Joint local training of a private head and of the shared representation (Arivazhagan et al. 2019).

    Args:
        head, local, server_lr, server_optimizer: see :class:`FedRep`.
        head_local: of a client that never took part, which fits a head alone; None: ``local``.
    """

    name = "fedper"

    def _trainings(self, problem: Problem) -> int:
        return 1

    def _train(self, problem: Problem, start: Tensor, clients: Tensor, round: Round | int, shared: Tensor) -> Tensor:
        return problem.train_locally(self.local, start, clients, round=round)
