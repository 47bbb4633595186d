"""Who is scored: a sample of clients, with the numbers of a run that evaluates all; only those with test examples."""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fedmtl import (
    PMTL,
    ClientPrivacy,
    FedAvg,
    Finetune,
    Local,
    LocalSGD,
    PoissonSampling,
    models,
)
from fedmtl.cli.commands import verify
from fedmtl.data import Examples, FederatedDataset
from fedmtl.errors import ConfigError
from fedmtl.trainer.comparison import Stage, beside, each_beside, verdict
from fedmtl.trainer.evaluation import evaluated_clients
from fedmtl.trainer.metrics import REGISTRY
from tests import small
from tests.helpers import ragged_classification, regression


def without_test(data: FederatedDataset, clients: list[int]) -> FederatedDataset:
    """The same data, but ``clients`` have no test examples."""
    owner = torch.repeat_interleave(torch.arange(len(data)), data.test.counts)
    kept = ~torch.isin(owner, torch.tensor(clients))
    counts = data.test.counts.clone()
    counts[clients] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return replace(data, test=Examples(data.test.x[kept], data.test.y[kept], offsets))


SOLVER = LocalSGD(lr=0.1, epochs=2, batch_size=3)
DATA = without_test(ragged_classification(clients=30), [4, 9])
TESTED = 28


def trained(folder=None, **options):
    return trainer(folder=folder, **options).fit()


def trainer(**options):
    settings = {
        "algorithm": PMTL(local=SOLVER),
        "data": DATA,
        "schedule": PoissonSampling(cohort=5),
        "privacy": ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-3),
        "metrics": ("auc",),
        "baselines": ("local", "fedavg"),
    }
    return small.trainer(rounds=4, eval_every=2, **settings | options)


def test_the_scores_are_those_of_a_run_that_evaluates_all():
    some, every = trained(evaluate_clients=12), trained()
    assert some.epsilon == every.epsilon
    assert len(set(some.evaluated)) == 12
    assert set(some.evaluated) <= set(every.personal_accuracy)  # of those with something to test on
    names = list(some.evaluated)
    assert list(some.personal_accuracy) == names
    assert all(run.evaluated == some.evaluated for run in some.baselines.values())
    for mine, other in (
        (some, every),
        *((some.baselines[name], every.baselines[name]) for name in some.baselines),
    ):
        rows = [every.ids.index(name) for name in names]
        torch.testing.assert_close(mine.personal, other.personal[rows], rtol=1e-12, atol=1e-12)
        for metric in ("accuracy", "loss", "auc"):
            expected = {
                name: value for name, value in other.by_client[metric].items() if name in names
            }
            assert mine.by_client[metric] == pytest.approx(expected, rel=1e-12)
            assert mine.final[metric] == pytest.approx(np.mean(list(expected.values())), rel=1e-12)
        if mine.shared is not None:
            assert torch.equal(mine.shared, other.shared)
            shared = {name: other.shared_accuracy[name] for name in names}
            assert mine.shared_accuracy == pytest.approx(shared)
            assert mine.final["global_accuracy"] == pytest.approx(np.mean(list(shared.values())))


def test_the_standard_error_is_that_of_a_sample_without_replacement(tmp_path):
    run = trained(tmp_path, evaluate_clients=12)
    scores = np.array(list(run.personal_accuracy.values()))
    error = scores.std(ddof=1) / math.sqrt(12) * math.sqrt(1 - 12 / TESTED)
    written = json.loads((tmp_path / "private/result.json").read_text())
    assert written["standard_error"] == pytest.approx(error)
    assert written["clients"] == 30
    assert written["scored_clients"] == 12
    assert "30 clients (12 of them evaluated)" in run.summary()
    assert f"standard error of the means: accuracy {error:.3f}, auc 0" in run.summary()
    assert "standard error" not in trained(evaluate_clients=TESTED).summary()


def test_the_mean_of_all_samples_is_that_of_all_clients_and_their_spread_the_standard_error():
    problem = trainer().problem()
    values = np.random.default_rng(0).normal(size=30)
    drawn = [evaluated_clients(replace(problem, seed=seed), 7)[0].numpy() for seed in range(500)]
    tested = np.delete(np.arange(30), [4, 9])
    means = np.array([values[clients].mean() for clients in drawn])
    error = values[tested].std(ddof=1) / math.sqrt(7) * math.sqrt(1 - 7 / TESTED)
    assert abs(means.mean() - values[tested].mean()) < 4 * error / math.sqrt(500)
    assert means.std() == pytest.approx(error, rel=4 / math.sqrt(2 * 500))
    often = np.bincount(np.concatenate(drawn), minlength=30)
    assert (often[[4, 9]] == 0).all()
    assert np.abs(often[tested] / 500 - 7 / TESTED).max() < 0.08


