"""Names as people see them: texts of data and of received files hold nothing that a terminal or a
spreadsheet obeys.

Names stay as they are wherever programs match them: in memory, in JSON, in safetensors and in the
messages of nodes. They are written for people by one rule:

- :func:`shown`, on terminals, in tables, pages and figures: a character that cannot be printed,
  such as the first one of an escape code, a line break, or a mark of direction, is written as
  Python writes it: ``\\x1b``, ``\\n``, ``\\u202e``;
- :func:`cell`, in CSV files: the same, and an apostrophe stands before a text that a spreadsheet
  would compute, one that begins with ``=``, ``+``, ``-`` or ``@`` and is no number.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")


def shown(text: str) -> str:
    """Returns a text on one line, in which a character that cannot be printed is written as Python
    writes it."""
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def shown_lines(text: str) -> str:
    """Returns a text with its lines and tabs, and otherwise as :func:`shown` does."""
    return re.sub(r"[^\n\t]+", lambda part: shown(part[0]), text)


def counted(number: int, name: str) -> str:
    """Returns a number of things with their name, ``1 row`` and ``2 rows``.

    Args:
        number: of the things.
        name: of one of them; that of several has an s more.
    """
    if number == 1:
        return f"1 {name}"
    return f"{number:,} {name}s"


def cell(value: Any) -> Any:
    """Returns a cell of a CSV file: a text as a spreadsheet shows it and does not compute it, other
    values as they are.

    A text that begins with a formula's sign behind spaces counts as one.
    """
    if not isinstance(value, str):
        return value
    text = shown(value)
    formula = text.lstrip().startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    if formula:
        return f"'{text}"
    return text


def _shown(character: str) -> str:
    is_space = unicodedata.category(character) == "Zs"
    if character.isprintable() or is_space:
        return character
    return character.encode("unicode_escape").decode()
