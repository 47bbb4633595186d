"""Tables against pandas, and their errors."""

import gzip
import math

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl.data import Affine, Domain, read_table
from fedmtl.data.readers.table_summary import Summary
from fedmtl.errors import ConfigError, DataError

from .rows import rows_of


def frame(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "ward": rng.choice(["north", "south", "east"], rows),
            "age": rng.integers(20, 90, rows),
            "dose": rng.normal(size=rows).round(3),
            "kind": rng.choice(["b", "a", "c"], rows),
            "stay": rng.integers(0, 4, rows),
            "cost": rng.normal(size=rows).round(3),
        }
    )


WRITERS = {
    "t.csv": lambda t, p: t.to_csv(p, index=False),
    "t.csv.gz": lambda t, p: t.to_csv(p, index=False),
    "t.tsv": lambda t, p: t.to_csv(p, index=False, sep="\t"),
    "t.parquet": lambda t, p: t.to_parquet(p),
}


@pytest.mark.parametrize("file", WRITERS)
def test_a_table_is_read_as_pandas_groups_it(tmp_path, file):
    table = frame()
    WRITERS[file](table, tmp_path / file)
    data = read_table(
        tmp_path / file, client="ward", target="stay", features=["age", "dose"], classes=4
    )
    assert data.ids == ("east", "north", "south")
    assert (data.spec.shape, data.classes, data.train.y.dtype) == ((2,), 4, torch.int64)
    for i, (_, group) in enumerate(table.groupby("ward")):
        expected = np.array(sorted(group[["age", "dose", "stay"]].to_numpy(np.float32).tolist()))
        np.testing.assert_array_equal(np.array(rows_of(data, i)), expected)
        assert data.test.counts[i] == round(0.2 * len(group))


def test_regression_all_columns_and_a_transform():
    table = frame().drop(columns="kind")
    data = read_table(table, client="ward", target="cost", transform=Affine(0.1))
    assert data.classes is None
    assert data.train.y.dtype == torch.float32
    assert data.spec.shape == (3,)
    whole = read_table(table, client="ward", target="stay", classes=None)
    assert whole.train.y.dtype == torch.float32


def test_text_columns_are_coded_when_asked():
    table = frame()
    options = {"features": ["age", "kind"], "one_hot": ["kind"], "min_examples": 5}
    data = read_table(table, client="ward", target="cost", **options)
    expected = pd.get_dummies(table[["age", "kind"]], columns=["kind"])
    assert data.spec.shape == (4,)
    for i, name in enumerate(data.ids):
        mine = table.ward == name
        both = np.column_stack(
            [expected[mine].to_numpy(np.float32), table.cost[mine].to_numpy(np.float32)]
        )
        np.testing.assert_array_equal(np.array(rows_of(data, i)), np.array(sorted(both.tolist())))


