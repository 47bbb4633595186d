"""The reader of tables: CSV or parquet files with one row an example and a column that names its
client."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..._check import fraction, given, one_of
from ...errors import ConfigError, DataError
from ..dataset import Classes, FederatedDataset
from ..examples import Domain
from ..loaders import reader
from ..partition import Partition, Parts
from ..transforms import Integers, Transform
from ..units import SCALES, TargetScale
from .column_coding import Column, declared_column
from .columns import Table, check_texts
from .delimited import is_unnamed
from .schema import TableSchema
from .splits import by_time
from .summary import MOST_CLASSES, Summary, holds_amounts, looks_like_id

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("fedmtl")
_CUT = 0.1  # share of rows outside a range that does not fit
_TEST = 0.2  # share of rows held out for test


@reader("table")
def read_table(
    path: str | Path | pd.DataFrame,
    *,
    client: str | None = None,
    target: str | None = None,
    partition: Partition | None = None,
    features: Sequence[str] | None = None,
    one_hot: Sequence[str] = (),
    bounds: Mapping[str, Sequence[Any]] | None = None,
    target_scale: TargetScale = "linear",
    missing: str | Sequence[str] = "refuse",
    labels: Sequence[str] | None = None,
    classes: Classes = "infer",
    test_path: str | Path | pd.DataFrame | None = None,
    split: Literal["random", "time"] = "random",
    time: str | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
    min_examples: int = 2,
    integers: bool = False,
    transform: Transform | None = None,
    name: str | None = None,
    separator: str | None = None,
    decimal: str = "point",
    encoding: str = "utf-8",
    comment: str | None = None,
) -> FederatedDataset:
    """Read a table with a row an example.

    Features are stored as float32; clients come in the order of their ids. Values are not
    standardized, since a scaling fitted on the rows would be a release of its own: public
    ``bounds`` scale them. Without them columns are stored as they are, one feature a column, and a
    run with noise refuses the table unless ``transform`` is given.

    Args:
        path: a .csv, .tsv (both also .gz) or .parquet file, or a table of pandas.
        client: the column with each row's client; its values become the ids, as text.
        target: the column to predict; needed.
        partition: deals the rows to clients, such as :class:`~fedmtl.data.Dirichlet`, where no
            column names these.
        features: the columns to predict from; None for all others, but not for a column ``time``
            without bounds.
        one_hot: feature columns to code as one 0/1 feature a category. The categories are those of
            the rows, in order of their text, which a run with noise refuses, unless ``bounds`` has
            the column.
        bounds: what is public of columns. ``[low, high]`` of numbers: values are cut there and
            mapped to [-1, 1]. Texts, the categories in order: two become -1 and +1, more one 0/1
            feature each, and a last one ``"*"`` takes every other text. Two dates,
            ``["1980-01-01", "1987-12-31"]``: dates, written so, of which a time may follow, are cut
            there and become the year, the month, the day of the week from Monday on and the days
            since the first, each mapped to [-1, 1]. The target of a regression has a range
            likewise, at which predictions are cut off; scores are in its own units. Where all
            features have bounds, the dataset's domain follows from them.
        target_scale: ``"log"`` maps the logarithm of a real target's range, which must be above 0,
            to [-1, 1], in place of the range: for targets that are skewed, such as costs.
            Predictions and scores are in the target's own units all the same. The mean of
            logarithms is near the median of the target, and below its mean.
        missing: ``"refuse"`` refuses missing values; a list of feature columns with bounds lets
            their values be missing, and ``"indicator"`` those of all feature columns with bounds.
            The features of such a column are 0 in a row without a value (the middle of a range,
            none of several categories), and each such column has one more feature, 1 in these rows
            and else 0, even if no value is missing. Empty values are missing, and NA, N/A, NaN,
            null and ? if they are no category.
        labels: the target's values in order of their class number, as text; needed where the target
            is text, or classes are not numbered from 0 on. The label 1 is also the value 1.0.
        classes: as in :meth:`FederatedDataset.from_tensors`; with ``labels`` their number.
            ``"infer"`` takes whole numbers as classes only if they are -1 and +1 or all from 0 to
            19, and else as a real target. A run with noise refuses what is inferred.
        test_path: a second table with the test rows, which has the same columns; None holds out
            rows of the first. Clients without rows in the first one are left out, as
            :meth:`FederatedDataset.from_tensors` says.
        split: which rows are held out: ``"random"``, or ``"time"`` for the latest of each client.
        time: for ``split="time"``, the column of dates, times or numbers by which rows are ordered.
        test_fraction: share of each client's rows held out for test; None for 0.2.
        seed: of the split, keyed by the client.
        min_examples: clients with fewer rows are left out.
        integers: keep the features as whole numbers, for models of tokens.
        transform: from storage to what the model takes; None for :class:`~fedmtl.data.Cast`, or
            :class:`~fedmtl.data.Integers` for ``integers``.
        name: for messages and reports; None for the file's name, or ``"table"``.
        separator: between the fields of a file of text: ``"comma"``, ``"semicolon"``, ``"tab"``,
            ``"bar"``, ``"space"`` (one or more), or the letter itself; None for a comma, of .tsv a
            tab.
        decimal: before the decimals of a number: ``"point"`` or ``"comma"``.
        encoding: of the letters, by Python's name, such as ``"utf-16"`` or ``"cp1252"``.
        comment: how lines above the heading begin that are left out, such as ``"#"``.

    Raises:
        DataError: an unreadable file, one with another separator or encoding, a line that was cut
            off, a missing column or one that occurs twice, a missing, infinite or textual value.
        ConfigError: an impossible setting.
    """
    bounds = dict(bounds or {})
    if one_hot:
        check_texts("one_hot", one_hot)
    declared = {column: declared_column(column, values) for column, values in bounds.items()}
    own_categories = [column for column in one_hot if _kind(declared, column) != "categories"]
    as_target = declared.get(str(target))
    one_of("data", SCALES, target_scale=target_scale)
    if target_scale == "log" and (
        as_target is None or as_target.range is None or as_target.range[0] <= 0
    ):
        raise ConfigError(
            "data.target_scale is 'log', which needs a range of the target above 0, such as "
            f"'data.bounds={{{target}: [1, 1000]}}'; targets below its lower end are cut there."
        )
    written = [client, *own_categories, *TableSchema(tuple(declared.values()), "").written]
    written += [target if labels is not None else None]
    settings = {
        "separator": separator,
        "decimal": decimal,
        "encoding": encoding,
        "comment": comment,
    }
    _check_split(split, time, test_path, test_fraction, client)
    texts = [column for column in written if column is not None]
    table = Table.of(path, texts, name, settings)
    given_features = features is not None
    left_out = time if time not in declared else None
    file = table.file
    features = feature_columns(table, client, target, features, left_out)
    assert target is not None  # as has been checked
    for option, columns in (("one_hot", one_hot), ("bounds", tuple(bounds))):
        for column in columns:
            real = (
                column == target
                and as_target is not None
                and as_target.range is not None
                and labels is None
            )
            if column not in features and not real:
                accepted = ", ".join(map(repr, features))
                raise ConfigError(
                    f"read_table.{option} contains {column!r}, which is not a feature column; "
                    f"accepted: {accepted}."
                )
    table = _with_clients(table, client)
    tables = [table]
    if test_path is not None:
        held = Table.of(test_path, texts, f"{name or 'table'} (test)", settings)
        held.check_columns([client, target, *features])
        tables.append(_with_clients(held, client))
    gaps = _may_be_missing(missing, features, bounds)
    coded = declared | {column: _categories_of_rows(tables, column) for column in own_categories}
    chosen = [coded.get(column, Column(column)) for column in features]
    schema = TableSchema(
        columns=tuple(replace(column, missing=column.name in gaps) for column in chosen),
        target=target,
        labels=() if labels is None else tuple(map(str, labels)),
        target_range=None if as_target is None else as_target.range,
        target_scale=target_scale,
        client=client,
        integers=integers,
        form=table.form,
        declared=not own_categories and (given_features or set(features) <= {*bounds, *one_hot}),
    )
    sides = [(schema.features(each, _advice), _targets(each, schema, labels)) for each in tables]
    x, y = sides[0]
    real_by_rows = False
    if as_target is not None:
        classes = None
    elif classes == "infer" and labels is None:
        real_by_rows = any(holds_amounts(targets) for _, targets in sides)
    if real_by_rows:
        classes = None
    parts = table.parts(client, partition, y, seed)
    test: dict[str, tuple[np.ndarray, np.ndarray]] | None = None
    if len(tables) > 1:
        test = _pairs(*sides[1], tables[1].parts(client, None, sides[1][1], seed))
        if parts.keys().isdisjoint(test):
            raise DataError(
                f"{tables[1].file}: no client of data.test_path is one of {file}; accepted: test "
                "rows of clients that "
                "train, or data.test_path=null, which holds out rows of data.path."
            )
    elif time is not None:
        parts, latest = by_time(
            table, time, parts, _TEST if test_fraction is None else test_fraction
        )
        test = _pairs(x, y, latest)
    data = FederatedDataset.from_tensors(
        _pairs(x, y, parts),
        test=test,
        test_fraction=None if test is not None else test_fraction,
        seed=seed,
        min_examples=min_examples,
        classes=classes if labels is None else len(labels),
        transform=Integers() if integers and transform is None else transform,
        name=file.name if name is None else name,
    )
    if real_by_rows:
        logger.warning(
            "%s: the whole numbers of %r are taken as a real target, since some are negative or "
            "above %d; "
            "data.classes=K makes them classes from 0 on, data.labels=[A, B] classes of any values",
            file, target, MOST_CLASSES - 1,
        )  # fmt: skip
    elif classes == "infer" and labels is None and (data.classes or 0) > 2:
        logger.warning(
            "%s: the whole numbers of %r are taken as %d classes; data.classes=null makes them a "
            "regression",
            file, target, data.classes,
        )  # fmt: skip
    of_target = [Column(target, range=schema.target_range).outside(each) for each in tables]
    for each, cut in zip(tables, of_target, strict=True):
        _warn(each, schema, cut)
    # declared by nobody
    if real_by_rows:
        inferred = ["classes"]
    else:
        inferred = []
    inferred += [f"categories.{column}" for column in own_categories]
    if transform is None and not integers:
        numbers = [*features, *([target] if data.classes is None else [])]
        inferred += [f"range.{column}" for column in numbers if column not in coded]
    domain = None
    if transform is None and bounds.keys() >= set(features):
        size = sum(column.size for column in schema.columns)
        scaled = data.classes is not None or as_target is not None
        domain = Domain(size, size**0.5, 1.0 if scaled else math.inf)
    scale: dict[str, Any] = {}
    if as_target is not None:
        cut_targets = sum(of_target) / sum(map(len, tables))
        scale = {"limit": 1.0, "target_range": schema.target_range, "cut_targets": cut_targets}
        scale["target_scale"] = target_scale
    if all(isinstance(column, str) for column in (*features, target, client or "")):
        scale["schema"] = replace(schema, classes=data.classes)
    return replace(data, inferred=(*data.inferred, *inferred), domain=domain, **scale, verify=False)


def _check_split(
    split: str, time: str | None, test_path: Any, test_fraction: float | None, client: str | None
) -> None:
    """Refuse settings of the test rows that contradict each other.

    Raises:
        ConfigError: what to leave out, or to add.
    """
    one_of("data", ("random", "time"), split=split)
    fraction("data", **given(test_fraction=test_fraction))
    if split == "time" and time is None:
        raise ConfigError(
            "data.split is 'time', which needs the column of dates or numbers, as data.time=COLUMN."
        )
    if split == "random" and time is not None:
        raise ConfigError(
            f"data.time is {time!r}, which orders rows for data.split=time; add it, or leave "
            "data.time out."
        )
    if test_path is None:
        return
    if split == "time" or test_fraction is not None:
        other = "data.test_fraction"
        if split == "time":
            other = "data.split=time"
        raise ConfigError(
            f"data.test_path has the test rows, and {other} holds out others; leave "
            "one of them out."
        )
    if client is None:
        raise ConfigError(
            "data.test_path needs the column of each row's client, "
            "data.client=COLUMN, and no partition."
        )


def _with_clients(table: Table, client: str | None) -> Table:
    """Return the table with the client of each row for messages, if a column says it."""
    if client is None:
        return table
    return replace(table, client_of=table.written(client, "the name of a client"))


def _pairs(x: np.ndarray, y: np.ndarray, parts: Parts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return features and targets of every client, from those of all rows."""
    return {name: (x[index], y[index]) for name, index in parts.items()}


