"""One central model from answers that do not wait for one another: a public start, and noised moments.

Neither is in the paper. An owner's answers are all to the same public question, so that one of them, made when the
owner wakes, can spend the whole budget, and the learner solves for the model instead of stepping towards it. It knows
the noise, and weighs every owner by what its answers say: those with few records or a small budget count less.

*Public start.* theta_0 minimizes f on the public rows. Owner i releases the mean of its records' clipped gradients at
theta_0, that is the residual statistics -2 sum_j x_j (y_j - x_j theta_0) / n_i for the squared loss: the release of
equation (4) at another point, whose sensitivity is 2 C / n_i for the same reason (one record is replaced, and the
gradient of either is within C). With c_0 the mean of the public rows' clipped gradients at theta_0, A the derivative of
that mean (rows that are clipped add nothing to it), S and S_c the covariances of a gradient before and after the clip
and H the second derivative of f, all of them of the public rows, and v_i the variance of the noise, the model is

    theta ~ N(theta_0, H^-1 S H^-1 / n_0),    Qbar_i ~ N(c_0 - A (theta - theta_0), S_c / n_i + v_i I),

and the learner takes the mean of theta given the answers. Without information from the owners it is theta_0; without
clip and noise, and with owners whose second moments are those of the public rows, it is the fit of all rows.

*Moments* (AdaSSP; Wang, "Revisiting differentially private linear regression", UAI 2018), without public rows: owner i
releases the mean of the clipped vectors (svec(x_j x_j'), x_j y_j), whose sensitivity is 2 C / n_i as well, in one
release. With G and b their weighted means, theta = (G + (reg + ridge) I)^-1 b, where the ridge is the edge of the
spectrum of the noise in G, less the smallest eigenvalue of G. Wang releases that eigenvalue apart; here it is that of
the noised G.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import one_of
from ...errors import ConfigError
from ...privacy import Channel, GradientMessage, GradientPlan, RecordGradients
from ...privacy.channel import GRADIENT
from ...privacy.clip import Clip, clip_rows
from ...privacy.noise.symmetric import smat, svec
from ...schedules import Block, BoundSchedule
from ..base import Own, Problem, Released, Round, State
from ..linear.data import DomainBound, LinearData, LinearLoss, prepared
from ..linear.solve import minimize
from ..store import ClientStore
from .central import CentralLearner
from .gradients import MeanGradients

logger = logging.getLogger("fedmtl")
Array = np.ndarray
_LEAST = 1e-12  # of the largest eigenvalue: variances below it are rounding


class OneAnswer(CentralLearner):
    """A learner whose owners are all asked the same, and answer once or a few times; several answers are averaged."""

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start from what is public."""
        return State(
            self.start(self.data(problem), self._public(problem), replicates), ClientStore(problem.clients, {})
        )

    def start(self, data: LinearData, public: LinearData | None, replicates: int) -> dict[str, Tensor]:
        """Return the public state of R = ``replicates`` runs before any answer; ``public`` has the public rows.

        It is theta_l (R, p), at theta_0 (p,); and of each owner the sum of its answers (R, n, size), the sum of the
        variances of their noise and their number (R, n).
        """
        theta, r, n = self.first(data, public), replicates, len(data.x)
        shapes = {"sums": (r, n, self.size(data.dimension)), "variances": (r, n), "answers": (r, n)}
        empty = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return {"theta_l": theta.repeat(r, 1), "theta_0": theta.clone(), **empty}

    @abstractmethod
    def first(self, data: LinearData, public: LinearData | None) -> Tensor:
        """Return theta_0 (p,)."""

    def size(self, dimension: int) -> int:
        """Return the length of an answer for records of ``dimension`` features."""
        return dimension

    @abstractmethod
    def asked(self, data: LinearData, public: Mapping[str, Tensor], *, clipped: bool) -> GradientMessage:
        """Return what all owners answer; ``clipped`` where the channel clips at all."""

    def prior(self, public: LinearData | None, clip: Clip | None) -> PublicPrior | None:
        """Return what the public rows say under this clip; None where they are not used."""
        return None

    @abstractmethod
    def solve(self, state: dict[str, Tensor], counts: Tensor, prior: PublicPrior | None, clip: Clip | None) -> None:
        """Set theta_l (R, p) to what all answers so far say, of owners with ``counts`` (n,) records."""

    def _public(self, problem: Problem) -> LinearData | None:
        """Return the public rows of the data, where they are used."""
        return None

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, GradientMessage], Own]:
        return {GRADIENT: self.asked(self.data(problem), public, clipped=round.clips)}, own

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        assert released.clients is not None
        new = {name: value.clone() for name, value in public.items()}
        add_answers(
            new, released.clients.numpy(), released.values[GRADIENT].numpy()[None], released.noise_std(GRADIENT)
        )
        self._solve(problem, new, released.clip)
        return new

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Take all answers of the block, and solve once."""
        self.check_bound(channel)
        message = self.asked(self.data(problem), state.public, clipped=channel.bound < math.inf)
        self.hear(state.public, block.client.numpy().T, channel, message)
        self._solve(problem, state.public, channel.sums.clip)
        return state

    def hear(self, public: dict[str, Tensor], clients: Array, channel: Channel, message: GradientMessage) -> None:
        """Take the answers to ``message`` of the activations ``clients`` (S, R) that have begun."""
        for who, answer in zip(clients, channel.answers(message), strict=True):
            add_answers(public, who, answer, channel.noise_std(GRADIENT))

    def simulated(self, data: LinearData, public: LinearData | None, clients: Tensor, channel: Channel) -> Tensor:
        state = self.start(data, public, len(clients))
        channel.begin(0, clients)
        self.hear(state, clients.numpy().T, channel, self.asked(data, state, clipped=channel.bound < math.inf))
        self.solve(state, data.counts, self.prior(public, channel.sums.clip), channel.sums.clip)
        return state["theta_l"]

    def _solve(self, problem: Problem, public: dict[str, Tensor], clip: Clip | None) -> None:
        prior = prepared(problem, (self, "prior", clip), lambda: self.prior(self._public(problem), clip))
        self.solve(public, problem.data.train.counts, prior, clip)


@dataclass(frozen=True, kw_only=True)
class PublicStart(OneAnswer):
    """Owners answer at the fit of the public rows, and the learner takes the posterior mean; see :mod:`.one_answer`.

    One answer of each owner (``per_client=1`` of the clocks) is best.

    Args:
        loss: ``"squared"`` or ``"logistic"``; see :class:`~fedmtl.algorithms.linear.data.LinearLoss`.
        reg: g = reg ||theta||^2 (the bias included), above 0.
        theta_max: bound on ||theta||_inf, above 0.
        cap: most answers of an owner, to which its noise is calibrated; None takes the schedule's caps.
        bound: what bounds one record's gradient, ``"clip"`` or ``"domain"``; see :class:`AsyncLearner`.
        domain: public bounds on records, enforced on the rows; needed for ``bound="domain"``. ``"auto"``: those that
            the data state.

    Raises:
        ConfigError: an impossible value.
    """

    loss: Literal["squared", "logistic"] = "squared"
    reg: float = 1e-5
    theta_max: float = 10.0
    cap: int | None = None
    bound: Literal["clip", "domain"] = "clip"
    domain: DomainBound | Literal["auto"] | None = None

    name = "public_start"

    def __post_init__(self) -> None:
        one_of(self, ("squared", "logistic"), loss=self.loss)  # the hinge has no second derivative
        super().__post_init__()

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        rows = sum(map(len, self._public(problem).y))
        (plan,) = super().plan(problem, schedule)
        return (replace(plan, notes=(f"{rows} public rows, to which the start and the prior are fitted",)),)

    def first(self, data: LinearData, public: LinearData | None) -> Tensor:
        return torch.zeros(data.dimension, dtype=torch.float64) if public is None else public_fit(self, public)

    def asked(self, data: LinearData, public: Mapping[str, Tensor], *, clipped: bool) -> GradientMessage:
        points = public["theta_0"].expand(len(public["theta_l"]), -1).numpy()
        gradients = MeanGradients(data, LinearLoss(self.loss))
        return gradients.message(points, clipped=clipped and self.bound == "clip")

    def prior(self, public: LinearData | None, clip: Clip | None) -> PublicPrior | None:
        assert public is not None
        return PublicPrior.of(self, public, clip)

    def solve(self, state: dict[str, Tensor], counts: Tensor, prior: PublicPrior | None, clip: Clip | None) -> None:
        assert prior is not None
        state["theta_l"] = prior.solve(state, counts)

    def _public(self, problem: Problem) -> LinearData:
        """Return the public rows of the data, within the domain where one is given."""
        examples = problem.data.public
        if examples is None:
            raise ConfigError(
                f"PublicStart needs public rows, and {problem.data.name} has none; use Moments, which needs none."
            )
        return prepared(problem, (self, "public rows"), lambda: self.bounded(LinearData.of_examples(problem, examples)))


@dataclass(frozen=True, kw_only=True)
class Moments(OneAnswer):
    """Owners release second moments, and the learner solves a ridge regression (AdaSSP); see :mod:`.one_answer`.

    One answer of each owner (``per_client=1`` of the clocks) is best.

    Args:
        reg: g = reg ||theta||^2 (the bias included), above 0.
        theta_max: bound on ||theta||_inf, above 0.
        cap: most answers of an owner, to which its noise is calibrated; None takes the schedule's caps.
        domain: public bounds on records, enforced on the rows. ``"auto"``: those that the data state.

    Raises:
        ConfigError: an impossible value.
    """

    reg: float = 1e-5
    theta_max: float = 10.0
    cap: int | None = None
    domain: DomainBound | Literal["auto"] | None = None

    name = "moments"
    loss = "squared"

    def released(self, data: LinearData, ids: tuple[str, ...], caps: Array) -> GradientPlan:
        return replace(super().released(data, ids, caps), dimension=self.size(data.dimension), x=None)

    def first(self, data: LinearData, public: LinearData | None) -> Tensor:
        return torch.zeros(data.dimension, dtype=torch.float64)

    def size(self, dimension: int) -> int:
        return moments_size(dimension)

    def asked(self, data: LinearData, public: Mapping[str, Tensor], *, clipped: bool) -> GradientMessage:
        return moments_message(data)

    def solve(self, state: dict[str, Tensor], counts: Tensor, prior: PublicPrior | None, clip: Clip | None) -> None:
        state["theta_l"] = moments_model(self, state, counts, state["theta_l"].shape[1], clip)


def add_answers(state: dict[str, Tensor], who: Array, answer: Array, std: Tensor) -> None:
    """Add the answers (R, size) of owners ``who`` (R,), -1 for none, whose noise has the deviations ``std`` (R,)."""
    some = torch.from_numpy(np.flatnonzero(who >= 0))
    at = some, torch.from_numpy(who)[some]
    state["sums"][at] += torch.from_numpy(answer)[some]
    state["variances"][at] += std[some] ** 2
    state["answers"][at] += 1


def means_of(state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return each owner's mean answer (R, n, size), the variance of its noise (R, n), and whether there is one."""
    number = state["answers"].clamp(min=1)
    return state["sums"] / number[:, :, None], state["variances"] / number**2, state["answers"] > 0


