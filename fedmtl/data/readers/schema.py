"""The schema of a table: its columns as the features of a model, and predictions in the target's
units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from ..._extras import pandas as pd
from ...errors import DataError
from ..units import SCALES, TargetScale, in_units, stored
from .column_coding import Advice, Column, Kind, date_of
from .columns import Table
from .delimited import check_distinct
from .text_format import Format


@dataclass(frozen=True)
class TableSchema:
    """The coding of a table: how raw columns become the features of a model, and outputs of a model
    predictions.

    Args:
        columns: those to predict from, in their order.
        target: the column to predict.
        classes: number of classes of the target; None for real numbers.
        labels: the target's values in order of their class number; empty for the numbers 0 ..
            classes - 1.
        target_range: range of a real target, which is stored mapped to [-1, 1]; None for targets as
            they are.
        target_scale: ``"log"`` if the logarithm of the target, within that of the range, is mapped.
        client: the column that names the client of a row; None without one.
        integers: True if features are whole numbers, for models of tokens.
        form: the format of the text of a file of such rows; None of a table of another kind.
        declared: True if names and categories were given as settings. If not, they were read off
            the table.
    """

    columns: tuple[Column, ...]
    target: str
    classes: int | None = None
    labels: tuple[str, ...] = ()
    target_range: tuple[float, float] | None = None
    target_scale: TargetScale = "linear"
    client: str | None = None
    integers: bool = False
    form: Format | None = None
    declared: bool = True

    @property
    def written(self) -> list[str]:
        """Returns the columns that a file of text is read for as they are written: id 007 is not
        7."""
        return [column.name for column in self.columns if column.kind != "number"]

    @property
    def width(self) -> int:
        """Returns the number of features."""
        return sum(column.width for column in self.columns)

    def encode(self, rows: pd.DataFrame | Table) -> Tensor:
        """Returns the features of raw rows as a dataset stores them: (rows, width), float32, or
        int64 for models of whole numbers.

        Columns that are not in the schema are left out; values beyond a range are cut there.

        Args:
            rows: with the columns of the schema, in any order.

        Raises:
            DataError: a missing column, a missing, infinite or textual value of a number, one that
                is not whole for a model of whole numbers, a text that is no date, or an unknown
                category.
        """
        if isinstance(rows, Table):
            table = rows
        else:
            table = _table(rows)
        table.check_columns([column.name for column in self.columns], "feature ")
        features = torch.from_numpy(self.features(table, _fill))
        if not self.integers:
            return features
        for column in self.columns:
            if column.kind == "number":
                values = table.numbers(column.name)
                table.refuse(values != np.round(values), column.name, "a whole number")
        # float64 has held whole numbers up to 2^53 exactly
        return features.long()

    def features(self, table: Table, advice: Advice) -> np.ndarray:
        """Returns the features of a table's rows, (rows, width), float32, or float64 of whole
        numbers, with ``advice`` for a wrong value."""
        # float32 would round tokens and ids from 2^24 on
        parts = [column.encode(table, advice) for column in self.columns]
        if self.integers:
            return np.concatenate(parts, axis=1).astype(np.float64)
        for column, part in zip(self.columns, parts, strict=True):
            table.check_single(part, column.name)
        return np.concatenate(parts, axis=1).astype(np.float32)

    def outside(self, table: Table) -> dict[str, int]:
        """Returns the number of values that are cut at the ends of the range, by column, for
        columns with some."""
        counts = {column.name: column.outside(table) for column in self.columns}
        return {name: count for name, count in counts.items() if count}

    def decode(self, outputs: Tensor) -> np.ndarray:
        """Returns the predictions of a model's outputs in the target's units.

        Args:
            outputs: (rows,) or (rows, 1), of real targets or one logit of two classes; (rows,
                classes).

        Returns:
            (rows,), labels, class numbers (int64) or real numbers (float64).
        """
        if self.classes is None:
            return self.in_units(outputs.reshape(len(outputs))).cpu().numpy()
        # one logit, that of class 1: above 0 it is the more likely one
        if outputs.ndim == 1 or outputs.shape[1] == 1:
            number = (outputs.reshape(len(outputs)) > 0).long()
        else:
            number = outputs.argmax(1)
        if self.labels:
            values = np.array(self.names, dtype=object)
        else:
            values = np.array(self.names, dtype=np.int64)
        return values[number.cpu().numpy()]

    def in_units(self, outputs: Tensor) -> Tensor:
        """Returns predictions of a real target in its own units, float64."""
        return in_units(outputs, self.target_range, self.target_scale)

    def targets(self, table: Table, advice: Advice) -> np.ndarray:
        """Returns the targets of a table's rows, of which there is a range, as they are stored,
        float32 (rows,)."""
        assert self.target_range is not None
        values = Column(self.target).encode(table, advice)[:, 0]
        return stored(values, self.target_range, self.target_scale).astype(np.float32)

    @property
    def names(self) -> list[str] | list[int]:
        """Returns the classes by their numbers: the labels, or else the numbers."""
        return list(self.labels) or list(range(self.classes or 0))

    def to_dict(self) -> dict[str, Any]:
        """Returns the schema as plain values, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> TableSchema:
        """Returns the schema of plain values.

        Raises:
            DataError: values that are not those of a schema, by name.
        """
        # a file may be changed or of another version, so nothing of it is taken unchecked
        given = _fields(cls, values, "the schema of a table")
        if not isinstance(given["columns"], list) or not given["columns"]:
            raise DataError("columns must be a list, and not empty.")
        columns = tuple(_column(each) for each in given["columns"])
        _check_roles([column.name for column in columns], given["target"], given["client"])
        classes = given["classes"]
        labels = given["labels"]
        # the type itself, since True is an int
        if classes is not None and (type(classes) is not int or classes < 2):
            raise DataError(
                f"classes is {classes!r}; it must be null, or a whole number from 2 on."
            )
        if not _distinct_texts(labels) or len(labels) not in (0, classes):
            raise DataError("labels must be distinct texts, one for each class.")
        for name in ("integers", "declared"):
            if type(given[name]) is not bool:
                raise DataError(f"{name} is {given[name]!r}; it must be true or false.")
        form = given["form"]
        if form is not None:
            parts = _fields(Format, form, "form")
            if not all(isinstance(part, str) for part in parts.values()):
                raise DataError("form must hold texts.")
            form = Format(**parts)
        ends = _range(given["target_range"], "target_range")
        scale = given["target_scale"]
        if scale not in SCALES or (scale == "log" and (ends is None or ends[0] <= 0)):
            accepted = f"{', '.join(SCALES)}, and 'log' only with a target_range above 0"
            raise DataError(f"target_scale is {scale!r}; accepted: {accepted}.")
        given["columns"] = columns
        given["labels"] = tuple(labels)
        given["form"] = form
        given["target_range"] = ends
        return cls(**given)


