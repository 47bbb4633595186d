"""Folders of images and tables of them, and pools of any kind that a partition deals to clients."""

import json
import os

import pandas as pd
import pytest
import torch
from PIL import Image

from fedmtl.data import (
    ByClasses,
    Dirichlet,
    Shards,
    from_partition,
    read_images,
    read_table,
)
from fedmtl.errors import ConfigError, DataError
from tests.test_cli import command

from .test_celeba import everything

LABELS = ("cat", "dog", "eel")


def draw(file, grey):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 7), (grey, 255 - grey, 7)).save(file)


def folders(root, clients=("anna", "ben", "7"), each=4):
    """Images of one colour each in root/CLIENT/LABEL, and what they are by client."""
    rows, grey = {}, 0
    for client in clients:
        for number in range(each):
            label, grey = LABELS[grey % 3], grey + 1
            draw(root / client / label / f"{number}.png", grey)
            rows.setdefault(client, []).append(((grey, 255 - grey, 7), LABELS.index(label)))
    return {client: sorted(own) for client, own in rows.items()}


def pool(root, count=60):
    """Images of one colour each in root/LABEL."""
    for number in range(count):
        draw(root / LABELS[number % 3] / f"{number:02d}.png", number)
    return sorted(((number, 255 - number, 7), number % 3) for number in range(count))


def test_a_folder_a_client_and_in_it_a_folder_a_label(tmp_path):
    rows = folders(tmp_path / "pets")
    data = read_images(tmp_path / "pets", size=(4, 5))
    assert (data.ids, data.classes, data.spec.shape, data.name) == (
        ("7", "anna", "ben"),
        3,
        (3, 4, 5),
        "pets",
    )
    assert everything(data) == rows
    assert data.inferred == ("classes",)  # which labels occur is in the records
    assert data.domain is not None
    assert data.domain.l1 == 60
    given = read_images(tmp_path / "pets", size=4, labels=["eel", "cow", "dog", "cat"])
    assert (given.classes, given.inferred) == (4, ())
    number = {0: 3, 1: 2, 2: 0}
    assert everything(given) == {
        client: sorted((c, number[y]) for c, y in own) for client, own in rows.items()
    }
    assert len(read_images(tmp_path / "pets", size=4, clients=2)) == 2


def test_images_that_change_places_are_decoded_anew(tmp_path):
    first, second, moved = (tmp_path / "pets" / "anna" / label / "x.bmp" for label in LABELS)
    for file, grey in ((first, 10), (second, 20)):
        draw(file, grey)
        os.utime(file, ns=(1, 1))  # as of copies that keep their times
    options = {"size": 4}
    assert everything(read_images(tmp_path / "pets", **options)) == {
        "anna": [((10, 245, 7), 0), ((20, 235, 7), 1)]
    }
    moved.parent.mkdir()
    first.rename(moved)
    assert everything(read_images(tmp_path / "pets", **options)) == {
        "anna": [((10, 245, 7), 1), ((20, 235, 7), 0)]
    }