def test_labels_number_the_values_of_a_text_target():
    table = frame()
    data = read_table(
        table, client="ward", target="kind", features=["age"], labels=["c", "a", "b", "d"]
    )
    assert data.classes == 4
    for i, name in enumerate(data.ids):
        mine = table[table.ward == name]
        expected = sorted(
            zip(mine.age.astype(float), mine.kind.map({"c": 0.0, "a": 1.0, "b": 2.0}), strict=True)
        )
        np.testing.assert_array_equal(np.array(rows_of(data, i)), np.array(expected))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("labels", [[1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_whole_numbers_with_decimals_of_zero_are_labels_and_categories(suffix, labels, tmp_path):
    """A column of grades with a gap, which pandas writes as 1.0 and so on, beside one of digits."""
    rng = np.random.default_rng(0)
    grades = rng.integers(1, 6, 80)
    rooms = rng.integers(1, 4, 80)
    table = pd.DataFrame({"ward": ["a", "b"] * 40, "room": rooms.astype(float), "grade": grades})
    for name, kind in (("digits", np.int64), ("decimals", np.float64)):
        WRITERS[f"t.{suffix}"](table.astype({"grade": kind}), tmp_path / f"{name}.{suffix}")

    def read(name):
        return read_table(
            tmp_path / f"{name}.{suffix}",
            client="ward",
            target="grade",
            labels=labels,
            bounds={"room": ["1", "2", "3"]},
            test_fraction=0.5,
        )

    found = read("decimals")
    assert found.classes == 5
    assert found.schema.labels == tuple(map(str, labels))
    pooled = torch.cat([found.train.y, found.test.y])
    assert torch.equal(pooled.bincount(), torch.from_numpy(np.bincount(grades - 1)))
    rows = torch.cat([found.train.x, found.test.x])
    assert torch.equal(rows.sum(0).long(), torch.from_numpy(np.bincount(rooms)[1:]))
    assert torch.equal(found.train.y, read("digits").train.y)


def test_labels_that_differ_in_decimals_of_zero_alone_are_different():
    table = pd.DataFrame({"ward": ["a"] * 4, "x": range(4), "y": ["1", "1.0", "1.0", "1"]})
    data = read_table(table, client="ward", target="y", labels=["1", "1.0"], test_fraction=0.5)
    assert torch.cat([data.train.y, data.test.y]).bincount().tolist() == [2, 2]
    with pytest.raises(DataError, match=r"holds '1\.5'; accepted: the labels '1', '2'"):
        read_table(table.replace("1.0", "1.5"), client="ward", target="y", labels=["1", "2"])


def test_ids_are_the_text_of_the_file_and_small_clients_are_left_out(tmp_path, caplog):
    (tmp_path / "t.csv").write_text("id,x,y\n007,1,0\n7,2,1\n007,3,1\n7,4,0\n8,5,0\n")
    data = read_table(tmp_path / "t.csv", client="id", target="y")
    assert data.ids == ("007", "7")
    assert caplog.messages == [
        "t.csv: clients left out (a private count): 1, with fewer than 2 examples (min_examples)"
    ]
    assert sorted(torch.cat([data.train.x, data.test.x])[:, 0].tolist()) == [1, 2, 3, 4]
    pd.DataFrame({"id": [3, 3, 12, 12], "x": [1.0, 2, 3, 4], "y": [0, 1, 0, 1]}).to_parquet(
        tmp_path / "t.parquet"
    )
    assert read_table(tmp_path / "t.parquet", client="id", target="y").ids == ("12", "3")


HEAD = "ward,age,kind,stay\n"
ROWS = "n,30,a,0\nn,31,b,1\ns,40,a,1\ns,41,c,0\n"
NUMERIC = {"features": ["age"]}
BAD = {
    "missing client column": (
        HEAD + ROWS,
        {"client": "hospital"},
        r"client column 'hospital' is missing; the",
    ),
    "no target": (
        HEAD + ROWS,
        {"target": None},
        r"a target column is needed \(data.target=COLUMN\); the columns are",
    ),
    "nearly a column": (
        HEAD + ROWS,
        {"client": "wards"},
        r"'wards' is missing; did you mean 'ward'\? the columns are",
    ),
    "missing columns": (
        HEAD + ROWS,
        {"client": "wards", "target": "stays", "features": ["age", "bmi"]},
        "client column 'wards' is missing, target column 'stays' is missing, features column 'bmi' "
        r"is missing; did you mean 'ward' and 'stay'\? the columns are",
    ),
    "missing feature": (
        HEAD + ROWS,
        {"features": ["bmi"]},
        r"features column 'bmi' is missing; the columns are",
    ),
    "text feature": (
        HEAD + ROWS,
        {},
        r"column 'kind' holds 'a'; .*bounds=\{kind: \[A, B\]\}' by command",
    ),
    "ids": (
        HEAD + ROWS + "".join(f"s,3,k{i},1\n" for i in range(30)),
        {},
        r"the column looks like an id",
    ),
    "stray text": (
        HEAD + ROWS + "s,NA,a,1\n",
        NUMERIC,
        r"client 's', line 6, column 'age' holds 'NA'; .*\(fill it",
    ),
    "wrong text": (
        HEAD + ROWS + "".join(f"s,{i},a,1\n" for i in range(60)) + "s,old,a,1\n",
        {"bounds": {"age": [0, 99], "stay": [0, 99]}, "features": ["age"], "missing": ["age"]},
        r"line 66, column 'age' holds 'old'; .*\(fill it or correct it, .*data\.missing takes gaps",
    ),
    "another case": (
        HEAD.replace("age", "Age") + ROWS,
        {"features": ["age"]},
        r"features column 'age' is missing; did you mean 'Age'\?",
    ),
    "empty cell": (
        HEAD + ROWS + "s,,a,1\n",
        NUMERIC,
        r"line 6, column 'age' is empty; .*or leave the row or",
    ),
    "empty category": (
        HEAD + ROWS + "s,3,,1\n",
        {"one_hot": ["kind"]},
        r"'kind' is empty; accepted: a value \(",
    ),
    "empty category of those given": (
        HEAD + ROWS + "s,3,,1\n",
        {"features": ["kind"], "bounds": {"kind": ["a", "b", "c"]}},
        r"'kind' is empty; accepted: a category \(.* or list the column in data.missing\)",
    ),
    "empty target": (
        HEAD + ROWS + "s,3,a,\n",
        NUMERIC,
        r"line 6, column 'stay' is empty; accepted: a value .data.missing_target=drop",
    ),
    "text target": (
        HEAD + ROWS,
        {"target": "kind", **NUMERIC},
        r"column 'kind' holds 'a'; .*labels=\[",
    ),
    "unknown label": (
        HEAD + ROWS,
        {"target": "kind", "labels": ["a", "b"], **NUMERIC},
        r"line 5, .* 'c'; accepted",
    ),
    "nameless row": (
        HEAD + ROWS + ",3,a,1\n",
        NUMERIC,
        r"line 6, column 'ward' is empty; accepted: the name of a",
    ),
    "cut line after blank ones": (
        HEAD + "\n" + ROWS + "\ns,4,a",
        NUMERIC,
        r"fields of line 8 is 3, that of the header 4",
    ),
    "long line": (
        HEAD + ROWS + "s,4,a,b,1\n",
        NUMERIC,
        r"fields of line 6 is 5, that of the header 4",
    ),
    "long lines": (
        HEAD + ROWS.replace("\n", ",7\n"),
        NUMERIC,
        r"fields of line 2 is 5, .*a text with ',' in it must be quoted",
    ),
    "open quote": (
        HEAD + ROWS + 's,4,"a,1\ns,5,b,1\n',
        NUMERIC,
        r"a quote that opens in line 6 is not closed",
    ),
    "no rows": (HEAD, {}, r"has no rows; at least 2 a client"),
    "empty file": ("", {}, r"cannot be read as a table"),
    "no features": (
        "ward,stay\nn,1\nn,0\n",
        {},
        r"there are no feature columns beside 'ward' and 'stay'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_have_a_clear_error(tmp_path, case):
    text, options, message = BAD[case]
    (tmp_path / "wards.csv").write_text(text)
    with pytest.raises(DataError, match=rf"wards\.csv.*{message}"):
        read_table(tmp_path / "wards.csv", **{"client": "ward", "target": "stay", **options})


def test_missing_values_of_parquet_are_named(tmp_path):
    table = pd.DataFrame(
        {"ward": ["n", "n", "s", "s"], "age": [1.0, 2.0, None, 4.0], "stay": [0, 1, 0, 1]}
    )
    table.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: client 's', row 2, column 'age' is empty"):
        read_table(tmp_path / "t.parquet", client="ward", target="stay")
    table["age"] = pd.array([1, 2, 3, 4], dtype="Int64")
    table["flag"] = [True, False, True, False]
    table.to_parquet(tmp_path / "t.parquet")
    data = read_table(tmp_path / "t.parquet", client="ward", target="stay")
    assert sorted(torch.cat([data.train.x, data.test.x]).tolist()) == [
        [1, 1],
        [2, 0],
        [3, 1],
        [4, 0],
    ]


def test_unreadable_files_are_named(tmp_path):
    options = {"client": "ward", "target": "stay"}
    with pytest.raises(DataError, match=r"none\.csv cannot be read as a table: it does not exist"):
        read_table(tmp_path / "none.csv", **options)
    (tmp_path / "t.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"t\.xlsx has an unknown suffix; accepted: \.csv"):
        read_table(tmp_path / "t.xlsx", **options)
    packed = gzip.compress((HEAD + ROWS * 500).encode())
    (tmp_path / "cut.csv.gz").write_bytes(packed[:-20])
    with pytest.raises(DataError, match=r"cut\.csv\.gz cannot be read as a table .*truncated"):
        read_table(tmp_path / "cut.csv.gz", **options)
    (tmp_path / "line.csv.gz").write_bytes(gzip.compress((HEAD + ROWS + "n,30").encode()))
    with pytest.raises(DataError, match=r"line\.csv\.gz: the number of fields of line 6 is 2"):
        read_table(tmp_path / "line.csv.gz", **options)
    frame().to_parquet(tmp_path / "t.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-50])
    with pytest.raises(DataError, match=r"cut\.parquet cannot be read as a table"):
        read_table(tmp_path / "cut.parquet", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["age"], "target": "ward"}, r"data.client and data.target are both 'ward'"),
        (
            {"features": ["age", "ward"]},
            r"data.features contains 'ward', which is the client or target",
        ),
        (
            {"features": ["age"], "one_hot": ["kind"]},
            r"read_table.one_hot contains 'kind', which is not a feature",
        ),
        (
            {"features": ["age"], "classes": 9, "bounds": {"stay": [0, 8]}},
            r"data\.classes is 9, but the target has a range in data\.bounds",
        ),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        read_table(frame(), **{"client": "ward", "target": "stay", **options})


@pytest.mark.parametrize("dtype", ["int64[pyarrow]", "float[pyarrow]", "Int64", "object"])
def test_numbers_of_any_column_type_are_read(tmp_path, dtype):
    table = frame()
    table.assign(stay=table.stay.astype(dtype), age=table.age.astype(dtype)).to_parquet(
        tmp_path / "t.parquet"
    )
    table.to_parquet(tmp_path / "plain.parquet")
    read, plain = (
        read_table(tmp_path / name, client="ward", target="stay", features=["age"])
        for name in ("t.parquet", "plain.parquet")
    )
    assert torch.equal(read.train.x, plain.train.x)
    assert torch.equal(read.train.y.double(), plain.train.y.double())


def test_whole_numbers_beyond_64_bits_are_numbers(tmp_path):
    (tmp_path / "t.csv").write_text("ward,dose,stay\n" + "a,1,0\n" * 4 + f"a,{10**30},1\n")
    data = read_table(tmp_path / "t.csv", client="ward", target="stay", test_fraction=0.2)
    assert sorted(torch.cat([data.train.x, data.test.x]).flatten().tolist())[-1] == float(
        np.float32(1e30)
    )


def test_a_table_of_pandas_is_read_as_its_file_is(tmp_path):
    table = frame()
    table.to_parquet(tmp_path / "visits.parquet")
    given = {"client": "ward", "target": "stay", "one_hot": ["kind"]}
    file = read_table(tmp_path / "visits.parquet", **given)
    shuffled = read_table(table.sample(frac=1.0, random_state=1), **given)  # the index says nothing
    assert [rows_of(shuffled, i) for i in range(3)] == [rows_of(file, i) for i in range(3)]
    assert (shuffled.name, file.name) == ("table", "visits.parquet")
    with pytest.raises(DataError, match=r"^visits: client column 'wrd' is missing"):
        read_table(table, **given | {"client": "wrd"}, name="visits")
    with pytest.raises(
        DataError, match="a int is no table; accepted: a file's path, or a DataFrame"
    ):
        read_table(3, **given)


IMAGE = b"\x89PNG" + bytes(range(256)) * 20


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"bytes": IMAGE, "path": "x.png"}, "a mapping of bytes, path"),
        (IMAGE, "5,124 bytes"),
        ([1.5] * 500, "[1.5 1.5"),
        (b"1", "b'1'"),
    ],
)
@pytest.mark.parametrize(
    "role",
    [
        {},
        {"one_hot": ["image"]},
        {"target": "image", "labels": ["a"]},
        {"client": "image"},
        {"target": "image"},
    ],
)
def test_images_are_refused_without_printing_them(tmp_path, value, said, role):
    pd.DataFrame({"who": list("aabb"), "image": [value] * 4, "t": [0, 1] * 2}).to_parquet(
        tmp_path / "i.parquet"
    )
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / "i.parquet", **{"client": "who", "target": "t"} | role)
    text = str(caught.value).removeprefix(str(tmp_path))
    assert "row 0, column 'image' holds " + said in text
    assert len(text) < 300
    assert "\\x" not in text


def test_bounds_code_categories_whatever_the_rows_hold():
    table, options = frame(), {"client": "ward", "target": "cost", "features": ["kind"]}
    given = read_table(table, bounds={"kind": ["c", "a", "b", "d"]}, **options)
    found = read_table(table, one_hot=["kind"], **options)
    assert given.spec.shape == (4,)
    assert torch.equal(given.train.x[:, [1, 2, 0]], found.train.x)  # in the order that was given
    assert not given.train.x[:, 3].any()
    two = read_table(table[table.kind != "c"], bounds={"kind": ["b", "a"]}, **options)
    assert two.spec.shape == (1,)
    ward = table[(table.kind != "c") & (table.ward == "east")]
    expected = sorted(
        zip(ward.kind.map({"b": -1.0, "a": 1.0}), ward.cost.astype(np.float32), strict=True)
    )
    assert rows_of(two, 0) == expected


def test_bounds_scale_numbers_and_targets_to_one_and_state_the_domain():
    table = frame()
    bounds = {"age": [30, 80], "dose": [-1, 1.0], "kind": ["a", "b", "c"], "cost": [-2, 2]}
    data = read_table(table.drop(columns="stay"), client="ward", target="cost", bounds=bounds)
    assert (data.classes, data.inferred, data.domain) == (None, (), Domain(3.0, 3**0.5, 1.0))
    east = table[table.ward == "east"]
    rows = []
    for row in east.itertuples():
        age, dose = 2 * (min(max(row.age, 30), 80) - 30) / 50 - 1, min(max(row.dose, -1), 1)
        cost = min(max(row.cost, -2), 2) / 2
        rows.append((age, dose, *(float(row.kind == k) for k in "abc"), cost))
    np.testing.assert_allclose(
        rows_of(data, 0), sorted(map(tuple, np.array(rows, dtype=np.float32).tolist())), rtol=1e-6
    )
    for side in (data.train, data.test):
        assert side.x.double().norm(dim=1).max() <= data.domain.l2
        assert side.x.double().abs().sum(1).max() <= data.domain.l1
        assert side.y.abs().max() <= 1
    classes = read_table(
        table, client="ward", target="stay", features=["age"], bounds={"age": [0, 99]}, classes=4
    )
    assert classes.domain == Domain(1.0, 1.0, 1.0)
    raw = read_table(table, client="ward", target="cost", features=["age"], bounds={"age": [0, 99]})
    assert (raw.domain, raw.inferred) == (Domain(1.0, 1.0, math.inf), ("classes", "range.cost"))
    assert (
        read_table(
            table, client="ward", target="stay", features=["age", "dose"], bounds={"age": [0, 9]}
        ).domain
        is None
    )


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        (
            {"kind": ["b", "c"]},
            DataError,
            r"client '\w+', row \d+, column 'kind' holds 'a'; accepted: the",
        ),
        (
            {"kind": 18},
            ConfigError,
            r"data\.bounds\['kind'\] is 18; give a range, \[LOW, HIGH\], or categories, \[",
        ),
        (
            {"kind": "ab"},
            ConfigError,
            r"data\.bounds\['kind'\] is 'ab'; give a range, \[LOW, HIGH\], or",
        ),
        (
            {"kind": ["a", "a", "b"]},
            ConfigError,
            r"data\.bounds\['kind'\] is \['a', 'a', 'b'\]; it must be distinct texts",
        ),
        (
            {"kind": [3, 3]},
            ConfigError,
            r"data\.bounds\['kind'\] is \[3, 3\]; a range must be \[LOW, HIGH\], LOW",
        ),
        ({"kind": [0, math.inf]}, ConfigError, r"a range must be \[LOW, HIGH\]"),
        ({"kind": [0, 1]}, DataError, r"column 'kind' holds '.'; accepted: a finite number"),
        (
            {"cost": ["a", "b"]},
            ConfigError,
            r"read_table\.bounds contains 'cost', which is not a feature column",
        ),
    ],
)
def test_bounds_that_do_not_fit_the_table_are_refused(bounds, error, message):
    with pytest.raises(error, match=message):
        read_table(frame(), client="ward", target="cost", features=["kind"], bounds=bounds)


