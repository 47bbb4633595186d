"""FedAvg and FedProx: one global model.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, with the client-level release of McMahan et al.: "Learning Differentially Private Recurrent
Language Models", ICLR 2018. Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys
2020 (FedProx).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._check import NonNegative
from .base import Problem, Public, State
from .client_batch import ClientBatch, ClientStates
from .rounds import Released
from .shared_model import SharedModel


@dataclass(frozen=True, kw_only=True)
class FedAvg(SharedModel):
    """Trains a shared model by federated averaging.

    Args:
        averaged: the released model is the mean of the models after each of the last half of the
            rounds (Polyak and Juditsky 1992), in which much of the noise cancels. Clients still
            start a round from the last model.
        local, server_lr, server_optimizer, weights, cap: see :class:`SharedModel`.

    Example:
        >>> from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, Trainer
        >>> from fedmtl import load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])
    """

    averaged: bool = False

    name = "fedavg"
    title = "FedAvg"
    colour = "#D55E00"
    own_starts = True

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Adds the mean of models, ``"mean"`` (D,), to the public state if ``averaged``."""
        state = super().init(problem, replicates)
        if self.averaged:
            state.public["mean"] = problem.initial.clone()
        return state

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Moves the shared model, and with it the mean of the models of the last half of the
        rounds.
        """
        moved = super().server_update(problem, public, released)
        if not self.averaged:
            return moved
        last = moved["global"]
        count = released.step + 1 - problem.rounds // 2  # models in the mean
        if count <= 1:
            moved["mean"] = last.clone()
        else:
            mean = moved["mean"]
            moved["mean"] = mean + (last - mean) / count
        return moved

    @property
    def released_name(self) -> str:
        """Returns the name of the released model in the public state."""
        if self.averaged:
            return "mean"
        return "global"

    def shared(self, state: State) -> Tensor | None:
        """Returns the released model (D,): the last one, or the mean if ``averaged``."""
        return state.public[self.released_name]

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the released model for every client, (k, D): a view of one row."""
        return c.public[self.released_name].expand(len(c.clients), -1)

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Trains the shared model on each client's data; clients keep no state."""
        shared = c.shared
        models = c.train(self.local, shared, lam=self.pull, anchor=shared)
        # in place: they are this call's own, and fresh memory would cost more than the difference
        return models.sub_(shared), c.states


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """Trains as FedAvg, with the local objective l_k(w) + (mu / 2) ||w - w_global||^2.

    Args:
        mu: strength of the proximal term.
        averaged, local, server_lr, server_optimizer, weights, cap: see :class:`FedAvg`.

    Example:
        >>> from fedmtl import FedProx, FullParticipation, LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedProx(mu=0.1, local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])
    """

    mu: NonNegative = 0.1

    name = "fedprox"
    title = "FedProx"
    own_starts = True
    colour = "#009E73"

    @property
    def pull(self) -> float:
        return self.mu
