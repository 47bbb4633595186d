"""Learners that solve for the central model from single answers: public start, and noised moments.

The objective and the equations are those of :mod:`fedmtl.algorithms.async_learner.algorithm`;
neither learner is in that paper. An owner's answers are all to the same public question. One of
them, made when the owner wakes, can spend the whole budget, and the learner solves for the model
instead of stepping towards it. It knows the noise, and weighs every owner by the accuracy of its
answers: owners with few records or a small budget count less.

*Public start.* theta_0 minimizes f on the public rows. Owner i releases the mean of its records'
clipped gradients at theta_0. For the squared loss these are the residual statistics
-2 sum_j x_j (y_j - x_j theta_0) / n_i. It is the release of equation (4) at another point, with the
sensitivity 2 C / n_i for the same reason: one record is replaced, and the gradient of either is
within C. All of the following are of the public rows: c_0 is the mean of their clipped gradients at
theta_0, A the derivative of that mean (clipped rows add nothing to it), S and S_c the covariances
of a gradient before and after the clip, and H the second derivative of f. With v_i the variance of
the noise, the model is

    theta ~ N(theta_0, H^-1 S H^-1 / n_0)
    Qbar_i ~ N(c_0 - A (theta - theta_0), S_c / n_i + v_i I),

and the learner takes the mean of theta given the answers. Without information from the owners it is
theta_0; without clip and noise, and with owners whose second moments are those of the public rows,
it is the fit of all rows.

*Moments* (AdaSSP; Wang, "Revisiting differentially private linear regression", UAI 2018), without
public rows: owner i releases the mean of the clipped vectors (svec(x_j x_j'), x_j y_j) in one
release; its sensitivity is 2 C / n_i as well. With G and b their weighted means,
theta = (G + (reg + ridge) I)^-1 b. The ridge is the edge of the spectrum of the noise in G, less
the smallest eigenvalue of G. Wang releases that eigenvalue as well; here it is that of the noised
G.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..algorithms.async_learner.central import CentralLearner
from ..algorithms.base import Problem, Public, State
from ..algorithms.linear.data import LinearData, prepared
from ..algorithms.linear.solve import minimize
from ..algorithms.one_at_a_time import Answer, Array, Arrays
from ..errors import ConfigError
from ..privacy import ActivationChannel, GradientPlan, Gradients
from ..privacy.clip import Clip, clip_rows
from ..privacy.noise.symmetric import smat, svec
from ..schedules import Block, BoundSchedule

_LEAST = 1e-12  # of the largest eigenvalue: smaller variances are rounding


class OneAnswer(CentralLearner):
    """A learner that asks all owners the same question, once or a few times.

    Several answers of an owner are averaged.
    """

    by_client = ("sums", "variances", "answers")

    @abstractmethod
    def theta_0(self, problem: Problem) -> Tensor:
        """Returns the model before any answer, (p,).

        Args:
            problem: of the run.
        """

    @abstractmethod
    def model(self, problem: Problem, public: Public, counts: Tensor, clip: Clip | None) -> Tensor:
        """Returns the models (R, p) by all answers so far.

        Args:
            problem: of the run.
            public: the public state with the answers.
            counts: int64 (n,), the numbers of records.
            clip: of a record's gradient, public; None for none.
        """

    def size(self, dimension: int) -> int:
        """Returns the length of an answer.

        Args:
            dimension: p, the number of features of a record.
        """
        return dimension

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts from the public model theta_0.

        The public state, float64: ``theta_0`` (p,) and ``theta_l`` (R, p), the model; and for each
        owner ``sums`` (R, n, size) of its answers, ``variances`` (R, n), the sums of the variances
        of their noise, and ``answers`` (R, n), their number.
        """
        theta = self.theta_0(problem)
        owners = (replicates, problem.clients)
        public = {
            "theta_l": theta.repeat(replicates, 1),
            "theta_0": theta.clone(),
            "sums": torch.zeros(*owners, self.size(len(theta)), dtype=torch.float64),
            "variances": torch.zeros(owners, dtype=torch.float64),
            "answers": torch.zeros(owners, dtype=torch.float64),
        }
        return State(public, problem.client_store({}))

    def query_point(self, constants: None, server: Arrays, rows: Arrays) -> Array:
        """Returns theta_0, (p,), for every owner."""
        runs = len(rows["answers"])
        return np.broadcast_to(server["theta_0"], (runs, len(server["theta_0"])))

    def server_update(
        self, constants: None, server: Arrays, rows: Arrays, answer: Answer
    ) -> tuple[Arrays, Arrays]:
        """Adds an owner's answer to its others; the learner solves for the model in the end."""
        new_rows = {
            "sums": rows["sums"] + answer.gradient,
            "variances": rows["variances"] + answer.noise_std**2,
            "answers": rows["answers"] + 1,
        }
        return {}, new_rows

    def step(
        self, problem: Problem, state: State, block: Block, channel: ActivationChannel
    ) -> State:
        """Takes all answers of the block, and solves once."""
        state = super().step(problem, state, block, channel)
        counts = problem.data.train.counts
        theta = self.model(problem, state.public, counts, channel.records.clip)
        state.public["theta_l"] = theta
        return state


