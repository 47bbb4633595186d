"""``fedmtl predict``: the right model for each row of a file, in the target's units, and files that others wrote."""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedmtl import (
    ClientPrivacy,
    FedAvg,
    Finetune,
    FullParticipation,
    Local,
    LocalSGD,
    Result,
    Trainer,
    cli,
    load_data,
    load_predictor,
    models,
    personalize,
)
from fedmtl.data import RowBound
from fedmtl.errors import ConfigError, DataError
from fedmtl.models import BoundedInputs, BoundedOutputs
from fedmtl.trainer.coding import Predictor
from fedmtl.trainer.predict import Models

BOUNDS = {"age": [20, 100], "kind": ["x", "y", "z"], "planned": [False, True], "days": [0, 30]}
HEADING = "planned,id,kind,age,ward\n"
NEW = f"{HEADING}True,007,z,40,anna\nfalse,008,x,300,bob\nFALSE,-9+1,y,20,=eva\n"
NUMBERS = np.array([[2 * 20 / 80 - 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, -1, 1], [-1, 0, 1, 0, -1, 1]])


def table(rows=40):
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "ward": rng.choice(["anna", "bob"], rows),
            "age": rng.integers(20, 100, rows),
            "kind": rng.choice(["x", "y", "z"], rows),
            "planned": rng.choice([True, False], rows),
            "days": rng.integers(0, 31, rows),
        }
    )


def train(folder, rows, **options):
    names = ("algorithm", "model", "privacy", "schedule")
    settings = {name: options.pop(name) for name in names if name in options}
    data = load_data("table", path=rows, client="ward", **options)
    fit(data, folder, **settings)


def fit(data, folder, **settings):
    settings = {"privacy": None, "baselines": []} | settings
    Trainer(data=data, rounds=2, progress=False, folder=folder, **settings).fit()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    table().to_csv(place / "t.csv", index=False)
    train(
        place / "run",
        place / "t.csv",
        target="days",
        bounds=BOUNDS,
        privacy=ClientPrivacy(epsilon=10.0),
    )
    return place / "run"


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    place = tmp_path_factory.mktemp("classes")
    rows = table().assign(stay=lambda t: np.where(t["age"] > 60, "=long", "short"))[
        ["ward", "age", "stay"]
    ]
    rows.to_csv(place / "t.csv", index=False)
    options = {"target": "stay", "labels": ["short", "=long"], "bounds": {"age": [20, 100]}}
    train(place / "run", place / "t.csv", model=models.softmax_regression(), **options)
    return place / "run"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "of the environment")
    return tmp_path


@pytest.fixture
def public(run, here):
    """A copy of the public part, which somebody else may have changed."""
    shutil.copytree(run / "public", here / "received")
    return here / "received"


def command(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(map(str, words)))
    return code, out.getvalue(), err.getvalue()


def refused(*words):
    """The one sentence by which a command refuses."""
    code, out, err = command(*words)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def done(*words):
    code, out, err = command(*words)
    assert code == 0, err
    return out


def weights(folder, client=None):
    """The numbers of a model, as its file has them: slopes of the features, then the constant."""
    if client is None:
        return np.concatenate([value.ravel() for value in shared(folder)])
    with safe_open(folder / "private" / "models.safetensors", framework="np") as file:
        ids = json.loads(file.metadata()["ids"])
        return file.get_tensor("models")[ids.index(client)].astype(np.float64)


def shared(folder):
    """The weight and the constant of the shared model, as its file has them, in an order of its own."""
    state = load_file(folder / "public" / "model.safetensors")
    return [
        value.double().numpy() for value in sorted(state.values(), key=lambda value: -value.ndim)
    ]


def in_days(folder, client, rows):
    return 15 * (np.clip(rows @ weights(folder, client), -1, 1) + 1)


