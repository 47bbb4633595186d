"""Odd files and folders of LEAF and FEMNIST: what is read of each, or the words in which it is refused."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedmtl.data import read_femnist, read_leaf
from fedmtl.errors import DataError

from .rows import leaf, rows_of
from .test_femnist_forms import everything, expected, write_h5, write_leaf, write_parquet, writers

USERS = {"a": ([[1.0, 2.0], [3.0, 4.0]], [0, 1]), "b": ([[5.0, 6.0], [7.0, 8.0]], [1, 0])}
ONE, OTHER = ({name: USERS[name]} for name in "ab")
ROWS = {"a": [(1, 2, 0), (3, 4, 1)], "b": [(5, 6, 1), (7, 8, 0)]}


def written(users, encoding: str = "utf-8") -> bytes:
    return json.dumps(leaf(users), ensure_ascii=False).encode(encoding)


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def one_file(content: bytes, name: str = "d.json") -> Callable[[Path], object]:
    return lambda root: (root / name).write_bytes(content)


def one_zip(name: str, **members: bytes) -> Callable[[Path], object]:
    return lambda root: zipped(
        root / name, {key.replace("__", "/"): value for key, value in members.items()}
    )


def left_by_systems(root: Path) -> None:
    (root / "d.json").write_bytes(written(USERS))
    for name in ("._d.json", ".d.json.swp", "Thumbs.db", "README.md"):
        (root / name).write_bytes(b"\0\5\x16\7")
    (root / ".ipynb_checkpoints").mkdir()
    (root / ".ipynb_checkpoints" / "d-checkpoint.json").write_bytes(written(USERS))


def zip_of_systems(root: Path) -> None:
    hidden = ("__MACOSX/._d.json", ".ipynb_checkpoints/d.json", "x/.trash/d.json", "x/._d.json")
    zipped(root / "d.zip", {"./x/d.json": written(USERS), **dict.fromkeys(hidden, b"\0\5")})


def linked(root: Path) -> None:
    (root.parent / "elsewhere.json").write_bytes(written(USERS))
    (root / "d.json").symlink_to(root.parent / "elsewhere.json")


def zip_and_what_it_unzips_to(root: Path) -> None:
    zipped(root / "d.zip", {"data/d0.json": written(ONE), "data/d1.json": written(OTHER)})
    (root / "d0.json").write_bytes(written(ONE))
    (root / "d1.json").write_bytes(written(OTHER))


def zip_and_some_of_it(root: Path) -> None:
    zipped(root / "d.zip", {"d0.json": written(ONE), "d1.json": written(OTHER)})
    (root / "d1.json").write_bytes(written(OTHER))


def zip_beside_its_folder(root: Path) -> None:
    zipped(root / "d.zip", {"data/d.json": written(USERS)})
    (root / "data").mkdir()
    (root / "data" / "d.json").write_bytes(written(USERS))


def folder_named_like_a_file(root: Path) -> None:
    (root / "old.json").mkdir()
    (root / "d.json").write_bytes(written(USERS))


def numbers_as_ids(root: Path) -> None:
    content = leaf({"é 1": USERS["a"], "7": USERS["b"]}) | {"users": ["é 1", 7]}
    (root / "d.json").write_text(json.dumps(content))


READ: dict[str, tuple[Callable[[Path], object], tuple[str, str]]] = {
    "byte order mark": (one_file(written(USERS, "utf-8-sig")), ("a", "b")),
    "utf-16": (one_file(written(USERS, "utf-16")), ("a", "b")),
    "capitals": (one_file(written(USERS), "D.JSON"), ("a", "b")),
    "zip in capitals": (
        one_zip("D.ZIP", X__D=b"no json", **{"D.JSON": written(USERS)}),
        ("a", "b"),
    ),
    "what systems leave": (left_by_systems, ("a", "b")),
    "what systems leave in a zip": (zip_of_systems, ("a", "b")),
    "a link": (linked, ("a", "b")),
    "a zip and what it unzips to": (zip_and_what_it_unzips_to, ("a", "b")),
    "a zip and some of it": (zip_and_some_of_it, ("b", "a")),
    "a zip beside its folder": (zip_beside_its_folder, ("a", "b")),
    "a folder named like a file": (folder_named_like_a_file, ("a", "b")),
    "ids of letters and numbers": (numbers_as_ids, ("é 1", "7")),
}


@pytest.mark.parametrize("case", READ)
def test_odd_folders_of_leaf(tmp_path, case):
    make, ids = READ[case]
    (tmp_path / "root").mkdir()
    make(tmp_path / "root")
    data = read_leaf(tmp_path / "root", classes=2)
    assert sorted(data.ids) == sorted(ids)
    found = sorted(rows_of(data, place) for place in range(2))
    assert found == sorted(ROWS.values())


def test_a_zip_with_the_folders_of_a_split_is_that_split(tmp_path):
    later = {"a": ([[9.0, 9.0]], [1]), "b": ([[8.0, 8.0]], [0])}
    train = {"data/train/d0.json": written(ONE), "data/train/d1.json": written(OTHER)}
    data = read_leaf(
        zipped(tmp_path / "d.zip", train | {"data/test/d.json": written(later)}), classes=2
    )
    assert (data.train.x.tolist(), data.train.y.tolist()) == (
        [[1, 2], [3, 4], [5, 6], [7, 8]],
        [0, 1, 1, 0],
    )
    assert (data.test.x.tolist(), data.test.y.tolist()) == ([[9, 9], [8, 8]], [1, 0])
    unseen = {"data/train/d0.json": written(ONE), "data/test/d.json": written(OTHER)}
    with pytest.raises(DataError, match=r"no client has both training and test examples"):
        read_leaf(zipped(tmp_path / "u.zip", unseen), classes=2)
    assert len(read_leaf(zipped(tmp_path / "o.zip", train), classes=2)) == 2


def changed_after_unzipping(root: Path) -> None:
    zip_and_what_it_unzips_to(root)
    changed = written(OTHER).replace(b"5.0", b"9.0")
    assert len(changed) == len(written(OTHER))
    (root / "d1.json").write_bytes(changed)


def encrypted(root: Path) -> None:
    content = bytearray(zipped(root / "d.zip", {"d.json": written(USERS)}).read_bytes())
    content[6] |= 1  # the flag of encryption, in both headers
    content[content.index(b"PK\1\2") + 8] |= 1
    (root / "d.zip").write_bytes(content)


def broken_link(root: Path) -> None:
    (root / "d.json").symlink_to(root / "nowhere.json")


def pipe(root: Path) -> None:
    os.mkfifo(root / "d.json")


def one_client(x, y) -> Callable[[Path], object]:
    return one_file(written({"a": (x, y)}))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (
        one_file(b""),
        r"d\.json cannot be read as LEAF JSON \(.*\); it may be truncated or damaged\.$",
    ),
    "latin": (
        one_file(written({"é": USERS["a"]}, "latin-1")),
        r"d\.json cannot be read as LEAF JSON \(.*utf-8",
    ),
    "nested too deep": (
        one_file(b"[" * 100_000),
        r"d\.json cannot be read as LEAF JSON \(.*recursion",
    ),
    "a number too long": (
        one_file(b'{"users": ' + b"9" * 5000),
        r"d\.json cannot be read as LEAF JSON \(.*digits",
    ),
    "no zip": (
        one_file(written(USERS), "d.zip"),
        r"d\.zip is not a readable zip file \(.*\); it may be truncated\.$",
    ),
    "an empty zip": (one_file(b"", "d.zip"), r"d\.zip is not a readable zip file"),
    "a zip in a zip": (
        one_zip("d.zip", **{"d.zip": b"PK"}),
        r"root holds no LEAF data; give a \.json file",
    ),
    "an encrypted zip": (
        encrypted,
        r"d\.zip/d\.json cannot be read as LEAF JSON \(.*password required",
    ),
    "changed after unzipping": (
        changed_after_unzipping,
        r"d1\.json: client 'b' is already in .*d\.zip/data/d1\.json;",
    ),
    "a broken link": (
        broken_link,
        r"d\.json is a link to nothing; remove it, or restore what it points to\.$",
    ),
    "a pipe": (pipe, r"d\.json is no file; accepted: a file, or a link to one\.$"),
    "rows of two lengths": (
        one_client([[1.0], [1.0, 2.0]], [0, 1]),
        r"client 'a', field 'x' holds .* rows of one shape",
    ),
    "texts": (
        one_client(["one", "two"], [0, 1]),
        r"client 'a', field 'x' holds .*one.*; accepted: numbers",
    ),
    "missing": (
        one_client([[None], [1.0]], [0, 1]),
        r"client 'a', field 'x' is empty in example 0; accepted: a number",
    ),
    "infinite": (
        one_client([[1e999], [1.0]], [0, 1]),
        r"client 'a', example 0, field 'x' holds inf",
    ),
    "an object": (
        one_client([{"p": 1}, {"p": 2}], [0, 1]),
        r"client 'a', field 'x' holds .*; accepted: numbers",
    ),
    "half a label": (
        one_client([[1.0], [2.0]], [0, 0.5]),
        r"client 'a', example 1, field 'y' holds 0\.5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_odd_files_of_leaf_are_refused(tmp_path, case):
    make, message = REFUSED[case]
    (tmp_path / "root").mkdir()
    make(tmp_path / "root")
    with pytest.raises(DataError, match=message) as refused:
        read_leaf(tmp_path / "root", classes=2)
    assert "\n" not in str(refused.value)


CHARACTERS = writers({"f0": 3, "f1": 2})


def femnist_zip_and_file(root: Path) -> None:
    file = write_leaf(root / "all_data.json", CHARACTERS)
    zipped(root / "femnist.zip", {"femnist/all_data.json": file.read_bytes()})


def femnist_zip_and_split(root: Path) -> None:
    for side in ("train", "test"):
        (root / side).mkdir()
    one, other = (
        {name: (x[part], y[part]) for name, (x, y) in CHARACTERS.items()}
        for part in (slice(1), slice(1, 9))
    )
    write_leaf(root / "train" / "d.json", one)
    write_leaf(root / "test" / "d.json", other)
    zipped(
        root / "femnist.zip",
        {"d.json": write_leaf(root.parent / "d.json", CHARACTERS).read_bytes()},
    )


def femnist_hidden_parquet(root: Path) -> None:
    write_parquet(root / "data" / "train-0.parquet", CHARACTERS)
    write_parquet(root / ".cache" / "huggingface" / "train-0.parquet", CHARACTERS)
    (root / "data" / "._train-0.parquet").write_bytes(b"\0\5")


def femnist_hidden_h5(root: Path) -> None:
    write_h5(root / "FED_EMNIST.H5", CHARACTERS)
    (root / "._fed_emnist.h5").write_bytes(b"\0\5")


def femnist_linked_folder(root: Path) -> None:
    write_parquet(root.parent / "elsewhere" / "train-0.parquet", CHARACTERS)
    (root / "data").symlink_to(root.parent / "elsewhere")


@pytest.mark.parametrize(
    "make",
    [
        femnist_zip_and_file,
        femnist_zip_and_split,
        femnist_hidden_parquet,
        femnist_hidden_h5,
        femnist_linked_folder,
    ],
)
def test_odd_folders_of_femnist_are_read_once(tmp_path, make):
    (tmp_path / "root").mkdir()
    make(tmp_path / "root")
    assert everything(read_femnist(tmp_path / "root")) == expected(CHARACTERS)
