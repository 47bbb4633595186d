"""Tables of clients and of evaluated rounds, as rows and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from .._text import cell
from .scored import Scored


def client_rows(scored: Scored, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the scores of each client, and the name of the model that it chose.

    Args:
        scored: models with scores.
        ids: of the clients.

    Returns:
        A row for each client, with the columns of :meth:`Scored.columns`; a score that a client
        lacks, or that is not a number, is None.
    """
    columns = scored.columns()
    if scored.finetuned is not None and scored.finetuned.chosen:
        columns["chosen"] = scored.finetuned.chosen
    return [
        {name: _known(values.get(client)) for name, values in columns.items()} for client in ids
    ]


def _known(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def csv_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Returns rows as CSV under the names of all their keys; a cell that a row lacks is empty.

    Texts are written by :func:`cell`, since a spreadsheet would compute a name that begins as a
    formula.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for cells in (names, *([row.get(name, "") for name in names] for row in rows)):
        writer.writerow(map(cell, cells))
    return text.getvalue().encode()
