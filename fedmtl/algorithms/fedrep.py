"""FedRep and FedPer: a shared representation, and heads that never leave their clients.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021 (FedRep); Arivazhagan et al.: "Federated Learning with
Personalization Layers", 2019 (FedPer). With the client-level release of only the representation it
is CENTAUR, Shen et al.: "Share Your Representation Only: Guaranteed Improvement of the
Privacy-Utility Tradeoff in Federated Learning", ICLR 2023.

    min over phi and h_1 .. h_K of (1/K) sum_k l_k(phi, h_k)

A member of a cohort receives phi, fits its head h_k to it, trains phi with this head, and sends the
clipped change of phi. The release has as many coordinates as phi, so noise and clip concern phi
alone. Under record-level privacy every training is charged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._devices import on_device
from ..errors import ConfigError
from ..local import LocalSolver, check_names
from ..privacy import BoundSampler, ReleasePlan
from .base import Problem, Public
from .client_batch import ClientBatch, ClientStates, personal_fields
from .rounds import Released
from .shared_model import SharedModel
from .store import Fields


@dataclass(frozen=True, kw_only=True)
class FedRep(SharedModel):
    """Trains private heads and a shared representation alternately (Collins et al. 2021).

    It is Algorithm 1 of the paper.

    Args:
        head: names of the modules or parameters that stay with the client, ``*`` allowed, see
            :meth:`fedmtl.local.Layout.places`; ``"auto"`` is the network's last layer. All others
            are shared. An empty sequence shares everything, which is federated averaging.
        local: the clients' local solver of the representation.
        head_local: that of the head; None: ``local``. Under record-level privacy both make the
            steps of ``local``.
        server_lr, server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value outside these ranges; later, a name that the network does not have, or
            a head that is the whole network.

    Example:
        >>> from fedmtl import FedRep, FullParticipation, LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedRep(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.mlp(hidden=8),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 610])
    """

    head: str | Sequence[str] = "auto"
    head_local: LocalSolver | None = None

    name = "fedrep"
    title = "FedRep"
    colour = "#c2187a"
    own_starts = True
    trainings = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head != "auto":
            check_names(self, "head", self.head)
        if self.head_local is not None:
            LocalSolver.check_given(self, self.head_local, name="head_local")

    def shared_places(self, problem: Problem) -> Tensor:
        """Returns the shared parameters as a mask.

        Args:
            problem: of the run; only the model is read.

        Returns:
            bool (D,) on the host, False for the head.

        Raises:
            ConfigError: a name that the network does not have, or nothing is shared.
        """
        names: str | Sequence[str] = self.head
        if names == "auto":
            names = [problem.layout.last]
        if not names:
            return torch.ones(problem.dimension, dtype=torch.bool)
        shared = ~problem.layout.places(names, f"{type(self).__name__}.head")
        if not bool(shared.any()):
            trained = ", ".join(problem.layout.names)
            raise ConfigError(
                f"{type(self).__name__}.head is all that is trained ({trained}), so nothing is "
                "shared; name some of these parameters, train more of the network, or use "
                "algorithm=local."
            )
        return shared

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the update of the shared parameters alone, of as many numbers as these have."""
        release, *others = super().plan(problem, schedule)
        shared = self.shared_places(problem)
        trainings = self.trainings
        if bool(shared.all()):
            trainings = 1  # there is no head to train
        update = replace(release, dimension=int(shared.sum()), trainings=trainings)
        return (update, *others)

    def fields(self, problem: Problem) -> Fields:
        """Replaces the personal model by the ``head`` of the client, its private parameters."""
        # the representation is public: of their models clients keep the head alone
        size = problem.dimension - int(self.shared_places(problem).sum())
        fields = {**personal_fields(problem), "head": ((size,), problem.initial.dtype)}
        del fields["model"]
        return fields

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Trains the head and then the representation, whose change is sent."""
        shared = self.shared_places(c.problem)
        start = self._models(c, shared)
        models = self._train(c, start, shared)
        states = c.keep(models, start)
        states["head"] = states.pop("model")[:, _numbers(~shared, models)]
        return (models - start)[:, _numbers(shared, models)], states

    def _train(self, c: ClientBatch, start: Tensor, shared: Tensor) -> Tensor:
        """Trains the head with the received representation, then the representation: (k, D)."""
        if not bool(shared.all()):
            start = self._train_head(c, start, shared)
        return c.train(self.local, start, moving=shared)

    def _train_head(self, c: ClientBatch, start: Tensor, shared: Tensor) -> Tensor:
        return c.train(self.head_local or self.local, start, moving=~shared)

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Moves the shared parameters; the public model keeps the head of its start."""
        update = torch.zeros(problem.dimension, dtype=torch.float64)
        update[self.shared_places(problem)] = released.values["update"].cpu()
        values = {**released.values, "update": update}
        return super().server_update(problem, public, replace(released, values=values))

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the shared representation with each client's head.

        A client that never took part fits a head to it.

        Returns:
            (k, D).
        """
        shared = self.shared_places(c.problem)
        newcomers = c.newcomers
        models = self._models(c, shared)
        if len(newcomers) and not bool(shared.all()):
            place = on_device(newcomers, models.device)
            models[place] = self._train_head(c.part(newcomers), models[place], shared)
        return models

    def _models(self, c: ClientBatch, shared: Tensor) -> Tensor:
        """Returns the models (k, D): the public representation with the clients' heads.

        A new client has the head of the public start.
        """
        models = c.shared.expand(len(c.clients), -1).clone()
        head = _numbers(~shared, models)
        models[:, head] = torch.where(c.states["seen"][:, None], c.states["head"], c.initial[head])
        return models


def _numbers(chosen: Tensor, like: Tensor) -> Tensor:
    """Returns the numbers of the chosen coordinates, int64, on the device of ``like``.

    Args:
        chosen: bool (D,), on the host.
        like: a tensor on the device.
    """
    return on_device(chosen.nonzero()[:, 0], like.device)


@dataclass(frozen=True, kw_only=True)
class FedPer(FedRep):
    """Trains private heads and a shared representation jointly (Arivazhagan et al. 2019).

    Args:
        head, local, server_lr, server_optimizer: see :class:`FedRep`.
        head_local: the solver of a client that never took part, which fits a head alone; None:
            ``local``.

    Example:
        >>> from fedmtl import FedPer, FullParticipation, LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedPer(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.mlp(hidden=8),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 610])
    """

    name = "fedper"
    title = "FedPer"
    own_starts = True
    colour = "#6a8f00"
    trainings = 1

    def _train(self, c: ClientBatch, start: Tensor, shared: Tensor) -> Tensor:
        return c.train(self.local, start)
