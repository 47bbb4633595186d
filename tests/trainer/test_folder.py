"""The run folder: what is in it, that nothing private is public, and that what is loaded is what the run returned."""

import csv
import json
import os
import re
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy

from fedmtl import (
    MPMTL,
    PPDMTL,
    Callback,
    ClientPrivacy,
    FedAvg,
    Finetune,
    LocalOptimizer,
    LocalSGD,
    PoissonClocks,
    PrivatePrior,
    RecordPrivacy,
    Result,
    load_data,
    models,
)
from fedmtl._files import write_bytes
from fedmtl.audit.verification import verify
from fedmtl.cli.run import Job
from fedmtl.errors import ConfigError, DataError, ModelError, ResumeError
from fedmtl.models.networks import NamedFactory
from fedmtl.privacy.chain import Head, read_chain
from fedmtl.trainer.checkpoint import Checkpoint
from fedmtl.trainer.folder import RunFolder
from fedmtl.trainer.run_fingerprint import describe
from fedmtl.trainer.summary import numbers_of_result
from tests import small
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
    found = trainer(
        algorithm=algorithm, finetune=FINETUNE, folder=folder, baselines=("local", "pmtl")
    ).fit()
    quick_figures(figures)
    return folder, found


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("below", ["", "of/new/clients"])
def test_no_run_is_in_the_public_part_of_another(finished, below):
    folder, found = finished
    before = files(folder)
    with pytest.raises(
        ConfigError, match=r"in the public part of the run in .*; choose another folder"
    ):
        found.adapt(DATA, folder=folder / "public" / below)
    assert files(folder) == before


def test_layout(finished):
    folder, _ = finished
    expected = {f"public/{name}" for name in PUBLIC} | {f"private/{name}" for name in PRIVATE}
    tables = {
        f"private/{name}" for name in ("result.json", "clients.csv", "accuracy.png", "clients.png")
    }
    kept = expected - tables - {"public/manifest.json", "private/manifest.json"} | {
        "private/clients/2-0-of-1"
    }
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
    words = [
        "accuracy",
        "spread",
        "worst_tenth",
        "loss",
        "participants",
        'seed"',
        "cohorts",
        "test_examples",
    ]
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
    assert columns.keys() == {"client", "train_examples", "test_examples", "vs local"} | scores
    own = result.scores["finetuned"]["accuracy"]
    alone = local.scores["personal"]["accuracy"]
    # shares of a handful of test records: equal, or far apart
    signs = [np.sign(round(own[client] - alone[client], 6)) for client in DATA.ids]
    assert columns["vs local"] == [{1: "better", 0: "equal", -1: "worse"}[sign] for sign in signs]
    assert len(set(signs)) > 1
    better, _, worse = (
        list(columns["vs local"]).count(word) / len(DATA) for word in ("better", "equal", "worse")
    )
    line = Job(0, 2, "lam=1", Path("sweep")).line(result, 0.0, Path("sweep/0"))
    assert (
        f" ({better:.0%} of the clients better off than alone, {worse:.0%} worse), epsilon" in line
    )
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
    expected |= {
        name: result.final[name]
        for name in ("accuracy", "worst_tenth", "spread", "global_accuracy")
    }
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
    assert models == [tmp_path], (
        "the models of clients without their own are the shared one repeated"
    )


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
    return (
        (lambda outputs, targets: outputs)
        if scale == 1.0
        else (lambda outputs, targets: outputs / 2)
    )


LOSSES = {
    "code": by_code,
    "method of a class": lambda scale: type("Loss", (), {"__call__": by_code(scale)})(),
    "partial": lambda scale: partial(scaled_loss, scale=scale),
    "object": ScaledLoss,
    "method": lambda scale: ScaledLoss(scale).method,
    "closure": lambda scale: lambda outputs, targets: scaled_loss(outputs, targets, scale),
    "array": lambda scale: partial(scaled_loss, scale=np.array(scale)),
    "number of numpy": lambda scale: partial(scaled_loss, scale=np.float32(scale)),
    "module": lambda scale: CrossEntropyLoss(
        weight=torch.tensor([1.0, scale, 1.0]).double(), reduction="none"
    ),
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


def interrupted(
    folder: Path, source: str = "secure", *, after: int | None = None, resume: bool = False
) -> None:
    """Twelve rounds with a checkpoint after each; a crash after some of them."""
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source=source)  # type: ignore[arg-type]
    stops = () if after is None else (Ends(after - 1),)
    with pytest.raises(Ended) if stops else nullcontext():
        trainer(folder=folder, privacy=privacy, rounds=12, checkpoint_every=1, callbacks=stops).fit(
            resume=resume
        )


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


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, nn.Module):
        return repr(a) == repr(b)
    if isinstance(a, NamedFactory):  # a partial is equal to itself only
        return describe(a) == describe(b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, Result):
        return not differences(a, b)
    if hasattr(a, "__dataclass_fields__") and any(
        isinstance(value, Tensor) for value in vars(a).values()
    ):
        return type(a) is type(b) and all(
            same(value, getattr(b, name)) for name, value in vars(a).items()
        )
    return bool(a == b)


