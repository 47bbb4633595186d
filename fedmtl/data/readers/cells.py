"""The values of a column: texts among categories, decimal points, and values in messages."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from ..._check import without_zeros
from ..._extras import pandas as pd
from ...errors import ConfigError

# letters and bytes that are printed
_LONGEST = 80
_FEW = 16


def codes(values: np.ndarray, categories: Sequence[str], decimal: str = ".") -> np.ndarray:
    """Returns the positions (n,), int64, of texts (n,) in ``categories``; -1 if a text is none
    of them.

    A whole number with decimals of zero, as 1.0, is also found without them, and the reverse: a
    column of whole numbers with gaps is written so.

    Args:
        values: texts, (n,).
        categories: distinct texts.
        decimal: the mark before the decimals of ``values``; of ``categories`` it is a point.
    """
    found: np.ndarray = pd.Index(list(categories)).get_indexer(pd.Index(values))
    missed = found < 0
    whole = [without_zeros(category) for category in categories]
    if not missed.any() or len(set(whole)) < len(whole):
        return found
    texts, place = np.unique(values[missed], return_inverse=True)
    shortened = pd.Index([without_zeros(text, decimal) for text in texts.tolist()])
    again = pd.Index(whole).get_indexer(shortened)
    found[missed] = again[place]
    return found


def check_one_column(**columns: Any) -> None:
    """Refuses a list where a setting of a table names one column.

    Args:
        columns: the names by their settings.

    Raises:
        ConfigError: the setting.
    """
    for setting, column in columns.items():
        # a table of pandas may have columns of any kind that can be looked up
        if not isinstance(column, Hashable):
            raise ConfigError(f"data.{setting} is {column!r}; accepted: the name of one column.")


def check_texts(option: str, texts: Sequence[str]) -> list[str]:
    """Returns distinct texts as a list; raise :class:`ConfigError` if they are not, or have no
    order."""
    listed = texts
    # of NumPy or pandas; its values become those of Python
    if hasattr(texts, "tolist"):
        listed = texts.tolist()
    # the order of a set of texts is another one in each process
    fixed = isinstance(listed, Collection) and not isinstance(listed, (str, Set, Mapping))
    if not fixed or not listed or len(set(map(str, listed))) != len(listed):
        raise ConfigError(
            f"data.{option} is {texts!r}; it must be distinct texts, at least one, in a list."
        )
    return list(listed)


def with_points(values: pd.Series, decimal: str) -> pd.Series:
    """Returns a column (n,) whose texts have decimal points. If ``decimal`` is a comma, a text that
    has a point in the file is no number then."""
    if decimal == ".":
        return values
    swapped = str.maketrans(",.", ".,")
    return values.map(lambda value: value.translate(swapped) if isinstance(value, str) else value)


def printed(value: object) -> str:
    """Returns a value as messages print it: numbers and short texts in full, other values by their
    kind, such as an image."""
    if isinstance(value, Mapping) and any(
        isinstance(part, (bytes, bytearray)) for part in value.values()
    ):
        return f"a mapping of {', '.join(map(str, value))}"
    if isinstance(value, (bytes, bytearray)) and len(value) > _FEW:
        return f"{len(value):,} bytes"
    if isinstance(value, str):
        text = repr(value)
    else:
        text = " ".join(str(value).split())
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 1]}…"
