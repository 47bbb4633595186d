"""CIFAR's pickled batches, dealt by classes; torchvision's own reader is the reference."""

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from fedmtl.data import ByClasses, Dirichlet, read_cifar
from fedmtl.errors import ConfigError, DataError


@pytest.fixture
def any_files(monkeypatch):
    """The checksums are those of the original files."""
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda file, md5: Path(file).is_file()
    )


def write_cifar(root: Path, each: int, *, classes: int = 10, seed: int = 0) -> Path:
    """``each`` train images and 2 test images a class, as torchvision extracts them."""
    generator = np.random.default_rng(seed)
    folder = root / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python")
    folder.mkdir(parents=True)
    field = "labels" if classes == 10 else "fine_labels"
    names = [f"data_batch_{i}" for i in range(1, 6)] if classes == 10 else ["train"]
    labels = generator.permutation(np.repeat(np.arange(classes), each))
    for name, part in zip(names, np.array_split(labels, len(names)), strict=True):
        write_batch(folder / name, part, field, generator)
    tested = generator.permutation(np.repeat(np.arange(classes), 2))
    write_batch(folder / ("test_batch" if classes == 10 else "test"), tested, field, generator)
    meta, key = ("batches.meta", "label_names") if classes == 10 else ("meta", "fine_label_names")
    (folder / meta).write_bytes(pickle.dumps({key: [str(i) for i in range(classes)]}))
    return folder


def write_batch(file: Path, labels: np.ndarray, field: str, generator: np.random.Generator) -> None:
    data = generator.integers(0, 256, size=(len(labels), 3072), dtype=np.uint8)
    file.write_bytes(
        pickle.dumps({"data": data, field: labels.tolist(), "batch_label": "x"}, protocol=2)
    )


@pytest.mark.parametrize(("classes", "reference"), [(10, CIFAR10), (100, CIFAR100)])
def test_rows_agree_with_torchvision_and_every_client_has_its_classes(
    tmp_path, any_files, classes, reference
):
    write_cifar(tmp_path, 6, classes=classes)
    data = read_cifar(tmp_path, classes=classes, partition=ByClasses(classes // 5, 5), seed=3)
    assert (len(data), data.classes, data.spec.shape) == (classes // 5, classes, (3, 32, 32))
    for side, train in (("train", True), ("test", False)):
        part = data.side(side)
        assert set(part.counts.tolist()) == {5 * (6 if train else 2)}
        plain = reference(tmp_path, train=train)
        pairs = zip(plain.data.transpose(0, 3, 1, 2), plain.targets, strict=True)
        rows = Counter((image.tobytes(), y) for image, y in pairs)
        assert (
            Counter((x.numpy().tobytes(), int(y)) for x, y in zip(part.x, part.y, strict=True))
            == rows
        )
    for train_y, test_y in zip(
        *(side.y.split(side.counts.tolist()) for side in (data.train, data.test)), strict=True
    ):
        own = set(train_y.tolist()), set(test_y.tolist())
        assert own[0] == own[1]
        assert len(own[0]) == 5
    x, _ = data.gather("train", torch.arange(4))
    assert 0.0 <= float(x.min()) <= float(x.max()) <= 1.0
    assert data.domain is not None
    assert data.domain.l2 == pytest.approx(3072**0.5)


@pytest.mark.parametrize(
    ("clients", "per_client", "classes"), [(7, 3, 10), (20, 10, 10), (11, 4, 5), (50, 2, 10)]
)
def test_classes_are_dealt_evenly_and_sizes_are_equal(clients, per_client, classes):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), 60))
    parts = ByClasses(clients, per_client).deal(y, 5)
    assert len({len(rows) for rows in parts.values()}) == 1
    used = np.concatenate(list(parts.values()))
    assert len(used) == len(set(used.tolist()))
    having = Counter()
    for rows in parts.values():
        counts = Counter(y[rows].tolist())
        assert len(counts) == per_client
        assert len(set(counts.values())) == 1
        having.update(counts.keys())
    assert max(having.values()) - min(having.values()) <= 1
    other = ByClasses(clients, per_client).deal(y[::-1], 5)
    for name, rows in parts.items():
        assert set(y[rows]) == set(y[::-1][other[name]])  # whatever the pool
    third = ByClasses(clients, per_client).deal(y, 6)
    assert per_client == classes or any(
        set(y[rows]) != set(y[third[name]]) for name, rows in parts.items()
    )


def test_files_that_are_not_the_original_ones_are_refused_before_they_are_opened(tmp_path):
    refused = r"cifar-10-batches-py is missing or damaged \(Dataset not found or corrupted.*give the folder into which"
    with pytest.raises(DataError, match=refused):
        read_cifar(tmp_path)
    folder = write_cifar(tmp_path, 5)
    (folder / "data_batch_1").write_bytes(pickle.dumps(Evil()))
    for root in (tmp_path, folder):
        with pytest.raises(DataError, match=refused):
            read_cifar(root)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


def test_impossible_deals_are_refused(tmp_path, any_files):
    write_cifar(tmp_path, 5)
    with pytest.raises(
        ConfigError,
        match=r"ByClasses.clients is 50: class \d has 5 examples for 25 of them; ask for fewer",
    ):
        read_cifar(tmp_path, partition=ByClasses(50, 5))
    with pytest.raises(
        ConfigError, match="classes_per_client is 11, but there are only 10 classes"
    ):
        read_cifar(tmp_path, partition=ByClasses(2, 11))
    with pytest.raises(ConfigError, match="classes is 20; accepted: 10, 100"):
        read_cifar(tmp_path, classes=20)


def test_another_partition_deals_all_images_and_holds_out_some_of_each_client(tmp_path, any_files):
    write_cifar(tmp_path, 20)
    data = read_cifar(tmp_path, partition=Dirichlet(6, 0.5), test_fraction=0.25, seed=1)
    assert len(data.train) + len(data.test) == 220
    assert len({x.numpy().tobytes() for side in (data.train, data.test) for x in side.x}) == 220
    counts = data.train.counts + data.test.counts
    assert data.test.counts.tolist() == [max(1, round(0.25 * n)) for n in counts.tolist()]
    assert len({frozenset(y.tolist()) for y in data.train.y.split(data.train.counts.tolist())}) > 1
    assert (data.transform, data.classes) == (
        read_cifar(tmp_path, partition=ByClasses(2, 5)).transform,
        10,
    )
