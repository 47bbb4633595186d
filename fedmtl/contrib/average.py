"""Personalization by averaging: every client weighs several models of its own by how well they
predict.

A client with n records (x_i, y_i) has four sources of a model: its own records (``local``), the
``shared`` model as it was released, that model with an intercept of the client's own
(``intercept``), and that model with slopes of its own that a ridge pulls to the shared ones
(``ridge``). It averages them with the weights

    w_m  ~  prior_m * (e_m + e / n)^(-n / 4),     e_m = (1 / n) sum_i (y_i - prediction of y_i by m
    fitted without i)^2

The likelihood of n residuals under a normal law whose variance is their most plausible one is
e_m^(-n / 2); that of residuals left out one at a time scores a model by predictions and not by its
fit (Geisser and Eddy, JASA 1979: predictive sample reuse). These residuals share records, so the
likelihood is tempered by 2, and e / n, with e the least e_m of the models of ``local``, keeps a
model that predicts a few records by chance from taking all the weight. An average loses less than a
choice: no model has to win, and no record is withheld from the run or from the final fit.

*The prior.* The released model errs by what clients differ, and by its noise, the square of which
is in proportion to nu^2, see :func:`~fedmtl.algorithms.noise_level.noise_of`. A model of n records
and p parameters errs by its estimation, in proportion to p / n while n > p, and by what it
estimates where n is smaller. Without noise the prior odds of ``local`` are 1 / 2 for real targets
and 1 / 9 for classes; they rise by the ratio of the two errors:

    prior of local / prior of all others  =  odds * (1 + (nu_i / 4)^2 max(n / p, 1))

So the noise of the released model takes weight from it, and less where a client has few records, of
which its own models err as well. nu is in units of the public range of the target. A client whose
targets are spread less than those ranges usually allow feels more of the noise: for real targets
nu_i = nu max(1, .3 / s_i), with s_i the error of the client's own mean, left out one at a time. A
range that is ten times too wide thus does not hide the noise. A client with a single record has no
mean without it; there s_i is at most the error of the released model.

*Linear models, squared loss: in closed form.* Let z_i = (x_i - mean of x) / s be the client's
standardized features, with s_j^2 = (n var_j + 10 * .4^2) / (n + 10), and r_i = y_i - (prediction of
the base), where the base is zero (``local``) or the shared model. A model adds an intercept a and
slopes v to its base:

    min over a, v of  sum_i (r_i - a - v . z_i)^2 + kappa a^2 + lambda ||v||^2

As the z_i sum to zero, a and v separate. With Z = U S V^T, the fit is H r with

    H = 1 1^T / (n + kappa) + U diag(S^2 / (S^2 + lambda)) U^T,

and leaving record i out changes its residual to (r_i - (H r)_i) / (1 - H_ii) (Allen 1974: PRESS).
One decomposition gives all kappa and lambda. Infinite kappa or lambda leave the intercept or the
slopes of the base. ``local`` has kappa = 0, so that its mean is not penalized, and ten values of
lambda of equal weight.

With few records the residuals do not outvote the prior, so the prior has to say how clients usually
differ: first in their level. Of the weight of all models on the shared base, an own intercept
without a penalty has .3, three penalties .2 each, and the intercept of the shared model .1; each is
spread evenly over six lambda.

*Votes.* A few rows do not tell how strong a penalty clients need; those of all clients do. In the
last rounds of automatic settings every client with a real target sends a vote u_i on the M
candidates (the ten of ``local`` as one, with the error at which the likelihood is their mean):

    u_im  ~  mean of e_i over the candidates - e_im,     ||u_i|| = 1

with e_im + e / n for e_im. The released mean u of these votes, with noise of the standard deviation
s in each coordinate, enters the weights of every client, including those of new clients:

    w_m  ~  prior_m * (e_m + e / n)^(-n / 4) * exp(min(15, 1 / (2 s)) u_m)

These are exponential weights by the mean loss of the clients, each in its own unit (Vovk 1990;
Littlestone and Warmuth 1994). The noise moves a log weight by half a unit at most. A vote has
length 1, so one client moves the sum of votes by 1 if its data are taken away, and by 2 if they are
replaced: it is clipped, noised and charged like the other rows of a run. One record can turn the
vote of its client, so that votes are not taken if single records are protected.

*Linear models of classes: in five folds.* The candidates are minimizers of the mean loss with a
pull

    min over w  (1 / n) sum_i loss_i(w) + (lambda / 2) ||w - w_0||^2,

w_0 = 0 (``local``) or the shared model (``ridge``), beside that model as it is (``shared``). A
model weighs

    w_m  ~  prior_m * exp(hits + .1 * log likelihood)

of the records of each fold by the fit without them. With few records of a class the likelihood by
itself chooses badly.

*Networks of classes: in five folds, along two paths.* The candidates are the models after 1, 4, 16
and 64 steps of :class:`~fedmtl.local.BackoffSGD` from the shared model (``ridge``: few steps are a
strong pull), after 16 and 64 from the public starting point (``local``), and the shared model as it
is, with the weights of classes. Models of one path are averaged; of the two paths a client takes
the one with more weight, since parameters of networks that have not moved together do not average.
What nu means for networks is not known, and the prior is that without noise.

Every number is a function of the client's own records and of what was released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._check import Range
from ..algorithms.base import Problem, Public
from ..algorithms.cohort import AFTER, Cohort, Own
from ..algorithms.finetune import Personalization
from ..algorithms.linear.classes import fit_classes, flat, layers, log_likelihoods
from ..algorithms.linear.data import check_linear, records_of
from ..algorithms.local import Local
from ..algorithms.rounds import RoundAlgorithm
from ..data.examples import Examples
from ..data.rows import offsets_of, select
from ..errors import ConfigError, ModelError
from ..local import BackoffSGD
from ..local.losses import cross_entropy, half_mse, mse
from ..random import derive_key, keyed_bits

Array = NDArray[np.float64]

INTERCEPT_RIDGES = (0.0, 0.03, 0.3, 3.0, math.inf)
INTERCEPT_WEIGHTS = (0.3, 0.2, 0.2, 0.2, 0.1)
"""Penalties of an own intercept on the shared base, and their prior weights among the models on
that base."""
SLOPE_RIDGES: Array = np.array([0.01, 0.1, 1.0, 10.0, 100.0, np.inf])
"""Penalties of own slopes on the shared base, of equal prior weight."""
LOCAL_RIDGES: Array = np.array([0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, np.inf])
"""Penalties of the slopes of ``local``, of equal prior weight."""
PULLS: Array = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
FOLDS = 5
STEPS = 100
PARTS = ("local", "shared", "intercept", "ridge")
_PATHS = ((True, 16), (True, 64), (False, 0), (False, 1), (False, 4), (False, 16), (False, 64))
"""Candidates of a network: True if they start from the public starting point, and their steps."""
_SPLIT = 0.5, 0.0, 0.5  # of the prior that the local ones leave, by part
_AVERAGE_ROUND = AFTER - 2
_NUMBERS = 1 << 22  # in the models of clients that are averaged at a time
# of a feature
_PRIOR_ROWS = 10.0
_PRIOR_SPREAD = 0.4
_ODDS_OF_NUMBERS = 1 / 2  # of the local models without noise, for real targets
_ODDS_OF_CLASSES = 1 / 9
_LOUD = 4.0  # the noise that doubles these odds for a client with few records
_USUAL_SPREAD = 0.3  # of a client's targets, in units of half their public range
VOTES = 15.0
"""The most that the mean vote of clients weighs."""
_VOTE_NOISE = 0.5  # the largest standard deviation of the noise of log weights by votes
_LIKELIHOOD = 0.1  # weight of the log likelihood beside the hits


@dataclass(frozen=True, kw_only=True)
class Average(Personalization):
    """Every client averages models, its own and the shared one, weighted by how they predict
    records left out.

    For linear models, of real targets or of classes, and for networks of classes.

    Args:
        noise: nu of the released model, by which the prior weight of the models of a client's own
            records rises, at least 0; infinite leaves all others out. None: that of the run, see
            :func:`~fedmtl.algorithms.noise_level.noise_of`.
        votes: log weights of the candidates for a real target by the votes of the clients, that
            of ``local`` first; a run with :attr:`ProximalPoint.vote_rounds` fills them in. Empty
            for none.

    Raises:
        ConfigError: a noise below 0, or votes that are not finite.

    Example:
        >>> from fedmtl import Average, FullParticipation, ProximalPoint, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=ProximalPoint(mu=0.03),
        ...     data=load_data("synthetic_tasks", tasks=4, problem="regression"),
        ...     model=models.linear_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     finetune=Average(),
        ...     progress=False,
        ... )
        >>> list(trainer.fit().scores)
        ['shared', 'personal', 'finetuned']
    """

    noise: Annotated[float, Range(lambda v: v >= 0, "a number of at least 0")] | None = None
    votes: tuple[float, ...] = ()

    name = "average"
    kind = "average"
    parts: ClassVar[tuple[str, ...]] = PARTS
    votes_help = True
    of_linear_numbers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = isinstance(self.votes, list | tuple) and all(
            isinstance(vote, int | float) and math.isfinite(vote) for vote in self.votes
        )
        if not numbers:
            raise ConfigError(
                f"Average.votes is {self.votes!r}; accepted: a list of finite numbers, which a run "
                "with vote_rounds fills in."
            )
        object.__setattr__(self, "votes", tuple(self.votes))

    def text(self) -> str:
        """Returns ``"average of models"``."""
        return "average of models"

    def check(self, problem: Problem) -> None:
        """Refuses a model that is neither linear nor one of classes, or a loss without a name.

        Raises:
            ConfigError: what is accepted.
        """
        try:
            bias = check_linear(problem)
        except ModelError as error:
            if problem.loss is not cross_entropy:
                raise ConfigError(
                    f"finetune is 'average', but {error} Use finetune 'kl' or 'mean'."
                ) from error
            return
        if problem.loss in (mse, half_mse) and len(self.votes) not in (0, vote_size(bias)):
            raise ConfigError(
                f"Average.votes has {len(self.votes)} numbers, but clients of this model average "
                f"{vote_size(bias)} candidates; leave it out."
            )

    def resolved(self, noise: float) -> Self:
        """Returns the settings with the noise of the run, unless one is set."""
        if self.noise is None:
            return replace(self, noise=noise)
        return self

    @classmethod
    def alone(cls) -> RoundAlgorithm:
        """Returns :class:`LocalAverage`."""
        return LocalAverage()

    def informed(self, public: Public) -> Self:
        """Returns the settings with the log weights of the released votes, if the run has voted."""
        if "votes" not in public:
            return self
        weight = VOTES
        if noise := float(public["vote_noise"]):
            weight = min(VOTES, _VOTE_NOISE / noise)
        return replace(self, votes=tuple((weight * public["votes"].double()).tolist()))

    def reach(self, problem: Problem, start: Tensor, clients: Tensor) -> Tensor:
        """Averages the models of each client, (k, D + 4): the average and the weights of the
        :data:`PARTS`.
        """
        starts = start.expand(len(clients), -1)
        counts = problem.data.train.counts[clients]
        shared = (
            torch.tensor([float(part == "shared") for part in PARTS])
            .to(starts)
            .expand(len(clients), -1)
        )
        found = torch.cat([starts, shared], 1)
        finite = torch.isfinite(starts).all(1).cpu()
        try:
            bias = check_linear(problem)
        except ModelError:
            able = (finite & (counts > 1)).nonzero()[:, 0]
            known = 0.0  # it is not known what nu means for networks
            if self.noise == math.inf:
                known = math.inf
            prior = prior_of_local(known, 1, problem.dimension, _ODDS_OF_CLASSES)
            for some in able.split(max(1, _NUMBERS // problem.dimension)):
                found[some] = _average_networks(problem, starts[some], clients[some], prior)
            return found
        for place in (finite & (counts > 0)).nonzero()[:, 0].tolist():
            client = int(clients[place])
            base = starts[place].double().cpu().numpy()
            x, y = records_of(problem, client)
            noise = self.noise or 0.0
            # of records that are too large for float64 the released model stays
            with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError):
                if problem.loss in (mse, half_mse):
                    averaged = average_numbers(
                        x, y, base, bias, noise, problem.data.limit, self.votes
                    )
                else:
                    fold = _fold(problem, client, len(x))
                    prior = prior_of_local(noise, len(x), problem.dimension, _ODDS_OF_CLASSES)
                    averaged = average_classes(x, y.astype(np.int64), base, bias, prior, fold)
                found[place] = torch.from_numpy(np.concatenate(averaged)).to(found)
        return found


@dataclass(frozen=True, kw_only=True)
class LocalAverage(RoundAlgorithm):
    """The average of the models of every client's own records. Nothing leaves a client.

    Example:
        >>> from fedmtl import FullParticipation, Trainer, load_data, models
        >>> from fedmtl.contrib import LocalAverage
        >>> trainer = Trainer(
        ...     algorithm=LocalAverage(),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=1,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 29])
    """

    # one row and one line of whatever is local
    name = "local"
    title = Local.title
    colour = Local.colour
    fitted_once = True

    def client_update(self, c: Cohort) -> tuple[dict[str, Tensor], Own]:
        """Sends nothing; the models follow from the records alone."""
        return {}, c.own

    def personal_models(self, c: Cohort) -> Tensor:
        """Returns the averages of the models of each client's own records, (k, D)."""
        return Average(noise=math.inf).train(c.problem, c.initial, c.ids)


