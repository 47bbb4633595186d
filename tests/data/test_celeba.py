"""CelebA in the layout of torchvision.datasets.CelebA and as LEAF JSON, and the cache of decoded images."""

import hashlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CelebA

from fedmtl.data import FederatedDataset, read_celeba
from fedmtl.data.readers import images
from fedmtl.data.readers.images import cached_images
from fedmtl.errors import ConfigError, DataError

from .rows import leaf

NAMES = ("Bald", "Smiling", "Young")
BOXES = ("list_bbox_celeba.txt", "list_landmarks_align_celeba.txt")


def write_celeba(
    root: Path, counts: dict[int, int], *, seed: int = 0, size: tuple[int, int] = (218, 178)
) -> Path:
    """A small folder in CelebA's own format: ``counts`` images of each identity, in mixed order, grey by number."""
    base = root / "celeba"
    (base / "img_align_celeba").mkdir(parents=True)
    generator = np.random.default_rng(seed)
    identities = generator.permutation(np.repeat(list(counts), list(counts.values())))
    labels = generator.choice([-1, 1], size=(len(identities), len(NAMES)))
    people, attributes, parts, boxes = [], [str(len(identities)), " ".join(NAMES)], [], []
    for number, (identity, row) in enumerate(zip(identities, labels, strict=True), start=1):
        name = f"{number:06d}.jpg"
        grey = 20 + (number * 7) % 200
        Image.new("RGB", (size[1], size[0]), (grey, 255 - grey, 128)).save(
            base / "img_align_celeba" / name
        )
        people.append(f"{name} {identity}")
        attributes.append(f"{name} " + " ".join(f"{value:2d}" for value in row))
        parts.append(f"{name} {identity % 3}")
        boxes.append(f"{name} 1 2 3 4")
    (base / "identity_CelebA.txt").write_text("\n".join(people) + "\n")
    (base / "list_attr_celeba.txt").write_text("\n".join(attributes) + "\n")
    (base / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")
    for file in BOXES:
        (base / file).write_text("\n".join([str(len(identities)), "a b c d", *boxes]) + "\n")
    return base


def everything(data: FederatedDataset) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """Every client's (mean colour of the image, label) pairs, train and test together, sorted."""
    found = {}
    for i, client in enumerate(data.ids):
        own = []
        for side in ("train", "test"):
            part = data.side(side)
            x, y = data.gather(side, torch.arange(int(part.offsets[i]), int(part.offsets[i + 1])))
            colours = (x.mean((2, 3)) * 255).round().int().tolist()
            own += [(tuple(colour), int(label)) for colour, label in zip(colours, y, strict=True)]
        found[client] = sorted(own)
    return found


def test_rows_agree_with_torchvisions_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(
        CelebA, "_check_integrity", lambda self: True
    )  # the checksums are those of the full files
    write_celeba(tmp_path, {7: 6, 12: 5, 3: 4, 30: 9})
    data = read_celeba(tmp_path, target="Smiling", size=(12, 10))
    assert data.ids == ("7", "12", "30")  # identity 3 has fewer than 5 images
    assert (data.spec.shape, data.classes) == ((3, 12, 10), 2)
    expected: dict[str, list] = {}
    for image, (attributes, identity) in CelebA(
        tmp_path, split="all", target_type=["attr", "identity"]
    ):
        colour = np.asarray(image).reshape(-1, 3).mean(0).round().astype(int)
        expected.setdefault(str(int(identity)), []).append(
            (tuple(colour.tolist()), int(attributes[1]))
        )
    found = everything(data)
    for client in data.ids:
        assert [label for _, label in found[client]] == [
            label for _, label in sorted(expected[client])
        ]
        np.testing.assert_allclose(
            [c for c, _ in found[client]], [c for c, _ in sorted(expected[client])], atol=1
        )
    x, _ = data.gather("train", torch.arange(3))
    flat = x.reshape(len(x), -1)
    assert data.domain is not None
    assert float(flat.norm(dim=1).max()) <= data.domain.l2 == pytest.approx(360**0.5)
    assert float(flat.abs().sum(1).max()) <= data.domain.l1 == 360


def test_a_draw_of_celebrities(tmp_path):
    write_celeba(tmp_path, {1: 5, 2: 5, 4: 5, 6: 5, 7: 5}, size=(20, 20))
    settings = {"size": 8}
    drawn = read_celeba(tmp_path, clients=2, seed=1, **settings)
    assert len(drawn) == 2
    assert len(np.load(drawn.transform.path)) == 10  # no image of another celebrity is decoded
    assert drawn.ids == read_celeba(tmp_path, clients=2, seed=1, **settings).ids
    assert (
        len({read_celeba(tmp_path, clients=2, seed=seed, **settings).ids for seed in range(8)}) > 1
    )
    both = everything(read_celeba(tmp_path, **settings))
    assert everything(drawn) == {client: both[client] for client in drawn.ids}
    with pytest.raises(ConfigError, match="clients is 9, but only 5 have enough examples"):
        read_celeba(tmp_path, clients=9, **settings)
    with pytest.raises(ConfigError, match=r"target is 'Smile'; accepted: Bald, Smiling, Young"):
        read_celeba(tmp_path, target="Smile")
    with pytest.raises(ConfigError, match=r"size is \(8,\); it must be a number of pixels"):
        read_celeba(tmp_path, size=(8,))
    with pytest.raises(
        DataError, match=r"does not exist; give the folder of list_attr_celeba.txt, a LEAF"
    ):
        read_celeba(tmp_path / "nothing")


def test_leaf_json_names_the_images(tmp_path):
    base = write_celeba(tmp_path, {1: 6, 2: 6}, size=(20, 20))
    whole = read_celeba(tmp_path, size=8)
    people = [line.split() for line in (base / "identity_CelebA.txt").read_text().splitlines()]
    smiles = [line.split() for line in (base / "list_attr_celeba.txt").read_text().splitlines()[2:]]
    users = {}
    for (name, identity), row in zip(people, smiles, strict=True):
        images_of, labels_of = users.setdefault(identity, ([], []))
        images_of.append(name)
        labels_of.append(int(row[2] == "1"))
    place, content = tmp_path / "leaf" / "data", leaf(users)
    (place / "all_data").mkdir(parents=True)
    (place / "all_data" / "all_data.json").write_text(json.dumps(content))
    (place / "raw").mkdir()
    (base / "img_align_celeba").rename(place / "raw" / "img_align_celeba")
    found = read_celeba(place / "all_data", size=8)
    assert everything(found) == everything(whole)
    content["user_data"]["1"]["x"][2] = "../2.jpg"
    (place / "all_data" / "all_data.json").write_text(json.dumps(content))
    with pytest.raises(
        DataError,
        match=r"client '1', example 2, field 'x' holds '\.\./2\.jpg'; accepted: the name of",
    ):
        read_celeba(place / "all_data", size=8)


def test_images_are_decoded_once_and_again_when_they_change(tmp_path, monkeypatch):
    base = write_celeba(tmp_path, {1: 5, 2: 6}, size=(20, 20))
    first = read_celeba(tmp_path, size=8)
    file = next((base / "fedmtl_cache").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("fedmtl.data.readers.images.decode", None)  # nothing is decoded
        again = read_celeba(tmp_path, size=8, seed=3, test_fraction=0.4)
    assert everything(again) == everything(first)
    assert [f.name for f in (base / "fedmtl_cache").iterdir()] == [file.name]
    changed = base / "img_align_celeba" / "000002.jpg"
    Image.new("RGB", (20, 20), (255, 255, 255)).save(changed)
    other = read_celeba(tmp_path, size=8)
    colours = [colour for own in everything(other).values() for colour, _ in own]
    assert (255, 255, 255) in colours
    assert len(list((base / "fedmtl_cache").iterdir())) == 2
    assert other.fingerprint() != first.fingerprint()


def test_a_killed_process_leaves_no_file_under_the_final_name(tmp_path, monkeypatch):
    base = write_celeba(tmp_path, {1: 40}, size=(20, 20))
    cache = base / "fedmtl_cache"

    def die(*given, **options):
        assert any(cache.iterdir())
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(images, "decode", die)
        process = multiprocessing.get_context("fork").Process(
            target=read_celeba, args=(tmp_path,), kwargs={"size": 8}
        )
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [file.suffix for file in cache.iterdir()] == [".tmp"]
    left = next(cache.iterdir())
    os.utime(left, (time.time() - 100_000,) * 2)
    data = read_celeba(tmp_path, size=8)
    assert [file.suffix for file in cache.iterdir()] == [".npy"]
    x, _ = data.gather("train", torch.arange(len(data.train)))
    assert float(x.flatten(1).max(1).values.min()) > 0.3  # no image is missing


def test_a_cache_that_cannot_be_written_(tmp_path, capsys):
    write_celeba(tmp_path, {1: 5}, size=(20, 20))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"images cannot be cached there .*; give another folder as cache"
    ):
        read_celeba(tmp_path, size=8, cache=tmp_path / "file")
    made = cached_images(
        tmp_path / "celeba/img_align_celeba", ["000001.jpg"], (4, 4), tmp_path / "own", name="one"
    )
    assert np.load(made).shape == (1, 3, 4, 4)
    assert [f.name for f in (tmp_path / "own").iterdir()] == [made.name]


def test_other_files_than_the_original_are_read_and_noted(tmp_path, monkeypatch):
    base = write_celeba(tmp_path, {7: 6, 12: 5}, size=(20, 20))
    data = read_celeba(tmp_path, size=8)
    note = "not the original CelebA: {} have other checksums"
    assert data.notes == (note.format("identity_CelebA.txt and list_attr_celeba.txt"),)
    for file in (*BOXES, "list_eval_partition.txt"):  # which have no part in it
        (base / file).unlink()
    assert read_celeba(base, size=8).fingerprint() == data.fingerprint()

    def sums(*names: str) -> list[tuple[str, str, str]]:
        return [("", hashlib.md5((base / name).read_bytes()).hexdigest(), name) for name in names]

    known = [entry for entry in CelebA.file_list if entry[2] == "list_attr_celeba.txt"]
    monkeypatch.setattr(CelebA, "file_list", [*sums("identity_CelebA.txt"), *known])
    assert read_celeba(tmp_path, size=8).notes == (note.format("list_attr_celeba.txt"),)
    monkeypatch.setattr(CelebA, "file_list", sums("identity_CelebA.txt", "list_attr_celeba.txt"))
    assert read_celeba(tmp_path, size=8).notes == ()


def test_a_subset_in_any_order_whose_people_have_names(tmp_path):
    base = write_celeba(tmp_path, {7: 6, 12: 5}, size=(20, 20))
    whole = everything(read_celeba(tmp_path, size=8))
    file = base / "list_attr_celeba.txt"
    _, names, *rows = file.read_text().splitlines()
    people = dict(line.split() for line in (base / "identity_CelebA.txt").read_text().splitlines())
    mine = [row for row in rows if people[row.split()[0]] == "7"]
    file.write_text("\n".join([str(len(mine)), names, *reversed(mine)]))
    (base / "identity_CelebA.txt").write_text(
        "".join(f"{name} anna-{who}\n" for name, who in people.items())
    )
    assert everything(read_celeba(tmp_path, size=8)) == {"anna-7": whole["7"]}


LIST, PEOPLE = "list_attr_celeba.txt", "identity_CelebA.txt"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            LIST,
            "5\n",
            "6\n",
            r"list_attr_celeba\.txt has 5 images and says 6 in its first line, .*; it may be truncated",
        ),
        (
            LIST,
            "5\n",
            "",
            r"list_attr_celeba\.txt: line 1 is 'Bald Smiling Young'; accepted: the number of images",
        ),
        (
            LIST,
            "000003.jpg",
            "000003.jpg 1",
            r"line 5 is '000003\.jpg 1 .*'; accepted: the name of an image and -1 or 1 f",
        ),
        (LIST, "000003.jpg", "a/b.jpg", r"line 5 is 'a/b\.jpg .*'; accepted: the name of an image"),
        (LIST, "000003.jpg", "000002.jpg", r"line 5: image '000002\.jpg' occurs twice"),
        (
            LIST,
            "000003.jpg",
            "000009.jpg",
            r"identity_CelebA\.txt has no line of '000009\.jpg', which list_attr",
        ),
        (LIST, None, "", r"list_attr_celeba\.txt is ''; accepted: the number of images"),
        (
            PEOPLE,
            "000003.jpg 1",
            "000003.jpg",
            r"identity_CelebA\.txt: line 3 is '000003\.jpg'; accepted: the name of an i",
        ),
        (
            PEOPLE,
            "000003.jpg",
            "000002.jpg",
            r"identity_CelebA\.txt: line 3: image '000002\.jpg' occurs twice",
        ),
        (
            PEOPLE,
            None,
            "\udcff",
            r"identity_CelebA\.txt cannot be read \(.*utf-8.*\); give the folder celeba with",
        ),
    ],
)
def test_malformed_lists_are_refused_by_line(tmp_path, file, old, new, message):
    path = write_celeba(tmp_path, {1: 5}, size=(4, 4)) / file
    text = path.read_text()
    changed = new if old is None else text.replace(old, new, 1)
    assert changed != text
    path.write_bytes(changed.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        read_celeba(tmp_path, size=8)


def test_a_label_that_is_not_1_or_minus_1_is_refused(tmp_path):
    file = write_celeba(tmp_path, {1: 5}, size=(4, 4)) / LIST
    rows = file.read_text().splitlines()
    file.write_text("\n".join([*rows[:4], "000003.jpg 1 0 1", *rows[5:]]))
    with pytest.raises(
        DataError,
        match=r"line 5 is '000003\.jpg 1 0 1'; accepted: .* -1 or 1 for each of 3 attributes",
    ):
        read_celeba(tmp_path, size=8)


def test_lists_that_are_missing_are_named(tmp_path):
    (write_celeba(tmp_path, {1: 5}, size=(4, 4)) / PEOPLE).unlink()
    with pytest.raises(
        DataError,
        match=r"identity_CelebA\.txt cannot be read \(.*No such file.*\); give the folder",
    ):
        read_celeba(tmp_path, size=8)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:400])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda b: (b / "img_align_celeba").rename(b / "elsewhere"),
            r"img_align_celeba is missing; it must",
        ),
        (lambda b: (b / "img_align_celeba/000003.jpg").unlink(), r"000003\.jpg does not exist"),
        (
            lambda b: cut(b / "img_align_celeba/000003.jpg"),
            r"000003\.jpg is not a readable image .*truncated",
        ),
    ],
)
def test_missing_and_cut_images_are_named(tmp_path, break_it, message):
    break_it(write_celeba(tmp_path, {1: 5, 2: 5}, size=(60, 60)))
    with pytest.raises(DataError, match=message):
        read_celeba(tmp_path, size=8)
