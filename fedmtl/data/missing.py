"""Values that stand for a missing one, and rows whose client is missing."""

from __future__ import annotations

from typing import Any, Literal, get_args

from .._extras import pandas as pd

MARKS = frozenset({"", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "<NA>", "?"})
"""Texts that stand for missing values."""

MissingClient = Literal["refuse", "drop", "name"]
"""Rows without a client are refused or left out, or a mark such as NA is the name of a client."""
MISSING_CLIENT: tuple[MissingClient, ...] = get_args(MissingClient)

A_CLIENT = "the name of a client"


def is_missing(value: Any, marks: frozenset[str] = MARKS) -> bool:
    """Returns True for no value, such as None, NaN or NaT, and for a text that is one of the marks,
    with spaces around it or without."""
    if isinstance(value, str):
        return value.strip() in marks
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def marks_of_clients(missing: MissingClient) -> frozenset[str]:
    """Returns the texts that are no name of a client."""
    if missing == "name":
        return frozenset({""})
    return MARKS


def accepted_client(setting: str) -> str:
    """Returns the part of a message with the accepted values for the client of a row.

    Args:
        setting: the name of the choice in messages, such as data.missing_client.
    """
    return (
        f"{A_CLIENT} ({setting}=drop leaves rows without one out, and {setting}=name takes a text "
        "such as NA as a name)"
    )