@dataclass(frozen=True, kw_only=True)
class PublicStart(OneAnswer):
    """Computes the posterior mean from answers at the fit of public rows, see :mod:`.one_answer`.

    One answer of each owner (``per_client=1`` of the clocks) is best.

    Args:
        loss: ``"squared"`` or ``"logistic"``; see
            :class:`~fedmtl.algorithms.linear.data.LinearLoss`.
        reg: g = reg ||theta||^2 (the bias included), above 0.
        theta_max: bound on ||theta||_inf, above 0.
        feature_norm: a public bound on the L1 norm of a record's features, as for
            :class:`AsyncLearner`.
        target: a public bound on abs(y) of the squared loss, likewise.

    Raises:
        ConfigError: an impossible value.

    Example:
        >>> from dataclasses import replace
        >>> from fedmtl import PoissonClocks, PublicStart, RecordPrivacy, Trainer, load_data, models
        >>> public = load_data("synthetic_tasks", tasks=4, seed=1).train
        >>> data = replace(load_data("synthetic_tasks", tasks=4), public=public)
        >>> trainer = Trainer(
        ...     algorithm=PublicStart(),
        ...     data=data,
        ...     model=models.linear_regression(bias=False),
        ...     schedule=PoissonClocks(per_client=1),
        ...     privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        ...     rounds=4,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    loss: Literal["squared", "logistic"] = "squared"  # the hinge has no second derivative
    name = "public_start"
    title = "Public start"
    colour = "#1b8a7a"

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans as :class:`OneAnswer`, and notes the public rows in the report."""
        rows = sum(map(len, self.public_rows(problem).y))
        (plan,) = super().plan(problem, schedule)
        note = f"{rows} public rows, to which the start and the prior are fitted"
        return (replace(plan, notes=(note,)),)

    def theta_0(self, problem: Problem) -> Tensor:
        """Returns the fit of the public rows, (p,)."""
        x, y = self.public_rows(problem).pooled()
        ridge = 2 * self.reg
        fit = minimize(self.linear_loss, x.numpy(), y.numpy(), ridge, box=self.theta_max)
        return torch.from_numpy(fit.theta)

    def model(self, problem: Problem, public: Public, counts: Tensor, clip: Clip | None) -> Tensor:
        """Returns the posterior mean (R, p): of the prior by the public rows, given the owners'
        answers.
        """
        theta = public["theta_0"]
        x, y = self.public_rows(problem).pooled()
        n, p = x.shape
        freedom = n / max(n - p, 1)
        eye = torch.eye(p, dtype=torch.float64)
        # the covariance of the model by the public rows: H^-1 S H^-1 / n_0
        factors = self.linear_loss.factors_of(theta[None], x, y)[0]
        bend = torch.full_like(factors, 2.0)  # the second derivatives of the squared loss
        if self.loss == "logistic":
            bend = factors.abs() * (1 - factors.abs())
        curved = bend[:, None] * x
        gradients = factors[:, None] * x
        inverse = torch.linalg.inv(curved.T @ x / n + 2 * self.reg * eye)
        moment = freedom * torch.cov(gradients.T, correction=0).reshape(p, p)
        covariance = inverse @ moment @ inverse / n
        # c_0, A and S_c of the owners' answers, with the eigenvectors of S_c for axes
        counted = gradients
        if clip is not None:
            counted = clip_rows(gradients, clip)
        whole = (counted * gradients).sum(1) >= (1 - 1e-5) * gradients.square().sum(1)
        moment = freedom * torch.cov(counted.T, correction=0).reshape(p, p)
        spread, basis = torch.linalg.eigh(moment)
        spread = spread.clamp(min=max(_LEAST * float(spread[-1]), 1e-300))
        centre = counted.mean(0) @ basis
        slope = basis.T @ ((curved * whole[:, None]).T @ x / n)
        # the mean of theta given the answers
        means, noise, heard = means_of(public)
        variances = spread / counts.clamp(min=1)[:, None] + noise[:, :, None]
        information = heard[:, :, None] / variances
        push = (information * (centre - means @ basis)).sum(1)
        toward = covariance @ slope.T
        system = eye + (toward * information.sum(1)[:, None]) @ slope
        moved = theta + torch.linalg.solve(system, push @ toward.T)
        return moved.clamp(-self.theta_max, self.theta_max)

    def public_rows(self, problem: Problem) -> LinearData:
        """Returns the public rows of the data, within the bounds.

        Args:
            problem: of the run.

        Raises:
            ConfigError: the data have no public rows.
        """
        examples = problem.data.public
        if examples is None:
            without = f"{problem.data.name} has none; use Moments, which needs none"
            raise ConfigError(f"PublicStart needs public rows, and {without}.")

        def bounded() -> LinearData:
            return self.bounded(LinearData.of(problem, examples), problem.data.domain)

        return prepared(problem, (self, "public"), bounded)


