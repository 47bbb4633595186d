"""LendingClub loans from small files with the original's columns, against scikit-learn."""

import numpy as np
import pandas as pd
from sklearn.decomposition import PCA
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

from fedmtl.data import FederatedDataset, load_data
from fedmtl.data.readers.lending import CATEGORIES, DROPPED, NUMBERS, read_lending
from tests.data.rows import write_csv

HEADER = (*CATEGORIES, *NUMBERS, *DROPPED, "interest_rate")
TEXT = ("emp_title", "state", "homeownership", "verified_income", "verification_income_joint", "loan_purpose",
        "application_type", "grade", "sub_grade", "issue_month", "loan_status", "initial_listing_status",
        "disbursement_method")  # fmt: skip
PUBLIC = 60
SMALL = {"public_rows": PUBLIC, "components": 6, "z_clip": 1.5, "l1": 4.0, "l2": 2.0, "target": 1.5}


def loans(rows: int = 100, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {
        name: rng.choice(["NC", "b, c", "Ä", "z"], rows)
        if name in TEXT
        else rng.lognormal(2, 1, rows).round(3)
        for name in HEADER
    }
    frame = pd.DataFrame(columns)
    frame["rownames"] = np.arange(1, rows + 1)
    frame["num_accounts_120d_past_due"] = 0.1  # does not vary
    frame["interest_rate"] = rng.uniform(5, 31, rows).round(2)
    frame["verification_income_joint"] = np.where(
        rng.random(rows) < 0.5, "", frame["verification_income_joint"]
    )
    frame.loc[rng.random(rows) < 0.4, "months_since_90d_late"] = np.nan
    return frame


def everything(data: FederatedDataset) -> tuple[np.ndarray, np.ndarray]:
    """Features and targets of a dataset with one client, training and test rows together, sorted by target."""
    x = np.concatenate([data.train.x.numpy(), data.test.x.numpy()])
    y = np.concatenate([data.train.y.numpy(), data.test.y.numpy()])
    order = np.argsort(y, kind="stable")
    return x[order], y[order]


def test_features_are_those_of_scikit_learn_fitted_on_the_public_rows(tmp_path):
    frame = loans()
    file = write_csv(tmp_path / "loans.csv", frame)
    given = read_lending(file, clients=1, **SMALL | {"l1": 1e6, "l2": 1e6, "target": 1e6})
    encoder = OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=np.nan, encoded_missing_value=np.nan
    )
    text = frame[list(CATEGORIES)].replace("", np.nan)
    encoder.fit(text.iloc[-PUBLIC:])
    coded = np.column_stack([encoder.transform(text), frame[list(NUMBERS)].to_numpy()])
    scaler = StandardScaler().fit(coded[-PUBLIC:])
    z = np.clip(np.nan_to_num(scaler.transform(coded)), -1.5, 1.5)
    pca = PCA(6, whiten=True, svd_solver="full").fit(z[-PUBLIC:])
    expected = pca.transform(z) * np.sign(
        pca.components_[np.arange(6), np.abs(pca.components_).argmax(1)]
    )
    rates = frame["interest_rate"].to_numpy()
    y = (rates - rates[-PUBLIC:].mean()) / rates[-PUBLIC:].std()
    np.testing.assert_allclose(given.public.x.numpy(), expected[-PUBLIC:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(given.public.y.numpy(), y[-PUBLIC:], rtol=1e-5, atol=1e-6)
    x, got = everything(given)
    order = np.argsort(y[:-PUBLIC].astype(np.float32), kind="stable")
    np.testing.assert_allclose(got, y[:-PUBLIC][order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x, expected[:-PUBLIC][order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.cov(given.public.x.numpy().T), np.eye(6), atol=1e-5)


def test_bounds_bind(tmp_path):
    file = write_csv(tmp_path / "a.csv", loans())
    plain = read_lending(file, **SMALL)
    sizes = plain.train.x.double().abs().sum(1)
    assert ((sizes > 3.99).sum() > 5) & (
        (sizes < 3.9).sum() > 5
    )  # some rows are clipped, some are not
    assert (plain.train.y.abs() > 1.49).sum() > 2
    assert (plain.domain.l1, plain.domain.l2, plain.domain.target) == (4.0, 2.0, 1.5)


def test_sizes_and_training_on_every_row(tmp_path):
    file = write_csv(tmp_path / "loans_full_schema.csv", loans())
    given = read_lending(file, clients=3, sizes=(1, 20, 5), test_fraction=None, **SMALL)
    same = load_data(
        "lending", root=tmp_path, clients=3, sizes=(1, 20, 5), test_fraction=None, **SMALL
    )
    assert same.fingerprint() == given.fingerprint()
    assert "last 60 loans" in given.notes[0]
    assert "no epsilon covers them" in given.notes[0]
    assert given.train.counts.tolist() == [1, 20, 5]
    assert given.test.counts.tolist() == [PUBLIC] * 3
    assert given.test.x[:PUBLIC].equal(given.public.x)
    split = read_lending(file, clients=3, sizes=10, **SMALL)
    assert split.train.counts.tolist() == [8, 8, 8]
    assert split.test.counts.tolist() == [2, 2, 2]
    assert not read_lending(file, clients=3, sizes=10, seed=1, **SMALL).train.y.equal(split.train.y)
