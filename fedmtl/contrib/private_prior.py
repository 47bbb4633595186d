"""The private prior: tasks fit themselves under a prior from one release of their directions.

Empirical Bayes with one private step. Local learning, w_i = argmin_w L_i(w) + (ridge / 2) ||w||^2,
is the posterior mode of a task whose model is drawn from N(0, t I). Tasks that have something in
common are drawn from N(0, t R) with another R of the same trace d. At R = I the derivative of the
log evidence of task i by R is a multiple of

    M_i = u_i u_i^T - B_i / tr B_i,    u_i = w_i / ||w_i||,    B_i = H_i (H_i + ridge I)^-1,

with H_i the second derivative of L_i (of a quadratic upper bound, for the logistic loss), and t
estimated by the task itself, ||w_i||^2 / tr B_i. M_i has trace 0. Its mean over tasks is 0 for
R = I and all records, and about (b / d) (R - I) else, with b = tr B_i / d the part of a model that
its records determine. So one step of scoring from local learning is R = I + (d / b) mean(M_i).

The server releases the mean of sqrt(share) u_i and sqrt(1 - share) M_i, one vector with one clip,
and knows the law of the noise on it. Noise of standard deviation s on the diagonal of a symmetric
matrix has a spectrum that ends at s sqrt(2 d). Eigenvalues within it are noise. An eigenvalue y
outside belongs to one of l = (y + sqrt(y^2 - 2 d s^2)) / 2, and the squared cosine between the two
eigenvectors is 1 - d s^2 / (2 l^2) (Benaych-Georges and Nadakuditi 2011). Every task then takes the
posterior mode under its own R, with its own b: directions along which tasks differ are nearly free,
all others are shrunk. If no eigenvalue is outside, R = I, and every task keeps its local fit.

    Trainer(algorithm=PrivatePrior(loss="squared", ridge=0.015), data=data,
            model=models.linear_regression(bias=False), loss="half_mse",
            schedule=FullParticipation(), privacy=ClientPrivacy(clip_norm=1.0, epsilon=1.0),
            rounds=1).fit()

With ``share=0`` it is :class:`~fedmtl.algorithms.MPMTL` (Liang et al. 2020) with a single release
of the covariance in place of one in every iteration, and a shrinkage by the law of the noise in
place of a public shift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from .._check import Positive, Share
from ..algorithms.base import Problem, Public, State
from ..algorithms.client_batch import ClientBatch, ClientStates
from ..algorithms.linear.evidence import ridges_of
from ..algorithms.linear.solve import solve_regularized
from ..algorithms.linear.stack import TaskAlgorithm, TaskLoss
from ..algorithms.local_fit import LocalFit
from ..algorithms.rounds import Released, RoundAlgorithm
from ..errors import ConfigError
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.noise.symmetric import smat, svec
from ..privacy.samplers import BoundFull
from .spectrum import entry_signal, excess_of, matrix_signal, mean_signal

RELEASE = "prior"
LARGEST = 512
"""The most features for the release of a whole matrix."""
FLOOR = 0.05
"""The least variance of a direction under the prior, in units of that of local learning."""
LEAST_LENGTH = 1e-140
"""The least norm of a model with a direction."""


@dataclass(frozen=True, kw_only=True)
class OneRelease(RoundAlgorithm):
    """A method of one round with rows of unit length times ``scale``.

    Args:
        scale: the factor of a row of unit length before the clip. ``"auto"``: :attr:`filled` times
            the clip norm of the run, that of the first of its replicates with privacy; without
            privacy the norm counts as 1.

    Attributes:
        filled: the automatic scale in units of the clip norm.
    """

    scale: Positive | Literal["auto"] = "auto"
    filled: ClassVar[float] = 1.0

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Fills in the ``"auto"`` settings of the method, and ``scale``."""
        resolved: Any = super().resolve_auto(problem, schedule, privacy)
        if self.scale != "auto":
            return replace(resolved, scale=self.scale)
        clip = 1.0
        for settings in privacy:
            if settings is not None:
                clip = float(settings.initial_norm)
                break
        return replace(resolved, scale=self.filled * clip)

    @property
    def length(self) -> float:
        """Returns ``scale``, which a Trainer must have filled in."""
        if self.scale == "auto":
            filled_in = "which a Trainer fills in; give a number"
            raise ConfigError(f"{type(self).__name__}.scale is 'auto', {filled_in}.")
        return float(self.scale)

    def check_one_round(self, problem: Problem, schedule: BoundSampler) -> None:
        """Refuses a run of more than one round, or of a part of the clients.

        Raises:
            ConfigError: another schedule, or more rounds.
        """
        if not isinstance(schedule, BoundFull):
            raise ConfigError(
                f"{self.name}: all clients take part in the one round; the schedule must be full, "
                f"FullParticipation(), not {schedule.describe()}."
            )
        if problem.rounds != 1:
            raise ConfigError(
                f"{self.name} makes one release in all, and its clients need no second round: "
                f"rounds must be 1, not {problem.rounds}."
            )


