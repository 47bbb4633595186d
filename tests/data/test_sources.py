"""Datasets from torch Datasets by client and from tables of columns, such as Hugging Face's."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from fedmtl import FedAvg, FullParticipation, LocalSGD, Trainer
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, DataError


class Pictures(Dataset):
    """Pillow images and labels, as torchvision's data sets give them."""

    def __init__(self, greys: list[int]) -> None:
        self.greys = greys

    def __len__(self) -> int:
        return len(self.greys)

    def __getitem__(self, i: int):
        return Image.new("RGB", (5, 4), (self.greys[i], 0, 255)), self.greys[i] % 3


class Table:
    """What is used of ``datasets.Dataset``: names of columns, and a column by its name."""

    def __init__(self, **columns) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __getitem__(self, key: str):
        return iter(self.columns[key])  # a lazy column, as of version 4


def test_a_mapping_of_torch_datasets_and_of_pairs():
    x, y = torch.randn(8, 3), torch.arange(8) % 3
    plain = FederatedDataset.from_tensors({"a": (x, y), "b": (x[:5], y[:5])}, seed=1)
    whole = TensorDataset(x, y)
    made = FederatedDataset.from_tensors({"a": whole, "b": Subset(whole, range(5))}, seed=1)
    assert made.fingerprint() == plain.fingerprint()
    tested = FederatedDataset.from_tensors(
        {"a": whole, "b": (x, y)}, test={"b": Subset(whole, [2, 4])}
    )
    torch.testing.assert_close(tested.test.x, x[[2, 4]])
    images = FederatedDataset.from_tensors({"a": Pictures([1, 2, 3]), "b": Pictures([4, 5])})
    assert (images.train.x.dtype, images.spec.shape) == (torch.uint8, (3, 4, 5))


class Wrong(Pictures):
    def __getitem__(self, i: int):
        return 7 if i == 1 else (torch.zeros(2 + i), 0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Wrong([1, 2]), r"client 'a', example 1 is a int; a torch Dataset must give \(x, y\)"),
        (3, r"client 'a': its value must be a pair \(x, y\), or a torch Dataset"),
        (
            Subset(Wrong([1, 2, 3]), [0, 2]),
            r"client 'a', example 1, field 'x' has the shape \(4,\), and row 0 has",
        ),
    ],
)
def test_what_is_no_dataset_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        FederatedDataset.from_tensors({"a": value})


class Splits(dict):
    """What ``datasets.DatasetDict`` is: tables by split, whose names of columns are a mapping, too."""

    @property
    def column_names(self) -> dict[str, list[str]]:
        return {split: table.column_names for split, table in self.items()}


def hub(rows: int = 12) -> Table:
    greys = [7 * i for i in range(rows)]
    return Table(
        image=[Image.new("L", (6, 6), grey) for grey in greys],
        writer_id=[f"w{i % 3}" for i in range(rows)],
        character=[i % 4 for i in range(rows)],
        width=[i / 2 if i else 1 for i in range(rows)],
        height=list(range(rows)),
    )


def test_a_table_of_columns_with_images():
    data = FederatedDataset.from_columns(
        hub(), client="writer_id", target="character", features="image"
    )
    assert data.ids == ("w0", "w1", "w2")
    assert (data.spec.shape, data.classes) == ((1, 6, 6), 4)
    assert data.domain is not None
    assert (data.domain.l1, data.domain.l2) == (36.0, 6.0)
    rows = []
    for side in ("train", "test"):
        part = data.side(side)
        x, y = data.gather(side, torch.arange(len(part)))
        rows += list(zip((x.mean((1, 2, 3)) * 255).round().int().tolist(), y.tolist(), strict=True))
    assert sorted(rows) == [(7 * i, i % 4) for i in range(12)]


