"""Tables of rows, with errors that name the file, the row and the column."""

from __future__ import annotations

import difflib
import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..._check import without_zeros
from ..._extras import pandas as pd
from ...errors import ConfigError, DataError
from ..missing import A_CLIENT, MARKS, is_missing
from ..partition import Partition, Parts
from ..rows import by_number
from .cells import check_texts, codes, printed, with_points
from .delimited import check_distinct, check_source, line_of
from .table_files import read_frame
from .text_format import DECIMAL_COMMA, DECIMAL_POINT, Format, format_of


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a file.

    Attributes:
        frame: n rows.
        file: for messages.
        client_of: the client of each row (n,), for messages; None if no column says it.
        form: the format of the file's text; None of a file or a table that is no text.
        settable: the user can set ``form``.
        kept: the row of the file of each row (n,); None if all rows are kept.
    """

    frame: pd.DataFrame
    file: Path
    client_of: np.ndarray | None = None
    form: Format | None = None
    settable: bool = False
    kept: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        source: str | Path | pd.DataFrame,
        text: Sequence[str] = (),
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        empty: bool = False,
    ) -> Table:
        """Returns the table in a file, or that of pandas, called ``name`` in messages.

        In a CSV file the columns ``text`` are kept as they are written (id 007 is not 7).

        Args:
            source: a path or a table of pandas.
            text: names of columns.
            name: of a table of pandas.
            settings: arguments of :func:`format_of` if the user can give them, else None.
            empty: a table without rows is accepted.

        Raises:
            DataError: neither, another kind of file, an unreadable one, a column that occurs twice,
                or no rows.
            ConfigError: settings that are impossible, or are not those of a file of text.
        """
        if isinstance(source, (str, Path)):
            check_source(source)
            file = Path(source)
            form = format_of(file.name, **(settings or {}))
            frame = read_frame(file, text, form, settings is not None)
        elif isinstance(source, pd.DataFrame):
            file = Path(name or "table")
            form = format_of("", **(settings or {}))
            # not copied: nothing here writes into a frame
            frame = source
            check_distinct(list(frame.columns), file)
        else:
            raise DataError(
                f"a {type(source).__name__} is no table; accepted: a file's path, or a DataFrame "
                "of pandas."
            )
        if frame.empty and not empty:
            raise DataError(f"{file} has no rows; at least 2 a client are needed.")
        if isinstance(source, (str, Path)) and file.suffix.lower() != ".parquet":
            return cls(frame, file, form=form, settable=settings is not None)
        if form != format_of(""):
            raise ConfigError(
                f"{file} is no file of text; data.separator, data.decimal, data.encoding and "
                "data.comment are for CSV files."
            )
        return cls(frame, file)

    def __len__(self) -> int:
        """Returns the number of rows n."""
        return len(self.frame)

    @property
    def decimal(self) -> str:
        """Returns the mark before the decimals of a number that is written as text."""
        if self.form is None:
            return "."
        return self.form.decimal

    def check_columns(self, needed: Sequence[str | None], role: str = "") -> None:
        """Raises :class:`DataError` unless the columns ``needed`` are there, none of them None;
        ``role`` is their use, for the message."""
        self.check_roles({role: needed})

    def check_roles(self, needed: Mapping[str, Sequence[str | None]]) -> None:
        """Checks that the columns of several roles are there.

        Args:
            needed: columns by their role, such as ``"client "``; none of them may be None.

        Raises:
            DataError: all that are missing, each with the column that may be meant.
        """
        columns = list(map(str, self.frame.columns))
        wrong = list[str]()
        hints = list[str]()
        for role, names in needed.items():
            for name in dict.fromkeys(names):
                if name in self.frame.columns:
                    continue
                if name is None:
                    wrong.append(f"a {role}column is needed (data.{role.strip()}=COLUMN)")
                else:
                    wrong.append(f"{role}column {name!r} is missing")
                hints += _nearest(str(name), columns)
        if not wrong:
            return
        hint = ""
        if hints:
            hint = f"did you mean {' and '.join(map(repr, dict.fromkeys(hints)))}? "
        there = "there are no columns"
        if columns:
            there = f"the columns are {', '.join(map(repr, columns))}"
        raise DataError(f"{self.file}: {', '.join(wrong)}; {hint}{there}.")

    def refuse(self, wrong: np.ndarray, column: str, accepted: str) -> None:
        """Raises :class:`DataError` for the first row of ``column`` that is ``wrong``, bool (n,),
        if there is one."""
        if not wrong.any():
            return
        place_in_frame = int(wrong.argmax())
        row = place_in_frame
        if self.kept is not None:
            row = int(self.kept[row])
        line = None
        if self.form is not None:
            line = line_of(self.file, self.form, row)
        if line is None:
            place = f"row {row}"
        else:
            place = f"line {line}"
        value = self.frame[column].iloc[place_in_frame]
        state = f"holds {printed(value)}"
        if line is not None and isinstance(value, str) and "\n" in value:
            state += " (a quote may not be closed)"
        # isna of a list is an array
        if pd.api.types.is_scalar(value) and (pd.isna(value) or value == ""):
            state = "is empty"
        client = ""
        if self.client_of is not None:
            client = f"client {str(self.client_of[place_in_frame])!r}, "
        raise DataError(
            f"{self.file}: {client}{place}, column {column!r} {state}; accepted: {accepted}."
        )

    def gaps(self, column: str, known: Collection[str] = ()) -> np.ndarray:
        """Returns the rows without a value in a column, bool (n,): an empty one, or a mark such as
        NA that is none of the ``known`` texts."""
        marks = MARKS - set(known)
        return np.array([is_missing(value, marks) for value in self.frame[column]], dtype=bool)

    def without(self, gaps: np.ndarray, column: str, *, texts: bool) -> Table:
        """Returns the table without the rows of ``gaps``, bool (n,), and a column as a file without
        them would have it.

        Args:
            gaps: the rows to leave out, which have no value in ``column``.
            column: its name; its values are numbers again if all of them spell some.
            texts: keep the values of ``column`` as they are written.
        """
        frame = self.frame[~gaps].copy()
        client_of = self.client_of
        if client_of is not None:
            client_of = client_of[~gaps]
        if not texts:
            values = frame[column]
            if self.form is not None:
                values = with_points(values, self.form.decimal)
            found = pd.to_numeric(values, errors="coerce")
            if not found.isna().any():
                # the gaps made whole numbers floating
                if bool((found == found.round()).all()) and bool((found.abs() < 2.0**53).all()):
                    found = found.astype(np.int64)
                frame[column] = found
        kept = np.flatnonzero(~gaps)
        if self.kept is not None:
            kept = self.kept[~gaps]
        return replace(self, frame=frame, client_of=client_of, kept=kept)

    def numbers(
        self,
        column: str,
        *,
        typed: bool = False,
        low: float = -np.inf,
        high: float = np.inf,
        accepted: str = "a finite number",
    ) -> np.ndarray:
        """Returns a column of numbers, float64 (n,).

        Args:
            column: its name.
            typed: the file's own values must be numbers; texts are refused even if they spell some.
            low: smallest accepted value.
            high: largest accepted value.
            accepted: for messages.

        Raises:
            DataError: a text, an infinity, a value that is missing or outside.
        """
        series = self.frame[column]
        numeric = pd.api.types.is_numeric_dtype(series.dtype)
        if series.dtype == object:  # lists, which no comparison takes, are no numbers
            series = series.where(series.map(pd.api.types.is_scalar).to_numpy(dtype=bool), "a list")
        if pd.api.types.is_complex_dtype(series.dtype):
            self.refuse(np.ones(len(series), dtype=bool), column, "a real number")
        if self.form is not None and not numeric:
            series = with_points(series, self.form.decimal)
        values = pd.to_numeric(series, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        # a float64 beyond its range reads as infinite, and is refused as such
        wrong = ~np.isfinite(values) | (values < low) | (values > high)
        # a file of text has no types: pandas leaves whole numbers beyond 64 bits as it reads them
        if typed and not numeric and self.form is None and not wrong.any():
            wrong = np.array([not isinstance(value, (numbers.Real, Decimal)) for value in series])
        self._refuse_decimals(wrong, column)
        if not np.isinf(high):
            accepted = f"a number from {low:g} to {high:g}"
        self.refuse(wrong, column, accepted)
        return values

    def check_single(self, values: np.ndarray, column: str) -> None:
        """Checks that the numbers of a column, (n,) or (n, width), are within the range of
        float32.

        Raises:
            DataError: the first row with one beyond.
        """
        largest = float(np.finfo(np.float32).max)
        beyond = np.abs(values) > largest
        if beyond.ndim > 1:
            beyond = beyond.any(axis=1)
        self.refuse(beyond, column, f"a number of at most {largest:.2g}, the range of float32")

    def _refuse_decimals(self, wrong: np.ndarray, column: str) -> None:
        """Raises :class:`DataError` for the first row of ``column`` that is ``wrong``, bool (n,),
        and a number with the decimals of another language."""
        if not wrong.any():
            return
        pattern = DECIMAL_COMMA
        accepted = (
            "a number with a decimal point and no other marks, and this one seems to have a "
            "decimal comma"
        )
        advice = "data.decimal=comma reads it"
        if self.form is not None and self.form.decimal == ",":
            pattern = DECIMAL_POINT
            accepted = "a number with a decimal comma and no other marks, as data.decimal says"
            advice = "data.decimal=point reads decimal points"
        if self.settable:
            accepted = f"{accepted} ({advice})"
        values = zip(wrong, self.frame[column], strict=True)
        found = [
            bool(bad) and isinstance(value, str) and bool(re.fullmatch(pattern, value))
            for bad, value in values
        ]
        self.refuse(np.array(found), column, accepted)

    def written(
        self, column: str, accepted: str = "a value (fill it, or leave the row or the column out)"
    ) -> np.ndarray:
        """Returns a column of texts or numbers as it is written (n,), without missing values."""
        values = self.frame[column]
        self.refuse(values.isna().to_numpy(), column, accepted)
        # bytes, such as those of an image, lists and mappings are neither
        if values.dtype == object:
            other = values.map(
                lambda v: isinstance(v, (bytes, bytearray)) or not pd.api.types.is_scalar(v)
            )
            self.refuse(other.to_numpy(dtype=bool), column, "texts or numbers here")
        return values.astype(str).to_numpy(dtype=str)

    def clients(
        self, column: str, *, marks: Collection[str] = MARKS, accepted: str = A_CLIENT
    ) -> np.ndarray:
        """Returns the client of each row as a text (n,).

        Texts stay as they are written, so that 007 and 7 are two clients. A whole number is one
        client with decimals of zero and without: a column of whole numbers with a gap holds 1.0.

        Args:
            column: its name.
            marks: texts that stand for a missing value.
            accepted: for messages.

        Raises:
            DataError: a missing value.
        """
        self.refuse(self.gaps(column, MARKS - set(marks)), column, accepted)
        texts, place = np.unique(self.written(column, accepted), return_inverse=True)
        ids: np.ndarray = np.array([without_zeros(text, self.decimal) for text in texts.tolist()])
        return ids[place]

    def labels(self, column: str, labels: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
        """Returns class numbers (n,), int64, and the labels that they number; None takes those that
        occur, sorted."""
        values = self.written(column)
        if labels is None:
            names = np.unique(values).tolist()
        else:
            names = list(map(str, check_texts("labels", labels)))
        number = codes(values, names, self.decimal)
        self.refuse(number < 0, column, f"the labels {', '.join(map(repr, names))}")
        return number, names

    def parts(
        self, client: str | None, partition: Partition | None, y: np.ndarray, seed: int
    ) -> Parts:
        """Returns the rows of each client: by the column ``client``, in the order of its texts, or
        dealt by y (n,).

        Raises:
            ConfigError: not either a column or a partition says which client has a row.
        """
        self.check_clients(client, partition)
        if client is None:
            return cast(Partition, partition).deal(y, seed)
        client_of = self.client_of
        if client_of is None:
            client_of = self.clients(client)
        ids, number = np.unique(client_of, return_inverse=True)
        return by_number(number, ids)

    def check_clients(self, client: str | None, partition: Partition | None) -> None:
        """Checks that either a column or a partition says which client has a row.

        Raises:
            ConfigError: neither or both.
        """
        if (client is None) == (not partition):
            state = "no client column"
            if client:
                state = "both a client column and a partition"
            raise ConfigError(
                f"{self.file}: {state}; give the column of each row's client, or a partition such "
                "as Dirichlet(clients=100, alpha=0.5); on the command line data.client=COLUMN or "
                "data/partition=dirichlet."
            )


def _nearest(name: str, columns: Sequence[str]) -> list[str]:
    """Returns the column that a name may mean; none if it is like no other."""
    # Age is age to people, and as unlike as any other word to a measure of letters
    cases = {column.casefold(): column for column in reversed(columns)}
    close = difflib.get_close_matches(name.casefold(), cases, n=1, cutoff=0.7)
    return [cases[found] for found in close]
