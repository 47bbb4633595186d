"""Every metric against scikit-learn, and against plain loops with real models."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    recall_score,
    roc_auc_score,
)

from fedmtl import FedAvg, Finetune, LocalSGD, models
from fedmtl.audit.verification import verify
from fedmtl.data import DataSpec, FederatedDataset
from fedmtl.errors import ConfigError
from fedmtl.privacy import ClientPrivacy, FullParticipation
from fedmtl.report import frame, report
from fedmtl.report.tables import csv_text
from fedmtl.trainer import evaluation
from fedmtl.trainer.client_scores import normalized
from fedmtl.trainer.comparison import distribution, shares
from fedmtl.trainer.metrics import REGISTRY, invented_rows, resolve_metrics
from fedmtl.trainer.summary import numbers_of_result
from tests import small
from tests.helpers import ragged_classification, regression
from tests.trainer.settings import DATA, SOLVER, trainer


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spec_of(classes, targets=()):
    return DataSpec((3,), classes, 4, targets)


def value_of(name, spec, outputs, targets):
    if name == "recall_at_5":  # the main metric of such data, summed over examples in a run
        return REGISTRY[name].value(outputs, targets)
    (metric,) = resolve_metrics([name], spec)
    return metric.value(outputs, targets)


@pytest.mark.parametrize("shape", [(2, ()), (2, (1,)), (2, (2,)), (3, (3,)), (5, (5,))])
def test_metrics_of_classes_are_those_of_scikit_learn(shape):
    for seed in range(6):
        for coarse in (False, True):
            classes, outputs = shape
            rows = 12
            raw = 3 * draws(rows, *outputs, seed=seed)
            raw = raw[torch.arange(rows) // 2] if coarse else raw
            y = torch.randint(
                0, classes, (rows,), generator=torch.Generator().manual_seed(seed + 100)
            )
            z = raw.reshape(rows, -1).numpy()
            probabilities = (
                np.exp(z) / np.exp(z).sum(1, keepdims=True)
                if z.shape[1] > 1
                else 1 / (1 + np.exp(-z))
            )
            guess = z.argmax(1) if z.shape[1] > 1 else (z[:, 0] > 0).astype(int)
            there = np.unique(y)
            each = [
                roc_auc_score(y == c, probabilities[:, -1 if classes == 2 else c])
                for c in ([1] if classes == 2 else range(classes))
                if 0 < (y == c).sum() < rows
            ]
            expected = {
                "accuracy": accuracy_score(y, guess),
                "auc": np.mean(each),
                "f1": f1_score(y, guess, average="macro"),
                "balanced_accuracy": recall_score(y, guess, labels=there, average="macro"),
            }
            for name, value in expected.items():
                found = (
                    REGISTRY[name].value(raw, y)
                    if name == "accuracy"
                    else value_of(name, spec_of(classes), raw, y)
                )
                assert found == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("labels", [3, 8])
def test_metrics_of_labels_are_those_of_scikit_learn(labels):
    for seed in range(4):
        for coarse in (False, True):
            rows, spec = 14, spec_of(2, (labels,))
            z, y = (
                draws(rows, labels, seed=seed),
                (draws(rows, labels, seed=seed + 50) > 0.8).long(),
            )
            z = z.round() + 0.5 if coarse else z
            y[:, 0] = 0  # never there
            guess = (z > 0).long()
            guess[:, 0], z[:, 0] = 0, z[:, 0].abs() * -1 - 1  # and never predicted
            both = [t for t in range(labels) if 0 < y[:, t].sum() < rows]
            known = [t for t in range(labels) if y[:, t].any() or guess[:, t].any()]
            assert 0 not in known
            expected = {
                "accuracy": float((guess == y).double().mean()),
                "auc": roc_auc_score(y[:, both], z[:, both], average="macro"),
                "auc_micro": roc_auc_score(y, z, average="micro"),
                "f1": f1_score(y[:, known], guess[:, known], average="macro", zero_division=0),
            }
            if labels > 5 and not coarse:
                largest = np.argsort(-z.numpy(), 1)[:, :5]
                expected["recall_at_5"] = (
                    np.take_along_axis(y.numpy(), largest, 1).sum() / y.sum().item()
                )
            for name, value in expected.items():
                assert REGISTRY[name].value(z, y) == pytest.approx(value, rel=1e-12), name
                assert value_of(name, spec, z, y) == pytest.approx(value, rel=1e-12), name


def test_metrics_of_numbers_are_those_of_scikit_learn():
    guess, y = draws(9, 1), draws(9, seed=1)
    expected = {
        "mse": mean_squared_error(y, guess),
        "rmse": mean_squared_error(y, guess) ** 0.5,
        "mae": mean_absolute_error(y, guess),
    }
    for name, value in expected.items():
        assert value_of(name, spec_of(None), guess, y) == pytest.approx(value, rel=1e-12), name
    guess, y = draws(9, 2), draws(9, 2, seed=1)
    for name, oracle in (("mse", mean_squared_error), ("mae", mean_absolute_error)):
        assert value_of(name, spec_of(None, (2,)), guess, y) == pytest.approx(
            oracle(y, guess), rel=1e-12
        )
    with pytest.raises(ConfigError, match="several real targets"):
        resolve_metrics(["nmse"], spec_of(None, (2,)))


def test_large_logits_keep_their_order():
    """Softmax probabilities round to 1 here, and would make ties."""
    z = torch.tensor([[60.0, 0.0, 0.0], [50.0, 0.0, 0.0], [40.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    y = torch.tensor([0, 1, 0, 1])
    ones = [
        roc_auc_score(y == c, z[:, c] - z[:, [k for k in range(3) if k != c]].logsumexp(1))
        for c in (0, 1)
    ]
    assert REGISTRY["auc"].value(z, y) == pytest.approx(np.mean(ones))
    assert len(np.unique(z.softmax(1)[:, 0])) < 4


def test_what_is_not_defined_is_not_a_number():
    ones, z = torch.ones(5, dtype=torch.int64), draws(5, 2)
    assert np.isnan(REGISTRY["auc"].value(z, ones))
    assert np.isnan(REGISTRY["auc_micro"].value(draws(5, 3), torch.ones(5, 3)))
    assert np.isnan(REGISTRY["auc"].value(z * torch.nan, torch.tensor([0, 1, 0, 1, 0])))
    constant = torch.full(
        (25,), 0.1, dtype=torch.float64
    )  # whose sums are not exactly so many times as much
    for pooled in normalized(draws(2), constant, torch.tensor([0, 6, 25])):
        assert bool(pooled.isnan().all())
    assert np.isnan(REGISTRY["rmse"].value(draws(5, 1) / 0, draws(5)))
    assert REGISTRY["balanced_accuracy"].value(z, ones) == pytest.approx(
        accuracy_score(ones, z.argmax(1))
    )


def test_the_distribution_and_the_shares_of_clients():
    scores = torch.tensor([0.9, 0.1, 0.5, 0.3, 0.7, 0.6, 0.8, 0.2, 0.4, 0.95, 0.05])
    found = distribution(scores, higher_is_better=True)
    assert found == pytest.approx(
        {
            "mean": np.mean(scores.numpy()),
            "median": 0.5,
            "worst_tenth": (0.05 + 0.1) / 2,  # 2 of 11 clients
            "spread": np.std(scores.numpy()),
            "clients": 11,
        }
    )
    assert distribution(scores, higher_is_better=False)["worst_tenth"] == pytest.approx(
        (0.95 + 0.9) / 2
    )
    nobody = distribution(scores[:0], higher_is_better=True)
    assert nobody.pop("clients") == 0
    assert all(math.isnan(value) for value in nobody.values())
    others = scores.clone()
    others[:3] += torch.tensor([0.1, -0.2, 1e-12])
    others[10] = torch.nan  # a model that diverged is worse than every other
    for sign in (1, -1):
        found = shares(sign * scores.double(), sign * others.double(), higher_is_better=sign == 1)
        assert found == pytest.approx((2 / 11, 8 / 11, 1 / 11))
    infinite = torch.full((3,), torch.inf)
    assert shares(infinite, infinite, higher_is_better=False) == (0, 1, 0)
    assert shares(torch.ones(3), infinite, higher_is_better=False) == (1, 0, 0)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (["aucc"], "metrics has 'aucc'; accepted: loss, accuracy, auc, "),
        ("auc", "metrics is 'auc'; give a list"),
        (["auc", "auc"], "metrics has 'auc' twice"),
        ([lambda outputs, targets: 1.0], "functions with a name of their own"),
        ([float], "functions with a name of their own"),
        (
            ["rmse"],
            r"metrics has 'rmse', which is not for data \(one class an example\); accepted: loss, accuracy",
        ),
    ],
)
def test_what_is_no_metric_is_refused(metrics, said):
    with pytest.raises(ConfigError, match=said):
        resolve_metrics(metrics, spec_of(3))


def test_a_function_returns_one_number_of_any_type():
    rows = draws(4, 3), torch.tensor([0, 1, 2, 0])

    def metric(returned):
        def mine(outputs, targets):
            return returned

        return resolve_metrics([mine], spec_of(3))[0]

    for returned in (0.5, 1, True, torch.tensor([0.5]), np.float32(0.5), np.bool_(True)):
        assert metric(returned).number(*rows) == metric(returned).value(*rows) == float(returned)
    for returned in (torch.ones(3), np.ones((2, 2)), "0.5", None):
        with pytest.raises(ConfigError, match="metric 'custom_mine' returns"):
            metric(returned).number(*rows)
        with pytest.warns(UserWarning, match="metric 'custom_mine'"):
            assert np.isnan(metric(returned).value(*rows))


@pytest.mark.parametrize(
    ("spec", "outputs"),
    [(spec_of(3), (3,)), (spec_of(2), ()), (spec_of(2, (9,)), (9,)), (spec_of(None, (2,)), (2,))],
)
def test_a_metric_is_tried_on_rows_of_the_shape_of_the_data(spec, outputs):
    z, y = invented_rows(spec, outputs)
    assert (z.shape, y.shape) == ((16, *outputs), (16, *spec.targets))
    assert y.is_floating_point() == (spec.classes is None)
    assert spec.classes is None or set(y.flatten().tolist()) == set(range(spec.classes))


# Metrics that a run is asked for: the same numbers wherever they are shown, and no run that they end


FINETUNE = Finetune(kind="mean", lam=0.3, local=LocalSGD(lr=0.2, steps=5, batch_size=4))


def margin(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean of the right class's output minus the largest."""
    return float((outputs.gather(1, targets[:, None])[:, 0] - outputs.max(1).values).mean())