@pytest.mark.parametrize(
    ("options", "inferred"),
    [
        (
            {"target": "stay", "one_hot": ["kind"]},
            ("classes", "categories.kind", "range.age", "range.dose", "range.cost"),
        ),
        (
            {"target": "stay", "features": ["kind"], "bounds": {"kind": ["a", "b", "c"]}},
            ("classes",),
        ),
        ({"target": "stay", "features": ["age"], "transform": Affine(0.01), "classes": 4}, ()),
        ({"target": "stay", "features": ["age"], "integers": True, "classes": 4}, ()),
        (
            {"target": "cost", "features": ["kind"], "one_hot": ["kind"], "classes": None},
            ("categories.kind", "range.cost"),
        ),
        (
            {
                "target": "kind",
                "labels": ["a", "b", "c"],
                "features": ["age"],
                "bounds": {"age": [0, 99]},
            },
            (),
        ),
    ],
)
def test_what_is_read_off_the_rows_is_named(options, inferred):
    data = read_table(frame(), client="ward", **options)
    assert data.inferred == data.subset(["north"]).inferred == inferred


def test_a_column_of_lists_is_described_as_texts() -> None:
    assert Summary(pd.Series([[1.0, 2.0]] * 30)).doubt == "is a constant"
    assert Summary(pd.Series([[k] for k in range(30)])).doubt == "looks like an id of rows"


