"""Hospital stays from small files of the original format, coded by hand."""

import numpy as np
import pandas as pd
import pytest

from fedmtl.data import load_data
from fedmtl.data.readers.hospital import public_places, read_hospital
from fedmtl.errors import DataError
from tests.data.rows import rows_of, write_csv

HEADER = ("rownames", "los", "procedure", "sex", "age75", "admit", "hospital")


def stays(rows: int = 80, seed: int = 0) -> pd.DataFrame:
    """Stays of hospitals 3.6 and 10.5, and one stay of hospital 2, not a public row."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({name: rng.integers(0, 2, rows) for name in HEADER})
    frame["rownames"] = np.arange(1, rows + 1)
    frame["los"] = rng.integers(0, 60, rows)
    where = rng.integers(0, 2, rows)
    where[int(np.flatnonzero(~public_places(rows, 0.1))[7])] = 2
    frame["hospital"] = np.array(["3.60000014305115", "10.5", "2"])[where]
    return frame


def test_stays_are_those_of_the_file(tmp_path):
    frame = stays()
    made = read_hospital(write_csv(tmp_path / "azpro.csv", frame), test_fraction=None)
    assert made.ids == ("hospital-3.6", "hospital-10.5")
    rows = []
    for _, row in frame.iterrows():
        x = [1.0 if row[name] == 1 else -1.0 for name in HEADER[2:6]] + [1.0]
        rows.append((float(row["hospital"]), *x, min(row["los"], 30) / 30))
    private = [
        (number, *row)
        for i, number in enumerate((3.60000014305115, 10.5))
        for row in rows_of(made, i, "train")
    ]
    # private rows under their hospital, and with the public ones and the one that is left out every row of the file
    left = [row for row in rows if row[0] != 2]
    for row in private:
        left.remove(next(r for r in left if r == pytest.approx(row, rel=1e-6)))
    public = made.public
    own = sorted((*x, y) for x, y in zip(public.x.tolist(), public.y.tolist(), strict=True))
    np.testing.assert_allclose(own, sorted(r[1:] for r in left), rtol=1e-6)
    assert made.test.counts.tolist() == [8, 8]
    assert made.test.y[:8].tolist() == public.y.tolist()
    assert (made.domain.l1, made.domain.l2, made.domain.target) == (5.0, pytest.approx(5**0.5), 1.0)
    assert (made.train.y == 1).any()


def test_the_public_rows_are_the_same_whatever_the_seed(tmp_path):
    frame = stays()
    frame["los"] = np.linspace(0.1, 29, 80)  # every stay once
    file = write_csv(tmp_path / "azpro.csv", frame)
    first, second = read_hospital(file, seed=0), read_hospital(file, seed=1)
    assert first.public.y.equal(second.public.y)
    assert not first.train.y.equal(second.train.y)
    private = set(first.train.y.tolist()) | set(first.test.y.tolist())
    assert not private & set(first.public.y.tolist())
    (note,) = first.notes
    assert "8 of the 80 stays" in note
    assert "no epsilon covers them" in note
    more = read_hospital(file, public_fraction=0.5)
    assert len(more.public) == 40
    assert set(first.public.y.tolist()) < set(more.public.y.tolist())


def test_small_hospitals_are_left_out(tmp_path):
    file = write_csv(tmp_path / "azpro.csv", stays())
    assert load_data("hospital", root=file).fingerprint() == read_hospital(tmp_path).fingerprint()
    assert read_hospital(file).ids == ("hospital-3.6", "hospital-10.5")
    with pytest.raises(DataError, match="no hospital has 2 or more private stays"):
        read_hospital(write_csv(tmp_path / "few.csv", stays().iloc[:1]))
