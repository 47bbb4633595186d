"""Tables of clients and of evaluated rounds, as data frames and CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from .._text import cell
from .scored import Scored

if TYPE_CHECKING:
    from pandas import DataFrame


def clients_frame(scored: Scored, ids: tuple[str, ...]) -> DataFrame:
    """Returns a row for each client: its scores as :meth:`Scored.to_frame` has them, and the model
    that it chose.

    Args:
        scored: models with their scores.
        ids: of all clients; those without a score have empty cells.
    """
    frame = scored.to_frame().reindex(ids)
    if scored.finetuned is not None and scored.finetuned.chosen:
        frame["chosen"] = frame.index.map(scored.finetuned.chosen.get)
    return frame


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
