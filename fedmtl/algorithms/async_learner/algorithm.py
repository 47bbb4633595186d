"""The asynchronous central learner of Farokhi, Wu, Smith, Kaafar.

"The Cost of Privacy in Asynchronous Differentially-Private Machine Learning", IEEE TIFS 2021, Algorithm 1.

    min_{||theta||_inf <= theta_max} f(theta) = g(theta) + (1/n) sum over all records l(theta . x, y)      (1), (2)

with g = reg ||theta||^2, which is sigma-strongly convex with sigma = 2 reg. Owners answer one at a time, when their
own clocks tick; the learner keeps a central model theta_L and a copy theta_i for each of the N owners, all 0 at first.
At a tick owner i answers with the noised mean gradient Qbar_i of its records at tbar (equations (3), (4)), and

    tbar    = (theta_L + theta_i) / 2                                                              (6)
    theta_i = Proj[ tbar - a N ( grad g(tbar) / (2 N) + (n_i / n) Qbar_i ) ]                        (5)
    theta_L = Proj[ tbar - (a / 2) grad g(tbar) ]                                                   (7')

where a = rho / (T^2 sigma). The printed (7) differs, see :mod:`.published`.

The protected unit is a record; neighbours replace one. Observers are the learner, the other owners and the public:
theta_L and every theta_i are functions of releases.

:mod:`.one_answer` has two methods beside the paper's, of owners who are all asked the same and may answer once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import positive, positive_int, positive_or
from ...errors import ConfigError
from ...privacy import Channel, GradientMessage, GradientPlan, RecordPrivacy
from ...privacy.channel import GRADIENT
from ...schedules import Block, BoundSchedule
from ..base import Own, Problem, Released, Round, State
from ..linear.data import DomainBound, LinearData, LinearLoss, LossName, prepared
from ..store import ClientStore
from .central import CentralLearner
from .gradients import MeanGradients
from .simulated import resolve_kappa

__all__ = ["AsyncLearner"]
Array = np.ndarray
_BLOCK = 1024  # activations that a simulation begins at once


@dataclass(frozen=True, kw_only=True)
class AsyncLearner(CentralLearner):
    """The asynchronous learner (Farokhi et al. 2021, Algorithm 1); all settings are public.

    Args:
        loss: ``"squared"``, ``"hinge"`` or ``"logistic"``; see :class:`~fedmtl.algorithms.linear.data.LinearLoss`. A
            squared loss whose gradients are clipped at C is a Huber loss, quadratic in a residual up to C / (2 ||x||).
        reg: g = reg ||theta||^2 (the bias included), above 0; sigma = 2 reg.
        theta_max: bound on ||theta||_inf, above 0.
        step_size: a = rho / (T^2 sigma) of equations (5) and (7'), above 0; ``"auto"``: kappa (N + 1) / (2 T), for
            which the mean of the N + 1 models moves by kappa / 2 over a run, in units of gradient flow.
        kappa: of ``step_size="auto"``, above 0; several, one for each replicate; or ``"auto"``: chosen by noisy
            simulation on the public rows of the data, for the owners' sizes, caps and budgets (:meth:`resolve_auto`).
            None: 10.
        horizon: T, planned number of ticks; None: the problem's number of events.
        cap: most answers of an owner, to which its noise is calibrated; None takes the schedule's caps. Theorem 1 makes
            every owner's noise for T answers, although it gives about T / N: see :mod:`.published`.
        bound: what bounds one record's gradient. ``"clip"``: the release clips every record. ``"domain"``: ``domain``
            bounds all gradients by Xi (:attr:`xi`), which must be within the clip norm of the privacy settings; then a
            query of the squared loss costs nothing per record, from sufficient statistics.
        domain: public bounds on records, enforced on the rows; needed for ``bound="domain"``. ``"auto"``: those that
            the data state.
        batch_rate: q in (0, 1]: every answer takes a secret Poisson subsample of the owner's records, each of them with
            this public probability, and divides by the constant q n_i. The privacy of an answer is amplified, and its
            noise at equal epsilon of the release grows by 1 / q. Not in the paper, whose query (3) is of all records.

    Raises:
        ConfigError: an impossible value.
    """

    loss: LossName = "squared"
    reg: float = 1e-5
    theta_max: float = 10.0
    step_size: float | Literal["auto"] = "auto"
    kappa: float | tuple[float, ...] | Literal["auto"] | None = None
    horizon: int | None = None
    cap: int | None = None
    bound: Literal["clip", "domain"] = "clip"
    domain: DomainBound | Literal["auto"] | None = None
    batch_rate: float = 1.0

    name = "async_learner"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.kappa, Sequence) and not isinstance(self.kappa, str):
            object.__setattr__(self, "kappa", tuple(self.kappa))
        for kappa in self.kappa if isinstance(self.kappa, tuple) else (self.kappa,):
            if kappa is not None:
                positive_or(self, "auto", kappa=kappa)
        positive_or(self, "auto", step_size=self.step_size)
        if self.horizon is not None:
            positive_int(self, horizon=self.horizon)
        for name, value in {"kappa": self.kappa, "horizon": self.horizon}.items():
            if value is not None and self.step_size != "auto":
                raise ConfigError(
                    f"AsyncLearner.{name} is {value!r}, which chooses the automatic step size, but step_size is "
                    f"{self.step_size!r}; leave one of the two out."
                )
        positive(self, batch_rate=self.batch_rate)
        if self.batch_rate > 1:
            raise ConfigError(
                f"AsyncLearner.batch_rate is {self.batch_rate!r}; the share of records must be in (0, 1]."
            )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start all models at 0."""
        data = self.data(problem)
        return State(self.start(len(data.x), data.dimension, replicates), ClientStore(problem.clients, {}))

    @staticmethod
    def start(owners: int, dimension: int, replicates: int) -> dict[str, Tensor]:
        """Return zeros: theta_L (R, p) and the theta_i (R, N, p)."""
        shapes = {"theta_l": (replicates, dimension), "theta": (replicates, owners, dimension)}
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, GradientMessage], Own]:
        updates = self._updates(problem, public)
        updates.query(updates.places(clients.numpy()))
        return {GRADIENT: self.answers(self._gradients(problem), updates.points, clipped=round.clips)}, own

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        assert released.clients is not None
        new = {name: value.clone() for name, value in public.items()}
        answers = iter([released.values[GRADIENT].numpy()[None]])
        self._updates(problem, new).run(released.clients.numpy()[None], answers)
        return new

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Compute all activations of the block, in order; each needs the one before it."""
        self.check_bound(channel)
        updates = self._updates(problem, state.public)
        message = self.answers(self._gradients(problem), updates.points, clipped=channel.bound < math.inf)
        updates.run(block.client.numpy().T, channel.answers(message))
        return state

    def effective_step(self, owners: int, events: int) -> float | Array:
        """Return a, for N ``owners`` who give ``events`` answers in all; (R,) where the replicates have a kappa
        each."""
        if self.step_size != "auto":
            return float(self.step_size)
        if self.kappa == "auto":
            raise ConfigError(
                "AsyncLearner.kappa is 'auto', which a Trainer fills in; give a number, or resolve_auto()."
            )
        kappa = np.array(self.kappa) if isinstance(self.kappa, tuple) else self.kappa or 10.0
        return kappa * (owners + 1) / (2 * (self.horizon or events))

    def central_share(self, owners: int) -> float:
        """Return the factor of a grad g(tbar) in the central model's step, for N = ``owners``: 1/2 in (7')."""
        return 0.5

    def answers(self, gradients: MeanGradients, points: Array, *, clipped: bool) -> GradientMessage:
        """Return the owners' mean gradients at ``points`` (R, p); ``clipped`` where the channel clips at all."""
        means = self.bound == "domain" or (gradients.statistics is not None and not clipped)
        return gradients.message(points, clipped=not means or self.batch_rate < 1)  # means are of all records

    def _gradients(self, problem: Problem) -> MeanGradients:
        return prepared(problem, (self, "gradients"), lambda: self.gradients(self.data(problem)))

    def gradients(self, data: LinearData) -> MeanGradients:
        """Return the gradients of ``data``, :meth:`~.central.CentralLearner.bounded`."""
        return MeanGradients(data, LinearLoss(self.loss))

    def _updates(self, problem: Problem, public: Mapping[str, Tensor]) -> Updates:
        return self.updates(problem.data.train.counts.numpy(), problem.rounds, public)

    def updates(self, counts: Array, events: int, public: Mapping[str, Tensor]) -> Updates:
        """Return the updates of ``public`` for owners of ``counts`` (N,) records, in a run of so many ``events``."""
        return Updates(self, self.effective_step(len(counts), events), counts, public)

    def simulated(self, data: LinearData, public: LinearData | None, clients: Tensor, channel: Channel) -> Tensor:
        state = self.start(len(data.x), data.dimension, len(clients))
        updates = self.updates(data.counts.numpy(), clients.shape[1], state)
        message = self.answers(self.gradients(data), updates.points, clipped=channel.bound < math.inf)
        for first in range(0, clients.shape[1], _BLOCK):
            block = clients[:, first : first + _BLOCK]
            channel.begin(first, block)
            updates.run(block.numpy().T, channel.answers(message))
        return state["theta_l"]

    def resolve_auto(
        self, problem: Problem, schedule: BoundSchedule, privacy: RecordPrivacy | Sequence[RecordPrivacy] | None
    ) -> CentralLearner:
        resolved = super().resolve_auto(problem, schedule, privacy)
        assert isinstance(resolved, AsyncLearner)
        return resolve_kappa(resolved, problem, schedule, privacy) if resolved.kappa == "auto" else resolved

    def released(self, data: LinearData, ids: tuple[str, ...], caps: np.ndarray) -> GradientPlan:
        return replace(super().released(data, ids, caps), rate=self.batch_rate)


