"""Tables dealt to data owners: rows within public bounds, and a public part beside them.

With records as the protected unit, a row's features may depend on that record and on public constants, and on no
other record: otherwise replacing one record moves every row. So whatever is fitted (means, principal components,
categories) is fitted on rows that are declared public, and rows are clipped to norms that are public constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol

import numpy as np
import torch

from ..._check import positive, positive_int
from ...errors import ConfigError, DataError
from ...random import keyed_generator
from ..checks import check_fraction
from ..dataset import FederatedDataset
from ..examples import Domain, Examples
from ..partition import from_partition

SHRINK = 1 - 2.0**-20
"""Rows are clipped to this share of their bound, so that rounding to float32 cannot cross it."""

P = ParamSpec("P")


@dataclass(frozen=True, eq=False)
class OwnerData:
    """Owners' private rows with what is public about them.

    Args:
        data: one client an owner; its ``notes`` name the public part, which is in its ``public`` and ``domain``.
    """

    data: FederatedDataset

    @property
    def public(self) -> Examples:
        """The public rows as one client's examples, coded as the private ones; free for choosing step sizes."""
        assert self.data.public is not None
        return self.data.public

    @property
    def domain(self) -> Domain:
        """The bounds that private and public rows keep."""
        assert self.data.domain is not None
        return self.data.domain


class HasData(Protocol):
    """Anything with a dataset."""

    @property
    def data(self) -> FederatedDataset: ...


def data_of(reader: Callable[P, HasData]) -> Callable[P, FederatedDataset]:
    """The reader that returns the ``data`` of what ``reader`` returns, with the same arguments."""

    @functools.wraps(reader)
    def read(*args: P.args, **options: P.kwargs) -> FederatedDataset:
        return reader(*args, **options).data

    return read


def clip_rows(x: np.ndarray, *, l1: float | None = None, l2: float | None = None) -> np.ndarray:
    """Rows scaled down to public norms.

    Args:
        x: (n, d), finite.
        l1: bound on ``||x||_1``; None for no bound.
        l2: bound on ``||x||_2``; None for no bound.

    Returns:
        (n, d) float32: ``x min(1, l1 / ||x||_1, l2 / ||x||_2)``, within the bounds also after rounding.
    """
    wide = x.astype(np.float64)
    factor = np.ones(len(wide))
    for bound, order in ((l1, 1), (l2, 2)):
        if bound is not None:
            norm = np.linalg.norm(wide, ord=order, axis=1)
            factor = np.minimum(factor, SHRINK * bound / np.maximum(norm, SHRINK * bound))
    return (wide * factor[:, None]).astype(np.float32)


def clip_targets(y: np.ndarray, bound: float) -> np.ndarray:
    """y (n,) moved into plus or minus ``bound``, float32, within it also after rounding."""
    return np.clip(y, -SHRINK * bound, SHRINK * bound).astype(np.float32)