STAYS = pd.DataFrame({"ward": ["n", "s"] * 30, "age": range(60), "stay": [*range(59), 523]})


@pytest.mark.parametrize(
    ("values", "options", "classes", "inferred"),
    [
        ([*range(59), 523], {}, None, ("classes", "range.stay")),
        ([-3, 2, 1] * 20, {}, None, ("classes", "range.stay")),
        ([0, 100] * 30, {}, None, ("classes", "range.stay")),
        ([*range(20)] * 3, {}, 20, ("classes",)),
        ([*range(21), *range(20), *range(19)], {}, None, ("classes", "range.stay")),
        ([0, 1] * 30, {}, 2, ("classes",)),
        ([-1, 1] * 30, {}, 2, ("classes",)),
        ([*range(59), 523], {"classes": 524}, 524, ()),
        ([*range(20)] * 3, {"classes": None}, None, ("range.stay",)),
        ([*range(59), 523], {"bounds": {"age": [0, 60], "stay": [0, 600]}}, None, ()),
        ([0, 100] * 30, {"labels": [0, 100]}, 2, ()),
    ],
)
def test_whole_numbers_are_classes_only_if_they_are_few_and_from_0_on(
    values, options, classes, inferred, caplog
):
    table = STAYS.assign(stay=values)
    data = read_table(table, client="ward", target="stay", **{"bounds": {"age": [0, 60]}} | options)
    assert (data.classes, data.inferred) == (classes, inferred)
    both = (
        torch.cat([data.in_units(data.train.y), data.in_units(data.test.y)]).sort().values.tolist()
    )
    expected = sorted(values)
    if classes == 2:
        expected = [0] * 30 + [1] * 30
    assert both == pytest.approx(expected, abs=1e-4)
    said = (
        "the whole numbers of 'stay' are taken as a real target, since some are negative or above 19;"
        in caplog.text
    )
    assert said == (classes is None and inferred[0] == "classes" if inferred else False)


