"""A column of a table as features: its declared bounds, and the coding of its values."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..._extras import pandas as pd
from ...errors import ConfigError
from ..units import mapped
from .cells import check_texts, codes
from .columns import Table
from .table_summary import ISO_DATE

Kind = Literal["number", "categories", "dates"]
Advice = Callable[["pd.Series", str], str]
"""Returns the advice for a column (n,) with a value that is no number, from the column and its
name."""

OTHERS = "*"
"""The last of some categories that takes every text that is none of the others."""
_A_DATE = "a date such as 1980-01-31, or 1980-01-31 23:59"
_FILLED = "(fill it, leave the row or the column out, or list the column in data.missing)"


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
        """Returns the number of features."""
        own = 1
        if self.kind == "dates":
            own = 4
        elif self.kind == "categories" and not self.signs:
            own = len(self.categories)
        return own + self.missing

    @property
    def size(self) -> float:
        """Returns a public bound on the sum of the absolute features of a row, which holds for the
        sum of their squares too; infinite for none."""
        if self.kind == "number" and self.range is None:
            return math.inf
        if self.kind == "dates":
            # four features, each within [-1, 1]
            return 4.0
        return 1.0

    def encode(self, table: Table, advice: Advice) -> np.ndarray:
        """Returns the features of a table's rows, (rows, width), float32 of categories and float64
        of numbers and dates.

        Raises:
            DataError: a value that is no finite number, no date or none of the categories.
        """
        if not self.missing:
            return self._features(table, advice)
        gaps = table.gaps(self.name, self._texts)
        features = self._features(self._filled(table, gaps), advice)
        # the stand-in must not show in the features
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
        values = table.written(self.name, f"a category {_FILLED}")
        texts = self._texts
        if any(isinstance(category, bool) for category in self.categories):
            # files spell them true, True or TRUE
            values = np.char.lower(values)
        number = codes(values, texts, table.decimal)
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
        """Returns the categories as texts, in small letters if they are true and false."""
        texts = [str(category) for category in self.categories]
        if any(isinstance(category, bool) for category in self.categories):
            return [text.lower() for text in texts]
        return texts

    def _dated(self, table: Table) -> np.ndarray:
        first, last = self._ends
        day = np.clip(_days(table, self.name), first.toordinal(), last.toordinal())
        # a table has far fewer days than rows, and each is converted once
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
        """Returns the first and the last of the dates."""
        assert self.period is not None
        first, last = self.period
        return datetime.date.fromisoformat(first), datetime.date.fromisoformat(last)

    def _filled(self, table: Table, gaps: np.ndarray) -> Table:
        """Returns the table with a value that the column takes in the rows of ``gaps``, bool
        (rows,)."""
        filler: Any = 0
        if self.kind == "categories":
            filler = self._texts[0]
        elif self.period is not None:
            filler = self.period[0]
        # shallow, since one column is replaced and the table of the caller stays
        frame = table.frame.copy(deep=False)
        # as objects, since a column of numbers takes no text
        frame[self.name] = frame[self.name].astype(object).where(~gaps, filler)
        return replace(table, frame=frame)

    def outside(self, table: Table) -> int:
        """Returns the number of values of a table's rows that are cut at the ends of the range,
        or of the period."""
        if self.range is None and self.period is None:
            return 0
        if self.missing:  # their stand-in may lie outside
            given = ~table.gaps(self.name, self._texts)
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
    """Returns a column as its public bounds declare it: two numbers are a range, two dates, written
    as 1980-01-31, a period, and texts are categories.

    Raises:
        ConfigError: none of these.
    """
    if not isinstance(values, Sized) or isinstance(values, str):
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
        # one chain of comparisons, which NaN does not pass
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
    # the code of a text that is none of the categories is that of the last one
    if OTHERS in categories[:-1]:
        raise ConfigError(
            f"data.bounds[{name!r}] is {texts}; {OTHERS!r}, which takes all other categories, must "
            "be the last."
        )
    return Column(name, "categories", categories=categories, signs=len(categories) == 2)


def date_of(text: str) -> datetime.date | None:
    """Returns the date at the beginning of a text such as 1980-01-31 or 1980-01-31 23:59; None for
    another text."""
    if not re.fullmatch(ISO_DATE, text):
        return None
    try:
        return datetime.date.fromisoformat(text[:10])
    except ValueError:
        return None


def _days(table: Table, name: str) -> np.ndarray:
    """Returns a column of dates as the number of each day, counted from the first of the year 1 on,
    int64 (n,)."""
    filled = f"{_A_DATE} {_FILLED}"
    # each day is parsed once
    kinds, place = np.unique(table.written(name, filled), return_inverse=True)
    dates = [date_of(text) for text in kinds.tolist()]
    table.refuse(np.array([date is None for date in dates], dtype=bool)[place], name, _A_DATE)
    return np.array([date.toordinal() for date in dates if date is not None], dtype=np.int64)[place]


def category_values(categories: Sequence[Any]) -> tuple[str | bool, ...]:
    """Returns categories as a schema keeps them: true and false as they are, all others as
    texts."""
    return tuple(value if isinstance(value, bool) else str(value) for value in categories)