def prior_of_local(noise: float, records: int, parameters: int, odds: float) -> float:
    """Prior weight of the models of a client's own records, see the module's first lines.

    Args:
        noise: nu, or the client's nu_i; infinite for a weight of 1.
        records: n.
        parameters: p.
        odds: those without noise.
    """
    odds = odds * (1 + (noise / _LOUD) ** 2 * max(records / parameters, 1.0))
    return 1 - 1 / (1 + odds)


def noise_at(noise: float, spread: float) -> float:
    """The noise nu_i of a client, in units of its own targets.

    Args:
        noise: nu, in units of half the public range of the target.
        spread: s_i, the root mean square error of the client's mean, left out one at a time, in the
            same units.

    Returns:
        nu_i, at least nu; infinite for targets that do not differ at all, if there is noise.
    """
    if noise == 0:
        return 0.0
    if spread == 0:
        return math.inf
    return noise * max(1.0, _USUAL_SPREAD / spread)


@dataclass(frozen=True)
class Candidates:
    """The linear models of a real target among which a client averages, those of ``local`` first.

    Attributes:
        models: (m, p).
        errors: mean squares of the residuals left out, with e / n, (m,).
        evidence: log evidence of each by the client's own records, (m,).
        weights: prior weight of each among those of ``local``, or among the others, (m,).
        parts: (m,), of which of the :data:`PARTS` each is.
        spread: root mean square error of the client's own mean, left out one at a time; of a client
            with a single record at most the error of the shared model.
    """

    models: Array
    errors: Array
    evidence: Array
    weights: Array
    parts: NDArray[np.int64]
    spread: float

    @classmethod
    def of(cls, x: Array, y: Array, shared: Array, bias: bool, limit: float) -> Candidates:
        """Returns the candidates of a client; see :func:`average_numbers`."""
        records = Records.of(x, y, bias, limit)
        kappa_of_own = math.inf  # there is no intercept
        if bias:
            kappa_of_own = 0.0
        own, own_errors = records.fits(np.zeros_like(shared), kappa_of_own, LOCAL_RIDGES)
        models = [own]
        errors = [own_errors]
        weights = [np.full(len(own), 1 / len(own))]
        parts = [np.full(len(own), PARTS.index("local"))]
        for kappa, weight in intercept_ridges(bias).items():
            found, found_errors = records.fits(shared, kappa, SLOPE_RIDGES)
            part = np.full(len(found), PARTS.index("ridge"))
            part[-1] = PARTS.index("intercept")  # the last slopes are those of the base
            if kappa == math.inf:
                part[-1] = PARTS.index("shared")
            models.append(found)
            errors.append(found_errors)
            weights.append(np.full(len(found), weight / len(found)))
            parts.append(part)
        floored = np.concatenate(errors) + own_errors.min() / len(x) + 1e-300
        spread = float(own_errors[-1])
        if len(x) == 1:
            # without its only record a client has no mean, and this is the error of predicting 0
            spread = min(spread, float(errors[-1][-1]))
        return cls(
            np.concatenate(models),
            floored,
            -len(x) / 4 * np.log(floored),
            np.concatenate(weights),
            np.concatenate(parts),
            math.sqrt(spread),
        )


