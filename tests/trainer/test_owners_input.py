"""Owners with little or nothing to say, and settings that do not fit the owners, through the trainer."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from fedmtl import PPDMTL, AsyncLearner, Latencies, PoissonClocks, RecordPrivacy, Trainer, models
from fedmtl.data import FederatedDataset
from fedmtl.schedules import TraceLatency
from fedmtl.trainer.engine import open_run
from fedmtl.trainer.problem import build_problem
from tests import small

from .ledgers import participations

COUNTS, D, ANSWERS = (1, 8, 5), 3, 4


def owners(seed: int = 0) -> FederatedDataset:
    """Three owners, the first of a single record."""
    rng = np.random.default_rng(seed)
    clients = {}
    for k, n in enumerate(COUNTS):
        x = rng.normal(size=(n, D)) / 4
        clients[f"o{k}"] = (x, np.where(x.sum(1) < 0, -1.0, 1.0))
    return FederatedDataset.from_tensors(clients, test=clients, classes=2)


DATA = owners()
METHODS = {
    "learner": (AsyncLearner(loss="logistic", reg=1e-3), "laplace", 0.0),
    "pp_dmtl": (PPDMTL(row_norm=1.0, loss="logistic"), "l2_laplace", 1e-5),
}


def trainer(method: str, *, epsilon=2.0, per_client=ANSWERS, **settings) -> Trainer:
    algorithm, mechanism, delta = METHODS[method]
    defaults = {
        "data": DATA,
        "algorithm": algorithm,
        "model": models.linear_regression(bias=False),
        "schedule": PoissonClocks(per_client=per_client),
        "privacy": RecordPrivacy(clip_norm=1.0, epsilon=epsilon, mechanism=mechanism, delta=delta),
        "rounds": 1000,
    }
    return small.trainer(**defaults | settings)


@pytest.mark.parametrize("method", METHODS)
def test_an_owner_with_one_record_takes_part_under_its_own_sensitivity(method, tmp_path):
    """Its noise is 8 times that of an owner with 8 records, under the same budget."""
    result = trainer(method, folder=tmp_path / "run").fit()
    assert participations(tmp_path / "run/private/ledger.jsonl") == Counter(dict.fromkeys(range(3), ANSWERS))
    assert result.personal.shape == (3, D)
    assert bool(torch.isfinite(result.personal).all())
    low, _, high = result.privacy.by_client
    assert 1.99 < low <= high <= 2.0
    privacy = RecordPrivacy(clip_norm=1.0, noise_multiplier=0.7, mechanism=METHODS[method][1], delta=1e-5)
    spread = []
    for owner in (0, 1):
        alone = [ANSWERS if k == owner else 0 for k in range(3)]
        releases = released(trainer(method, per_client=[400 * a for a in alone], privacy=privacy))
        spread.append(releases.std(0).mean().item())
    assert spread[0] / spread[1] == pytest.approx(8.0, rel=0.15)


def released(run: Trainer) -> torch.Tensor:
    """The releases of the only owner that answers, of gradients that are 0: its noise."""
    problem = build_problem(run.data, run.model, "auto", run.execution, run.rounds, 0, "cpu", "float64")
    channel, source = open_run(run.algorithm, problem, run.schedule, run.privacy, seed=0)
    channel.record = []
    for block in source.blocks(0):
        source.begin(block)
        for _ in range(len(block)):
            channel.release([np.zeros((len(where), COUNTS[k])) for k, where in channel.acting])
    return torch.stack([value[0] for _, _, value in channel.record])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["cap", "rate", "trace"])
def test_an_owner_that_never_wakes_is_charged_nothing_and_holds_up_nobody(method, how, tmp_path):
    schedule = {
        "cap": PoissonClocks(per_client=[ANSWERS, 0, ANSWERS]),
        "rate": PoissonClocks(per_client=ANSWERS, rate=[1.0, 0.0, 2.0]),
        "trace": Latencies(latency=TraceLatency([[1.0], [1e9], [2.0]]), activations=[ANSWERS, 0, ANSWERS]),
    }[how]
    result = trainer(method, schedule=schedule, folder=tmp_path / "run").fit()
    assert participations(tmp_path / "run/private/ledger.jsonl") == {0: ANSWERS, 2: ANSWERS}
    low, middle, high = result.privacy.by_client
    assert low == 0
    assert 1.99 < middle <= high <= 2.0
    assert bool(torch.isfinite(result.personal).all())
    assert all(math.isfinite(value) for value in result.history[-1].values() if isinstance(value, float))


@pytest.mark.parametrize("method", METHODS)
def test_budgets_that_differ_are_each_owners_own(method):
    result = trainer(method, epsilon={"o0": 4.0, "o1": 1.0, "o2": 2.0}).fit()
    assert [round(e, 2) for e in result.privacy.by_client] == [1.0, 2.0, 4.0]