def differences(a: Result, b: Result) -> list[str]:
    return [
        one.name for one in fields(Result) if not same(getattr(a, one.name), getattr(b, one.name))
    ]


def margin(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.max())


@pytest.mark.parametrize(
    "given",
    [
        {"baselines": ("local", "fedavg", "ditto"), "metrics": ["f1", "balanced_accuracy"]},
        {
            "algorithm": FedAvg(local=SOLVER),
            "finetune": Finetune(kind="kl", local=LocalOptimizer(lr=0.01, steps=2)),
        },
        {
            "finetune": Finetune(validation=0.4),
            "baselines": ("local", "fedavg"),
            "dtype": "float32",
        },
        {"privacy": None, "model": models.lora(models.mlp(hidden=4), rank=2), "seed": 3},
        {"privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=1.0, source="secure")},
        {"model": models.mlp(hidden=3), "trainable": ("3.*",), "rounds": 2},
        {"evaluate_clients": 6, "baselines": ("local", "fedavg")},
    ],
    ids=["metrics", "finetuned", "chosen", "lora", "secure", "trainable", "drawn"],
)
def test_a_loaded_result_is_the_result(tmp_path: Path, given: dict[str, Any]) -> None:
    result = trainer(folder=tmp_path / "run", **given).fit()
    found = Result.load(tmp_path / "run")
    assert differences(result, found) == []
    assert found.summary() == result.summary()
    assert repr(found) == repr(result)
    assert numbers_of_result(found) == numbers_of_result(result)
    x = DATA.test.x[:5].double()
    for client in result.personal_ids[:3]:
        expected = result.model_for(client).to(torch.float64)(x)
        assert torch.equal(found.model_for(client).to(torch.float64)(x), expected)
    assert torch.equal(found.shared_model().double()(x), result.shared_model().double()(x))
    new = DATA.subset(DATA.ids[:4])
    expected, joined = result.adapt(new, device="cpu"), found.adapt(new)
    assert torch.equal(joined.personal, expected.personal)
    assert joined.by_client == expected.by_client
    assert joined.summary() == expected.summary()


TASKS = load_data("synthetic_tasks", tasks=6, features=5, train_examples=20, seed=1)
LINEAR: dict[str, dict[str, Any]] = {
    "pp_dmtl": {
        "algorithm": PPDMTL(loss="squared", feature_norm=5.0, target=5.0, smoothness=2.0),
        "schedule": PoissonClocks(per_client=4),
        "rounds": 24,
        "privacy": RecordPrivacy(clip_norm=1.0, epsilon=3.0),
    },
    "mp_mtl": {"algorithm": MPMTL(lam=0.5, own_penalty="frobenius"), "rounds": 3},
    "private_prior": {"algorithm": PrivatePrior(), "loss": "half_mse"},
    "replicates": {
        "algorithm": MPMTL(lam=0.5),
        "replicates": 3,
        "epsilons": (1.0, 4.0),
        "privacy": ClientPrivacy(clip_norm=1.0, epsilon=1.0),
        "rounds": 2,
    },
}


def linear(**given: Any) -> Result:
    return small.trainer(
        **{"data": TASKS, "model": models.linear_regression(bias=False)} | given
    ).fit()


@pytest.mark.parametrize("case", LINEAR)
def test_linear_models_and_their_parts_are_loaded(case: str, tmp_path: Path) -> None:
    result, found = linear(folder=tmp_path, **LINEAR[case]), Result.load(tmp_path)
    assert differences(result, found) == []
    assert found.summary() == result.summary()
    assert verify(tmp_path).fits
    parts = found.parts
    if "P" in parts:
        assert torch.allclose(parts["P"] + parts["Q"], result.personal, atol=1e-12)
        assert float(parts["P"].norm()) > 0
    if "directions" in parts:
        assert torch.allclose(
            parts["directions"] @ parts["directions"].T, torch.eye(5).double(), atol=1e-8
        )


def test_the_covariance_is_what_was_released() -> None:
    """Without noise and clip it is W^T W of the models before the last step, here of their starts."""
    once = linear(algorithm=MPMTL(lam=0.5, ridge=0.1, rho=0.0))
    starts = linear(algorithm=MPMTL(lam=0.0, ridge=0.1, rho=0.0)).personal  # M is then the identity
    assert torch.allclose(once.parts["covariance"], starts.T @ starts, rtol=1e-8)
    assert torch.allclose(once.personal, starts @ once.parts["map"], rtol=1e-8)


def test_a_model_of_the_callers_own_is_given(tmp_path: Path) -> None:
    """Scores and tables need none; modules do, and another network is refused."""
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(*(DATA.spec.shape[0], 4)),
        nn.Tanh(),
        nn.Linear(4, DATA.spec.outputs),
    )
    result = trainer(model=network, metrics=[margin], folder=tmp_path).fit()
    found = Result.load(tmp_path)
    assert differences(result, found) == ["further_metrics", "module", "adaptation"]
    assert found.summary() == result.summary().replace(
        " or a smaller algorithm.local.lr", ""
    )  # a term of the run
    assert torch.equal(found.shared, result.shared)
    with pytest.raises(
        ConfigError,
        match=r"does not say how its model is built.*Result.load\(folder, model=\.\.\.\)",
    ):
        found.model_for(result.ids[0])
    again = Result.load(tmp_path, model=network)
    assert same(again.model_for("client-1").state_dict(), result.model_for("client-1").state_dict())
    with pytest.raises(ConfigError, match="does not know the settings of its run"):
        again.adapt(DATA)
    with pytest.raises(ModelError, match="model has the parameters"):
        Result.load(tmp_path, model=models.mlp(hidden=9))