def intercept_ridges(bias: bool) -> dict[float, float]:
    """The penalties of an own intercept on the shared base, with their prior weights."""
    if not bias:
        return {math.inf: 1.0}
    return dict(zip(INTERCEPT_RIDGES, INTERCEPT_WEIGHTS, strict=True))


def vote_size(bias: bool) -> int:
    """The number of candidates of which a client sends a vote, those of ``local`` as one."""
    return 1 + len(intercept_ridges(bias)) * len(SLOPE_RIDGES)


@np.errstate(all="ignore")
def vote(x: Array, y: Array, shared: Array, bias: bool, limit: float) -> Array:
    """The vote of a client on the candidates: how far the error of each lies below their mean, as a
    vector of length 1.

    Args:
        x: see :func:`average_numbers`.
        y: see :func:`average_numbers`.
        shared: see :func:`average_numbers`.
        bias: see :func:`average_numbers`.
        limit: see :func:`average_numbers`.

    Returns:
        (:func:`vote_size`,), that of ``local`` first; zeros if a candidate is not finite, or if all
        are alike.
    """
    found = Candidates.of(x, y, shared, bias, limit)
    own = len(LOCAL_RIDGES)
    # the evidence of an average is the mean of the evidences
    local = np.logaddexp.reduce(found.evidence[:own] + np.log(found.weights[:own]))
    errors = np.append(np.exp(-4 / len(x) * local), found.errors[own:])
    gains = errors.mean() - errors
    length = np.linalg.norm(gains)
    if not 0 < length < math.inf:
        return np.zeros_like(gains)
    direction: Array = gains / length
    return direction


