"""The cost of privacy and the value of collaboration (Farokhi et al. 2021, sections IV and V).

    psi(theta) = f(theta) / f(theta*) - 1

is how much worse than the exact minimizer theta* a model is. With noise it behaves as

    c1 / n sqrt(sum_i 1 / eps_i^2) + c2 / n^2 sum_i 1 / eps_i^2                                     (11)

whose two constants are fitted to simulations, on public records or on records of another year. Owners can then predict
the psi of a run before they take part in it, and compare it with the psi of what each could train alone.

Everything here reads records without noise: on private records its results are not private.

    learner, clocks = AsyncLearner(kappa="auto", psi=True), PoissonClocks(per_client=10)
    runs = Trainer(learner, data, models.linear_regression(bias=False), clocks, privacy, replicates=20,
                   epsilons=(1, 3, 10), ...).fit()
    rows, n = runs.bands, int(data.train.counts.sum())
    forecast = fit_forecast([n] * 3, [[row["budget"]] * len(data) for row in rows], [row["psi"] for row in rows])
    forecast(2 * n, [1.0] * len(data))                                            # of twice the records
    Collaboration.of(learner, data).is_collaboration_worth(0, forecast, [1.0] * len(data)).worth
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from ..._check import positive_int
from ...data import FederatedDataset
from ...errors import ConfigError
from ...privacy import RecordPrivacy, open_channel
from ...random import derive_key
from ..linear.data import LinearData, LinearLoss
from .central import CentralLearner
from .fitness import Fitness, Optimum
from .learner_data import LearnerData
from .one_answer import OneAnswer

if TYPE_CHECKING:
    from .algorithm import AsyncLearner

KAPPAS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0)


@dataclass(frozen=True)
class Worth:
    """What collaborating is worth for one owner.

    Attributes:
        alone: psi, on everybody's records, of the exact model of the owner's own records.
        together: forecast psi of the private model of everybody.
        worth: whether ``together`` is below ``alone``.
    """

    alone: float
    together: float

    @property
    def worth(self) -> bool:
        return self.together < self.alone


@dataclass(frozen=True, eq=False)
class Collaboration:
    """Owners and the problem they might solve together.

    Args:
        learner: settings of the problem (loss, reg, theta_max, domain).
        data: the owners' records; forced into the learner's domain where it has one.
    """

    learner: CentralLearner
    data: LinearData

    @classmethod
    def of(cls, learner: CentralLearner, data: FederatedDataset, *, bias: bool = False) -> Collaboration:
        """The owners of a dataset, with a linear model that has a bias or none.

        Raises:
            DataError: more than two classes, or several targets a record.
        """
        return cls(learner, LinearData.of_data(data, bias=bias))

    @cached_property
    def _bounded(self) -> LinearData:
        return self.learner.bounded(self.data)

    def _fitness(self, x: Tensor, y: Tensor) -> Fitness:
        return Fitness(x, y, LinearLoss(self.learner.loss), self.learner.reg, self.learner.theta_max)

    @cached_property
    def together(self) -> Fitness:
        """Fitness on everybody's records."""
        return self._fitness(*self._bounded.pooled())

    def alone(self, owner: int) -> Optimum:
        """theta_i*, the exact minimizer of (2) on the records of one owner."""
        return self._fitness(self._bounded.x[owner], self._bounded.y[owner]).optimum

    def is_collaboration_worth(self, owner: int, forecast: Forecast, epsilons: Sequence[float]) -> Worth:
        """Compare the forecast of the private model with what ``owner`` has alone.

        Args:
            owner: position in the data.
            forecast: fitted to simulations.
            epsilons: budget of each owner.

        Raises:
            ConfigError: an unknown owner, or not one budget for each.
        """
        if not 0 <= owner < len(self.data.x):
            raise ConfigError(f"owner is {owner}; the owners are 0 .. {len(self.data.x) - 1}.")
        if len(epsilons) != len(self.data.x):
            raise ConfigError(f"{len(epsilons):,} epsilons for {len(self.data.x):,} owners; give one to each.")
        psi = float(self.together.psi(self.alone(owner).theta))
        return Worth(psi, forecast(int(self.data.counts.sum()), epsilons))


