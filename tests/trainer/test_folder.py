"""The run folder: what is in it, and that nothing private is in its public part."""

import csv
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy

from fedmtl import ClientPrivacy, FedAvg, Finetune, LocalSGD
from fedmtl.errors import ConfigError, ResumeError
from fedmtl.privacy.chain import Head, read_chain
from fedmtl.trainer.folder import Checkpoint, RunFolder
from fedmtl.trainer.problem import describe
from fedmtl.trainer.verify import verify
from tests.conftest import quick_figures

from ..small import Ended, Ends
from .ledgers import charges
from .settings import DATA, DELTA, NOISE, SOLVER, trainer

FINETUNE = Finetune(kind="mean", lam=0.3, local=LocalSGD(lr=0.2, steps=5, batch_size=4))
PUBLIC = {"model.safetensors", "privacy.json", "manifest.json"}
PRIVATE = {
    "checkpoint.safetensors",
    "ledger.jsonl",
    "ledger.head",
    "manifest.json",
    "metrics.csv",
    "clients.csv",
    "models.safetensors",
    "outcome.json",
    "result.json",
    "accuracy.png",
    "clients.png",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, figures):
    """A run with finetuned models, baselines and real figures."""
    figures.undo()
    folder = tmp_path_factory.mktemp("runs") / "run"
    algorithm = FedAvg(local=SOLVER)
    found = trainer(algorithm=algorithm, finetune=FINETUNE, folder=folder, baselines=("local", "pmtl")).fit()
    quick_figures(figures)
    return folder, found


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("below", ["", "of/new/clients"])
def test_no_run_is_in_the_public_part_of_another(finished, below):
    folder, found = finished
    before = files(folder)
    with pytest.raises(ConfigError, match=r"in the public part of the run in .*; choose another folder"):
        found.adapt(DATA, folder=folder / "public" / below)
    assert files(folder) == before


def test_layout(finished):
    folder, _ = finished
    expected = {f"public/{name}" for name in PUBLIC} | {f"private/{name}" for name in PRIVATE}
    tables = {f"private/{name}" for name in ("result.json", "clients.csv", "accuracy.png", "clients.png")}
    kept = expected - tables - {"public/manifest.json", "private/manifest.json"} | {"private/clients/2-0-of-1"}
    sent = {"public/model.safetensors", "private/ledger.jsonl", "private/ledger.head"}
    for name, lacking in {"local": sent, "pmtl": set()}.items():
        expected |= {f"private/baselines/{name}/{path}" for path in kept - lacking}
    assert files(folder) == expected
    for path in folder.rglob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert not [line for line in verify(folder).checks if line.verdict == "FAILED"]


def test_public_part_holds_nothing_private(finished):
    """Neither scores, nor ids, nor cohorts: by content, not by file name."""
    folder, result = finished
    texts = {p: p.read_bytes() for p in (folder / "public").rglob("*") if p.suffix != ".png"}
    words = ["accuracy", "spread", "worst_tenth", "loss", "participants", 'seed"', "cohorts", "test_examples"]
    words += DATA.ids
    for path, content in texts.items():
        for word in words:
            assert word.encode() not in content, f"{word} in {path.name}"
    report = json.loads((folder / "public/privacy.json").read_text())
    numbers = {v for row in result.history for k, v in row.items() if k not in ("epsilon", "round")}
    assert not numbers & {v for v in report.values() if isinstance(v, float) and 0 < v < 1}
    with safe_open(folder / "public/model.safetensors", framework="pt") as file:
        assert not file.metadata()
        shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert shapes == {name: p.shape for name, p in result.module.named_parameters()}


