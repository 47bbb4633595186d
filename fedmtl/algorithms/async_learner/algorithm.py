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

:mod:`.one_answer` has two methods beside the paper's, of owners who are all asked the same and may answer once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from ..._check import one_of, positive, positive_int, positive_or
from ...errors import ConfigError
from ...privacy import Channel, GradientMessage, GradientPlan, RecordPrivacy
from ...privacy.channel import GRADIENT
from ...schedules import Block, BoundSchedule
from ..base import Own, Problem, Released, Round, State
from ..linear.data import DomainBound, LinearData, LossName, prepared
from ..store import ClientStore
from .automatic import resolve_kappa
from .central import CentralLearner
from .learner_data import LearnerData
from .updates import Step, Updates

__all__ = ["AsyncLearner", "LearnerData"]


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
            noise at equal epsilon of the release grows by 1 / q. Not in the paper, whose query (3) is of all records.
        psi: also solve for the exact minimizer theta* of f, so that a run states the cost of privacy f / f(theta*) - 1.
            Both read the training records without noise: the numbers are not private.

    Raises:
        ConfigError: an impossible value.
    """

    loss: LossName = "squared"
    reg: float = 1e-5
    theta_max: float = 10.0
    step_size: float | Literal["auto"] = "auto"
    kappa: float | tuple[float, ...] | Literal["auto"] | None = None
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
        if isinstance(self.cap, str):
            one_of(self, ("horizon", "a whole number of at least 1"), cap=self.cap)
        for name, value in {"kappa": self.kappa, "horizon": self.horizon}.items():
            if value is not None and self.step_size != "auto" and (name == "kappa" or self.cap != "horizon"):
                raise ConfigError(
                    f"AsyncLearner.{name} is {value!r}, which chooses the automatic step size, but step_size is "
                    f"{self.step_size!r}; leave one of the two out."
                )
        one_of(self, ("sound", "paper"), guarantee=self.guarantee)
        positive(self, batch_rate=self.batch_rate)
        if self.batch_rate > 1:
            raise ConfigError(
                f"AsyncLearner.batch_rate is {self.batch_rate!r}; the share of records must be in (0, 1]."
            )
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))
        if isinstance(self.frequencies, str):
            one_of(self, ("observed", "a number above 0 for each owner"), frequencies=self.frequencies)
        elif self.frequencies is not None:
            object.__setattr__(self, "frequencies", tuple(self.frequencies))
            for value in self.frequencies:
                positive(self, frequencies=value)

    def resolve_auto(
        self, problem: Problem, schedule: BoundSchedule, privacy: RecordPrivacy | Sequence[RecordPrivacy] | None
    ) -> CentralLearner:
        found = super().resolve_auto(problem, schedule, privacy)
        assert isinstance(found, AsyncLearner)
        return resolve_kappa(found, problem, schedule, privacy) if found.kappa == "auto" else found

    def released(self, data: LinearData, ids: tuple[str, ...], caps: np.ndarray) -> GradientPlan:
        return replace(super().released(data, ids, caps), rate=self.batch_rate)

    def hard_caps(self, scheduled: np.ndarray, events: int) -> np.ndarray:
        if self.cap == "horizon":
            return np.full_like(np.asarray(scheduled, dtype=np.int64), self.horizon or events)
        return super().hard_caps(scheduled, events)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start all models at 0."""
        return State(self._work(problem).start(replicates), ClientStore(problem.clients, {}))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, GradientMessage], Own]:
        # (6): the point between the central model and the client's copy; (3): gradients of its records there
        updates = self._updates(problem, public, clipped=round.clips)
        updates.query(clients.numpy())
        return {GRADIENT: updates.message}, own

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        # (5) and (7')
        assert released.clients is not None
        new = {name: value.clone() for name, value in public.items()}
        updates = self._updates(problem, new, clipped=True)
        who = released.clients.numpy()
        updates.query(who)
        updates.update(who, released.values[GRADIENT].numpy()[None])
        return new

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Compute all activations of the block, in order; each needs the one before it."""
        self.check_bound(channel)
        updates = self._updates(problem, state.public, clipped=channel.bound < math.inf)
        updates.run(block.client.numpy().T.copy(), channel.answers(updates.message))
        return state

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
        given = 10.0 if self.kappa is None else self.kappa
        kappa = np.array(given) if isinstance(given, tuple) else given
        return kappa * (copies + 1) / (2 * ticks)

    def for_replicates(self, numbers: range) -> AsyncLearner:
        if not isinstance(self.kappa, tuple):
            return self
        kappas = tuple(self.kappa[number] for number in numbers)
        return replace(self, kappa=kappas if len(set(kappas)) > 1 else kappas[0])

    def _work(self, problem: Problem) -> LearnerData:
        return prepared(problem, self, lambda: LearnerData.of(self, self.data(problem), problem.data.ids))
