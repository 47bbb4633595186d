"""Rows without a client, and clients that are whole numbers, in files, in tables of pandas and in those of columns."""

import logging

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl import Result, Trainer, cli
from fedmtl.data import FederatedDataset, read_table
from fedmtl.errors import ConfigError, DataError

OPTIONS = {"client": "ward", "target": "y", "bounds": {"x": [0, 20], "y": [0, 20]}}
MARKS = ["", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "<NA>", "?", " NA "]


class Columns(dict):
    column_names = property(lambda self: list(self))


def rows(wards):
    return {"ward": wards, "x": list(range(len(wards))), "y": [1.5 * i for i in range(len(wards))]}


def file_of(place, wards):
    table = rows(wards)
    lines = [",".join(map(str, line)) for line in zip(*table.values(), strict=True)]
    place.write_text("\n".join(["ward,x,y", *lines]) + "\n")
    return place


def columns_of(wards, **options):
    features = {"client": "ward", "target": "y", "features": "x", "classes": None}
    return FederatedDataset.from_columns(Columns(rows(wards)), **features, **options)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("kind", ["file", "frame", "columns"])
def test_a_mark_of_a_missing_value_is_no_client_unless_asked_for(tmp_path, kind, mark, caplog):
    """Against the table that lacks these rows, and against one whose client has another name."""
    wards = ["a", "b", mark, "a", "b", mark, "a", "b", mark]
    few = [i for i in range(len(wards)) if wards[i] != mark]

    def read(names, kept=tuple(range(9)), **options):
        table = {name: [values[i] for i in kept] for name, values in rows(names).items()}
        if kind == "columns":
            features = {"client": "ward", "target": "y", "features": "x", "classes": None}
            return FederatedDataset.from_columns(Columns(table), **features, **options)
        source = pd.DataFrame(table)
        if kind == "file":
            source.to_csv(tmp_path / "t.csv", index=False)
            source = tmp_path / "t.csv"
        return read_table(source, **OPTIONS, **options)

    place = "line 4" if kind == "file" else "row 2"
    with pytest.raises(
        DataError, match=rf"{place}, column 'ward' .*accepted: .*missing_client=drop"
    ):
        read(wards)
    with caplog.at_level(logging.WARNING, "fedmtl"):
        found = read(wards, missing_client="drop")
    assert "rows without a client left out (a private count): 3" in caplog.text
    expected = read(wards, few)
    assert found.ids == expected.ids == ("a", "b")
    assert torch.equal(found.train.x, expected.train.x)
    assert torch.equal(found.test.y, expected.test.y)
    if not mark.strip():
        with pytest.raises(DataError, match=f"{place}, column 'ward' is empty"):
            read(wards, missing_client="name")
        return
    named = read(wards, missing_client="name")
    other = read([name.replace(mark, "c") for name in wards])
    assert sorted(named.ids) == sorted(["a", "b", mark])
    assert named.train.counts.sum() == other.train.counts.sum()
    with pytest.raises(ConfigError, match="missing_client is 'keep'; accepted"):
        read(wards, missing_client="keep")


@pytest.mark.parametrize("gap", [None, np.nan, pd.NA])
def test_values_that_are_none_are_no_client_either(gap):
    wards = ["a", "b", gap, "a", "b"]
    with pytest.raises(DataError, match="row 2, column 'ward' is empty"):
        read_table(pd.DataFrame(rows(wards)), **OPTIONS)
    with pytest.raises(DataError, match="row 2, column 'ward' is empty"):
        columns_of(wards)
    assert read_table(pd.DataFrame(rows(wards)), **OPTIONS, missing_client="drop").ids == ("a", "b")
    assert columns_of(wards, missing_client="drop").ids == ("a", "b")
    for missing in ([gap] * 4, ["NA"] * 4):
        with pytest.raises(DataError, match="no row has a value in the client column 'ward'"):
            read_table(pd.DataFrame(rows(missing)), **OPTIONS, missing_client="drop")
        with pytest.raises(DataError, match="no row has a value in the client column 'ward'"):
            columns_of(missing, missing_client="drop")


def test_errors_name_the_line_of_the_file_beside_rows_that_are_left_out(tmp_path):
    """Rows without a client are left out first, and then rows without a target."""
    file = tmp_path / "t.csv"
    file.write_text("ward,x,y\nNA,1,1\na,1,\na,2,1\n,3,2\nb,3,1\nb,nine,2\n")
    with pytest.raises(DataError, match="client 'b', line 7, column 'x' holds 'nine'"):
        read_table(file, **OPTIONS, missing_client="drop", missing_target="drop")


def test_a_whole_number_is_one_client_however_it_is_written(tmp_path):
    """A gap makes a column of whole numbers one of 1.0, 2.0; ids that are no numbers stay as they are."""
    whole = read_table(pd.DataFrame(rows([1, 2, 10] * 4)), **OPTIONS)
    assert whole.ids == ("1", "10", "2")
    tables = {
        "floats": [1.0, 2.0, 10.0] * 4,
        "texts": ["1.0", "2", "10.00"] * 4,
        "mixed": ["1", "2.0", "10", "1.0", "2", "10."] * 2,
    }
    for name, wards in tables.items():
        for source in (pd.DataFrame(rows(wards)), file_of(tmp_path / f"{name}.csv", wards)):
            found = read_table(source, **OPTIONS)
            assert found.ids == whole.ids
            assert torch.equal(found.train.x, whole.train.x)
        assert sorted(columns_of(wards).ids) == sorted(whole.ids)
    nullable = pd.DataFrame(rows([1, 2, 10] * 4)).astype({"ward": "Float64"})
    assert read_table(nullable, **OPTIONS).ids == whole.ids
    assert FederatedDataset.from_tensors(
        {1.0: (torch.zeros(2, 1), torch.zeros(2)), 2: (torch.zeros(2, 1), torch.zeros(2))}
    ).ids == ("1", "2")
    texts = ["007", "7", "1.5", "1.0.0", "v1.0", "1,0"]
    assert sorted(read_table(pd.DataFrame(rows(texts * 2)), **OPTIONS).ids) == sorted(texts)


