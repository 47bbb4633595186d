"""Adult from small files of the original format, coded by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from benchmarks.reproduce.cost_of_privacy.readers.adult import CATEGORIES, RANGES, read_adult
from fedmtl.data import load_data
from tests.data.rows import moved_rows, write_csv

COLUMNS = (
    "age,workclass,fnlwgt,education,educational-num,marital-status,occupation,relationship,race,gender,"
    "capital-gain,capital-loss,hours-per-week,native-country,income"
)
HEADER = COLUMNS.split(",")
FIRST = {"age": 25, "workclass": "Private", "fnlwgt": 226802, "education": "11th", "educational-num": 7,
         "marital-status": "Never-married", "occupation": "Machine-op-inspct", "relationship": "Own-child",
         "race": "Black", "gender": "Male", "capital-gain": 0, "capital-loss": 0, "hours-per-week": 40,
         "native-country": "United-States", "income": "<=50K"}  # fmt: skip
SECOND = {"age": 44, "workclass": "?", "fnlwgt": 160323, "education": "Some-college", "educational-num": 10,
          "marital-status": "Married-civ-spouse", "occupation": "?", "relationship": "Wife",
          "race": "White", "gender": "Female", "capital-gain": 7688, "capital-loss": 1902, "hours-per-week": 99,
          "native-country": "Yugoslavia", "income": ">50K"}  # fmt: skip
WIDE = SECOND | {"age": 1000, "educational-num": -3, "capital-gain": 1e9, "capital-loss": 1e9, "hours-per-week": 500}


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
            for name in HEADER
        }
    )
    return pd.concat([pd.DataFrame(list(special)), frame], ignore_index=True)[HEADER]


def alone(tmp_path, person: dict, **options) -> tuple[list[float], float]:
    """The one private row of a file whose other rows are public."""
    file = write_csv(tmp_path / "one.csv", persons(person))
    given = read_adult(file, clients=1, public_rows=40, test_fraction=None, **options)
    assert len(given.train) == 1
    return given.train.x[0].tolist(), given.train.y[0].item()


def test_one_hot_rows_are_those_made_by_hand(tmp_path):
    x, y = alone(tmp_path, FIRST, coding="one_hot")
    numbers = [8 / 73, 6 / 15, 0, 0, 39 / 98]
    assert x[:5] == pytest.approx(numbers)
    assert (len(x), x[-1], y) == (5 + 8 + 6 + 14 + 5 + 4 + 1 + 41 + 1, 1.0, -1.0)
    names = [(c, v) for c, values in CATEGORIES.items() for v in values[1:]]
    ones = {names[i - 5] for i in range(5, len(x) - 1) if x[i]}
    assert ones == {  # Private, Male and United-States are the categories of zeros
        ("marital-status", "Never-married"), ("occupation", "Machine-op-inspct"), ("relationship", "Own-child"),
        ("race", "Black"),
    }  # fmt: skip
    assert set(x[5:]) == {0.0, 1.0}
    x, y = alone(tmp_path, SECOND, coding="one_hot")
    gain, loss = math.log1p(7688) / math.log1p(99999), math.log1p(1902) / math.log1p(4356)
    assert x[:5] == pytest.approx([27 / 73, 9 / 15, gain, loss, 1])
    ones = {names[i - 5] for i in range(5, len(x) - 1) if x[i]}
    assert ones == {("workclass", "?"), ("occupation", "?"), ("relationship", "Wife"), ("gender", "Female"),
                    ("native-country", "Yugoslavia")}  # fmt: skip
    assert y == 1.0


def test_integer_rows_are_those_made_by_hand(tmp_path):
    x, _ = alone(tmp_path, SECOND, coding="integer", intercept=False)
    assert x[5:] == pytest.approx([1 / 8, 0, 1 / 14, 1, 0, 1, 1])


def test_labels_as_classes(tmp_path):
    file = write_csv(tmp_path / "adult.csv", persons(rows=60))
    signed = read_adult(file, public_rows=20)
    data = load_data("adult", root=tmp_path, public_rows=20, labels="class")
    assert (data.classes, data.train.y.dtype, signed.classes, signed.train.y.dtype) == (
        2, torch.int64, None, torch.float32
    )  # fmt: skip
    assert data.train.y.tolist() == [int(v > 0) for v in signed.train.y]
    assert set(signed.train.y.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("coding", ["one_hot", "integer"])
@pytest.mark.parametrize(("l1", "l2"), [(None, None), (3.0, None), (None, 1.2), (2.0, 1.9)])
def test_no_person_leaves_the_domain_and_each_moves_its_own_row_only(tmp_path, coding, l1, l2):
    options = {"public_rows": 10, "clients": 2, "coding": coding, "l1": l1, "l2": l2}
    first = read_adult(write_csv(tmp_path / "a.csv", persons(FIRST)), **options)
    second = read_adult(write_csv(tmp_path / "b.csv", persons(WIDE)), **options)
    assert moved_rows(first, second) == 1
    for side in ("train", "test"):
        wide = second.side(side).x.double()
        assert (wide.abs().sum(1) <= first.domain.l1).all()
        assert (wide.square().sum(1) <= first.domain.l2**2 * (1 + 1e-12)).all()
        assert (wide[:, -1] == 1).all()
    assert first.public.x.equal(second.public.x)
    natural = 12.0
    assert first.domain.l1 == (l1 or natural) + 1
    expected = min(l2 or natural**0.5, l1 or natural)
    assert first.domain.l2 == pytest.approx((expected**2 + 1) ** 0.5)


def test_whitened_features_are_those_of_scikit_learn(tmp_path):
    """The public rows alone fit z-scores and principal components; what is clipped keeps the domain."""
    frame, public = persons(FIRST, SECOND, rows=118), 60
    given = read_adult(
        write_csv(tmp_path / "a.csv", frame), public_rows=public, clients=1, components=6, z_clip=2.0, l1=5.0,
        l2=2.5, test_fraction=None,
    )  # fmt: skip
    plain = read_adult(tmp_path / "a.csv", public_rows=public, clients=1, intercept=False, test_fraction=None)
    features = np.concatenate([plain.train.x.numpy(), plain.public.x.numpy()]).astype(np.float64)
    scaler = StandardScaler().fit(features[-public:])
    z = np.clip(scaler.transform(features) * (scaler.var_ > 1e-12), -2.0, 2.0)
    pca = PCA(6, whiten=True, svd_solver="full").fit(z[-public:])
    expected = pca.transform(z) * np.sign(pca.components_[np.arange(6), np.abs(pca.components_).argmax(1)])
    norms = np.abs(expected).sum(1), np.linalg.norm(expected, axis=1)
    expected *= np.minimum(1, np.minimum(5.0 / norms[0], 2.5 / norms[1]))[:, None]
    got = np.concatenate([given.train.x.numpy(), given.public.x.numpy()])
    np.testing.assert_allclose(got[:, :-1], expected, rtol=1e-5, atol=2e-5)
    assert (got[:, -1] == 1).all()
    assert ((norms[0] > 5.0) & (norms[1] < 2.5)).any()
    assert (norms[1] > 2.5).any()
    assert (given.domain.l1, given.domain.l2) == (6.0, 7.25**0.5)
    assert "fitted the z-scores and the 6 principal components" in given.notes[0]


def test_a_natural_bound_is_reached(tmp_path):
    """12 and sqrt(12) are attained by a person at the end of every range, so no smaller bound is true."""
    last = {c: values[-1] for c, values in CATEGORIES.items()}
    top = {c: high for c, (_, high) in RANGES.items()}
    x, _ = alone(tmp_path, FIRST | last | top, intercept=False)
    assert sum(x) == 12.0


def test_public_rows_are_the_last_and_the_note_says_so(tmp_path):
    frame = persons(rows=50)
    given = read_adult(write_csv(tmp_path / "adult.csv", frame), public_rows=20, clients=4)
    assert given.public.y.tolist() == [1.0 if v == ">50K" else -1.0 for v in frame["income"][-20:]]
    assert len(given.train) + len(given.test) == 30
    (note,) = given.notes
    assert "last 20 persons" in note
    assert "no epsilon covers them" in note
