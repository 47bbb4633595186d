"""FedSGD: gradient descent on the sum of all clients' losses, one step a round.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, section 2 (FedSGD). With records drawn by secret coins, their gradients clipped and the sum
noised it is DP-SGD (Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1)
on the union of all data:

    w <- w - lr (n / m) (sum_k sum_{i in B_k} clip(grad l_i(w)) + noise) / (q N)

The sum is over the m clients of a cohort, of n in all; q is the rate of the records, N their
number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from .._check import Count, Rate
from ..errors import ConfigError
from ..privacy import BoundSampler, ClientPrivacy, GradientPlan, ReleasePlan
from .base import Problem, Public
from .client_batch import ClientBatch, ClientStates
from .fedavg import FedAvg
from .rounds import Released

GRADIENT_SUM = "gradient_sum"


@dataclass(frozen=True, kw_only=True)
class FedSGD(FedAvg):
    """Federated SGD: every client sends the sum of the gradients of its records at the shared
    model, and the server makes one step along their mean.

    Under :class:`~fedmtl.RecordPrivacy` with an ``aggregation`` it is central DP-SGD without a
    trusted server: the sum of all clients has the noise that one of them would need alone. Without
    the aggregation every client adds that noise to its own sum.

    Args:
        rate: q, the probability that a record takes part in a round, by a coin of its client.
        records: N, the public number of the records of all clients; None: that of the data. A
            server and nodes that do not have each other's data need it.
        server_lr: step size.
        local: of the baseline ``local`` and of finetuning; no client trains in a round.
        averaged, server_optimizer: see :class:`FedAvg`.

    Example:
        >>> from fedmtl import FedSGD, FullParticipation, RecordPrivacy, SecureAggregation, Trainer
        >>> from fedmtl import load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedSGD(rate=0.1),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=RecordPrivacy(
        ...         clip_norm=1.0, epsilon=4.0, aggregation=SecureAggregation(colluding=2)
        ...     ),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> result = trainer.fit()
        >>> result.privacy.unit, result.privacy.observer
        ('record', 'server and clients')
    """

    rate: Rate = 0.1
    records: Count | None = None

    name = "fedsgd"
    title = "FedSGD"
    colour = "#7b5e00"
    own_starts = True
    sends_gradients = True

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Refuses the protection of whole clients.

        Raises:
            ConfigError: names the method for it.
        """
        if any(isinstance(settings, ClientPrivacy) for settings in privacy):
            raise ConfigError(
                "FedSGD adds up gradients of single records, and privacy=client protects whole "
                "clients; take privacy=record, or fedavg with local.steps=1."
            )
        return super().resolve_auto(problem, schedule, privacy)

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the sum of the gradients of all clients, (D,)."""
        return (
            ReleasePlan(
                name=GRADIENT_SUM,
                dimension=problem.dimension,
                from_training=True,
                from_gradients=True,
            ),
        )

    def gradient_plan(self, problem: Problem, trainings: int) -> GradientPlan:
        """Returns the plan of the gradients of single records: drawn at the rate, once a round.

        Raises:
            ConfigError: ``records`` is less than those of the data.
        """
        counts = problem.data.train.counts
        if self.records is not None and self.records < counts.sum():
            raise ConfigError(
                f"FedSGD.records is {self.records:,}, and the data have {int(counts.sum()):,}: it "
                "is the public number of the records of all clients."
            )
        return GradientPlan(
            ids=tuple(problem.data.ids),
            keys=problem.data.keys,
            counts=counts.numpy(),
            dimension=problem.dimension,
            total=self.records,
            rate=self.rate,
        )

    def client_update(self, c: ClientBatch) -> tuple[Mapping[str, Tensor], ClientStates]:
        """Sends the sums of the gradients at the shared model, (k, D); clients keep no state."""
        return {GRADIENT_SUM: c.gradient_sums(c.shared, self.gradient_plan(c.problem, 1))}, c.states

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Moves the shared model against the mean gradient, see
        :meth:`FedAvg.server_update`."""
        # a release is divided by m: times n it estimates the sum over all n clients
        records = self.gradient_plan(problem, 1).records
        scale = problem.clients / (self.rate * records)
        update = -scale * released.values[GRADIENT_SUM]
        return super().server_update(problem, public, replace(released, values={"update": update}))