def feature_columns(
    table: Table,
    client: str | None,
    target: str | None,
    features: Sequence[str] | None,
    left_out: str | None = None,
) -> list[str]:
    """Return the columns to predict from, ``features`` or for None all but the client, the target
    and ``left_out``. A first column without a heading, the index that pandas and R write, is left
    out with a warning.

    Raises:
        DataError: a column that is missing, or no feature.
        ConfigError: a column in two of these roles.
    """
    if client is None:
        names = [target]
    else:
        names = [client, target]
    chosen = [
        name
        for name in table.frame.columns
        if name not in names and (left_out is None or name != left_out)
    ]
    if features is not None:
        chosen = check_texts("features", features)
    elif chosen and is_unnamed(chosen[0]) and chosen[0] == table.frame.columns[0]:
        text = (
            "%s: column 1 has no heading, as the index that pandas and R write, and is left "
            "out; name it to have it"
        )
        logger.warning(text, table.file)
        chosen = chosen[1:]
    if left_out is not None:
        table.check_columns([left_out], "time ")
    for role, columns in (("client", names[:-1]), ("target", (target,)), ("features", chosen)):
        table.check_columns(columns, f"{role} ")
    if client == target:
        raise ConfigError(
            f"data.client and data.target are both {target!r}; a client's id is nothing to predict."
        )
    for column in names:
        if column in chosen:
            raise ConfigError(
                f"data.features contains {column!r}, which is the client or target column."
            )
    for column in chosen if features is None else ():
        if is_unnamed(column):
            number = int(str(column).rpartition(" ")[2]) + 1
            raise DataError(
                f"{table.file}: column {number} has no heading; give it one, or list the columns "
                "to predict from in data.features."
            )
    if not chosen:
        raise DataError(
            f"{table.file}: there are no feature columns beside {' and '.join(map(repr, names))}."
        )
    return chosen


