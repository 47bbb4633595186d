"""The asynchronous central learner of Farokhi, Wu, Smith, Kaafar.

"The Cost of Privacy in Asynchronous Differentially-Private Machine Learning", IEEE TIFS 2021, Algorithm 1.

    min_{||theta||_inf <= theta_max} f(theta) = g(theta) + (1/n) sum over all records l(theta . x, y)      (1), (2)

with g = reg ||theta||^2, which is sigma-strongly convex with sigma = 2 reg. Owners answer one at a time, when their
own clocks tick; the learner keeps a central model theta_L and a copy theta_i for each of the N owners, all 0 at first.
At a tick owner i answers with the noised mean gradient Qbar_i of its records at tbar (equations (3), (4)), and

    tbar    = (theta_L + theta_i) / 2                                                              (6)
    theta_i = Proj[ tbar - a N ( grad g(tbar) / (2 N) + (n_i / n) Qbar_i ) ]                        (5)
    theta_L = Proj[ tbar - (a / 2) grad g(tbar) ]                                                   (7')

where a = rho / (T^2 sigma). The printed (7) has (N - 1) / N in place of 1/2, which together with (5) minimizes
another function; the paper's own proof (eta = 1 / (2 N), f_L = (1 - eta N) g) gives 1/2. They agree for N = 2 only.

The protected unit is a record; neighbours replace one. Observers are the learner, the other owners and the public:
theta_L and every theta_i are functions of releases.

Two methods beside the paper's have owners that are all asked the same and may answer once: see :mod:`.once`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import one_of, positive, positive_int, positive_or
from ...data import FederatedDataset, RowBound
from ...errors import ConfigError, PrivacyError
from ...privacy import Channel, GradientMessage, GradientPlan, RecordPrivacy
from ...privacy.channel import GRADIENT
from ...privacy.clip import Clip
from ...schedules import Block, BoundSchedule
from ..base import Algorithm, Own, Problem, Released, Round, State
from ..linear.data import DomainBound, LinearData, LinearLoss, LossName, check_classes, prepared, probe_linear
from ..local_fit import LocalFit
from ..store import ClientStore
from . import once
from .automatic import resolve_learner
from .fitness import Fitness
from .learner_data import LearnerData
from .updates import Step, Updates

__all__ = ["AsyncLearner", "LearnerData"]


@dataclass(frozen=True, kw_only=True)
class AsyncLearner(Algorithm):
    """Settings of the asynchronous learner; all of them public.

    Args:
        method: ``"steps"``: Algorithm 1. ``"public_start"``: owners answer at the fit of the public rows, and the
            learner takes the posterior mean. ``"moments"``: they release second moments, and the learner solves a ridge
            regression (AdaSSP). For these two, one answer of each owner (``per_client=1`` of the clocks) is best, and
            several are averaged; the step, its horizon and ``guarantee`` have no meaning. See :mod:`.once`.
        loss: ``"squared"``, ``"hinge"`` or ``"logistic"``; see :class:`~fedmtl.algorithms.linear.data.LinearLoss`. A
            squared loss whose gradients are clipped at C is a Huber loss, quadratic in a residual up to C / (2 ||x||).
        reg: g = reg ||theta||^2 (the bias included), above 0; sigma = 2 reg.
        theta_max: bound on ||theta||_inf, above 0.
        step_size: a = rho / (T^2 sigma) of equations (5) and (7'), above 0; ``"auto"``: kappa (N + 1) / (2 T), for
            which the mean of the N + 1 models moves by kappa / 2 over a run, in units of gradient flow.
        kappa: of ``step_size="auto"``, above 0; several, one for each replicate; or ``"auto"``: chosen by noisy
            simulation on the public rows of the data, for the owners' sizes, caps and budgets (:meth:`resolve_auto`).
        horizon: T, planned number of ticks; None: the problem's number of events.
        cap: most answers of an owner, to which its noise is calibrated: None takes the schedule's caps; a number is a
            hard cap as well; ``"horizon"`` is the paper's Theorem 1: every owner's noise is made for T answers,
            although it gives about T / N (safe, and N times too noisy).
        groups: fixed groups of owners, by id, who answer the same query (Remark 2); others stay alone. Each member
            noises its own answer, the learner averages them by numbers of records, and N counts groups. A group's
            models move when its last member has answered; several answers of a member to one query are averaged.
        frequencies: how often owners answer (Remark 4): a public positive number for each owner, in the order of the
            data (a group counts as its slowest member), or ``"observed"``: the frequencies so far, (k_i + 1) / (k + N).
            Answers are weighted by 1 / (N frequency), after the noise. None: equal weights.
        bound: what bounds one record's gradient. ``"clip"``: the release clips every record. ``"domain"``: ``domain``
            bounds all gradients by Xi (:attr:`xi`), which must be within the clip norm of the privacy settings; then a
            query of the squared loss costs nothing per record, from sufficient statistics.
        domain: public bounds on records, enforced on the rows; needed for ``bound="domain"``. ``"auto"``: those that
            the data state.
        guarantee: ``"sound"``: equation (7'); ``"paper"``: the printed (7), for reproduction. The privacy of both is
            the same: (7) reads no data.
        batch_rate: q in (0, 1]: every answer takes a secret Poisson subsample of the owner's records, each of them with
            this public probability, and divides by the constant q n_i. The privacy of an answer is amplified, and its
            noise at equal epsilon of the release grows by 1 / q. Not in the paper, whose query (3) is of all records;
            only ``"steps"``.
        psi: also solve for the exact minimizer theta* of f, so that a run states the cost of privacy f / f(theta*) - 1.
            Both read the training records without noise: the numbers are not private.

    Raises:
        ConfigError: an impossible value.
    """

    method: Literal["steps", "public_start", "moments"] = "steps"
    loss: LossName = "squared"
    reg: float = 1e-5
    theta_max: float = 10.0
    step_size: float | Literal["auto"] = "auto"
    kappa: float | tuple[float, ...] | Literal["auto"] = 10.0
    horizon: int | None = None
    cap: int | Literal["horizon"] | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    frequencies: tuple[float, ...] | Literal["observed"] | None = None
    bound: Literal["clip", "domain"] = "clip"
    domain: DomainBound | Literal["auto"] | None = None
    guarantee: Literal["sound", "paper"] = "sound"
    batch_rate: float = 1.0
    psi: bool = False

    name = "async_learner"
    supports_replicates = True
    one_at_a_time = True
    on_host = True

    def __post_init__(self) -> None:
        LinearLoss(self.loss)
        positive(self, reg=self.reg, theta_max=self.theta_max)
        if isinstance(self.kappa, Sequence) and not isinstance(self.kappa, str):
            object.__setattr__(self, "kappa", tuple(self.kappa))
        for kappa in self.kappa if isinstance(self.kappa, tuple) else (self.kappa,):
            positive_or(self, "auto", kappa=kappa)
        if self.domain not in (None, "auto") and not isinstance(self.domain, DomainBound):
            raise ConfigError(f"AsyncLearner.domain is {self.domain!r}; accepted: DomainBound(...), 'auto' or None.")
        positive_or(self, "auto", step_size=self.step_size)
        if self.horizon is not None:
            positive_int(self, horizon=self.horizon)
        if isinstance(self.cap, str):
            one_of(self, ("horizon", "a whole number of at least 1"), cap=self.cap)
        elif self.cap is not None:
            positive_int(self, cap=self.cap)
        one_of(self, ("clip", "domain"), bound=self.bound)
        one_of(self, ("sound", "paper"), guarantee=self.guarantee)
        positive(self, batch_rate=self.batch_rate)
        if self.batch_rate > 1:
            raise ConfigError(
                f"AsyncLearner.batch_rate is {self.batch_rate!r}; the share of records must be in (0, 1]."
            )
        one_of(self, (True, False), psi=self.psi)
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))
        if isinstance(self.frequencies, str):
            one_of(self, ("observed", "a number above 0 for each owner"), frequencies=self.frequencies)
        elif self.frequencies is not None:
            object.__setattr__(self, "frequencies", tuple(self.frequencies))
            for value in self.frequencies:
                positive(self, frequencies=value)
        one_of(self, ("steps", "public_start", "moments"), method=self.method)
        if self.method != "steps":
            once.check(self)
        if self.bound == "domain" and self.domain is None:
            raise ConfigError(
                "AsyncLearner.bound='domain' needs domain=DomainBound(x_l1=..., y=...), which are public."
            )

    @cached_property
    def xi(self) -> float | None:
        """Return Xi, the analytic bound on the L1 norm of a record's gradient; None without ``domain``."""
        return self.domain.xi(LinearLoss(self.loss), self.theta_max) if isinstance(self.domain, DomainBound) else None

    def resolve_auto(
        self, problem: Problem, schedule: BoundSchedule, privacy: RecordPrivacy | Sequence[RecordPrivacy] | None
    ) -> AsyncLearner:
        """Return these settings with the ``"auto"`` ones filled in from the data's public rows and bounds.

        Args:
            problem: the data and the model.
            schedule: who answers when.
            privacy: settings of all replicates, or of each.

        Raises:
            ConfigError: the data have no public rows, or state no bounds.
        """
        if self.domain != "auto" and (self.kappa != "auto" or self.method != "steps"):
            return self
        return resolve_learner(self, problem, schedule, privacy)

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse more than two classes."""
        check_classes(data, self.name)

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Return the bound on features of ``domain``, which holds where the model is used too; None without one."""
        if not isinstance(self.domain, DomainBound):
            return None
        return self.domain.rows(probe_linear(problem.module, problem.data.spec.shape))

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean gradients of the rows, forced into ``domain`` where one is given.

        Raises:
            ModelError: the model is not linear.
            DataError: targets that do not suit the loss.
        """
        caps = self.hard_caps(schedule.caps.clip(max=problem.rounds), problem.rounds)
        plan = replace(self.released(self._work(problem).data, problem.data.ids, caps), keys=problem.data.keys)
        if self.method == "public_start":
            rows = sum(map(len, self._public(problem).y))
            plan = replace(plan, notes=(f"{rows} public rows, to which the start and the prior are fitted",))
        return (plan,)

    def released(self, data: LinearData, ids: tuple[str, ...], caps: np.ndarray) -> GradientPlan:
        """Return the plan of the releases of owners ``ids``, of at most ``caps`` (n,) answers each."""
        moments = self.method == "moments"
        return GradientPlan(
            ids=tuple(ids),
            counts=data.counts.numpy(),
            dimension=once.moments_size(data.dimension) if moments else data.dimension,
            caps=caps,
            x=None if moments else data.x,
            rate=self.batch_rate,
        )

    def hard_caps(self, scheduled: np.ndarray, events: int) -> np.ndarray:
        """Return the most activations of each client in a run of ``events``, int64 (n,), to which its noise is made."""
        given = np.asarray(scheduled, dtype=np.int64)
        if self.cap == "horizon":
            return np.full_like(given, self.horizon or events)
        return given if self.cap is None else np.minimum(given, self.cap)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start all models at 0, or at the fit of the public rows."""
        public = self._public(problem) if self.method == "public_start" else None
        return State(self.start(self._work(problem), public, replicates), ClientStore(problem.clients, {}))

    def start(self, work: LearnerData, public: LinearData | None, replicates: int) -> dict[str, Tensor]:
        """Return the public state of R = ``replicates`` runs before any answer; ``public`` has the public rows."""
        if self.method == "steps":
            return work.start(replicates)
        p = work.data.dimension
        theta = torch.zeros(p, dtype=torch.float64) if public is None else once.public_fit(self, public)
        size = once.moments_size(p) if self.method == "moments" else p
        return once.start(replicates, len(work.data.x), theta, size)

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, GradientMessage], Own]:
        if self.method != "steps":
            return {GRADIENT: self.asked(self._work(problem), public, clipped=round.clips)}, own
        # (6): the point between the central model and the client's copy; (3): gradients of its records there
        updates = self._updates(problem, public, clipped=round.clips)
        updates.query(clients.numpy())
        return {GRADIENT: updates.message}, own

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        assert released.clients is not None
        new = {name: value.clone() for name, value in public.items()}
        if self.method != "steps":
            answer = released.values[GRADIENT].numpy()[None]
            once.hear(new, released.clients.numpy(), answer, released.noise_std(GRADIENT))
            self._solve(problem, new, released.clip)
            return new
        # (5) and (7')
        updates = self._updates(problem, new, clipped=True)
        who = released.clients.numpy()
        updates.query(who)
        updates.update(who, released.values[GRADIENT].numpy()[None])
        return new

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Compute all activations of the block, in order; each needs the one before it."""
        if self.xi is not None and self.bound == "domain" and self.xi > channel.bound:
            raise PrivacyError(
                f"The domain bounds gradients by Xi = {self.xi:g}, but clip_norm is {channel.bound:g}; set "
                f"clip_norm to at least {self.xi:g}, or bound='clip'."
            )
        if self.method != "steps":
            message = self.asked(self._work(problem), state.public, clipped=channel.bound < math.inf)
            self.hear(state.public, block.client.numpy().T, channel, message)
            self._solve(problem, state.public, channel.sums.clip)
            return state
        updates = self._updates(problem, state.public, clipped=channel.bound < math.inf)
        updates.run(block.client.numpy().T.copy(), channel.answers(updates.message))
        return state

    def asked(self, work: LearnerData, public: Mapping[str, Tensor], *, clipped: bool) -> GradientMessage:
        """Return what owners answer where all are asked the same."""
        if self.method == "moments":
            return once.moments_message(work.data)
        means = self.bound == "domain" or not clipped
        return once.message_at(public["theta_0"], work.data, LinearLoss(self.loss), clipped=not means)

    def hear(self, public: dict[str, Tensor], clients: np.ndarray, channel: Channel, message: GradientMessage) -> None:
        """Take the answers to ``message`` of the activations ``clients`` (S, R) that have begun."""
        for who, answer in zip(clients, channel.answers(message), strict=True):
            once.hear(public, who, answer, channel.noise_std(GRADIENT))

    def solve(
        self, public: dict[str, Tensor], counts: Tensor, prior: once.PublicPrior | None, clip: Clip | None
    ) -> None:
        """Set theta_L to what all answers so far say; ``prior`` is of the public rows and this clip."""
        if prior is not None:
            public["theta_l"] = prior.solve(public, counts)
        else:
            public["theta_l"] = once.moments_model(self, public, counts, public["theta_l"].shape[1], clip)

    def _solve(self, problem: Problem, public: dict[str, Tensor], clip: Clip | None) -> None:
        prior = None
        if self.method == "public_start":
            rows = self._public(problem)
            prior = prepared(problem, (self, clip), lambda: once.PublicPrior.of(self, rows, clip))
        self.solve(public, problem.data.train.counts, prior, clip)

    def _public(self, problem: Problem) -> LinearData:
        """Return the public rows of the data, within the domain where one is given."""
        known = problem.data.public
        if known is None:
            raise ConfigError(
                f"AsyncLearner.method='public_start' needs public rows, and {problem.data.name} has none; "
                f"use method='moments'."
            )

        def build() -> LinearData:
            rows = LinearData.of_examples(problem, known)
            LinearLoss(self.loss).check_targets(rows.y, rows.name)
            return self.domain.bounded(rows) if isinstance(self.domain, DomainBound) else rows

        return prepared(problem, (self, "public rows"), build)

    def _updates(self, problem: Problem, public: Mapping[str, Tensor], *, clipped: bool) -> Updates:
        work = self._work(problem)
        a = self.effective_step(work.copies, problem.clients, problem.rounds)
        return self.updates(work, public, a, clipped=clipped)

    def updates(self, work: LearnerData, public: Mapping[str, Tensor], a: Step, *, clipped: bool) -> Updates:
        """Return the updates with step ``a`` on arrays of ``public``; ``clipped`` where the channel clips at all."""
        means = self.bound == "domain" or (work.statistics is not None and not clipped)
        means = means and self.batch_rate == 1  # means are of all records
        return Updates(work, {name: value.numpy() for name, value in public.items()}, a, clipped=not means)

    def effective_step(self, copies: int, owners: int, events: int) -> Step:
        """Return a, for N = ``copies`` owners or groups of ``owners`` who give ``events`` answers together; (R,) where
        the replicates have a kappa each."""
        if self.step_size != "auto":
            return float(self.step_size)
        if self.kappa == "auto":
            raise ConfigError(
                "AsyncLearner.kappa is 'auto', which a Trainer fills in; give a number, or resolve_auto()."
            )
        ticks = (self.horizon or events) * copies / owners  # a group's tick is all its members' answers
        kappa = np.array(self.kappa) if isinstance(self.kappa, tuple) else self.kappa
        return kappa * (copies + 1) / (2 * ticks)

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return the central model for everyone, (k, p), a view of one row."""
        return state.public["theta_l"][0].to(problem.initial).expand(len(clients), -1)

    def shared(self, state: State) -> Tensor | None:
        """Return theta_L, (p,) float64."""
        return state.public["theta_l"][0]

    def models(self, problem: Problem, state: State) -> Tensor:
        """Return theta_L of every replicate for everyone, (R, n, p), a view expanded along the owners."""
        return state.public["theta_l"].to(problem.initial)[:, None].expand(-1, problem.clients, -1)

    def for_replicates(self, numbers: range) -> AsyncLearner:
        if not isinstance(self.kappa, tuple):
            return self
        kappas = tuple(self.kappa[number] for number in numbers)
        return replace(self, kappa=kappas if len(set(kappas)) > 1 else kappas[0])

    def local_baseline(self) -> LocalFit | None:
        """Return an owner's own minimizer, None for the hinge; g = reg ||theta||^2 and the squared loss have no 1/2
        here, and have it in the fit."""
        if self.loss == "hinge":
            return None
        return LocalFit(loss=self.loss, ridge=self.reg * (1 if self.loss == "squared" else 2))

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Return f(theta_L), equation (2), on the training records, (R,) float64; not private."""
        return self._fitness(problem)(state.public["theta_l"])

    def least_objective(self, problem: Problem) -> float | None:
        """Return f(theta*) of the training records where ``psi`` asks for it, else None; not private."""
        return self._fitness(problem).optimum.fitness if self.psi else None

    def _fitness(self, problem: Problem) -> Fitness:
        def build() -> Fitness:
            x, y = self._work(problem).data.pooled()
            return Fitness(x, y, LinearLoss(self.loss), self.reg, self.theta_max)

        return prepared(problem, (self, "fitness"), build)

    def _work(self, problem: Problem) -> LearnerData:
        return prepared(problem, self, lambda: LearnerData.of(self, LinearData.of(problem), problem.data.ids))
