"""The reader of tables: CSV or parquet files with one row an example and a column that names its
client."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ..dataset import FederatedDataset
from ..examples import Domain
from ..loaders import reader, with_settings
from ..missing import accepted_client, marks_of_clients
from ..partition import Parts
from .column_coding import Column
from .columns import Table
from .schema import TableSchema
from .splits import by_time
from .table_settings import TableSettings, feature_columns
from .table_summary import MOST_CLASSES, Summary, holds_amounts, looks_like_id

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("fedmtl")
_CUT = 0.1  # share of rows outside a range that does not fit
_TEST = 0.2  # share of rows held out for test
Rows = tuple[np.ndarray, np.ndarray]
"""Features (n, d) and targets (n,)."""


@reader("table")
@with_settings(TableSettings)
def read_table(settings: TableSettings) -> FederatedDataset:
    """Reads a table with a row an example.

    Features are stored as float32; clients come in the order of their ids. Values are not
    standardized, since a scaling fitted on the rows would be a release of its own: public
    ``bounds`` scale them. Without them columns are stored as they are, one feature a column, and a
    run with noise refuses the table unless ``transform`` is given.

    Args:
        settings: the fields of :class:`~fedmtl.data.TableSettings`, each an argument of its own:
            ``read_table("visits.csv", client="ward", target="days")``.

    Returns:
        Features (d,), coded by their bounds and categories, and int64 labels or real targets,
        float32; ids are the values of the client column, or ``client-0``, ... of a partition.

    Raises:
        DataError: an unreadable file, one with another separator or encoding, a line that was cut
            off, a missing column or one that occurs twice, a missing, infinite or textual value.
        ConfigError: an impossible setting.

    Example:
        >>> import pandas as pd
        >>> from fedmtl.data import read_table
        >>> visits = pd.DataFrame({"ward": ["a", "b"] * 4, "age": range(8), "days": range(8)})
        >>> bounds = {"age": [0, 100], "days": [0, 30]}  # public, not read off the rows
        >>> read_table(visits, client="ward", target="days", bounds=bounds).ids
        ('a', 'b')
    """
    name = settings.name
    table = Table.of(settings.path, settings.written, name, settings.text)
    features = feature_columns(
        table, settings.client, settings.target, settings.features, settings.left_out
    )
    settings.check_features(features)
    # before the cells: without clients their ids look like a feature
    table.check_clients(settings.client, settings.partition)
    tables = [_with_targets(_with_clients(table, settings), settings)]
    if settings.test_path is not None:
        held = Table.of(
            settings.test_path, settings.written, f"{name or 'table'} (test)", settings.text
        )
        held.check_columns([settings.client, settings.target, *features])
        tables.append(_with_targets(_with_clients(held, settings), settings))
    schema = _schema(settings, tables, features)
    sides = [(schema.features(each, _advice), _targets(each, schema, settings)) for each in tables]
    guessed = settings.guesses_classes
    amounts = guessed and any(holds_amounts(targets) for _, targets in sides)
    parts, test = _parts(settings, tables, sides)
    test_fraction = settings.test_fraction
    if test is not None:
        test_fraction = None
    classes = settings.stated_classes
    if amounts:
        classes = None
    data = FederatedDataset.from_tensors(
        _pairs(sides[0], parts),
        test=test,
        test_fraction=test_fraction,
        seed=settings.seed,
        min_examples=settings.min_examples,
        classes=classes,
        transform=settings.stored_transform,
        name=name or table.file.name,
    )
    if guessed:
        smallest = min(int(targets.min()) for _, targets in sides)
        _warn_of_guess(table, data.classes, schema.target, smallest, amounts=amounts)
    cut = [Column(schema.target, range=schema.target_range).outside(each) for each in tables]
    for each, count in zip(tables, cut, strict=True):
        _warn(each, schema, count)
    facts: dict[str, Any] = {
        "inferred": (*data.inferred, *_inferred(settings, features, data.classes, amounts)),
        "domain": _domain(settings, schema, data.classes),
    }
    if settings.target_column is not None:
        facts["limit"] = 1.0
        facts["target_range"] = schema.target_range
        facts["cut_targets"] = sum(cut) / sum(map(len, tables))
        facts["target_scale"] = settings.target_scale
    # a table of pandas may have columns whose names are no texts, which no file can keep
    if all(isinstance(name, str) for name in (*features, schema.target, settings.client or "")):
        facts["schema"] = replace(schema, classes=data.classes)
    return replace(data, **facts, verify=False)


def _schema(
    settings: TableSettings, tables: Sequence[Table], features: Sequence[str]
) -> TableSchema:
    """Returns the schema of the feature columns, as declared or by the categories of the rows."""
    gaps = settings.may_be_missing(features)
    undeclared = settings.undeclared_categories
    coded = settings.declared | {name: _categories_of_rows(tables, name) for name in undeclared}
    chosen = [coded.get(name, Column(name)) for name in features]
    known = {*(settings.bounds or ()), *settings.one_hot}
    assert settings.target is not None  # checked with the feature columns
    return TableSchema(
        columns=tuple(replace(column, missing=column.name in gaps) for column in chosen),
        target=settings.target,
        labels=tuple(map(str, settings.labels or ())),
        target_range=settings.target_range,
        target_scale=settings.target_scale,
        client=settings.client,
        integers=settings.integers,
        form=tables[0].form,
        declared=not undeclared and (settings.features is not None or set(features) <= known),
    )


def _parts(
    settings: TableSettings, tables: Sequence[Table], sides: Sequence[Rows]
) -> tuple[Parts, dict[str, Rows] | None]:
    """Returns the training rows of each client, and the test examples of each; None if the dataset
    is to hold rows out at random.

    Raises:
        DataError: the test table has no client of the first one.
    """
    table = tables[0]
    parts = table.parts(settings.client, settings.partition, sides[0][1], settings.seed)
    if len(tables) > 1:
        other = tables[1]
        y = sides[1][1]
        test = _pairs(sides[1], other.parts(settings.client, None, y, settings.seed))
        if parts.keys().isdisjoint(test):
            raise DataError(
                f"{other.file}: no client of data.test_path is one of {table.file}; accepted: test "
                "rows of clients that train, or data.test_path=null, which holds out rows of "
                "data.path."
            )
        return parts, test
    if settings.time is None:
        return parts, None
    share = settings.test_fraction or _TEST
    parts, latest = by_time(table, settings.time, parts, share)
    return parts, _pairs(sides[0], latest)


def _inferred(
    settings: TableSettings, features: Sequence[str], classes: int | None, amounts: bool
) -> list[str]:
    """Returns the facts that were read off the rows because nobody declared them; a run with noise
    refuses them."""
    undeclared = settings.undeclared_categories
    names = []
    if amounts:
        names.append("classes")
    names += [f"categories.{name}" for name in undeclared]
    if settings.transform is not None or settings.integers:
        return names
    numbers: list[Any] = list(features)
    if classes is None:
        numbers.append(settings.target)
    coded = {*settings.declared, *undeclared}
    return names + [f"range.{name}" for name in numbers if name not in coded]


def _domain(settings: TableSettings, schema: TableSchema, classes: int | None) -> Domain | None:
    """Returns the public bounds on a row that follow from those of its columns; None if a column
    has none, or if a transform changes the features."""
    declared = {column.name for column in schema.columns} <= settings.declared.keys()
    if settings.transform is not None or not declared:
        return None
    size = sum(column.size for column in schema.columns)
    target = math.inf
    if classes is not None or settings.target_column is not None:
        target = 1.0
    # no square of a feature is larger than its absolute value, as none is larger than 1
    return Domain(size, size**0.5, target)


def _with_clients(table: Table, settings: TableSettings) -> Table:
    """Returns the table with the client of each row, if a column names it, and without the rows
    that have no client, if the settings leave these out.

    Raises:
        DataError: a row without a client that is to be refused, or no row with one.
    """
    client = settings.client
    if client is None:
        return table
    if settings.missing_client == "drop":
        table = _without(table, table.gaps(client), client, "client", texts=True)
    marks = marks_of_clients(settings.missing_client)
    accepted = accepted_client("data.missing_client")
    return replace(table, client_of=table.clients(client, marks=marks, accepted=accepted))


def _with_targets(table: Table, settings: TableSettings) -> Table:
    """Returns the table without the rows that have no target, if the settings leave these out.

    Raises:
        DataError: a row without a target that is to be refused, or no row with one.
    """
    target = settings.target
    assert target is not None  # checked with the feature columns
    labels = settings.labels
    known = [str(label) for label in labels or ()]  # a label may look like a mark of a gap
    gaps = table.gaps(target, known)
    if settings.missing_target == "refuse":
        remedy = "a value (data.missing_target=drop leaves rows without a target out)"
        table.refuse(gaps, target, remedy)
    return _without(table, gaps, target, "target", texts=labels is not None)


def _without(table: Table, gaps: np.ndarray, column: str, role: str, *, texts: bool) -> Table:
    """Returns the table without the rows of ``gaps``, bool (n,), which have no value in the column
    of a role, see :meth:`Table.without`.

    Raises:
        DataError: no row is left.
    """
    if not gaps.any():
        return table
    if gaps.all():
        raise DataError(f"{table.file}: no row has a value in the {role} column {column!r}.")
    text = "%s: rows without a %s left out (a private count): %s of %s"
    logger.warning(text, table.file, role, f"{int(gaps.sum()):,}", f"{len(table):,}")
    return table.without(gaps, column, texts=texts)


def _pairs(rows: Rows, parts: Parts) -> dict[str, Rows]:
    """Returns the features and targets of every client, from those of all rows."""
    x, y = rows
    return {name: (x[index], y[index]) for name, index in parts.items()}


def _categories_of_rows(tables: Sequence[Table], name: str) -> Column:
    """Returns a column of the categories that occur in tables, in the order of their texts."""
    texts = np.unique(np.concatenate([table.written(name) for table in tables]))
    return Column(name, "categories", categories=tuple(texts.tolist()))


def _targets(table: Table, schema: TableSchema, settings: TableSettings) -> np.ndarray:
    """Returns the targets of a table's rows, (n,): float32 mapped from the range to [-1, 1],
    numbers as they are, or the numbers of labels, int64."""
    name = schema.target
    if schema.target_range is not None:
        return schema.targets(table, _advice)
    if settings.labels is not None:
        return table.labels(name, settings.labels)[0]
    accepted = (
        "a finite number (or leave the row out, or give the values in order of their class "
        "number: labels=[A, B], 'data.labels=[A, B]' by command)"
    )
    values = table.numbers(name, typed=True, accepted=accepted)
    if table.frame[name].to_numpy().dtype.kind in "fO":
        table.check_single(values, name)
        return values.astype(np.float32)
    table.refuse(values >= 2.0**63, name, "a whole number below 2^63")
    return values.astype(np.int64)


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
            "fill it or correct it, or leave the row or the column out; data.missing takes gaps, "
            "empty values or NA, in columns with bounds"
        )
    if texts.doubt:
        return f"the column {texts.doubt}: leave it out of data.features"
    return (
        f"or for texts the list of all categories, bounds={{{name!r}: [A, B]}}, which is "
        f"'data.bounds={{{name}: [A, B]}}' by command, and of which fedmtl check writes a draft; "
        "or leave the row or the column out"
    )


def _warn_of_guess(
    table: Table, classes: int | None, target: str, smallest: int, *, amounts: bool
) -> None:
    """Warns that whole numbers were taken as classes or as amounts without being told so.

    Args:
        table: with the target.
        classes: their number; None of a real target.
        target: its column.
        smallest: of its values.
        amounts: True if they were taken as amounts.
    """
    if amounts:
        logger.warning(
            "%s: the whole numbers of %r are taken as a real target, since some are negative or "
            "above %d; data.classes=K makes them classes from 0 on, data.labels=[A, B] classes of "
            "any values",
            table.file, target, MOST_CLASSES - 1,
        )  # fmt: skip
    elif classes is not None and classes > 2:
        largest = classes - 1
        of_labels = ""
        if smallest > 0:
            labels = ",".join(map(str, range(smallest, classes)))
            of_labels = (
                f"as none is below {smallest}, 'data.labels=[{labels}]' leaves out the rest; "
            )
        logger.warning(
            "%s: the whole numbers of %r are taken as %d classes, 0 to %d; %sdata.classes=null "
            "makes them a regression, which needs their range in data.bounds",
            table.file, target, classes, largest, of_labels,
        )  # fmt: skip


def _warn(table: Table, schema: TableSchema, of_target: int) -> None:
    """Warns of columns that look like ids, and of values outside of their ranges, ``of_target`` of
    them targets."""
    frame = table.frame
    # a date may be another one in each row and still be a feature
    features = [column.name for column in schema.columns if column.kind != "dates"]
    for name in (*features, schema.target):
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
    if not counts:
        return
    unfit = ""
    if many:
        unfit = f"; the bounds of {many} do not fit, since more than a tenth of the rows are cut"
    text = "%s: cut off at data.bounds (rows of %s, private: covered by no epsilon): %s%s"
    logger.warning(text, table.file, f"{len(frame):,}", counts, unfit)