def _warn(table: Table, schema: TableSchema, of_target: int) -> None:
    """Warn of columns that look like ids, and of values outside of their ranges, ``of_target`` of
    them targets."""
    frame = table.frame
    for name in (
        *(column.name for column in schema.columns if column.kind != "dates"),
        schema.target,
    ):
        if looks_like_id(frame[name]):
            change = "choose another data.target"
            if name != schema.target:
                change = "leave it out of data.features"
            text = "%s: the column %r looks like an id of rows, by its private values; %s"
            logger.warning(text, table.file, name, change)
    outside = schema.outside(table)
    if of_target:
        outside[schema.target] = of_target
    counts = ", ".join(f"{column} {count:,}" for column, count in outside.items())
    many = " and ".join(column for column, count in outside.items() if count > _CUT * len(frame))
    if counts:
        text = "%s: cut off at data.bounds (rows of %s, private: covered by no epsilon): %s%s"
        unfit = ""
        if many:
            unfit = (
                f"; the bounds of {many} do not fit, since more than a tenth of the rows are cut"
            )
        logger.warning(text, table.file, f"{len(frame):,}", counts, unfit)


def _kind(declared: Mapping[str, Column], name: str) -> str:
    """Return the declared kind of a column; an empty text of one without bounds."""
    if name in declared:
        return declared[name].kind
    return ""