@pytest.mark.quick
def test_each_row_is_predicted_by_the_model_of_its_client_in_days(run, here):
    Path("new.csv").write_text(NEW)
    for folder in (run, run / "private"):
        out = done("predict", folder, "new.csv", "--keep", "id")
        assert "2 by the own models of their clients, 1 by the shared model" in out
        found = pd.read_csv("new.predicted.csv", dtype={"id": str})
        expected = [
            in_days(run, who, NUMBERS)[row] for row, who in enumerate(("anna", "bob", None))
        ]
        np.testing.assert_allclose(found["predicted_days"], expected, rtol=1e-5)
        assert len(set(np.round(expected, 3))) == 3
        assert list(found["predicted_by"]) == ["own", "own", "shared"]
        assert list(found["id"]) == ["007", "008", "'-9+1"]
        assert list(found["ward"]) == ["anna", "bob", "'=eva"]


def test_rows_of_others_by_the_model_of_one_client_are_no_rows_of_its_own(run, here):
    Path("new.csv").write_text(NEW)
    done("predict", run, "new.csv", "--client", "anna")
    found = pd.read_csv("new.predicted.csv")
    np.testing.assert_allclose(found["predicted_days"], in_days(run, "anna", NUMBERS), rtol=1e-5)
    assert list(found["predicted_by"]) == ["own", "other", "other"]
    pd.read_csv("new.csv").drop(columns="ward").to_csv("nobody.csv", index=False)
    done("predict", run, "nobody.csv", "--client", "anna")
    assert set(pd.read_csv("nobody.predicted.csv")["predicted_by"]) == {"own"}


def test_the_public_part_alone_gives_the_shared_model(run, public):
    Path("new.csv").write_text(NEW)
    shutil.copytree(public, "whole/public")
    for folder in (run / "public", public, "whole"):
        done("predict", folder, "new.csv", "--output", "found.csv")
        found = pd.read_csv("found.csv")
        np.testing.assert_allclose(found["predicted_days"], in_days(run, None, NUMBERS), rtol=1e-5)
        assert set(found["predicted_by"]) == {"shared"}
    with pytest.raises(ConfigError, match=r"public part of a run.*load_predictor\('.*received'\)"):
        Result.load(public)
    assert "none of client 'anna'" in refused("predict", public, "new.csv", "--client", "anna")


@pytest.fixture(scope="module")
def adapted(run, tmp_path_factory):
    """New clients, one with a name of the run's, with models that start from the run's."""
    place = tmp_path_factory.mktemp("new") / "adapted"
    rows = table(60).assign(ward=lambda t: np.where(t["ward"] == "anna", "carl", "bob"))
    data = load_data("table", path=rows, client="ward", target="days", bounds=BOUNDS)
    Result.load(run).adapt(data, folder=place)
    return place


def test_new_clients_predict_with_their_own_models(run, adapted, here):
    Path("new.csv").write_text(NEW.replace("anna", "carl"))
    done("predict", adapted, "new.csv")
    found = pd.read_csv("new.predicted.csv")
    expected = [in_days(adapted, who, NUMBERS)[row] for row, who in enumerate(("carl", "bob"))]
    expected.append(in_days(run, None, NUMBERS)[2])
    np.testing.assert_allclose(found["predicted_days"], expected, rtol=1e-5)
    assert list(found["predicted_by"]) == ["own", "own", "shared"]
    assert not np.allclose(expected[1], in_days(run, "bob", NUMBERS)[1], rtol=1e-3)

    done("predict", adapted / "public", "new.csv")
    found = pd.read_csv("new.predicted.csv")
    np.testing.assert_allclose(found["predicted_days"], in_days(run, None, NUMBERS), rtol=1e-5)
    assert Result.load(adapted).factory is not None  # of which they can be adapted again