def test_grades_from_1_on_are_told_their_labels(caplog):
    for low in (0, 1):
        table = STAYS.assign(stay=[i % 5 + low for i in range(60)])
        read_table(table, client="ward", target="stay", bounds={"age": [0, 60]})
        said = "as none is below 1, 'data.labels=[1,2,3,4,5]' leaves out the rest"
        assert (said in caplog.text) == (low == 1)


GAPS = pd.DataFrame(
    {
        "ward": ["n"] * 4 + ["s"] * 4,
        "age": ["30", "", "NA", "50", "20", "60", "?", "40"],
        "kind": ["a", "", "c", "b", "a", "NA", "b", "c"],
        "sex": ["m", "f", "", "m", "f", "m", "f", "null"],
        "stay": [0, 1, 0, 1, 0, 1, 0, 1],
    }
)
GAP_BOUNDS = {"age": [20, 60], "kind": ["a", "b", "c"], "sex": ["m", "f"]}
GAP_ROWS = [  # age and its indicator, a b c and theirs, sex and its own, stay
    (-0.5, 0, 1, 0, 0, 0, -1, 0, 0),
    (0, 1, 0, 0, 0, 1, 1, 0, 1),
    (0, 1, 0, 0, 1, 0, 0, 1, 0),
    (0.5, 0, 0, 1, 0, 0, -1, 0, 1),
    (-1, 0, 1, 0, 0, 0, 1, 0, 0),
    (1, 0, 0, 0, 0, 1, -1, 0, 1),
    (0, 1, 0, 1, 0, 0, 1, 0, 0),
    (0, 0, 0, 0, 1, 0, 0, 1, 1),
]


