"""FedAvg and FedProx: one global model.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, with the
client-level release of McMahan et al.: "Learning Differentially Private Recurrent Language Models", ICLR 2018.
Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys 2020 (FedProx).
"""

from __future__ import annotations

from dataclasses import dataclass

from .._check import NonNegative
from .cohort import Cohort, Own, Rows
from .shared_model import SharedModel


@dataclass(frozen=True, kw_only=True)
class FedAvg(SharedModel):
    """Federated averaging.

    Args:
        local, server_lr, server_optimizer: see :class:`SharedModel`.

    Example:
        >>> from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, Trainer, load_data, models
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

    name, title, colour = "fedavg", "FedAvg", "#D55E00"

    def update(self, c: Cohort) -> tuple[Rows, Own]:
        return c.change(self.local, c.shared, lam=self.pull, anchor=c.shared), c.own


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with the local objective l_k(w) + (mu / 2) ||w - w_global||^2.

    Args:
        mu: strength of the proximal term.
        local, server_lr, server_optimizer: see :class:`SharedModel`.

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

    name, title, colour = "fedprox", "FedProx", "#009E73"

    @property
    def pull(self) -> float:
        return self.mu
