"""What learners of one linear model have in common, of owners who answer one at a time.

    min_{||theta||_inf <= theta_max} f(theta) = g(theta) + (1/n) sum over all records l(theta . x, y)

with g = reg ||theta||^2. The protected unit is a record; neighbours replace one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import one_of, positive, positive_int
from ...data import FederatedDataset, RowBound
from ...errors import ConfigError, PrivacyError
from ...privacy import Channel, GradientPlan, RecordPrivacy
from ...schedules import BoundSchedule
from ..base import Algorithm, Problem, State
from ..linear.data import DomainBound, LinearData, LinearLoss, LossName, check_classes, prepared, probe_linear
from ..local_fit import LocalFit

_BLOCK_ELEMENTS = 1 << 20  # of the losses of several models on all records


class CentralLearner(Algorithm, ABC):
    """A learner of one linear model.

    Attributes:
        loss, reg, theta_max: of the problem.
        cap: most answers of an owner; None: the schedule's.
        domain: public bounds on records, enforced on the rows.
        bound: what bounds a record's vector, the clip of its release or the domain.
    """

    loss: LossName
    reg: float
    theta_max: float
    cap: int | None
    domain: DomainBound | Literal["auto"] | None
    bound: Literal["clip", "domain"] = "clip"

    supports_replicates = True
    one_at_a_time = True
    on_host = True

    def __post_init__(self) -> None:
        LinearLoss(self.loss)
        positive(self, reg=self.reg, theta_max=self.theta_max)
        if self.domain not in (None, "auto") and not isinstance(self.domain, DomainBound):
            raise ConfigError(
                f"{type(self).__name__}.domain is {self.domain!r}; accepted: DomainBound(...), 'auto' or None."
            )
        if self.cap is not None:
            positive_int(self, cap=self.cap)
        one_of(self, ("clip", "domain"), bound=self.bound)
        if self.bound == "domain" and self.domain is None:
            raise ConfigError(
                f"{type(self).__name__}.bound='domain' needs domain=DomainBound(x_l1=..., y=...), which are public."
            )

    @cached_property
    def xi(self) -> float | None:
        """Return Xi, the analytic bound on the L1 norm of a record's gradient; None without ``domain``."""
        return self.domain.xi(LinearLoss(self.loss), self.theta_max) if isinstance(self.domain, DomainBound) else None

    def resolve_auto(
        self, problem: Problem, schedule: BoundSchedule, privacy: RecordPrivacy | Sequence[RecordPrivacy] | None
    ) -> CentralLearner:
        """Return these settings with the ``"auto"`` ones filled in from the data's public rows and bounds.

        Args:
            problem: the data and the model.
            schedule: who answers when.
            privacy: settings of all replicates, or of each.

        Raises:
            ConfigError: the data have no public rows, or state no bounds.
        """
        if self.domain != "auto":
            return self
        domain = DomainBound.stated(problem, f"{type(self).__name__}.domain")
        resolved: CentralLearner = replace(self, domain=domain)  # type: ignore[type-var]
        return resolved

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse more than two classes."""
        check_classes(data, self.name)

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Return the bound on features of ``domain``, which holds where the model is used too; None without one."""
        if not isinstance(self.domain, DomainBound):
            return None
        return self.domain.rows(probe_linear(problem.module, problem.data.spec.shape))

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean vectors of the rows, forced into ``domain`` where one is given.

        Raises:
            ModelError: the model is not linear.
            DataError: targets that do not suit the loss.
        """
        caps = self.hard_caps(schedule.caps.clip(max=problem.rounds), problem.rounds)
        return (replace(self.released(self.data(problem), problem.data.ids, caps), keys=problem.data.keys),)

    def released(self, data: LinearData, ids: tuple[str, ...], caps: np.ndarray) -> GradientPlan:
        """Return the plan of the releases of owners ``ids``, of at most ``caps`` (n,) answers each."""
        return GradientPlan(ids=tuple(ids), counts=data.counts.numpy(), dimension=data.dimension, caps=caps, x=data.x)

    def hard_caps(self, scheduled: np.ndarray, events: int) -> np.ndarray:
        """Return the most activations of each client in a run of ``events``, int64 (n,), to which its noise is made."""
        caps = np.asarray(scheduled, dtype=np.int64)
        return caps if self.cap is None else np.minimum(caps, self.cap)

    def check_bound(self, channel: Channel) -> None:
        """Refuse a clip norm below the domain's bound on gradients.

        Raises:
            PrivacyError: the smaller clip norm, and what it has to be.
        """
        if self.xi is not None and self.bound == "domain" and self.xi > channel.bound:
            raise PrivacyError(
                f"The domain bounds gradients by Xi = {self.xi:g}, but clip_norm is {channel.bound:g}; set "
                f"clip_norm to at least {self.xi:g}, or bound='clip'."
            )

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return the central model for everyone, (k, p), a view of one row."""
        return state.public["theta_l"][0].to(problem.initial).expand(len(clients), -1)

    def shared(self, state: State) -> Tensor | None:
        """Return theta_L, (p,) float64."""
        return state.public["theta_l"][0]

    def models(self, problem: Problem, state: State) -> Tensor:
        """Return theta_L of every replicate for everyone, (R, n, p), a view expanded along the owners."""
        return state.public["theta_l"].to(problem.initial)[:, None].expand(-1, problem.clients, -1)

    def local_baseline(self) -> LocalFit | None:
        """Return an owner's own minimizer on records within the domain, under the same constraint; None for the hinge.

        g = reg ||theta||^2 and the squared loss have no 1/2 here, and have it in the fit.
        """
        if self.loss == "hinge":
            return None
        ridge = self.reg * (1 if self.loss == "squared" else 2)
        return LocalFit(loss=self.loss, ridge=ridge, domain=self.domain, theta_max=self.theta_max)

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Return f(theta_L), equation (2), on the training records, (R,) float64; not private."""
        return self.fitness(self.data(problem), state.public["theta_l"])

    def fitness(self, data: LinearData, theta: Tensor) -> Tensor:
        """Return f of models theta (R, p) on the records of all owners, equation (2): (R,) float64; not private."""
        x, y = data.pooled()
        blocks = theta.split(max(1, _BLOCK_ELEMENTS // len(x)))
        means = torch.cat([LinearLoss(self.loss).value(block, x, y).mean(1) for block in blocks])
        return means + self.reg * theta.square().sum(1)

    @abstractmethod
    def simulated(self, data: LinearData, public: LinearData | None, clients: Tensor, channel: Channel) -> Tensor:
        """Return theta_L (R, p) after the activations ``clients`` (R, S), which are those of ``channel``.

        Args:
            data: the owners' records, :meth:`bounded`.
            public: the public rows, for a learner that starts at their fit.
            clients: which owner answers, -1 for none.
            channel: opened with the plan of :meth:`released`; no activation has begun.
        """

    def data(self, problem: Problem) -> LinearData:
        """Return the owners' records, within the domain where one is given."""
        return prepared(problem, (self, "records"), lambda: self.bounded(LinearData.of(problem)))

    def bounded(self, data: LinearData) -> LinearData:
        """Return records with their targets checked, forced into the domain where one is given.

        Raises:
            ConfigError: the domain is ``"auto"`` still.
            DataError: targets that do not suit the loss.
        """
        LinearLoss(self.loss).check_targets(data.y, data.name)
        if self.domain == "auto":
            raise ConfigError(
                f"{type(self).__name__}.domain is 'auto', which a Trainer fills in; give bounds, or resolve_auto()."
            )
        return data if self.domain is None else self.domain.bounded(data)