def test_decimals_of_zero_are_those_of_the_file(tmp_path):
    """With decimal commas 1,0 is 1, and 1.000 is an id of its own; with points the reverse."""
    lines = ["1,0", "1", "1.000", "2", "2,00", "1.000"]
    file = tmp_path / "t.csv"
    file.write_text("ward;x;y\n" + "".join(f"{ward};{i};{i}\n" for i, ward in enumerate(lines)))
    written = {"separator": "semicolon", "decimal": "comma"}
    assert read_table(file, **OPTIONS, **written).ids == ("1", "1.000", "2")
    assert read_table(
        file, **OPTIONS | {"bounds": None}, separator="semicolon", min_examples=1
    ).ids == (
        "1",
        "1,0",
        "2",
        "2,00",
    )


def test_the_rows_of_a_second_table_are_those_of_the_same_clients(tmp_path):
    train = pd.DataFrame(rows([1, 2, 3] * 3))
    later = pd.DataFrame(rows([3.0, 1.0, np.nan, 1.0]))
    data = read_table(train, **OPTIONS, test_path=later, missing_client="drop")
    assert data.ids == ("1", "2", "3")
    assert data.test.counts.tolist() == [2, 0, 1]


def test_a_run_finds_its_clients_in_tables_that_write_them_otherwise(tmp_path, monkeypatch, capsys):
    """The predictions of clients 1 and 2 by their own models, from columns of 1 and of 1.0."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"ward": [1, 2, "NA"] * 8, "x": rng.uniform(0, 20, 24)})
    table["y"] = table["x"] / table["ward"].replace("NA", 3).astype(float)
    data = read_table(table, **OPTIONS, missing_client="name")
    Trainer(data=data, privacy=None, rounds=2, progress=False, folder="run").fit()
    new = pd.DataFrame({"x": [3.0, 7.0, 11.0, 4.0]})
    new.assign(ward=[1, 2, "NA", 9]).to_csv("whole.csv", index=False)
    new.assign(ward=["1.0", "2.0", "NA", "9.0"]).to_csv("decimals.csv", index=False)
    for name in ("whole", "decimals"):
        assert cli.main(["predict", "run", f"{name}.csv"]) == 0
    one = pd.read_csv("whole.predicted.csv")
    pd.testing.assert_frame_equal(one, pd.read_csv("decimals.predicted.csv"))
    assert one["predicted_by"].tolist() == ["own", "own", "own", "shared"]
    result = Result.load("run")
    for client in (1, 1.0, "1", "1.0"):
        np.testing.assert_array_equal(result.predictor(client)(new), result.predictor("1")(new))
    capsys.readouterr()
    new.assign(ward=[1, "?", 2, 2]).to_csv("gap.csv", index=False)
    assert cli.main(["predict", "run", "gap.csv"]) == 2
    assert "gap.csv: line 3, column 'ward' holds '?'; accepted: the name of a client" in (
        capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match=r"no client 1\.5"):
        result.predictor(1.5)


def test_lists_of_settings_may_be_arrays():
    table = pd.DataFrame({"ward": ["a", "b"] * 6, "x": range(12), "z": ["u", "v", "w"] * 4})
    table["y"] = np.where(table["x"] % 3 == 0, "yes", "no")
    listed = {"labels": ["no", "yes"], "features": ["x", "z"], "missing": ["z"]}
    bounds = {"x": [0, 11], "z": ["u", "v", "w"]}
    plain = read_table(table, client="ward", target="y", bounds=bounds, **listed)
    for kind in (np.array, pd.Series, pd.Index, tuple):
        found = read_table(
            table,
            client="ward",
            target="y",
            bounds={name: kind(values) for name, values in bounds.items()},
            **{name: kind(values) for name, values in listed.items()},
        )
        assert found.fingerprint() == plain.fingerprint()
        assert found.schema == plain.schema
    numbers = table.assign(y=table["x"] % 3 + 1)
    whole = read_table(numbers, client="ward", target="y", labels=[1, 2, 3], features=["x"])
    assert (
        read_table(
            numbers, client="ward", target="y", labels=np.array([1, 2, 3]), features=np.array(["x"])
        ).schema
        == whole.schema
    )
    for wrong in ({"no", "yes"}, np.array([]), np.array("no"), [], "no", np.array(["no", "no"])):
        with pytest.raises(ConfigError, match=r"data\.labels is .*distinct texts, .* in a list"):
            read_table(table, client="ward", target="y", labels=wrong)


def test_a_folder_may_be_called_as_a_missing_value_is(tmp_path):
    from PIL import Image

    from fedmtl.data import read_images

    for client in ("NA", "1.0", "1"):
        for number in range(2):
            place = tmp_path / "scans" / client / "ill"
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (2, 2)).save(place / f"{number}.png")
    assert read_images(tmp_path / "scans", size=2, labels=["ill", "well"]).ids == ("1", "1.0", "NA")


def test_a_missing_client_column_is_told_before_any_cell(tmp_path):
    table = tmp_path / "visits.csv"
    table.write_text("ward,x,y\nnorth,1,0.5\nsouth,2,1.5\n")
    with pytest.raises(ConfigError, match=r"visits\.csv: no client column; give the column"):
        read_table(table, target="y")
    with pytest.raises(DataError, match="column 'ward' holds 'north'"):
        read_table(table, client="x", target="y")
