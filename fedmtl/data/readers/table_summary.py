"""Guesses about a column from its private values: numbers, dates, categories, or an id of rows."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from ..._extras import pandas as pd
from ..._rounding import rounded_down, rounded_up
from ..missing import MARKS
from .text_format import DECIMAL_COMMA

_FEWEST = 20  # distinct values of a column of ids, at least
_MOST = 50  # categories of a column in a draft
_CODES = 12  # distinct whole numbers that may stand for categories
_SKEWED = 1.5  # the mean of a skewed column over its median
_OTHER_DATE = (
    r"(\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2})|\d{4}[./]\d{1,2}[./]\d{1,2}"
    r"|\d{1,2}[ .-]{1,2}[A-Za-z]{3,9}[ .-]\d{2,4}|[A-Za-z]{3,9} \d{1,2},? \d{4})([T ].*)?"
)
_MARKED = r"[$€£¥+-]{0,2}\s?\d[\d., ]*\s?[A-Za-z%°µ$€£¥]{0,8}"  # a number with a unit
_GROUPED = r"\s*[-+]?\d{1,3},\d{3}\s*"  # a number with a comma before three digits
ISO_DATE = r"\d{4}-\d{2}-\d{2}([T ].*)?"
"""A pattern of dates, which a time of the day may follow."""


MOST_CLASSES = 20
"""Whole numbers are taken as classes without being told so only if they are below this number."""


def holds_amounts(values: np.ndarray) -> bool:
    """Returns True if the whole numbers of a target (n,) are amounts, such as days, and not the
    numbers of classes: some are not in 0 .. 19, and they are not all -1 and +1."""
    if values.dtype.kind not in "iu":
        return False
    outside = (values < 0) | (values >= MOST_CLASSES)
    return bool(outside.any() and not (abs(values) == 1).all())


def looks_like_id(values: pd.Series) -> bool:
    """Returns True if most texts of a column (n,) occur once, or if whole numbers count its
    rows."""
    kinds = values.nunique()
    count = values.count()
    if kinds <= _FEWEST:
        return False
    if not pd.api.types.is_numeric_dtype(values.dtype):
        return bool(kinds > count / 2)
    whole = pd.api.types.is_integer_dtype(values.dtype)
    return bool(whole and kinds == count and values.max() - values.min() < 2 * count)


class Summary:
    """A summary of a column (n,), guessed from its private values: numbers, dates, or categories.

    Texts are numbers if more than half spell some, and the others are marks of missing values,
    such as NA, or too many for categories. True and false are categories.

    Attributes:
        numeric: True if the column holds numbers.
        whole: True if these are whole.
        kinds: the distinct values as texts, sorted.
        bounds: a draft of its public bounds: the categories, or a range, whose ends are rounded
            away from it to three digits, or to more if three would stretch it, unless they are
            whole.
        text: the same in words.
        dates: the values are dates; their bounds are then whole years.
        missing: the number of missing values.
        distinct: the numbers are whole, and no two of them are alike.
        coded: the numbers are whole, and 3 to 12 of them are distinct, as if they stood for
            categories.
        skewed: all numbers are above 0, many are distinct, and their mean is far above their
            median.
        marked: the categories are numbers with units or other marks, such as ``3 days``.
        doubt: the reason why it is no feature and no target, or an empty text.
        remedy: the change that makes it a feature or a target.
    """

    def __init__(self, values: pd.Series) -> None:
        values = _counted(values)
        self.numeric = pd.api.types.is_numeric_dtype(values.dtype)
        texts = {str(value) for value in values.dropna().unique()} - MARKS
        self.dates = (
            bool(texts) and not self.numeric and all(re.fullmatch(ISO_DATE, text) for text in texts)
        )
        if self.dates:
            # among dates a mark stands for a missing one
            values = values.mask(values.isin(list(MARKS)))
        self.missing = int(values.isna().sum())
        self.kinds = sorted(map(str, values.dropna().unique()))
        self.whole = pd.api.types.is_integer_dtype(values.dtype)
        self.bounds = list[Any](self.kinds)
        self.text = f"{len(self.kinds):,} categories"
        if self.numeric and self.kinds:
            low = values.min()
            high = values.max()
            self.text = f"{low:g} to {high:g}"
            # rounded away from the values, which makes the draft wide enough and says less of the
            # extremes
            digits = _digits(float(low), float(high))
            self.bounds = [float(rounded_down(low, digits)), float(rounded_up(high, digits))]
            if self.whole:
                self.bounds = [int(low), int(high)]
        whole = self.numeric and bool((values.dropna().to_numpy(dtype=np.float64) % 1 == 0).all())
        self.distinct = whole and len(self.kinds) == values.count()
        self.coded = whole and not self.distinct and 3 <= len(self.kinds) <= _CODES
        many = self.numeric and len(self.kinds) > MOST_CLASSES
        self.skewed = bool(many and values.min() > 0 and values.mean() > _SKEWED * values.median())
        if self.dates:
            first = self.kinds[0][:10]
            last = self.kinds[-1][:10]
            self.text = f"{first} to {last}, dates"
            # whole years, which say less of the first and the last record
            self.bounds = [f"{first[:4]}-01-01", f"{last[:4]}-12-31"]
        self.doubt = self._doubt(values)
        self.remedy = "declare its data.bounds"
        texts = {kind for kind in self.kinds if kind not in MARKS}
        if not self.kinds:
            self.text = "no value in any row"
        elif self._all(texts, _OTHER_DATE):
            self.doubt = f"has dates of another form, such as {self.kinds[-1]!r}"
            self.remedy = "write them as 1980-01-31"
        elif self.doubt and self._all(texts, _MARKED):
            self.doubt = f"has numbers with other marks, such as {self.kinds[-1]!r}"
            self.remedy = "write the number alone"
        self.marked = not self.doubt and self._all(texts, _MARKED)
        commas = [kind for kind in self.kinds if re.fullmatch(DECIMAL_COMMA, kind)]
        if not self.numeric and len(commas) > len(self.kinds) / 2:
            # thousands of categories would be the wrong answer to a wrong separator of decimals
            self.doubt = "has numbers with a decimal comma"
            self.remedy = "give data.decimal=comma"
            # 70,500 may be seventy and a half, or seventy thousand
            if all(re.fullmatch(_GROUPED, kind) for kind in commas):
                self.doubt = "has numbers with commas, of decimals or of thousands"
                self.remedy = "give data.decimal=comma for decimals, or write the number alone"

    def _all(self, texts: set[str], pattern: str) -> bool:
        """Returns True if the column has texts that all fit a pattern, and no numbers."""
        return bool(texts) and not self.numeric and all(re.fullmatch(pattern, t) for t in texts)

    def _doubt(self, values: pd.Series) -> str:
        if not self.kinds:
            return "is empty"
        if not self.dates and looks_like_id(values):
            return "looks like an id of rows"
        if len(self.kinds) < 2:
            return "is a constant"
        if not self.numeric and not self.dates and len(self.kinds) > _MOST:
            return f"has more than {_MOST} categories"
        return ""


def _digits(low: float, high: float) -> int:
    """Returns the digits of the ends of a range: three, or as many as two digits of its width need,
    such as four of 1003.2 to 1021.1."""
    width = high - low
    size = max(abs(low), abs(high))
    if not 0 < width < size < math.inf:
        return 3
    return max(3, min(math.ceil(math.log10(size / width)) + 2, 15))


def _counted(values: pd.Series) -> pd.Series:
    """Returns a column as it is described: lists, truth values and times as texts, and texts as
    numbers if more than half of them are some and the others are marks of a missing one, or too
    many for categories."""
    # lists cannot be counted; as texts they are categories, and mostly too many
    lists = values.dtype == object and not values.map(pd.api.types.is_scalar).all()
    if lists or pd.api.types.is_bool_dtype(values.dtype):
        return values.astype(str)
    if pd.api.types.is_datetime64_any_dtype(values.dtype):
        return values.map(str, na_action="ignore")
    if pd.api.types.is_numeric_dtype(values.dtype):
        return values
    numbers = pd.to_numeric(values, errors="coerce")
    others = set(values[numbers.isna()].dropna())
    mostly_numbers = numbers.count() > values.count() / 2
    if others and mostly_numbers and (others <= MARKS or values.nunique() > _MOST):
        return numbers
    return values
