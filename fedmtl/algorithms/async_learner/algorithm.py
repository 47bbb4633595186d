"""The asynchronous central learner of Farokhi, Wu, Smith, Kaafar.

"The Cost of Privacy in Asynchronous Differentially-Private Machine Learning", IEEE TIFS 2021,
Algorithm 1.

    min_{||theta||_inf <= theta_max} f(theta) = g(theta) + (1/n) sum_j l(theta . x_j, y_j)  (1), (2)

over all records j, with g = reg ||theta||^2, which is sigma-strongly convex with sigma = 2 reg.
Owners answer one at a time, when their own clocks tick; the learner keeps a central model theta_L
and a copy theta_i for each of the N owners, all 0 at first. At a tick owner i answers with the
noised mean gradient of its n_i records (x_j, y_j), and the models move:

    tbar    = (theta_L + theta_i) / 2                                                          (6)
    Q_i     = (1 / n_i) sum_j clip_C(grad l(tbar . x_j, y_j))                                  (3)
    Qbar_i  = Q_i + w,   w the noise of the release, i.i.d. Laplace coordinates in the paper   (4)
    theta_i = Proj[ tbar - a N ( grad g(tbar) / (2 N) + (n_i / n) Qbar_i ) ]                    (5)
    theta_L = Proj[ tbar - (a / 2) grad g(tbar) ]                                               (7')

where a = rho / (T^2 sigma); the default is a = kappa (N + 1) / (2 T). ``query_point`` has (6), the
channel computes (3) and (4) there, and ``server_update`` has (5) and (7'). In the state ``theta_l``
is theta_L, and ``theta`` has the theta_i. Every owner's model is theta_L. The paper bounds
gradients by a constant Xi and makes the noise for T answers of each owner; here gradients are
clipped, and the noise is for the owner's cap.
The printed (7) differs, see :mod:`fedmtl.contrib.published.async_learner`.

    Trainer(algorithm=AsyncLearner(kappa=5.0), data=data,
            model=models.linear_regression(bias=False),
            schedule=PoissonClocks(per_client=10),
            privacy=RecordPrivacy(clip_norm=5.0, epsilon=1.0), rounds=999).fit()

The protected unit is a record; neighbours replace one. Observers are the learner, the other owners
and the public: theta_L and every theta_i are functions of releases.

Owners that always answer together (Remark 2) are one owner with the records of all, a client of the
data. Owners that drop out (Remark 4) are not weighed by their frequencies, which the learner would
have to know before the run: caps (``per_client``) give all owners the same number of answers in the
end.

:mod:`fedmtl.contrib.one_answer` has two methods that are not in the paper: all owners are asked the
same question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from ..._check import Count, Positive
from ...errors import ConfigError
from ..base import Problem, State
from ..linear.data import LossName
from ..one_at_a_time import Answer, Array, Arrays
from .central import CentralLearner


@dataclass(frozen=True)
class StepSizes:
    """The public constants of equations (5) and (7').

    They are arrays of the shape of a model, or of none: NumPy broadcasts more slowly than it
    computes.

    Attributes:
        owner: 1 - a reg, since tbar - a N grad g(tbar) / (2 N) = (1 - a reg) tbar for grad g(tbar)
            = 2 reg tbar.
        central: likewise 1 - 2 a reg s, with s = 1/2 in (7').
        gradient: (N, p), a N n_i / n of each owner.
        low: -theta_max.
        high: theta_max.
        half: 1/2.
    """

    owner: Array
    central: Array
    gradient: Array
    low: Array
    high: Array
    half: Array

    def projected(self, theta: Array) -> Array:
        """Returns the nearest model (p,) within ``theta_max``."""
        return np.minimum(np.maximum(theta, self.low), self.high)


@dataclass(frozen=True, kw_only=True)
class AsyncLearner(CentralLearner):
    """Trains one linear model from the answers of owners that act one at a time (Farokhi et al.
    2021, Algorithm 1); all settings are public.

    Args:
        loss: ``"squared"``, ``"hinge"`` or ``"logistic"``; see
            :class:`~fedmtl.algorithms.linear.data.LinearLoss`. A squared loss whose gradients are
            clipped at C is a Huber loss, quadratic in a residual up to C / (2 ||x||).
        reg: g = reg ||theta||^2 (the bias included), above 0; sigma = 2 reg.
        theta_max, feature_norm, target: as for :class:`~.central.CentralLearner`.
        step_size: a = rho / (T^2 sigma) of equations (5) and (7'), above 0; ``"auto"``: kappa (N +
            1) / (2 T), for which the mean of the N + 1 models moves by kappa / 2 over a run, in
            units of gradient flow.
        kappa: of ``step_size="auto"``, above 0; None: 10.
        horizon: T, planned number of ticks; None: the problem's number of activations.

    Raises:
        ConfigError: an impossible value.

    Example:
        >>> from fedmtl import AsyncLearner, PoissonClocks, RecordPrivacy, Trainer
        >>> from fedmtl import load_data, models
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
    kappa: Positive | None = None
    horizon: Count | None = None

    usual_kappa: ClassVar[float] = 10.0
    by_client = ("theta",)
    name = "async_learner"
    title = "Asynchronous learner"
    colour = "#00796b"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in {"kappa": self.kappa, "horizon": self.horizon}.items():
            if value is not None and self.step_size != "auto":
                raise ConfigError(
                    f"AsyncLearner.{name} is {value!r}, which chooses the automatic step size, but "
                    f"step_size is {self.step_size!r}; leave one of the two out."
                )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts all models at 0: theta_L (R, p) and the theta_i (R, N, p), float64."""
        p = self.data(problem).dimension
        shapes = {"theta_l": (replicates, p), "theta": (replicates, problem.clients, p)}
        public = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return State(public, problem.client_store({}))

    def constants(self, problem: Problem) -> StepSizes:
        """Returns the constants of equations (5) and (7'), from public numbers of records."""
        counts = problem.data.train.counts.numpy()
        owners = len(counts)
        a = self.effective_step(owners, problem.rounds)
        gradient = (a * owners * counts / counts.sum())[:, None]
        return StepSizes(
            owner=np.array(1 - a * self.reg),
            central=np.array(1 - 2 * a * self.reg * self.central_share(owners)),
            gradient=np.repeat(gradient, self.data(problem).dimension, 1),
            low=np.array(-self.theta_max),
            high=np.array(self.theta_max),
            half=np.array(0.5),
        )

    def query_point(self, constants: StepSizes, server: Arrays, rows: Arrays) -> Array:
        """Returns tbar, the mean of the central model and the owner's, (p,)."""
        tbar: Array = (server["theta_l"] + rows["theta"]) * constants.half  # (6)
        return tbar

    def server_update(
        self, constants: StepSizes, server: Arrays, rows: Arrays, answer: Answer
    ) -> tuple[Arrays, Arrays]:
        """Moves the owner's model along its answer, and the central one to the regularizer's
        minimum."""
        tbar = answer.point
        step = constants.gradient.take(answer.client, 0) * answer.gradient
        theta = constants.projected(constants.owner * tbar - step)  # (5)
        theta_l = constants.projected(constants.central * tbar)  # (7')
        return {"theta_l": theta_l}, {"theta": theta}

    def effective_step(self, owners: int, activations: int) -> float:
        """Returns a, the step size of equations (5) and (7').

        Args:
            owners: N.
            activations: T, the number of answers in all, if ``horizon`` is None.
        """
        if self.step_size != "auto":
            return float(self.step_size)
        kappa = self.kappa or self.usual_kappa
        horizon = self.horizon or activations
        return kappa * (owners + 1) / (2 * horizon)

    def central_share(self, owners: int) -> float:
        """Returns the factor of a grad g(tbar) in the central model's step: 1/2 in (7').

        The published form of the method has another one, see
        :mod:`fedmtl.contrib.published.async_learner`.

        Args:
            owners: N.
        """
        return 0.5