class Updates:
    """What the learner computes in R runs: equations (5), (6) and (7').

    Args:
        learner: settings.
        a: the step size, or (R,) one for each run.
        counts: n_i, (N,).
        public: theta_L (R, p) and the theta_i (R, N, p), which :meth:`run` changes in place.

    Attributes:
        points: (R, p), the tbar at which owners answer next.
        copies: (R N + 1, p), the theta_i, those of run r from row r N on.
    """

    def __init__(self, learner: AsyncLearner, a: float | Array, counts: Array, public: Mapping[str, Tensor]) -> None:
        self.theta_l, self.theta = (public[name].numpy() for name in ("theta_l", "theta"))
        runs, n, p = self.theta.shape
        if isinstance(a, np.ndarray) and len(a) != runs:
            raise ConfigError(f"AsyncLearner.kappa has {len(a)} values for {runs} replicates.")
        self.models = np.stack([self.theta_l, self.theta_l])
        self.own, self.central = self.models  # theta_i of the owner that answers, theta_L
        self.copies = np.concatenate([self.theta.reshape(-1, p), np.zeros((1, p))])  # the last one is for no owner
        self.points = np.zeros_like(self.theta_l)
        a = np.broadcast_to(np.asarray(a), runs)[:, None]
        slope = 2 * learner.reg  # grad g(theta) = slope theta
        ones = np.ones_like(self.points)  # of small arrays, products with constants of their shape are twice as fast
        self.half, self.keep_own = 0.5 * ones, ones - a * slope / 2  # a N / (2 N)
        self.keep_central = ones - a * learner.central_share(n) * slope
        self.gain = np.append(a * n * counts / counts.sum(), 0.0)[:, None]  # of Qbar_i, (R N + 1, 1)
        self.top = np.full_like(self.models, learner.theta_max)
        self.bottom = -self.top

    def query(self, at: Array) -> None:
        """Set the points at which the owners of the copies ``at`` (R,) answer."""
        np.add(self.central, self.copies.take(at, axis=0), out=self.points)
        self.points *= self.half  # (6)

    def update(self, at: Array, answers: Array) -> None:
        """Take the noised mean gradients (R, p) of these owners at the points of :meth:`query`."""
        tbar = self.points
        self.own[:] = self.keep_own * tbar - self.gain.take(at, axis=0) * answers  # (5)
        self.central[:] = self.keep_central * tbar  # (7')
        np.maximum(self.models, self.bottom, out=self.models)  # Proj
        np.minimum(self.models, self.top, out=self.models)
        self.copies[at] = self.own

    def run(self, clients: Array, answers: Iterator[Array]) -> None:
        """Compute activations ``clients`` (S, R) in order, -1 for no owner; ``answers`` has the noised mean gradients
        (R, p) at :attr:`points` of each."""
        idle = clients < 0
        for at, rest, some in zip(self.places(clients), idle, np.any(idle, axis=1).tolist(), strict=True):
            self.query(at)
            answer, before = next(answers), self.central[rest] if some else None
            self.update(at, answer)
            if before is not None:
                self.central[rest] = before
        self.theta_l[:], self.theta[:] = self.central, self.copies[:-1].reshape(self.theta.shape)

    def places(self, clients: Array) -> Array:
        """Return the rows of :attr:`copies` of ``clients`` (..., R)."""
        runs, n, _ = self.theta.shape
        return np.where(clients < 0, runs * n, n * np.arange(runs) + clients)
