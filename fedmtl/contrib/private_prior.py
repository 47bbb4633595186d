"""The private prior: one release of the directions along which tasks differ, as a prior for every
task's own fit.

Empirical Bayes with one private step. Local learning, w_i = argmin_w L_i(w) + (ridge / 2) ||w||^2,
is the posterior mode of a task whose model is drawn from N(0, t I). Tasks that have something in
common are drawn from N(0, t R) with another R of the same trace d. At R = I the derivative of the
log evidence of task i by R is a multiple of

    M_i = u_i u_i^T - B_i / tr B_i,    u_i = w_i / ||w_i||,    B_i = H_i (H_i + ridge I)^-1,

with H_i the second derivative of L_i (of a quadratic upper bound, for the logistic loss), and t set
to what the task itself says of it, ||w_i||^2 / tr B_i. M_i has trace 0. Its mean over tasks is 0
where R = I, whatever the records are, and about (b / d) (R - I) elsewhere, where b = tr B_i / d is
the part of a model that its records determine. So one step of scoring from local learning is R = I
+ (d / b) mean(M_i).

The server releases the mean of sqrt(share) u_i and sqrt(1 - share) M_i, one vector with one clip,
and knows the law of the noise on it. Noise of standard deviation s on the diagonal of a symmetric
matrix has a spectrum that ends at s sqrt(2 d). What lies within is noise; an eigenvalue y outside
belongs to one of l = (y + sqrt(y^2 - 2 d s^2)) / 2, and the squared cosine between the two
eigenvectors is 1 - d s^2 / (2 l^2) (Benaych-Georges and Nadakuditi 2011). Every task then takes the
posterior mode under its own R, in which b is its own: directions along which tasks differ are
nearly free, all others are shrunk. Where nothing is outside, R = I, and every task is exactly its
local fit.

    Trainer(algorithm=PrivatePrior(loss="squared", ridge=0.015), data=data, model=models.linear_regression(bias=False),
            loss="half_mse", schedule=FullParticipation(), privacy=ClientPrivacy(clip_norm=1.0, epsilon=1.0),
            rounds=1).fit()

With ``share=0`` it is :class:`~fedmtl.algorithms.MPMTL` (Liang et al. 2020) with a single release
of the covariance in place of one in every iteration, and the shrinkage that the noise asks for in
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
from ..algorithms.base import Algorithm, Problem, Public, Released, State
from ..algorithms.cohort import Cohort, Own
from ..algorithms.linear.evidence import ridges_of
from ..algorithms.linear.solve import solve_regularized
from ..algorithms.linear.stack import TaskAlgorithm, TaskLoss
from ..algorithms.local_fit import LocalFit
from ..errors import ConfigError
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.noise.symmetric import smat, svec
from ..privacy.samplers import BoundFull

RELEASE = "prior"
LARGEST = 512
"""Most features where a whole matrix is released."""
EDGE = 1.05
"""How far beyond the spectrum of the noise a value must lie to count, as a factor."""
FLOOR = 0.05
"""Least variance of a direction under the prior, in units of that of local learning."""
LEAST_LENGTH = 1e-140
"""Norm from which on a model has a direction."""


@dataclass(frozen=True, kw_only=True)
class OneRelease(Algorithm):
    """A method of one round, in which every client hands a row to its release that is of unit
    length times ``scale``.

    Args:
        scale: what a row of unit length is multiplied by before the clip. ``"auto"``:
            :attr:`filled` times the clip norm of the run, that of the first of its repetitions with
            privacy; without privacy the norm counts as 1.

    Attributes:
        filled: the automatic scale in units of the clip norm.
    """

    scale: Positive | Literal["auto"] = "auto"
    filled: ClassVar[float] = 1.0

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Resolve as the method does without this class, and ``scale``."""
        clip = next((float(settings.initial_norm) for settings in privacy if settings is not None), 1.0)
        scale = self.filled * clip if self.scale == "auto" else self.scale
        return replace(super().resolve_auto(problem, schedule, privacy), scale=scale)  # type: ignore[return-value, type-var]

    @property
    def length(self) -> float:
        """Returns ``scale``, refused where a Trainer has not filled it in."""
        if self.scale == "auto":
            raise ConfigError(f"{type(self).__name__}.scale is 'auto', which a Trainer fills in; give a number.")
        return float(self.scale)

    def check_one_round(self, problem: Problem, schedule: BoundSampler) -> None:
        """Refuses a run that is anything but one round of all clients.

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
                f"{self.name} makes one release in all, and its clients need no second round: rounds must be 1, not "
                f"{problem.rounds}."
            )


@dataclass(frozen=True, kw_only=True)
class PrivatePrior(OneRelease, TaskAlgorithm):
    """Linear models of all tasks under a common prior, from one release of their directions.

    What is released of a task is of unit length whatever its model is, and is scaled to the clip
    norm, so that no bound on models is needed. What is to be chosen, ``share`` and ``form``, says
    what tasks are expected to have in common; it can be chosen on synthetic tasks of the same
    numbers.

    Args:
        loss: ``"squared"``: L_i(w) = (1 / (2 n_i)) ||X_i w - y_i||^2, or ``"logistic"``, the mean
            over the records.
        ridge: above 0, that of local learning.
        own_ridge: every task scales the ridge to its own records, which it does before and after
            the release (:func:`~.linear.evidence.own_ridges`), so that ``ridge`` need not be right
            for anybody. False: ``ridge`` is that of all, and one that is too large for local
            learning makes shrinking more a loss.
        share: part of the budget for the mean direction of the models, in [0, 1]; the rest is for
            their covariance. 0 suits tasks that differ along few directions; 1 suits tasks that are
            much alike, and costs less noise: d numbers and not d^2 / 2.
        form: of the covariance: ``"symmetric"``, any directions; ``"diagonal"``, single features,
            with less noise.
        scale: length of what a task hands to its release; ``"auto"``: the clip norm of the run.
        row_norm: features are scaled down to this L2 norm, also where the models are used;
            ``"auto"``: to the bound that the data state; None: they are not.
        target: targets of the squared loss are cut off at this absolute value; ``"auto"``: at that
            of the data; None: they are not, up to 2^40.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, PrivatePrior, Trainer, load_data, models
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

    # What it releases

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declare the one release: rows of sqrt(share) u_i and sqrt(1 - share) M_i, times
        ``scale``.

        Both are at most about as long as 1, ||M_i||_F^2 = 1 - 2 u_i.B_i u_i / tr B_i + (||B_i||_F /
        tr B_i)^2, and the clip sees to it that a whole row is no longer than C, so the sum moves by
        at most C where a task is added or removed. This is one Gaussian release of both parts: with
        noise z C on every coordinate, the mean direction has noise z / sqrt(share) and the
        covariance z / sqrt(1 - share) in units in which a task is of length 1.
        """
        self.check_one_round(problem, schedule)
        d = self.features(problem)
        if self.form == "symmetric" and self.share < 1 and d > LARGEST:
            raise ConfigError(
                f"PrivatePrior.form is 'symmetric', which takes at most {LARGEST} features, and there are {d}; use "
                f"form='diagonal' or share=1."
            )
        return (ReleasePlan(name=RELEASE, dimension=sum(self._sizes(d))),)

    def _sizes(self, d: int) -> tuple[int, int]:
        """Returns the lengths of the two parts of a row."""
        width = d * (d + 1) // 2 if self.form == "symmetric" else d
        return d if self.share > 0 else 0, width if self.share < 1 else 0

    # A run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts from each task's own fit, in private, and without a signal.

        Public, for R repetitions, float64: ``directions`` (R, d, d), columns of length 1, and
        ``excess`` (R, d), the mean of M_i along them, of sum 0. Private: ``model`` (n, R, D) and
        ``ridge`` (n, 1), float64.
        """
        tasks, d = self.tasks(problem), self.features(problem)
        directions = torch.eye(d, dtype=torch.float64).repeat(replicates, 1, 1)
        excess = torch.zeros(replicates, d, dtype=torch.float64)
        fields = {"model": ((replicates, tasks.data.dimension), torch.float64), "ridge": ((1,), torch.float64)}
        store, everyone = problem.client_store(fields), torch.arange(problem.clients)
        ridges = ridges_of(tasks, self.ridge, self.own_ridge)
        store.scatter("ridge", everyone, ridges[:, None])
        store.scatter("model", everyone, tasks.fit(ridges)[:, None].expand(-1, replicates, -1))
        return State({"directions": directions, "excess": excess}, store)

    def client(self, c: Cohort) -> tuple[dict[str, Tensor], Own]:
        d, fits = self.features(c.problem), c.own["model"][:, 0]
        rows = torch.stack([self._row(w[:d], b) for w, b in zip(fits, self._determined(c), strict=True)])
        replicates = len(c.public["excess"])
        return {RELEASE: self.length * (rows if replicates == 1 else rows.expand(replicates, -1, -1))}, c.own

    def _determined(self, c: Cohort) -> Iterator[Tensor]:
        """Yields B = H (H + ridge I)^-1 of every task before the release, without a bias: (d, d)."""
        tasks, d = self.tasks(c.problem), self.features(c.problem)
        for curvature, ridge in zip(tasks.curvature(c.own["model"][:, 0]), c.own["ridge"], strict=True):
            eye = torch.eye(len(curvature), dtype=curvature.dtype)
            yield solve_regularized(curvature + ridge * eye, curvature)[:d, :d]

    def _row(self, w: Tensor, determined: Tensor) -> Tensor:
        """Returns what a task hands to the release, of about unit length; zero for a model that is zero."""
        size, trace = w.norm(), determined.diagonal().sum()
        parts = self._sizes(len(w))
        if not (size > LEAST_LENGTH and trace > 0):
            return w.new_zeros(sum(parts))
        unit = w / size
        parts_of_row = []
        if parts[0]:
            parts_of_row.append(math.sqrt(self.share) * unit)
        if parts[1]:
            moment = torch.outer(unit, unit) - (determined + determined.T) / (2 * trace)
            flat = svec(moment) if self.form == "symmetric" else moment.diagonal()
            parts_of_row.append(math.sqrt(1 - self.share) * flat)
        return torch.cat(parts_of_row)

    def server(self, problem: Problem, public: Public, released: Released) -> dict[str, Tensor]:
        d = self.features(problem)
        values = released.values[RELEASE].reshape(len(public["excess"]), -1) / self.length
        noises = (released.noise_std(RELEASE) / self.length).tolist()
        m = released.denominator
        spectra = [self._spectrum(value, noise, d, m) for value, noise in zip(values, noises, strict=True)]
        excess, directions = zip(*spectra, strict=True)
        return {"directions": torch.stack(directions), "excess": torch.stack(excess)}

    def _spectrum(self, value: Tensor, noise: float, d: int, tasks: float) -> tuple[Tensor, Tensor]:
        """Returns the excess (d,) and the directions (d, d) of a released mean.

        Args:
            value: the mean of the rows.
            noise: standard deviation of the noise on its coordinates.
            d: number of features.
            tasks: nominal number of tasks: the mean of as many directions drawn at random is not 0
                itself. A coordinate of it has variance 1 / (d n), a diagonal entry of the mean of
                M_i about 2 / (d^2 n).
        """
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

    def receive(self, c: Cohort) -> Own:
        # every task fits itself again, where something stands out of the noise
        tasks, d = self.tasks(c.problem), self.features(c.problem)
        determined = torch.stack([b.diagonal().sum() / d for b in self._determined(c)])
        models = c.own["model"].clone()
        for r, (directions, excess) in enumerate(zip(c.public["directions"], c.public["excess"], strict=True)):
            if bool(excess.any()):
                variances = 1 + d * excess / determined[:, None].clamp_min(LEAST_LENGTH)
                scale = torch.eye(tasks.data.dimension, dtype=torch.float64).repeat(len(determined), 1, 1)
                scale[:, :d, :d] = directions * variances.clamp(FLOOR, d / FLOOR).sqrt()[:, None, :]
                models[:, r] = tasks.fit(ridges_of(tasks, self.ridge, self.own_ridge, scale), scale)
        return {**c.own, "model": models}

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns what was made of the release, float64: ``directions`` (d, d), columns of length
        1, and ``excess`` (d,), how much more than by the ridge the tasks differ along each, 0 where
        nothing stands out of the noise."""
        return {name: state.public[name][0].clone() for name in ("directions", "excess")}

    def local_baseline(self) -> LocalFit:
        """Returns the local fit of a task."""
        return LocalFit(
            loss=self.loss, ridge=self.ridge, own_ridge=self.own_ridge, row_norm=self.row_norm, target=self.target
        )


def mean_signal(mean: Tensor, noise: float) -> Tensor:
    """Returns the part of u u^T that a noised mean u shows: (d, d), zero where its length may be
    noise.

    The squared length of pure noise has mean d s^2 and standard deviation s^2 sqrt(2 d); two of
    these above the mean count, where they are below 1: u is the mean of vectors of length 1, so no
    longer than that. The rest is the squared length of u, and over the whole the squared cosine
    between u and what was released.

    Args:
        mean: (d,), of vectors of unit length, with noise.
        noise: s, standard deviation of the noise on a coordinate; at least 0.
    """
    d, square = len(mean), float(mean.square().sum())
    own = square - d * noise**2
    limit = noise**2 * (d + 2 * math.sqrt(2 * d))
    if own <= 0 or not limit < min(square, 1.0):
        return mean.new_zeros(d, d)
    return min(own, 1.0) * own / square**2 * torch.outer(mean, mean)


def matrix_signal(matrix: Tensor, noise: float) -> Tensor:
    """Returns what stands out of the noise in a symmetric matrix (d, d), shrunk to what it says of
    the matrix below.

    An eigenvalue above 1.05 times s sqrt(2 d) becomes that of the matrix below it times the squared
    cosine of the two eigenvectors; the others become 0. So do all where that limit is 1 or more,
    since the mean of M_i has no eigenvalue above 1.

    Args:
        matrix: symmetric, with noise.
        noise: s, its standard deviation on a diagonal entry, 1 / sqrt(2) of it elsewhere; at least
            0.
    """
    values, vectors = torch.linalg.eigh(matrix)
    quarter = noise**2 * len(matrix) / 2  # the square of half the end of the spectrum
    below = (values + (values.square() - 4 * quarter).clamp_min(0.0).sqrt()) / 2
    limit = EDGE * 2 * math.sqrt(quarter)
    shrunk = torch.where(values > limit, below - quarter / below.clamp_min(1e-300), 0.0).clamp_max(1.0)
    return (vectors * shrunk) @ vectors.T if limit < 1 else torch.zeros_like(matrix)


def entry_signal(values: Tensor, noise: float) -> Tensor:
    """Returns what stands out of the noise among d numbers, (d,): y - c^2 / y of those above c,
    1.05 times s sqrt(2 log 2d), where the largest of d draws of noise lies (the garrote of Breiman
    1995); the others become 0, and all where c is 1 or more."""
    limit = EDGE * noise * math.sqrt(2 * math.log(2 * len(values)))
    shrunk = torch.where(values > limit, values - limit**2 / values.clamp_min(1e-300), 0.0).clamp_max(1.0)
    return shrunk if limit < 1 else torch.zeros_like(values)


def excess_of(signal: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the eigenvalues (d,) and eigenvectors (d, d) of a signal, its trace made 0.

    The part of the trace that the signal takes is missing, in equal parts, along the directions
    without a signal, since the trace of all is 0. No signal has no excess.
    """
    values, vectors = torch.linalg.eigh(signal)
    clear = values.abs() > 1e-12 * values.abs().max()
    rest = int((~clear).sum())
    if not rest or rest == len(values):
        return torch.where(clear, values - values.mean(), 0.0), vectors
    return torch.where(clear, values, -values[clear].sum() / rest), vectors
