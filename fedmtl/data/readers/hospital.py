"""Length of stay in hospital: one client a hospital, features and targets coded with public
constants only.

The second regression of Farokhi, Wu, Smith, Kaafar: "The cost of privacy in asynchronous
differentially-private machine learning", IEEE TIFS 2021, section V-B, on a small openly published
table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..._check import fraction
from ...errors import DataError
from ...random import derive_key, keyed_bits
from ..checks import say_left_out
from ..dataset import FederatedDataset
from ..examples import Domain
from ..loaders import reader
from .bounded_rows import with_intercept
from .columns import Table
from .dealing import assemble
from .table_files import find_file

STAY = "los"


CLIENT = "hospital"
FEATURES = ("procedure", "sex", "age75", "admit")
"""Columns of 0 and 1."""
DROPPED = {"rownames": "an identifier"}
"""The columns that are never features, with the reason."""
LONGEST = 30.0
LEAST = 2
"""Days that a longer stay counts as, a public constant, and the fewest private stays of a hospital
that takes part."""


@reader("hospital")
def read_hospital(
    root: str | Path,
    *,
    public_fraction: float = 0.1,
    test_fraction: float | None = 0.2,
    seed: int = 0,
) -> FederatedDataset:
    """Reads azpro.csv: stays in days by hospital, for coronary procedures in 17 hospitals of
    Arizona.

    Features are procedure (bypass or angioplasty), sex, age75 and admit (urgent) as -1 and +1, and
    a 1, so that every row has the same norms and none is clipped; the target is ``min(days, 30) /
    30``. Nothing is fitted on any record.

    Args:
        root: the .csv file, or its folder.
        public_fraction: share of the rows that is taken as public, at least one; it belongs to no
            client. Their place in the file decides which rows they are, and not ``seed``:
            repetitions with other seeds do not make other rows public.
        test_fraction: share of each hospital's stays held out for test; None trains on all of them
            and tests every hospital on the public rows.
        seed: of the split, keyed by the hospital's id.

    Returns:
        Features (5,) and targets in [0, 1], float32; ids ``hospital-3.6``, ... in ascending order
        of the hospital's number. Hospitals with one private stay are left out.

    Raises:
        DataError: an unreadable file, a missing column, a feature other than 0 or 1, a stay below
            0, a hospital that has no number, no hospital with enough stays.
        ConfigError: an impossible setting.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedmtl.data import read_hospital
        >>> with TemporaryDirectory() as folder:
        ...     with Path(folder, "azpro.csv").open("w") as file:
        ...         print("rownames,procedure,sex,age75,admit,los,hospital", file=file)
        ...         for row in range(20):
        ...             print(row, 1, row % 2, 0, 1, 5 + row, 3 + row % 2, sep=",", file=file)
        ...     data = read_hospital(folder)
        >>> data.ids, data.spec.shape
        (('hospital-3', 'hospital-4'), (5,))
    """
    where = "hospital"
    fraction(where, public_fraction=public_fraction)
    file = find_file(root, ("azpro.csv", "azpro.csv.gz"))
    rows = Table.of(file)
    rows.check_columns((STAY, CLIENT, *FEATURES))
    x = with_intercept(np.stack([_signs(rows, name) for name in FEATURES], axis=1))
    days = rows.numbers(STAY, low=0.0, high=36500.0)
    y = (np.minimum(days, LONGEST) / LONGEST).astype(np.float32)
    width = len(FEATURES) + 1
    public = public_places(len(rows), public_fraction)
    parts = _hospitals(rows.numbers(CLIENT), public, file)
    note = (
        f"{int(public.sum())} of the {len(rows)} stays, chosen by their place in the file, are "
        "taken as public, and "
        "no epsilon covers them; the number of stays of each hospital is public"
    )
    options: dict[str, Any] = {"test_fraction": test_fraction, "seed": seed, "classes": None}
    data = assemble(x, y, parts, public, name="hospital (azpro)", **options)
    # each of the features is from 0 to 1
    domain = Domain(float(width), float(np.sqrt(width)), 1.0)
    return replace(data, domain=domain, notes=(note,), verify=False)


def public_places(rows: int, share: float) -> np.ndarray:
    """Returns a mask of the public rows, bool (rows,): ``round(share * rows)`` of them, at least
    one, always the same."""
    score = keyed_bits(
        derive_key(0, "hospital/public"),
        torch.zeros(rows, dtype=torch.int64),
        0,
        torch.arange(rows),
    )
    chosen = np.zeros(rows, dtype=bool)
    chosen[np.argsort(score.numpy(), kind="stable")[: max(1, round(share * rows))]] = True
    return chosen


def _signs(rows: Table, column: str) -> np.ndarray:
    """Maps 0 and 1 to -1 and +1."""
    values = rows.numbers(column)
    rows.refuse((values != 0) & (values != 1), column, "0, 1")
    return 2 * values - 1


def _hospitals(values: np.ndarray, public: np.ndarray, file: Path) -> dict[str, np.ndarray]:
    """Returns the private row numbers of each hospital with enough of them."""
    parts = {}
    hospitals = np.unique(values)
    for value in hospitals:
        rows = np.flatnonzero((values == value) & ~public)
        if len(rows) >= LEAST:
            parts[f"hospital-{value:.7g}"] = rows
    if not parts:
        raise DataError(f"{file}: no hospital has {LEAST} or more private stays.")
    say_left_out(len(hospitals) - len(parts), str(file), f"fewer than {LEAST} private stays")
    return parts
