"""Test parts whose clients are in no training part, as LEAF's own preprocessing leaves them with ``-t user``."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedmtl import models
from fedmtl.data import FederatedDataset, read_celeba, read_femnist, read_leaf, read_stackoverflow
from fedmtl.errors import DataError
from tests import small

from .rows import leaf
from .test_femnist_forms import write_h5, write_parquet, writers
from .test_stackoverflow import POSTS
from .test_stackoverflow import write_h5 as write_posts

REFUSED = (
    r"no client has both training and test examples; accepted: .*test_fraction=0\.2, which divides .* anew, or the "
    r"training examples alone, with the clients of the test side left to Result\.adapt \(fedmtl adapt\)\.$"
)
SEEN, UNSEEN = ("f0", "f1", "f2"), ("f3", "f4")


def users(names: tuple[str, ...]) -> dict[str, tuple[list, list]]:
    return {name: ([[0.1 * i, 1.0] for i in range(4)], [0, 1, 1, 0]) for name in names}


def write_leaf(root: Path, parts: dict[str, dict]) -> None:
    for side, clients in parts.items():
        (root / side).mkdir(parents=True)
        (root / side / "all_data.json").write_text(json.dumps(leaf(clients)))


def of_leaf(root: Path, test_fraction: float | None) -> FederatedDataset:
    write_leaf(root, {"train": users(SEEN), "test": users(UNSEEN)})
    return read_leaf(root, classes=2, test_fraction=test_fraction)


def of_femnist_leaf(root: Path, test_fraction: float | None) -> FederatedDataset:
    images = {name: (np.ones((4, 784)).tolist(), [0, 1, 2, 3]) for name in (*SEEN, *UNSEEN)}
    write_leaf(
        root, {"train": {n: images[n] for n in SEEN}, "test": {n: images[n] for n in UNSEEN}}
    )
    return read_femnist(root, test_fraction=test_fraction)


def of_femnist_h5(root: Path, test_fraction: float | None) -> FederatedDataset:
    write_h5(root / "fed_emnist_train.h5", writers(dict.fromkeys(SEEN, 4)))
    write_h5(root / "fed_emnist_test.h5", writers(dict.fromkeys(UNSEEN, 4)))
    return read_femnist(root, test_fraction=test_fraction)


def of_femnist_parquet(root: Path, test_fraction: float | None) -> FederatedDataset:
    write_parquet(root / "train.parquet", writers(dict.fromkeys(SEEN, 4)))
    write_parquet(root / "test.parquet", writers(dict.fromkeys(UNSEEN, 4)))
    return read_femnist(root, test_fraction=test_fraction)


def of_celeba(root: Path, test_fraction: float | None) -> FederatedDataset:
    (root / "img_align_celeba").mkdir(parents=True)
    names = {client: [f"{client}{i}.png" for i in range(5)] for client in (*SEEN, *UNSEEN)}
    for name in chain.from_iterable(names.values()):
        Image.new("RGB", (4, 4)).save(root / "img_align_celeba" / name)
    faces = {client: (own, [0, 1, 0, 1, 0]) for client, own in names.items()}
    write_leaf(root, {"train": {n: faces[n] for n in SEEN}, "test": {n: faces[n] for n in UNSEEN}})
    return read_celeba(root, size=4, test_fraction=test_fraction, cache=root / "cache")


def of_stackoverflow(root: Path, test_fraction: float | None) -> FederatedDataset:
    write_posts(root / "stackoverflow_train.h5", dict(zip(SEEN, POSTS.values(), strict=True)))
    write_posts(
        root / "stackoverflow_test.h5", dict(zip(UNSEEN, list(POSTS.values())[:2], strict=True))
    )
    return read_stackoverflow(root, tokens=5, tags=2, test_fraction=test_fraction)


def of_tensors(root: Path, test_fraction: float | None) -> FederatedDataset:
    train, test = (
        {name: tuple(map(np.array, pair)) for name, pair in users(n).items()}
        for n in (SEEN, UNSEEN)
    )
    return FederatedDataset.from_tensors(train, test=test, classes=2, test_fraction=test_fraction)


def of_columns(root: Path, test_fraction: float | None) -> FederatedDataset:
    train, test = (
        pd.DataFrame(
            [(n, x, y) for n in names for x, y in ((0.5, 0), (1.5, 1), (2.5, 1))],
            columns=["who", "x", "y"],
        )
        for names in (SEEN, UNSEEN)
    )
    columns = {"client": "who", "target": "y", "features": "x"}
    return FederatedDataset.from_columns(
        train, test=test, classes=2, test_fraction=test_fraction, **columns
    )


WAYS = (
    of_leaf,
    of_femnist_leaf,
    of_femnist_h5,
    of_femnist_parquet,
    of_celeba,
    of_stackoverflow,
    of_tensors,
    of_columns,
)


@pytest.mark.parametrize("read", WAYS)
def test_a_test_part_of_unseen_clients_is_refused_or_divided_anew(tmp_path, read):
    with pytest.raises(DataError, match=REFUSED) as refused:
        read(tmp_path / "kept", None)
    assert str(refused.value).count(". ") == 0  # one sentence
    assert not list(tmp_path.rglob("*.npy"))  # and no image is decoded before it
    anew = read(tmp_path / "anew", 0.25)
    assert sorted(anew.ids) == [*SEEN, *UNSEEN]
    assert (anew.train.counts > 0).all()
    assert (anew.test.counts > 0).all()


def test_unseen_clients_of_leaf_are_scored_by_adapting_to_them(tmp_path):
    """What the refusal names: the training part alone trains, and its model adapts to the clients of the test part."""
    write_leaf(tmp_path, {"train": users(SEEN), "test": users(UNSEEN)})
    trained = small.trainer(
        data=read_leaf(tmp_path / "train", classes=2),
        model=models.softmax_regression(),
        privacy=None,
    ).fit()
    adapted = trained.adapt(read_leaf(tmp_path / "test", classes=2))
    assert adapted.ids == UNSEEN
    assert len(adapted.personal) == 2
