"""Examples with many labels: logistic loss over all of them, recall at 5 as the metric, whatever the algorithm."""

import numpy as np
import pytest
import torch

from fedmtl import FedAvg, Local, LocalSGD, models
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, ModelError
from fedmtl.privacy import ClientPrivacy, RecordPrivacy
from tests import small
from tests.helpers import ragged_classification


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


def fit(data, algorithm, **options):
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


@pytest.mark.parametrize("algorithm", [Local(local=LocalSGD(lr=0.5)), FedAvg(local=LocalSGD(lr=0.5))])
def test_loss_and_recall_at_5_agree_with_numpy(algorithm):
    data = tagged()
    run = fit(data, algorithm)
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
    run = fit(tagged(clients=2), FedAvg(local=LocalSGD(lr=0.1, batch_size=4)), privacy=given, folder=tmp_path)
    assert 0 <= run.final["recall_at_5"] <= 1
    assert run.epsilon <= 8
    assert (tmp_path / "private" / "clients.png").exists()


def test_labels_are_kept_in_a_byte_each_and_five_or_fewer_are_scored_by_accuracy():
    data = tagged(labels=4)
    assert data.train.y.dtype == torch.uint8
    assert (data.spec.labels, data.spec.outputs, data.classes) == (4, 4, 2)
    assert data.gather("train", torch.arange(3))[1].dtype == torch.int64
    run = fit(data, Local(local=LocalSGD(lr=0.5)))
    assert run.metric == "accuracy"


def test_what_does_not_fit_many_labels_is_refused():
    with pytest.raises(ConfigError, match=r"loss is 'cross_entropy'.*the targets are 9 labels"):
        fit(tagged(), Local(local=LocalSGD(lr=0.5)), loss="cross_entropy")
    with pytest.raises(ModelError, match=r"one tensor \(B, 9\), since the data has 9 classes or labels; it returned"):
        fit(tagged(), Local(local=LocalSGD(lr=0.5)), model=torch.nn.Linear(6, 3))
    with pytest.raises(ModelError, match="logistic_regression is for 2 classes or several labels, not 3"):
        models.logistic_regression()(ragged_classification().spec)
