"""LEAF JSON: all layouts give the same data, and every malformed file its own error."""

import json
import zipfile

import numpy as np
import pytest
import torch

from fedmtl.data import read_leaf
from fedmtl.errors import DataError

from .rows import leaf, rows_of


def some_users(names="abc", sizes=(4, 3, 5), width=2, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(0, 9, (size, width)).tolist(), rng.integers(0, 3, size).tolist())
        for name, size in zip(names, sizes, strict=True)
    }


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def zipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(
                name.replace("__", "/"),
                content if isinstance(content, (str, bytes)) else json.dumps(content),
            )
    return path


def test_the_file_holds_what_is_read(tmp_path):
    users = some_users()
    content = leaf(users)
    content["user_data"] = dict(
        reversed(content["user_data"].items())
    )  # the order is that of "users"
    data = read_leaf(put(tmp_path / "all.json", content), classes=3)
    assert data.ids == ("a", "b", "c")
    assert data.name == "all.json"
    assert data.train.x.dtype == torch.float32
    for i, (x, y) in enumerate(users.values()):
        assert rows_of(data, i) == sorted(
            (*map(float, row), label) for row, label in zip(x, y, strict=True)
        )


def test_a_file_a_folder_of_parts_and_zips_are_the_same_data(tmp_path):
    users = some_users()
    whole = read_leaf(put(tmp_path / "all.json", leaf(users)), classes=3)
    first, rest = {"a": users["a"]}, {k: users[k] for k in "bc"}
    put(tmp_path / "parts" / "data_0.json", leaf(first))
    put(tmp_path / "parts" / "data_1.json", leaf(rest))
    put(tmp_path / "parts" / "README.txt", "not data")
    one = zipped(tmp_path / "one.zip", **{"x__d0.json": leaf(first), "x__d1.json": leaf(rest)})
    mac = zipped(tmp_path / "mac.zip", **{"a.json": leaf(users)})
    with zipfile.ZipFile(mac, "a") as archive:
        archive.writestr("__MACOSX/._a.json", b"\x00\x05\x16\x07")
    (tmp_path / "folder").mkdir()
    mac.rename(tmp_path / "folder" / "mac.zip")
    for path in (tmp_path / "parts", one, tmp_path / "folder" / "mac.zip", tmp_path / "folder"):
        assert read_leaf(path, classes=3).fingerprint() == whole.fingerprint()


def test_leafs_own_split_is_kept_or_made_again(tmp_path):
    train, test = some_users(), some_users(sizes=(1, 2, 1), seed=1)
    put(tmp_path / "train" / "d.json", leaf(train))
    put(tmp_path / "test" / "d.json", leaf(test))
    kept = read_leaf(tmp_path, classes=3)
    assert kept.train.counts.tolist() == [4, 3, 5]
    assert kept.test.counts.tolist() == [1, 2, 1]
    assert kept.test.x.tolist() == [row for x, _ in test.values() for row in x]
    again = read_leaf(tmp_path, classes=3, test_fraction=0.5)
    assert again.test.counts.tolist() == [2, 2, 3]
    for i in range(3):
        assert rows_of(again, i) == rows_of(kept, i)


def test_shapes_targets_and_small_clients(tmp_path):
    users = some_users(sizes=(4, 1, 5), width=6)
    path = put(tmp_path / "d.json", leaf(users))
    data = read_leaf(path, shape=(2, 3), min_examples=4)
    assert data.ids == ("a", "c")
    assert data.spec.shape == (2, 3)
    floats = {"a": ([[1.0], [2.0]], [1, 2]), "b": ([[1.0], [2.0]], [0.5, 1.5])}
    regression = read_leaf(put(tmp_path / "r.json", leaf(floats)))
    assert regression.classes is None
    assert regression.train.y.dtype == torch.float32
    with pytest.raises(
        DataError, match=r"client 'a', field 'x' has 6 numbers an example; shape \(5,\)"
    ):
        read_leaf(path, shape=(5,))


def broken(**changes):
    content = leaf(some_users())
    for key, value in changes.items():
        if value is None:
            del content[key]
        else:
            content[key] = value
    return content


def with_client(entry):
    content = leaf(some_users())
    content["user_data"]["a"] = entry
    return content