@np.errstate(all="ignore")
def average_numbers(
    x: Array,
    y: Array,
    shared: Array,
    bias: bool,
    noise: float,
    limit: float,
    votes: Sequence[float] = (),
) -> tuple[Array, Array]:
    """A client's average of linear models of a real target, and the weights of the :data:`PARTS`.

    Args:
        x: features of its records, (n, d).
        y: targets of its records, (n,).
        shared: [weights..., bias] of the released model, (p,).
        bias: True if the last parameter is a bias; models without one have no intercept of their
            own.
        noise: nu of the released model; infinite for ``local`` alone.
        limit: predictions are cut off at this absolute value; infinite for none.
        votes: log weights of the candidates by the votes of clients, see :attr:`Average.votes`.

    Returns:
        The model (p,), and the four weights, which add up to 1.
    """
    found = Candidates.of(x, y, shared, bias, limit)
    prior = prior_of_local(noise_at(noise, found.spread), len(x), len(shared), _ODDS_OF_NUMBERS)
    groups = np.where(found.parts == PARTS.index("local"), prior, 1 - prior)
    logs = found.evidence + np.log(groups * found.weights)
    if len(votes):
        logs += np.append(np.full(len(LOCAL_RIDGES), votes[0]), votes[1:])
    return _averaged(found.models, logs, found.parts)


