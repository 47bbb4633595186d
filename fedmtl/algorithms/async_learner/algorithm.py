"""The asynchronous central learner of Farokhi, Wu, Smith, Kaafar.

"The Cost of Privacy in Asynchronous Differentially-Private Machine Learning", IEEE TIFS 2021, Algorithm 1.

    min_{||theta||_inf <= theta_max} f(theta) = g(theta) + (1/n) sum over all records l(theta . x, y)      (1), (2)

with g = reg ||theta||^2, which is sigma-strongly convex with sigma = 2 reg. Owners answer one at a time, when their
own clocks tick; the learner keeps a central model theta_L and a copy theta_i for each of the N owners, all 0 at first.
At a tick owner i answers with the noised mean gradient of its n_i records (x_j, y_j), and the models move:

    tbar    = (theta_L + theta_i) / 2                                                              (6)
    Q_i     = (1 / n_i) sum_j grad l(tbar . x_j, y_j)                                              (3)
    Qbar_i  = Q_i + w,   w the noise of the release, of i.i.d. Laplace coordinates in the paper    (4)
    theta_i = Proj[ tbar - a N ( grad g(tbar) / (2 N) + (n_i / n) Qbar_i ) ]                        (5)
    theta_L = Proj[ tbar - (a / 2) grad g(tbar) ]                                                   (7')

where a = rho / (T^2 sigma). The printed (7) differs, see :mod:`.published`.

    Trainer(algorithm=AsyncLearner(kappa=5.0), data=data, model=models.linear_regression(bias=False),
            schedule=PoissonClocks(per_client=10), privacy=RecordPrivacy(clip_norm=5.0, epsilon=1.0), rounds=999).fit()

The protected unit is a record; neighbours replace one. Observers are the learner, the other owners and the public:
theta_L and every theta_i are functions of releases.

:mod:`.one_answer` has two methods beside the paper's, of owners who are all asked the same and may answer once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import Count, Positive, Rate, positive_or
from ...errors import ConfigError
from ...privacy import GradientPlan
from ...schedules import BoundSchedule
from ..activations import Answers, client_rows
from ..base import Problem, State
from ..linear.data import LossName
from .central import CentralLearner
from .step_size import resolve_kappa

__all__ = ["AsyncLearner"]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class AsyncLearner(CentralLearner):
    """The asynchronous learner (Farokhi et al. 2021, Algorithm 1); all settings are public.

    Args:
        loss: ``"squared"``, ``"hinge"`` or ``"logistic"``; see :class:`~fedmtl.algorithms.linear.data.LinearLoss`. A
            squared loss whose gradients are clipped at C is a Huber loss, quadratic in a residual up to C / (2 ||x||).
        reg: g = reg ||theta||^2 (the bias included), above 0; sigma = 2 reg.
        theta_max, row_norm, target: as for :class:`~.central.CentralLearner`.
        step_size: a = rho / (T^2 sigma) of equations (5) and (7'), above 0; ``"auto"``: kappa (N + 1) / (2 T), for
            which the mean of the N + 1 models moves by kappa / 2 over a run, in units of gradient flow.
        kappa: of ``step_size="auto"``, above 0; several, one for each replicate; or ``"auto"``: chosen by noisy
            simulation on the public rows of the data, for the owners' sizes, caps and budgets (:meth:`resolve_auto`).
            None: 10.
        horizon: T, planned number of ticks; None: the problem's number of events.
        batch_rate: q in (0, 1]: every answer takes a secret Poisson subsample of the owner's records, each of them with
            this public probability, and divides by the constant q n_i. The privacy of an answer is amplified, and its
            noise at equal epsilon of the release grows by 1 / q. Not in the paper, whose query (3) is of all records.

    Raises:
        ConfigError: an impossible value.

    Example:
        >>> from fedmtl import AsyncLearner, PoissonClocks, RecordPrivacy, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=AsyncLearner(kappa=5.0),
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

    loss: LossName = "squared"
    step_size: Positive | Literal["auto"] = "auto"
    kappa: float | tuple[float, ...] | Literal["auto"] | None = None
    horizon: Count | None = None
    batch_rate: Rate = 1.0

    name, title, colour = "async_learner", "Asynchronous learner", "#00796b"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.kappa, Sequence) and not isinstance(self.kappa, str):
            object.__setattr__(self, "kappa", tuple(self.kappa))
        for kappa in self.kappa if isinstance(self.kappa, tuple) else (self.kappa,):
            if kappa is not None:
                positive_or(self, "auto", kappa=kappa)
        for name, value in {"kappa": self.kappa, "horizon": self.horizon}.items():
            if value is not None and self.step_size != "auto":
                raise ConfigError(
                    f"AsyncLearner.{name} is {value!r}, which chooses the automatic step size, but step_size is "
                    f"{self.step_size!r}; leave one of the two out."
                )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start all models at 0: theta_L (R, p) and the theta_i (R, N, p), float64."""
        if isinstance(self.kappa, tuple) and len(self.kappa) != replicates:
            raise ConfigError(f"AsyncLearner.kappa has {len(self.kappa)} values for {replicates} replicates.")
        self.effective_step(problem.clients, problem.rounds)  # refuses "auto"
        p = self.data(problem).dimension
        shapes = {"theta_l": (replicates, p), "theta": (replicates, problem.clients, p)}
        public = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return State(public, problem.client_store({}))

    def points(self, problem: Problem, public: Mapping[str, Tensor]) -> Callable[[Array], Array]:
        theta_l, theta, two = public["theta_l"].numpy(), client_rows(public["theta"]), np.array(2.0)
        return lambda at: (theta_l + theta.take(at, 0)) / two  # tbar, (6)

    def serve(self, problem: Problem, public: Mapping[str, Tensor]) -> Callable[[Answers], None]:
        theta_l, theta = public["theta_l"].numpy(), client_rows(public["theta"])
        counts, (runs, p) = problem.data.train.counts.numpy(), theta_l.shape
        owners, a = len(counts), np.full(runs, self.effective_step(len(counts), problem.rounds))
        # operands of the shape of a model, or of none: broadcasting costs NumPy more than the arithmetic
        share, own_step, central_step = (
            np.repeat(each[:, None], p, 1)
            for each in (counts / counts.sum(), a * owners, a * self.central_share(owners))
        )
        of_g, two_n, low, high = map(np.array, (2 * self.reg, 2.0 * owners, -self.theta_max, self.theta_max))

        def serve(answers: Answers) -> None:
            tbar, slope = answers.points, of_g * answers.points  # of g
            owned = tbar - own_step[answers.runs] * (slope / two_n + share.take(answers.clients, 0) * answers.values)
            theta[answers.at] = np.minimum(np.maximum(owned, low), high)  # (5)
            central = tbar - central_step[answers.runs] * slope
            theta_l[answers.runs] = np.minimum(np.maximum(central, low), high)  # (7')

        return serve

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

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean gradients of the rows, of subsamples of them with ``batch_rate``."""
        (plan,) = super().plan(problem, schedule)
        return (replace(plan, rate=self.batch_rate),)

    def resolve_auto(self, problem: Problem, schedule: BoundSchedule, privacy: Sequence[Any]) -> AsyncLearner:
        """Return these settings with the ``"auto"`` ones filled in from the data's public rows and bounds.

        Raises:
            ConfigError: the data have no public rows.
        """
        resolved = super().resolve_auto(problem, schedule, privacy)
        return resolve_kappa(resolved, problem, schedule, privacy) if resolved.kappa == "auto" else resolved
