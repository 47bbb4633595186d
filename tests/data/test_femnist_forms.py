"""FEMNIST as parquet of the Hugging Face hub and as HDF5 of TensorFlow Federated, beside LEAF JSON."""

import io
import json
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedmtl.data import FederatedDataset, read_femnist
from fedmtl.errors import DataError

from .rows import leaf, rows_of

Writers = dict[str, tuple[np.ndarray, np.ndarray]]


def writers(counts: dict[str, int], seed: int = 0) -> Writers:
    """Images (n, 28, 28) uint8 with a white background, and labels (n,)."""
    generator = np.random.default_rng(seed)
    found = {}
    for name, count in counts.items():
        images = np.full((count, 28, 28), 255, np.uint8)
        images[:, 8:20, 8:20] = generator.integers(0, 256, size=(count, 12, 12))
        found[name] = images, generator.integers(0, 62, size=count)
    return found


def png(image: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


def write_parquet(file: Path, rows: Writers, seed: int = 0) -> Path:
    """As the hub has it: a structure of bytes and path, the writer, the number of the form, the class."""
    flat = [
        (x, name, int(y))
        for name, (images, labels) in rows.items()
        for x, y in zip(images, labels, strict=True)
    ]
    order = np.random.default_rng(seed).permutation(len(flat))
    flat = [flat[i] for i in order]
    table = pa.table(
        {
            "image": [{"bytes": png(x), "path": None} for x, _, _ in flat],
            "writer_id": [name for _, name, _ in flat],
            "hsf_id": [0] * len(flat),
            "character": pa.array([y for _, _, y in flat], pa.int64()),
        }
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=7)
    return file


def write_h5(file: Path, rows: Writers) -> Path:
    """As TensorFlow Federated has it: float32 pixels with a background of 1.0, int32 labels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as content:
        for name, (images, labels) in rows.items():
            group = content.create_group(f"examples/{name}")
            group["pixels"] = images.astype(np.float32) / np.float32(255)
            group["label"] = labels.astype(np.int32)
    return file


def write_leaf(file: Path, rows: Writers) -> Path:
    users = {
        name: ((x.reshape(len(x), -1) / 255).tolist(), y.tolist()) for name, (x, y) in rows.items()
    }
    file.write_text(json.dumps(leaf(users)))
    return file


def everything(data: FederatedDataset) -> dict[str, list]:
    """Every writer's inverted pixels and labels."""
    return {client: rows_of(data, i) for i, client in enumerate(data.ids)}


def expected(rows: Writers, least: int = 2) -> dict[str, list]:
    return {
        name: sorted(
            (*(255 - x).flatten().tolist(), int(y)) for x, y in zip(images, labels, strict=True)
        )
        for name, (images, labels) in rows.items()
        if len(labels) >= least
    }


def test_all_forms_hold_the_same_rows(tmp_path):
    rows = writers({"f0000_14": 5, "f0001_41": 3, "f0002_00": 1})
    forms = [
        read_femnist(write_parquet(tmp_path / "a.parquet", rows)),
        read_femnist(write_h5(tmp_path / "b.h5", rows)),
        read_femnist(write_leaf(tmp_path / "c.json", rows)),
    ]
    for data in forms:
        assert data.train.x.dtype == torch.uint8
        assert everything(data) == expected(rows)
        assert (data.spec.shape, data.classes) == ((1, 28, 28), 62)
        assert data.domain is not None
        assert (data.domain.l1, data.domain.l2) == (784.0, 28.0)
        x, _ = data.gather("train", torch.arange(2))
        assert float(x[:, :, 0, 0].abs().max()) == 0.0  # the background
        assert float(x.max()) <= 1.0


def test_pixels_of_leaf_between_those_of_bytes_are_rounded(tmp_path):
    pixels = np.random.default_rng(0).random((6, 784))
    (tmp_path / "f.json").write_text(json.dumps(leaf({"w": (pixels.tolist(), list(range(6)))})))
    data = read_femnist(tmp_path / "f.json")
    sides = [
        data.gather(side, torch.arange(len(data.side(side))), dtype=torch.float64)
        for side in ("train", "test")
    ]
    x, y = (torch.cat(parts) for parts in zip(*sides, strict=True))
    np.testing.assert_allclose(x.flatten(1), 1 - pixels[y], atol=0.5001 / 255)


def test_the_sources_own_split_is_kept_or_pooled(tmp_path):
    train, test = writers({"a": 4, "b": 3, "c": 2}), writers({"a": 2, "c": 1}, seed=1)
    write_h5(tmp_path / "tff" / "fed_emnist_train.h5", train)
    write_h5(tmp_path / "tff" / "fed_emnist_test.h5", test)
    write_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", train)
    write_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", test)
    together = dict(train)
    for name, pair in test.items():
        together[name] = tuple(np.concatenate(both) for both in zip(train[name], pair, strict=True))
    for folder in ("tff", "hub"):
        kept = read_femnist(tmp_path / folder, test_fraction=None)
        assert dict(zip(kept.ids, kept.train.counts.tolist(), strict=True)) == {
            "a": 4,
            "b": 3,
            "c": 2,
        }
        assert dict(zip(kept.ids, kept.test.counts.tolist(), strict=True)) == {
            "a": 2,
            "b": 0,
            "c": 1,
        }
        assert everything(kept) == expected(together)
        first = kept.train.take_clients(torch.tensor([kept.ids.index("a")]))
        assert sorted(first.x.flatten(1).tolist()) == sorted(
            (255 - train["a"][0]).reshape(4, -1).tolist()
        )
        pooled = read_femnist(tmp_path / folder, test_fraction=0.5)
        assert everything(pooled) == expected(together)
        assert dict(zip(pooled.ids, pooled.test.counts.tolist(), strict=True)) == {
            "a": 3,
            "b": 2,
            "c": 2,
        }


def test_characters_by_name(tmp_path):
    rows = writers({"a": 3})
    table = pa.table(
        {
            "image": [png(x) for x in rows["a"][0]],
            "writer_id": [7, 7, 7],
            "character": ["9", "A", "z"],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    data = read_femnist(tmp_path / "x.parquet")
    assert data.ids == ("7",)
    assert sorted(torch.cat([data.train.y, data.test.y]).tolist()) == [9, 10, 61]


def test_some_writers_are_drawn(tmp_path):
    file = write_h5(tmp_path / "x.h5", writers(dict.fromkeys("abcdef", 3)))
    drawn = {seed: read_femnist(file, clients=2, seed=seed).ids for seed in range(6)}
    assert {len(ids) for ids in drawn.values()} == {2}
    assert len(set(drawn.values())) > 1


def parquet_with(column: str, row: int, value):
    def write(folder: Path) -> Path:
        rows = writers({"a": 4})
        columns = {
            "image": [{"bytes": png(x), "path": None} for x in rows["a"][0]],
            "writer_id": ["a"] * 4,
            "character": [1, 2, 3, 4],
        }
        columns[column][row] = value
        if value is KeyError:
            del columns[column]
        pq.write_table(pa.table(columns), folder / "x.parquet")
        return folder / "x.parquet"

    return write


def h5_with(change):
    def write(folder: Path) -> Path:
        file = write_h5(folder / "x.h5", writers({"a": 4, "b": 3}))
        with h5py.File(file, "a") as content:
            change(content)
        return file

    return write


def replaced(content, field: str, values: np.ndarray) -> None:
    del content[f"examples/b/{field}"]
    content[f"examples/b/{field}"] = values


BAD = {
    "column": (
        parquet_with("writer_id", 0, KeyError),
        r"x\.parquet: column 'writer_id' is missing; the columns are",
    ),
    "no image": (
        parquet_with("image", 2, {"bytes": b"", "path": None}),
        r"row 2, column 'image' is not a readable image",
    ),
    "no bytes": (
        parquet_with("image", 1, {"bytes": None, "path": "a.png"}),
        r"row 1, .*; accepted: bytes",
    ),
    "size": (
        parquet_with("image", 3, {"bytes": png(np.zeros((10, 28), np.uint8)), "path": None}),
        r"'image' is 10x28",
    ),
    "writer": (parquet_with("writer_id", 1, None), r"row 1, column 'writer_id' is empty"),
    "character": (
        parquet_with("character", 2, 62),
        r"row 2, column 'character' holds 62; accepted: 0 to 61",
    ),
    "no hdf5": (
        lambda folder: write_leaf(folder / "x.h5", writers({"a": 2})),
        r"x\.h5 cannot be read as HDF5",
    ),
    "no examples": (
        h5_with(lambda c: c.move("examples", "clients")),
        r"x\.h5: group 'examples' is missing",
    ),
    "no label": (
        h5_with(lambda c: c.__delitem__("examples/b/label")),
        r"client 'b': field 'label' is missing",
    ),
    "lengths": (
        h5_with(lambda c: replaced(c, "label", np.zeros(2, np.int32))),
        r"\('pixels' 3, 'label' 2\)",
    ),
    "label": (
        h5_with(lambda c: replaced(c, "label", np.array([1, 70, 2], np.int32))),
        r"example 1, .* holds 70",
    ),
    "pixel": (
        h5_with(lambda c: replaced(c, "pixels", np.full((3, 28, 28), 1.5, np.float32))),
        r"1.5; .* in \[0, 1\]",
    ),
    "shape": (
        h5_with(lambda c: replaced(c, "pixels", np.ones((3, 28, 27), np.float32))),
        r"'pixels' has 756 numbers",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_files_are_refused_with_file_row_and_column(tmp_path, case):
    write, message = BAD[case]
    with pytest.raises(DataError, match=message):
        read_femnist(write(tmp_path))
