"""LendingClub loans from small files with the original's columns, against scikit-learn."""

import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import PCA
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

from benchmarks.reproduce.cost_of_privacy.readers.lending import CATEGORIES, DROPPED, NUMBERS, read_lending
from fedmtl.data import FederatedDataset, load_data
from tests.data.rows import moved_rows, write_csv

COLUMNS = (
    "rownames,emp_title,emp_length,state,homeownership,annual_income,verified_income,debt_to_income,"
    "annual_income_joint,verification_income_joint,debt_to_income_joint,delinq_2y,months_since_last_delinq,"
    "earliest_credit_line,inquiries_last_12m,total_credit_lines,open_credit_lines,total_credit_limit,"
    "total_credit_utilized,num_collections_last_12m,num_historical_failed_to_pay,months_since_90d_late,"
    "current_accounts_delinq,total_collection_amount_ever,current_installment_accounts,accounts_opened_24m,"
    "months_since_last_credit_inquiry,num_satisfactory_accounts,num_accounts_120d_past_due,"
    "num_accounts_30d_past_due,num_active_debit_accounts,total_debit_limit,num_total_cc_accounts,"
    "num_open_cc_accounts,num_cc_carrying_balance,num_mort_accounts,account_never_delinq_percent,tax_liens,"
    "public_record_bankrupt,loan_purpose,application_type,loan_amount,term,interest_rate,installment,grade,"
    "sub_grade,issue_month,loan_status,initial_listing_status,disbursement_method,balance,paid_total,"
    "paid_principal,paid_interest,paid_late_fees"
)
HEADER = COLUMNS.split(",")
TEXT = ("emp_title", "state", "homeownership", "verified_income", "verification_income_joint", "loan_purpose",
        "application_type", "grade", "sub_grade", "issue_month", "loan_status", "initial_listing_status",
        "disbursement_method")  # fmt: skip
PUBLIC = 60
SMALL = {"public_rows": PUBLIC, "components": 6, "z_clip": 1.5, "l1": 4.0, "l2": 2.0, "target": 1.5}