def test_several_columns_become_one_feature_each_and_a_test_table_is_kept():
    few = Table(writer_id=["w1"], character=[1], width=[0.5], height=[8])
    columns = {"client": "writer_id", "target": "character"}
    data = FederatedDataset.from_columns(
        hub(), features=["width", "height"], test=few, min_examples=4, **columns
    )
    assert data.test.counts.tolist() == [0, 1, 0]
    np.testing.assert_allclose(data.test.x.numpy(), [[0.5, 8.0]])
    with pytest.raises(ConfigError, match="min_examples is -1"):
        FederatedDataset.from_columns(hub(), features="width", min_examples=-1, **columns)
    np.testing.assert_allclose(data.train.x[:4].numpy(), [[1.0, 0], [1.5, 3], [3.0, 6], [4.5, 9]])
    splits = Splits(train=hub(), test=few)
    of_splits = {"features": ["width", "height"], "min_examples": 4, **columns}
    same = FederatedDataset.from_columns(splits["train"], test=splits["test"], **of_splits)
    assert same.fingerprint() == data.fingerprint()
    assert FederatedDataset.from_columns(splits, **of_splits).fingerprint() == data.fingerprint()
    plain = dict(splits)
    assert FederatedDataset.from_columns(plain, **of_splits).fingerprint() == data.fingerprint()
    with pytest.raises(DataError, match=r"is a dict of the splits 'train', .* test=dataset\["):
        FederatedDataset.from_columns(splits["train"], test=plain, **of_splits)
    with pytest.raises(DataError, match=r"none is 'train'; .* as test=dataset\[OTHER\]"):
        FederatedDataset.from_columns({"a": few}, **of_splits)
    with pytest.raises(DataError, match="columns 'b', 'a' are missing; the columns are 'image'"):
        FederatedDataset.from_columns(hub(), client="b", target="character", features="a")
    with pytest.raises(
        DataError, match=r"^data \(test\) is a Splits of the splits 'train', 'test'; give the rows"
    ):
        FederatedDataset.from_columns(splits["train"], test=splits, **of_splits)


def test_splits_that_are_not_used_are_named(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"client": "writer_id", "target": "character", "features": "width"}
    whole = Splits(train=hub(), validation=hub(9), test=hub(6))
    data = FederatedDataset.from_columns(whole, **columns)
    assert (len(data.train), len(data.test)) == (12, 6)
    assert "data: the splits 'validation' are left out" in caplog.text
    data = FederatedDataset.from_columns(whole, test=whole["validation"], **columns)
    assert (len(data.train), len(data.test)) == (12, 9)
    assert "data: the splits 'validation', 'test' are left out" in caplog.text


