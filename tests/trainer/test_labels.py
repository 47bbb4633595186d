"""Two classes in any coding, and examples with many labels: losses and scores are those of scikit-learn and NumPy."""

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
    Local,
    LocalSGD,
    PeerToPeer,
    PoissonClocks,
    RecordPrivacy,
    models,
)
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.data import Examples, FederatedDataset
from fedmtl.errors import ConfigError, ModelError
from fedmtl.graphs import Ring
from tests import small
from tests.helpers import ragged_classification

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
        oracle = LogisticRegression(
            C=1 / (RIDGE * len(b)), fit_intercept=False, tol=1e-10, max_iter=1000
        )
        oracle.fit(x.astype(np.float64), b)
        np.testing.assert_allclose(result.personal[place].numpy(), oracle.coef_[0], atol=1e-5)
        assert result.personal_accuracy[name] == accuracy_score(test_b, oracle.predict(test_x))
        losses.append(log_loss(test_b, oracle.predict_proba(test_x)))
    assert result.final["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize("model", ["one output", "flat output", "two outputs"])
@pytest.mark.parametrize("coding", CODINGS)
def test_a_module_is_trained_and_scored_alike_in_every_coding(coding, model):
    torch.manual_seed(0)
    built = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2 if model == "two outputs" else 1)
    )
    if model == "flat output":
        built.append(nn.Flatten(0))
    for parameter in built.parameters():
        nn.init.normal_(parameter)
    result = fit(
        FedAvg(local=LocalSGD(lr=0.5, batch_size=8)), dataset(coding), rounds=3, model=built
    )
    network, (_, test) = result.shared_model(), records()
    assert result.metric == "accuracy"
    scores, losses = [], []
    for x, b in test.values():
        outputs = network(torch.from_numpy(x).double()).detach()
        positive = (
            outputs.softmax(1)[:, 1]
            if model == "two outputs"
            else torch.sigmoid(outputs.reshape(-1))
        )
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
def test_with_noise_targets_do_not_decide_whether_there_are_classes(
    loss: str, label: float
) -> None:
    """One target of one record would be the difference between two outputs and one, or between a run and an error."""
    rows = {
        name: (np.ones((4, 2), np.float32), np.array([0, 1, 1, 0], np.float32))
        for name in ("a", "b")
    }
    rows["a"][1][1] = label
    data = FederatedDataset.from_tensors(rows, classes=None)
    algorithm = (
        MPMTL(loss="logistic", lam=0.01, feature_norm=1.0)
        if loss == "auto"
        else FedAvg(local=LocalSGD(lr=0.1))
    )
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=1.0, delta=1e-3)
    with pytest.raises(ConfigError, match="the number of classes came from the records"):
        fit(algorithm, data, privacy=privacy, loss=loss)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_dataset_made_of_examples_takes_both_codings(dtype):
    x, offsets = torch.randn(4, 2), torch.tensor([0, 2, 4])
    side = Examples(x, torch.tensor([-1, 1, 1, -1], dtype=dtype), offsets)
    data = FederatedDataset(
        side, side, ("a", "b"), classes=2, public=Examples(x, side.y, torch.tensor([0, 4]))
    )
    for part in (data.train, data.test, data.public):
        assert part.y.tolist() == [0, 1, 1, 0]
        assert part.y.dtype == torch.int64


def tagged(clients: int = 5, features: int = 6, labels: int = 9, seed: int = 0) -> FederatedDataset:
    """Examples with 0 to ``labels`` labels; the last client has none in any test example."""
    generator = np.random.default_rng(seed)
    weights = generator.normal(size=(features, labels))

    def draw(n: int):
        x = generator.normal(size=(n, features))
        return x, (x @ weights + generator.normal(size=(n, labels)) > 1.0).astype(np.int64)

    train = {f"user-{i}": draw(20 + 3 * i) for i in range(clients)}
    test = {f"user-{i}": draw(3 + i) for i in range(clients)}
    last = f"user-{clients - 1}"
    test[last] = (test[last][0], np.zeros_like(test[last][1]))
    return FederatedDataset.from_tensors(train, test=test, classes=2, name="tags")


