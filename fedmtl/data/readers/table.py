"""Tables: CSV or parquet with one row an example and a column that says whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..._check import positive_int
from ...errors import ConfigError, DataError
from ..checks import check_fraction
from ..dataset import Classes, FederatedDataset
from ..loaders import reader
from ..rows import offsets_of
from ..transforms import Integers, Transform
from .columns import Table, codes

if TYPE_CHECKING:
    import pandas as pd

_WHOLE = 1 << 24  # whole numbers below it are exact in float32


@reader("table")
def read_table(
    path: str | Path | pd.DataFrame,
    *,
    client: str,
    target: str,
    features: Sequence[str] | None = None,
    one_hot: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    classes: Classes = "infer",
    test_fraction: float = 0.2,
    seed: int = 0,
    min_examples: int = 2,
    integers: bool = False,
    transform: Transform | None = None,
    name: str | None = None,
) -> FederatedDataset:
    """Read a table with a client column.

    Features are stored as float32, one a column; clients come in the order of their ids. Values
    are not standardized, since a scaling fitted on the rows would be a release of its own: give public
    constants as ``transform=Affine(scale, shift)``.

    Args:
        path: a .csv, .tsv (both also .gz) or .parquet file, or a table of pandas.
        client: the column with each row's client; its values become the ids, as text.
        target: the column to predict.
        features: the columns to predict from; None for all others.
        one_hot: feature columns to code as one 0/1 feature a category, categories in order of their text.
        labels: the target's values in order of their class number, as text; needed where the target is text.
        classes: as in :meth:`FederatedDataset.from_tensors`; with ``labels`` their number.
        test_fraction: share of each client's rows held out for test.
        seed: of the split, keyed by the client.
        min_examples: clients with fewer rows are left out.
        integers: keep the features as whole numbers, for models of tokens.
        transform: from storage to what the model takes; None for :class:`~fedmtl.data.Cast`, or
            :class:`~fedmtl.data.Integers` for ``integers``.
        name: for messages and reports; None for the file's name, or ``"table"``.

    Raises:
        DataError: an unreadable file, a missing column, a missing, infinite or textual value.
        ConfigError: an impossible setting.
    """
    positive_int("read_table", min_examples=min_examples)
    check_fraction(test_fraction)
    table = Table.of(path, (client, *one_hot, *(() if labels is None else (target,))), name)
    file = table.file
    if features is None:
        features = [column for column in table.frame.columns if column not in (client, target)]
    for role, columns in (("client", (client,)), ("target", (target,)), ("features", features)):
        table.check_columns(columns, f"{role} ")
    for column in (client, target):
        if column in features:
            raise ConfigError(f"read_table.features contains {column!r}, which is the client or target column.")
    for column in one_hot:
        if column not in features:
            raise ConfigError(f"read_table.one_hot contains {column!r}, which is not a feature column.")
    if not features:
        raise DataError(f"{file}: there are no feature columns beside {client!r} and {target!r}.")
    client_of = _texts(table, client, "the name of a client")
    table = replace(table, client_of=client_of)
    ids, number, counts = np.unique(client_of, return_inverse=True, return_counts=True)
    large_enough = counts >= min_examples
    if not large_enough.any():
        raise DataError(f"{file}: no client has {min_examples} or more examples (min_examples).")
    order = np.argsort(number, kind="stable")
    order = order[large_enough[number[order]]]
    parts = [_feature(table, column, column in one_hot) for column in features]
    for column, part in zip(features, parts, strict=True) if integers else ():
        wrong = (part != part.round()) | (np.abs(part) >= _WHOLE)
        table.refuse(wrong.any(axis=1), column, "with integers=True a whole number below 2^24")
    x = np.concatenate(parts, axis=1)[order]
    y = _target(table, target, labels)[order]
    if labels is not None:
        classes = len(labels)
    return FederatedDataset.from_flat(
        torch.from_numpy(x.astype(np.int64) if integers else x),
        torch.from_numpy(y),
        offsets_of(torch.from_numpy(counts[large_enough].astype(np.int64))),
        [str(i) for i in ids[large_enough]],
        test_fraction=test_fraction,
        seed=seed,
        classes=classes,
        transform=Integers() if integers and transform is None else transform,
        name=str(file) if name is None else name,
    )


def _feature(table: Table, name: str, coded: bool) -> np.ndarray:
    """Return one column as (rows, 1) float32, or (rows, categories) of 0 and 1."""
    if coded:
        values = _texts(table, name)
        return (values[:, None] == np.unique(values)[None]).astype(np.float32)
    accepted = f"a finite number (or give one_hot=[{name!r}], or leave the row or the column out)"
    return table.numbers(name, typed=True, accepted=accepted).astype(np.float32)[:, None]


def _target(table: Table, name: str, labels: Sequence[str] | None) -> np.ndarray:
    if labels is None:
        accepted = (
            "a finite number (or leave the row out, or give labels=[...], the values in order of their class number)"
        )
        values = table.numbers(name, typed=True, accepted=accepted)
        return values.astype(np.float32 if table.frame[name].to_numpy().dtype.kind in "fO" else np.int64)
    if len(set(labels)) != len(labels) or not labels:
        raise ConfigError(f"read_table.labels is {list(labels)!r}; it must be distinct texts, at least one.")
    number = codes(_texts(table, name), labels)
    table.refuse(number < 0, name, f"the labels {', '.join(map(repr, labels))}")
    return number


def _texts(
    table: Table, name: str, accepted: str = "a value (fill it, or leave the row or the column out)"
) -> np.ndarray:
    """Return a column as it is written, without missing values."""
    table.refuse(table.frame[name].isna().to_numpy(), name, accepted)
    table.refuse(table.compound(name), name, "texts or numbers here")
    return table.frame[name].astype(str).to_numpy(dtype=str)