@pytest.mark.parametrize("bounded", [False, True])
def test_new_clients_keep_the_bound_on_records_and_what_is_frozen(bounded, here):
    """What is frozen follows from the run's seed, and the new clients have another."""
    data = load_data("table", path=table(), client="ward", target="days", bounds=BOUNDS)
    network = models.lora(models.mlp(hidden=6), rank=2)
    fedavg = FedAvg(local=LocalSGD(lr=0.5))
    fit(data, here / "run", algorithm=fedavg, model=network, schedule=FullParticipation())
    result = Result.load(here / "run")
    shared = result.shared_model()
    bound = None
    if bounded:
        bound = RowBound(0.7, "l1")
        shared = BoundedOutputs(BoundedInputs(shared.model, bound), shared.limit)
    finetune = Finetune(kind="mean", local=LocalSGD(lr=0.1))
    options = {"finetune": finetune, "seed": 1, "factory": result.factory, "folder": here / "new"}
    made = personalize(shared, data, **options)
    loaded = Result.load(here / "new")
    assert loaded.bounds.records == bound
    rows = pd.DataFrame({"age": [40, 90], "kind": ["z", "x"], "planned": [True, False]})
    for client in (None, "anna"):
        found = loaded.predictor(client)(rows)
        np.testing.assert_array_equal(found, made.predictor(client)(rows))
    expected = Predictor(shared, result.coding)(rows)
    np.testing.assert_array_equal(loaded.predictor()(rows), expected)
    np.testing.assert_array_equal(load_predictor(here / "new" / "public")(rows), expected)
    assert bounded != np.allclose(expected, result.predictor()(rows), rtol=1e-4)


def test_a_client_can_be_named_for_all_rows(run, here):
    Path("new.csv").write_text(NEW.replace("ward", "station"))
    for words, client in (((), None), (("--client", "bob"), "bob")):
        _, out, err = command("predict", run, "new.csv", "--output", "-", *words)
        found = pd.read_csv(io.StringIO(out))
        np.testing.assert_allclose(
            found["predicted_days"], in_days(run, client, NUMBERS), rtol=1e-5
        )
        assert "ward" not in found
        assert "days of 3 rows" in err
        assert ("the table has no column 'ward'" in err) == (client is None)
    assert "did you mean 'bob'" in refused("predict", run, "new.csv", "--client", "bobb")
    assert os.listdir() == ["new.csv"]


def test_classes_have_their_names_and_probabilities(classes, here):
    Path("new.csv").write_text("ward,age,stay\nanna,20,?\neva,100,?\n")
    done("predict", classes, "new.csv", "--probabilities")
    found = pd.read_csv("new.predicted.csv")
    slopes, constants = weights(classes, "anna").reshape(2, 2)[0], weights(classes, "anna")[2:]
    own = np.exp(-1 * slopes + constants)
    slopes, constants = (value.ravel() for value in shared(classes))
    others = np.exp(1 * slopes + constants)
    expected = np.stack([own / own.sum(), others / others.sum()])
    np.testing.assert_allclose(
        found[["probability_short", "probability_=long"]], expected, rtol=1e-5
    )
    assert list(found["predicted_stay"]) == [
        ["short", "'=long"][place] for place in expected.argmax(1)
    ]
    assert "probability" not in done("predict", classes, "new.csv", "--output", "-")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            f"{HEADING}True,1,z,40,anna\n\nTrue,1,z,,bob\n",
            "client 'bob', line 4, column 'age' is empty",
        ),
        (
            f"{HEADING}True,1,z,many,anna\n",
            "client 'anna', line 2, column 'age' holds 'many'; accepted: a finite",
        ),
        (
            f"{HEADING}True,1,w,40,anna\n",
            "line 2, column 'kind' holds 'w'; accepted: the categories 'x', 'y', 'z'",
        ),
        (f"{HEADING}maybe,1,x,40,anna\n", "line 2, column 'planned' holds 'maybe'"),
        (
            f"{HEADING}True,1,x,40,\n",
            "line 2, column 'ward' is empty; accepted: the name of a client",
        ),
        (NEW.replace("kind", "kinds"), "column 'kind' is missing; did you mean 'kinds'?"),
        (NEW.replace("age", "Age"), "column 'age' is missing; did you mean 'Age'?"),
        (NEW.replace("age", "kind"), "column 'kind' occurs twice"),
        (f"{HEADING}True,1,x\n", "the number of fields of line 2 is 3, that of the header 5"),
        (NEW.replace(",", ";"), "data.separator=semicolon reads it"),
        ("", "it is empty"),
    ],
)
def test_wrong_rows_are_refused_by_file_line_and_column(run, here, text, wrong):
    Path("new.csv").write_text(text)
    error = refused("predict", run, "new.csv")
    assert "new.csv" in error
    assert wrong in error
    assert os.listdir() == ["new.csv"]