def test_a_client_that_is_not_there_is_said_with_those_that_are() -> None:
    result = trainer(rounds=1).fit()
    said = r"no client 'clien-1'; did you mean 'client-1'\? the 12 clients are 'client-0'"
    with pytest.raises(ConfigError, match=said):
        result.model_for("clien-1")
    with pytest.raises(ConfigError, match=r"no client 7; "):
        result.model_for(7)


def test_folders_that_hold_no_finished_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"nowhere holds no finished run .*result.json is missing; .*fedmtl resume",
    ):
        Result.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"folder is None; give the path of a finished run"):
        Result.load(None)  # type: ignore[arg-type]
    trainer(folder=tmp_path, rounds=2).fit()
    outcome = tmp_path / "private" / "outcome.json"
    outcome.write_text(json.dumps({"ids": []}))
    with pytest.raises(
        DataError, match=r"outcome.json is no outcome of a run: KeyError\('network'\)"
    ):
        Result.load(tmp_path)
    outcome.unlink()
    with pytest.raises(
        ConfigError, match=r"outcome.json is missing; fedmtl resume .* one of an earlier version"
    ):
        Result.load(tmp_path)
    ended = Looking(tmp_path / "private" / "result.json")
    trainer(folder=tmp_path, rounds=2, callbacks=[ended]).fit(resume=True)
    assert ended.marks == [True, False], (
        "a run whose files are written again is not finished before they all are"
    )
    assert Result.load(tmp_path).stopped == "rounds"


class Looking(Callback):
    """Notes whether there is a file when a run starts and when it ends."""

    def __init__(self, path: Path) -> None:
        self.path, self.marks = path, list[bool]()

    def on_start(self, name: str, rounds: int, step: int) -> None:
        self.marks.append(self.path.exists())

    def on_end(self, result: Result | None) -> None:
        self.marks.append(self.path.exists())


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    Checkpoint(7, {"w": torch.zeros(2)}, {}, [], "mark").write(path)
    kept = Checkpoint.read(path)
    kept.check(path, "mark")
    with pytest.raises(ResumeError, match=r"c\.safetensors was written with other data, settings"):
        kept.check(path, "another mark")


def test_files_that_are_no_checkpoint_are_named(tmp_path):
    path = tmp_path / "c.safetensors"
    Checkpoint(7, {"w": torch.zeros(2)}, {}, [], "mark").write(path)
    contents = [b"", b"not a checkpoint", b"\x80\x04pickled", path.read_bytes()[:-1]]
    contents += [
        save({"public.w": torch.zeros(2)}, notes) for notes in ({}, {"notes": "{"}, {"notes": "{}"})
    ]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ResumeError, match=r"c\.safetensors cannot be read"):
            Checkpoint.read(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="asks Linux which file a handle is")
def test_content_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """The order that survives a loss of power: write, sync the file, rename, sync the folder."""
    calls: list[str] = []
    names: list[str] = []
    fsync, replace = os.fsync, os.replace

    def plain(name: str) -> str:
        return re.sub(r"\.[0-9a-f]{8}\.tmp$", ".tmp", name)

    def synced(handle: int) -> None:
        calls.append("sync " + plain(os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        if "tmp" in calls[-1]:
            assert Path(f"/proc/self/fd/{handle}").read_bytes() == b"content"
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        names.append(source.name)
        calls.append(f"rename {plain(source.name)} {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_bytes(tmp_path / "file", b"content")
    assert calls == ["sync file.tmp", "rename file.tmp file", f"sync {tmp_path.name}"]
    write_bytes(tmp_path / "file", b"content")
    assert len(set(names)) == 2  # a second process writes into no file of this one
