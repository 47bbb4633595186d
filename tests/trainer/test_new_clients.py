"""Clients that join a finished run, from Python and by ``fedmtl adapt``."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedmtl import FedAvg, Finetune, Local, LocalSGD, Result, cli, load_data, models, personalize
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, ModelError
from tests.helpers import ragged_classification
from tests.trainer.settings import DATA, SOLVER, trainer

FINETUNE = Finetune(kind="kl", lam=0.3, local=LocalSGD(lr=0.2, steps=5, batch_size=4), validation=0.25)
OLD, NEW = DATA.subset(DATA.ids[:8]), DATA.subset(DATA.ids[8:])
RUN = [
    *("data.clients=12", "data.train_images=5", "schedule.cohort=6", "rounds=2", "progress=false", "dtype=float64"),
    *("device=cpu", "baselines=[]", "metrics=[auc]"),
]


def test_a_result_adapts_by_the_settings_of_its_run() -> None:
    result = trainer(algorithm=FedAvg(local=SOLVER), data=OLD, finetune=FINETUNE, metrics=["auc"], seed=3).fit()
    found = result.adapt(NEW)
    own = replace(FINETUNE, validation=0.0)
    by_hand = personalize(
        result.shared_model(), NEW, finetune=own, loss="auto", metrics=["auc"], seed=3, device="cpu", dtype="float64"
    )
    assert torch.equal(found.personal, by_hand.personal)
    assert found.by_client == by_hand.by_client
    assert set(found.by_client) == {"loss", "accuracy", "auc"}
    assert found.metrics["accuracy"] == pytest.approx(sum(found.personal_accuracy.values()) / len(NEW))
    for client in NEW.ids:
        test = NEW.subset([client]).test
        right = (found.model_for(client)(test.x).argmax(1) == test.y).double().mean()
        before = (result.shared_model()(test.x).argmax(1) == test.y).double().mean()
        assert found.personal_accuracy[client] == pytest.approx(float(right))
        assert found.shared_accuracy[client] == pytest.approx(float(before))
    said = found.summary()
    assert "nothing is released: epsilon = 0\n  outside      nothing was sent" in said
    assert [line for line in said.split("\n\n")[1].splitlines() if len(line) > 80] == []
    assert len(repr(found)) < 200


@pytest.fixture(scope="module")
def result() -> Result:
    return trainer(algorithm=FedAvg(local=SOLVER), data=OLD).fit()


def test_without_finetuning_the_run_lends_its_solver(result: Result) -> None:
    assert result.adapt(NEW).finetuned.settings == Finetune(local=SOLVER)
    other = Finetune(kind="vanilla", local=LocalSGD(lr=0.1))
    assert result.adapt(NEW, finetune=other).finetuned.settings == other


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda result: result.adapt(NEW, finetune=Finetune(start="personal")), ConfigError, r"Finetune\.start"),
        (lambda result: result.adapt(ragged_classification(4, features=7)), ModelError, "fails on a batch"),
        (lambda result: trainer(algorithm=Local(local=SOLVER)).fit().adapt(NEW), ConfigError, "no shared model"),
        (lambda result: replace(result, terms=None).adapt(NEW), ConfigError, "does not know the settings"),
        (lambda result: result.adapt(None), ConfigError, "data is None; give a FederatedDataset"),
        (lambda result: result.adapt(NEW, finetune="kl"), ConfigError, r"finetune is 'kl'; give Finetune"),
        (lambda result: personalize("mlp", NEW), ConfigError, "model is a str; give the released module"),
        (lambda result: personalize(result.shared_model(), 3), ConfigError, "data is an int; give a FederatedDataset"),
    ],
)
def test_what_cannot_be_adapted_is_refused(call, error, said, result: Result) -> None:
    with pytest.raises(error, match=said):
        call(result)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapt")
    assert cli.main([*RUN, f"hydra.run.dir={folder}/run"]) == 0
    return folder / "run"


def test_the_command_does_what_python_does_and_publishes_no_more_than_the_released_model(
    finished, tmp_path, capsys
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    words = ["data.clients=7", "data.seed=5", "finetune=vanilla", "finetune.local.epochs=2"]
    assert cli.main(["adapt", str(finished), *words, "--out", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "released on digits: 7 clients" in said
    assert "these models cost no epsilon" in said
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    public, private = tmp_path / "new/public", tmp_path / "new/private"
    assert {path.name for path in public.iterdir()} == {"manifest.json", "model.safetensors", "privacy.json"}
    released, again = (load_file(folder / "model.safetensors") for folder in (finished / "public", public))
    assert all(torch.equal(released[name], again[name]) for name in released)
    [outside] = json.loads((public / "privacy.json").read_text())["outside"]
    assert "bounded by the epsilon of the released model" in outside, "the model beside it was not free"
    told = json.loads((private / "result.json").read_text())
    assert told["epsilon"] == 0.0
    data = load_data("digits", clients=7, seed=5, train_images=5)
    module = models.softmax_regression()(data.spec).double()
    module.load_state_dict(released)
    finetune = Finetune(kind="vanilla", local=LocalSGD(lr=0.5, epochs=2, batch_size=10))
    found = personalize(module, data, finetune=finetune, metrics=["auc"], dtype="float64", device="cpu")
    assert torch.equal(load_file(private / "models.safetensors")["models"], found.personal)
    with open(private / "clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for metric, scores in found.by_client.items():
        assert [float(row[metric]) for row in rows if row[metric]] == list(scores.values())
        assert told[metric] == pytest.approx(found.metrics[metric])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rounds=3"], "rounds=3 is not taken here: settings stay as they are stored, except data=..."),
        (["data.foo=3"], "data.foo is no setting of load_digits_clients; accepted: "),
        (["data=table"], "is required; add data."),
        (["data=synthetic_tasks"], "The model fails on a batch of shape (2, 28), the shape of this data"),
        (["finetune=none"], "finetune is none"),
        (["finetune=klx"], "finetune has no option 'klx'; did you mean kl?"),
        (["data.seed=5", "finetune.start=personal"], "new clients start from the given model"),
        (["data.seed=5", "metrics=[rmse]"], "metrics has 'rmse', which is not for digits"),
        (["metrics=[foo]"], "metrics has 'foo'; accepted: loss, accuracy"),
        (["--out", "RUN"], "which has files already"),
        (["--out", "RUN/private/result.json"], "which is a file; choose another folder"),
        (["finetune=mean"], "these would be the clients of the run"),
    ],
)
def test_bad_requests_are_refused_in_one_line(words, said, finished, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["adapt", str(finished), *(word.replace("RUN", str(finished)) for word in words)]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_runs_without_a_model_to_start_from_are_refused(finished, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    missing = {"public/model.safetensors": "has no shared model", "private/result.json": "has not finished"}
    for name, said in missing.items():
        (copy / name).unlink()
        assert cli.main(["adapt", "copy"]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["adapt", "nowhere"]) == 2
    assert "nowhere holds no run of this command" in capsys.readouterr().err


def test_classes_coded_as_numbers_are_coded_for_the_loss_of_the_run() -> None:
    def side(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x, (x[:, 0] > 0).double() * 2 - 1

    old, new = ({f"{name}-{i}": side(10 * len(name) + i) for i in range(4)} for name in ("old", "newer"))
    old, new = (FederatedDataset.from_tensors(rows, classes=None) for rows in (old, new))
    result = trainer(
        algorithm=FedAvg(local=SOLVER), data=old, model=models.logistic_regression(), privacy=None,
        loss="binary_cross_entropy",
    ).fit()  # fmt: skip
    found = result.adapt(new)
    assert found.metric == "accuracy"
    assert found.metrics["accuracy"] > 0.5


def test_new_clients_are_given_as_the_data_of_a_trainer_are(result: Result) -> None:
    rows = {f"new-{i}": (torch.randn(12, *DATA.spec.shape), torch.arange(12) % 3) for i in range(2)}
    shared = result.shared_model()
    for join in (result.adapt, lambda data: personalize(shared, data)):
        assert torch.equal(join(rows).personal, join(FederatedDataset.from_tensors(rows)).personal)
