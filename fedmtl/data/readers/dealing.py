"""Tables dealt to clients: rows within public bounds, and a public part beside them.

With records as the protected unit, a row's features may depend on that record and on public
constants, and on no other record: otherwise replacing one record moves every row. So whatever is
fitted (means, principal components, categories) is fitted on rows that are declared public, and
rows are clipped to norms that are public constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..._check import positive_int
from ...errors import ConfigError, DataError
from ...random import keyed_generator
from ..dataset import FederatedDataset
from ..examples import Examples
from ..partition import from_partition
from ..transforms import SHRINK
from .columns import Table


@dataclass(frozen=True)
class DealtTable:
    """Settings of a table that is dealt to clients and coded by its public rows.

    Args:
        root: the .csv or .csv.gz file, or its folder.
        clients: their number N; ids ``owner-0``, ``owner-1``, ...
        sizes: rows of each client, training and test together: None for all in N equal parts, one
            number for all clients, or one number a client.
        public_rows: the last rows of the file, taken as public; they belong to no client.
        components: principal components k of the whitening, which the public rows fit.
        z_clip: bound on a coded column's z-score.
        l1: bound on ``||x||_1`` of the k components, a public constant; longer rows are scaled
            down.
        test_fraction: share of each client's rows held out for test; None trains on all of them
            and tests every client on the public rows.
        seed: of the deal and of the split.
    """

    root: str | Path
    _: KW_ONLY
    clients: int = 3
    sizes: int | Sequence[int] | None = None
    public_rows: int = 1000
    components: int = 10
    z_clip: float = 5.0
    l1: float = 12.0
    test_fraction: float | None = 0.2
    seed: int = 0


def texts_of(table: Table, column: str) -> np.ndarray:
    """Returns a column of texts (n,), stripped; an empty value becomes ``""``."""
    # a missing value is a category of its own
    return table.frame[column].astype(object).fillna("").astype(str).str.strip().to_numpy(dtype=str)


def clip_targets(y: np.ndarray, bound: float) -> np.ndarray:
    """Moves y (n,) into plus or minus ``bound``, float32, within it also after rounding."""
    return np.clip(y, -SHRINK * bound, SHRINK * bound).astype(np.float32)


def deal(
    rows: int, clients: int, sizes: int | Sequence[int] | None, seed: int, *, where: str, least: int
) -> dict[str, np.ndarray]:
    """Deals rows to clients: consecutive parts of one random permutation of ``0 .. rows - 1``.

    Args:
        rows: number of private rows.
        clients: their number; ids are ``owner-0``, ``owner-1``, ...
        sizes: rows of each client: None for all rows in equal parts (they differ by at most 1), one
            number for all clients, or one number a client. With one number, client i has the same
            rows whatever their number.
        seed: of the permutation.
        where: for messages.
        least: rows that a client must have.

    Returns:
        The row numbers of each client, ascending.

    Raises:
        ConfigError: sizes of another length, below ``least``, or more rows than there are.
    """
    positive_int(where, clients=clients)
    if sizes is None:
        # the first clients take the rest
        counts = [rows // clients + (i < rows % clients) for i in range(clients)]
    elif isinstance(sizes, Sequence) and not isinstance(sizes, str):
        counts = list(sizes)
    else:
        counts = [sizes] * clients
    if len(counts) != clients:
        raise ConfigError(
            f"{where}.sizes has {len(counts):,} numbers, but clients is {clients:,}; "
            "give one a client."
        )
    if sizes is not None:
        for count in counts:
            positive_int(where, sizes=count)
    if min(counts) < least:
        remedies = "fewer clients, larger sizes"
        if least > 1:
            remedies += ", or test_fraction=None"
        raise ConfigError(
            f"{where}: a client would have {min(counts)} of the {rows} private rows; each needs at "
            f"least {least} ({remedies})."
        )
    if sum(counts) > rows:
        raise ConfigError(
            f"{where}: clients={clients} and sizes={sizes} ask for {sum(counts):,} rows, but there "
            f"are {rows:,} private rows; ask for fewer."
        )
    # one permutation of all rows, so that client i has the same rows whatever the number of clients
    order = keyed_generator(seed, "owners").permutation(rows)
    parts = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    return {f"owner-{i}": np.sort(part) for i, part in enumerate(parts)}


def deal_table(rows: int, settings: DealtTable, *, where: str, file: Path) -> dict[str, np.ndarray]:
    """Deals the private rows of a table to clients; see :func:`deal`.

    Args:
        rows: number of rows of the table, of which the last ``public_rows`` are public.
        settings: of the deal.
        where: names the reader in messages.
        file: of the table, for messages.

    Returns:
        The row numbers of each client, ascending.

    Raises:
        DataError: no private row remains.
        ConfigError: an impossible setting.
    """
    least = 1
    if settings.test_fraction is not None:
        least = 2  # one of them for test
    public_rows = settings.public_rows
    positive_int(where, public_rows=public_rows)
    if public_rows >= rows:
        raise DataError(
            f"{file} has {rows:,} rows, and {where}.public_rows is {public_rows:,}; some must "
            "remain for the clients."
        )
    private = rows - public_rows
    return deal(private, settings.clients, settings.sizes, settings.seed, where=where, least=least)


def assemble(
    x: np.ndarray,
    y: np.ndarray,
    parts: Mapping[str, np.ndarray],
    public: np.ndarray | slice,
    *,
    test_fraction: float | None,
    seed: int,
    classes: int | None,
    name: str,
) -> FederatedDataset:
    """Makes a dataset of the rows of a table.

    Args:
        x: features (n, d) of all rows, private and public, float32.
        y: targets (n,), float32, or int64 labels with ``classes``.
        parts: each client's row numbers.
        public: numbers of the public rows, or a slice.
        test_fraction: share of each client's rows held out for test; None keeps all rows for
            training and tests every client on the public rows.
        seed: of the split, keyed by the client's id.
        classes: None for floating targets.
        name: for messages and reports.
    """
    public_x = torch.from_numpy(x[public])
    public_y = torch.from_numpy(y[public])
    count = len(public_y)
    public_rows = Examples(public_x, public_y, torch.tensor([0, count]))
    if test_fraction is not None:
        data = from_partition(
            x, y, parts, test_fraction=test_fraction, seed=seed, classes=classes, name=name
        )
        return replace(data, public=public_rows)
    # no row is held out: all clients are tested on the public rows
    index = torch.from_numpy(np.concatenate(list(parts.values())))
    offsets = torch.tensor([0, *np.cumsum([len(part) for part in parts.values()])])
    return FederatedDataset(
        Examples(torch.from_numpy(x)[index], torch.from_numpy(y)[index], offsets),
        Examples(
            public_x.repeat(len(parts), 1),
            public_y.repeat(len(parts)),
            torch.arange(len(parts) + 1) * count,
        ),
        tuple(parts),
        classes=classes,
        name=name,
        public=public_rows,
    )
