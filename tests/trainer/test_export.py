"""Models as programs: raw rows of numbers in, the predictions of the run's models out, without this package."""

import json
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl import FedAvg, FullParticipation, LocalSGD, Trainer, cli, load_data, models
from fedmtl.errors import ConfigError, ModelError
from fedmtl.trainer.export import NOTES, write_program

BOUNDS = {
    "age": [0.1, 99.7],
    "kind": ["x", "y", "z"],
    "planned": [False, True],
    "days": [0.3, 30.7],
}
NEW = pd.DataFrame(
    {
        "planned": [True, False, True, False],
        "more": ["?", "?", "?", "?"],
        "kind": ["z", "x", "y", "z"],
        "age": [40.3, 300.0, -1.0, 77.7],
    }
)
ROWS = np.array([[40.3, 2, 1], [300.0, 0, 0], [-1.0, 1, 1], [77.7, 2, 0]])
WRONG = np.array(
    [
        [np.nan, 2, 1],
        [np.inf, 0, 0],
        [-np.inf, 0, 0],
        [40.0, 3, 1],
        [40.0, 0.5, 1],
        [40.0, 0, np.nan],
    ]
)


def table(rows=40):
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "ward": rng.choice(["anna", "bob"], rows),
            "age": rng.uniform(0.1, 99.7, rows),
            "kind": rng.choice(["x", "y", "z"], rows),
            "planned": rng.choice([True, False], rows),
            "days": rng.uniform(0.3, 30.7, rows),
        }
    )


def trained(model, folder=None, **options):
    data = load_data(
        "table", **{"path": table(), "client": "ward", "target": "days", "bounds": BOUNDS} | options
    )
    solver = {
        "algorithm": FedAvg(local=LocalSGD(lr=0.5)),
        "schedule": FullParticipation(),
        "model": model,
    }
    return Trainer(
        data=data, **solver, rounds=3, privacy=None, progress=False, baselines=[], folder=folder
    ).fit()


@cache
def opened(path):
    """A program of PyTorch, which no test writes twice, and its notes."""
    notes = {NOTES: ""}
    return torch.export.load(path, extra_files=notes), notes


def computed(path, rows):
    """The outputs of a program by name, by the library of its file, and its notes."""
    if path.suffix == ".pt2":
        program, notes = opened(path)
        with torch.no_grad():
            made = program.module()(torch.tensor(rows))
        return {name: value.numpy() for name, value in made.items()}, json.loads(notes[NOTES])
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    notes = json.loads(session.get_modelmeta().custom_metadata_map[NOTES])
    return dict(zip(names, session.run(None, {"rows": rows}), strict=True)), notes


def check_real(path, predict):
    """Compare a program of a real target with its predictor."""
    write_program(predict, path)
    expected = predict(NEW).to_numpy()
    assert len(set(expected.round(3))) == 4
    found, notes = computed(path, np.concatenate([ROWS, WRONG]))
    np.testing.assert_allclose(found["prediction"][:4], expected, rtol=1e-5)
    assert np.isnan(found["prediction"][4:]).all()
    assert list(found) == ["prediction"]
    assert [column["name"] for column in notes["columns"]] == ["age", "kind", "planned"]
    assert notes["columns"][1]["categories"] == ["x", "y", "z"]
    assert (notes["target"], notes["classes"]) == ("days", None)
    one, _ = computed(path, ROWS[:1])
    np.testing.assert_allclose(one["prediction"], expected[:1], rtol=1e-5)
    assert b"/trainer/" not in path.read_bytes()  # no places in the source of who wrote it
    assert b"test_export" not in path.read_bytes()
    assert b"test_onnx" not in path.read_bytes()


def test_a_program_predicts_what_the_predictor_does_and_needs_no_fedmtl(tmp_path):
    check_real(tmp_path / "model.pt2", trained(models.mlp(hidden=16)).predictor("anna"))
    program, _ = opened(tmp_path / "model.pt2")
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(call.startswith("aten.") for call in calls)


class Reshaped(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(len(x), -1))


def test_a_model_that_counts_its_rows_is_a_program_of_any_number(tmp_path):
    check_real(tmp_path / "model.pt2", trained(Reshaped(5, 1)).predictor("anna"))


def test_a_program_of_one_logit_does_so(tmp_path):
    check_classes(tmp_path / "model.pt2", models.logistic_regression())


def check_classes(path, model):
    rows = table().assign(days=lambda t: np.where(t["age"] > 60, "long", "short"))
    bounds = {name: values for name, values in BOUNDS.items() if name != "days"}
    result = trained(model, path=rows, bounds=bounds, labels=["short", "long"])
    write_program(result.predictor(), path)
    found, notes = computed(path, np.concatenate([ROWS, WRONG]))
    expected = result.predictor()(NEW, probabilities=True)
    np.testing.assert_allclose(found["probabilities"][:4], expected, rtol=1e-5)
    assert notes["classes"] == ["short", "long"]
    assert [notes["classes"][number] for number in found["prediction"][:4]] == list(
        result.predictor()(NEW)
    )
    assert np.isnan(found["probabilities"][4:]).all()
    assert (found["prediction"][4:] == -1).all()


def test_a_program_of_whole_numbers_takes_no_others(tmp_path):
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"ward": rng.choice(["anna", "bob"], 40), "y": rng.integers(0, 2, 40)})
    rows = rows.assign(a=rng.integers(0, 9, 40), b=rng.integers(0, 9, 40))
    options = {"path": rows, "target": "y", "classes": 2, "integers": True, "bounds": None}
    predict = trained(models.mean_embedding(vocabulary=9, width=4), **options).predictor()
    path = tmp_path / "model.pt2"
    write_program(predict, path)
    some = pd.DataFrame({"a": [1, 8, 3], "b": [2, 0, 4]})
    found, _ = computed(path, np.array([[1, 2], [8, 0], [3, 4], [2.5, 1]], dtype=float))
    np.testing.assert_allclose(
        found["probabilities"][:3], predict(some, probabilities=True), rtol=1e-5
    )
    assert found["prediction"][3] == -1


def test_what_cannot_be_written_is_refused_in_one_sentence(tmp_path, monkeypatch):
    predict = trained(models.linear_regression()).predictor()
    with pytest.raises(ConfigError, match=r"ends in \.pt2 or \.onnx"):
        write_program(predict, tmp_path / "model.pt")

    def refused(*arguments, **options):
        raise RuntimeError("a branch\non data")

    monkeypatch.setattr(torch.export, "export", refused)
    with pytest.raises(ModelError, match=r"the model cannot be written as \.pt2") as error:
        write_program(predict, tmp_path / "model.pt2")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_a_program_takes_and_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained(models.linear_regression(), "run")
    for words, first in (
        (["run", "m.pt2"], "m.pt2: the shared model"),
        (["run/public", "m.pt2"], "m.pt2: the shared model"),
        (["run", "m.pt2", "--client", "bob"], "m.pt2: the model of bob, which no epsilon covers"),
    ):
        assert cli.main(["export", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == first
        assert [line.strip() for line in lines[1:]] == [
            "column 0  age, cut off at 0.1 and 99.7",
            "column 1  kind: 0 x, 1 y, 2 z",
            "column 2  planned: 0 False, 1 True",
            "gives     days",
        ]
    assert cli.main(["export", "run", "m.pt2", "--client", "bobb"]) == 2
    assert "did you mean 'bob'" in capsys.readouterr().err