XS = [[0.0, 1.0]] * 4
BAD = {
    "truncated": (
        json.dumps(leaf(some_users()))[:-20],
        r"cannot be read as LEAF JSON \(.*\); it may be truncated",
    ),
    "a list": ([1, 2], r"fields 'users' and 'user_data' are missing or name different clients"),
    "no data": (
        broken(user_data=None),
        r"fields 'users' and 'user_data' are missing or name different clients",
    ),
    "nobody": (leaf({}), r"there are no clients; field 'users' must list at least one"),
    "user twice": (
        broken(users=["a", "a", "b"]),
        r"fields 'users' and 'user_data' are missing or name different",
    ),
    "user without data": (
        broken(users=["a", "b", "z"]),
        r"'users' and 'user_data' are missing or name different",
    ),
    "no x": (
        with_client({"y": [1]}),
        r"client 'a': field 'x' is missing or malformed; it must be a list",
    ),
    "nan": (
        with_client({"x": [*XS[:3], [0.0, float("nan")]], "y": [0] * 4}),
        r"example 3, field 'x' holds nan;",
    ),
    "words as labels": (
        with_client({"x": XS, "y": ["cat"] * 4}),
        r"client 'a', field 'y' holds .*cat.*; accepted",
    ),
    "label outside": (
        with_client({"x": XS, "y": [0, 1, 2, 3]}),
        r"example 3, field 'y' holds 3; with 3 classes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_have_a_clear_error(tmp_path, case):
    content, message = BAD[case]
    path = put(tmp_path / "part-3.json", content)
    with pytest.raises(DataError, match=rf"part-3\.json.*{message}"):
        read_leaf(path, classes=3)


def test_a_client_with_one_example_is_left_out_or_only_trains(tmp_path):
    path = put(tmp_path / "d.json", with_client({"x": XS[:1], "y": [0]}))
    assert read_leaf(path).ids == ("b", "c")
    every = read_leaf(path, min_examples=1)
    assert (every.ids, every.test.counts.tolist()[0], every.train.counts.tolist()[0]) == (
        ("a", "b", "c"),
        0,
        1,
    )


def test_a_client_in_two_parts_is_refused(tmp_path):
    for i in range(2):
        put(tmp_path / f"p{i}.json", leaf(some_users()))
    with pytest.raises(
        DataError,
        match=r"p1\.json: client 'a' is already in .*p0\.json; each client must be in one",
    ):
        read_leaf(tmp_path)


@pytest.mark.parametrize("empty", [False, True])
def test_clients_without_one_side_of_leafs_split_are_left_out_or_not_scored(
    tmp_path, caplog, empty
):
    users = some_users()
    there = {k: users[k] for k in "ab"}
    put(tmp_path / "train" / "d.json", leaf(there | {"c": ([], [])} if empty else there))
    put(tmp_path / "test" / "d.json", leaf(users))
    assert read_leaf(tmp_path).ids == ("a", "b")
    left_out = "clients left out (a private count): 1, with test examples only (test_fraction=0.2 divides theirs anew)"
    assert caplog.messages == [f"{tmp_path}: {left_out}"]
    assert read_leaf(tmp_path, test_fraction=0.2).ids == ("a", "b", "c")
    put(tmp_path / "train" / "d.json", leaf(users))
    put(tmp_path / "test" / "d.json", leaf({k: users[k] for k in "ac"}))
    assert (read_leaf(tmp_path).test.counts > 0).tolist() == [True, False, True]
    put(tmp_path / "test" / "d.json", leaf(some_users(width=3)))
    with pytest.raises(
        DataError, match=r"\(test\): client 'a': field 'x' is torch.float32 \(3,\), but"
    ):
        read_leaf(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(
        DataError, match=r"nowhere', which does not exist; give a LEAF \.json file, a \.zip of them"
    ):
        read_leaf(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no LEAF data; give a \.json file"):
        read_leaf(tmp_path / "empty")
    with pytest.raises(DataError, match=r"none\.zip.* holds no LEAF data"):
        read_leaf(zipped(tmp_path / "none.zip", **{"a.txt": "hello"}))
    good = zipped(tmp_path / "good.zip", **{"a.json": leaf(some_users(sizes=(90, 90, 90)))})
    (tmp_path / "cut.zip").write_bytes(good.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"cut\.zip is not a readable zip file .*truncated"):
        read_leaf(tmp_path / "cut.zip")
    damaged = bytearray(good.read_bytes())
    damaged[200:210] = bytes(10)
    (tmp_path / "bits.zip").write_bytes(damaged)
    with pytest.raises(DataError, match=r"bits\.zip/a\.json cannot be read .*damaged"):
        read_leaf(tmp_path / "bits.zip")
    (tmp_path / "latin.json").write_bytes(b'{"users": ["\xe9"]}')
    with pytest.raises(DataError, match=r"latin\.json cannot be read as LEAF JSON"):
        read_leaf(tmp_path / "latin.json")
