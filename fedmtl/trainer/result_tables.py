"""Tables of clients and of evaluated rounds, as rows and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._text import cell
from .comparison import each_beside
from .scored_models import ScoredModels
from .stages import own_and_local

if TYPE_CHECKING:
    from .result import Result


def client_rows(scored: ScoredModels, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the scores of each client, and the name of the model that it chose.

    Args:
        scored: models with scores.
        ids: of the clients.

    Returns:
        A row for each client, with the columns of :meth:`ScoredModels.columns`; a score that a
        client lacks, or that is not a number, is None.
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


def beside_local(result: Result, ids: Sequence[str]) -> dict[str, dict[str, str | None]]:
    """Returns the column ``vs local`` of each client: ``"better"``, ``"equal"`` or ``"worse"``, its
    own model beside its local one; None for a client without scores, and no column without the
    baseline ``"local"`` or a client to compare."""
    words: dict[str, str] = {}
    both = own_and_local(result)
    if both is not None:
        words = each_beside(*both, result.shown[0], result.personal.dtype)
    if not words:
        return {client: {} for client in ids}
    return {client: {"vs local": words.get(client)} for client in ids}
