"""Saved data: in memory == memory-mapped, damaged folders refused, nothing half-written."""

import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from safetensors.torch import load_file, save_file

from fedmtl.data import Affine, FederatedDataset
from fedmtl.errors import DataError

from .test_dataset import ragged

TENSORS = "tensors.safetensors"


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
    loaded.save(tmp_path / "again")
    assert FederatedDataset.load(tmp_path / "again").fingerprint() == data.fingerprint()
    assert loaded.subset(data.ids[1:2]).fingerprint() == data.subset(data.ids[1:2]).fingerprint()


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

    file, loaded = str(tmp_path / "d" / "tensors.safetensors"), FederatedDataset.load(tmp_path / "d")
    assert mapped_file(loaded.train.x) == mapped_file(loaded.test.y) == file
    assert mapped_file(FederatedDataset.load(tmp_path / "d", memory_map=False).train.x) != file


def test_sides_that_share_memory_are_saved(tmp_path):
    part = FederatedDataset.from_tensors(ragged()).train
    data = FederatedDataset(part, part, ("a", "b", "c", "d"), classes=4)
    data.save(tmp_path / "d")
    assert FederatedDataset.load(tmp_path / "d").fingerprint() == data.fingerprint()


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


def drop(folder, key):
    file = folder / "dataset.json"
    file.write_text(json.dumps({name: v for name, v in json.loads(file.read_text()).items() if name != key}))


def keep(folder, other, **changed):
    """Write the tensors anew, without ``other`` and with those of ``changed``."""
    tensors = {name: value.clone() for name, value in load_file(folder / TENSORS).items() if name != other}
    save_file(tensors | changed, folder / TENSORS)


def cut(file):
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "dataset.json").unlink(), r"dataset.json is missing; give a folder written by"),
        (lambda f: cut(f / "dataset.json"), r"dataset.json cannot be read"),
        (lambda f: edit(f, version=99), r"dataset.json is not a fedmtl-dataset file of version 2"),
        (lambda f: keep(f, "train_x"), r"'train_x' is missing; write the folder again"),
        (lambda f: drop(f, "name"), r"'name' is missing; write the folder again"),
        (lambda f: (f / TENSORS).unlink(), r"tensors\.safetensors is missing or damaged"),
        (lambda f: cut(f / TENSORS), r"tensors\.safetensors is missing or damaged"),
        (lambda f: (f / TENSORS).write_bytes(pickle.dumps({"a": 1})), r"tensors\.safetensors is missing or damaged"),
        (lambda f: edit(f, ids=["a", "a", "b", "c"]), r"client 'a' occurs twice"),
        (lambda f: edit(f, ids=["a"]), r"examples of 4 clients, but 1 ids"),
        (lambda f: edit(f, transform={"kind": "Mine"}), r"dataset.json: .*transform 'Mine'.*pass it as transform="),
    ],
)
def test_damaged_folders_are_refused(tmp_path, change, message, memory_map):
    folder = damaged(tmp_path / "d", change)
    with pytest.raises(DataError, match=message):
        FederatedDataset.load(folder, memory_map=memory_map)


def test_values_changed_on_disk_are_found_when_read_into_memory(tmp_path):
    FederatedDataset.from_tensors(ragged()).save(tmp_path / "d")
    x = load_file(tmp_path / "d" / TENSORS)["train_x"].clone()
    x[3] = torch.nan
    keep(tmp_path / "d", "train_x", train_x=x)
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