class Named(torch.nn.Module):
    """Takes inputs by name, and does not see padded places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(5, 2)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        mask = inputs["mask"].float()[..., None]
        mean = (self.embedding(inputs["tokens"]) * mask).sum(-2) / mask.sum(-2).clamp(min=1)
        return self.head(torch.cat([mean, inputs["size"].float()[..., None]], -1))


def texts(lengths: list[int]) -> Table:
    return Table(
        who=[f"w{i % 2}" for i in range(len(lengths))],
        tokens=[[1 + (i + k) % 9 for k in range(length)] for i, length in enumerate(lengths)],
        size=[float(length) for length in lengths],
        label=[i // 2 % 2 for i in range(len(lengths))],
    )


def test_lists_of_tokens_are_padded_with_a_mask() -> None:
    table = texts([3, 1, 5, 2, 4, 4, 2, 3])
    columns = {"client": "who", "target": "label", "features": ["tokens", "size"], "classes": 2}
    data = FederatedDataset.from_columns(table, length=4, test_fraction=0.25, **columns)
    x, _ = data.gather("train", torch.arange(len(data.train)))
    named = data.transform.inputs
    assert [(name, shape) for name, shape, _ in named] == [
        ("tokens", (4,)),
        ("size", ()),
        ("mask", (4,)),
    ]
    seen = {(tuple(map(int, row[:4])), tuple(map(int, row[5:]))) for row in x.tolist()}
    assert all(row in {padded(tokens) for tokens in table.columns["tokens"]} for row in seen)
    settings = {
        "model": Named(),
        "privacy": None,
        "schedule": FullParticipation(),
        "rounds": 2,
        "progress": False,
    }
    scores = []
    for length in (5, 9):  # more padding is nothing that a model with a mask sees
        longer = FederatedDataset.from_columns(table, length=length, test_fraction=0.25, **columns)
        run = Trainer(algorithm=FedAvg(local=LocalSGD(lr=0.1)), data=longer, **settings).fit()
        scores.append(run.metrics)
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    own = Table(
        **table.columns | {"attention_mask": [[1] * len(row) for row in table.columns["tokens"]]}
    )
    masked = FederatedDataset.from_columns(
        own, length=4, **columns | {"features": ["tokens", "attention_mask"]}
    )
    assert [name for name, *_ in masked.transform.inputs] == ["tokens", "attention_mask"]


def test_the_library_of_hugging_face_gives_the_same() -> None:
    datasets = pytest.importorskip("datasets")
    table = texts([3, 1, 5, 2, 4, 4, 2, 3])
    real = datasets.Dataset.from_dict(table.columns)
    columns = {
        "client": "who",
        "target": "label",
        "features": ["tokens", "size"],
        "classes": 2,
        "length": 4,
    }
    splits = datasets.DatasetDict({"train": real, "test": real})
    found = FederatedDataset.from_columns(splits, **columns)
    assert (
        found.fingerprint()
        == FederatedDataset.from_columns(table, test=table, **columns).fingerprint()
    )


def padded(tokens: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first four tokens and their mask, by hand."""
    kept = tokens[:4]
    gap = 4 - len(kept)
    return (*kept, *[0] * gap), (*[1] * len(kept), *[0] * gap)


@pytest.mark.parametrize(
    ("changes", "features", "length", "message"),
    [
        (
            {},
            "tokens",
            None,
            r"row 1, field 'tokens' has the shape \(1,\), .*; all must agree \(from_columns",
        ),
        ({}, "tokens", 0, "length is 0; it must be a whole number of at least 1"),
        ({}, "size", 3, "length is 3, but none of the features size holds lists"),
        (
            {"tokens": [[0.5], [1.0]]},
            "tokens",
            3,
            "none of the features tokens holds lists of whole numbers, which length pads",
        ),
        (
            {"tokens": [[5], [1.5]]},
            "tokens",
            3,
            "row 1, field 'tokens' is no list of whole numbers",
        ),
        ({"tokens": [[5], None]}, "tokens", 3, "row 1, field 'tokens' has no value; accepted: a"),
        ({"tokens": [None, None]}, "tokens", 3, "row 0, field 'tokens' has no value; accepted: a"),
        ({"size": [1.0]}, ["tokens", "size"], 3, "column 'size' has 1 rows, and 'who' 2; all"),
        ({"label": [1]}, "tokens", 3, "column 'label' has 1 rows, and 'who' 2; all columns"),
        (
            {"other": [[1], [1]]},
            ["tokens", "other"],
            3,
            "row 0, column 'other' has another number of values",
        ),
        (
            {"label": [[0, 1], [1]]},
            "tokens",
            3,
            r"row 1, column 'label' holds a list of 1, and row 0 a list of 2: one label a token is "
            "not taken, .*; accepted: one value a row, or lists of one length",
        ),
        (
            {"label": [1, [1]]},
            "size",
            None,
            "row 1, column 'label' holds a list of 1, and row 0 one value: one label a token",
        ),
    ],
)
def test_lists_that_cannot_be_padded_are_refused(changes, features, length, message) -> None:
    table = Table(**texts([3, 1]).columns | changes)
    with pytest.raises((ConfigError, DataError), match=message):
        FederatedDataset.from_columns(
            table, client="who", target="label", features=features, length=length
        )