@dataclass(frozen=True)
class Records:
    """The records of a client with their standardized features Z = U S V^T.

    Attributes:
        x: features, (n, d).
        y: targets, (n,).
        bias: True if models have an intercept.
        limit: absolute value at which predictions are cut off.
        center: mean of the features, (d,); zeros without a bias.
        spread: s, by which features are divided, (d,).
        u: (n, r) of the decomposition.
        s: singular values, (r,).
        vt: (r, d) of the decomposition.
    """

    x: Array
    y: Array
    bias: bool
    limit: float
    center: Array
    spread: Array
    u: Array
    s: Array
    vt: Array

    @classmethod
    def of(cls, x: Array, y: Array, bias: bool, limit: float) -> Records:
        n, d = x.shape
        if bias:
            center = x.mean(0)
        else:
            center = np.zeros(d)
        spread = np.sqrt((n * x.var(0) + _PRIOR_ROWS * _PRIOR_SPREAD**2) / (n + _PRIOR_ROWS))
        u, s, vt = np.linalg.svd((x - center) / spread, full_matrices=False)
        return cls(x, y, bias, limit, center, spread, u, s, vt)

    def fits(self, base: Array, kappa: float, lambdas: Array) -> tuple[Array, Array]:
        """Fits of an intercept and slopes of the client's own on a base, one for each penalty of
        the slopes.

        Args:
            base: [weights..., bias] of the base, (p,).
            kappa: penalty of the intercept, at least 0; infinite leaves that of the base.
            lambdas: penalties of the slopes, (m,); infinite leaves those of the base.

        Returns:
            The models (m, p), and the mean squares of their residuals left out one at a time, (m,).
        """
        n, d = self.x.shape
        residual = self.y - self.x @ base[:d]
        if self.bias:
            residual = residual - base[d]
        along = self.u.T @ residual
        shrunk = self.s**2 / (self.s**2 + lambdas[:, None])  # (m, r)
        intercept = residual.sum() / (n + kappa)
        fit = intercept + (shrunk * along) @ self.u.T  # (m, n)
        free = 1.0 - 1.0 / (n + kappa) - shrunk @ (self.u**2).T
        left_out = np.where(free > 1e-9, (residual - fit) / np.maximum(free, 1e-9), residual)
        predicted = np.clip(self.y - left_out, -self.limit, self.limit)
        errors = ((self.y - predicted) ** 2).mean(1)
        slopes = (
            base[:d] + (shrunk / np.where(self.s > 0, self.s, 1.0) * along) @ self.vt / self.spread
        )
        if not self.bias:
            return slopes, errors
        offset = base[d] + intercept - (slopes - base[:d]) @ self.center
        return np.concatenate([slopes, offset[:, None]], 1), errors