def public_fit(settings: CentralLearner, public: LinearData) -> Tensor:
    """Return theta_0 (p,), the exact minimizer of f on the public rows."""
    x, y = (part.numpy() for part in public.pooled())
    fit = minimize(LinearLoss(settings.loss), x, y, 2 * settings.reg, box=settings.theta_max)
    return torch.from_numpy(fit.theta)


@dataclass(frozen=True, eq=False)
class PublicPrior:
    """What public rows say of the model and of the owners' answers; every vector is in the eigenbasis of S_c.

    Attributes:
        theta: theta_0, (p,).
        basis: eigenvectors of S_c, (p, p).
        spread: its eigenvalues, (p,).
        centre: c_0, (p,).
        slope: A, (p, p), from a model to an answer.
        covariance: of the model, (p, p).
        theta_max: bound on ||theta||_inf.
    """

    theta: Tensor
    basis: Tensor
    spread: Tensor
    centre: Tensor
    slope: Tensor
    covariance: Tensor
    theta_max: float

    @classmethod
    def of(cls, settings: CentralLearner, public: LinearData, clip: Clip | None) -> PublicPrior:
        """Compute them from the public rows and the public clip."""
        theta, loss = public_fit(settings, public), LinearLoss(settings.loss)
        x, y = public.pooled()
        n, p = x.shape
        factors = loss.scale(theta[None], x, y)[0]
        curvature = torch.full_like(factors, 2.0) if loss.name == "squared" else factors.abs() * (1 - factors.abs())
        gradients = factors[:, None] * x
        counted = gradients if clip is None else clip_rows(gradients, clip)
        whole = (counted * gradients).sum(1) >= (1 - 1e-5) * gradients.square().sum(1)
        logger.info(
            "%.0f%% of %d public rows are clipped at the public start", 100 * float((~whole).double().mean()), n
        )
        freedom = n / max(n - p, 1)
        curved = curvature[:, None] * x
        inverse = torch.linalg.inv(curved.T @ x / n + 2 * settings.reg * torch.eye(p, dtype=torch.float64))
        spread, basis = torch.linalg.eigh(freedom * torch.cov(counted.T, correction=0).reshape(p, p))
        wide = freedom * torch.cov(gradients.T, correction=0).reshape(p, p)
        slope = (curved * whole[:, None]).T @ x / n
        floor = max(_LEAST * float(spread[-1]), 1e-300)
        return cls(
            theta, basis, spread.clamp(min=floor), counted.mean(0) @ basis, basis.T @ slope,
            inverse @ wide @ inverse / n, settings.theta_max,
        )  # fmt: skip

    def solve(self, state: dict[str, Tensor], counts: Tensor) -> Tensor:
        """Return the posterior mean (R, p), of owners with ``counts`` (n,) records."""
        means, noise, heard = means_of(state)
        information = heard[:, :, None] / (self.spread / counts.clamp(min=1)[:, None] + noise[:, :, None])
        push = (information * (self.centre - means @ self.basis)).sum(1)
        toward = self.covariance @ self.slope.T
        system = torch.eye(len(self.theta), dtype=torch.float64) + (toward * information.sum(1)[:, None]) @ self.slope
        moved = torch.linalg.solve(system, push @ toward.T)
        return (self.theta + moved).clamp(-self.theta_max, self.theta_max)


