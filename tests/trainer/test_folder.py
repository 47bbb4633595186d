"""The run folder: what is in it, and that nothing private is in its public part."""

import csv
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy

from fedmtl import ClientPrivacy
from fedmtl.errors import ConfigError, ResumeError
from fedmtl.trainer.problem import describe
from tests.conftest import quick_figures

from .settings import DATA, trainer

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
    """A run with baselines and real figures."""
    figures.undo()
    folder = tmp_path_factory.mktemp("runs") / "run"
    found = trainer(folder=folder, baselines=("local", "fedavg")).fit()
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
    drawn = {
        "public/manifest.json",
        "private/manifest.json",
        *(f"private/{n}" for n in ("result.json", "clients.csv", "accuracy.png", "clients.png")),
    }
    lacking = {
        "local": {"public/model.safetensors", "private/ledger.jsonl", "private/ledger.head"},
        "fedavg": {"private/models.safetensors"},
    }
    for name, without in lacking.items():
        kept = {
            path for path in expected - without - drawn if "baselines" not in path
        }  # the run's own tables have them
        expected |= {f"private/baselines/{name}/{path}" for path in kept}
    own = {"private/clients/2-0-of-1"}
    expected |= own | {f"private/baselines/local/{path}" for path in own}
    assert files(folder) == expected
    for path in folder.rglob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


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
    folder, result = finished
    with open(folder / "private/clients.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == list(DATA.ids)
    models = ("", "shared ", "local ", "fedavg ", "fedavg shared ")
    scores = [f"{name}{metric}" for name in models for metric in ("loss", "accuracy")]
    assert list(rows[0]) == ["client", "train_examples", "test_examples", *scores]
    for place, row in enumerate(rows):
        client = row["client"]
        for side in ("train", "test"):
            offsets = getattr(DATA, side).offsets
            assert int(row[f"{side}_examples"]) == int(offsets[place + 1] - offsets[place])
        assert float(row["accuracy"]) == result.personal_accuracy[client]
        assert float(row["shared accuracy"]) == result.shared_accuracy[client]
        for name in ("local", "fedavg"):
            assert float(row[f"{name} accuracy"]) == result.baselines[name].personal_accuracy[client]


def test_result_and_privacy_files(finished):
    folder, result = finished
    assert json.loads((folder / "public/privacy.json").read_text()) == result.privacy.to_dict()
    found = json.loads((folder / "private/result.json").read_text())
    expected = {
        "algorithm": "pmtl",
        "stopped": "rounds",
        "rounds": 6,
        "planned_rounds": 6,
        "seed": 0,
        "data": "ragged",
        "clients": 12,
        "unit": "client",
        "noise_multiplier": 1.5,
        "delta": 1e-5,
        "epsilon": result.epsilon,
        "accuracy": result.final["accuracy"],
        "worst_tenth": result.final["worst_tenth"],
        "spread": result.final["spread"],
        "global_accuracy": result.final["global_accuracy"],
    }
    assert {key: found[key] for key in expected} == expected
    assert found["baselines"].keys() == {"local", "fedavg"}
    for name, run in result.baselines.items():
        assert found["baselines"][name]["accuracy"] == run.final["accuracy"]
        assert found["baselines"][name]["epsilon"] == run.epsilon


@pytest.mark.parametrize("privacy", [None, ClientPrivacy(clip_norm=1.0, epsilon=math.inf)], ids=["open", "clipped"])
def test_json_has_no_bare_infinity(tmp_path, privacy):
    trainer(folder=tmp_path, privacy=privacy, rounds=2, baselines=("fedavg",)).fit()

    def refuse(name):
        raise AssertionError(name)

    for path in (tmp_path / "public/privacy.json", tmp_path / "private/result.json"):
        assert json.loads(path.read_text(), parse_constant=refuse)["epsilon"] == "inf"


def scaled_loss(outputs, targets, scale=1.0):
    return float(scale) * cross_entropy(outputs, targets, reduction="none")


class ScaledLoss:
    def __init__(self, scale):
        self.scale, self.itself = scale, self

    def __call__(self, outputs, targets):
        return scaled_loss(outputs, targets, self.scale)

    def method(self, outputs, targets):
        return self(outputs, targets)


def closed_over(scale):
    def loss(outputs, targets):
        return scaled_loss(outputs, targets, scale)

    return loss


def by_code(scale):
    """Two functions of one name."""
    if scale == 1.0:
        return lambda outputs, targets: cross_entropy(outputs, targets, reduction="none")
    return lambda outputs, targets: cross_entropy(0.5 * outputs, targets, reduction="none")


def by_method(scale):
    """Two classes of one name."""

    def call(self, outputs, targets):
        return cross_entropy(outputs, targets, reduction="none")

    def other(self, outputs, targets):
        return cross_entropy(0.5 * outputs, targets, reduction="none")

    return type("Loss", (), {"__call__": call if scale == 1.0 else other})()


LOSSES = {
    "code": by_code,
    "method of a class": by_method,
    "partial": lambda scale: partial(scaled_loss, scale=scale),
    "object": ScaledLoss,
    "method": lambda scale: ScaledLoss(scale).method,
    "closure": closed_over,
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