def test_a_table_names_image_client_and_label(tmp_path):
    rows = folders(tmp_path / "pets")
    table = pd.DataFrame(
        [
            (f"{f.relative_to(tmp_path / 'pets')}", f.parts[-3], f.parts[-2])
            for f in (tmp_path / "pets").rglob("*.png")
        ],
        columns=["file_name", "owner", "animal"],
    )
    table.to_csv(tmp_path / "pets" / "metadata.csv", index=False)
    columns = {"client": "owner", "target": "animal", "size": 8}
    data = read_images(tmp_path / "pets", table="metadata.csv", **columns)
    assert everything(data) == rows
    assert (
        read_images(tmp_path / "pets", table=table, **columns).fingerprint() == data.fingerprint()
    )
    for change, error, message in (
        (
            {"table": "none.csv"},
            DataError,
            r"pets/none\.csv cannot be read as a table: it does not exist",
        ),
        (
            {"client": "who"},
            DataError,
            r"metadata\.csv: column 'who' is missing; the columns are 'file_name', 'owner'",
        ),
        ({"target": None}, ConfigError, r"read_images\.target is None; give the column"),
        (
            {"client": None},
            ConfigError,
            r"no client column; give the column of each row's client, or a partition",
        ),
        (
            {"partition": Dirichlet(2, 1.0)},
            ConfigError,
            r"both a client column and a partition; give the column",
        ),
        (
            {"labels": ["cat", "dog"]},
            DataError,
            r"column 'animal' holds 'eel'; accepted: the labels 'cat', 'dog'",
        ),
        (
            {"labels": ["cat", "cat"]},
            ConfigError,
            r"data\.labels is \['cat', 'cat'\]; it must be distinct",
        ),
        (
            {"table": None},
            ConfigError,
            r"read_images\.table is None, so the folders name client and target",
        ),
    ):
        with pytest.raises(error, match=message):
            read_images(tmp_path / "pets", **{"table": "metadata.csv"} | columns | change)


def test_other_layouts_and_missing_images_are_refused(tmp_path):
    with pytest.raises(DataError, match="none is no folder"):
        read_images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no images; accepted: \.jpg"):
        read_images(tmp_path / "empty")
    pool(tmp_path / "pool", 6)
    with pytest.raises(
        DataError,
        match=r"cat/00\.png is 1 folders deep; accepted: root/CLIENT/LABEL/FILE, or a table",
    ):
        read_images(tmp_path / "pool")
    table = pd.DataFrame({"file_name": ["a.png", "cat/00.png"] * 2, "who": "x", "what": "y"})
    with pytest.raises(
        DataError, match=r"a\.png does not exist; every file that is listed must be there"
    ):
        read_images(tmp_path / "pool", table=table, client="who", target="what")


@pytest.mark.parametrize("partition", [Dirichlet(5, 0.5), Shards(5), ByClasses(5, 2)])
def test_a_pool_of_images_of_rows_and_of_tensors_is_dealt_alike(tmp_path, partition):
    rows = pool(tmp_path / "pool")
    images = read_images(tmp_path / "pool", partition=partition, size=4, seed=3)
    order = sorted(range(60), key=lambda n: (LABELS[n % 3], n))  # of the paths
    frame = pd.DataFrame({"grey": order, "animal": [LABELS[n % 3] for n in order]})
    table = read_table(frame, target="animal", partition=partition, labels=LABELS, seed=3)
    x, y = torch.tensor(order)[:, None].float(), torch.tensor([n % 3 for n in order])
    tensors = from_partition(x, y, partition, seed=3, classes=3)
    assert images.ids == table.ids == tensors.ids == tuple(f"client-{i}" for i in range(5))
    assert table.fingerprint() == tensors.fingerprint()
    found = everything(images)
    assert {c: [colour[0] for colour, _ in own] for c, own in found.items()} == {
        name: sorted(
            int(v) for side in ("train", "test") for v in tensors.subset([name]).side(side).x[:, 0]
        )
        for name in tensors.ids
    }
    used = sorted(row for own in found.values() for row in own)
    assert used == rows if not isinstance(partition, ByClasses) else set(used) <= set(rows)


def test_the_command_deals_pools(tmp_path):
    pool(tmp_path / "pool")
    words = (
        "data=images",
        "data.root=pool",
        "data.size=8",
        "data.labels=[cat,dog,eel]",
        "data/partition=dirichlet",
    )
    run = "data.partition.clients=4 rounds=1 baselines=[] finetune=none schedule=full hydra.run.dir=run"
    done = command(*words, *run.split(), "data.partition.alpha=0.3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "proximal_point on pool: 4 clients" in done.stdout
    assert json.loads((tmp_path / "run/private/result.json").read_text())["clients"] == 4
    refused = command(*words, "data.partition.alpha=0", cwd=tmp_path)
    assert refused.returncode == 2
    assert "data.partition.alpha is 0; it must be a finite number above 0" in refused.stderr
