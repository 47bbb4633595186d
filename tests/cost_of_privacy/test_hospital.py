"""Hospital stays from small files of the original formats, coded by hand."""

import numpy as np
import pandas as pd
import pytest

from benchmarks.reproduce.cost_of_privacy.readers.hospital import public_places, read_hospital
from fedmtl.data import load_data
from fedmtl.errors import ConfigError, DataError
from tests.data.rows import moved_rows, rows_of, write_csv

AZPRO = ("rownames", "los", "procedure", "sex", "age75", "admit", "hospital")
MEDPAR = ("rownames", "los", "hmo", "white", "died", "age80", "type", "type1", "type2", "type3", "provnum")


def stays(table: str = "azpro", rows: int = 80, seed: int = 0) -> pd.DataFrame:
    """Stays of hospitals 3.6 and 10.5 (or 30001 ...), and one stay of a last hospital, not a public row."""
    rng = np.random.default_rng(seed)
    header, client = (AZPRO, "hospital") if table == "azpro" else (MEDPAR, "provnum")
    frame = pd.DataFrame({name: rng.integers(0, 2, rows) for name in header})
    frame["rownames"] = np.arange(1, rows + 1)
    frame["los"] = rng.integers(0, 60, rows)
    names = ["3.60000014305115", "10.5", "2"] if table == "azpro" else ["30002", "30010", "30001"]
    where = rng.integers(0, 2, rows)
    where[int(np.flatnonzero(~public_places(rows, 0.1))[7])] = 2
    frame[client] = np.array(names)[where]
    return frame


@pytest.mark.parametrize("table", ["azpro", "medpar"])
def test_stays_are_those_of_the_file(tmp_path, table):
    frame = stays(table)
    write_csv(tmp_path / f"{table}.csv", frame)
    given = read_hospital(tmp_path, table=table, test_fraction=None, min_examples=1)
    assert given.ids == (
        ("hospital-2", "hospital-3.6", "hospital-10.5")
        if table == "azpro"
        else ("hospital-30001", "hospital-30002", "hospital-30010")
    )
    features = AZPRO[2:6] if table == "azpro" else ("hmo", "white", "age80", "type2", "type3")
    rows = []
    for _, row in frame.iterrows():
        x = [1.0 if row[name] == 1 else -1.0 for name in features] + [1.0]
        rows.append((float(row["provnum" if table == "medpar" else "hospital"]), *x, min(row["los"], 30) / 30))
    hospitals = sorted({row[0] for row in rows})
    train, public = given.train, given.public
    got = [(name, *row) for i, name in enumerate(hospitals) for row in rows_of(given, i, "train")]
    assert train.counts[0] == 1
    assert len(public) == 8
    # private rows under their hospital, and with the public ones every row of the file once
    left = list(rows)
    for row in got:
        left.remove(next(r for r in left if r == pytest.approx(row, rel=1e-6)))
    own = sorted((*x, y) for x, y in zip(public.x.tolist(), public.y.tolist(), strict=True))
    np.testing.assert_allclose(own, sorted(r[1:] for r in left), rtol=1e-6)
    assert given.test.counts.tolist() == [8, 8, 8]
    assert given.test.y[:8].tolist() == public.y.tolist()
    width = len(features) + 1
    assert (given.domain.l1, given.domain.l2, given.domain.target) == (width, pytest.approx(width**0.5), 1.0)
    assert (train.x.abs().sum(1) == width).all()
    assert (train.y <= 1).all()
    assert (train.y == 1).any()


def test_a_private_record_moves_its_own_row_only(tmp_path):
    frame = stays()
    first = read_hospital(write_csv(tmp_path / "a.csv", frame))
    row = int(np.flatnonzero(~public_places(80, 0.1))[3])
    for name in ("procedure", "sex", "age75", "admit"):
        frame.loc[row, name] = 1 - frame.loc[row, name]
    frame.loc[row, "los"] = 30000
    second = read_hospital(write_csv(tmp_path / "b.csv", frame))
    assert moved_rows(first, second) == 1
    assert max(second.train.y.max(), second.test.y.max()) <= 1
    assert first.public.x.equal(second.public.x)
    assert first.public.y.equal(second.public.y)


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


def test_small_hospitals_are_left_out_where_they_cannot_be_split(tmp_path):
    file = write_csv(tmp_path / "azpro.csv", stays())
    assert read_hospital(file).ids == ("hospital-3.6", "hospital-10.5")
    assert read_hospital(file, test_fraction=None).ids == ("hospital-3.6", "hospital-10.5")
    assert len(read_hospital(file, test_fraction=None, min_examples=1)) == 3
    assert load_data("hospital", root=file).fingerprint() == read_hospital(tmp_path).fingerprint()
    assert read_hospital(file, intercept=False).spec.shape == (4,)
    with pytest.raises(ConfigError, match="a client with one record cannot hold out"):
        read_hospital(file, min_examples=1)
    with pytest.raises(DataError, match="no hospital has 70 or more private stays"):
        read_hospital(file, min_examples=70)