@np.errstate(all="ignore")
def average_classes(
    x: Array, y: NDArray[np.int64], shared: Array, bias: bool, prior: float, fold: NDArray[np.int64]
) -> tuple[Array, Array]:
    """Returns a client's average of linear models of classes (p,), and the weights of the
    :data:`PARTS`.

    Args:
        x: (n, d), its records.
        y: (n,), their labels.
        shared: (p,), the parameters [weights (C, d), biases (C)] of the released model; C = 1 for a
            logistic one.
        bias: see :func:`average_numbers`.
        prior: see :func:`average_numbers`.
        fold: (n,), the fold of each record.
    """
    if bias:
        rows = np.concatenate([x, np.ones((len(x), 1))], 1)
    else:
        rows = x
    start = layers(shared, rows.shape[1], bias)
    bases = np.stack([np.zeros_like(start)] * len(PULLS) + [start] * (len(PULLS) + 1))
    pulls = np.concatenate([PULLS, PULLS, [np.inf]])
    trained = len(bases) - 1
    used = np.concatenate(
        [fold[None] != np.arange(FOLDS)[:, None], np.ones((1, len(x)), dtype=bool)]
    )
    fits = np.stack([bases] * (FOLDS + 1))  # of the records outside of each fold, then of all
    for row, fit in zip(used, fits, strict=True):
        if row.any():
            fit[:trained] = fit_classes(rows[row], y[row], bases[:trained], pulls[:trained], STEPS)
    scores = np.zeros(len(bases))
    for row, fit in zip(~used[:FOLDS], fits, strict=False):
        log_likelihood, hits = log_likelihoods(rows[row], y[row], fit)
        scores += hits.sum(1) + _LIKELIHOOD * log_likelihood.sum(1)
    parts = np.repeat(
        [PARTS.index(name) for name in ("local", "ridge", "shared")], [len(PULLS), len(PULLS), 1]
    )
    return _averaged(flat(fits[-1], bias), scores + _log_prior(parts, prior), parts)


def _part_of(local: bool, steps: int) -> str:
    """Returns the part of a candidate of a network."""
    if local:
        return "local"
    if steps:
        return "ridge"
    return "shared"


def _average_networks(problem: Problem, starts: Tensor, clients: Tensor, prior: float) -> Tensor:
    """Returns clients' averages of networks of classes, followed by the weights of the
    :data:`PARTS`, (k, D + 4).

    Args:
        problem: the data, the model and the loss.
        starts: (k, D), the released model for each.
        clients: int64 (k,), each with two records or more.
        prior: weight of ``local``.
    """
    train = problem.data.train
    rows = [
        torch.arange(*train.offsets[client : client + 2].tolist()) for client in clients.tolist()
    ]
    folds = [
        torch.from_numpy(_fold(problem, client, len(own)))
        for client, own in zip(clients.tolist(), rows, strict=True)
    ]
    scores = np.zeros((len(clients), len(_PATHS)))
    for number in range(FOLDS):
        kept = [own[fold != number] for own, fold in zip(rows, folds, strict=True)]
        models = _paths(problem, starts, clients, kept, prior)
        for place, (own, fold) in enumerate(zip(rows, folds, strict=True)):
            if len(left_out := own[fold == number]):
                scores[place] += _hits(problem, models[place], left_out)
    final = _paths(problem, starts, clients, rows, prior).double().cpu().numpy()
    parts = np.array([PARTS.index(_part_of(local, steps)) for local, steps in _PATHS])
    averages = []
    for candidates, logs in zip(final, scores, strict=True):
        _, shares = _averaged(candidates, logs + _log_prior(parts, prior, _SPLIT), parts)
        path = (parts == 0) == (shares[0] > 0.5)
        taken = logs[path] + _log_prior(parts[path], prior, _SPLIT)
        averages.append(np.concatenate(_averaged(candidates[path], taken, parts[path])))
    return torch.from_numpy(np.stack(averages)).to(starts)


