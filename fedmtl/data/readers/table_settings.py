"""The settings of the reader of tables, and which columns they make features."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..._check import fraction, given, one_of
from ...errors import ConfigError, DataError
from ..missing import MISSING_CLIENT, MissingClient
from ..partition import Partition
from ..sides import Classes
from ..transforms import Integers, Transform
from ..units import SCALES, TargetScale
from .cells import check_one_column, check_texts
from .column_coding import Column, declared_column
from .columns import Table
from .delimited import is_unnamed
from .schema import TableSchema

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("fedmtl")


@dataclass(frozen=True, eq=False)
class TableSettings:
    """Settings of :func:`~fedmtl.data.read_table`, which takes them as its arguments.

    Args:
        path: a .csv, .tsv (both also .gz) or .parquet file, or a table of pandas.
        client: the column with each row's client; its values become the ids, as text. A whole
            number is one id, however it is written: 1 and 1.0.
        target: the column to predict; needed.
        partition: deals the rows to clients, such as :class:`~fedmtl.data.Dirichlet`, if no column
            names these.
        features: the columns to predict from; None for all others, but not for a column ``time``
            without bounds.
        one_hot: feature columns to code as one 0/1 feature a category. The categories are those of
            the rows, in order of their text, which a run with noise refuses, unless ``bounds`` has
            the column.
        bounds: public facts of columns. ``[low, high]`` of numbers: values are cut there and mapped
            to [-1, 1]. Texts, the categories in order: two become -1 and +1, more one 0/1 feature
            each, and a last one ``"*"`` takes every other text. Two dates,
            ``["1980-01-01", "1987-12-31"]``: dates, written so, of which a time may follow, are cut
            there and become the year, the month, the day of the week from Monday on and the days
            since the first, each mapped to [-1, 1]. The target of a regression has a range
            likewise, at which predictions are cut off; scores are in its own units. If all features
            have bounds, the dataset's domain follows from them.
        target_scale: ``"log"`` maps the logarithm of a real target's range, which must be above 0,
            to [-1, 1], in place of the range: for targets that are skewed, such as costs.
            Predictions and scores are in the target's own units all the same. The mean of
            logarithms is near the median of the target, and below its mean.
        missing: ``"refuse"`` refuses missing values; a list of feature columns with bounds lets
            their values be missing, and ``"indicator"`` those of all feature columns with bounds.
            The features of such a column are 0 in a row without a value (the middle of a range,
            none of several categories), and each such column has one more feature, 1 in these rows
            and else 0, even if no value is missing. Empty values are missing, and NA, N/A, n/a,
            #N/A, NaN, nan, null, NULL, <NA> and ? if they are no category.
        missing_client: ``"refuse"`` refuses a row without a client, ``"drop"`` leaves it out as if
            the table did not have it, and ``"name"`` takes NA and the other marks as the names of
            clients; an empty value is refused then, too.
        missing_target: ``"refuse"`` refuses a row without a target, and ``"drop"`` leaves it out as
            if the table did not have it; empty values and the same marks, if they are no label.
        labels: the target's values in order of their class number, as text; needed if the target is
            text, or classes are not numbered from 0 on. The label 1 is also the value 1.0.
        classes: as in :meth:`FederatedDataset.from_tensors`; with ``labels`` their number.
            ``"infer"`` takes whole numbers as classes only if they are -1 and +1 or all from 0 to
            19, and else as a real target. A run with noise refuses an inferred number.
        test_path: a second table with the test rows, which has the same columns; None holds out
            rows of the first. Clients without rows in the first one are left out, as
            :meth:`FederatedDataset.from_tensors` says.
        split: the choice of the test rows: ``"random"``, or ``"time"`` for the latest of each
            client.
        time: for ``split="time"``, the column of dates, times or numbers by which rows are ordered.
        test_fraction: share of each client's rows held out for test; None for 0.2.
        seed: of the split, keyed by the client.
        min_examples: clients with fewer rows are left out.
        integers: keep the features as whole numbers, for models of tokens.
        transform: from storage to the input of the model; None for :class:`~fedmtl.data.Cast`, or
            :class:`~fedmtl.data.Integers` for ``integers``.
        name: for messages and reports; None for the file's name, or ``"table"``.
        separator: between the fields of a file of text: ``"comma"``, ``"semicolon"``, ``"tab"``,
            ``"bar"``, ``"space"`` (one or more), or the letter itself; None for a comma, of .tsv a
            tab.
        decimal: before the decimals of a number: ``"point"`` or ``"comma"``.
        encoding: of the letters, by Python's name, such as ``"utf-16"`` or ``"cp1252"``.
        comment: the beginning of lines above the heading that are left out, such as ``"#"``.

    Raises:
        ConfigError: an impossible setting, or settings that contradict each other.
    """

    path: str | Path | pd.DataFrame
    _: KW_ONLY
    client: str | None = None
    target: str | None = None
    partition: Partition | None = None
    features: Sequence[str] | None = None
    one_hot: Sequence[str] = ()
    bounds: Mapping[str, Sequence[Any]] | None = None
    target_scale: TargetScale = "linear"
    missing: str | Sequence[str] = "refuse"
    missing_client: MissingClient = "refuse"
    missing_target: Literal["refuse", "drop"] = "refuse"
    labels: Sequence[str] | None = None
    classes: Classes = "infer"
    test_path: str | Path | pd.DataFrame | None = None
    split: Literal["random", "time"] = "random"
    time: str | None = None
    test_fraction: float | None = None
    seed: int = 0
    min_examples: int = 2
    integers: bool = False
    transform: Transform | None = None
    name: str | None = None
    separator: str | None = None
    decimal: str = "point"
    encoding: str = "utf-8"
    comment: str | None = None

    def __post_init__(self) -> None:
        check_one_column(client=self.client, target=self.target, time=self.time)
        for name in ("features", "one_hot", "missing", "labels"):
            object.__setattr__(self, name, _listed(getattr(self, name)))
        if self.bounds is not None:
            bounds = {name: _listed(values) for name, values in self.bounds.items()}
            object.__setattr__(self, "bounds", bounds)
        if self.one_hot:
            check_texts("one_hot", self.one_hot)
        if self.labels is not None:
            check_texts("labels", self.labels)
        one_of("data", SCALES, target_scale=self.target_scale)
        one_of("data", MISSING_CLIENT, missing_client=self.missing_client)
        one_of("data", ("refuse", "drop"), missing_target=self.missing_target)
        ends = self.target_range
        if isinstance(self.classes, int) and ends is not None:
            given = f"data.classes is {self.classes}, but the target has a range in data.bounds"
            raise ConfigError(f"{given}, which is that of a real target; leave one of them out.")
        # a logarithm has no value at 0 or below
        if self.target_scale == "log" and (ends is None or ends[0] <= 0):
            raise ConfigError(
                f"data.target_scale is 'log', which needs a range of the target above 0, such as "
                f"'data.bounds={{{self.target}: [1, 1000]}}'; targets below its lower end are cut "
                "there."
            )
        self._check_split()

    def _check_split(self) -> None:
        """Refuses settings of the test rows that contradict each other."""
        one_of("data", ("random", "time"), split=self.split)
        fraction("data", **given(test_fraction=self.test_fraction))
        if self.split == "time" and self.time is None:
            raise ConfigError(
                "data.split is 'time', which needs the column of dates or numbers, as "
                "data.time=COLUMN."
            )
        if self.split == "random" and self.time is not None:
            raise ConfigError(
                f"data.time is {self.time!r}, which orders rows for data.split=time; add it, or "
                "leave data.time out."
            )
        if self.test_path is None:
            return
        # test rows of two kinds would be mixed
        if self.split == "time" or self.test_fraction is not None:
            other = "data.test_fraction"
            if self.split == "time":
                other = "data.split=time"
            raise ConfigError(
                f"data.test_path has the test rows, and {other} holds out others; leave "
                "one of them out."
            )
        if self.client is None:
            raise ConfigError(
                "data.test_path needs the column of each row's client, "
                "data.client=COLUMN, and no partition."
            )

    @cached_property
    def declared(self) -> dict[str, Column]:
        """Returns the columns with bounds by name, the target's among them."""
        return {name: declared_column(name, values) for name, values in (self.bounds or {}).items()}

    @property
    def target_column(self) -> Column | None:
        """Returns the target as its bounds declare it; None without bounds."""
        return self.declared.get(str(self.target))

    @property
    def target_range(self) -> tuple[float, float] | None:
        """Returns the public range of a real target; None without one."""
        if self.target_column is None:
            return None
        return self.target_column.range

    @property
    def undeclared_categories(self) -> list[str]:
        """Returns the columns of ``one_hot`` whose categories have to be read off the rows."""
        return [
            name
            for name in self.one_hot
            # a range of numbers says nothing of which of them are categories
            if name not in self.declared or self.declared[name].kind != "categories"
        ]

    @property
    def written(self) -> list[str]:
        """Returns the columns that a file of text is read for as they are written: id 007 is not
        7."""
        # ids and categories are texts even if all of them are digits
        names = [self.client, *self.undeclared_categories]
        names += TableSchema(tuple(self.declared.values()), "").written
        if self.labels is not None:
            names.append(self.target)
        return [name for name in names if name is not None]

    @property
    def text(self) -> dict[str, str | None]:
        """Returns the arguments of :func:`~fedmtl.data.readers.text_format.format_of`."""
        return {
            "separator": self.separator,
            "decimal": self.decimal,
            "encoding": self.encoding,
            "comment": self.comment,
        }

    @property
    def guesses_classes(self) -> bool:
        """Returns True if whole numbers of the target may be classes or amounts."""
        # bounds of a target say that it is real, and labels that it is not
        return self.classes == "infer" and self.labels is None and self.target_column is None

    @property
    def stated_classes(self) -> Classes:
        """Returns the number of classes, None for a real target, or ``"infer"``."""
        if self.labels is not None:
            return len(self.labels)
        if self.target_column is not None:
            return None
        return self.classes

    @property
    def stored_transform(self) -> Transform | None:
        """Returns the transform from storage; None for the usual one of floats."""
        # tokens are addresses of a table of embeddings, which floats cannot be
        if self.integers and self.transform is None:
            return Integers()
        return self.transform

    @property
    def left_out(self) -> str | None:
        """Returns the column that orders the rows, if it is no feature: its values have no public
        bounds."""
        if self.time in self.declared:
            return None
        return self.time

    def check_features(self, features: Sequence[str]) -> None:
        """Refuses settings of columns that are no features; a real target may have a range.

        Args:
            features: the feature columns.

        Raises:
            ConfigError: the column.
        """
        for option, columns in (("one_hot", self.one_hot), ("bounds", self.bounds or {})):
            for column in columns:
                # the labels are the values of a class, of which there is no range
                ranged = self.target_range is not None and self.labels is None
                if column in features or (column == self.target and ranged):
                    continue
                accepted = ", ".join(map(repr, features))
                raise ConfigError(
                    f"read_table.{option} contains {column!r}, which is not a feature column; "
                    f"accepted: {accepted}."
                )

    def may_be_missing(self, features: Sequence[str]) -> list[str]:
        """Returns the columns whose values may be missing.

        Args:
            features: the feature columns.

        Raises:
            ConfigError: another word, or a column that is no feature or has no bounds.
        """
        bounds = self.bounds or {}
        if self.missing == "refuse":
            return []
        if self.missing == "indicator":
            # without bounds there is no middle of a range to put in
            return [column for column in features if column in bounds]
        if isinstance(self.missing, str):
            raise ConfigError(
                f"data.missing is {self.missing!r}; accepted: refuse, indicator, or a list of "
                "columns."
            )
        for column in self.missing:
            if column not in features:
                accepted = ", ".join(map(repr, features))
                raise ConfigError(
                    f"data.missing contains {column!r}, which is not a feature column; "
                    f"accepted: {accepted}."
                )
            if column not in bounds:
                raise ConfigError(
                    f"data.missing contains {column!r}, which has no data.bounds; the middle of "
                    "its range, or none of its categories, is put in if a value is missing."
                )
        return list(self.missing)