def test_metrics_table(finished):
    folder, result = finished
    with open(folder / "private/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(result.history[0])
    assert list(rows[0])[:3] == ["round", "time", "epsilon"]
    assert [{k: float(v) for k, v in row.items()} for row in rows] == result.history


def test_clients_table(finished):
    """Each client's scores of every model that it had; the personal model of FedAvg is the shared one."""
    folder, result = finished
    with open(folder / "private/clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert columns["client"] == list(DATA.ids)
    for side in ("train", "test"):
        assert list(map(int, columns[f"{side}_examples"])) == DATA.side(side).counts.tolist()
    local, pmtl = result.baselines["local"], result.baselines["pmtl"]
    expected = {
        "": result.scores["finetuned"],
        "shared ": result.scores["shared"],
        "personal model ": result.scores["personal"],
        "local ": local.scores["personal"],
        "pmtl ": pmtl.scores["finetuned"],
        "pmtl shared ": pmtl.scores["shared"],
        "pmtl personal model ": pmtl.scores["personal"],
    }
    scores = {f"{name}{metric}" for name in expected for metric in ("loss", "accuracy")}
    assert columns.keys() == {"client", "train_examples", "test_examples"} | scores
    for name, of in expected.items():
        assert list(map(float, columns[f"{name}accuracy"])) == list(of["accuracy"].values())
    assert torch.equal(load_file(folder / "private/models.safetensors")["models"], result.personal)


def test_result_and_privacy_files(finished):
    folder, result = finished
    assert json.loads((folder / "public/privacy.json").read_text()) == result.privacy.to_dict()
    found = json.loads((folder / "private/result.json").read_text())
    expected = {
        "algorithm": "fedavg",
        "stopped": "rounds",
        "rounds": 6,
        "planned_rounds": 6,
        "seed": 0,
        "data": "ragged",
        "clients": 12,
        "unit": "client",
        "noise_multiplier": NOISE,
        "delta": DELTA,
        "epsilon": result.epsilon,
        "finetune": "mean",
    }
    expected |= {name: result.final[name] for name in ("accuracy", "worst_tenth", "spread", "global_accuracy")}
    assert {key: found[key] for key in expected} == expected
    assert found["better"] + found["equal"] + found["worse"] == pytest.approx(1.0)
    assert found["baselines"].keys() == {"local", "pmtl"}
    for name, run in result.baselines.items():
        assert found["baselines"][name]["accuracy"] == run.final["accuracy"]
        assert found["baselines"][name]["epsilon"] == run.epsilon


def test_json_has_no_bare_infinity(tmp_path):
    trainer(folder=tmp_path, privacy=None, rounds=2, baselines=("fedavg",)).fit()

    def refuse(name):
        raise AssertionError(name)

    for path in (tmp_path / "public/privacy.json", tmp_path / "private/result.json"):
        assert json.loads(path.read_text(), parse_constant=refuse)["epsilon"] == "inf"
    models = [path.parent.parent for path in tmp_path.rglob("models.safetensors")]
    assert models == [tmp_path], "the models of clients without their own are the shared one repeated"


def scaled_loss(outputs, targets, scale=1.0):
    return float(scale) * cross_entropy(outputs, targets, reduction="none")


class ScaledLoss:
    def __init__(self, scale):
        self.scale, self.itself = scale, self

    def __call__(self, outputs, targets):
        return scaled_loss(outputs, targets, self.scale)

    def method(self, outputs, targets):
        return self(outputs, targets)


def by_code(scale):
    """Two functions of one name."""
    return (lambda outputs, targets: outputs) if scale == 1.0 else (lambda outputs, targets: outputs / 2)


LOSSES = {
    "code": by_code,
    "method of a class": lambda scale: type("Loss", (), {"__call__": by_code(scale)})(),
    "partial": lambda scale: partial(scaled_loss, scale=scale),
    "object": ScaledLoss,
    "method": lambda scale: ScaledLoss(scale).method,
    "closure": lambda scale: lambda outputs, targets: scaled_loss(outputs, targets, scale),
    "array": lambda scale: partial(scaled_loss, scale=np.array(scale)),
    "number of numpy": lambda scale: partial(scaled_loss, scale=np.float32(scale)),
    "module": lambda scale: CrossEntropyLoss(weight=torch.tensor([1.0, scale, 1.0]).double(), reduction="none"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_are_told_apart_by_code_and_values(kind):
    one, again, other = (describe(LOSSES[kind](scale)) for scale in (1.0, 1.0, 0.5))
    assert one == again
    assert one != other


def test_a_run_goes_on_with_its_own_loss_alone(tmp_path):
    trainer(folder=tmp_path, loss=ScaledLoss(1.0), rounds=1).fit()
    with pytest.raises(ResumeError, match="loss"):
        trainer(folder=tmp_path, loss=ScaledLoss(0.5), rounds=1).fit(resume=True)
    trainer(folder=tmp_path, loss=ScaledLoss(1.0), rounds=1).fit(resume=True)


# A folder that was copied, rolled back or mixed with another one


def interrupted(folder: Path, source: str = "secure", *, after: int | None = None, resume: bool = False) -> None:
    """Twelve rounds with a checkpoint after each; a crash after some of them."""
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source=source)  # type: ignore[arg-type]
    stops = () if after is None else (Ends(after - 1),)
    with pytest.raises(Ended) if stops else nullcontext():
        trainer(folder=folder, privacy=privacy, rounds=12, checkpoint_every=1, callbacks=stops).fit(resume=resume)


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_ledger_behind_its_checkpoint_is_refused(tmp_path: Path, source: str) -> None:
    """Also where the ledger and its head file are rolled back together."""
    interrupted(tmp_path, source, after=4)
    older = {path: path.read_bytes() for path in (tmp_path / "private").glob("ledger.*")}
    interrupted(tmp_path, source, after=9, resume=True)
    for path, content in older.items():
        path.write_bytes(content)
    with pytest.raises(ResumeError, match="rolled back or belongs to another run"):
        interrupted(tmp_path, source, resume=True)
    assert older == {path: path.read_bytes() for path in older}  # nothing was written to it


def test_the_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        interrupted(tmp_path / name, "seeded", after=4)
    for path in (tmp_path / "b/private").glob("ledger.*"):
        (tmp_path / "a/private" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ResumeError, match="belongs to another run"):
        interrupted(tmp_path / "a", "seeded", resume=True)
    (tmp_path / "a/private/ledger.jsonl").unlink()
    with pytest.raises(ResumeError, match="missing"):
        interrupted(tmp_path / "a", "seeded", resume=True)


def test_the_head_is_in_the_report_and_in_the_checkpoint(tmp_path: Path) -> None:
    interrupted(tmp_path, "secure")
    folder = RunFolder(tmp_path)
    report = json.loads((folder.public / "privacy.json").read_text())
    chain = read_chain(folder.ledger)
    assert chain.head == Head.parse((folder.private / "ledger.head").read_text())
    assert chain.head == Head(report["ledger_lines"], report["ledger_head"])
    assert report["run"] == chain.digests[0]
    kept = Checkpoint.read(folder.checkpoint).ledger
    assert kept.lines == report["ledger_lines"] - 1  # the close comes after the checkpoint
    assert charges(folder.ledger).total() == 12
    assert any("copy of this run" in text for text in report["outside"])