def by_hand(result, client: str) -> float:
    """One-vs-rest AUC of one client's own model by scikit-learn; NaN for one class."""
    rows = DATA.subset([client]).test
    z = result.model_for(client)(rows.x).detach()
    p, y = z.softmax(1).numpy(), rows.y.numpy()
    each = [roc_auc_score(y == c, p[:, c]) for c in range(3) if 0 < (y == c).sum() < len(y)]
    return float(np.mean(each)) if each else math.nan


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics") / "run"
    run = trainer(
        folder=folder,
        algorithm=FedAvg(local=SOLVER),
        finetune=FINETUNE,
        baselines=["local", "pmtl"],
        metrics=("auc", margin, "loss", "accuracy"),
    )
    return folder, run.fit()


def test_one_number_in_every_place(finished) -> None:
    folder, result = finished
    expected = {client: by_hand(result, client) for client in DATA.ids}
    known = {client: value for client, value in expected.items() if not math.isnan(value)}
    assert 0 < len(known) < len(DATA)  # some clients have tests of one class
    assert result.by_client["auc"] == pytest.approx(known, rel=1e-12)
    mean = sum(known.values()) / len(known)
    assert result.metrics["auc"] == pytest.approx(mean, rel=1e-12)
    assert result.metrics["custom_margin"] == pytest.approx(
        np.mean(list(result.by_client["custom_margin"].values())), rel=1e-12
    )
    told = json.loads((folder / "private/result.json").read_text())
    assert told["auc"] == result.metrics["auc"]
    assert told["auc_clients"] == len(known)
    assert told["metrics"] == ["accuracy", "auc", "custom_margin", "loss"]
    with open(folder / "private/clients.csv", newline="") as file:
        rows = {row["client"]: row for row in csv.DictReader(file)}
    for client in DATA.ids:
        cell = rows[client]["auc"]
        assert (float(cell) == result.by_client["auc"][client]) if client in known else cell == ""
        assert (
            float(rows[client]["local custom_margin"])
            == result.baselines["local"].by_client["custom_margin"][client]
        )
    lines = list(csv.DictReader(csv_text(frame([folder])).splitlines()))
    assert float(lines[0]["auc"]) == result.metrics["auc"]
    assert [line["algorithm"] for line in lines] == [
        "fedavg + finetuning",
        "local",
        "pmtl + finetuning",
    ]
    history = list(csv.DictReader((folder / "private/metrics.csv").read_text().splitlines()))
    assert {"auc", "custom_margin", "global_auc", "global_custom_margin"} <= history[-1].keys()
    assert float(history[-1]["auc"]) == result.history[-1]["auc"]