def test_wrong_words_are_refused(run, classes, here):
    Path("new.csv").write_text(NEW)
    for words, wrong in (
        ((run, "new.csv", "client=anna"), "client=anna is an option here: --client anna"),
        (
            (run, "new.csv", "rounds=3"),
            "no setting of a table to predict; accepted: separator, decimal, encoding",
        ),
        ((run, "new.csv", "out.csv"), "the file to write is --output out.csv"),
        ((run, "new.csv", "--output", "new.csv"), "the table itself"),
        ((run, "new.csv", "--output", "new.xlsx"), "give a file that ends in .csv"),
        ((run, "new.csv", "--probabilities"), "predicts a number; leave probabilities out"),
        ((run, "new.csv", "--keep", "name"), "kept column 'name' is missing"),
        ((run, "old.csv"), "old.csv cannot be read as a table: it does not exist"),
        ((run / "nothing", "new.csv"), "nothing is no folder"),
        ((here, "new.csv"), "holds no finished run"),
    ):
        assert wrong in refused("predict", *words)


def test_a_table_without_rows_has_a_prediction_without_rows(run, here):
    Path("new.csv").write_text(HEADING)
    done("predict", run, "new.csv")
    assert Path("new.predicted.csv").read_text() == "ward,predicted_days,predicted_by\n"


def test_another_form_and_parquet_are_read(run, here):
    rows = pd.read_csv(io.StringIO(NEW)).assign(age=[40.5, 20.5, 99.5])
    rows.to_parquet("new.parquet")
    rows.to_csv("new.tsv", sep="\t", index=False)
    rows.to_csv("new.csv", sep=";", decimal=",", index=False)
    found = [done("predict", run, name, "--output", "-") for name in ("new.parquet", "new.tsv")]
    found.append(
        done(
            "predict", run, "new.csv", "--output", "-", "separator=semicolon", "data.decimal=comma"
        )
    )
    assert len(set(found)) == 1
    assert found[0].count("\n") == 4


def test_a_run_without_a_shared_model_names_who_has_none(here):
    alone = {
        "algorithm": Local(),
        "model": models.linear_regression(),
        "schedule": FullParticipation(),
    }
    train("run", table(), target="days", bounds=BOUNDS, **alone)
    Path("new.csv").write_text(NEW)
    assert "line 4, column 'ward' holds '=eva'; accepted: a client of the run" in refused(
        "predict", "run", "new.csv"
    )
    Path("new.csv").write_text(NEW.replace("=eva", "bob"))
    done("predict", "run", "new.csv")
    Path("new.csv").write_text(NEW.replace("ward", "station"))
    assert "--client NAME" in refused("predict", "run", "new.csv")


def test_a_run_on_images_has_no_predictions_of_rows(here):
    data = load_data("digits", clients=5)
    fit(data, "run", model=models.softmax_regression())
    Path("new.csv").write_text(NEW)
    assert "were no table" in refused("predict", "run", "new.csv")
    assert "has no columns.json" in refused("predict", "run/public", "new.csv")


OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x)
"""


def test_a_network_of_the_users_own_is_taken_from_the_trusted_module(here, monkeypatch):
    Path("mynet.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "mynet", raising=False)
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/net.yaml").write_text("# A network.\n_target_: mynet.Net\n")
    table().to_csv("t.csv", index=False)
    bounds = "data.bounds={age:[20,100],kind:[x,y,z],planned:[false,true],days:[0,30]}"
    words = [
        "t.csv",
        "client=ward",
        "target=days",
        bounds,
        "--config-dir",
        "mine",
        "--trust",
        "mynet",
    ]
    words += [
        "model=net",
        "algorithm=fedavg",
        "schedule=full",
        "privacy=none",
        "rounds=1",
        "baselines=[]",
    ]
    done(*words, "progress=false", "finetune=none", "hydra.run.dir=run")
    Path("new.csv").write_text(NEW)
    done("predict", "run", "new.csv", "--trust", "mynet")
    found = pd.read_csv("new.predicted.csv")
    state = load_file("run/public/model.safetensors")
    numbers = np.concatenate(
        [state["layer.weight"].numpy().ravel(), state["layer.bias"].numpy()]
    ).astype(float)
    expected = 15 * (np.clip(NUMBERS @ numbers, -1, 1) + 1)
    np.testing.assert_allclose(found["predicted_days"], expected, rtol=1e-5)
    assert "--trust mynet" in refused("predict", "run", "new.csv")
    assert "none of fedmtl.models" in refused("predict", "run/public", "new.csv")


# --- public folders that somebody else wrote


def changed(folder, change):
    path = folder / "columns.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def with_network(**made):
    return lambda values: values["network"].update(made=made)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (with_network(**{"class": "os.system"}), "the class 'os.system', which a file may not"),
        (with_network(**{"class": "fedmtl.models.mlp"}), "which a file may not"),
        (with_network(**{"class": "__builtins__"}), "which a file may not"),
        (with_network(**{"class": "networks"}), "which a file may not"),
        (with_network(**{"class": "ModelFactory"}), "which a file may not"),
        (
            with_network(**{"class": "MeanEmbedding", "vocabulary": 3, "width": 1, "padding": 0}),
            "a file may not",
        ),
        (with_network(**{"class": "load_data", "path": "t.csv"}), "which a file may not"),
        (with_network(**{"class": "${oc.env:SECRET}"}), "the class '${oc.env:SECRET}'"),
        (with_network(**{"class": ["mlp"]}), "which a file may not"),
        (
            with_network(**{"class": "lora", "model": {"class": "hostile.Net"}}),
            "the class 'hostile.Net'",
        ),
        (with_network(**{"class": "fix", "model": {"class": "Local"}}), "the class 'Local'"),
        (with_network(**{"class": "lora", "model": 3}), "lora does not take"),
        (
            with_network(**{"class": "merge_lora", "model": {"class": "mlp"}}),
            "merge_lora does not take",
        ),
        (
            with_network(**{"class": "with_group_norm", "module": {"class": "mlp"}}),
            "with_group_norm does not take",
        ),
        (
            with_network(**{"class": "linear_regression", "path": "x"}),
            "linear_regression does not take",
        ),
        (with_network(**{"class": "torchvision_model", "weights": "DEFAULT"}), "needs images"),
        (with_network(hidden=3), "is no network"),
        (lambda v: v["network"].update(made=[]), "is no network"),
        (lambda v: v["network"].update(made=None), "none of fedmtl.models"),
        (with_network(**{"class": "mlp", "hidden": 2}), "has the tensors"),
        (
            with_network(**{"class": "mlp", "hidden": 10**12}),
            "network.made.hidden is 1000000000000",
        ),
        (
            with_network(**{"class": "mlp", "hidden": 1, "layers": 10**6}),
            "network.made.layers is 1000000",
        ),
        (
            with_network(**{"class": "lora", "model": {"class": "mlp", "layers": 99}}),
            "made.model.layers is 99",
        ),
        (lambda v: v["network"].update(dtype="__class__"), "network.dtype is '__class__'"),
        (
            lambda v: v["network"].update(dtype="float64"),
            "is float32 (1, 5), and that of the network of columns.json is float64",
        ),
        (lambda v: v.pop("network"), "network must have made and dtype"),
        (
            lambda v: v["table"]["columns"].pop(),
            "is float32 (1, 5), and that of the network of columns.json is",
        ),
        (
            lambda v: v["table"].update(classes=10**9),
            "has 1 outputs, and the target 'days' needs 1000000000",
        ),
        (lambda v: v["table"].update(target=3), "must have distinct names"),
    ],
)
def test_a_received_description_runs_no_code_and_takes_no_memory(public, change, wrong):
    before = set(sys.modules)
    changed(public, change)
    Path("new.csv").write_text(NEW)
    error = refused("predict", public, "new.csv")
    assert wrong in error
    assert "received" in error
    assert "of the environment" not in error
    assert "hostile" not in set(sys.modules) - before
    assert sorted(os.listdir()) == ["new.csv", "received"]


def tensors(folder, change, **metadata):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata)


def test_received_tensors_must_be_those_of_the_network(public):
    original = (public / "model.safetensors").read_bytes()
    name = next(
        key for key, value in load_file(public / "model.safetensors").items() if value.ndim == 2
    )
    for change, wrong in (
        (lambda s: s.update({name: torch.zeros(5, 1)}), "is float32 (5, 1)"),
        (lambda s: s.update({name: torch.zeros(1, 5, dtype=torch.int64)}), "is int64 (1, 5)"),
        (lambda s: s.update({name: torch.full((1, 5), torch.nan)}), "numbers that are not finite"),
        (lambda s: s.pop(name), "has the tensors"),
        (lambda s: s.update({"\x1b[31m": torch.zeros(1)}), r"\x1b[31m"),
    ):
        (public / "model.safetensors").write_bytes(original)
        tensors(public, change)
        with pytest.raises(DataError, match="received: ") as error:
            Models.of(public)
        assert wrong in str(error.value)
        assert str(error.value).isprintable()
    for bound in (
        "3",
        "{}",
        '{"bound": -1, "norm": "l2"}',
        '{"bound": 1, "norm": "x"}',
        '{"bound": NaN, "norm": "l2"}',
    ):
        (public / "model.safetensors").write_bytes(original)
        tensors(public, lambda s: None, bound=bound)
        with pytest.raises(DataError, match="the bound on records"):
            Models.of(public)
    (public / "model.safetensors").write_bytes(original[:-4])
    with pytest.raises(DataError, match="cannot be read as tensors"):
        Models.of(public)


def test_a_received_bound_on_records_is_that_of_the_predictions(run, public):
    bound = json.dumps({"bound": 0.5, "norm": "l1"})
    tensors(public, lambda s: None, bound=bound)
    Path("new.csv").write_text(NEW)
    rows = NUMBERS.copy()
    rows[:, :-1] *= np.minimum(1, 0.5 / np.abs(rows[:, :-1]).sum(1, keepdims=True))
    found = pd.read_csv(io.StringIO(done("predict", public, "new.csv", "--output", "-")))
    np.testing.assert_allclose(found["predicted_days"], in_days(run, None, rows), rtol=1e-5)


@pytest.mark.parametrize("name", ["columns.json", "model.safetensors"])
def test_received_files_are_files_of_the_folder(public, name):
    Path("elsewhere").mkdir()
    (public / name).rename(Path("elsewhere", name))
    with pytest.raises(ConfigError, match=f"has no {name}"):
        Models.of(public)
    (public / name).symlink_to(Path("elsewhere", name).resolve())
    with pytest.raises(DataError, match="is a link to a file that is not in the folder"):
        Models.of(public)


def test_received_names_are_texts_and_nothing_else(public):
    reference, formula = "${oc.env:SECRET}", "=HYPERLINK(1)"

    def change(values):
        values["table"].update(client=formula, target=reference)
        values["table"]["columns"][1].update(name="../../x", categories=[reference, formula, "z"])

    changed(public, change)
    Path("new.csv").write_text(
        f"../../x,{formula},age,planned\n{reference},anna,20,true\n{formula},-1+1,20,true\n"
    )
    out = done("predict", public, "new.csv", "--output", "-", "--keep", "../../x")
    rows = pd.read_csv(io.StringIO(out))
    assert list(rows.columns) == [
        f"'{formula}",
        "../../x",
        f"predicted_{reference}",
        "predicted_by",
    ]
    assert list(rows["../../x"]) == [reference, f"'{formula}"]
    assert list(rows[f"'{formula}"]) == ["anna", "'-1+1"]
    assert "of the environment" not in out
