"""PMTL: private mean-regularized multi-task learning.

Hu, Wu, Smith: "Private Multi-Task Learning: Formulation and Applications to Federated Learning",
TMLR 2023.

    min_W (1/K) sum_k [ l_k(w_k) + (lam / 2) ||w_k - wbar||^2 ]                        (2)
    wbar = (1/K) sum_k w_k

Each client keeps its own w_k; only clipped updates of the mean leave, summed and noised. Round t of
Algorithm 1, in letters of our own: (b) solves its Equation 3, and the clip and noise of (d) are its
line 8. wtilde^t is the released estimate of wbar, m the expected size of a cohort, z the noise
multiplier and S the sensitivity (C, or 2 C if a client replaces another):

    a random cohort S_t receives the mean wtilde^t                                               (a)
    w_k <- w_k - eta (grad l_k(w_k) + lam (w_k - wtilde^t)),   E local iterations, k in S_t      (b)
    g_k = w_k - wtilde^t (reference="global"), or w_k - u_k, u_k = wtilde^0 + all sent by k      (c)
    wtilde^(t+1) = wtilde^t + (server_lr / m) [ sum_{k in S_t} clip_C(g_k) + N(0, (z S)^2 I) ]   (d)

Differences from the paper: the message, which in its text is the change of w_k in the round and in
its program g_k of "global"; the sum is divided by m, public, and not by the size of the cohort; a
client without a model begins at wtilde^t; the step of the server is ours; a model that diverged is
not kept, and its row counts as zero.

In the code ``c.shared`` is wtilde^t, ``c.last_models`` gives the last w_k of each client, and
``sent`` is the sum of its messages, u_k - wtilde^0.

The observers are the other clients and the public: billboard privacy, which implies joint
differential privacy. The server is a trusted aggregator.

    data = load_data("digits")
    Trainer(algorithm=PMTL(lam=1.0, local=LocalSGD(lr=0.5, epochs=5)), data=data,
            model=models.softmax_regression(), schedule=PoissonSampling(cohort=100),
            privacy=ClientPrivacy(clip_norm=1.5, epsilon=4.0), rounds=100).fit()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .._check import NonNegative, Positive
from ..errors import ConfigError
from ..privacy import BoundSampler, ReleasePlan
from .base import Problem, Public
from .client_batch import ClientBatch, ClientStates
from .rounds import Released
from .server_step import apply_update
from .shared_model import SharedModel
from .store import Fields


@dataclass(frozen=True, kw_only=True)
class PMTL(SharedModel):
    """Trains personal models that are pulled to a private mean (Hu et al. 2023, Algorithm 1).

    Args:
        lam: lambda, the strength of the pull of every personal model towards the mean.
        local: the clients' local solver.
        reference: the point from which a client's message is measured. ``"global"``, the mean,
            g_k = w_k - wtilde (the authors' experiments): the shared model forgets old noise.
            ``"local"``, a point of the client's own, which makes an exact running mean. It is not
            in the paper, whose text sends the change of w_k in the round: client k keeps the sum of
            its messages, u_k without wtilde^0, and sends clip(w_k - u_k). Clipping then delays and
            loses nothing; the noise is a random walk that never fades.
        server_lr: step size of the server. ``"global"``: in (0, 1], 1 when ``None``. ``"local"``:
            only m / K, the expected cohort over the number of clients, which ``None`` takes.
        server_optimizer: used instead of the plain server step; only with ``"global"``.

    Raises:
        ConfigError: a value outside these ranges, or ``lr * lam >= 2`` without the proximal step.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, LocalSGD, PMTL, Trainer
        >>> from fedmtl import load_data, models
        >>> trainer = Trainer(
        ...     algorithm=PMTL(lam=1.0, local=LocalSGD(lr=0.1)),
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

    lam: NonNegative = 1.0
    reference: Literal["global", "local"] = "global"
    server_lr: Positive | None = None  # type: ignore[assignment]

    name = "pmtl"
    title = "PMTL"
    colour = "#0072B2"
    own_starts = True
    keeps_models = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_lr is not None and self.reference == "global" and self.server_lr > 1.0:
            accepted = "with reference='global' it must be in (0, 1]"
            raise ConfigError(f"PMTL.server_lr is {self.server_lr}; {accepted}.")
        if self.reference == "local" and self.server_optimizer is not None:
            reason = "an exact running mean allows no other step"
            raise ConfigError(f"PMTL.server_optimizer needs reference='global': {reason}.")

    @property
    def one_start(self) -> bool:  # type: ignore[override]
        """Returns True with ``reference="local"``: weights below 1 would break the running mean."""
        return self.reference == "local"

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the update, (D,); ``server_lr`` must suit it if ``reference="local"``.

        Raises:
            ConfigError: a ``server_lr`` other than m / K with ``reference="local"``.
        """
        right = schedule.denominator / problem.clients
        plan = super().plan(problem, schedule)
        if self.reference == "global" or self.server_lr is None:
            return plan
        if abs(self.server_lr - right) > 1e-12 * right:
            raise ConfigError(
                f"PMTL.server_lr is {self.server_lr} with reference='local': the shared model is "
                f"then the running mean of what all {problem.clients:,} clients have sent, so "
                f"server_lr must be m / K = {schedule.denominator:g} / {problem.clients} = "
                f"{right:g}. Any other value has a wrong fixed point, and 1 under partial "
                "participation diverges. Leave server_lr unset, or use reference='global'."
            )
        return plan

    def fields(self, problem: Problem) -> Fields:
        """Adds ``sent``, (D,), the sum of a client's messages, for ``reference="local"``."""
        if self.reference == "global":
            return {}
        return {"sent": ((problem.dimension,), problem.initial.dtype)}

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Computes steps (a) to (c) of the round: the messages g_k (k, D), and the new w_k."""
        # (a), (b): the cohort receives wtilde; every member trains from its own last model,
        # anchored at wtilde
        mean = c.shared
        start = c.last_models(mean)
        models = c.train(self.local, start, lam=self.lam, anchor=mean)
        states = c.keep(models, start)
        # (c): the messages
        if self.reference == "global":
            return {"update": models - mean}, states
        sent = c.states["sent"]  # u_k = wtilde^0 + sent
        row = c.clip("update", models - c.initial - sent)
        return {"update": row}, states | {"sent": sent + row}

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Computes step (d) of the round: the new mean wtilde."""
        # (d): the server moves the mean by the clipped, noised sum over the public denominator m
        lr = self.server_lr or 1.0
        if self.reference == "local":
            lr = released.denominator / problem.clients  # m / K
        update = released.values["update"]
        return apply_update(public, "global", update, lr=lr, optimizer=self.server_optimizer)