def _listed(values: Any) -> Any:
    """Returns an array of NumPy or a column of pandas as a list of values of Python; anything else
    as it is."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return values


def feature_columns(
    table: Table,
    client: str | None,
    target: str | None,
    features: Sequence[str] | None,
    left_out: str | None = None,
) -> list[str]:
    """Returns the columns to predict from: ``features``, or for None all but the client, the target
    and ``left_out``.

    A first column without a heading, the index that pandas and R write, is left out with a warning.

    Raises:
        DataError: a column that is missing, or no feature.
        ConfigError: a column in two of these roles.
    """
    names = [target]
    if client is not None:
        names = [client, target]
    if features is not None:
        chosen = check_texts("features", features)
    else:
        chosen = _other_columns(table, [*names, left_out])
    roles: dict[str, Sequence[str | None]] = {}
    if left_out is not None:
        roles["time "] = [left_out]
    roles.update({"client ": names[:-1], "target ": [target], "features ": chosen})
    table.check_roles(roles)
    if client == target:
        raise ConfigError(
            f"data.client and data.target are both {target!r}; a client's id is nothing to predict."
        )
    for column in names:
        if column in chosen:
            raise ConfigError(
                f"data.features contains {column!r}, which is the client or target column."
            )
    if features is None:
        # the author of a list of columns knows them
        _check_headings(table, chosen)
    if not chosen:
        raise DataError(
            f"{table.file}: there are no feature columns beside {' and '.join(map(repr, names))}."
        )
    return chosen


def _other_columns(table: Table, taken: Sequence[str | None]) -> list[str]:
    """Returns the columns of a table that have no other role, without an index."""
    columns = list(table.frame.columns)
    # a column may be called None in a table of pandas, so None in ``taken`` means no column
    named = [name for name in taken if name is not None]
    chosen = [name for name in columns if name not in named]
    if chosen and is_unnamed(chosen[0]) and chosen[0] == columns[0]:
        text = (
            "%s: column 1 has no heading, as the index that pandas and R write, and is left "
            "out; name it to have it"
        )
        logger.warning(text, table.file)
        return chosen[1:]
    return chosen


def _check_headings(table: Table, columns: Sequence[str]) -> None:
    """Refuses a feature without a heading: its name would be made up, and not found again in a
    table of new rows."""
    for column in columns:
        if is_unnamed(column):
            number = int(str(column).rpartition(" ")[2]) + 1
            raise DataError(
                f"{table.file}: column {number} has no heading; give it one, or list the columns "
                "to predict from in data.features."
            )
