"""Adult from small files of the original format, coded by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from fedmtl.data import load_data
from fedmtl.data.readers.adult import CATEGORIES, coded, read_adult
from fedmtl.data.readers.columns import Table
from tests.data.rows import write_csv

FIRST = {"age": 25, "workclass": "Private", "fnlwgt": 226802, "education": "11th", "educational-num": 7,
         "marital-status": "Never-married", "occupation": "Machine-op-inspct", "relationship": "Own-child",
         "race": "Black", "gender": "Male", "capital-gain": 0, "capital-loss": 0, "hours-per-week": 40,
         "native-country": "United-States", "income": "<=50K"}  # fmt: skip
SECOND = {"age": 44, "workclass": "?", "fnlwgt": 160323, "education": "Some-college", "educational-num": 10,
          "marital-status": "Married-civ-spouse", "occupation": "?", "relationship": "Wife",
          "race": "White", "gender": "Female", "capital-gain": 7688, "capital-loss": 1902, "hours-per-week": 99,
          "native-country": "Yugoslavia", "income": ">50K"}  # fmt: skip
WIDE = SECOND | {
    "age": 1000,
    "educational-num": -3,
    "capital-gain": 1e9,
    "capital-loss": 1e9,
    "hours-per-week": 500,
}


def persons(*special: dict, rows: int = 40, seed: int = 0) -> pd.DataFrame:
    """Random persons after the special ones."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            name: rng.choice(CATEGORIES[name], rows)
            if name in CATEGORIES
            else rng.choice(["<=50K", ">50K"], rows)
            if name == "income"
            else rng.integers(0, 100, rows)
            for name in FIRST
        }
    )
    return pd.concat([pd.DataFrame(list(special)), frame], ignore_index=True)


def coding(tmp_path, person: dict) -> list[float]:
    """The coded row of one person."""
    file = write_csv(tmp_path / "one.csv", persons(person))
    return coded(Table.of(file, (*CATEGORIES, "income")))[0].tolist()


def test_coded_rows_are_those_made_by_hand(tmp_path):
    x = coding(tmp_path, FIRST)
    assert x[:5] == pytest.approx([8 / 73, 6 / 15, 0, 0, 39 / 98])
    assert len(x) == 5 + 8 + 6 + 14 + 5 + 4 + 1 + 41
    names = [(c, v) for c, values in CATEGORIES.items() for v in values[1:]]
    assert {names[i - 5] for i in range(5, len(x)) if x[i]} == {  # Private, Male, United-States: categories of zeros
        ("marital-status", "Never-married"), ("occupation", "Machine-op-inspct"), ("relationship", "Own-child"),
        ("race", "Black"),
    }  # fmt: skip
    assert set(x[5:]) == {0.0, 1.0}
    x = coding(tmp_path, SECOND)
    gain, loss = math.log1p(7688) / math.log1p(99999), math.log1p(1902) / math.log1p(4356)
    assert x[:5] == pytest.approx([27 / 73, 9 / 15, gain, loss, 1])
    ones = {names[i - 5] for i in range(5, len(x)) if x[i]}
    assert ones == {("workclass", "?"), ("occupation", "?"), ("relationship", "Wife"), ("gender", "Female"),
                    ("native-country", "Yugoslavia")}  # fmt: skip
    assert coding(tmp_path, WIDE)[:5] == [1, 0, 1, 1, 1]


def test_labels_as_classes(tmp_path):
    file = write_csv(tmp_path / "adult.csv", persons(rows=60))
    signed = read_adult(file, public_rows=20)
    data = load_data("adult", root=tmp_path, public_rows=20, labels="class")
    assert (data.classes, data.train.y.dtype, signed.classes, signed.train.y.dtype) == (
        2, torch.int64, None, torch.float32
    )  # fmt: skip
    assert data.train.y.tolist() == [int(v > 0) for v in signed.train.y]
    assert set(signed.train.y.tolist()) == {-1.0, 1.0}


def test_whitened_features_are_those_of_scikit_learn(tmp_path):
    """The public rows alone fit z-scores and principal components; what is clipped keeps the domain."""
    public = 60
    file = write_csv(tmp_path / "a.csv", persons(FIRST, SECOND, rows=118))
    made = read_adult(
        file, public_rows=public, clients=1, components=6, z_clip=2.0, l1=5.0, test_fraction=None
    )
    features = coded(Table.of(file, (*CATEGORIES, "income")))
    scaler = StandardScaler().fit(features[-public:])
    z = np.clip(scaler.transform(features) * (scaler.var_ > 1e-12), -2.0, 2.0)
    pca = PCA(6, whiten=True, svd_solver="full").fit(z[-public:])
    expected = pca.transform(z) * np.sign(
        pca.components_[np.arange(6), np.abs(pca.components_).argmax(1)]
    )
    norms = np.abs(expected).sum(1)
    expected *= np.minimum(1, 5.0 / norms)[:, None]
    x = np.concatenate([made.train.x.numpy(), made.public.x.numpy()])
    np.testing.assert_allclose(x[:, :-1], expected, rtol=1e-5, atol=2e-5)
    assert (x[:, -1] == 1).all()
    assert (norms > 5.0).any()
    assert (norms < 5.0).any()
    assert (made.domain.l1, made.domain.l2) == (6.0, 26**0.5)
    for words in (
        "last 60 persons",
        "fitted the z-scores and the 6 principal components",
        "no epsilon covers them",
    ):
        assert words in made.notes[0]
