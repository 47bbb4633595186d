"""Metrics that a run is asked for: the same numbers wherever they are shown, and no run that they end."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedmtl import FedAvg, Finetune, LocalSGD, Trainer, models
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, TrainingError
from fedmtl.privacy import ClientPrivacy, FullParticipation
from fedmtl.report import frame, report
from fedmtl.report.tables import csv_text
from fedmtl.trainer import evaluation
from fedmtl.trainer.verify import verify
from tests.helpers import ragged_classification, regression
from tests.trainer.settings import DATA, SOLVER, trainer

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
            float(rows[client]["local custom_margin"]) == result.baselines["local"].by_client["custom_margin"][client]
        )
    lines = list(csv.DictReader(csv_text(frame([folder])).splitlines()))
    assert float(lines[0]["auc"]) == result.metrics["auc"]
    assert [line["algorithm"] for line in lines] == ["fedavg + finetuning", "local", "pmtl + finetuning"]
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
        counts = [sum(gap > 1e-9 for gap in gaps), sum(abs(gap) <= 1e-9 for gap in gaps), sum(g < -1e-9 for g in gaps)]
        names = [f"{prefix}{name}_local" for name in ("better_than", "as", "worse_than")]
        assert [told[name] for name in names] == pytest.approx([count / len(gaps) for count in counts])
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
    assert "tenth: mean over the" in result.summary()
    assert len(repr(result).splitlines()) == 2
    assert len(repr(result)) < 300
    assert repr(DATA) == (
        f"FederatedDataset 'ragged': 12 clients, {len(DATA.train)} training and {len(DATA.test)} test examples of "
        "shape (5,), 3 classes"
    )
    assert len(repr(DATA.train)) < 120


def test_nothing_of_it_is_public(finished) -> None:
    folder, _ = finished
    for path in (folder / "public").iterdir():
        for word in (b"auc", b"margin", b"median"):
            assert word not in path.read_bytes(), path
    assert not [line for line in verify(folder).checks if line.verdict == "FAILED"]


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_the_shared_model_is_measured_in_pieces(monkeypatch, rows) -> None:
    monkeypatch.setattr(evaluation, "_FLAT", rows)
    train = {name: (torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0])) for name in "abcd"}
    one = (torch.ones(1, 5, dtype=torch.float64), torch.tensor([1]))
    test = {"b": (torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3), "d": one}
    data = FederatedDataset.from_tensors(train, test=test, classes=3)
    result = trainer(
        data=data, algorithm=FedAvg(local=SOLVER), schedule=FullParticipation(), metrics=["f1", margin, "auc"]
    ).fit()
    assert list(result.by_client["f1"]) == ["b", "d"]
    assert list(result.shared_by_client["auc"]) == ["b"]
    x, y = data.test.x[:9], data.test.y[:9]
    assert result.shared_by_client["custom_margin"]["b"] == pytest.approx(margin(result.shared_model()(x).detach(), y))


def test_personal_and_shared_evaluation_agree() -> None:
    options = {"metrics": ["auc", "f1", "balanced_accuracy"], "algorithm": FedAvg(local=SOLVER)}
    result = trainer(**options).fit()
    still = Finetune(kind="mean", lam=1e9, local=LocalSGD(lr=0.1, proximal=True))
    several = trainer(**options, finetune=still).fit()
    for name in options["metrics"]:
        assert several.by_client[name] == pytest.approx(result.by_client[name], abs=1e-6)
        assert several.by_client[name] == pytest.approx(several.shared_by_client[name], abs=1e-6)


def test_a_metric_that_fails_at_a_client_ends_no_run() -> None:
    def picky(outputs, targets):
        if len(targets.unique()) < 2:
            raise ValueError("only one class")
        return math.inf if len(targets) == 3 else 0.5

    with pytest.warns(UserWarning, match="metric 'custom_picky' raises ValueError on outputs .*: only one class"):
        result = trainer(metrics=[picky], rounds=2).fit()
    both = [name for name in DATA.ids if len(DATA.subset([name]).test.y.unique()) > 1]
    expected = [name for name in both if len(DATA.subset([name]).test) != 3]
    assert list(result.by_client["custom_picky"]) == expected
    assert 0 < len(expected) < len(DATA)
    assert result.metrics["custom_picky"] == 0.5


def test_a_metric_that_writes_into_what_it_is_given_changes_no_other() -> None:
    def careless(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(outputs.fill_(0.0).sum() + targets.fill_(0).sum())

    plain, beside = (trainer(metrics=metrics).fit() for metrics in (("auc", "f1"), (careless, "auc", "f1")))
    for name in ("auc", "f1"):
        assert beside.by_client[name] == plain.by_client[name]
        assert beside.shared_by_client[name] == plain.shared_by_client[name]


def test_a_metric_that_never_works_is_refused_before_anything_is_charged(tmp_path) -> None:
    def broken(outputs, targets):
        return outputs[0, 99]

    with pytest.raises(ConfigError, match=r"metric 'custom_broken' raises IndexError on outputs \(N, \*\(3,\)\)"):
        trainer(metrics=[broken], folder=tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()

    def whole(outputs, targets):
        return (outputs.argmax(1) == targets).double()

    with pytest.raises(ConfigError, match=r"metric 'custom_whole' returns 16 numbers; it must return one number"):
        trainer(metrics=[whole], folder=tmp_path / "run").fit()
    with pytest.raises(ConfigError, match=r"metrics has 'rmse', which is not for ragged"):
        trainer(metrics=["rmse"])


def test_errors_count_less_as_better() -> None:
    def worst(outputs, targets):
        return float((outputs[:, 0] - targets).abs().max())

    worst.higher_is_better = False
    data = regression(12)
    result = Trainer(
        algorithm=FedAvg(local=SOLVER), data=data, model=models.linear_regression(), schedule=FullParticipation(),
        privacy=None, rounds=3, metrics=["mae", "rmse", "nmse", worst], baselines=["local"], dtype="float64",
        progress=False,
    ).fit()  # fmt: skip
    told = result.numbers()
    values = np.sort(list(result.by_client["custom_worst"].values()))
    assert told["custom_worst_worst_tenth"] == pytest.approx(values[-2:].mean())
    alone = result.baselines["local"].by_client["custom_worst"]
    assert told["custom_worst_better_than_local"] == np.mean(
        [v < alone[c] for c, v in result.by_client["custom_worst"].items()]
    )
    roots = {name: value**0.5 for name, value in result.by_client["mse"].items()}
    assert result.by_client["rmse"] == pytest.approx(roots, rel=1e-12)
    assert result.metrics["nmse"] == pytest.approx(np.mean(list(result.by_client["nmse"].values())), rel=1e-12)


class Logarithm(torch.nn.Module):
    """Not a number wherever the linear model is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).log()


@pytest.mark.parametrize("privacy", [None, ClientPrivacy(clip_norm=1.0, epsilon=5.0)])
def test_outputs_that_are_not_finite_end_no_run_before_its_last_round(tmp_path, privacy) -> None:
    run = Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.1)), data=regression(6), model=Logarithm(),
        schedule=FullParticipation(), privacy=privacy, rounds=4, metrics=["nmse", "mae"], baselines=["local"],
        folder=tmp_path / "run", progress=False,
    )  # fmt: skip
    if privacy is None:
        with pytest.raises(TrainingError, match="every local training ended in a model that is not finite"):
            run.fit()
        return
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
        assert {k: v for k, v in one.items() if k != "time"} == {k: v for k, v in other.items() if k not in drop}
    assert ragged_classification(12).fingerprint() == DATA.fingerprint()


def test_a_resumed_run_may_measure_more(tmp_path) -> None:
    trainer(folder=tmp_path, rounds=6).fit()
    result = trainer(folder=tmp_path, rounds=6, metrics=["auc"]).fit(resume=True)
    rows = list(csv.DictReader((tmp_path / "private/metrics.csv").read_text().splitlines()))
    assert rows[0]["auc"] == ""
    assert float(rows[-1]["auc"]) == result.metrics["auc"]