@dataclass(frozen=True, kw_only=True)
class Moments(OneAnswer):
    """Fits a ridge regression to released second moments (AdaSSP), see :mod:`.one_answer`.

    One answer of each owner (``per_client=1`` of the clocks) is best.

    Args:
        reg: g = reg ||theta||^2 (the bias included), above 0.
        theta_max: bound on ||theta||_inf, above 0.
        feature_norm: a public bound on the L1 norm of a record's features, as for
            :class:`AsyncLearner`.
        target: a public bound on abs(y) of the squared loss, likewise.

    Raises:
        ConfigError: an impossible value.

    Example:
        >>> from fedmtl import Moments, PoissonClocks, RecordPrivacy, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=Moments(),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=PoissonClocks(per_client=1),
        ...     privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        ...     rounds=4,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    name = "moments"
    title = "AdaSSP"
    colour = "#558b2f"
    loss = "squared"

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans one vector of moments for each record in place of a gradient."""
        (plan,) = super().plan(problem, schedule)
        return (replace(plan, dimension=self.size(plan.dimension), x=None),)

    def size(self, dimension: int) -> int:
        """Returns p (p + 1) / 2 + p, the length of a record's moments."""
        return dimension * (dimension + 1) // 2 + dimension

    def theta_0(self, problem: Problem) -> Tensor:
        """Returns zeros (p,): the moments do not depend on the point."""
        return torch.zeros(self.data(problem).dimension, dtype=torch.float64)

    def gradient_factors(self, x: Array, y: Array, points: Array) -> Gradients:
        """Returns the vectors (svec(x_j x_j'), x_j y_j) of an owner's records, at any point.

        The release clips them.
        """
        rows = torch.from_numpy(x)
        targets = torch.from_numpy(y).T
        products = svec(rows[:, :, None] * rows[:, None, :])
        moments = torch.cat([products, rows * targets], dim=1)
        return moments.expand(len(points), -1, -1)

    def model(self, problem: Problem, public: Public, counts: Tensor, clip: Clip | None) -> Tensor:
        """Returns the ridge regression (R, p) on the owners' weighted moments.

        The ridge follows from the noise. An owner's weight is the inverse of the variance of its
        answer: of the noise, and at most C^2 / (size n_i) in a coordinate for its records being a
        sample.
        """
        means, noise, heard = means_of(public)
        p = len(public["theta_0"])
        size = means.shape[-1]
        bound = 1.0
        if clip is not None:
            bound = clip.bound
        sampling = bound**2 / (size * counts.clamp(min=1))
        weights = heard / (sampling + noise)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
        mean = (weights[:, :, None] * means).sum(1)
        matrix = smat(mean[:, : size - p])  # G
        vector = mean[:, size - p :]  # b
        # the end of the spectrum of the noise, whose diagonal entries have that of a coordinate
        edge = ((weights**2 * noise).sum(1) * 2 * p).sqrt()
        ridge = (edge - torch.linalg.eigvalsh(matrix)[:, 0]).clamp(min=0) * (edge > 0)
        ridge = torch.where(heard.any(1), ridge + self.reg, 1.0)
        system = matrix + ridge[:, None, None] * torch.eye(p, dtype=torch.float64)
        return torch.linalg.solve(system, vector).clamp(-self.theta_max, self.theta_max)


def means_of(public: Public) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the mean answers (R, n, size), the variances of their noise, and a mask, (R, n) each.

    The mask is True for owners that have answered.
    """
    number = public["answers"].clamp(min=1)
    means = public["sums"] / number[:, :, None]
    variances = public["variances"] / number**2
    return means, variances, public["answers"] > 0