@pytest.mark.parametrize("form", ["csv", "parquet", "frame"])
def test_missing_values_are_zero_with_an_indicator(tmp_path, form, caplog):
    source = tmp_path / f"t.{form}"
    if form == "csv":
        GAPS.to_csv(source, index=False)
    elif form == "parquet":
        numbers = pd.to_numeric(GAPS.age, errors="coerce").astype("Float64")
        GAPS.assign(
            age=numbers, kind=GAPS.kind.replace("", None), sex=GAPS.sex.replace("", None)
        ).to_parquet(source)
    else:
        source = GAPS
    options = {"client": "ward", "target": "stay", "classes": 2, "bounds": GAP_BOUNDS}
    data = read_table(source, missing="indicator", **options)
    assert (data.inferred, data.domain) == ((), Domain(3.0, 3**0.5, 1.0))
    assert [rows_of(data, 0), rows_of(data, 1)] == [sorted(GAP_ROWS[:4]), sorted(GAP_ROWS[4:])]
    assert (
        data.fingerprint()
        == read_table(source, missing=["sex", "age", "kind"], **options).fingerprint()
    )
    assert "cut off" not in caplog.text
    for column in ("age", "kind", "sex"):
        others = [name for name in GAP_BOUNDS if name != column]
        with pytest.raises(DataError, match=rf"column '{column}' (is empty|holds)"):
            read_table(source, missing=others, **options)


