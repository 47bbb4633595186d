"""What the readers of the study have in common: every column has a use or a reason, and bad input has a clear error."""

import pytest

from benchmarks.reproduce.cost_of_privacy.readers import adult, hospital, lending
from fedmtl.errors import ConfigError, DataError
from tests.cost_of_privacy import test_adult, test_hospital, test_lending
from tests.data.rows import spoiled, write_csv

READERS = {  # the reader, a table, and settings that fit it
    "adult": (adult.read_adult, test_adult.persons, {"public_rows": 10}),
    "hospital": (hospital.read_hospital, test_hospital.stays, {}),
    "lending": (lending.read_lending, test_lending.loans, test_lending.SMALL),
}


def test_every_column_is_used_once_or_dropped_for_a_reason():
    used = (*adult.RANGES, *adult.CATEGORIES, *adult.DROPPED, "income")
    assert sorted(used) == sorted(test_adult.HEADER)
    used = (*lending.CATEGORIES, *lending.NUMBERS, *lending.DROPPED, "interest_rate")
    assert sorted(used) == sorted(test_lending.HEADER)
    assert all(lending.DROPPED.values())
    for table, header in (("azpro", test_hospital.AZPRO), ("medpar", test_hospital.MEDPAR)):
        columns = hospital.TABLES[table]
        assert sorted(("los", columns.client, *columns.features, *columns.dropped)) == sorted(header)


@pytest.mark.parametrize(
    ("reader", "row", "column", "value", "message"),
    [
        ("adult", 3, "race", "Green", r"line 5, column 'race' holds 'Green'; accepted: White, Amer-Indian-Eskimo"),
        ("adult", 3, "income", "50K", r"line 5, column 'income' holds '50K'; accepted: <=50K, >50K"),
        ("adult", 3, "age", "old", r"line 5, column 'age' holds 'old'; accepted: a finite number"),
        ("adult", 3, "gender", None, r"column 'gender' is missing; the columns are 'age'"),
        ("hospital", 5, "sex", 2, r"line 7, column 'sex' holds 2; accepted: 0, 1"),
        ("hospital", 5, "los", -1, r"line 7, column 'los' holds -1; accepted: a number from 0"),
        ("hospital", 5, "hospital", "St. John", r"line 7, column 'hospital' holds 'St. John'"),
        ("lending", 3, "loan_amount", "many", r"line 5, column 'loan_amount' holds 'many'; accepted: a finite number"),
        ("lending", 99, "interest_rate", 101, r"line 101, column 'interest_rate' holds 101.*from 0 to 100"),
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
        ("adult", {"coding": "hash"}, ConfigError, r"adult\.coding is 'hash'; accepted: 'one_hot', 'integer'"),
        ("adult", {"components": 11}, ConfigError, r"adult\.components is 11, but the 10 public rows have only 9"),
        ("adult", {"public_rows": 40}, DataError, r"has 40 rows, and adult\.public_rows is 40"),
        ("hospital", {"table": "nyc"}, ConfigError, r"hospital\.table is 'nyc'; accepted: 'azpro', 'medpar'"),
        ("hospital", {"public_fraction": 1.0}, ConfigError, r"hospital\.public_fraction is 1\.0; it must be above 0"),
        (
            "lending",
            {"components": 41},
            ConfigError,
            r"components is 41, but the 60 public rows have only \d+ independent directions",
        ),
        ("lending", {"clients": 50}, ConfigError, r"a client would have 0 of the 40"),
        ("lending", {"public_rows": 100}, DataError, r"has 100 rows, and lending\.public_rows is 100"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, reader, options, error, message):
    read, table, fitting = READERS[reader]
    with pytest.raises(error, match=message):
        read(write_csv(tmp_path / "table.csv", table()), **fitting | options)


def test_tables_that_are_missing_or_empty_are_named(tmp_path):
    with pytest.raises(DataError, match=r"holds none of medpar\.csv"):
        hospital.read_hospital(tmp_path, table="medpar")
    file = write_csv(tmp_path / "loans.csv", test_lending.loans().iloc[:0])
    with pytest.raises(DataError, match=r"loans\.csv.*has no rows"):
        lending.read_lending(file, **test_lending.SMALL)
