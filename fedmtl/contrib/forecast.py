"""The forecast of the cost of privacy (Farokhi et al. 2021, sections IV and V).

An owner decides by it about joining. Runs at a few budgets fit the forecast. It tells the owners
that gain by a run of twice the records:

    learner = AsyncLearner(kappa=5.0)
    runs = Trainer(algorithm=learner, data=data, model=models.linear_regression(bias=False),
                   schedule=PoissonClocks(per_client=10), replicates=20, privacy=privacy,
                   epsilons=(1, 3, 10), ...).fit()
    simulated = {row["budget"]: row["objective"] for row in runs.bands}
    cost = cost_of_privacy(learner, data, simulated, epsilons=[1.0] * len(data),
                           records=2 * len(data.train))
    [name for name, local in zip(data.ids, cost.local, strict=True) if cost.shared < local]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from .._check import one_of
from ..algorithms.async_learner.central import CentralLearner
from ..algorithms.linear.data import LinearData
from ..algorithms.linear.solve import minimize
from ..data import FederatedDataset
from ..errors import ConfigError


class CostOfPrivacy(NamedTuple):
    """psi of the private model of all owners, and of every owner's local model.

    Attributes:
        shared: the forecast of the private model.
        local: of the exact fit of every owner's own records, in the order of the data.
        error: root mean square of the relative errors of the fit to the simulated runs.

    Example:
        >>> from fedmtl.contrib import CostOfPrivacy
        >>> cost = CostOfPrivacy(shared=0.1, local=(0.3, 0.05), error=0.02)
        >>> [cost.shared < local for local in cost.local]  # the owners that gain
        [True, False]
    """

    shared: float
    local: tuple[float, ...]
    error: float


def cost_of_privacy(
    learner: CentralLearner,
    data: FederatedDataset,
    simulated: Mapping[float, float],
    epsilons: Sequence[float],
    *,
    records: int | None = None,
    bias: bool = False,
) -> CostOfPrivacy:
    """Forecasts the cost of privacy of a run from simulated ones.

    It is psi(theta) = f(theta) / f(theta*) - 1. theta* is the exact minimizer of f, equation (2),
    on the records of all owners. With noise, and n records of all owners, psi behaves as

        c1 u + c2 u^2,    u = sqrt(sum_i 1 / epsilon_i^2) / n                                   (11)

    with constants by a least squares fit, of relative errors, to the simulated runs. An owner gains
    by joining if ``shared`` is below its ``local``. The records are read without noise, so on
    private records the result is not private: use public records or those of another year.

    Args:
        learner: with the squared or the logistic loss.
        data: the owners' records of the simulated runs.
        simulated: mean objective f of the runs, by the finite epsilon that every owner has in them;
            at least 2.
        epsilons: of the owners in the run that is forecast; an infinite one adds no noise.
        records: of all owners in the run that is forecast; None: those of ``data``.
        bias: True if the model has a bias.

    Returns:
        The fitted constants, and the forecast costs of the run and of each owner alone.

    Raises:
        ConfigError: a hinge loss, fewer than 2 simulated epsilons, objectives that are not above
            the least one, or epsilons and records that are not above 0.
        DataError: targets that do not suit the loss.

    Example:
        >>> from fedmtl import AsyncLearner, load_data
        >>> from fedmtl.contrib import cost_of_privacy
        >>> data = load_data("synthetic_tasks", tasks=4, problem="regression")
        >>> objectives = {1.0: 0.9, 3.0: 0.6, 10.0: 0.5}  # of simulated runs, by epsilon
        >>> learner = AsyncLearner(feature_norm=1.0)
        >>> cost = cost_of_privacy(learner, data, objectives, epsilons=[1.0] * 4)
        >>> len(cost.local)
        4
    """
    one_of("cost_of_privacy", ("squared", "logistic"), loss=learner.loss)
    rows = learner.bounded(LinearData.of_data(data, bias=bias), data.domain)
    loss = learner.linear_loss
    ridge = 2 * learner.reg
    everyone = rows.pooled()
    count = len(everyone[1])
    # theta* of all records, then the local fit of every owner
    exact = []
    for x, y in [everyone, *zip(rows.x, rows.y, strict=True)]:
        fit = minimize(loss, x.numpy(), y.numpy(), ridge, box=learner.theta_max)
        exact.append(fit.theta)
    least, *local = learner.fitness(rows, torch.from_numpy(np.stack(exact))).tolist()
    values = np.array([*simulated.values()], dtype=np.float64)
    above = least > 0 and (values > least).all() and np.isfinite(values).all()
    if len(simulated) < 2 or not above:
        raise ConfigError(
            f"The objectives of simulated are {values.tolist()!r}; needed: at least 2, above that "
            f"of the exact minimizer, {least:g}, which must be above 0."
        )
    # u of the simulated runs, in which all owners have one epsilon
    noises = [noise_of([epsilon] * len(rows.x), count) for epsilon in simulated]
    forecast = Forecast.fit(noises, values / least - 1)
    if records is None:
        records = count
    shared = forecast(noise_of(epsilons, records))
    costs = tuple(objective / least - 1 for objective in local)
    return CostOfPrivacy(shared, costs, forecast.error)


class Forecast(NamedTuple):
    """psi by u, equation (11).

    Attributes:
        c1: at least 0.
        c2: at least 0.
        error: root mean square of the relative errors of the fit.
    """

    c1: float
    c2: float
    error: float

    @classmethod
    def fit(cls, u: ArrayLike, psi: ArrayLike) -> Forecast:
        """Fits the constants by least squares of relative errors.

        Args:
            u: (m,), the noise of simulations.
            psi: (m,), their costs, above 0.
        """
        noise = np.asarray(u, dtype=np.float64)
        costs = np.asarray(psi, dtype=np.float64)
        unit = noise.max()  # so that both columns are of one order
        design = np.column_stack([noise / unit, (noise / unit) ** 2]) / costs[:, None]
        (c1, c2), residual = nnls(design, np.ones(len(costs)))
        error = float(residual / math.sqrt(len(costs)))
        return cls(float(c1 / unit), float(c2 / unit**2), error)

    def __call__(self, u: float) -> float:
        """Returns psi."""
        return self.c1 * u + self.c2 * u**2


def noise_of(epsilons: Sequence[float], records: int) -> float:
    """Returns u of (11).

    Raises:
        ConfigError: epsilons or records that are not above 0.
    """
    values = np.array(epsilons, dtype=np.float64)
    if len(values) == 0 or not (values > 0).all() or records < 1:
        given = f"records is {records!r} and epsilons are {values.tolist()!r}"
        raise ConfigError(f"{given}; each must be above 0.")
    return float(np.sqrt((1 / values**2).sum()) / records)
