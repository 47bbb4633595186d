"""StackOverflow tag prediction from the HDF5 of TensorFlow Federated and from LEAF JSON."""

import json
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from fedmtl.data import read_stackoverflow
from fedmtl.errors import ConfigError, DataError

POSTS = {
    "11": [
        ("how do i sort a list in python", "sort a list", "python|sorting"),
        ("use a dict", "dict", "python"),
    ],
    "12": [
        ("git push fails with a conflict", "push", "git"),
        ("a merge", "git merge", "git|merge|rare-tag"),
    ],
    "13": [
        ("the list is a list", "", "sorting|list"),
        ("css float", "css", "css"),
        ("git log", "", "git"),
    ],
}


def write_h5(file: Path, posts=POSTS) -> Path:
    """With the fields and types of TensorFlow Federated's file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as content:
        for client, rows in posts.items():
            group = content.create_group(f"examples/{client}")
            for field, place in (("tokens", 0), ("title", 1), ("tags", 2)):
                values = [row[place].encode() for row in rows]
                group.create_dataset(
                    field, data=np.array(values, dtype=object), dtype=h5py.special_dtype(vlen=bytes)
                )
            group["score"] = np.zeros(len(rows), np.int64)
            group.create_dataset("type", data=np.array([b"question"] * len(rows)))
    return file


def counted(place: int, split: str | None) -> list[str]:
    """The words of a column by the number of posts that have them, then by name."""
    found = Counter()
    for rows in POSTS.values():
        for row in rows:
            text = f"{row[0]} {row[1]}" if place == 0 else row[2]
            found.update(set(text.split(split)))
    return sorted(found, key=lambda word: (-found[word], word))


def by_hand(rows, words: list[str], tags: list[str]) -> list[tuple[list[float], list[int]]]:
    made = []
    for tokens, title, own in rows:
        text = f"{tokens} {title}".split()
        bag = [text.count(word) / len(text) for word in words]
        made.append((bag, [int(tag in own.split("|")) for tag in tags]))
    return made


def rows_of(data, client: str) -> list[tuple[list[float], list[int]]]:
    i, found = data.ids.index(client), []
    for side in ("train", "test"):
        part = data.side(side)
        x, y = data.gather(side, torch.arange(int(part.offsets[i]), int(part.offsets[i + 1])))
        found += [
            ([round(v, 5) for v in a], b) for a, b in zip(x.tolist(), y.tolist(), strict=True)
        ]
    return sorted(found)


def test_bags_of_words_and_tags_agree_with_a_plain_count(tmp_path):
    data = read_stackoverflow(write_h5(tmp_path / "x.h5"), tokens=7, tags=4)
    words, tags = counted(0, None)[:7], counted(2, "|")[:4]
    assert data.ids == ("11", "12", "13")
    assert (data.spec.shape, data.spec.labels, data.classes) == ((7,), 4, 2)
    assert data.train.x.layout == torch.sparse_csr
    assert data.train.y.dtype == torch.uint8
    for client, rows in POSTS.items():
        expected = [([round(v, 5) for v in a], b) for a, b in by_hand(rows, words, tags)]
        assert rows_of(data, client) == sorted(expected)
    assert data.notes == (
        "the 7 commonest tokens were counted in the records themselves",
        "the 4 commonest tags were counted in the records themselves",
    )
    everything = data.train.x.values().double()
    assert float(everything.max()) <= 1
    x, y = data.gather("train", torch.arange(len(data.train)), dtype=torch.float64)
    assert y.dtype == torch.int64
    assert data.domain is not None
    assert float(x.sum(1).max()) <= data.domain.l1 == 1.0


def test_public_counts_choose_the_words_and_nothing_is_noted(tmp_path):
    file = write_h5(tmp_path / "x.h5")
    (tmp_path / "stackoverflow.word_count").write_text("the 90\ngit 80\nlist 70\npush 60\n")
    (tmp_path / "stackoverflow.tag_count").write_text(
        json.dumps({"css": 5, "git": 50, "merge": 20, "perl": 9})
    )
    data = read_stackoverflow(file, tokens=3, tags=3)
    expected = by_hand(POSTS["12"], ["the", "git", "list"], ["git", "merge", "perl"])
    assert rows_of(data, "12") == sorted(([round(v, 5) for v in a], b) for a, b in expected)
    assert data.notes == ()
    with pytest.raises(DataError, match=r"nowhere/stackoverflow\.word_count cannot be read"):
        read_stackoverflow(file, counts=tmp_path / "nowhere")
    (tmp_path / "stackoverflow.word_count").write_text("the 90\ngit\n")
    with pytest.raises(
        DataError,
        match=r"stackoverflow\.word_count: line 2 is 'git'; accepted: a word and how often",
    ):
        read_stackoverflow(file)


def test_the_files_of_tff_are_a_train_and_a_test_part(tmp_path):
    write_h5(tmp_path / "stackoverflow_train.h5")
    later = {
        "12": POSTS["12"][:1],
        "99": POSTS["11"],
    }  # a user who has written nothing before is left out
    write_h5(tmp_path / "stackoverflow_test.h5", later)
    data = read_stackoverflow(tmp_path, tokens=9, tags=4, test_fraction=None)
    assert (data.ids, data.test.counts.tolist()) == (("11", "12", "13"), [0, 1, 0])
    pooled = read_stackoverflow(tmp_path, tokens=9, tags=4, max_examples=2)
    assert pooled.ids == ("11", "12", "13", "99")  # divided anew, everybody has texts to train on
    assert (pooled.train.counts + pooled.test.counts).tolist() == [2, 3, 2, 2]
    drawn = read_stackoverflow(tmp_path, tokens=9, tags=4, clients=2)
    assert len(drawn) == 2
    with pytest.raises(ConfigError, match="clients is 5, but only 4 have enough examples"):
        read_stackoverflow(tmp_path, clients=5)
    with pytest.raises(ConfigError, match="clients is 4, but only 3 have enough examples"):
        read_stackoverflow(tmp_path, clients=4, test_fraction=None)


def test_malformed_files_are_refused(tmp_path):
    file = write_h5(tmp_path / "x.h5")
    with h5py.File(file, "a") as content:
        del content["examples/12/tags"]
        content["examples/12/tags"] = np.array([1, 2])
    with pytest.raises(
        DataError, match=r"x\.h5: client '12', field 'tags' holds 1; accepted: text"
    ):
        read_stackoverflow(file)
    with h5py.File(file, "a") as content:
        del content["examples/12/tags"]
    with pytest.raises(DataError, match=r"client '12': field 'tags' is missing"):
        read_stackoverflow(file)
    (tmp_path / "y.h5").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"holds 2 \.h5 files; give one, or a train and a test file"
    ):
        read_stackoverflow(tmp_path)
    with pytest.raises(
        DataError, match=r"x\.json is no HDF5 file and has none; give stackoverflow_train\.h5"
    ):
        read_stackoverflow(tmp_path / "x.json")
