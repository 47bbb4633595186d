"""PP-DMTL: private multi-task learning by asynchronous proximal gradient, with an untrusted server.

Xie, Baytas, Lin, Zhou: "Privacy-Preserving Distributed Multi-Task Learning with Asynchronous Updates", KDD 2017.

    min_{P,Q} sum_t (1/n_t) sum_j l(x_tj . (p_t + q_t), y_tj) + lam r(P) + tau g(Q),   W = P + Q       (Equation 2)

P couples the tasks and lives at the server, q_t is task t's own. Task t sends a noised gradient and waits for nobody;
the server puts it in column t of a matrix S whose other columns stay as they are, takes one proximal step on all of P
and returns p_t, which task t uses at its next activation (Algorithm 1). The protected unit is a record of a task, the
observers are the server and the other tasks, neighbours differ by one record replaced.

``guarantee="sound"``: the published accounting bounds one step of q_t from the *same* q_t, but q_t is a private state
that nothing noises, so its sensitivity grows along the run
(:func:`~fedmtl.algorithms.pp_dmtl.published.published_sensitivity`). Here one clipped, noised gradient G_t serves both
blocks, since grad_p l(p + q) = grad_q l(p + q). P, S, the returned columns and q_t are then functions of releases
alone. After training, q_t is fitted once to the raw records and never sent.

``guarantee="paper"``: Algorithm 1 as printed, for reproduction; its epsilon is infinite. A task keeps q_t, moves it on
its raw records (line 10), and sends the noised gradient at p_t + q_t + z1 (lines 11 to 13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import given, non_negative, one_of, positive, positive_int, positive_or
from ...errors import ConfigError, PrivacyError
from ...privacy import Channel, GradientMessage, GradientPlan, PublishedClaim, RecordPrivacy, ScaledRows
from ...privacy.channel import GRADIENT
from ...schedules import Block, BoundSchedule, block_bounds
from ..base import Own, Problem, Released, Round, State
from ..linear.data import LinearAlgorithm, LinearData, prepared
from ..linear.solve import OWN_PENALTIES, OwnPenalty, fit_own, own_step
from ..local_fit import LocalFit
from .published import REFUTED, published_epsilon
from .server import SHARED_PENALTIES, SharedPenalty, SharedProx, serve, serve_one
from .simulated import choose_step


@dataclass(frozen=True, kw_only=True)
class PPDMTL(LinearAlgorithm):
    """Asynchronous multi-task learning with private gradients (Xie et al. 2017, Algorithm 1).

    Args:
        loss: ``"logistic"``, or ``"squared"``: (y - w.x)^2, without 1/2.
        lam: lambda, the strength of r(P). The server's proximal threshold is ``a2 lam``.
        threshold: that threshold itself (the paper's mu), in place of ``lam``.
        tau: the strength of g(Q); the paper's lambda of Algorithm 1, line 9.
        a1: step size of q_t. 0 leaves q_t at its start until the refinement: best with few answers.
        a2: step size of P, at most ``2 / ((delay + 1) L)``; ``None`` takes half of that; ``"auto"`` the best one in a
            simulation of the schedule and the noise on synthetic tasks of the same sizes, together with the ``delay``
            for which it is stable: it reads nothing private, and most gradients are far less old than the oldest, so
            that a larger step is stable than for the worst case
            (:func:`~fedmtl.algorithms.pp_dmtl.simulated.choose_step`). The server repeats a task's
            last gradient at every event, so a column moves on by gradients taken long before.
        delay: the most events from an activation of a task to its next but one, for which a gradient taken at the
            column of the first is used: a public property of the schedule, :func:`largest_delay`. ``None``: 2 T, which
            is tasks that act in turn. With latencies between 0 and a maximum it is about 4 T, and with stragglers more;
            where it is too small P may oscillate with growing size. (For r = 0, ``a2 < 3 / (2 (delay - 1) L)`` is
            stable whatever the delays up to that: Erbe, Xia, Yu, 1995, on x_{n+1} - x_n = -a x_{n-k}.)
        smoothness: L, a Lipschitz constant of the gradient of every task's mean loss. ``None``: that of the domain,
            B^2 / 4 for the logistic and 2 B^2 for the squared loss with B the largest norm of a row. A smaller one must
            be public knowledge; only stability rests on it.
        row_norm: B, a public bound on the L2 norm of a record's features, which are scaled down to it in training and
            wherever the models are used; the 1 of a bias stays. ``"auto"``: the bound that the data state; where they
            state none, a run without privacy leaves all rows as they are and one with privacy is refused. None: no
            bound, without privacy only.
        target: a public bound on abs(y) of the squared loss, at which training targets are cut off. ``"auto"``: that of
            the data, where they state one. None: 2^40.
        penalty: r, ``"nuclear"`` (low rank) or ``"l21"`` (features used by all tasks or none: L2 norms of rows of P).
        own_penalty: g, ``"frobenius"`` (||Q||_F^2 / 2), ``"l1"`` or ``"l2"`` (norms of columns: tasks that differ).
        guarantee: ``"sound"``; or ``"paper"``, Algorithm 1 as printed, for reproduction: q_t moves on the raw records,
            no noise covers it, and epsilon is infinite. The noise must be ``"l2_laplace"``, equation (12).
        gauss_seidel: the gradient is taken at the new q_t (Algorithm 1) and not at the old one. ``None``: True in
            ``"paper"``. ``"sound"`` cannot, since its new q_t is made of that very release.
        exact_q: solve for q_t (Equation 8) in place of one step; ``"paper"`` only.
        start: of q_t, ``"zero"``, or ``"single_task"``, the fit of the task alone that Algorithm 1 starts from;
            ``"paper"`` only.
        query_epsilon: epsilon_1, of the noise z1 at the point where the gradient is taken. ``None``: that of the
            release. ``"paper"`` only.
        refine: fit q_t to the raw records for the personal models (Equation 8); it is never sent. ``None``: True in
            ``"sound"``, False in ``"paper"``.
        refine_tau: the strength of g in that fit, above 0. ``None``: ``tau``.
        refine_across: the strength of g in that fit across the row space of P, which is public, so that the refinement
            is free along the directions that the tasks were found to share and tied elsewhere: ``refine_tau / 2``
            times the square of q_t along these directions, and ``refine_across / 2`` times that of the rest. P has no
            directions: as without it. ``own_penalty="frobenius"``. A threshold above the noise keeps P to what is
            signal. None: ``refine_tau`` in all directions.
        batch_rate: q in (0, 1]: every answer takes a secret Poisson subsample of the task's records, each of them with
            this public probability, and divides by the constant q n_t. Pure epsilon of one answer falls from e to
            log(1 + q (exp(e) - 1)), and its noise at equal epsilon of the release grows by 1 / q.

    Raises:
        ConfigError: a value outside these ranges, or one that the guarantee does not allow.
    """

    loss: Literal["logistic", "squared"] = "logistic"
    lam: float = 0.015
    threshold: float | None = None
    tau: float = 1e-3
    a1: float = 0.0
    a2: float | Literal["auto"] | None = None
    delay: int | None = None
    smoothness: float | None = None
    row_norm: float | Literal["auto"] | None = "auto"
    target: float | Literal["auto"] | None = "auto"
    penalty: SharedPenalty = "nuclear"
    own_penalty: OwnPenalty = "frobenius"
    guarantee: Literal["sound", "paper"] = "sound"
    gauss_seidel: bool | None = None
    exact_q: bool = False
    start: Literal["zero", "single_task"] = "zero"
    query_epsilon: float | None = None
    refine: bool | None = None
    refine_tau: float | None = None
    refine_across: float | None = None
    batch_rate: float = 1.0

    name = "pp_dmtl"
    supports_replicates = True
    one_at_a_time = True

    def __post_init__(self) -> None:
        one_of(self, ("logistic", "squared"), loss=self.loss)
        one_of(self, ("nuclear", "l21"), penalty=self.penalty)
        one_of(self, ("frobenius", "l1", "l2"), own_penalty=self.own_penalty)
        one_of(self, ("sound", "paper"), guarantee=self.guarantee)
        one_of(self, ("zero", "single_task"), start=self.start)
        one_of(self, (True, False), exact_q=self.exact_q)
        non_negative(self, lam=self.lam, tau=self.tau, a1=self.a1)
        self.check_bounds()
        for field in ("smoothness", "query_epsilon", "refine_tau", "refine_across"):
            positive(self, **given(**{field: getattr(self, field)}))
        positive_or(self, "auto", **given(a2=self.a2))
        if self.delay is not None:
            positive_int(self, delay=self.delay)
        if self.threshold is not None:
            non_negative(self, threshold=self.threshold)
        positive(self, batch_rate=self.batch_rate)
        if self.batch_rate > 1:
            raise ConfigError(f"PPDMTL.batch_rate is {self.batch_rate!r}; the share of records must be in (0, 1].")
        if self.batch_rate < 1 and self.exact_q:
            raise ConfigError("PPDMTL.exact_q fits q_t to all records, and batch_rate < 1 takes some; leave one out.")
        if self.refine_across is not None and self.own_penalty != "frobenius":
            raise ConfigError(
                "PPDMTL.refine_across turns the axes of q_t, and only own_penalty='frobenius' allows that."
            )
        if self.guarantee == "sound":
            self._check_sound()
        if self.tau == 0 and (self.exact_q or self.start == "single_task" or (self.refines and not self.refine_tau)):
            raise ConfigError(
                "PPDMTL.tau is 0, and the exact fit of q_t has no unique minimum without g; give tau above 0, or "
                "refine_tau for the refinement alone."
            )

    def _check_sound(self) -> None:
        reasons = {
            "gauss_seidel": "takes the gradient at the new q_t, which in this mode is made of that very release",
            "exact_q": "moves q_t by the raw records, and nothing noises q_t",
            "query_epsilon": "is of the noise z1 of Algorithm 1; here the points of the gradients are public",
        }
        for field, reason in reasons.items():
            if getattr(self, field):
                raise ConfigError(f"PPDMTL.{field} {reason}: with guarantee='sound' leave it out.")
        if self.start != "zero":
            raise ConfigError(
                "PPDMTL.start='single_task' is a fit of raw records, and nothing noises q_t: with guarantee='sound' it "
                "must be 'zero'."
            )

    @property
    def refines(self) -> bool:
        """Return whether the personal models fit q_t to the raw records."""
        return self.guarantee == "sound" if self.refine is None else self.refine

    # What it needs of the problem

    def resolve_auto(self, problem: Problem, schedule: BoundSchedule, privacy: Any) -> PPDMTL:
        """Return these settings with the ``"auto"`` ones filled in from public bounds, sizes and the schedule; of
        several budgets a2 is the smallest that one of them chooses.

        Raises:
            ConfigError: no bound on rows, with privacy.
        """
        found = super().resolve_auto(problem, schedule, privacy)
        if found.a2 != "auto":
            return found
        budgets: list[RecordPrivacy | None] = []
        for one in privacy if isinstance(privacy, Sequence) else [privacy]:
            budgets += [] if one in budgets else [one]
        a2, delay = min(choose_step(found, problem, schedule, one) for one in budgets)
        return replace(found, a2=a2, delay=delay)

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean gradients of the rows within the bound of the domain, as many as the schedule has; under
        ``guarantee="paper"`` with the accounting of Theorem 3.5 and the reason why it fails.

        Raises:
            PrivacyError: ``guarantee="paper"`` and another law than that of Algorithm 1, equation (12).
        """
        data, published = self.data(problem), None
        if self.guarantee == "paper":
            published = PublishedClaim(lambda z: published_epsilon(z, self.query_epsilon, self.batch_rate), REFUTED)
        return (
            GradientPlan(
                ids=tuple(problem.data.ids),
                keys=problem.data.keys,
                counts=data.counts.numpy(),
                dimension=data.dimension,
                caps=schedule.caps.clip(max=problem.rounds),
                x=data.x,
                rate=self.batch_rate,
                published=published,
                given_noise=None if published is None else _of_algorithm_1,
            ),
        )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start at P = S = Q = 0, no data are read; except with ``start="single_task"``.

        Public, (R, T, p) float64 of R replicates, one row a task: ``shared`` P, ``stale`` S, ``returned`` the column
        that each task got last, ``own`` Q (in ``"paper"`` it is private, (T, R, p)).

        Raises:
            ConfigError: a step size beyond the stable ones.
        """
        self._steps(problem)
        shape = (replicates, problem.clients, problem.dimension)
        names = ("shared", "stale", "returned") + (("own",) if self.guarantee == "sound" else ())
        public = {name: torch.zeros(shape, dtype=torch.float64) for name in names}
        if self.guarantee == "sound":
            return State(public, problem.client_store({}))
        store = problem.client_store({"own": ((replicates, problem.dimension), torch.float64)})
        if self.start == "single_task":
            data, zero = self.data(problem), torch.zeros(problem.dimension, dtype=torch.float64)
            for task, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
                own = fit_own(self.linear_loss, x, y, zero, self.tau, self.own_penalty)
                store.scatter("own", torch.tensor([task]), own.expand(1, replicates, -1))
        return State(public, store)

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, GradientMessage], Own]:
        # the gradient at p_t + q_t, from the column p_t that the server returned last
        data = self.data(problem)
        if self.guarantee == "sound":
            return {GRADIENT: self._gradients(data, public)}, own
        # as printed, q_t moves first; it is private, and stays
        assert round.members is not None
        assert round.noise is not None
        task, first = int(clients), np.zeros(1, dtype=np.int64)
        z1 = self.a1 * round.noise(multiplier=self._query_multiplier)[0]
        drawn = round.members(task, first, first)
        point, q = self._moved(data, task, public["returned"][:, task], own["own"][0], drawn, z1)
        message = ScaledRows(lambda t, which, where: self.linear_loss.factors(point.numpy(), *data.arrays[t]))
        return {GRADIENT: message}, {"own": q[None]}

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        # column t of S is G_t, one proximal step on all of P, p_t goes back; a public q_t <- q_t - a1 (G_t + tau q_t)
        assert released.clients is not None
        new = {name: value.clone() for name, value in public.items()}
        self._serve_one(problem, new, released.clients.tolist(), iter([released.values[GRADIENT].numpy()[None]]))
        return new

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Compute all activations of a block, of all replicates; in place. Of several replicates, those of different
        tasks that wait for no column which the others change are released together."""
        data = self._work(problem)[0]
        if block.replicates == 1 and self.guarantee == "sound":
            answers = channel.answers(self._gradients(data, state.public))
            self._serve_one(problem, state.public, block.client[0].tolist(), answers)
            return state
        bounds = block_bounds(block.client, "none", max(1, len(block))).tolist()
        clients, z1 = block.client.T, None  # (S, R)
        if self.guarantee == "paper":
            z1 = self.a1 * channel.local_noise(len(block), multiplier=self._query_multiplier)

        def released() -> Iterator[tuple[Tensor, Tensor]]:
            for start, stop in pairwise(bounds):
                part = clients[start:stop]
                if z1 is None:
                    message = self._gradients(data, state.public)
                else:
                    message = self._paper_gradients(data, state, part, channel, z1[start:stop])
                yield part, channel.release(GRADIENT, message, count=stop - start)

        self._serve(problem, state.public, released())
        return state

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return w_t = p_t + q_t of ``clients`` in replicate 0, (k, p); q_t is fitted to the raw records if
        ``refines``."""
        return self._personal(problem, state, clients, slice(0, 1))[0]

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Return P and Q, one row a task, (T, p) float64 each, with W = P + Q the personal models. P is made of
        releases; its row space, the first rows of V^T of ``torch.linalg.svd(P)``, are the directions that the tasks
        share, and P P^T relates the tasks. Q is each task's own; it has the refinement, and is not private."""
        shared = state.public["shared"][0].clone()
        return {"P": shared, "Q": personal.double() - shared}

    def models(self, problem: Problem, state: State) -> Tensor:
        """Return what :meth:`personalize` does, of all tasks in every replicate: (R, T, p)."""
        return self._personal(problem, state, torch.arange(problem.clients), slice(None))

    def shared(self, state: State) -> Tensor | None:
        """Return None: P has a column for every task, and no model is common to all."""
        return None

    def local_baseline(self) -> LocalFit:
        """Return the ridge fit of a task's own records; the squared loss here has no 1/2, that of the fit has."""
        tau = self.refine_tau or self.tau or 0.01
        return LocalFit(loss=self.loss, ridge=tau / (2 if self.loss == "squared" else 1), **self.given_bounds)

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Return the objective of equation (2) on the training records, (R,) float64, not private."""
        data, own = self.data(problem), self._own(state)
        shared = state.public["shared"]
        a2, threshold = self._steps(problem)
        total = threshold / a2 * SHARED_PENALTIES[self.penalty].value(shared)
        total = total + self.tau * OWN_PENALTIES[self.own_penalty].value(own)
        for t, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
            total = total + self.linear_loss.value(shared[:, t] + own[:, t], x, y).mean(1)
        return total

    # Inside

    def _personal(self, problem: Problem, state: State, clients: Tensor, which: slice) -> Tensor:
        shared = state.public["shared"][which][:, clients]
        if not self.refines or not len(clients):
            own = self._own(state)[which][:, clients]
        else:
            data, tau = self.data(problem), self.tau if self.refine_tau is None else self.refine_tau
            turns = None
            if self.refine_across is not None:
                turns = shared_axes(state.public["shared"][which], tau, self.refine_across)

            def fit(t: int, p: Tensor) -> Tensor:
                x, y = data.x[t], data.y[t]
                if turns is None:
                    return fit_own(self.linear_loss, x, y, p, tau, self.own_penalty)
                pairs = zip(turns, p, strict=True)
                return torch.stack([m @ fit_own(self.linear_loss, x @ m, y, one, tau, "frobenius") for m, one in pairs])

            own = torch.stack([fit(t, shared[:, k]) for k, t in enumerate(clients.tolist())], dim=1)
        return (shared + own).to(problem.initial)

    def _own(self, state: State) -> Tensor:
        """Return Q (R, T, p)."""
        if self.guarantee == "sound":
            return state.public["own"]
        return state.private.gather("own", torch.arange(state.private.clients)).transpose(0, 1)

    def _work(self, problem: Problem) -> tuple[LinearData, float, float]:
        """Return the records within the bounds, a2 and the proximal threshold; made once."""
        return prepared(problem, self, lambda: (self.data(problem), *self._steps(problem)))

    def curvature(self, problem: Problem) -> float:
        """Return L, ``smoothness`` or that of the domain."""
        return self.linear_loss.smoothness(self.largest_row(problem)) if self.smoothness is None else self.smoothness

    def _steps(self, problem: Problem) -> tuple[float, float]:
        """Return a2 and the proximal threshold."""
        if self.a2 == "auto":
            raise ConfigError("PPDMTL.a2 is 'auto', which a Trainer fills in; give a number, or resolve_auto().")
        smooth = self.curvature(problem)
        delay = 2 * problem.clients if self.delay is None else self.delay
        largest = 2.0 / ((delay + 1) * smooth)
        a2 = largest / 2 if self.a2 is None else self.a2
        if a2 > largest * (1 + 1e-9):
            raise ConfigError(
                f"PPDMTL.a2 is {a2:g}; with {problem.clients:,} tasks, delay = {delay} and L = {smooth:g} it must be "
                f"at most 2 / ((delay + 1) L) = {largest:.4g}: the server repeats a task's last gradient at every "
                f"event, and one is up to that many events old. A smaller public bound on the curvature may be given "
                f"as smoothness."
            )
        if self.a1 * (smooth + self.tau) > 1 + 1e-9:
            raise ConfigError(
                f"PPDMTL.a1 is {self.a1:g}; with L = {smooth:g} it must be at most 1 / (L + tau) = "
                f"{1 / (smooth + self.tau):.4g}."
            )
        return a2, a2 * self.lam if self.threshold is None else self.threshold

    def _gradients(self, data: LinearData, public: Mapping[str, Tensor]) -> ScaledRows:
        """Return gradients of the tasks' records at p_t + q_t."""
        p, q, loss = public["returned"].numpy(), public["own"].numpy(), self.linear_loss

        def factors(task: int, which: np.ndarray, where: np.ndarray) -> np.ndarray:
            some = slice(None) if len(p) == 1 else where  # one replicate has one activation in this part
            point = p[some, task] + q[some, task] if self.a1 > 0 else p[some, task]  # q_t stays 0
            return loss.factors(point, *data.arrays[task])

        return ScaledRows(factors)

    def _serve(self, problem: Problem, public: dict[str, Tensor], released: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Make the server's steps, and those of public q_t, on parts of a block: (S, R) who acts, (S, R, p) G_t."""
        _, a2, threshold = self._work(problem)
        prox = SharedProx(len(public["shared"]), self.penalty, threshold)
        for part, answer in released:
            if self.a1 > 0 and self.guarantee == "sound":
                own = public["own"]
                which, where = (part >= 0).nonzero(as_tuple=True)
                task = part[which, where]
                own[where, task] = own_step(own[where, task], answer[which, where], self.a1, self.tau, self.own_penalty)
            serve(public, part, answer, a2, prox)
        prox.close()

    def _serve_one(
        self, problem: Problem, public: dict[str, Tensor], tasks: Sequence[int], answers: Iterator[np.ndarray]
    ) -> None:
        """Serve one run as :meth:`_serve` does: tasks (S,), and their G_t (1, p) as they come."""
        _, a2, threshold = self._work(problem)
        prox = SharedProx(len(public["shared"]), self.penalty, threshold)
        if self.a1 > 0 and self.guarantee == "sound":
            answers = self._moving_own(public, tasks, answers)
        serve_one(public, tasks, answers, a2, prox)
        prox.close()

    def _moving_own(
        self, public: dict[str, Tensor], tasks: Sequence[int], answers: Iterator[np.ndarray]
    ) -> Iterator[np.ndarray]:
        """Yield the answers as they come, each of which also moves the public q_t."""
        own = public["own"]
        for task, answer in zip(tasks, answers, strict=True):
            if task >= 0:
                own[:, task] = own_step(own[:, task], torch.from_numpy(answer), self.a1, self.tau, self.own_penalty)
            yield answer

    def _paper_gradients(
        self, data: LinearData, state: State, part: Tensor, channel: Channel, z1: Tensor
    ) -> ScaledRows:
        """Return the gradients of tasks ``part`` (S, R), none of them twice in a repetition, whose q_t move first."""
        returned, store = state.public["returned"], state.private
        points = torch.zeros(*part.shape, returned.shape[2], dtype=torch.float64)
        for task in part[part >= 0].unique().tolist():
            which, where = (part == task).nonzero(as_tuple=True)
            row = store.gather("own", torch.tensor([task]))
            drawn = channel.members(task, which.numpy(), where.numpy())
            p, q = returned[where, task], row[0, where]
            points[which, where], row[0, where] = self._moved(data, task, p, q, drawn, z1[which, where])
            store.scatter("own", torch.tensor([task]), row)
        return ScaledRows(
            lambda task, which, where: self.linear_loss.factors(points.numpy()[which, where], *data.arrays[task])
        )

    def _moved(
        self, data: LinearData, task: int, p: Tensor, q: Tensor, drawn: np.ndarray | None, z1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return p_t + q_t + z1, where task t takes its gradient, and its new q_t: Algorithm 1, lines 10 to 12.

        Args:
            data: of which the task's own records are read.
            task: t.
            p, q, z1: (k, p) in k repetitions: the column that the server returned last, the task's own part, and noise
                of density exp(-b1 ||z||_2) with b1 = epsilon_1 / S1, S1 = 2 a1 C1 C2 / (q n_t).
            drawn: (k, n_t) bool, the records that take part; None for all.
        """
        x, y, loss = data.x[task], data.y[task], self.linear_loss
        if self.exact_q:
            new = fit_own(loss, x, y, p, self.tau, self.own_penalty)
        else:
            factors = loss.scale(p + q, x, y)
            factors = factors if drawn is None else factors * torch.from_numpy(drawn)
            gradient = factors @ x / (self.batch_rate * len(x))
            new = own_step(q, gradient, self.a1, self.tau, self.own_penalty)
        return p + (q if self.gauss_seidel is False else new) + z1, new

    @property
    def _query_multiplier(self) -> float | None:
        """Return 1 / epsilon_1; None where it is that of the release."""
        return None if self.query_epsilon is None else 1.0 / self.query_epsilon


def shared_axes(shared: Tensor, tau: float, across: float) -> Tensor:
    """Return M (R, p, p) such that (tau / 2) ||v||^2 of q = M v is (tau / 2) ||q||^2 along the rows of P^T (R, T, p)
    and (across / 2) ||q||^2 across them; the identity where P is 0. M leaves every row of P^T as it is."""
    _, values, rows = torch.linalg.svd(shared, full_matrices=False)
    some = values > 1e-6 * values[:, :1]
    kept = rows * some[:, :, None]
    along, every = kept.mT @ kept, torch.eye(shared.shape[-1], dtype=shared.dtype)
    return torch.where(some.any(1)[:, None, None], along + (tau / across) ** 0.5 * (every - along), every)


def _of_algorithm_1(privacy: RecordPrivacy) -> dict[str, Any]:
    """Refuse noise that is not that of Algorithm 1.

    Raises:
        PrivacyError: another law.
    """
    if privacy.mechanism != "l2_laplace":
        raise PrivacyError(
            f"PPDMTL with guarantee='paper' adds noise of density exp(-b ||z||_2), mechanism 'l2_laplace'; the "
            f"releases have {privacy.mechanism!r}."
        )
    return {}
