"""Test rows of tables: a table of their own, and the latest rows of every client, against pandas."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl.data import Dirichlet, read_table
from fedmtl.errors import ConfigError, DataError

BOUNDS = {"age": [0, 100], "cost": [0, 10]}
OPTIONS = {"client": "ward", "target": "cost", "features": ["age"], "bounds": BOUNDS}


def visits(rows=50, seed=0):
    rng = np.random.default_rng(seed)
    days = pd.Timestamp("2019-01-01") + pd.to_timedelta(rng.integers(0, 40, rows), unit="D")
    return pd.DataFrame(
        {
            "ward": rng.choice(["a", "b", "c"], rows),
            "seen": days.strftime("%Y-%m-%d"),
            "age": rng.permutation(100)[:rows],
            "cost": rng.uniform(0, 10, rows).round(3),
        }
    )


def ages(data, side):
    part = data.side(side)
    values = torch.round(50 * (part.x[:, 0] + 1)).int().tolist()
    return [
        values[a:b]
        for a, b in zip(part.offsets[:-1].tolist(), part.offsets[1:].tolist(), strict=True)
    ]


@pytest.mark.parametrize("form", ["csv", "datetime64", "numbers", "clock"])
def test_the_latest_rows_of_every_client_are_for_test(tmp_path, form):
    table = visits()
    source = tmp_path / "t.csv"
    written = table
    if form == "datetime64":
        source = table.assign(seen=pd.to_datetime(table.seen))
    elif form == "numbers":
        source = table.assign(seen=pd.to_datetime(table.seen).dt.day_of_year / 7)
    elif form == "clock":  # of two forms, and all of one day
        written = table.assign(seen=[f"2019-01-01{' T'[i % 2]}{pd.Timestamp(day).day_of_year % 24:02}:00" for i, day in
                                     enumerate(table.seen)])  # fmt: skip
        table = written.assign(seen=[text[11:] for text in written.seen])
    written.to_csv(tmp_path / "t.csv", index=False)
    data = read_table(source, split="time", time="seen", test_fraction=0.3, **OPTIONS)
    for place, (_, own) in enumerate(table.groupby("ward")):
        latest = own.sort_values("seen", kind="stable").tail(round(0.3 * len(own))).sort_index()
        assert ages(data, "test")[place] == latest.age.tolist()
        assert ages(data, "train")[place] == own.drop(latest.index).age.tolist()


def test_the_column_of_time_is_a_feature_only_with_bounds():
    table = visits()
    options = {"client": "ward", "target": "cost", "split": "time", "time": "seen"}
    assert read_table(table, bounds=BOUNDS, **options).spec.shape == (1,)
    assert read_table(
        table, bounds=BOUNDS | {"seen": ["2019-01-01", "2019-12-31"]}, **options
    ).spec.shape == (5,)
    dealt = read_table(table.drop(columns="ward"), partition=Dirichlet(2, 9.0), bounds=BOUNDS | {"cost": [0, 10]},
                       target="cost", split="time", time="seen", features=["age"])  # fmt: skip
    assert dealt.test.counts.sum() == 10


def test_times_that_order_no_rows_are_told(caplog):
    rows = {"a": [1, 1, 2, 2, 2], "b": [1, 2, 3, 4, 5], "c": [7, 7, 7, 7, 7]}
    table = pd.DataFrame(
        {"ward": np.repeat(list(rows), 5), "seen": [*rows["a"], *rows["b"], *rows["c"]], "age": 1.0}
    )
    table["cost"] = np.arange(15) / 10
    options = {"client": "ward", "target": "cost", "split": "time", "time": "seen", "classes": None}
    read_table(table, **options)
    assert (
        "in training and in test (a private count): 2 of 3; a finer column than 'seen'"
        in caplog.text
    )
    caplog.clear()
    read_table(table[table.ward == "b"], **options)
    assert "one time" not in caplog.text
    with pytest.raises(
        DataError, match="have the same time in column 'seen', which then orders nothing"
    ):
        read_table(table[table.ward == "c"], **options)


def test_a_second_table_has_the_test_rows(tmp_path, caplog):
    first = visits()
    second = pd.concat(
        [
            visits(9, seed=1),
            pd.DataFrame({"ward": ["new"] * 2, "seen": "x", "age": [3, 4], "cost": [12.0, 1.0]}),
        ]
    )
    first.to_csv(tmp_path / "train.csv", index=False)
    second[["cost", "age", "ward"]].to_csv(tmp_path / "test.csv", index=False)
    for source, held in ((first, second), (tmp_path / "train.csv", tmp_path / "test.csv")):
        data = read_table(source, test_path=held, **OPTIONS)
        assert data.ids == ("a", "b", "c")
        assert ages(data, "train") == [own.age.tolist() for _, own in first.groupby("ward")]
        there = dict(list(second.groupby("ward")))
        assert ages(data, "test") == [
            there[ward].age.tolist() if ward in there else [] for ward in data.ids
        ]
        assert data.cut_targets == 1 / 61
    assert (
        "test.csv: cut off at data.bounds (rows of 11, private: covered by no epsilon): cost 1\n"
        in caplog.text
    )
    assert "test examples only" in caplog.text


def test_classes_and_categories_that_are_not_declared_are_those_of_both_tables():
    table = visits().assign(kind="x", cost=lambda t: (t.cost > 5).astype(int))
    held = table[:20].assign(kind="y", cost=2)
    data = read_table(
        table, client="ward", target="cost", features=["kind"], one_hot=["kind"], test_path=held
    )
    assert (data.classes, data.spec.shape, data.inferred) == (
        3,
        (2,),
        ("classes", "categories.kind"),
    )
    amounts = read_table(
        table, client="ward", target="cost", features=["age"], test_path=held.assign(cost=99)
    )
    assert (amounts.classes, amounts.inferred[0]) == (None, "classes")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "date"}, "data.split is 'date'; accepted: 'random', 'time'"),
        (
            {"split": "time"},
            "data.split is 'time', which needs the column of dates or numbers, as data.time=COLUMN",
        ),
        (
            {"time": "seen"},
            "data.time is 'seen', which orders rows for data.split=time; add it, or leave data.time",
        ),
        (
            {"split": "time", "time": "seen", "test_path": "t.csv"},
            "and data.split=time holds out others; leave one",
        ),
        (
            {"test_fraction": 0.5, "test_path": "t.csv"},
            "and data.test_fraction holds out others; leave one",
        ),
        (
            {"split": "time", "time": "seen", "test_fraction": 1},
            "data.test_fraction is 1; it must be",
        ),
        (
            {"client": None, "partition": Dirichlet(2, 9.0), "test_path": "t.csv"},
            "needs the column of each row's cl",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        read_table(visits(), **OPTIONS | settings)


def test_wrong_test_rows_and_times_are_refused_by_file_and_line(tmp_path):
    table = visits()
    wrong = table.assign(age=[*table.age[:4], "old", *table.age[5:]])
    wrong.to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(
        DataError,
        match=r"test\.csv: client '.', line 6, column 'age' holds 'old'; accepted: a finite",
    ):
        read_table(table, test_path=tmp_path / "test.csv", **OPTIONS)
    with pytest.raises(
        DataError, match=r"table \(test\): column 'age' is missing; the columns are 'ward'"
    ):
        read_table(table, test_path=table.drop(columns="age"), **OPTIONS)
    with pytest.raises(
        DataError,
        match=r"no client of data.test_path is one of table; accepted: .*data.test_path=null",
    ):
        read_table(table, test_path=table.assign(ward="z"), **OPTIONS)
    late = {"split": "time", "time": "seen"}
    for value in ("31.12.2019", None, ""):
        gap = table.assign(seen=[*table.seen[:7], value, *table.seen[8:]])
        with pytest.raises(
            DataError, match=r"row 7, column 'seen' .*; accepted: a date such as 1980-01-31, a time"
        ):
            read_table(gap, **OPTIONS | late)
    with pytest.raises(DataError, match=r"time column 'day' is missing; the columns are"):
        read_table(table, **OPTIONS | late | {"time": "day"})
    with pytest.raises(
        DataError,
        match="no client has 2 rows, an earlier one to train on and a later one to test on",
    ):
        read_table(table[:2].assign(ward=["a", "b"]), **OPTIONS | late)


OF_TARGETS = {
    "number": ({"bounds": {"x": [0, 10], "y": [0, 40]}}, lambda random: random.uniform(0, 40)),
    "whole": ({"classes": 4}, lambda random: random.integers(4)),
    "labels": ({"labels": ["no", "yes"]}, lambda random: random.choice(["no", "yes"])),
}


@pytest.mark.parametrize("kind", OF_TARGETS)
@pytest.mark.parametrize("mark", ["", "NA"])
def test_rows_without_a_target_are_left_out_as_if_they_were_not_there(kind, mark, tmp_path, caplog):
    """Against the file that lacks these rows; a client that has no others is left out like one with too few."""
    settings, value = OF_TARGETS[kind]
    random = np.random.default_rng(0)
    rows = [(f"w{i % 4}", f"{random.uniform(0, 10):.2f}", str(value(random))) for i in range(60)]
    gaps = {3, 8, 9, *range(1, 60, 4)}  # all rows of w1
    whole, few = tmp_path / "whole.csv", tmp_path / "few.csv"
    for file, chosen in ((whole, range(60)), (few, sorted({*range(60)} - gaps))):
        lines = [",".join((*rows[i][:2], mark if i in gaps else rows[i][2])) for i in chosen]
        file.write_text("\n".join(["ward,x,y", *lines]) + "\n")
    options = {"client": "ward", "target": "y", **settings}
    with pytest.raises(
        DataError, match=r"line 3, column 'y' .*; accepted: a value \(data\.missing_target=drop"
    ):
        read_table(whole, **options)
    found = read_table(whole, **options, missing_target="drop")
    assert f"rows without a target left out (a private count): {len(gaps)} of 60" in caplog.text
    expected = read_table(few, **options)
    assert found.ids == expected.ids == ("w0", "w2", "w3")
    for side in ("train", "test"):
        one, other = getattr(found, side), getattr(expected, side)
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
        assert torch.equal(one.counts, other.counts)
    assert found.inferred == expected.inferred
    tested = read_table(few, **options, test_path=whole, missing_target="drop")
    assert int(tested.test.counts.sum()) == len(rows) - len(gaps)


def test_errors_beside_rows_without_a_target_name_the_line_of_the_file(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("ward,x,y\na,1,\na,2,1\nb,,\nb,nine,0\nb,3,1\n")
    options = {"client": "ward", "target": "y", "classes": 2, "missing_target": "drop"}
    with pytest.raises(DataError, match="client 'b', line 5, column 'x' holds 'nine'"):
        read_table(file, **options)
    file.write_text("ward,x,y\na,1,\na,2,\n")
    with pytest.raises(DataError, match="no row has a value in the target column 'y'"):
        read_table(file, **options)
    with pytest.raises(ConfigError, match="missing_target is 'omit'"):
        read_table(file, **options | {"missing_target": "omit"})
