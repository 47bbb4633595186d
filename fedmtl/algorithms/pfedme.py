"""pFedMe: personal models as proximal points of a global one.

T Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

    min_w (1/K) sum_k F_k(w),   F_k(w) = min_theta l_k(theta) + (lam / 2) ||theta - w||^2

The gradient of the envelope is lam (w - theta_k(w)). A member of a cohort makes R local rounds from
w_0 = w^t, each with a local run that solves for theta_k(w_r), and w_{r+1} = w_r - eta lam (w_r -
theta_k(w_r)); it sends the clipped w_R - w^t, and keeps theta_k (Algorithm 1). With R = 1 and eta =
1 / lam the global model is that of FedProx.

The K steps of a local run here go over K batches. The paper's local round draws one batch and
solves for theta_k on it, by K steps on the same batch; with ``batch_size=None`` the two are the
same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .._check import Count, Positive
from ..errors import ConfigError
from .client_batch import ClientBatch, ClientStates
from .shared_model import SharedModel


@dataclass(frozen=True, kw_only=True)
class PFedMe(SharedModel):
    """Trains personal models with Moreau envelopes (T Dinh et al. 2020, Algorithm 1).

    Args:
        lam: lambda, the strength of the pull of every personal model to the client's copy of the
            global one.
        eta: step size of that copy; 1 / lam takes it to the personal model.
        local_rounds: R. Under record-level privacy each of them is a training that is charged.
        local: the local solver of a local round.
        server_lr: beta, step size of the server.
        server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value outside these ranges, ``eta * lam >= 2``, or ``lr * lam >= 2`` without
            the proximal step.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, PFedMe, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=PFedMe(local=LocalSGD(lr=0.1)),
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

    lam: Positive = 1.0
    eta: Positive = 0.5
    local_rounds: Count = 2

    name = "pfedme"
    title = "pFedMe"
    colour = "#8c564b"
    own_starts = True
    keeps_models = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta * self.lam >= 2.0:
            product = f"{self.eta:g} * {self.lam:g} = {self.eta * self.lam:g}"
            reason = "from 2 on, every step overshoots"
            raise ConfigError(f"PFedMe.eta * lam = {product}: {reason}. Lower eta.")

    @property
    def trainings(self) -> int:
        return self.local_rounds

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Makes R local rounds: each solves for theta_k, and moves the copy w_r towards it."""
        start = c.shared.expand(len(c.clients), -1).contiguous()
        models = start
        copy = start  # w_r
        # every local round has batches of its own; the step size decays by rounds
        solver = replace(self.local, decay_every=self.local.decay_every * self.local_rounds)
        for local_round in range(self.local_rounds):
            part = replace(c, round=c.round * self.local_rounds + local_round)
            models = part.train(solver, models, lam=self.lam, anchor=copy)
            copy = copy - self.eta * self.lam * (copy - models)
        return copy - start, c.keep(models, start)
