"""The forecast of the cost of privacy."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize
from sklearn.linear_model import LogisticRegression, Ridge

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.contrib import cost_of_privacy
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, DataError


def dataset(sizes: tuple[int, ...], *, classes: int | None = None) -> FederatedDataset:
    rng, truth, clients = np.random.default_rng(0), np.array([0.5, -0.5, 0.2]), {}
    for owner, n in enumerate(sizes):
        x = rng.uniform(-1, 1, (n, 3))
        y = x @ truth + 0.5 * rng.normal(size=n)
        clients[f"owner-{owner}"] = (x, y if classes is None else (y > 0).astype(np.int64))
    return FederatedDataset.from_tensors(clients, test=clients, classes=classes)


def fitness(
    x: np.ndarray, y: np.ndarray, theta: np.ndarray, *, squared: bool, reg: float = 1e-3
) -> float:
    losses = (x @ theta - y) ** 2 if squared else np.logaddexp(0, -y * (x @ theta))
    return float(losses.mean() + reg * theta @ theta)


@pytest.mark.parametrize("squared", [True, False])
def test_the_local_cost_is_psi_of_exact_fits(squared: bool) -> None:
    reg, sizes = 1e-3, (40, 400)
    data = dataset(sizes, classes=None if squared else 2)
    rows = LinearData.of_data(data)
    parts = [
        [part.numpy() for part in own] for own in (rows.pooled(), *zip(rows.x, rows.y, strict=True))
    ]
    models = []
    for x, y in parts:
        if squared:
            model = Ridge(alpha=reg * len(y), fit_intercept=False)
        else:
            model = LogisticRegression(
                C=1 / (2 * reg * len(y)),
                fit_intercept=False,
                solver="newton-cholesky",
                tol=1e-12,
                max_iter=10_000,
            )
        models.append(np.ravel(model.fit(x, y).coef_))
    least, *local = (fitness(*parts[0], theta, squared=squared) for theta in models)
    learner = AsyncLearner(reg=reg, loss="squared" if squared else "logistic")
    cost = cost_of_privacy(learner, data, {1.0: 2 * least, 2.0: 1.5 * least}, [1.0, 1.0])
    assert cost.local == pytest.approx([f / least - 1 for f in local], rel=1e-5, abs=1e-9)
    assert cost.local[0] > cost.local[1]


def test_the_forecast_recovers_its_constants_and_minimizes_relative_errors() -> None:
    data, learner, rng = dataset((40, 60)), AsyncLearner(reg=1e-3), np.random.default_rng(0)
    x, y = (part.numpy() for part in LinearData.of_data(data).pooled())
    least = fitness(
        x, y, Ridge(alpha=1e-3 * 100, fit_intercept=False).fit(x, y).coef_, squared=True
    )
    c1, c2, epsilons = 30.0, 500.0, (0.3, 1.0, 3.0, 10.0, 30.0)
    u = np.array([math.sqrt(2) / epsilon / 100 for epsilon in epsilons])

    def forecast(psi: np.ndarray, ahead: list[float], records: int | None = None):
        objectives = {e: least * (1 + value) for e, value in zip(epsilons, psi, strict=True)}
        return cost_of_privacy(learner, data, objectives, ahead, records=records)

    law = c1 * u + c2 * u**2
    found = forecast(law, [1.0, 2.0, 4.0], 500)
    root = math.sqrt(1 + 1 / 4 + 1 / 16) / 500
    assert found.shared == pytest.approx(c1 * root + c2 * root**2, rel=1e-6)
    assert found.error < 1e-6
    assert forecast(law, [1.0, math.inf]).shared == pytest.approx(c1 / 100 + c2 / 100**2, rel=1e-6)
    psi = law * np.exp(rng.normal(size=law.size))

    def relative(c: np.ndarray) -> float:
        return float(np.sum(((c[0] ** 2 * u + c[1] ** 2 * u**2 * 1e2) / psi - 1) ** 2))

    options = {"maxiter": 9999, "xatol": 1e-10, "fatol": 1e-12}
    general = optimize.minimize(relative, [3.0, 3.0], method="Nelder-Mead", options=options)
    assert forecast(psi, [1.0]).error ** 2 * law.size == pytest.approx(general.fun, rel=1e-6)
    for wrong, says in (
        ({"simulated": {1.0: 9.0}}, "at least 2"),
        ({"simulated": {1.0: 9.0, 2.0: least / 2}}, "above that of the exact"),
        ({"simulated": {1.0: 9.0, 2.0: math.inf}}, "above that of the exact"),
        ({"simulated": {1.0: 9.0, 0.0: 9.0}}, "each must be above 0"),
        ({"epsilons": []}, "each must be above 0"),
        ({"epsilons": [1.0, -1.0]}, "each must be above 0"),
        ({"records": 0}, "each must be above 0"),
        ({"learner": AsyncLearner(loss="hinge")}, "accepted: 'squared', 'logistic'"),
    ):
        good = {
            "learner": learner,
            "data": data,
            "simulated": {1.0: 9.0, 2.0: 5.0},
            "epsilons": [1.0, 1.0],
        }
        with pytest.raises(ConfigError, match=says):
            cost_of_privacy(**good | wrong)
    with pytest.raises(DataError, match="two classes"):
        cost_of_privacy(replace(learner, loss="logistic"), data, {1.0: 9.0, 2.0: 5.0}, [1.0])
