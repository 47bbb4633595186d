"""Length of stay in hospital: one client a hospital, features and targets coded with public constants only.

The second regression of Farokhi, Wu, Smith, Kaafar: "The cost of privacy in asynchronous differentially-private
machine learning", IEEE TIFS 2021, section VI-B, on two small openly published tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedmtl._check import one_of, positive
from fedmtl.data.checks import say_left_out
from fedmtl.data.dataset import FederatedDataset
from fedmtl.data.examples import Domain
from fedmtl.data.loaders import reader
from fedmtl.data.readers.columns import Table, find_file
from fedmtl.errors import ConfigError, DataError
from fedmtl.random import derive_key, keyed_bits

from .bounded_rows import with_intercept
from .dealing import assemble, check_share

STAY = "los"


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are used.

    Args:
        client: the column that names the hospital.
        features: columns of 0 and 1.
        dropped: columns that are never features, with the reason.
    """

    client: str
    features: tuple[str, ...]
    dropped: dict[str, str]


TABLES = {
    "azpro": Columns("hospital", ("procedure", "sex", "age75", "admit"), {"rownames": "an identifier"}),
    "medpar": Columns(
        "provnum",
        ("hmo", "white", "age80", "type2", "type3"),
        {
            "rownames": "an identifier",
            "died": "known only at the end of the stay",
            "type": "the kind of admission, coded by type2 and type3",
            "type1": "1 - type2 - type3",
        },
    ),
}


@reader("hospital")
def read_hospital(
    root: str | Path,
    *,
    table: Literal["azpro", "medpar"] = "azpro",
    public_fraction: float = 0.1,
    longest_stay: float = 30.0,
    intercept: bool = True,
    test_fraction: float | None = 0.2,
    min_examples: int = 2,
    seed: int = 0,
) -> FederatedDataset:
    """Read azpro.csv or medpar.csv: stays in days by hospital.

    Features are -1 and +1, so that every row has the same norms and none is clipped; the target is
    ``min(days, longest_stay) / longest_stay``. Nothing is fitted on any record.

    Args:
        root: the .csv file, or the folder of both.
        table: ``"azpro"``: 17 hospitals, coronary procedures in Arizona, with procedure (bypass or angioplasty), sex,
            age75 and admit (urgent); ``"medpar"``: 54 providers, with hmo, white, age80 and the kind of admission.
        public_fraction: share of the rows that is taken as public, at least one; it belongs to no client. Which rows
            is fixed by their place in the file and does not depend on ``seed``: repetitions with other seeds do not
            make other rows public.
        longest_stay: a public constant, in days; longer stays count as that long.
        intercept: append a feature that is 1.
        test_fraction: share of each hospital's stays held out for test; None trains on all of them and tests every
            hospital on the public rows.
        min_examples: hospitals with fewer private stays are left out; 1 is possible with ``test_fraction=None``.
        seed: of the split, keyed by the hospital's id.

    Returns:
        Features (d,), 5 or 6 with the intercept, and targets in (0, 1], float32; ids ``hospital-3.6``, ... in
        ascending order of the hospital's number.

    Raises:
        DataError: an unreadable file, a missing column, a feature other than 0 or 1, a stay below 0, a hospital
            that has no number, no hospital with enough stays.
        ConfigError: an impossible setting.
    """
    where = "hospital"
    one_of(where, tuple(TABLES), table=table)
    positive(where, longest_stay=longest_stay, public_fraction=public_fraction)
    if public_fraction >= 1:
        raise ConfigError(f"{where}.public_fraction is {public_fraction!r}; it must be above 0 and below 1.")
    check_share(where, test_fraction, min_examples)
    columns = TABLES[table]
    file = find_file(root, (f"{table}.csv", f"{table}.csv.gz"))
    rows = Table.of(file)
    rows.check_columns((STAY, columns.client, *columns.features))
    x = np.stack([_signs(rows, name) for name in columns.features], axis=1)
    days = rows.numbers(STAY, low=0.0, high=36500.0)
    y = (np.minimum(days, longest_stay) / longest_stay).astype(np.float32)
    width = len(columns.features) + intercept
    x = with_intercept(x) if intercept else x.astype(np.float32)
    public = public_places(len(rows), public_fraction)
    parts = _hospitals(rows.numbers(columns.client), public, min_examples, file)
    note = (
        f"{int(public.sum())} of the {len(rows)} stays, chosen by their place in the file, are taken as public, and "
        "no epsilon covers them; the number of stays of each hospital is public"
    )
    return assemble(
        x, y, parts, public, Domain(float(width), float(np.sqrt(width)), 1.0),
        test_fraction=test_fraction, seed=seed, classes=None, name=f"hospital ({table})", notes=(note,),
    )  # fmt: skip


def public_places(rows: int, share: float) -> np.ndarray:
    """Return which rows are public, bool (rows,): ``round(share * rows)`` of them, at least one, always the same."""
    score = keyed_bits(derive_key(0, "hospital/public"), torch.zeros(rows, dtype=torch.int64), 0, torch.arange(rows))
    chosen = np.zeros(rows, dtype=bool)
    chosen[np.argsort(score.numpy(), kind="stable")[: max(1, round(share * rows))]] = True
    return chosen


def _signs(rows: Table, column: str) -> np.ndarray:
    """Map 0 and 1 to -1 and +1."""
    values = rows.numbers(column)
    rows.refuse((values != 0) & (values != 1), column, "0, 1")
    return 2 * values - 1


def _hospitals(values: np.ndarray, public: np.ndarray, least: int, file: Path) -> dict[str, np.ndarray]:
    """Return the private row numbers of each hospital with at least ``least`` of them."""
    parts, hospitals = {}, np.unique(values)
    for value in hospitals:
        rows = np.flatnonzero((values == value) & ~public)
        if len(rows) >= least:
            parts[f"hospital-{value:.7g}"] = rows
    if not parts:
        raise DataError(f"{file}: no hospital has {least} or more private stays (min_examples).")
    say_left_out(len(hospitals) - len(parts), str(file), f"fewer than {least} private stays (min_examples)")
    return parts