def moments_size(dimension: int) -> int:
    """Return the length of (svec(x x'), x y) for rows of ``dimension`` numbers."""
    return dimension * (dimension + 1) // 2 + dimension


def moments_message(data: LinearData) -> GradientMessage:
    """Return the vectors (svec(x_j x_j'), x_j y_j) of an owner's records, which the release clips."""

    def moments(client: int, which: Array, where: Array) -> Tensor:
        x, y = data.x[client], data.y[client]
        rows = torch.cat([svec(x[:, :, None] * x[:, None, :]), x * y[:, None]], dim=1)
        return rows.expand(len(where), -1, -1)

    return RecordGradients(moments)


def moments_model(
    settings: CentralLearner, state: dict[str, Tensor], counts: Tensor, dimension: int, clip: Clip | None
) -> Tensor:
    """Return (R, p): ridge regression on the owners' weighted moments, with a ridge that the noise asks for.

    An owner's weight is the inverse of the variance of its answer: of the noise, and at most C^2 / (size n_i) in a
    coordinate for its records being a sample.
    """
    means, noise, heard = means_of(state)
    size = means.shape[-1]
    sampling = (1.0 if clip is None else clip.bound) ** 2 / (size * counts.clamp(min=1))
    weights = heard / (sampling + noise)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
    mean = (weights[:, :, None] * means).sum(1)
    matrix, vector = smat(mean[:, : size - dimension]), mean[:, size - dimension :]
    edge = ((weights**2 * noise).sum(1) * 2 * dimension).sqrt()  # diagonal entries have the noise of a coordinate
    ridge = (edge - torch.linalg.eigvalsh(matrix)[:, 0]).clamp(min=0) * (edge > 0)
    ridge = torch.where(heard.any(1), ridge + settings.reg, 1.0)
    system = matrix + ridge[:, None, None] * torch.eye(dimension, dtype=torch.float64)
    return torch.linalg.solve(system, vector).clamp(-settings.theta_max, settings.theta_max)
