"""Saved data: in memory == memory-mapped, damaged folders refused, nothing half-written."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from fedmtl.data import Affine, FederatedDataset
from fedmtl.errors import DataError

from .test_dataset import ragged


def datasets():
    rng = np.random.default_rng(0)
    sparse = {
        f"c{i}": (scipy.sparse.random(6, 20, 0.3, "csr", np.float32, random_state=i), rng.integers(0, 2, 6))
        for i in range(3)
    }
    brain = {k: (x.to(torch.bfloat16), y.float()) for k, (x, y) in ragged().items()}
    return {
        "uint8": FederatedDataset.from_tensors(ragged(dtype=torch.uint8, shape=(1, 2, 2)), transform=Affine(1 / 255)),
        "float": FederatedDataset.from_tensors(ragged(), name="named"),
        "sparse": FederatedDataset.from_tensors(sparse, classes=2),
        "bfloat16 regression": FederatedDataset.from_tensors(brain),
    }


@pytest.mark.parametrize("kind", datasets())
@pytest.mark.parametrize("memory_map", [True, False])
def test_loaded_data_are_the_saved_data(tmp_path, kind, memory_map):
    data = datasets()[kind]
    data.save(tmp_path / "sub" / "data")
    loaded = FederatedDataset.load(tmp_path / "sub" / "data", memory_map=memory_map)
    assert loaded.fingerprint() == data.fingerprint()
    assert (loaded.ids, loaded.name, loaded.spec) == (data.ids, data.name, data.spec)
    index = torch.randint(0, len(data.train), (3, 4))
    for a, b in zip(loaded.gather("train", index), data.gather("train", index), strict=True):
        assert torch.equal(a, b)
    assert loaded.subset([1]).split(0.5).fingerprint() == data.subset([1]).split(0.5).fingerprint()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the mappings of a Linux process")
def test_memory_mapped_features_stay_on_disk(tmp_path):
    FederatedDataset.from_tensors(ragged()).save(tmp_path / "d")

    def mapped_file(tensor):
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, *_, name = line.split()
            start, stop = (int(end, 16) for end in span.split("-"))
            if start <= tensor.data_ptr() < stop:
                return name
        return None

    loaded = FederatedDataset.load(tmp_path / "d")
    assert mapped_file(loaded.train.x) == str(tmp_path / "d" / "train_x.npy")
    assert mapped_file(loaded.test.y) == str(tmp_path / "d" / "test_y.npy")
    in_memory = FederatedDataset.load(tmp_path / "d", memory_map=False)
    assert mapped_file(in_memory.train.x) != str(tmp_path / "d" / "train_x.npy")


def test_a_folder_is_never_overwritten_and_nothing_is_left_behind(tmp_path, monkeypatch):
    data = FederatedDataset.from_tensors(ragged())
    data.save(tmp_path / "d")
    with pytest.raises(DataError, match="exists already; give a new folder"):
        data.save(tmp_path / "d")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        data.save(tmp_path / "e")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


def damaged(folder, change):
    FederatedDataset.from_tensors(ragged()).save(folder)
    change(folder)
    return folder


def edit(folder, **values):
    file = folder / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cut(file):
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "dataset.json").unlink(), r"dataset.json is missing; give a folder written by"),
        (lambda f: cut(f / "dataset.json"), r"dataset.json is not valid JSON"),
        (lambda f: edit(f, version=99), r"dataset.json is not a fedmtl-dataset file of version 1"),
        (lambda f: edit(f, tensors={"train_x": {}}), r"dataset.json: the key 'files' is missing"),
        (lambda f: edit(f, tensors={}), r"dataset.json: the key 'train_x' is missing"),
        (lambda f: (f / "train_x.npy").unlink(), r"train_x.npy is missing"),
        (lambda f: cut(f / "test_x.npy"), r"test_x.npy is damaged or truncated"),
        (lambda f: (f / "train_y.npy").write_bytes(b"no"), r"train_y.npy is damaged or truncated"),
        (lambda f: edit(f, ids=["a", "a", "b", "c"]), r"client 'a' occurs twice"),
        (lambda f: edit(f, ids=["a"]), r"examples of 4 clients, but 1 ids"),
        (
            lambda f: edit(f, transform={"kind": "Mine"}),
            r"dataset.json: .*transform 'Mine'.*pass it as transform=",
        ),
    ],
)
def test_damaged_folders_are_refused(tmp_path, change, message, memory_map):
    folder = damaged(tmp_path / "d", change)
    with pytest.raises(DataError, match=message):
        FederatedDataset.load(folder, memory_map=memory_map)


def test_values_changed_on_disk_are_found_when_read_into_memory(tmp_path):
    FederatedDataset.from_tensors(ragged()).save(tmp_path / "d")
    x = np.load(tmp_path / "d" / "train_x.npy")
    x[3] = np.nan
    np.save(tmp_path / "d" / "train_x.npy", x)
    with pytest.raises(DataError, match="field 'x' holds nan"):
        FederatedDataset.load(tmp_path / "d", memory_map=False)


@dataclass(frozen=True)
class Twice:
    times: float = 2.0

    def __call__(self, x, dtype):
        return x.to(dtype) * self.times


def test_a_users_own_transform_is_given_again(tmp_path):
    data = FederatedDataset.from_tensors(ragged(), transform=Twice())
    data.save(tmp_path / "d")
    loaded = FederatedDataset.load(tmp_path / "d", transform=Twice())
    assert loaded.fingerprint() == data.fingerprint()


def test_nothing_is_pickled(tmp_path):
    FederatedDataset.from_tensors(ragged()).save(tmp_path / "d")
    np.save(tmp_path / "d" / "train_y.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"train_y.npy is damaged"):
        FederatedDataset.load(tmp_path / "d")