def test_who_is_evaluated_does_not_depend_on_the_order_of_clients():
    turned = DATA.subset(DATA.ids[::-1])
    one, other = (trained(data=data, evaluate_clients=6, baselines=()) for data in (DATA, turned))
    assert set(one.evaluated) == set(other.evaluated)
    assert one.evaluated == other.evaluated[::-1]


def test_ids_that_are_positions_of_other_clients_are_evaluated():
    data = replace(DATA, ids=tuple(map(str, range(29, -1, -1))), verify=False)
    run = trained(data=data, evaluate_clients=6, baselines=())
    assert len(run.evaluated) == 6
    assert set(run.evaluated) <= set(data.ids)


@pytest.mark.usefixtures("real_figures")
def test_files_of_a_run_that_evaluates_some(tmp_path):
    run = trained(tmp_path, evaluate_clients=6)
    with (tmp_path / "private/clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == list(DATA.ids)
    for name in ("accuracy", "shared accuracy", "local accuracy"):
        assert {row["client"] for row in rows if row[name]} == set(run.evaluated)
    assert "nan" not in (tmp_path / "private/metrics.csv").read_text()
    assert (tmp_path / "private/clients.png").stat().st_size > 1000
    with safe_open(tmp_path / "private/models.safetensors", "pt") as file:
        assert json.loads(file.metadata()["ids"]) == list(run.evaluated)
        assert torch.equal(file.get_tensor("models"), run.personal)
    one = next(name for name in DATA.ids if name not in run.evaluated)
    with pytest.raises(ConfigError, match="is not one of the 6 that were evaluated"):
        run.model_for(one)
    assert verify([str(tmp_path)]) == 0


def test_finetuning_is_of_these_clients():
    way = Finetune(local=SOLVER, validation=0.3)
    some, every = trained(finetune=way, evaluate_clients=8), trained(finetune=way)
    names = list(some.evaluated)
    assert some.by_client["accuracy"] == pytest.approx(
        {name: every.by_client["accuracy"][name] for name in names}
    )
    assert some.finetuned.chosen == {name: every.finetuned.chosen[name] for name in names}


# Clients without test examples


@pytest.mark.parametrize(
    "algorithm", [Local(local=LocalSGD(lr=0.1)), FedAvg(local=LocalSGD(lr=0.1))]
)
def test_means_are_over_the_clients_that_have_test_examples(algorithm):
    whole = ragged_classification(clients=7)
    every, some = (
        small.trainer(algorithm=algorithm, data=data, rounds=3).fit()
        for data in (whole, without_test(whole, [2, 6]))
    )
    torch.testing.assert_close(
        some.personal, every.personal, rtol=0, atol=0
    )  # they train all the same
    left = [f"client-{i}" for i in (0, 1, 3, 4, 5)]
    assert list(some.personal_accuracy) == left
    assert some.personal_accuracy == {name: every.personal_accuracy[name] for name in left}
    scores = np.array([every.personal_accuracy[name] for name in left])
    assert some.final["accuracy"] == pytest.approx(scores.mean(), abs=1e-12)
    assert some.final["spread"] == pytest.approx(scores.std(), abs=1e-12)
    assert some.final["worst_tenth"] == pytest.approx(scores.min(), abs=1e-12)
    assert all(
        math.isfinite(value)
        for row in some.history
        for key, value in row.items()
        if key != "epsilon"
    )
    assert "7 clients (5 scored, the others have nothing to test on)" in some.summary()
    assert "scored" not in every.summary()
    assert some.model_for("client-2") is not None


def test_a_regression_leaves_them_out_of_every_error():
    data = without_test(regression(clients=4), [1])
    run = small.trainer(
        algorithm=Local(local=LocalSGD(lr=0.05)), data=data, model=models.linear_regression()
    ).fit()
    errors, targets = [], []
    for i in (0, 2, 3):
        own = data.subset([data.ids[i]]).test
        w = run.personal[i].numpy()
        errors.append((own.x.numpy() @ w[:4] + w[4] - own.y.numpy()) ** 2)
        targets.append(own.y.numpy())
    means = np.array([error.mean() for error in errors])
    assert run.final["mse"] == pytest.approx(means.mean(), rel=1e-10)
    assert run.final["worst_tenth"] == pytest.approx(means.max(), rel=1e-10)
    assert run.final["nmse"] == pytest.approx(
        np.mean(means / [y.var() for y in targets]), rel=1e-10
    )
    pooled = np.concatenate(errors).mean() / np.concatenate(targets).var()
    assert run.final["pooled_nmse"] == pytest.approx(pooled, rel=1e-10)


TOGETHER = {"a": 1.0, "b": 2.0, "c": 9.0, "d": 3.0, "e": 2.5, "new": 7.0}
ALONE = {"a": 2.0, "b": 2.0, "c": 4.0, "d": 2.0, "e": 10.0, "old": 0.0}


def test_the_verdict_says_for_how_many_clients_and_who_lost() -> None:
    """Means 17.5 / 5 and 20 / 5 of the five clients with both scores."""
    own, alone = (
        Stage(name, {"mse": scores}) for name, scores in (("own", TOGETHER), ("local", ALONE))
    )
    assert verdict(own, alone, REGISTRY["mse"], torch.float32) == (
        "better than alone: the mean error (mse) is 12% lower; "
        "of 5 clients 2 (40%) are better off, 1 (20%) equal, 2 (40%) worse (most: c, d)"
    )
    text = verdict(alone, own, REGISTRY["mse"], torch.float32)
    assert text.startswith("worse than alone: the mean error (mse) is 14% higher; of 5 clients")
    assert text.endswith("2 (40%) worse (most: e, a)")
    own, alone = (
        Stage(stage.label, {"accuracy": stage.by_client["mse"]}) for stage in (own, alone)
    )
    assert verdict(own, alone, REGISTRY["accuracy"], torch.float32) == (
        "worse than alone: the mean accuracy is 3.500, alone 4.000; "
        "of 5 clients 2 (40%) are better off, 1 (20%) equal, 2 (40%) worse (most: e, a)"
    )


@pytest.mark.parametrize(
    ("together", "expected"),
    [
        ([1, 1, 1, 9], "worse than alone on average, but better for most clients: the mean error"),
        ([3, 3, 3, -9], "better than alone on average, but worse for most clients: "),
        ([1, 1, 1, 5], "the same as alone on average, but better for most clients: "),
        ([3, 3, 3, -1], "the same as alone on average, but worse for most clients: "),
        ([1, 1, 3, 3], "the same as alone: the mean error (mse) is the same; of 4 clients 2 (50%)"),
        ([1, 1, 3, 2], "better than alone: the mean error (mse) is 12% lower; of 4 clients 2"),
    ],
)
def test_the_verdict_tells_a_mean_from_most_clients(together, expected) -> None:
    """Alone each has 2: means 2 of four clients by hand."""
    own, alone = (
        Stage(name, {"mse": dict(zip("abcd", map(float, scores), strict=True))})
        for name, scores in (("own", together), ("local", [2] * 4))
    )
    assert verdict(own, alone, REGISTRY["mse"], torch.float32).startswith(expected)


def test_each_client_is_better_equal_or_worse_than_alone() -> None:
    alone = Stage("local", {"mse": {"a": 2.0, "b": 2.0, "c": 2.0, "d": 2.0}})
    own = Stage("run", {"mse": {"a": 1.0, "b": 2.0, "c": 3.0, "e": 0.0}})
    expected = {"a": "better", "b": "equal", "c": "worse"}
    assert each_beside(own, alone, REGISTRY["mse"], torch.float32) == expected
    assert beside(own, alone, REGISTRY["mse"], torch.float32) == pytest.approx(
        (1 / 3, 1 / 3, 1 / 3)
    )
    accuracies = [
        Stage(stage.label, {"accuracy": stage.by_client["mse"]}) for stage in (own, alone)
    ]
    assert each_beside(*accuracies, REGISTRY["accuracy"], torch.float32)["a"] == "worse"


def test_the_verdict_of_equal_lost_and_no_models() -> None:
    scores = {f"c{i}": 1.0 for i in range(9)}
    own = Stage("own", {"mse": scores | {"c1": math.nan, "c2\x1b": 3.0}})
    alone = Stage("local", {"mse": scores | {"c2\x1b": 1.0}})
    text = verdict(own, alone, REGISTRY["mse"], torch.float32)
    assert text == (
        "worse than alone: the mean error (mse) is nan, alone 1.000; of 10 clients 0 (0%) are better "
        "off, 8 (80%) equal, 2 (20%) worse (most: c1, c2\\x1b)"
    )
    same = verdict(alone, alone, REGISTRY["mse"], torch.float32)
    assert same == (
        "the same as alone: the mean error (mse) is the same; of 10 clients 0 (0%) are better off, "
        "10 (100%) equal, 0 (0%) worse"
    )
    assert verdict(own, Stage("local", {"mse": {}}), REGISTRY["mse"], torch.float32) == ""