def test_the_number_of_features_does_not_depend_on_what_is_missing():
    whole = GAPS.assign(age=[30] * 8, kind="a", sex="m")
    data = read_table(
        whole, client="ward", target="stay", classes=2, bounds=GAP_BOUNDS, missing="indicator"
    )
    assert data.spec.shape == (8,)
    assert not data.train.x[:, [1, 5, 7]].any()
    comma = GAPS.assign(age=["30,5", "", "NA", "50", "20", "70", "?", "40"])
    with pytest.raises(DataError, match="row 0, column 'age' holds '30,5'"):
        read_table(
            comma, client="ward", target="stay", classes=2, bounds=GAP_BOUNDS, missing="indicator"
        )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("fill", "data.missing is 'fill'; accepted: refuse, indicator, or a list of columns"),
        (
            ["height"],
            "data.missing contains 'height', which is not a feature column; accepted: 'age', 'kind'",
        ),
        (["stay"], "data.missing contains 'stay', which is not a feature column"),
        (["kind"], "data.missing contains 'kind', which has no data.bounds"),
    ],
)
def test_impossible_choices_for_missing_values_are_refused(missing, message):
    bounds = {"age": [20, 60]}
    with pytest.raises(ConfigError, match=message):
        read_table(
            GAPS,
            client="ward",
            target="stay",
            bounds=bounds,
            one_hot=["kind", "sex"],
            missing=missing,
        )


