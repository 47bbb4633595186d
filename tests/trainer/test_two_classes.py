"""Two classes are two classes whether they are coded 0 and 1 or -1 and +1, whole or floating."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from fedmtl import (
    MPMTL,
    PPDMTL,
    AsyncLearner,
    ClientPrivacy,
    FedAvg,
    PeerToPeer,
    PoissonClocks,
    models,
)
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.data import Examples, FederatedDataset
from fedmtl.errors import ConfigError
from fedmtl.graphs import Ring
from fedmtl.local import LocalSGD
from tests import small

CODINGS = {
    "0/1 int": lambda b: b.astype(np.int64),
    "-1/+1 int": lambda b: (2 * b - 1).astype(np.int8),
    "0/1 float": lambda b: b.astype(np.float32),
    "-1/+1 float": lambda b: (2 * b - 1).astype(np.float64),
}
RIDGE = 0.05


def records(seed=0, clients=4, count=40):
    """Noisy separators: x (n, 3) of norm 1 and b (n,) in {0, 1} of every client and side."""
    rng = np.random.default_rng(seed)
    sides = ({}, {})
    for i in range(clients):
        w = np.array([1.0, -2.0, 0.5]) + 0.3 * rng.normal(size=3)
        for side in sides:
            x = rng.normal(size=(count, 3)).astype(np.float32)
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            side[f"c{i}"] = x, (x @ w + 0.4 * rng.normal(size=count) > 0).astype(int)
    return sides


def dataset(coding, classes="infer"):
    sides = [{name: (x, CODINGS[coding](b)) for name, (x, b) in side.items()} for side in records()]
    return FederatedDataset.from_tensors(sides[0], test=sides[1], classes=classes)


def fit(algorithm, data, **options):
    settings = {"model": models.linear_regression(bias=False), "rounds": 30}
    if algorithm.one_at_a_time:
        settings |= {"schedule": PoissonClocks(per_client=20), "rounds": 1000}
    return small.trainer(algorithm=algorithm, data=data, **settings | options).fit()


@pytest.mark.parametrize("classes", ["infer", 2, None])
@pytest.mark.parametrize("coding", CODINGS)
def test_local_fits_and_their_scores_are_those_of_scikit_learn(coding, classes):
    train, test = records()
    result = fit(LocalFit(loss="logistic", ridge=RIDGE), dataset(coding, classes), rounds=1)
    assert result.metric == "accuracy"
    losses = []
    for place, name in enumerate(train):
        (x, b), (test_x, test_b) = train[name], test[name]
        oracle = LogisticRegression(C=1 / (RIDGE * len(b)), fit_intercept=False, tol=1e-10, max_iter=1000)
        oracle.fit(x.astype(np.float64), b)
        np.testing.assert_allclose(result.personal[place].numpy(), oracle.coef_[0], atol=1e-5)
        assert result.personal_accuracy[name] == accuracy_score(test_b, oracle.predict(test_x))
        losses.append(log_loss(test_b, oracle.predict_proba(test_x)))
    assert result.final["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize("model", ["one output", "flat output", "two outputs"])
@pytest.mark.parametrize("coding", CODINGS)
def test_a_module_is_trained_and_scored_alike_in_every_coding(coding, model):
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2 if model == "two outputs" else 1))
    if model == "flat output":
        built.append(nn.Flatten(0))
    for parameter in built.parameters():
        nn.init.normal_(parameter)
    result = fit(FedAvg(local=LocalSGD(lr=0.5, batch_size=8)), dataset(coding), rounds=3, model=built)
    network, (_, test) = result.shared_model(), records()
    assert result.metric == "accuracy"
    scores, losses = [], []
    for x, b in test.values():
        outputs = network(torch.from_numpy(x).double()).detach()
        positive = outputs.softmax(1)[:, 1] if model == "two outputs" else torch.sigmoid(outputs.reshape(-1))
        scores.append(accuracy_score(b, (positive > 0.5).numpy()))
        losses.append(log_loss(b, positive.numpy()))
    assert result.final["global_accuracy"] == pytest.approx(np.mean(scores), abs=1e-12)
    assert result.final["loss"] == pytest.approx(np.mean(losses), abs=1e-9)
    assert np.mean(scores) > 0.6


ALGORITHMS = {
    "mp_mtl": MPMTL(loss="logistic", lam=0.01),
    "pp_dmtl": PPDMTL(loss="logistic", lam=0.01),
    "p2p": PeerToPeer(graph=Ring(), loss="logistic"),
    "async logistic": AsyncLearner(loss="logistic", reg=1e-3),
    "async hinge": AsyncLearner(loss="hinge", reg=1e-3),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_linear_algorithm_gives_one_result_whatever_the_coding(name):
    first, *others = (fit(ALGORITHMS[name], dataset(coding)) for coding in CODINGS)
    assert first.metric == "accuracy"
    assert first.final["accuracy"] > 0.6
    for result in others:
        assert result.metric == "accuracy"
        small.check_same(result, first)


def test_floating_targets_of_a_regression_stay_one():
    assert fit(MPMTL(loss="squared", lam=0.01), dataset("-1/+1 float", None)).metric == "mse"


@pytest.mark.parametrize("label", [1.0, 0.5])
@pytest.mark.parametrize("loss", ["binary_cross_entropy", "auto"])
def test_with_noise_targets_do_not_decide_whether_there_are_classes(loss: str, label: float) -> None:
    """One target of one record would be the difference between two outputs and one, or between a run and an error."""
    rows = {name: (np.ones((4, 2), np.float32), np.array([0, 1, 1, 0], np.float32)) for name in ("a", "b")}
    rows["a"][1][1] = label
    data = FederatedDataset.from_tensors(rows, classes=None)
    algorithm = MPMTL(loss="logistic", lam=0.01, row_norm=1.0) if loss == "auto" else FedAvg(local=LocalSGD(lr=0.1))
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=1.0, delta=1e-3)
    with pytest.raises(ConfigError, match="the number of classes came from the records"):
        fit(algorithm, data, privacy=privacy, loss=loss)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_dataset_made_of_examples_takes_both_codings(dtype):
    x, offsets = torch.randn(4, 2), torch.tensor([0, 2, 4])
    side = Examples(x, torch.tensor([-1, 1, 1, -1], dtype=dtype), offsets)
    data = FederatedDataset(side, side, ("a", "b"), classes=2, public=Examples(x, side.y, torch.tensor([0, 4])))
    for part in (data.train, data.test, data.public):
        assert part.y.tolist() == [0, 1, 1, 0]
        assert part.y.dtype == torch.int64