def _table(rows: pd.DataFrame) -> Table:
    """Returns rows of pandas with distinct columns."""
    if not isinstance(rows, pd.DataFrame):
        raise DataError(
            f"rows are a {type(rows).__name__}; give a DataFrame of pandas with a "
            "column for each feature."
        )
    file = Path("rows")
    check_distinct(list(rows.columns), file)
    return Table(rows, file)


def _fill(values: pd.Series, name: str) -> str:
    return "fill it, or leave the row out"


def _check_roles(names: Sequence[str], target: Any, client: Any) -> None:
    """Checks that the columns, the target and the client, if there is one, have distinct names."""
    roles = [target]
    if client is not None:
        roles.append(client)
    distinct = len({*names, *roles}) == len(names) + len(roles)
    if not all(isinstance(name, str) for name in roles) or not distinct:
        raise DataError("the columns, the target and the client must have distinct names.")


def _fields(kind: type, values: Any, owner: str) -> dict[str, Any]:
    """Returns the values of a dataclass by name, refusing other names."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    # a name that is missing or unknown means another version, whose values may mean something else
    if not isinstance(values, Mapping) or set(values) != set(names):
        raise DataError(f"{owner} must have {', '.join(names)}, and nothing else.")
    return dict(values)


def _column(values: Any) -> Column:
    given = _fields(Column, values, "a column")
    name = given["name"]
    kind = given["kind"]
    categories = given["categories"]
    if not isinstance(name, str):
        raise DataError(f"the name of a column is {name!r}; it must be a text.")
    if kind not in get_args(Kind):
        raise DataError(
            f"column {name!r} is of kind {kind!r}; accepted: {', '.join(get_args(Kind))}."
        )
    if type(given["missing"]) is not bool:
        raise DataError(
            f"of column {name!r} missing is {given['missing']!r}; it must be true or false."
        )
    if type(given["signs"]) is not bool or not _distinct_texts(categories):
        raise DataError(f"column {name!r} has categories that are not distinct texts.")
    period = _period(given["period"], name)
    of_kind = {
        "number": not categories and period is None,
        "categories": bool(categories) and given["range"] is None and period is None,
        "dates": not categories and given["range"] is None and period is not None,
    }
    if not of_kind[kind] or (given["signs"] and len(categories) != 2):
        raise DataError(f"column {name!r} has values that do not belong to the kind {kind!r}.")
    own = given | {
        "range": _range(given["range"], name),
        "period": period,
        "categories": tuple(categories),
    }
    return Column(**own)


def _period(values: Any, name: str) -> tuple[str, str] | None:
    if values is None:
        return None
    texts = (
        isinstance(values, list)
        and len(values) == 2
        and all(isinstance(end, str) for end in values)
    )
    if texts:
        dates = [date_of(end) for end in values]
    else:
        dates = []
    if (
        not texts
        or None in dates
        # date_of takes a time of the day after the date, which a period does not have
        or [date.isoformat() for date in dates if date is not None] != values
    ):
        raise DataError(
            f"{name} has the period {values!r}; it must be two dates such as 1980-01-31."
        )
    if values[0] >= values[1]:
        raise DataError(
            f"{name} has the period {values!r}; the first date must be before the last."
        )
    return values[0], values[1]


def _distinct_texts(values: Any) -> bool:
    """Returns True if values are a list of distinct texts, or of true and false."""
    if not isinstance(values, list) or not all(isinstance(value, str | bool) for value in values):
        return False
    return len(set(map(str, values))) == len(values)


def _range(values: Any, name: str) -> tuple[float, float] | None:
    if values is None:
        return None
    numbers = (
        isinstance(values, list)
        and len(values) == 2
        and all(type(end) in (int, float) for end in values)
    )
    # one chain of comparisons, which NaN does not pass
    if not numbers or not -math.inf < float(values[0]) < float(values[1]) < math.inf:
        raise DataError(f"{name} has the range {values!r}; it must be [LOW, HIGH], LOW below HIGH.")
    return float(values[0]), float(values[1])
