"""SCAFFOLD: control variates against the drift of clients with different data.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, Algorithm 1 with option II. With differential privacy both releases
are noised, as in Noble, Bellet, Dieuleveut: "Differentially Private Federated Learning on
Heterogeneous Data", AISTATS 2022.

    y_k   <- y_k - lr (grad l_k(y_k) - c_k + c),  K_k times from the shared model y_k = x
    c_k^+ =  c_k - c + (x - y_k) / (K_k lr)                                           (option II)
    x     <- x + server_lr mean(y_k - x)                      (over a cohort of m of n clients)
    c     <- c + (m / n) mean(c_k^+ - c_k)

A client sends two rows, y_k - x and c_k^+ - c_k. Each is clipped by itself, and both are charged as
one release of twice the length. A client adds its clipped row to its c_k, so that c stays the mean
of all c_k but for noise. The row contains -c, so old noise fades. Under record-level privacy both
rows follow from noised gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ConfigError
from ..local import LocalSGD
from ..privacy import BoundSampler, ReleasePlan
from .base import Problem, Public, State
from .client_batch import ClientBatch, ClientStates
from .rounds import Released
from .shared_model import SharedModel
from .store import Fields


@dataclass(frozen=True, kw_only=True)
class Scaffold(SharedModel):
    """Trains a shared model by federated averaging with control variates (Karimireddy et al. 2020,
    Algorithm 1, option II).

    Args:
        local: the clients' local solver, :class:`LocalSGD` without momentum: option II takes the
            change of a model for the sum of its gradients.
        server_lr, server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value outside these ranges, or another solver.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, Scaffold, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=Scaffold(local=LocalSGD(lr=0.1)),
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

    name = "scaffold"
    one_start = True  # the mean of the control variates has equal weights
    title = "SCAFFOLD"
    colour = "#006b8f"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.local, LocalSGD) or self.local.momentum:
            raise ConfigError(
                f"Scaffold.local is {self.local!r}; it must be LocalSGD without momentum, since a "
                "control variate is the mean gradient of a local run, computed from its step size "
                "and its change."
            )

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares both rows of a client, the ``update`` and the ``control``, (D,) each."""
        (update,) = super().plan(problem, schedule)
        return update, replace(update, name="control")

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Adds the server's control variate c, ``"control"`` (D,), which starts at 0."""
        state = super().init(problem)
        return replace(state, public={**state.public, "control": torch.zeros_like(problem.initial)})

    def fields(self, problem: Problem) -> Fields:
        """Returns the field ``control``, (D,): c_k of every client."""
        return {"control": ((problem.dimension,), problem.initial.dtype)}

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Trains with the correction c - c_k, and moves c_k by the clipped row of option II."""
        control = c.public["control"]  # c
        own = c.states["control"]  # c_k
        change = c.train(self.local, c.shared, correction=control - own) - c.shared
        run = (self.local.lr_at(c.round) * c.steps(self.local).to(change))[:, None]  # K_k lr
        # c_k^+ - c_k; a client without a local step sends 0
        sent = c.clip("control", torch.where(run > 0, -control - change / run, 0.0))
        return {"update": change, "control": sent}, {"control": own + sent}

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Moves the shared model, and c by the m / n-th part of the released change."""
        share = released.denominator / problem.clients
        control = public["control"] + share * released.values["control"].to(public["control"])
        return {**super().server_update(problem, public, released), "control": control}