def spread(n: float, epsilons: Sequence[float]) -> float:
    """u = sqrt(sum_i 1 / eps_i^2) / n, of which (11) is c1 u + c2 u^2; infinite budgets add nothing.

    Raises:
        ConfigError: no records, no owners or a budget that is not above 0.
    """
    values = np.asarray(epsilons, dtype=np.float64)
    if not n > 0 or values.size == 0 or not (values > 0).all():
        raise ConfigError(f"n is {n!r} and epsilons are {list(epsilons)!r}; each must be above 0.")
    return float(np.sqrt((1 / values**2).sum()) / n)


@dataclass(frozen=True)
class Forecast:
    """Equation (11): ``forecast(n, epsilons)`` is the expected psi.

    Attributes:
        c1, c2: at least 0.
        error: root mean square of the relative errors of the fit; 0 if not fitted.
    """

    c1: float
    c2: float
    error: float = 0.0

    def __call__(self, n: float, epsilons: Sequence[float]) -> float:
        """psi for ``n`` records of all owners, with a budget for each owner."""
        u = spread(n, epsilons)
        return self.c1 * u + self.c2 * u**2


def fit_forecast(n: Sequence[float], epsilons: Sequence[Sequence[float]], psi: Sequence[float]) -> Forecast:
    """c1, c2 >= 0 that minimize the sum of squared *relative* errors of (11).

    Args:
        n: (m,) records of all owners, of each simulated setting.
        epsilons: m sequences of the owners' budgets; they may differ in length.
        psi: (m,) mean psi of each setting, above 0.

    Raises:
        ConfigError: lengths that disagree, fewer than 2 settings, or a psi that is not a finite number above 0.
    """
    values = np.asarray(psi, dtype=np.float64)
    if not len(n) == len(epsilons) == values.size or values.size < 2:
        raise ConfigError(
            f"{len(n)} n, {len(epsilons)} epsilons, {values.size} psi; needed: the same number, at least 2."
        )
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"psi is {values.tolist()!r}; every one must be a finite number above 0.")
    u = np.array([spread(m, e) for m, e in zip(n, epsilons, strict=True)])
    unit = u.max()  # so that both columns are of one order
    if unit == 0:
        raise ConfigError("Every budget is infinite, so there is nothing to fit; leave noise in.")
    design = np.column_stack([u / unit, (u / unit) ** 2]) / values[:, None]
    constants, residual = optimize.nnls(design, np.ones(values.size))
    return Forecast(float(constants[0] / unit), float(constants[1] / unit**2), float(residual / math.sqrt(values.size)))


@dataclass(frozen=True)
class Slope:
    """A slope of log y against log x, with its 95% confidence interval (Student's t)."""

    slope: float
    low: float
    high: float