def _paths(
    problem: Problem, starts: Tensor, clients: Tensor, rows: Sequence[Tensor], prior: float
) -> Tensor:
    """Returns the candidates of clients by some of their training records, (k, m, D); the released
    model for those without prior weight.

    Args:
        problem: see :func:`_average_networks`.
        starts: see :func:`_average_networks`.
        clients: see :func:`_average_networks`.
        prior: see :func:`_average_networks`.
        rows: the records of each client, by their number among all.
    """
    counts = torch.zeros(problem.clients, dtype=torch.int64)
    counts[clients] = torch.tensor([len(own) for own in rows])
    index = torch.cat([rows[place] for place in clients.argsort()]).to(problem.data.train.x.device)
    part = Examples(
        select(problem.data.train.x, index), select(problem.data.train.y, index), offsets_of(counts)
    )
    data = replace(problem.data, train=part, verify=False)
    c = Cohort(
        replace(problem, data=data, protects_records=False, tally=None),
        clients,
        round=_AVERAGE_ROUND,
    )
    models = []
    for local, steps in _PATHS:
        trained = starts
        if local:
            trained = c.train(BackoffSGD(steps=steps), problem.initial)
        elif steps and prior < 1:
            trained = c.train(BackoffSGD(steps=steps), starts)
        models.append(trained)
    return torch.stack(models, 1)


def _hits(problem: Problem, models: Tensor, index: Tensor) -> Array:
    """Returns hits and a tenth of the log likelihood of models (m, D) on training records ``index``
    (n,): (m,)."""
    x, y = problem.data.gather("train", index, dtype=models.dtype, device=models.device)
    stack = problem.executor.stack
    outputs = torch.cat([stack.predict(stack.load(model, 1), x[None]) for model in models]).double()
    logs = (
        outputs.log_softmax(-1)
        .gather(-1, y.expand(len(models), -1)[..., None])[..., 0]
        .clamp(min=-27.6)
    )
    scores: Array = ((outputs.argmax(-1) == y) + _LIKELIHOOD * logs).sum(1).cpu().numpy()
    return scores


@np.errstate(divide="ignore")  # of a prior of 0
def _log_prior(
    parts: NDArray[np.int64], prior: float, others: Sequence[float] = (5 / 9, 2 / 9, 2 / 9)
) -> Array:
    """Returns the logarithms of the prior weights of models of classes, (m,).

    Models of a part have equal shares of its prior.

    Args:
        parts: (m,), of which of the :data:`PARTS` each model is.
        prior: weight of ``local``.
        others: shares of the other parts in the rest of the prior.
    """
    priors = np.array([prior, *(np.array(others) * (1 - prior))])
    logs: Array = np.log(priors / np.maximum(np.bincount(parts, minlength=len(PARTS)), 1))[parts]
    return logs


@np.errstate(all="ignore")  # of models that are not finite
def _averaged(models: Array, logs: Array, parts: NDArray[np.int64]) -> tuple[Array, Array]:
    """Mean of models (m, p) by their log weights, and the weight of each part.

    Args:
        models: (m, p).
        logs: log weight of each model, (m,), with that of its prior.
        parts: (m,), of which of the :data:`PARTS` each model is.
    """
    finite = np.isfinite(models).all(1) & np.isfinite(logs)
    weights = np.where(finite, np.exp(logs - logs[finite].max(initial=-np.inf)), 0.0)
    weights /= weights.sum()
    shares: Array = np.bincount(parts, weights, minlength=len(PARTS)).astype(float)
    return weights @ np.where(finite[:, None], models, 0.0), shares


def _fold(problem: Problem, client: int, count: int) -> NDArray[np.int64]:
    """Returns the fold of each record of a client, by a permutation that its id and its number of
    records decide."""
    bits = keyed_bits(
        derive_key(problem.seed, "folds"), problem.data.keys[client], 0, torch.arange(count)
    )
    folds: NDArray[np.int64] = bits.argsort().argsort().numpy() % FOLDS
    return folds
