"""Ditto: a global model, and personal models pulled to it that never touch it.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021.

    min_{v_k} F_k(v_k) + (lam / 2) ||v_k - w*||^2                                           (Ditto)
    w* the minimizer of (1 / K) sum_k F_k(w)

Every member of a cohort trains twice (Algorithm 1): from the global model w^t, which gives its
update, and from its own last model v_k with the pull to w^t, which stays with it. Only the clipped
updates of w leave, summed and noised, so lambda and the personal models cost nothing at the client
level. Under record-level privacy both trainings touch records, and both are charged.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._check import NonNegative
from .client_batch import ClientBatch, ClientStates
from .shared_model import SharedModel


@dataclass(frozen=True, kw_only=True)
class Ditto(SharedModel):
    """Trains personal models beside a global one (Li et al. 2021, Algorithm 1).

    Args:
        lam: lambda, the strength of the pull of every personal model towards the global one; 0 is
            local training, and ever more brings every personal model to the global one.
        local: the clients' local solver, of both trainings.
        server_lr, server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value outside these ranges, or ``lr * lam >= 2`` without the proximal step.

    Example:
        >>> from fedmtl import Ditto, FullParticipation, LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=Ditto(lam=0.5, local=LocalSGD(lr=0.1)),
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

    lam: NonNegative = 1.0

    name = "ditto"
    title = "Ditto"
    colour = "#7a4fa3"
    own_starts = True
    keeps_models = True
    trainings = 2

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Trains the shared model, whose change is sent, and then the personal one, which stays."""
        start = c.last_models(c.initial)
        # the global model's training is sent, that of the personal model stays with the client
        update = c.train(self.local, c.shared) - c.shared
        models = c.train(self.local, start, lam=self.lam, anchor=c.shared)
        return update, c.keep(models, start)
