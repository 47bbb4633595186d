"""What the readers of the study have in common: a record moves its own row only, and bad input has a clear error."""

import numpy as np
import pytest
import torch

from fedmtl.data.readers import adult, hospital, lending
from fedmtl.errors import ConfigError, DataError
from tests.data import test_adult, test_hospital, test_lending
from tests.data.rows import moved_rows, spoiled, write_csv

READERS = {  # the reader, a table, and settings that fit it
    "adult": (adult.read_adult, test_adult.persons, {"public_rows": 10, "components": 3}),
    "hospital": (hospital.read_hospital, test_hospital.stays, {}),
    "lending": (lending.read_lending, test_lending.loans, test_lending.SMALL),
}
EXTREME = {  # a row that is private, and its values
    "adult": (0, test_adult.WIDE),
    "hospital": (
        int(np.flatnonzero(~hospital.public_places(80, 0.1))[3]),
        {"procedure": 1, "sex": 1, "age75": 1, "admit": 1, "los": 30000},
    ),
    "lending": (
        17,
        dict.fromkeys({*lending.NUMBERS, *lending.DROPPED} - {*test_lending.TEXT}, -1e12)
        | dict.fromkeys(test_lending.TEXT, "never seen")
        | {"interest_rate": 100.0},
    ),
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adult", {"components": 3, "l1": 2.0}),
        ("hospital", {}),
        ("lending", {"clients": 4}),
    ],
)
def test_a_private_record_moves_its_own_row_only_and_none_leaves_the_domain(
    tmp_path, name, options
):
    read, table, fitting = READERS[name]
    frame, (row, values) = table().astype(object), EXTREME[name]
    first = read(write_csv(tmp_path / "a.csv", frame), **fitting | options)
    for column, value in values.items():
        frame.loc[row, column] = value
    second = read(write_csv(tmp_path / "b.csv", frame), **fitting | options)
    assert moved_rows(first, second) == 1
    for data in (first, second):
        for side in (data.train, data.test, data.public):
            assert (side.x.double().abs().sum(1) <= data.domain.l1).all()
            assert (side.x.double().square().sum(1) <= data.domain.l2**2 * (1 + 1e-12)).all()
            assert (side.y.double().abs() <= data.domain.target).all()
    assert all(
        torch.equal(getattr(first.public, part), getattr(second.public, part))
        for part in ("x", "y")
    )
    assert (first.notes, first.domain) == (second.notes, second.domain)
    assert first.train.offsets.equal(second.train.offsets)


@pytest.mark.parametrize(
    ("reader", "row", "column", "value", "message"),
    [
        (
            "adult",
            3,
            "race",
            "Green",
            r"line 5, column 'race' holds 'Green'; accepted: White, Amer-Indian-Eskimo",
        ),
        (
            "adult",
            3,
            "income",
            "50K",
            r"line 5, column 'income' holds '50K'; accepted: <=50K, >50K",
        ),
        ("adult", 3, "age", "old", r"line 5, column 'age' holds 'old'; accepted: a finite number"),
        ("adult", 3, "gender", None, r"column 'gender' is missing; the columns are 'age'"),
        ("hospital", 5, "sex", 2, r"line 7, column 'sex' holds 2; accepted: 0, 1"),
        ("hospital", 5, "los", -1, r"line 7, column 'los' holds -1; accepted: a number from 0"),
        ("hospital", 5, "hospital", "St. John", r"line 7, column 'hospital' holds 'St. John'"),
        (
            "lending",
            3,
            "loan_amount",
            "many",
            r"line 5, column 'loan_amount' holds 'many'; accepted: a finite number",
        ),
        (
            "lending",
            99,
            "interest_rate",
            101,
            r"line 101, column 'interest_rate' holds 101.*from 0 to 100",
        ),
    ],
)
def test_bad_tables_have_a_clear_error(tmp_path, reader, row, column, value, message):
    read, table, options = READERS[reader]
    file = write_csv(tmp_path / "bad.csv", spoiled(table(), column, row, value))
    with pytest.raises(DataError, match=rf"bad\.csv.*{message}"):
        read(file, **options)


@pytest.mark.parametrize(
    ("reader", "options", "error", "message"),
    [
        (
            "adult",
            {"labels": "rank"},
            ConfigError,
            r"adult\.labels is 'rank'; accepted: 'signed', 'class'",
        ),
        (
            "adult",
            {"components": 11},
            ConfigError,
            r"adult\.components is 11, but the 10 public rows have only 9",
        ),
        ("adult", {"public_rows": 40}, DataError, r"has 40 rows, and adult\.public_rows is 40"),
        ("hospital", {"public_fraction": 1.0}, ConfigError, r"hospital\.public_fraction is 1\.0"),
        ("hospital", {"test_fraction": 1.0}, ConfigError, r"test_fraction is 1\.0"),
        (
            "lending",
            {"components": 41},
            ConfigError,
            r"components is 41, but the 60 public rows have only \d+ independent directions",
        ),
        ("lending", {"clients": 50}, ConfigError, r"a client would have 0 of the 40"),
        (
            "lending",
            {"public_rows": 100},
            DataError,
            r"has 100 rows, and lending\.public_rows is 100",
        ),
    ],
)
def test_impossible_settings_are_refused(tmp_path, reader, options, error, message):
    read, table, fitting = READERS[reader]
    with pytest.raises(error, match=message):
        read(write_csv(tmp_path / "table.csv", table()), **fitting | options)


def test_tables_that_are_missing_or_empty_are_named(tmp_path):
    with pytest.raises(DataError, match=r"holds none of azpro\.csv"):
        hospital.read_hospital(tmp_path)
    file = write_csv(tmp_path / "loans.csv", test_lending.loans().iloc[:0])
    with pytest.raises(DataError, match=r"loans\.csv.*has no rows"):
        lending.read_lending(file, **test_lending.SMALL)