@dataclass(frozen=True, kw_only=True)
class PrivatePrior(OneRelease, TaskAlgorithm):
    """Fits linear models of all tasks under a common prior, from one release of their directions.

    The row of a task has unit length for every model, and is scaled to the clip norm, so that no
    bound on models is needed. The settings ``share`` and ``form`` express the expected similarity
    of tasks; they can be chosen on synthetic tasks of the same numbers.

    Args:
        loss: ``"squared"``: L_i(w) = (1 / (2 n_i)) ||X_i w - y_i||^2, or ``"logistic"``, the mean
            over the records.
        ridge: above 0, that of local learning.
        own_ridge: every task scales the ridge to its own records, before and after the release
            (:func:`~fedmtl.algorithms.linear.evidence.own_ridges`), so ``ridge`` need not be right
            for any task. False: ``ridge`` is that of all, and if it is too large for local
            learning, the prior shrinks too much.
        share: part of the budget for the mean direction of the models, in [0, 1]; the rest is for
            their covariance. 0 suits tasks that differ along few directions; 1 suits tasks that are
            much alike, and costs less noise: d numbers and not d^2 / 2.
        form: of the covariance: ``"symmetric"``, any directions; ``"diagonal"``, single features,
            with less noise.
        scale: length of a task's row; ``"auto"``: the clip norm of the run.
        feature_norm: features are scaled down to this L2 norm, also in use of the models.
            ``"auto"``: the bound that the data state. None: features stay as they are.
        target: targets of the squared loss are cut off at this absolute value. ``"auto"``: that of
            the data. None: 2^40.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, PrivatePrior, Trainer
        >>> from fedmtl import load_data, models
        >>> trainer = Trainer(
        ...     algorithm=PrivatePrior(),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=1,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    loss: TaskLoss = "squared"
    ridge: Positive = 0.01
    own_ridge: bool = True
    share: Share = 0.0
    form: Literal["symmetric", "diagonal"] = "symmetric"

    name = "private_prior"
    title = "Private prior"
    colour = "#ad1457"
    needs_row_bound = False

    # Releases

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the release: rows of sqrt(share) u_i and sqrt(1 - share) M_i, times ``scale``.

        Both are at most about as long as 1, ||M_i||_F^2 = 1 - 2 u_i.B_i u_i / tr B_i + (||B_i||_F /
        tr B_i)^2. The clip bounds a whole row by C, so the sum moves by at most C if a task is
        added or removed. This is one Gaussian release of both parts: with noise z C on every
        coordinate, the mean direction has noise z / sqrt(share) and the covariance z / sqrt(1 -
        share), in units of a task's length.
        """
        self.check_one_round(problem, schedule)
        d = self.features(problem)
        if self.form == "symmetric" and self.share < 1 and d > LARGEST:
            most = f"takes at most {LARGEST} features, and there are {d}"
            remedy = "use form='diagonal' or share=1"
            raise ConfigError(f"PrivatePrior.form is 'symmetric', which {most}; {remedy}.")
        return (ReleasePlan(name=RELEASE, dimension=sum(self._sizes(d))),)

    def _sizes(self, d: int) -> tuple[int, int]:
        """Returns the lengths of the two parts of a row."""
        direction = 0
        moment = 0
        if self.share > 0:
            direction = d
        if self.share < 1:
            moment = d
            if self.form == "symmetric":
                moment = d * (d + 1) // 2
        return direction, moment

    # A run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts from each task's own fit, in private, and without a signal.

        The public state, for R replicates, float64: ``directions`` (R, d, d), columns of length 1,
        and ``excess`` (R, d), the mean of M_i along them, of sum 0. The tasks' states: ``model``
        (n, R, D) and ``ridge`` (n, 1), float64.
        """
        tasks = self.tasks(problem)
        d = self.features(problem)
        directions = torch.eye(d, dtype=torch.float64).repeat(replicates, 1, 1)
        excess = torch.zeros(replicates, d, dtype=torch.float64)
        shapes: dict[str, tuple[int, ...]] = {
            "model": (replicates, tasks.data.dimension),
            "ridge": (1,),
        }
        store = problem.client_store({name: (s, torch.float64) for name, s in shapes.items()})
        everyone = torch.arange(problem.clients)
        ridges = ridges_of(tasks, self.ridge, self.own_ridge)
        store.scatter("ridge", everyone, ridges[:, None])
        store.scatter("model", everyone, tasks.fit(ridges)[:, None].expand(-1, replicates, -1))
        return State({"directions": directions, "excess": excess}, store)

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Sends the rows of the tasks, of their u_i and M_i, times ``scale``."""
        d = self.features(c.problem)
        fits = c.states["model"][:, 0]  # all replicates start from the same
        pairs = zip(fits, self._determined(c), strict=True)
        rows = torch.stack([self._row(w[:d], determined) for w, determined in pairs])
        replicates = len(c.public["excess"])
        if replicates > 1:
            rows = rows.expand(replicates, -1, -1)
        return {RELEASE: self.length * rows}, c.states

    def _determined(self, c: ClientBatch) -> Iterator[Tensor]:
        """Yields B = H (H + ridge I)^-1 of every task before the release, without a bias."""
        d = self.features(c.problem)
        curvatures = self.tasks(c.problem).curvature(c.states["model"][:, 0])
        for curvature, ridge in zip(curvatures, c.states["ridge"], strict=True):
            eye = torch.eye(len(curvature), dtype=curvature.dtype)
            yield solve_regularized(curvature + ridge * eye, curvature)[:d, :d]

    def _row(self, w: Tensor, determined: Tensor) -> Tensor:
        """Returns the row of a task, of about unit length; zero for a model that is zero.

        Args:
            w: (d,), the model.
            determined: B, (d, d).
        """
        size = w.norm()
        trace = determined.diagonal().sum()
        if not (size > LEAST_LENGTH and trace > 0):
            return w.new_zeros(sum(self._sizes(len(w))))
        unit = w / size
        row = []
        if self.share > 0:
            row.append(math.sqrt(self.share) * unit)
        if self.share < 1:
            moment = torch.outer(unit, unit) - (determined + determined.T) / (2 * trace)
            flat = moment.diagonal()
            if self.form == "symmetric":
                flat = svec(moment)
            row.append(math.sqrt(1 - self.share) * flat)
        return torch.cat(row)

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Makes the prior of each replicate from its released mean."""
        d = self.features(problem)
        values = released.values[RELEASE].reshape(len(public["excess"]), -1) / self.length
        noises = (released.noise_std[RELEASE] / self.length).tolist()
        excesses = []
        directions = []
        for value, noise in zip(values, noises, strict=True):
            # a replicate has its own noise
            excess, axes = self._spectrum(value, noise, d, released.denominator)
            excesses.append(excess)
            directions.append(axes)
        return {"directions": torch.stack(directions), "excess": torch.stack(excesses)}

    def _spectrum(self, value: Tensor, noise: float, d: int, tasks: float) -> tuple[Tensor, Tensor]:
        """Returns the excess (d,) and the directions (d, d) of a released mean.

        Args:
            value: the mean of the rows.
            noise: standard deviation of the noise on its coordinates.
            d: number of features.
            tasks: n, the nominal number of tasks. The mean of n random directions is not 0 itself:
                a coordinate of it has variance 1 / (d n), a diagonal entry of the mean of M_i about
                2 / (d^2 n).
        """
        # the released means of both parts, each in units of a task's length
        first, second = value.split(self._sizes(d))
        signal = value.new_zeros(d, d)
        if self.share > 0:
            spread = math.hypot(noise / math.sqrt(self.share), (d * tasks) ** -0.5)
            signal = mean_signal(first / math.sqrt(self.share), spread)
        if self.share < 1:
            moment = second / math.sqrt(1 - self.share)
            spread = math.hypot(noise / math.sqrt(1 - self.share), (2 / tasks) ** 0.5 / d)
            if self.form == "symmetric":
                signal = signal + matrix_signal(smat(moment) - signal, spread)
            else:
                signal = signal + torch.diag(entry_signal(moment - signal.diagonal(), spread))
        return excess_of(signal)

    def receive(self, c: ClientBatch) -> ClientStates:
        """Fits every task again, under the prior of its replicate."""
        # every task fits itself again in the replicates with a signal
        tasks = self.tasks(c.problem)
        d = self.features(c.problem)
        determined = torch.stack([b.diagonal().sum() / d for b in self._determined(c)])
        models = c.states["model"].clone()
        pairs = zip(c.public["directions"], c.public["excess"], strict=True)
        for replicate, (directions, excess) in enumerate(pairs):
            if not bool(excess.any()):
                continue
            # R = I + (d / b) mean(M_i), with S S^T = R; a bias has the identity
            variances = 1 + d * excess / determined[:, None].clamp_min(LEAST_LENGTH)
            deviations = variances.clamp(FLOOR, d / FLOOR).sqrt()
            eye = torch.eye(tasks.data.dimension, dtype=torch.float64)
            scale = eye.repeat(len(determined), 1, 1)
            scale[:, :d, :d] = directions * deviations[:, None, :]
            ridges = ridges_of(tasks, self.ridge, self.own_ridge, scale)
            models[:, replicate] = tasks.fit(ridges, scale)
        return {**c.states, "model": models}

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns the prior by the release, float64.

        Returns:
            ``directions`` (d, d), columns of length 1; and ``excess`` (d,), the variation of tasks
            along each beyond that of the ridge, 0 without a signal.
        """
        return {name: state.public[name][0].clone() for name in ("directions", "excess")}

    def local_baseline(self) -> LocalFit:
        """Returns the local fit of a task."""
        return LocalFit(
            loss=self.loss,
            ridge=self.ridge,
            own_ridge=self.own_ridge,
            feature_norm=self.feature_norm,
            target=self.target,
        )