def with_intercept(x: np.ndarray) -> np.ndarray:
    """x (n, d) with a last column of ones, float32 (n, d + 1)."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float32)


def check_bounds(where: str, **bounds: float | None) -> None:
    """Raise :class:`ConfigError` unless every bound is None or a finite number above 0."""
    positive(where, **{name: bound for name, bound in bounds.items() if bound is not None})


def check_share(where: str, test_fraction: float | None, min_examples: int) -> None:
    """A test share that owners with ``min_examples`` records can give."""
    positive_int(where, min_examples=min_examples)
    if test_fraction is None:
        return
    check_fraction(test_fraction)
    if min_examples < 2:
        raise ConfigError(
            f"{where}.min_examples is 1, but an owner with one record cannot hold out test records of its own; "
            "give min_examples=2, or test_fraction=None to test every owner on the public rows."
        )


def deal(
    rows: int, clients: int, sizes: int | Sequence[int] | None, seed: int, *, where: str, least: int
) -> dict[str, np.ndarray]:
    """Row numbers of each owner: consecutive parts of one random permutation of ``0 .. rows - 1``.

    Args:
        rows: number of private rows.
        clients: number of owners; ids are ``owner-0``, ``owner-1``, ...
        sizes: rows of each owner: None for all rows in equal parts (they differ by at most 1), one number for all
            owners, or one number an owner. With one number, owner i has the same rows whatever the number of owners.
        seed: of the permutation.
        where: for messages.
        least: rows that an owner must have.

    Raises:
        ConfigError: sizes of another length, below ``least``, or more rows than there are.
    """
    positive_int(where, clients=clients)
    if sizes is None:
        counts = [rows // clients + (i < rows % clients) for i in range(clients)]
    elif isinstance(sizes, Sequence) and not isinstance(sizes, str):
        counts = list(sizes)
    else:
        counts = [sizes] * clients
    if len(counts) != clients:
        raise ConfigError(f"{where}.sizes has {len(counts)} numbers, but clients is {clients}; give one an owner.")
    if sizes is not None:
        for count in counts:
            positive_int(where, sizes=count)
    if min(counts) < least:
        raise ConfigError(
            f"{where}: an owner would have {min(counts)} of the {rows} private rows; each needs at least {least} "
            f"(fewer clients, larger sizes{'' if least == 1 else ', or test_fraction=None'})."
        )
    if sum(counts) > rows:
        raise ConfigError(
            f"{where}: clients={clients} and sizes={sizes} ask for {sum(counts)} rows, but there are {rows} "
            "private rows; ask for fewer."
        )
    order = keyed_generator(seed, "owners").permutation(rows)
    parts = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    return {f"owner-{i}": np.sort(part) for i, part in enumerate(parts)}


def assemble(
    x: np.ndarray,
    y: np.ndarray,
    parts: Mapping[str, np.ndarray],
    public: tuple[np.ndarray, np.ndarray],
    domain: Domain,
    *,
    test_fraction: float | None,
    seed: int,
    classes: int | None,
    name: str,
    notes: Sequence[str],
) -> OwnerData:
    """Owners' rows as a dataset.

    Args:
        x: private features (n, d), float32 within ``domain``.
        y: private targets (n,), float32, or int64 labels with ``classes``.
        parts: each owner's row numbers.
        public: features and targets of the public rows.
        domain: the bounds.
        test_fraction: share of each owner's rows held out for test; None keeps all rows for training and tests
            every owner on the public rows.
        seed: of the split, keyed by the owner's id.
        classes: None for floating targets.
        name: for messages and reports.
        notes: what is outside of every epsilon.
    """
    public_x, public_y = torch.from_numpy(public[0]), torch.from_numpy(public[1])
    count = len(public_y)
    if test_fraction is not None:
        split = from_partition(x, y, parts, test_fraction=test_fraction, seed=seed, classes=classes, name=name)
        train, test = split.train, split.test
    else:
        index = torch.from_numpy(np.concatenate(list(parts.values())))
        offsets = torch.tensor([0, *np.cumsum([len(part) for part in parts.values()])])
        train = Examples(torch.from_numpy(x)[index], torch.from_numpy(y)[index], offsets)
        test = Examples(
            public_x.repeat(len(parts), 1),
            public_y.repeat(len(parts)),
            torch.arange(len(parts) + 1) * count,
        )
    public_rows = Examples(public_x, public_y, torch.tensor([0, count]))
    data = FederatedDataset(
        train,
        test,
        tuple(parts),
        classes=classes,
        name=name,
        notes=tuple(notes),
        public=public_rows,
        domain=domain,
    )
    return OwnerData(data)


def check_public(where: str, public_rows: int, rows: int, file: Path) -> None:
    """A whole number of public rows that leaves private ones."""
    positive_int(where, public_rows=public_rows)
    if public_rows >= rows:
        raise DataError(
            f"{file} has {rows} rows, and {where}.public_rows is {public_rows}; some rows must remain for the owners."
        )
