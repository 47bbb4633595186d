"""Tables as a model takes them: the columns of raw rows, how each becomes numbers, and predictions
in the target's units."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, DataError
from ..units import SCALES, TargetScale, in_units, mapped, stored
from .columns import ISO_DATE, MARKS, Table, check_texts, codes
from .delimited import Format, check_distinct

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["number", "categories", "dates"]
Advice = Callable[["pd.Series", str], str]
"""From a column (n,) with a value that is no number, and its name, to what to do with it."""

OTHERS = "*"
"""The last of some categories that takes every text that is none of the others."""
_A_DATE = "a date such as 1980-01-31, or 1980-01-31 23:59"


@dataclass(frozen=True)
class Column:
    """A column of raw values, and the features that it becomes.

    Args:
        name: of the column.
        kind: ``"number"``, one feature; ``"categories"``; or ``"dates"``: the year, the month, the
            day of the week from Monday on and the days since the first of the period, each mapped
            to [-1, 1].
        range: of a number, at which values are cut and which is mapped to [-1, 1]; None for values
            as they are.
        period: the first and the last of the dates, as in 1980-01-31, at which dates are cut; None
            of other kinds.
        categories: in their order; true and false, however they are spelled, or texts, the last of
            which may be :data:`OTHERS`.
        signs: the categories are two that become one feature, -1 and +1; else each is a feature, 0
            or 1.
        missing: values may be missing. The features of such a row are 0, which is the middle of a
            range and none of several categories, and one more feature of the column is 1 in these
            rows and 0 in the others.
    """

    name: str
    kind: Kind = "number"
    range: tuple[float, float] | None = None
    period: tuple[str, str] | None = None
    categories: tuple[str | bool, ...] = ()
    signs: bool = False
    missing: bool = False

    @property
    def width(self) -> int:
        """Return the number of features."""
        own = 1
        if self.kind == "dates":
            own = 4
        elif self.kind == "categories" and not self.signs:
            own = len(self.categories)
        return own + self.missing

    @property
    def size(self) -> float:
        """Return a public bound on the sum of the absolute features of a row, which holds for the
        sum of their squares too; infinite for none."""
        if self.kind == "number" and self.range is None:
            return math.inf
        if self.kind == "dates":
            return 4.0
        return 1.0

    def encode(self, table: Table, advice: Advice) -> np.ndarray:
        """Return the features of a table's rows, (rows, width), float32 of categories and float64
        of numbers and dates.

        Raises:
            DataError: a value that is no finite number, no date or none of the categories.
        """
        if not self.missing:
            return self._features(table, advice)
        gaps = self._gaps(table)
        features = self._features(self._filled(table, gaps), advice)
        features[gaps] = 0
        return np.concatenate([features, gaps[:, None]], axis=1, dtype=features.dtype)

    def _features(self, table: Table, advice: Advice) -> np.ndarray:
        if self.kind == "categories":
            return self._coded(table)
        if self.kind == "dates":
            return self._dated(table)
        accepted = f"a finite number ({advice(table.frame[self.name], self.name)})"
        values = table.numbers(self.name, typed=not self.missing, accepted=accepted)
        if self.range is not None:
            values = mapped(values, *self.range)
        return values[:, None]

    def _coded(self, table: Table) -> np.ndarray:
        values = table.written(self.name)
        texts = self._texts
        if any(isinstance(category, bool) for category in self.categories):
            values = np.char.lower(values)
        number = codes(values, texts)
        if texts[-1] == OTHERS:
            number = np.where(number < 0, len(texts) - 1, number)
        known = (
            f"the categories {', '.join(map(repr, texts))} (a last one {OTHERS!r} takes all others)"
        )
        table.refuse(number < 0, self.name, known)
        if self.signs:
            return (2 * number - 1)[:, None].astype(np.float32)
        return (number[:, None] == np.arange(len(texts))).astype(np.float32)

    @property
    def _texts(self) -> list[str]:
        """Return the categories as texts, in small letters if they are true and false."""
        texts = [str(category) for category in self.categories]
        if any(isinstance(category, bool) for category in self.categories):
            return [text.lower() for text in texts]
        return texts

    def _dated(self, table: Table) -> np.ndarray:
        first, last = self._ends
        day = np.clip(_days(table, self.name), first.toordinal(), last.toordinal())
        kinds, place = np.unique(day, return_inverse=True)
        dates = [datetime.date.fromordinal(int(number)) for number in kinds]
        parts = [
            mapped(np.array([date.year for date in dates]), first.year, last.year),
            mapped(np.array([date.month for date in dates]), 1, 12),
            mapped(np.array([date.weekday() for date in dates]), 0, 6),
            mapped(kinds, first.toordinal(), last.toordinal()),
        ]
        return np.stack(parts, axis=1)[place]

    @property
    def _ends(self) -> tuple[datetime.date, datetime.date]:
        """Return the first and the last of the dates."""
        assert self.period is not None
        first, last = self.period
        return datetime.date.fromisoformat(first), datetime.date.fromisoformat(last)

    def _gaps(self, table: Table) -> np.ndarray:
        """Return the rows without a value, bool (rows,): an empty one, or a mark such as NA that is
        no category."""
        values = table.frame[self.name]
        marks = MARKS - set(self._texts)
        marked = [isinstance(value, str) and value.strip() in marks for value in values]
        return np.array(marked, dtype=bool) | values.isna().to_numpy(dtype=bool)

    def _filled(self, table: Table, gaps: np.ndarray) -> Table:
        """Return the table with a value that the column takes in the rows of ``gaps``, bool
        (rows,)."""
        filler: Any = 0
        if self.kind == "categories":
            filler = self._texts[0]
        elif self.period is not None:
            filler = self.period[0]
        frame = table.frame.copy(deep=False)
        frame[self.name] = frame[self.name].astype(object).where(~gaps, filler)
        return replace(table, frame=frame)

    def outside(self, table: Table) -> int:
        """Returns the number of values of a table's rows that are cut at the ends of the range,
        or of the period."""
        if self.range is None and self.period is None:
            return 0
        if self.missing:  # what stands in for them may lie outside
            given = ~self._gaps(table)
            client_of = None
            if table.client_of is not None:
                client_of = table.client_of[given]
            table = replace(table, frame=table.frame[given], client_of=client_of)
        if self.range is not None:
            values: np.ndarray = table.numbers(self.name)
            low, high = self.range
        else:
            values = _days(table, self.name)
            low, high = (date.toordinal() for date in self._ends)
        return int(((values < low) | (values > high)).sum())


def declared_column(name: str, values: Any) -> Column:
    """Return a column as its public bounds declare it: two numbers are a range, two dates, written
    as 1980-01-31, a period, and texts are categories.

    Raises:
        ConfigError: none of these.
    """
    if not isinstance(values, Sized):
        raise ConfigError(
            f"data.bounds[{name!r}] is {values!r}; give a range, [LOW, HIGH], or "
            "categories, [A, B]."
        )
    pair: list[Any] = []
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 2:
        pair = list(values)
    if pair and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in pair
    ):
        if not -math.inf < pair[0] < pair[1] < math.inf:
            raise ConfigError(
                f"data.bounds[{name!r}] is {pair}; a range must be [LOW, HIGH], LOW below HIGH."
            )
        return Column(name, range=(float(pair[0]), float(pair[1])))
    dates = [date_of(str(value)) for value in pair]
    if dates and None not in dates:
        first, last = dates
        if first is None or last is None or first >= last:
            raise ConfigError(
                f"data.bounds[{name!r}] is {pair}; two dates must be [FIRST, LAST], "
                "FIRST before LAST."
            )
        return Column(name, "dates", period=(first.isoformat(), last.isoformat()))
    texts = check_texts(f"bounds[{name!r}]", values)  # type: ignore[arg-type]
    categories = category_values(texts)
    if OTHERS in categories[:-1]:
        raise ConfigError(
            f"data.bounds[{name!r}] is {texts}; {OTHERS!r}, which takes all other categories, must "
            "be the last."
        )
    return Column(name, "categories", categories=categories, signs=len(categories) == 2)


def date_of(text: str) -> datetime.date | None:
    """Return the date at the beginning of a text such as 1980-01-31 or 1980-01-31 23:59; None for
    another text."""
    if not re.fullmatch(ISO_DATE, text):
        return None
    try:
        return datetime.date.fromisoformat(text[:10])
    except ValueError:
        return None


def _days(table: Table, name: str) -> np.ndarray:
    """Return a column of dates as the number of each day, counted from the first of the year 1 on,
    int64 (n,)."""
    filled = (
        f"{_A_DATE} (fill it, leave the row or the column out, or list the column in data.missing)"
    )
    kinds, place = np.unique(table.written(name, filled), return_inverse=True)
    dates = [date_of(text) for text in kinds.tolist()]
    table.refuse(np.array([date is None for date in dates], dtype=bool)[place], name, _A_DATE)
    return np.array([date.toordinal() for date in dates if date is not None], dtype=np.int64)[place]


@dataclass(frozen=True)
class TableSchema:
    """What the reader of tables knows of a table beside its rows: how raw columns become the
    features of a model, and outputs of a model predictions.

    Args:
        columns: those to predict from, in their order.
        target: the column to predict.
        classes: number of classes of the target; None for real numbers.
        labels: the target's values in order of their class number; empty for the numbers 0 ..
            classes - 1.
        target_range: range of a real target, which is stored mapped to [-1, 1]; None for targets as
            they are.
        target_scale: ``"log"`` where the logarithm of that range is what is mapped.
        client: the column that names the client of a row; None without one.
        integers: whether features are whole numbers, for models of tokens.
        form: how the text of a file of such rows is written; None of a table of another kind.
        declared: whether names and categories were given as settings. If not, they were read off
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
        """Return the columns that a file of text is read for as they are written: id 007 is not
        7."""
        return [column.name for column in self.columns if column.kind != "number"]

    @property
    def width(self) -> int:
        """Return the number of features."""
        return sum(column.width for column in self.columns)

    def encode(self, rows: pd.DataFrame | Table) -> Tensor:
        """Return the features of raw rows as a dataset stores them: (rows, width), float32, or
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
        return features.long()

    def features(self, table: Table, advice: Advice) -> np.ndarray:
        """Return the features of a table's rows, (rows, width), float32, or float64 of whole
        numbers, with ``advice`` for a wrong value."""
        parts = [column.encode(table, advice) for column in self.columns]
        return np.concatenate(parts, axis=1).astype(np.float64 if self.integers else np.float32)

    def outside(self, table: Table) -> dict[str, int]:
        """Returns the number of values that are cut at the ends of the range, by column, for
        columns with some."""
        counts = {column.name: column.outside(table) for column in self.columns}
        return {name: count for name, count in counts.items() if count}

    def decode(self, outputs: Tensor) -> np.ndarray:
        """Return the predictions of a model's outputs in the target's units.

        Args:
            outputs: (rows,) or (rows, 1), of real targets or one logit of two classes; (rows,
                classes).

        Returns:
            (rows,), labels, class numbers (int64) or real numbers (float64).
        """
        if self.classes is None:
            return self.in_units(outputs.reshape(len(outputs))).cpu().numpy()
        if outputs.ndim == 1 or outputs.shape[1] == 1:
            number = (outputs.reshape(len(outputs)) > 0).long()
        else:
            number = outputs.argmax(1)
        return np.array(self.names, dtype=object if self.labels else np.int64)[number.cpu().numpy()]

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return predictions of a real target in its own units, float64."""
        return in_units(outputs, self.target_range, self.target_scale)

    def targets(self, table: Table, advice: Advice) -> np.ndarray:
        """Return the targets of a table's rows, of which there is a range, as they are stored,
        float32 (rows,)."""
        assert self.target_range is not None
        values = Column(self.target).encode(table, advice)[:, 0]
        return stored(values, self.target_range, self.target_scale).astype(np.float32)

    @property
    def names(self) -> list[str] | list[int]:
        """Return the classes by their numbers: the labels, or else the numbers."""
        return list(self.labels) or list(range(self.classes or 0))

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain values, JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> TableSchema:
        """Return the schema of plain values.

        Raises:
            DataError: values that are not those of a schema, by name.
        """
        given = _fields(cls, values, "the schema of a table")
        if not isinstance(given["columns"], list) or not given["columns"]:
            raise DataError("columns must be a list, and not empty.")
        columns = tuple(_column(each) for each in given["columns"])
        names = [column.name for column in columns]
        roles = [given["target"], *([] if given["client"] is None else [given["client"]])]
        if not all(isinstance(name, str) for name in roles) or len({*names, *roles}) < len(
            names
        ) + len(roles):
            raise DataError("the columns, the target and the client must have distinct names.")
        classes = given["classes"]
        labels = given["labels"]
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
    """Return rows of pandas with distinct columns."""
    import pandas as pd

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


def _fields(kind: type, values: Any, what: str) -> dict[str, Any]:
    """Return the values of a dataclass by name, refusing other names."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(values, Mapping) or set(values) != set(names):
        raise DataError(f"{what} must have {', '.join(names)}, and nothing else.")
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
    if not numbers or not -math.inf < float(values[0]) < float(values[1]) < math.inf:
        raise DataError(f"{name} has the range {values!r}; it must be [LOW, HIGH], LOW below HIGH.")
    return float(values[0]), float(values[1])


def category_values(categories: Sequence[Any]) -> tuple[str | bool, ...]:
    """Return categories as a schema keeps them: true and false as they are, all others as texts."""
    return tuple(value if isinstance(value, bool) else str(value) for value in categories)