def test_the_frame_has_every_score_of_every_client(finished) -> None:
    _, result = finished
    frame = result.to_frame()
    assert list(frame.index) == list(result.personal_accuracy)
    assert frame["accuracy"].to_dict() == result.personal_accuracy
    assert frame["shared accuracy"].to_dict() == result.shared_accuracy
    for name, run in result.baselines.items():
        assert frame[f"{name} accuracy"].to_dict() == run.personal_accuracy
    for name, mean in result.metrics.items():
        assert frame[name].mean() == pytest.approx(mean)


def test_the_clients_beside_local_are_paired(finished) -> None:
    folder, result = finished
    told = json.loads((folder / "private/result.json").read_text())
    alone = result.baselines["local"].by_client
    for prefix, metric, sign in (("", "accuracy", 1), ("auc_", "auc", 1), ("loss_", "loss", -1)):
        own = result.by_client[metric]
        gaps = [sign * (own[client] - alone[metric][client]) for client in own]
        counts = [
            sum(gap > 1e-9 for gap in gaps),
            sum(abs(gap) <= 1e-9 for gap in gaps),
            sum(g < -1e-9 for g in gaps),
        ]
        names = [f"{prefix}{name}_local" for name in ("better_than", "as", "worse_than")]
        assert [told[name] for name in names] == pytest.approx(
            [count / len(gaps) for count in counts]
        )
    trained = told["baselines"]["pmtl"]
    pmtl = result.baselines["pmtl"].personal_accuracy
    assert trained["better_than_local"] == pytest.approx(
        np.mean([pmtl[client] > alone["accuracy"][client] for client in pmtl])
    )
    values = np.array(list(result.personal_accuracy.values()))
    assert told["median"] == pytest.approx(np.median(values))
    assert told["worst_tenth"] == pytest.approx(np.sort(values)[:2].mean())  # 2 of 12 clients