def fit_tags(data, algorithm, **options):
    settings = {"model": models.logistic_regression(), "rounds": 2} | options
    return small.trainer(algorithm=algorithm, data=data, **settings).fit()


def by_hand(row: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, float, int]:
    """Mean logistic loss, and hits among the 5 largest logits and true labels of a client's examples."""
    features, labels = x.shape[1], y.shape[1]
    weight, bias = row[: features * labels].reshape(labels, features), row[features * labels :]
    logits = x @ weight.T + bias
    loss = (np.logaddexp(0, logits) - y * logits).mean()
    hits = sum(int(t[np.argsort(-z)[:5]].sum()) for z, t in zip(logits, y, strict=True))
    return float(loss), float(hits), int(y.sum())


@pytest.mark.parametrize(
    "algorithm", [Local(local=LocalSGD(lr=0.5)), FedAvg(local=LocalSGD(lr=0.5))]
)
def test_loss_and_recall_at_5_agree_with_numpy(algorithm):
    data = tagged()
    run = fit_tags(data, algorithm)
    assert run.metric == "recall_at_5"
    losses, recall, hits, there = [], {}, 0.0, 0
    for name, row in zip(data.ids, run.personal.numpy(), strict=True):
        own = data.subset([name]).test
        loss, found, true = by_hand(row, own.x.numpy(), own.y.numpy())
        losses.append(loss)
        hits, there = hits + found, there + true
        if true:
            recall[name] = found / true
    assert run.final["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert list(recall) == list(data.ids[:-1])  # the last client has no label to find
    assert run.personal_accuracy == pytest.approx(recall, abs=1e-12)
    assert run.final["recall_at_5"] == pytest.approx(np.mean(list(recall.values())), abs=1e-12)
    assert run.final["weighted_recall_at_5"] == pytest.approx(hits / there, abs=1e-12)
    assert "recall_at_5" in run.summary()


@pytest.mark.parametrize("privacy", [ClientPrivacy, RecordPrivacy])
def test_private_training_takes_many_labels(privacy, tmp_path):
    given = privacy(clip_norm=1.0, epsilon=8.0, delta=1e-2)
    run = fit_tags(
        tagged(clients=2),
        FedAvg(local=LocalSGD(lr=0.1, batch_size=4)),
        privacy=given,
        folder=tmp_path,
    )
    assert 0 <= run.final["recall_at_5"] <= 1
    assert run.epsilon <= 8
    assert (tmp_path / "private" / "clients.png").exists()


def test_labels_are_kept_in_a_byte_each_and_five_or_fewer_are_scored_by_accuracy():
    data = tagged(labels=4)
    assert data.train.y.dtype == torch.uint8
    assert (data.spec.labels, data.spec.outputs, data.classes) == (4, 4, 2)
    assert data.gather("train", torch.arange(3))[1].dtype == torch.int64
    run = fit_tags(data, Local(local=LocalSGD(lr=0.5)))
    assert run.metric == "accuracy"


def test_what_does_not_fit_many_labels_is_refused():
    with pytest.raises(ConfigError, match=r"loss is 'cross_entropy'.*the targets are 9 labels"):
        fit_tags(tagged(), Local(local=LocalSGD(lr=0.5)), loss="cross_entropy")
    with pytest.raises(
        ModelError,
        match=r"one tensor \(B, 9\), since the data has 9 classes or labels; it returned",
    ):
        fit_tags(tagged(), Local(local=LocalSGD(lr=0.5)), model=torch.nn.Linear(6, 3))
    with pytest.raises(
        ModelError, match="logistic_regression is for 2 classes or several labels, not 3"
    ):
        models.logistic_regression()(ragged_classification().spec)
