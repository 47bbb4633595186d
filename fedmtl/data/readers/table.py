"""Tables: CSV or parquet with one row an example and a column that says whose it is."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
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

if TYPE_CHECKING:
    import pandas as pd

_WHOLE = 1 << 24  # whole numbers below it are exact in float32
_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")


@reader("table")
def read_table(
    path: str | Path,
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
        path: a .csv, .tsv (both also .gz) or .parquet file.
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
        name: for messages and reports; None for the file's name.

    Raises:
        DataError: an unreadable file, a missing column, a missing, infinite or textual value.
        ConfigError: an impossible setting.
    """
    file = Path(path)
    positive_int("read_table", min_examples=min_examples)
    check_fraction(test_fraction)
    frame = load_frame(file, (client, *one_hot, *(() if labels is None else (target,))))
    if features is None:
        features = [column for column in frame.columns if column not in (client, target)]
    for role, column in [("client", client), ("target", target), *(("features", c) for c in features)]:
        if column not in frame.columns:
            known = ", ".join(map(repr, frame.columns))
            raise DataError(f"{file}: {role} column {column!r} is missing; the columns are {known}.")
    for column in (client, target):
        if column in features:
            raise ConfigError(f"read_table.features contains {column!r}, which is the client or target column.")
    for column in one_hot:
        if column not in features:
            raise ConfigError(f"read_table.one_hot contains {column!r}, which is not a feature column.")
    if not features:
        raise DataError(f"{file}: there are no feature columns beside {client!r} and {target!r}.")
    client_of = _clients(frame, client, file)
    ids, number, counts = np.unique(client_of, return_inverse=True, return_counts=True)
    large_enough = counts >= min_examples
    if not large_enough.any():
        raise DataError(f"{file}: no client has {min_examples} or more examples (min_examples).")
    order = np.argsort(number, kind="stable")
    order = order[large_enough[number[order]]]
    parts = [_feature(frame, c, c in one_hot, client_of, file) for c in features]
    for column, part in zip(features, parts, strict=True) if integers else ():
        wrong = (part != part.round()) | (np.abs(part) >= _WHOLE)
        if wrong.any():
            row = int(wrong.any(axis=1).argmax())
            raise DataError(
                f"{file}: client {str(client_of[row])!r}, row {row}, column {column!r} holds {part[row, 0]:g}; with "
                "integers=True every number is whole, and below 2^24."
            )
    x = np.concatenate(parts, axis=1)[order]
    y = _target(frame, target, labels, client_of, file)[order]
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


def load_frame(file: Path, text: Sequence[str]) -> pd.DataFrame:
    """Return the table; in a CSV file the columns ``text`` are kept as they are written (id 007 is not 7)."""
    import pandas as pd

    if not file.is_file():
        raise DataError(f"{file} does not exist or is not a file; accepted: {', '.join(_SUFFIXES)} files.")
    if not file.name.endswith(_SUFFIXES):
        raise DataError(f"{file} has an unknown suffix; accepted: {', '.join(_SUFFIXES)}.")
    try:
        if file.suffix == ".parquet":
            frame = pd.read_parquet(file)
        else:
            frame = pd.read_csv(
                file,
                sep="\t" if ".tsv" in file.suffixes else ",",
                dtype=dict.fromkeys(text, str),
                keep_default_na=False,
                na_values=[""],
                low_memory=False,
            )
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read as a table ({error}); it may be truncated.") from error
    if frame.empty:
        raise DataError(f"{file} has no rows; at least 2 a client are needed.")
    return frame


def _clients(frame: pd.DataFrame, client: str, file: Path) -> np.ndarray:
    column = frame[client]
    missing = column.isna().to_numpy()
    if missing.any():
        raise DataError(
            f"{file}: row {int(missing.argmax())} has no value in the client column {client!r}; "
            "every row must name its client."
        )
    return column.astype(str).to_numpy(dtype=str)


def _feature(frame: pd.DataFrame, name: str, coded: bool, client_of: np.ndarray, file: Path) -> np.ndarray:
    """Return one column as (rows, 1) float32, or (rows, categories) of 0 and 1."""
    if coded:
        _refuse_missing(frame, name, client_of, file)
        values = frame[name].astype(str).to_numpy(dtype=str)
        return (values[:, None] == np.unique(values)[None]).astype(np.float32)
    values = _numbers(frame, name, client_of, file, f"give numbers, or one_hot=[{name!r}], or leave it out of features")
    return values.astype(np.float32)[:, None]


def _target(
    frame: pd.DataFrame, name: str, labels: Sequence[str] | None, client_of: np.ndarray, file: Path
) -> np.ndarray:
    if labels is None:
        accepted = "give numbers, or labels=[...], the values in order of their class number"
        values = _numbers(frame, name, client_of, file, accepted)
        return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    if len(set(labels)) != len(labels) or not labels:
        raise ConfigError(f"read_table.labels is {list(labels)!r}; it must be distinct texts, at least one.")
    _refuse_missing(frame, name, client_of, file)
    texts = frame[name].astype(str).to_numpy(dtype=str)
    match = texts[:, None] == np.asarray(list(labels), dtype=str)[None]
    unknown = ~match.any(axis=1)
    if unknown.any():
        row = int(unknown.argmax())
        raise DataError(
            f"{file}: client {str(client_of[row])!r}, row {row}, column {name!r} holds {str(texts[row])!r}; "
            f"accepted labels: {', '.join(map(repr, labels))}."
        )
    return match.argmax(axis=1)


def _numbers(frame: pd.DataFrame, name: str, client_of: np.ndarray, file: Path, accepted: str) -> np.ndarray:
    """Return a column of finite numbers; whole ones keep an integer dtype."""
    import pandas as pd

    column = frame[name]
    if not pd.api.types.is_numeric_dtype(column.dtype):
        numbers = pd.to_numeric(column, errors="coerce")
        odd = (numbers.isna() & column.notna()).to_numpy() if pd.api.types.is_numeric_dtype(numbers) else None
        row = int(odd.argmax()) if odd is not None and odd.any() else 0
        raise DataError(
            f"{file}: client {str(client_of[row])!r}, row {row}, column {name!r} holds {column.iloc[row]!r}, "
            f"which is not a number; {accepted}."
        )
    _refuse_missing(frame, name, client_of, file)
    values = column.to_numpy()
    if values.dtype.kind == "O":  # pandas' nullable numbers
        values = column.to_numpy(dtype=np.float64)
    finite = np.isfinite(values)
    if not finite.all():
        row = int((~finite).argmax())
        raise DataError(
            f"{file}: client {str(client_of[row])!r}, row {row}, column {name!r} holds {values[row]}; "
            "every value must be a finite number (no NaN, no infinity)."
        )
    return values


def _refuse_missing(frame: pd.DataFrame, name: str, client_of: np.ndarray, file: Path) -> None:
    missing = frame[name].isna().to_numpy()
    if missing.any():
        row = int(missing.argmax())
        raise DataError(
            f"{file}: client {str(client_of[row])!r}, row {row}, column {name!r} is empty or NaN; "
            "every value must be given (fill it, or leave the row or the column out)."
        )
