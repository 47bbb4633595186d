"""PP-DMTL: private multi-task learning by asynchronous proximal gradient, with an untrusted server.

Xie, Baytas, Lin, Zhou: "Privacy-Preserving Distributed Multi-Task Learning with Asynchronous
Updates", KDD 2017.

    min_{P,Q} sum_t (1/n_t) sum_j l(x_tj . (p_t + q_t), y_tj) + lam r(P) + tau g(Q)     (Equation 2)
    W = P + Q

P couples the tasks and lives at the server, q_t is task t's own. Task t sends a noised gradient and
does not wait. The server takes one proximal step on all of P and returns p_t, which task t uses at
its next activation. At an activation of task t, by the lines of Algorithm 1:

    G_t = (1/n_t) sum_j clip_C(grad l(x_tj . (p_t + q_t), y_tj)) + z            lines 12, 13
    q_t = q_t - a1 (G_t + tau q_t),   or the proximal step of another g         line 10
    S   = S with G_t in column t                                                server, 1st step
    P   = prox_{a2 lam r}(P - a2 S)                                             server, 2nd step
    p_t of the task is column t of P, until its next activation                 server, 3rd step

The paper moves q_t before it takes the gradient (line 10 before 12), adds z1 to the point of the
gradient (lines 11, 12), and starts q_t at the single-task fit. Here G_t is taken at the q_t of
before, without z1, and q_t starts at 0. Personal models take the last P.

In the state ``shared`` is P, ``stale`` is S, ``q`` has the q_t, and ``returned`` the columns p_t
that the tasks got last. Tensors hold a task in a row, so they are the transposes of the paper's
matrices: column t of P is row t here. The clip, the division by n_t and the noise z are those of
the channel (:mod:`fedmtl.privacy.activation_channel`).

The protected unit is a record of a task, the observers are the server and the other tasks,
neighbours differ by one record replaced. The accounting of the paper bounds one step of q_t from
the *same* q_t, but there q_t moves on the raw records, a private state that nothing noises, so its
sensitivity grows along the run (:mod:`fedmtl.contrib.published.pp_dmtl`). Here one clipped, noised
gradient G_t serves both blocks, since grad_p l(p + q) = grad_q l(p + q). P, S, the returned columns
and q_t are then functions of releases only. After training, q_t is fitted once to the raw records,
which is Equation 8, and never sent. The paper allows to solve it at every activation; then raw
records would enter the point at which the next gradient is released. The paper's other end of a
run, ||W^(k+1) - W^k|| <= nu, reads the q_t; here a run ends at its caps, to which the noise is
calibrated.
:class:`~fedmtl.contrib.shared_directions.SharedDirections`, which is not in the paper, fits q_t
otherwise.

    Trainer(algorithm=PPDMTL(loss="squared", feature_norm=1.0, target=3.0), data=data,
            model=models.linear_regression(bias=False),
            schedule=Latencies(latency=1.0, per_client=6),
            privacy=RecordPrivacy(clip_norm=1.0, epsilon=10.0), rounds=999).fit()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..._check import Count, NonNegative, Positive, Rate
from ...errors import ConfigError
from ...local.proximal import PENALTIES, OwnPenalty, SharedPenalty
from ...privacy import GradientPlan, RecordPrivacy
from ...schedules import BoundSchedule
from ..base import Problem, State
from ..linear.solve import fit_own
from ..local_fit import LocalFit
from ..one_at_a_time import Answer, Array, Arrays, OneAtATime, row_of, with_row
from .step_size import choose_step


@dataclass(frozen=True, kw_only=True)
class PPDMTL(OneAtATime):
    """Trains linear models of all tasks asynchronously, by private gradients (Xie et al. 2017,
    Algorithm 1).

    Args:
        loss: ``"logistic"``, or ``"squared"``: (y - w.x)^2, without 1/2.
        lam: lambda, the strength of r(P). The server's proximal threshold, the paper's mu, is ``a2
            lam``.
        tau: the strength of g(Q); the paper's lambda of Algorithm 1, line 9.
        a1: step size of q_t. 0 leaves q_t at its start until the refinement: best with few answers.
        a2: step size of P, at most ``2 / ((delay + 1) L)``; ``None`` takes half of that. ``"auto"``
            takes the best one, with the ``delay`` for which it is stable, in a simulation of the
            schedule and the noise on synthetic tasks of the same sizes, which reads nothing private
            (:func:`~fedmtl.algorithms.pp_dmtl.step_size.choose_step`). Most gradients are far less
            old than the oldest, so a larger step is stable than in the worst case. The server
            repeats a task's last gradient at every activation, so a column moves on by gradients
            taken long before.
        delay: the greatest age, in activations, of a gradient still in use: a public property of
            the schedule, :func:`.step_size.largest_delay`. ``None``: 2 T, for tasks that act in
            turn.
            With latencies between 0 and a maximum it is about 4 T, and with stragglers more. If it
            is too small, P may oscillate with growing size. (For r = 0,
            ``a2 < 3 / (2 (delay - 1) L)`` is stable for all delays up to that: Erbe, Xia and Yu,
            1995, on the delay equation x_{n+1} - x_n = -a x_{n-k}.)
        smoothness: L, a Lipschitz constant of the gradient of every task's mean loss. ``None``:
            that of the domain, B^2 / 4 for the logistic and 2 B^2 for the squared loss with B the
            largest norm of a row. A smaller one must be public knowledge; only stability rests on
            it.
        feature_norm: B, a public bound on the L2 norm of a record's features, which are scaled down
            to it in training and wherever the models are used; the 1 of a bias stays. ``"auto"``:
            the bound that the data state. If they state none, a run without privacy leaves all rows
            as they are, and one with privacy is refused. None: no bound, without privacy only.
        target: a public bound on abs(y) of the squared loss, at which training targets are cut off.
            ``"auto"``: that of the data, if they state one. None: 2^40.
        penalty: r, ``"nuclear"`` (low rank) or ``"l21"`` (features used by all tasks or none: L2
            norms of rows of P).
        own_penalty: g, ``"frobenius"`` (||Q||_F^2 / 2), ``"l1"`` or ``"l2"`` (norms of columns:
            tasks that differ).
        refine: fit q_t to the raw records for the personal models (Equation 8); it is never sent.
        refine_tau: the strength of g in that fit, above 0. ``None``: ``tau``.
        batch_rate: q in (0, 1]: every answer takes a secret Poisson subsample of the task's
            records, each of them with this public probability, and divides by the constant q n_t.
            Pure epsilon of one answer falls from e to log(1 + q (exp(e) - 1)), and its noise at
            equal epsilon of the release grows by 1 / q.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import PPDMTL, PoissonClocks, RecordPrivacy, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=PPDMTL(lam=0.015),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=PoissonClocks(per_client=2),
        ...     privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        ...     rounds=8,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    loss: Literal["logistic", "squared"] = "logistic"
    lam: NonNegative = 0.015
    tau: NonNegative = 1e-3
    a1: NonNegative = 0.0
    a2: Positive | Literal["auto"] | None = None
    delay: Count | None = None
    smoothness: Positive | None = None
    penalty: SharedPenalty = "nuclear"
    own_penalty: OwnPenalty = "frobenius"
    refine: bool = True
    refine_tau: Positive | None = None
    batch_rate: Rate = 1.0

    by_client: ClassVar[tuple[str, ...]] = ("returned", "q")
    name = "pp_dmtl"
    title = "PP-DMTL"
    colour = "#3f51b5"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau == 0 and self.refine and not self.refine_tau:
            raise ConfigError(
                "PPDMTL.tau is 0, and the exact fit of q_t has no unique minimum without g; give "
                "tau above 0, or refine_tau for the refinement only."
            )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts at P = S = Q = 0; no data are read.

        The public state, (R, T, p) float64 of R replicates, one row for each task: ``shared`` P,
        ``stale`` S, ``returned`` the column that each task got last, ``q`` Q.

        Raises:
            ConfigError: a step size beyond the stable ones.
        """
        self.step_size(problem)
        shape = (replicates, problem.clients, problem.dimension)
        names = ("shared", "stale", "returned", "q")
        public = {name: torch.zeros(shape, dtype=torch.float64) for name in names}
        return State(public, problem.client_store({}))

    def constants(self, problem: Problem) -> float:
        """Returns a2, the step size of P."""
        return self.step_size(problem)

    def query_point(self, constants: float, server: Arrays, rows: Arrays) -> Array:
        """Returns p_t + q_t, (p,): the point of the gradient of Algorithm 1, line 12, but before
        the step of q_t and without z1."""
        point: Array = rows["returned"] + rows["q"]
        return point

    def server_update(
        self, constants: float, server: Arrays, rows: Arrays, answer: Answer
    ) -> tuple[Arrays, Arrays]:
        """Moves the task's q_t along its noised gradient G_t, and the server's P along S."""
        new_rows = {}
        if self.a1 > 0:  # with a1 = 0, the default, q_t is fitted once, after training
            new_rows["q"] = self.own_step(rows["q"], answer.gradient)
        new_server, returned = self.proximal_step(constants, server, answer)
        return new_server, new_rows | {"returned": returned}

    def own_step(self, q: Array, gradient: Array) -> Array:
        """Returns the own part of a task after a step along a gradient.

        Args:
            q: (p,) float64, q_t.
            gradient: (p,) float64, the noised G_t.

        Returns:
            (p,) float64.
        """
        if self.own_penalty == "frobenius":
            moved: Array = q - self.a1 * (gradient + self.tau * q)  # line 10
            return moved
        # one task is one row; the penalties are of the last two axes
        stepped = torch.from_numpy(q - self.a1 * gradient)[..., None, :]
        prox = PENALTIES[self.own_penalty].prox(stepped, self.a1 * self.tau)
        return prox[..., 0, :].numpy()

    def proximal_step(
        self, a2: float, server: Arrays, answer: Answer
    ) -> tuple[dict[str, Array], Array]:
        """Takes the three steps of the server on the gradient G_t of a task.

        Args:
            a2: the step size.
            server: P and S.
            answer: with G_t.

        Returns:
            The new P and S (T, p); and the row of P that goes back to the task, (p,).
        """
        stale = with_row(server["stale"], answer.client, answer.gradient)  # 1st step: G_t is in S
        prox = PENALTIES[self.penalty].prox
        moved = torch.from_numpy(server["shared"] - a2 * stale)
        shared = prox(moved, a2 * self.lam).numpy()  # 2nd step
        returned = row_of(shared, answer.client)  # 3rd step: p_t goes back
        return {"shared": shared, "stale": stale}, returned

    def curvature(self, problem: Problem) -> float:
        """Returns L, a bound on the curvature of every task's loss: ``smoothness``, or that of the
        domain.

        Args:
            problem: of the run; its public bounds on rows are read.
        """
        if self.smoothness is not None:
            return self.smoothness
        return self.linear_loss.smoothness(self.largest_row(problem))

    def step_size(self, problem: Problem) -> float:
        """Returns a2.

        Args:
            problem: of the run.

        Raises:
            ConfigError: a step size beyond the stable ones.
        """
        if self.a2 == "auto":
            filled_in = "PPDMTL.a2 is 'auto', which a Trainer fills in"
            raise ConfigError(f"{filled_in}; give a number, or resolve_auto().")
        smooth = self.curvature(problem)
        delay = self.delay
        if delay is None:
            delay = 2 * problem.clients
        largest = 2.0 / ((delay + 1) * smooth)
        a2 = self.a2
        if a2 is None:
            a2 = largest / 2
        if a2 > largest * (1 + 1e-9):
            raise ConfigError(
                f"PPDMTL.a2 is {a2:g}; with {problem.clients:,} tasks, delay = {delay} and "
                f"L = {smooth:g} it must be at most 2 / ((delay + 1) L) = {largest:.4g}: the "
                "server repeats a task's last gradient at every activation, and one is up to that "
                "many activations old. A smaller public bound on the curvature may be given as "
                "smoothness."
            )
        if self.a1 * (smooth + self.tau) > 1 + 1e-9:
            most = f"1 / (L + tau) = {1 / (smooth + self.tau):.4g}"
            given = f"PPDMTL.a1 is {self.a1:g}; with L = {smooth:g}"
            raise ConfigError(f"{given} it must be at most {most}.")
        return a2

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans mean gradients of the rows within the bound of the domain, see ``batch_rate``."""
        (plan,) = super().plan(problem, schedule)
        return (replace(plan, rate=self.batch_rate),)

    def resolve_auto(
        self, problem: Problem, schedule: BoundSchedule, privacy: Sequence[Any]
    ) -> PPDMTL:
        """Fills in the ``"auto"`` settings from public bounds, sizes and the schedule.

        With several budgets a2 is the smallest of their choices.

        Returns:
            The settings with numbers for a2 and ``delay``.

        Raises:
            ConfigError: no bound on rows, with privacy.
        """
        resolved = super().resolve_auto(problem, schedule, privacy)
        if resolved.a2 != "auto":
            return resolved
        budgets: list[RecordPrivacy | None] = []
        for settings in privacy:
            if settings not in budgets:
                budgets.append(settings)
        choices = [choose_step(resolved, problem, schedule, settings) for settings in budgets]
        a2, delay = min(choices)
        return replace(resolved, a2=a2, delay=delay)

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the models w_t = p_t + q_t of ``clients`` in every replicate, (R, k, p).

        With ``refine`` each q_t is fitted to the raw records.
        """
        shared = state.public["shared"][:, clients]
        own = self._own(state)[:, clients]
        if self.refine:
            data = self.data(problem)
            loss = self.linear_loss
            tau = self.refine_tau or self.tau
            for k, t in enumerate(clients.tolist()):
                p = shared[:, k]
                # Equation 8
                own[:, k] = fit_own(loss, data.x[t], data.y[t], p, tau, self.own_penalty)
        return (shared + own).to(problem.initial)

    def _own(self, state: State) -> Tensor:
        """Returns Q (R, T, p)."""
        return state.public["q"]

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns P and Q, one row for each task, (T, p) float64, with W = P + Q the models.

        P is made of releases. Its row space, the first rows of V^T of ``torch.linalg.svd(P)``, has
        the directions that the tasks share, and P P^T relates the tasks. Q is each task's own; it
        includes the refinement, and is not private.
        """
        shared = state.public["shared"][0].clone()
        return {"P": shared, "Q": personal.double() - shared}

    def local_baseline(self) -> LocalFit:
        """Returns the ridge fit of a task's own records."""
        ridge = self.refine_tau or self.tau or 0.01
        if self.loss == "squared":
            ridge /= 2  # the loss here has no 1/2, that of the fit has
        return LocalFit(
            loss=self.loss, ridge=ridge, feature_norm=self.feature_norm, target=self.target
        )

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Returns the objective of equation (2) on the training records, (R,) float64.

        It is not private.
        """
        data = self.data(problem)
        own = self._own(state)
        shared = state.public["shared"]
        total = self.lam * PENALTIES[self.penalty].value(shared)
        total = total + self.tau * PENALTIES[self.own_penalty].value(own)
        for t, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
            total = total + self.linear_loss.value(shared[:, t] + own[:, t], x, y).mean(1)
        return total