def test_images_and_vectors_beside_lists_of_tokens_stay_as_they_are() -> None:
    others = {
        "image": [[[float(i), 1.0], [2.0, 3.0]] for i in range(4)],
        "vector": [[0.5 * i, -1.0, 2.0] for i in range(4)],
    }
    table = Table(**texts([3, 1, 5, 2]).columns | others)
    data = FederatedDataset.from_columns(
        table, client="who", target="label", features=["vector", "tokens", "image"],
        length=4, classes=2, test=table,
    )  # fmt: skip
    assert data.transform.inputs == (
        ("vector", (3,), "real"), ("tokens", (4,), "integer"),
        ("image", (2, 2), "real"), ("mask", (4,), "integer"),
    )  # fmt: skip
    x, _ = data.gather("train", torch.arange(1))
    vector, tokens, image, mask = [0, -1, 2], [1, 2, 3, 0], [0, 1, 2, 3], [1, 1, 1, 0]
    assert x[0].tolist() == [*vector, *tokens, *image, *mask]


def test_columns_of_several_kinds_are_inputs_by_name() -> None:
    columns = {"client": "writer_id", "target": "character"}
    data = FederatedDataset.from_columns(hub(), features=["image", "width"], **columns)
    assert [(name, shape) for name, shape, _ in data.transform.inputs] == [
        ("image", (1, 6, 6)),
        ("width", ()),
    ]


def changed(column: str, row: int, value) -> Table:
    table = hub()
    table.columns[column][row] = value
    return table


@pytest.mark.parametrize(
    ("table", "features", "message"),
    [
        ({"a": 1}, "image", r"data is a dict; accepted: a table with column_names"),
        (
            Splits(dev=hub(), old=hub()),
            "image",
            r"data is a Splits of the splits 'dev', 'old', and none is 'train'; give the rows",
        ),
        (
            hub(),
            "picture",
            r"data: column 'picture' is missing; the columns are 'image', 'writer_id'",
        ),
        (hub(), [], r"features names no column"),
        (
            changed("width", 4, "wide"),
            "width",
            r"data: row 4, field 'width' holds 'wide'; accepted: numbers",
        ),
        (changed("width", 4, None), "width", r"data: row 4, field 'width' is empty"),
        (
            changed("image", 3, Image.new("L", (5, 6))),
            "image",
            r"row 3, field 'image' has the shape \(1, 6, 5\)",
        ),
        (changed("writer_id", 5, pd.NA), "width", r"data: row 5, column 'writer_id' is empty"),
        (
            changed("writer_id", slice(4, 6), [7, "7"]),
            "width",
            r"client '7' occurs twice, as a number and as a text",
        ),
        (
            changed("image", 3, Image.new("P", (6, 6))),
            "image",
            r"row 3, field 'image' is an image with a palette;",
        ),
        (
            changed("image", 3, Image.new("I;16", (6, 6))),
            "image",
            r"row 3, field 'image' is an image of 16 bits; give its",
        ),
        (hub(), "writer_id", r"column 'writer_id' occurs twice, in the table or as client"),
        (Table(writer_id=[], width=[], character=[]), "width", r"^data has no rows"),
        (
            pd.DataFrame(
                [["a", 1, 1, 0]] * 4, columns=["writer_id", "width", "width", "character"]
            ),
            "width",
            r"twice",
        ),
    ],
)
def test_malformed_tables_are_refused_with_row_and_column(table, features, message):
    with pytest.raises(DataError, match=message):
        FederatedDataset.from_columns(
            table, client="writer_id", target="character", features=features
        )


def test_sparse_coordinates_are_refused():
    with pytest.raises(
        DataError,
        match=r"client 'a', field 'x' has the layout torch.sparse_coo; accepted: dense tensors",
    ):
        FederatedDataset.from_tensors({"a": (torch.eye(4).to_sparse(), torch.tensor([0, 1, 0, 1]))})