def log_log_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares of log y on log x; at least 3 points above 0.

    Raises:
        ConfigError: fewer points, or one that is not above 0.
    """
    from scipy.stats import linregress, t

    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.shape != b.shape or a.size < 3 or not ((a > 0).all() and (b > 0).all()):
        raise ConfigError("log_log_slope needs at least 3 pairs of numbers above 0.")
    line = linregress(np.log(a), np.log(b))
    half = t.ppf(0.975, a.size - 2) * line.stderr
    return Slope(float(line.slope), float(line.slope - half), float(line.slope + half))


def simulate(
    learner: CentralLearner,
    data: LinearData,
    privacy: RecordPrivacy | None,
    clients: Tensor,
    *,
    ids: tuple[str, ...] = (),
    caps: np.ndarray | None = None,
    seed: int = 0,
    public: LinearData | None = None,
    shorten: bool = False,
) -> Tensor:
    """R repetitions of a run as one program, without a trainer: simulated noise, in memory.

    Args:
        learner, privacy: settings; ``privacy`` None is a run without clip and noise.
        data: the owners' records.
        clients: int64 (R, S), who answers at each activation; -1 is nobody.
        ids: the owners' names, for groups and budgets by name; default "0", "1", ...
        caps: int64 (n,), most answers of each owner, to which noise is calibrated; default the most that any
            repetition asks for.
        seed: of the noise.
        public: the public rows, for a learner that starts at their fit.
        shorten: every repetition ends where an owner is asked beyond its cap, as a run does.

    Returns:
        (R, p) float64, theta_L after the last activation.

    Raises:
        BudgetExhausted: an owner is asked beyond its cap, without ``shorten``.
    """
    names = ids or tuple(map(str, range(len(data.x))))
    data = learner.bounded(data)
    replicates, events = clients.shape
    if caps is None:
        answers = [torch.bincount(row[row >= 0], minlength=len(names)) for row in clients]
        caps = torch.stack(answers).amax(0).numpy()
    caps = learner.hard_caps(caps, events)
    plan = learner.released(data, names, caps)
    channel = open_channel(privacy, (plan,), "activations as given", seed=seed, replicates=replicates)
    if shorten:
        fitting = torch.from_numpy(channel.account.fitting(clients.numpy()[:, :, None]))
        clients = torch.where(torch.arange(events) < fitting[:, None], clients, -1)
    if isinstance(learner, OneAnswer):
        state = learner.start(data, public, replicates)
        channel.begin(0, clients)
        learner.hear(state, clients.numpy().T, channel, learner.asked(data, state, clipped=privacy is not None))
        learner.solve(state, data.counts, learner.prior(public, channel.sums.clip), channel.sums.clip)
        channel.close()
        return state["theta_l"]
    steps = cast("AsyncLearner", learner)
    work = LearnerData.of(steps, data, names)
    state = work.start(replicates)
    step = steps.effective_step(work.copies, len(names), events)
    updates = steps.updates(work, state, step, clipped=privacy is not None)
    for first in range(0, events, 1024):
        block = clients[:, first : first + 1024]
        channel.begin(first, block)
        updates.run(block.numpy().T.copy(), channel.answers(updates.message))
    channel.close()
    return state["theta_l"]


@dataclass(frozen=True)
class KappaChoice:
    """Mean psi of every kappa that was tried, and the one with the least."""

    kappa: float
    psi: dict[float, float]


def choose_kappa(
    learner: AsyncLearner,
    public: LinearData,
    *,
    counts: Sequence[int],
    privacy: RecordPrivacy | None,
    clients: Tensor,
    ids: tuple[str, ...] = (),
    caps: np.ndarray | None = None,
    kappas: Sequence[float] = KAPPAS,
    seed: int = 0,
) -> KappaChoice:
    """kappa of ``step_size="auto"`` by noisy simulation on public rows: owners of the true sizes, whose records are
    drawn from the public ones with replacement, the true budgets and caps, R repetitions of the noise.

    Args:
        learner: settings; its ``step_size`` and ``kappa`` are not used.
        public: public records, of any owners; what is learned from them is outside of every epsilon.
        counts: n_i, public.
        privacy, clients, ids, caps, seed: as for :func:`simulate`.
        kappas: candidates.

    Raises:
        ConfigError: no candidates, or sizes that are not positive.
    """
    if not kappas:
        raise ConfigError("choose_kappa needs at least 1 candidate in kappas.")
    for count in counts:
        positive_int("choose_kappa", counts=count)
    x, y = public.pooled()
    rng = np.random.default_rng(derive_key(seed, "public rows"))
    drawn = [torch.from_numpy(rng.integers(0, len(y), count)) for count in counts]
    data = LinearData(tuple(x[i] for i in drawn), tuple(y[i] for i in drawn), public.bias, public.name)
    fitness = Collaboration(learner, data).together
    psi = {}
    for kappa in kappas:
        tried = replace(learner, step_size="auto", kappa=float(kappa))
        theta = simulate(tried, data, privacy, clients, ids=ids, caps=caps, seed=seed, shorten=True)
        psi[float(kappa)] = float(fitness.psi(theta).mean())
    return KappaChoice(min(psi, key=lambda kappa: psi[kappa]), psi)