def _categories_of_rows(tables: Sequence[Table], name: str) -> Column:
    """Return a column of the categories that occur in tables, in the order of their texts."""
    texts = np.unique(np.concatenate([table.written(name) for table in tables]))
    return Column(name, "categories", categories=tuple(texts.tolist()))


def _may_be_missing(
    missing: str | Sequence[str], features: Sequence[str], bounds: Mapping[str, Any]
) -> list[str]:
    """Return the columns whose values may be missing.

    Raises:
        ConfigError: another word, or a column that is no feature or has no bounds.
    """
    if missing == "refuse":
        return []
    if missing == "indicator":
        return [column for column in features if column in bounds]
    if isinstance(missing, str):
        raise ConfigError(
            f"data.missing is {missing!r}; accepted: refuse, indicator, or a list of columns."
        )
    for column in missing:
        if column not in features:
            accepted = ", ".join(map(repr, features))
            raise ConfigError(
                f"data.missing contains {column!r}, which is not a feature column; "
                f"accepted: {accepted}."
            )
        if column not in bounds:
            raise ConfigError(
                f"data.missing contains {column!r}, which has no data.bounds; the middle of its "
                "range, or none of its categories, is put in if a value is missing."
            )
    return list(missing)


def _advice(values: pd.Series, name: str) -> str:
    """Returns the advice for a column that does not hold numbers alone."""
    texts = Summary(values[values.map(lambda value: isinstance(value, str))])
    if texts.dates:
        return (
            f"or for dates the first and the last, 'data.bounds={{{name}: [1980-01-01, "
            f"1987-12-31]}}'"
        )
    if texts.numeric or not texts.kinds:
        return (
            "fill it, or leave the row or the column out; or with bounds of the column list it "
            "in data.missing"
        )
    if texts.doubt:
        return f"the column {texts.doubt}: leave it out of data.features"
    return (
        f"or for texts the list of all categories, bounds={{{name!r}: [A, B]}}, which is "
        f"'data.bounds={{{name}: [A, B]}}' by command, and of which fedmtl check writes a draft; "
        "or leave the row or the column out"
    )


def _targets(table: Table, schema: TableSchema, labels: Sequence[str] | None) -> np.ndarray:
    """Return the targets of a table's rows, (n,): float32 mapped from the range to [-1, 1], numbers
    as they are, or the numbers of labels, int64."""
    name = schema.target
    if schema.target_range is not None:
        return schema.targets(table, _advice)
    if labels is None:
        accepted = (
            "a finite number (or leave the row out, or give the values in order of their class "
            "number: labels=[A, B], 'data.labels=[A, B]' by command)"
        )
        values = table.numbers(name, typed=True, accepted=accepted)
        if table.frame[name].to_numpy().dtype.kind in "fO":
            return values.astype(np.float32)
        table.refuse(values >= 2.0**63, name, "a whole number below 2^63")
        return values.astype(np.int64)
    return table.labels(name, labels)[0]
