"""Models on raw rows of a table: the saved schema, and predictions in the target's units."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl import ClientPrivacy, Result, Trainer, load_data, models
from fedmtl.data import Affine, read_table
from fedmtl.data.readers.columns import Table
from fedmtl.data.readers.schema import TableSchema
from fedmtl.errors import ConfigError, DataError

BOUNDS = {"age": [20, 100], "kind": ["x", "y", "z"], "planned": [False, True], "days": [0, 30]}


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


def trained(data, folder=None, **settings):
    return Trainer(
        data=data, rounds=2, progress=False, folder=folder, **{"privacy": None} | settings
    ).fit()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    table().to_csv(place / "t.csv", index=False)
    data = load_data("table", path=place / "t.csv", client="ward", target="days", bounds=BOUNDS)
    trained(data, place / "run", privacy=ClientPrivacy(epsilon=10.0))
    return place


def test_rows_are_coded_by_hand():
    schema = read_table(table(), client="ward", target="days", bounds=BOUNDS).schema
    rows = pd.DataFrame(
        {"planned": ["TRUE", "False"], "kind": ["z", "x"], "more": ["?", "?"], "age": [40, 300]}
    )
    expected = [[2 * 20 / 80 - 1, 0, 0, 1, 1], [1, 1, 0, 0, -1]]
    np.testing.assert_array_equal(schema.encode(rows).numpy(), np.array(expected, dtype=np.float32))
    np.testing.assert_allclose(schema.decode(torch.tensor([[-1.0], [0.5]])), [0.0, 22.5])


@pytest.mark.parametrize("integers", [False, True])
def test_the_saved_schema_gives_the_features_of_the_run_to_the_bit(integers):
    rows = table().assign(row=np.arange(40))
    options = {"bounds": BOUNDS}
    if integers:
        rows = rows.drop(columns=["kind", "planned"])
        options = {"integers": True, "classes": None}
    data = read_table(rows, client="ward", target="days", **options)
    schema = TableSchema.from_dict(json.loads(json.dumps(data.schema.to_dict())))
    assert schema == data.schema
    coded = schema.encode(rows.drop(columns=["days", "ward"]))
    stored = torch.cat([data.train.x, data.test.x])
    assert coded.dtype == stored.dtype
    assert sorted(map(tuple, coded.tolist())) == sorted(map(tuple, stored.tolist()))
    if integers:
        with pytest.raises(
            DataError, match=r"row 0, column 'age' holds 0\.5; accepted: a whole number"
        ):
            schema.encode(pd.DataFrame({"age": [0.5], "row": [1]}))


def test_the_saved_schema_knows_dates_other_categories_and_missing_values():
    rows = pd.DataFrame(
        {
            "ward": list("nnnsss"),
            "day": ["1980-01-01", "", "1983-07-04", "1987-12-31", "1990-01-01", "1980-02-29"],
            "kind": ["a", "b", "rare", "NA", "a", "new"],
            "age": ["20", "60", "?", "30", "40", "20"],
            "cost": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
        }
    )
    bounds = {
        "day": ["1980-01-01", "1987-12-31"],
        "kind": ["a", "b", "*"],
        "age": [20, 60],
        "cost": [0, 10],
    }
    data = read_table(rows, client="ward", target="cost", bounds=bounds, missing="indicator")
    schema = TableSchema.from_dict(json.loads(json.dumps(data.schema.to_dict())))
    assert (schema, schema.width, schema.written) == (data.schema, 11, ["day", "kind"])
    stored = torch.cat([data.train.x, data.test.x])
    coded = schema.encode(rows.drop(columns=["ward", "cost"]))
    assert sorted(map(tuple, coded.tolist())) == sorted(map(tuple, stored.tolist()))
    new = pd.DataFrame(
        {
            "kind": ["never seen", None],
            "age": [None, 50.0],
            "day": [pd.NaT, pd.Timestamp("1987-12-31")],
        }
    )
    days = [[0, 0, 0, 0, 1], [1, 1, 2 * 3 / 6 - 1, 1, 0]]
    expected = [[*days[0], 0, 0, 1, 0, 0, 1], [*days[1], 0, 0, 0, 1, 0.5, 0]]
    np.testing.assert_allclose(schema.encode(new).numpy(), expected, atol=1e-7)
    assert schema.outside(Table(new.assign(age=[None, 70]), Path("rows"))) == {"age": 1}


def test_public_are_only_declared_facts(run, tmp_path):
    public = json.loads((run / "run" / "public" / "columns.json").read_text())
    assert [column["name"] for column in public["table"]["columns"]] == ["age", "kind", "planned"]
    assert set(public["network"]) == {"made", "dtype"}
    assert not (run / "run" / "private" / "columns.json").exists()
    assert "anna" not in json.dumps(public)
    rows = table().drop(columns="planned")
    data = read_table(rows, client="ward", target="days", classes=None, one_hot=["kind"])
    trained(data, tmp_path / "run")
    assert not (tmp_path / "run" / "public" / "columns.json").exists()
    stored = json.loads((tmp_path / "run" / "private" / "columns.json").read_text())
    assert stored["table"]["columns"][1]["categories"] == ["x", "y", "z"]
    assert not read_table(
        rows.drop(columns="kind"), client="ward", target="days", classes=None
    ).schema.declared


def test_data_that_are_no_table_have_no_predictor(tmp_path):
    result = trained(
        load_data("digits", clients=5), tmp_path / "run", model=models.softmax_regression()
    )
    assert not list((tmp_path / "run").glob("*/columns.json"))
    with pytest.raises(ConfigError, match="were no table"):
        result.predictor()


def test_predictions_are_those_of_the_models_in_days(run):
    result = Result.load(run / "run")
    rows = table().drop(columns=["days", "ward"]).set_index(np.arange(40) + 7)
    age = (rows["age"].to_numpy() - 20) / 40 - 1
    x = np.column_stack(
        [age, *(rows["kind"] == kind for kind in "xyz"), np.where(rows["planned"], 1.0, -1.0)]
    )
    for client, weights in (
        ("anna", result.personal[result.ids.index("anna")]),
        (None, result.shared),
    ):
        *slopes, constant = weights.double().numpy()
        expected = 15 * (np.clip(x @ np.array(slopes) + constant, -1, 1) + 1)
        found = result.predictor(client)(rows)
        np.testing.assert_allclose(found.to_numpy(), expected, rtol=1e-5)
        assert (found.name, list(found.index)) == ("days", list(rows.index))


def test_labels_and_probabilities_of_classes(tmp_path):
    rows = table().assign(days=lambda t: np.where(t["age"] > 60, "long", "short"))[
        ["ward", "age", "days"]
    ]
    data = read_table(
        rows, client="ward", target="days", labels=["short", "long"], bounds={"age": [20, 100]}
    )
    new = pd.DataFrame({"age": [20.0, 100.0, 45.0]})
    for name, model in (
        ("two", models.softmax_regression()),
        ("one", models.logistic_regression()),
    ):
        result = trained(data, tmp_path / name, model=model)
        loaded = Result.load(tmp_path / name)
        with torch.no_grad():
            outputs = (
                result.shared_model()(torch.tensor([[-1.0], [1.0], [-0.375]])).double().numpy()
            )
        odds = outputs[:, 0] if name == "one" else outputs[:, 1] - outputs[:, 0]
        chance = 1 / (1 + np.exp(-odds))
        found = loaded.predictor()(new, probabilities=True)
        assert list(found.columns) == ["short", "long"]
        np.testing.assert_allclose(found["long"], chance, rtol=1e-6)
        np.testing.assert_allclose(found.sum(axis=1), 1.0)
        assert list(loaded.predictor()(new)) == ["long" if p > 0.5 else "short" for p in chance]
        assert len(loaded.predictor()(new[:0])) == 0


def test_wrong_rows_are_refused_by_row_and_column(run, caplog):
    predict = Result.load(run / "run").predictor()
    row = {"age": [30, 40], "kind": ["x", "y"], "planned": [True, False]}
    for change, wrong in (
        ({"age": [30, "many"]}, "row 1, column 'age' holds 'many'; accepted: a finite number"),
        ({"age": [np.nan, 3]}, "row 0, column 'age' is empty"),
        (
            {"kind": ["x", "w"]},
            "row 1, column 'kind' holds 'w'; accepted: the categories 'x', 'y', 'z'",
        ),
    ):
        with pytest.raises(DataError, match=wrong):
            predict(pd.DataFrame(row | change))
    with pytest.raises(DataError, match="feature column 'kind' is missing"):
        predict(pd.DataFrame(row).drop(columns="kind"))
    with pytest.raises(DataError, match="rows are a list"):
        predict([[1, 2, 3]])
    with caplog.at_level(logging.WARNING, "fedmtl"):
        beyond = predict(pd.DataFrame(row | {"age": [0, 200]}))
    assert [record.getMessage().partition("cut there ")[2] for record in caplog.records] == [
        "(rows of 2): 'age' 2"
    ]
    pd.testing.assert_series_equal(beyond, predict(pd.DataFrame(row | {"age": [20, 100]})))


def test_who_has_no_model_is_told_of_the_shared_one(run):
    result = Result.load(run / "run")
    with pytest.raises(
        ConfigError, match=r"no client 'ann'; did you mean 'anna'\? .*shared model is available"
    ):
        result.predictor("ann")
    with pytest.raises(ConfigError, match="predicts a number; leave probabilities out"):
        result.predictor()(table(), probabilities=True)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (
            lambda v: v["transform"].update({"class": "MappedImages", "path": "/etc/passwd"}),
            "transform is",
        ),
        (lambda v: v["transform"].update(more=1), "cannot be made"),
        (lambda v: v.update(odds="os.system"), "odds is 'os.system'"),
        (lambda v: v.update(limit=-1), "limit is -1"),
        (lambda v: v.update(link="os.system"), "link is 'os.system'; accepted: 'identity'"),
        (lambda v: v.pop("link"), "it must have table, transform, odds, limit, link"),
        (lambda v: v["table"].update(more=1), "and nothing else"),
        (lambda v: v["table"].update(target="age"), "distinct names"),
        (lambda v: v["table"].update(classes=True), "classes is True"),
        (lambda v: v["table"].update(labels=["a"]), "one for each class"),
        (lambda v: v["table"]["columns"][0].update(range=[1, 1]), "LOW below HIGH"),
        (lambda v: v["table"]["columns"][0].update(kind="code"), "of kind 'code'"),
        (lambda v: v["table"]["columns"][1].update(categories=["x", "x"]), "distinct texts"),
        (lambda v: v["table"]["columns"][1].update(missing=1), "missing is 1"),
        (
            lambda v: v["table"]["columns"][0].update(kind="dates", range=None),
            "do not belong to the kind 'dates'",
        ),
        (
            lambda v: v["table"]["columns"][0].update(
                kind="dates", range=None, period=["1980", "1981"]
            ),
            "two dates",
        ),
        (
            lambda v: v["table"]["columns"][0].update(period=["1980-02-01", "1980-01-01"]),
            "before the last",
        ),
        (lambda v: v["table"]["columns"][2].update(categories=["x"]), "do not belong to the kind"),
    ],
)
def test_a_tampered_schema_is_refused_in_one_sentence(run, tmp_path, change, wrong):
    shutil.copytree(run / "run", tmp_path / "run")
    path = tmp_path / "run" / "public" / "columns.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=wrong) as error:
        Result.load(tmp_path / "run")
    assert "columns.json does not say how columns are coded" in str(error.value)


def test_the_transform_of_the_run_is_that_of_new_rows(tmp_path):
    rows = table()[["ward", "age", "days"]]
    data = read_table(rows, client="ward", target="days", classes=None, transform=Affine(0.01))
    result = trained(data, tmp_path / "run")
    slope, constant = result.shared.double().tolist()
    found = Result.load(tmp_path / "run").predictor()(pd.DataFrame({"age": [50]}))
    np.testing.assert_allclose(found, [0.5 * slope + constant], rtol=1e-5)