def test_a_last_category_takes_all_others():
    table, options = frame(), {"client": "ward", "target": "cost", "features": ["kind"]}
    data = read_table(table, bounds={"kind": ["c", "d", "*"]}, **options)
    east = table[table.ward == "east"]
    other = ~east.kind.isin(["c", "d"])
    columns = [east.kind == "c", east.kind == "d", other, east.cost.astype(np.float32)]
    assert rows_of(data, 0) == sorted(zip(*[part.astype(float) for part in columns], strict=True))
    two = read_table(table, bounds={"kind": ["b", "*"]}, **options)
    assert two.spec.shape == (1,)
    expected = sorted(zip(2.0 * (east.kind != "b") - 1, east.cost.astype(np.float32), strict=True))
    assert rows_of(two, 0) == expected
    with pytest.raises(
        ConfigError, match=r"'\*', which takes all other categories, must be the last"
    ):
        read_table(table, bounds={"kind": ["*", "b"]}, **options)


DAYS = ["1979-12-31", "1980-01-01", "1980-02-29", "1983-07-04", "1987-12-31", "1988-01-01"]


@pytest.mark.parametrize("form", ["csv", "datetime64", "zoned", "object"])
def test_dates_are_year_month_weekday_and_days_as_pandas_has_them(tmp_path, form, caplog):
    table = pd.DataFrame(
        {"ward": list("nnnsss"), "day": DAYS, "cost": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]}
    )
    when = pd.to_datetime(table.day)
    source = {
        "csv": tmp_path / "t.csv",
        "datetime64": table.assign(day=when),
        "zoned": table.assign(day=when.dt.tz_localize("Asia/Tokyo") + pd.Timedelta(hours=23)),
        "object": table.assign(day=when.dt.date),
    }[form]
    times = pd.Series([" 23:59", "", "T10:00", "", "", ""])
    table.assign(day=table.day + times).to_csv(tmp_path / "t.csv", index=False)
    data = read_table(
        source, client="ward", target="cost", bounds={"day": ["1980-01-01", "1987-12-31"]}
    )
    cut = when.clip(pd.Timestamp("1980-01-01"), pd.Timestamp("1987-12-31"))
    passed = (cut - pd.Timestamp("1980-01-01")).dt.days / 2921
    parts = [(cut.dt.year - 1980) / 7, (cut.dt.month - 1) / 11, cut.dt.day_of_week / 6, passed]
    expected = np.stack([*(2 * part - 1 for part in parts), table.cost], axis=1)
    for client in (0, 1):
        mine = sorted(map(tuple, expected[3 * client : 3 * client + 3].tolist()))
        np.testing.assert_allclose(rows_of(data, client), mine, rtol=1e-6, atol=1e-7)
    assert (data.inferred, data.domain) == (("classes", "range.cost"), Domain(4.0, 2.0, math.inf))
    assert "day 2" in caplog.text
    gap = read_table(
        table.assign(day=[None, *DAYS[1:]]), client="ward", target="cost", missing=["day"],
        bounds={"day": ["1980-01-01", "1987-12-31"]},
    )  # fmt: skip
    assert (0, 0, 0, 0, 1, 0.5) in rows_of(gap, 0)


def test_dates_that_are_none_are_refused_and_described(tmp_path):
    table = pd.DataFrame(
        {"ward": list("nnnsss"), "day": DAYS, "cost": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]}
    )
    options = {"client": "ward", "target": "cost"}
    for low, high in (("1987-12-31", "1980-01-01"), ("1980-01-01", "1980-01-01")):
        with pytest.raises(
            ConfigError, match=r"data.bounds\['day'\] is .*; two dates must be \[FIRST, LAST\]"
        ):
            read_table(table, bounds={"day": [low, high]}, **options)
    table.loc[4, "day"] = "1987-02-30"
    with pytest.raises(
        DataError,
        match=r"row 4, column 'day' holds '1987-02-30'; accepted: a date such as 1980-01-31",
    ):
        read_table(table, bounds={"day": ["1980-01-01", "1987-12-31"]}, **options)
    with pytest.raises(
        DataError, match=r"column 'day' holds .* \(or for dates .*day: \[1980-01-01, 1987-12-31\]"
    ):
        read_table(table, **options)
    for values in (pd.Series(DAYS), pd.to_datetime(pd.Series(DAYS))):
        column = Summary(values)
        assert (column.dates, column.bounds) == (True, ["1979-01-01", "1988-12-31"])
        assert (column.doubt, column.text) == ("", "1979-12-31 to 1988-01-01, dates")
