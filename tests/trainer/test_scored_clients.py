"""Clients without test examples train, and are left out of every mean of test scores."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from fedmtl import FedAvg, Finetune, Local, LocalSGD, Trainer, models
from fedmtl.data import Examples, FederatedDataset
from fedmtl.privacy import FullParticipation
from tests import small
from tests.helpers import ragged_classification, regression


def without_test(data: FederatedDataset, clients: list[int]) -> FederatedDataset:
    """The same data, but ``clients`` have no test examples."""
    owner = torch.repeat_interleave(torch.arange(len(data)), data.test.counts)
    kept = ~torch.isin(owner, torch.tensor(clients))
    counts = data.test.counts.clone()
    counts[clients] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return dataclasses.replace(data, test=Examples(data.test.x[kept], data.test.y[kept], offsets))


def trained(data: FederatedDataset, algorithm, folder=None, **options):
    return small.trainer(algorithm=algorithm, data=data, rounds=3, folder=folder, **options).fit()


@pytest.mark.parametrize("algorithm", [Local(local=LocalSGD(lr=0.1)), FedAvg(local=LocalSGD(lr=0.1))])
def test_means_are_over_the_clients_that_have_test_examples(algorithm):
    whole = ragged_classification(clients=7)
    every, some = trained(whole, algorithm), trained(without_test(whole, [2, 5]), algorithm)
    torch.testing.assert_close(some.personal, every.personal, rtol=0, atol=0)  # they train all the same
    left = [f"client-{i}" for i in (0, 1, 3, 4, 6)]
    assert list(some.personal_accuracy) == left
    assert some.personal_accuracy == {name: every.personal_accuracy[name] for name in left}
    scores = np.array([every.personal_accuracy[name] for name in left])
    assert some.final["accuracy"] == pytest.approx(scores.mean(), abs=1e-12)
    assert some.final["spread"] == pytest.approx(scores.std(), abs=1e-12)
    assert some.final["worst_tenth"] == pytest.approx(scores.min(), abs=1e-12)
    assert all(math.isfinite(value) for row in some.history for key, value in row.items() if key != "epsilon")
    assert "7 clients (5 scored, the others have nothing to test on)" in some.summary()
    assert "scored" not in every.summary()
    assert some.model_for("client-2") is not None


@pytest.mark.usefixtures("real_figures")
def test_the_folder_has_no_score_for_them(tmp_path):
    data = without_test(ragged_classification(clients=5), [0])
    trained(data, FedAvg(local=LocalSGD(lr=0.1)), tmp_path, baselines=("local",))
    rows = list(csv.DictReader((tmp_path / "private" / "clients.csv").open()))
    assert [row["test_examples"] == "0" for row in rows] == [True, False, False, False, False]
    names = ("accuracy", "shared accuracy", "local accuracy")
    assert [all(row[name] == "" for name in names) for row in rows] == [True] + [False] * 4
    assert "nan" not in (tmp_path / "private" / "metrics.csv").read_text()
    result = json.loads((tmp_path / "private" / "result.json").read_text())
    assert (result["clients"], result["scored_clients"]) == (5, 4)
    assert (tmp_path / "private" / "clients.png").stat().st_size > 1000


def test_a_regression_leaves_them_out_of_every_error():
    data = without_test(regression(clients=4), [1])
    run = trained(data, Local(local=LocalSGD(lr=0.05)), model=models.linear_regression())
    kept = [0, 2, 3]
    errors, variances, squares, all_targets = [], [], 0.0, []
    for i in kept:
        own = data.test.offsets[i], data.test.offsets[i + 1]
        x, y = data.test.x[own[0] : own[1]].numpy(), data.test.y[own[0] : own[1]].numpy()
        w = run.personal[i].numpy()
        error = (x @ w[:4] + w[4] - y) ** 2
        errors.append(error.mean())
        variances.append(y.var())
        squares += error.sum()
        all_targets.append(y)
    assert run.final["mse"] == pytest.approx(np.mean(errors), rel=1e-10)
    assert run.final["nmse"] == pytest.approx(np.mean(np.array(errors) / np.array(variances)), rel=1e-10)
    together = np.concatenate(all_targets)
    assert run.final["pooled_nmse"] == pytest.approx(squares / ((together - together.mean()) ** 2).sum(), rel=1e-10)


def test_the_split_gives_a_single_example_to_training():
    x, y = torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 1])
    data = FederatedDataset.from_tensors({"a": (x, y), "b": (x[:1], y[:1])}, test_fraction=0.4)
    assert data.train.counts.tolist() == [3, 1]
    assert data.test.counts.tolist() == [2, 0]
    given = FederatedDataset.from_tensors({"a": (x, y), "b": (x, y), "c": (x, y)}, test={"b": (x, y)})
    assert given.test.counts.tolist() == [0, 5, 0]
    torch.testing.assert_close(given.test.x, x)


def test_the_last_client_may_be_the_one_without_test_rows():
    rows = {name: (torch.randn(6, 3), torch.tensor([0, 1] * 3)) for name in ("anna", "ben")}
    data = FederatedDataset.from_tensors(rows, test={"anna": rows["anna"]})
    run = Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.1)), data=data, model=models.softmax_regression(), rounds=1,
        schedule=FullParticipation(), privacy=None, progress=False, finetune=Finetune(kind="vanilla"),
    ).fit()  # fmt: skip
    assert set(run.personal_accuracy) == {"anna"}
