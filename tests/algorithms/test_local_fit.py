"""What every client has alone, exactly; as the baseline of the linear methods."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedmtl import (
    MPMTL,
    PMTL,
    PPDMTL,
    AsyncLearner,
    FedAvg,
    FullParticipation,
    Latencies,
    PoissonClocks,
    RecordPrivacy,
    models,
)
from fedmtl.algorithms.linear.data import LinearLoss
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.data import Domain, load_synthetic_tasks
from fedmtl.trainer.baselines import usual_baselines
from tests import small

SIZES = {"tasks": 3, "train_examples": 20, "test_examples": 10, "features": 4}
CASES = {
    "mp_mtl": (
        MPMTL(loss="squared", ridge=0.2, feature_norm=10.0),
        FullParticipation(),
        lambda r, w: (r @ r / 2, 0.1 * w @ w),
    ),
    "pp_dmtl": (
        PPDMTL(loss="squared", tau=0.3, feature_norm=10.0),
        Latencies(latency=1.0, per_client=2),
        lambda r, w: (r @ r, 0.15 * w @ w),
    ),
    "learner": (
        AsyncLearner(reg=0.1),
        PoissonClocks(per_client=2),
        lambda r, w: (r @ r, 0.1 * w @ w),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_local_baseline_minimizes_the_methods_own_function_of_a_clients_records(case):
    algorithm, schedule, terms = CASES[case]
    data = load_synthetic_tasks(**SIZES, problem="regression")
    given = {
        "data": data,
        "model": models.linear_regression(bias=False),
        "schedule": schedule,
        "rounds": 6,
    }
    found = (
        small.trainer(algorithm=algorithm, baselines=("local",), **given).fit().baselines["local"]
    )
    assert found.epsilon == 0.0
    assert found.privacy.headline == "nothing is released: epsilon = 0"
    for task, weights in enumerate(found.personal.numpy()):
        own = slice(int(data.train.offsets[task]), int(data.train.offsets[task + 1]))
        x, y = data.train.x[own].double().numpy(), data.train.y[own].double().numpy()

        def value(w: np.ndarray, x: np.ndarray = x, y: np.ndarray = y) -> float:
            loss, penalty = terms(x @ w - y, w)
            return float(loss / len(y) + penalty)

        assert weights == pytest.approx(
            minimize(value, np.zeros(4), method="BFGS", tol=1e-9).x, abs=2e-5
        )


def learner(**settings):
    """A run of the asynchronous learner beside what every owner has alone."""
    defaults = {
        "algorithm": AsyncLearner(reg=0.1),
        "data": load_synthetic_tasks(**SIZES, problem="regression"),
        "model": models.linear_regression(),
        "schedule": PoissonClocks(per_client=2),
        "privacy": RecordPrivacy(clip_norm=1.0, epsilon=2.0),
        "rounds": 6,
        "baselines": ("local",),
    }
    return small.trainer(**defaults | settings).fit()


def test_a_run_at_one_of_several_budgets_has_its_baseline(tmp_path):
    result = learner(epsilons=[1.0], folder=tmp_path / "run")
    assert 0.9 < result.epsilon <= 1.0
    assert result.baselines["local"].epsilon == 0.0
    assert (tmp_path / "run/private/result.json").exists()


@pytest.mark.parametrize("theta_max", [10.0, 0.05])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_the_baseline_of_the_learner_has_its_records_and_its_constraint(loss, theta_max):
    problem = "regression" if loss == "squared" else "classification"
    data = load_synthetic_tasks(**SIZES, problem=problem)
    target = 0.5 if loss == "squared" else None
    algorithm = AsyncLearner(
        loss=loss, reg=0.1, theta_max=theta_max, feature_norm=0.5, target=target
    )
    result = learner(algorithm=algorithm, data=data, privacy=None)
    found = result.baselines["local"]
    assert found.bounds == result.bounds
    bound = LinearLoss(loss)
    for task, weights in enumerate(found.personal):
        x = data.train.x[data.train.offsets[task] : data.train.offsets[task + 1]].double()
        y = data.train.y[data.train.offsets[task] : data.train.offsets[task + 1]].double()
        x = x * (0.5 / x.abs().sum(1, keepdim=True)).clamp(max=1)
        y = y.clamp(-0.5, 0.5) if loss == "squared" else 2 * y - 1
        rows = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)

        def value(w, rows=rows, y=y):
            w = torch.from_numpy(w)
            return float(bound.value(w[None], rows, y).mean() + 0.1 * w @ w)

        limits = [(-theta_max, theta_max)] * 5
        best = minimize(value, np.zeros(5), method="L-BFGS-B", bounds=limits, tol=1e-12)
        assert value(weights.numpy()) == pytest.approx(best.fun, rel=1e-6)
        assert weights.numpy() == pytest.approx(best.x, abs=2e-4)


def test_the_baseline_of_the_learner_has_the_bounds_that_the_data_state():
    data = load_synthetic_tasks(**SIZES, problem="regression")
    stated = replace(data, domain=Domain(l1=0.5, l2=0.3, target=0.4))
    auto = learner(
        data=stated, algorithm=AsyncLearner(reg=1, feature_norm="auto", target="auto"), privacy=None
    ).baselines["local"]
    given = learner(
        data=data, algorithm=AsyncLearner(reg=1, feature_norm=0.5, target=0.4), privacy=None
    )
    assert torch.equal(auto.personal, given.baselines["local"].personal)
    assert auto.bounds == given.bounds


def test_who_has_which_baselines():
    assert AsyncLearner(loss="logistic", reg=0.1).local_baseline() == LocalFit(
        loss="logistic", ridge=0.2, theta_max=10.0, norm="l1"
    )
    assert AsyncLearner(reg=0.1).local_baseline().ridge == 0.1  # of half the squared loss
    assert AsyncLearner(loss="hinge").local_baseline() is None
    assert PMTL().local_baseline() is None
    for algorithm, names in (
        (PMTL(), ("local", "fedavg")),
        (FedAvg(), ("local", "pmtl")),
        (AsyncLearner(loss="hinge"), ()),
        (PPDMTL(feature_norm=1.0), ("local",)),
        (MPMTL(feature_norm=1.0), ("local",)),
        ("auto", ("local",)),
    ):
        assert usual_baselines(SimpleNamespace(algorithm=algorithm, runs=1)) == names
        assert usual_baselines(SimpleNamespace(algorithm=algorithm, runs=2)) == ()