def loans(rows: int = 100, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {
        name: rng.choice(["NC", "b, c", "Ä", "z"], rows) if name in TEXT else rng.lognormal(2, 1, rows).round(3)
        for name in HEADER
    }
    frame = pd.DataFrame(columns)
    frame["rownames"] = np.arange(1, rows + 1)
    frame["num_accounts_120d_past_due"] = 0.1  # does not vary
    frame["interest_rate"] = rng.uniform(5, 31, rows).round(2)
    frame["verification_income_joint"] = np.where(rng.random(rows) < 0.5, "", frame["verification_income_joint"])
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
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan, encoded_missing_value=np.nan)
    text = frame[list(CATEGORIES)].replace("", np.nan)
    encoder.fit(text.iloc[-PUBLIC:])
    coded = np.column_stack([encoder.transform(text), frame[list(NUMBERS)].to_numpy()])
    scaler = StandardScaler().fit(coded[-PUBLIC:])
    z = np.clip(np.nan_to_num(scaler.transform(coded)), -1.5, 1.5)
    pca = PCA(6, whiten=True, svd_solver="full").fit(z[-PUBLIC:])
    expected = pca.transform(z) * np.sign(pca.components_[np.arange(6), np.abs(pca.components_).argmax(1)])
    rates = frame["interest_rate"].to_numpy()
    y = (rates - rates[-PUBLIC:].mean()) / rates[-PUBLIC:].std()
    np.testing.assert_allclose(given.public.x.numpy(), expected[-PUBLIC:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(given.public.y.numpy(), y[-PUBLIC:], rtol=1e-5, atol=1e-6)
    x, got = everything(given)
    order = np.argsort(y[:-PUBLIC].astype(np.float32), kind="stable")
    np.testing.assert_allclose(got, y[:-PUBLIC][order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x, expected[:-PUBLIC][order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.cov(given.public.x.numpy().T), np.eye(6), atol=1e-5)


def test_a_private_record_moves_its_own_row_only(tmp_path):
    """Replace-one neighbours differ in one row of the dataset, and no record, however extreme, leaves the domain."""
    frame = loans()
    first = read_lending(write_csv(tmp_path / "a.csv", frame), clients=4, **SMALL)
    wild = frame.copy()
    for column in (*NUMBERS, *DROPPED):
        if column not in TEXT:
            wild.loc[17, column] = -1e12
    wild.loc[17, list(TEXT)] = "never seen"
    wild.loc[17, "interest_rate"] = 100.0
    second = read_lending(write_csv(tmp_path / "b.csv", wild), clients=4, **SMALL)
    assert moved_rows(first, second) == 1
    for side in ("train", "test"):
        a, b = first.side(side), second.side(side)
        assert a.offsets.tolist() == b.offsets.tolist()
        for x, y in ((a.x, a.y), (b.x, b.y)):
            assert (x.double().abs().sum(1) <= first.domain.l1).all()
            assert (x.double().square().sum(1) <= first.domain.l2**2).all()
            assert (y.double().abs() <= first.domain.target).all()
    assert first.public.x.equal(second.public.x)
    assert first.notes == second.notes
    assert first.domain == second.domain


def test_bounds_bind_and_the_intercept_stays_outside_of_them(tmp_path):
    file = write_csv(tmp_path / "a.csv", loans())
    plain, more = read_lending(file, **SMALL), read_lending(file, **SMALL, intercept=True)
    sizes = plain.train.x.double().abs().sum(1)
    assert ((sizes > 3.99).sum() > 5) & ((sizes < 3.9).sum() > 5)  # some rows are clipped, some are not
    assert (plain.train.y.abs() > 1.49).sum() > 2
    assert more.train.x[:, :-1].equal(plain.train.x)
    assert (more.train.x[:, -1] == 1).all()
    assert (plain.domain.l1, plain.domain.l2, plain.domain.target) == (4.0, 2.0, 1.5)
    assert (more.domain.l1, more.domain.l2) == (5.0, pytest.approx(5**0.5))
    assert (more.train.x.double().square().sum(1) <= more.domain.l2**2 * (1 + 1e-12)).all()


def test_public_rows_belong_to_nobody_and_the_notes_name_them(tmp_path):
    frame = loans()
    frame["interest_rate"] = np.linspace(6, 30, 100)  # every rate once
    file = write_csv(tmp_path / "loans_full_schema.csv", frame)
    whole = SMALL | {"target": 1e6}
    given = read_lending(tmp_path, clients=3, **whole)
    targets = np.concatenate([given.train.y.numpy(), given.test.y.numpy()])
    assert len(targets) == 40
    assert not set(targets) & set(given.public.y.tolist())
    assert len(set(targets)) == 40
    (note,) = given.notes
    assert "last 60 loans" in note
    assert "no epsilon covers them" in note
    assert load_data("lending", root=file, **whole).fingerprint() == given.fingerprint()
    assert given.ids == ("owner-0", "owner-1", "owner-2")
    assert (given.spec.shape, given.classes, str(given.train.x.dtype)) == ((6,), None, "torch.float32")


def test_sizes_and_training_on_every_row(tmp_path):
    file = write_csv(tmp_path / "a.csv", loans())
    given = read_lending(file, clients=3, sizes=(1, 20, 5), test_fraction=None, **SMALL)
    assert given.train.counts.tolist() == [1, 20, 5]
    assert given.test.counts.tolist() == [PUBLIC] * 3
    assert given.test.x[:PUBLIC].equal(given.public.x)
    split = read_lending(file, clients=3, sizes=10, **SMALL)
    assert split.train.counts.tolist() == [8, 8, 8]
    assert split.test.counts.tolist() == [2, 2, 2]
    assert not read_lending(file, clients=3, sizes=10, seed=1, **SMALL).train.y.equal(split.train.y)