def test_the_summary_fits_a_terminal(finished) -> None:
    _, result = finished
    block = result.summary().split("\n\n")[1].splitlines()
    assert [line for line in block if len(line) > 80] == []
    assert [line.split()[0] for line in block if " mean  median " in line] == [
        "accuracy",
        "auc",
        "custom_margin",
        "loss",
    ]
    known = len(result.by_client["auc"])
    assert any(f"(auc: defined for {known} of 12 clients" in line for line in block)
    assert len(repr(result).splitlines()) == 2
    assert len(repr(result)) < 300


def test_nothing_of_it_is_public(finished) -> None:
    folder, _ = finished
    for path in (folder / "public").iterdir():
        for word in (b"auc", b"margin", b"median"):
            assert word not in path.read_bytes(), path
    assert not [line for line in verify(folder).checks if line.verdict == "FAILED"]


def test_the_shared_model_is_measured_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "_FLAT", 7)
    train = {
        name: (torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
        for name in "abcd"
    }
    one = (torch.ones(1, 5, dtype=torch.float64), torch.tensor([1]))
    test = {"b": (torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3), "d": one}
    data = FederatedDataset.from_tensors(train, test=test, classes=3)
    result = trainer(
        data=data,
        algorithm=FedAvg(local=SOLVER),
        schedule=FullParticipation(),
        metrics=["f1", margin, "auc"],
    ).fit()
    assert list(result.by_client["f1"]) == ["b", "d"]
    assert list(result.shared_by_client["auc"]) == ["b"]
    x, y = data.test.x[:9], data.test.y[:9]
    assert result.shared_by_client["custom_margin"]["b"] == pytest.approx(
        margin(result.shared_model()(x).detach(), y)
    )


def test_a_metric_that_fails_at_a_client_ends_no_run() -> None:
    def picky(outputs, targets):
        if len(targets.unique()) < 2:
            raise ValueError("only one class")
        return math.inf if len(targets) == 3 else 0.5

    with pytest.warns(
        UserWarning, match="metric 'custom_picky' raises ValueError on outputs .*: only one class"
    ):
        result = trainer(metrics=[picky], rounds=2).fit()
    both = [name for name in DATA.ids if len(DATA.subset([name]).test.y.unique()) > 1]
    expected = [name for name in both if len(DATA.subset([name]).test) != 3]
    assert list(result.by_client["custom_picky"]) == expected
    assert 0 < len(expected) < len(DATA)
    assert result.metrics["custom_picky"] == 0.5


def test_a_metric_that_writes_into_what_it_is_given_changes_no_other() -> None:
    def careless(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(outputs.fill_(0.0).sum() + targets.fill_(0).sum())

    plain, beside = (
        trainer(metrics=metrics).fit() for metrics in (("auc", "f1"), (careless, "auc", "f1"))
    )
    assert beside.by_client["f1"] == plain.by_client["f1"]
    assert beside.shared_by_client["auc"] == plain.shared_by_client["auc"]


def test_a_metric_that_never_works_is_refused_before_anything_is_charged(tmp_path) -> None:
    def broken(outputs, targets):
        return outputs[0, 99]

    with pytest.raises(
        ConfigError, match=r"metric 'custom_broken' raises IndexError on outputs \(N, \*\(3,\)\)"
    ):
        trainer(metrics=[broken], folder=tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()

    def whole(outputs, targets):
        return (outputs.argmax(1) == targets).double()

    with pytest.raises(
        ConfigError, match=r"metric 'custom_whole' returns 16 numbers; it must return one number"
    ):
        trainer(metrics=[whole], folder=tmp_path / "run").fit()


def test_errors_count_less_as_better() -> None:
    def worst(outputs, targets):
        return float((outputs[:, 0] - targets).abs().max())

    worst.higher_is_better = False
    given = {
        "data": regression(12),
        "model": models.linear_regression(),
        "rounds": 3,
        "baselines": ["local"],
    }
    result = small.trainer(
        algorithm=FedAvg(local=SOLVER), metrics=["mae", "rmse", "nmse", worst], **given
    ).fit()
    told = numbers_of_result(result)
    values = np.sort(list(result.by_client["custom_worst"].values()))
    assert told["custom_worst_worst_tenth"] == pytest.approx(values[-2:].mean())
    alone = result.baselines["local"].by_client["custom_worst"]
    assert told["custom_worst_better_than_local"] == np.mean(
        [v < alone[c] for c, v in result.by_client["custom_worst"].items()]
    )
    roots = {name: value**0.5 for name, value in result.by_client["mse"].items()}
    assert result.by_client["rmse"] == pytest.approx(roots, rel=1e-12)
    assert result.metrics["nmse"] == pytest.approx(
        np.mean(list(result.by_client["nmse"].values())), rel=1e-12
    )


class Logarithm(torch.nn.Linear):
    """Not a number wherever the linear model is negative, as it is everywhere at its start."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.constant_(self.bias, -1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).log()


def test_outputs_that_are_not_finite_end_no_private_run(tmp_path) -> None:
    given = {
        "data": regression(6),
        "model": Logarithm(4, 1),
        "rounds": 4,
        "metrics": ["nmse", "mae"],
    }
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=5.0)
    run = small.trainer(
        privacy=privacy, baselines=["local"], folder=tmp_path / "run", dtype="float32", **given
    )
    assert "every local training ended in a model that is not finite" in run.fit().summary()
    written = json.loads((tmp_path / "run/private/result.json").read_text())
    assert (written["mae"], written["mse"]) == ("nan", "nan")
    made = report([tmp_path / "run"], show=False)
    assert made.figure is None
    assert made.tables[0].is_file()


def test_metrics_change_no_number_of_the_run() -> None:
    plain, asked = (trainer(metrics=metrics).fit() for metrics in ((), ("auc", margin)))
    assert torch.equal(plain.personal, asked.personal)
    drop = ("time", "auc", "custom_margin", "global_auc", "global_custom_margin")
    for one, other in zip(plain.history, asked.history, strict=True):
        assert {k: v for k, v in one.items() if k != "time"} == {
            k: v for k, v in other.items() if k not in drop
        }
    assert ragged_classification(12).fingerprint() == DATA.fingerprint()


def test_a_resumed_run_may_measure_more(tmp_path) -> None:
    trainer(folder=tmp_path, rounds=6).fit()
    result = trainer(folder=tmp_path, rounds=6, metrics=["auc"]).fit(resume=True)
    rows = list(csv.DictReader((tmp_path / "private/metrics.csv").read_text().splitlines()))
    assert rows[0]["auc"] == ""
    assert float(rows[-1]["auc"]) == result.metrics["auc"]
