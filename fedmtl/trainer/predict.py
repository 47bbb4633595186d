"""Predictions for the rows of a new table: by each client's own model, or by the shared one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._check import without_zeros
from .._extras import pandas as pd
from .._text import cell
from ..data.missing import A_CLIENT, MARKS
from ..data.readers.columns import Table
from ..data.readers.schema import TableSchema
from ..errors import ConfigError, DataError
from ..models import ModelFactory
from .coding import Coding, Predictor
from .published import is_public_part, published_model
from .result import Result

_DIGITS = ".9g"  # of a prediction: a model computes in float32

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

OWN = "own"
SHARED = "shared"
OTHER = "other"
FORM = ("separator", "decimal", "encoding", "comment")
"""Settings of a file of text."""


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a run on raw rows of a table: the shared one, and those of clients.

    Args:
        folder: of the run, or its public part.
        coding: of their inputs and outputs.
        shared: the shared model; None for a run without one.
        result: of the run whose clients have models; None of a public part.
    """

    folder: Path
    coding: Coding
    shared: Predictor | None
    result: Result | None = None

    @classmethod
    def of(
        cls,
        folder: str | Path,
        model: nn.Module | ModelFactory | None = None,
        *,
        trust: Sequence[str] = (),
    ) -> Models:
        """Returns the models of a run.

        Args:
            folder: see :func:`run_folder`; of a public part nothing is taken on trust.
            model: see :meth:`Result.load`.
            trust: see :meth:`Result.load`.

        Raises:
            ConfigError: no finished run, or one that does not say how its models take raw rows.
            DataError: a file that cannot be read.
            ModelError: see :meth:`Result.load`.
        """
        place = run_folder(folder)
        if is_public_part(place):
            shared = published_model(place)
            return cls(place, shared.coding, shared)
        result = Result.load(place, model, trust=trust)
        # Without a shared model any client's has the coding.
        first = None
        if result.shared is None:
            first = result.personal_ids[0]
        predictor = result.predictor(first)  # refuses here a result without coding or module
        if first is not None:
            return cls(place, predictor.coding, None, result)
        return cls(place, predictor.coding, predictor, result)

    def predictor(self, client: str | None) -> Predictor:
        """Returns the model of a client; for None the shared one.

        Raises:
            ConfigError: there is none.
        """
        if client is None and self.shared is not None:
            return self.shared
        if self.result is not None:
            return self.result.predictor(client)
        raise ConfigError(
            f"{self.folder} has the shared model alone, and none of client {client!r}: the models "
            "of clients are in "
            "the private part of a run; leave the client out, or give the whole folder of the run."
        )

    @property
    def personal_ids(self) -> frozenset[str]:
        """Returns the clients that have a model of their own here."""
        return frozenset(() if self.result is None else self.result.personal_ids)


def load_predictor(
    folder: str | Path,
    client: str | None = None,
    *,
    model: nn.Module | ModelFactory | None = None,
    trust: Sequence[str] = (),
) -> Predictor:
    """Returns a model of a run on raw rows of its table; of a public part alone the shared one.

    Args:
        folder: of the run; or its ``public`` part or a copy of it, which may come from somebody
            else: nothing in its files is run.
        client: whose model; None for the shared one.
        model: see :meth:`Result.load`.
        trust: see :meth:`Result.load`.

    Raises:
        ConfigError: no finished run, one that does not say how its models take raw rows, or no such
            model.
        DataError: a file that cannot be read.
        ModelError: ``model`` does not have the parameters of the run's.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import pandas as pd
        >>> from fedmtl import Trainer, load_data, load_predictor
        >>> table = pd.DataFrame({"ward": list("ab") * 10, "age": range(20), "days": range(20)})
        >>> bounds = {"age": [0, 20], "days": [0, 20]}
        >>> data = load_data("table", path=table, client="ward", target="days", bounds=bounds)
        >>> with TemporaryDirectory() as folder:
        ...     trainer = Trainer(data=data, privacy=None, rounds=2, progress=False, folder=folder)
        ...     result = trainer.fit()
        ...     predict = load_predictor(f"{folder}/public")
        >>> predict(pd.DataFrame({"age": [3, 12]})).shape
        (2,)
    """
    return Models.of(folder, model, trust=trust).predictor(client)


def run_folder(folder: str | Path) -> Path:
    """Returns the folder of the files of a run: its own, or its public part without the rest.

    Args:
        folder: of the run; its ``private`` part, which stands for the run; its ``public`` part, or
            a copy of it.

    Raises:
        ConfigError: no folder.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ConfigError(
            f"{place} is no folder; give that of a run, such as outputs/2025-01-31/12-00-00."
        )
    if place.name == "private" and (place.parent / "public").is_dir():
        return place.parent
    # Somebody who was given the public part may have put it into a folder of its own.
    if is_public_part(place / "public") and not (place / "private").exists():
        return place / "public"
    return place


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions for the rows of a table.

    Args:
        frame: a row for each row of the table: the client if the table names it, columns that are
            kept, the prediction ``predicted_TARGET``, the probabilities ``probability_CLASS`` if
            asked for, and ``predicted_by``: ``"own"``, ``"shared"``, or ``"other"`` for a row of
            another client than the one whose model was asked for.
        own: number of rows that the model of their own client predicts.
        unknown: clients without a model, whose rows the shared one predicts, in order.
    """

    frame: DataFrame
    own: int
    unknown: tuple[str, ...]

    def csv_text(self) -> str:
        """Returns the frame as CSV, texts as spreadsheets show them and do not compute them."""
        printed = self.frame.copy(deep=False)
        for name, values in self.frame.items():
            predictions = str(name).startswith(("predicted_", "probability_"))
            if predictions and values.dtype.kind == "f":
                printed[name] = values.map(f"{{:{_DIGITS}}}".format)
            # a text that begins with = would be computed by a spreadsheet
            elif values.dtype.kind not in "iuf":
                printed[name] = values.map(cell)
        header = [cell(str(name)) for name in self.frame.columns]
        return printed.to_csv(index=False, lineterminator="\n", header=header)


def read_rows(
    path: str | Path,
    schema: TableSchema,
    settings: Mapping[str, Any] | None = None,
    kept: Sequence[str] = (),
    clients: Collection[str] = (),
) -> Table:
    """Returns the rows of a file, with the client of each if the file names it.

    Args:
        path: a .csv, .tsv (both also .gz) or .parquet file; it needs no target.
        schema: of the columns.
        settings: of :data:`FORM`, in place of the form of the run's table.
        kept: further columns, as they are written.
        clients: those of the run, of which one may be called NA.

    Raises:
        ConfigError: an impossible setting.
        DataError: an unreadable file, or a row without its client.
    """
    is_text = not str(path).lower().endswith(".parquet")
    form: dict[str, Any] = {}
    if schema.form is not None and is_text:
        form = asdict(schema.form)
        # The form has an empty text for no comments, which the reader would look for.
        form["comment"] = schema.form.comment or None
        if ".tsv" in Path(path).name.lower():
            form["separator"] = None
    numbers = {column.name for column in schema.columns if column.kind == "number"}
    # Ids and categories stay texts: 007 is no 7.
    texts = schema.written
    texts += [
        name
        for name in (schema.client, *kept)
        if name is not None and name not in {*numbers, *texts}
    ]
    table = Table.of(path, texts, settings=form | dict(settings or {}), empty=True)
    if schema.client is None or schema.client not in table.frame.columns:
        return table
    # a client of the run may have such a name, if the run took it as one
    marks = MARKS - set(clients)
    accepted = f"{A_CLIENT}, or the rows of one by --client NAME without this column"
    return replace(table, client_of=table.clients(schema.client, marks=marks, accepted=accepted))


def predicted(
    models: Models,
    table: Table,
    client: str | None = None,
    *,
    probabilities: bool = False,
    kept: Sequence[str] = (),
) -> Predictions:
    """Returns the predictions for the rows of a table.

    The model of a row is that of its client, or the shared one if the client has none or the table
    names none.

    Args:
        models: of a run.
        table: as :func:`read_rows` returns it.
        client: whose model predicts all rows, whatever the table says; None for the table's own.
        probabilities: of the classes, beside the most likely one.
        kept: columns of the table that are returned beside the predictions.

    Raises:
        ConfigError: no client of that id, no model for a row, probabilities of a model whose
            outputs have no such meaning, or a name of ``kept`` that the predictions have.
        DataError: see :meth:`Predictor.__call__`.
    """
    schema = models.coding.schema
    if probabilities:  # refused before the rows are computed
        models.coding.check_odds()
    table.check_columns(list(kept), "kept ")
    groups, unknown = _by_model(models, table, client)
    made, own = _outputs(models, table, groups, probabilities)
    columns: dict[str, Any] = {}
    if table.client_of is not None:
        columns[str(schema.client)] = table.client_of
    for name in kept:
        columns.setdefault(name, table.frame[name].to_numpy())
    for name in made.keys() & columns.keys():
        raise ConfigError(
            f"the predictions have a column {name!r}, and so has the table; rename it there."
        )
    return Predictions(pd.DataFrame(columns | made), own, unknown)


def _outputs(
    models: Models, table: Table, groups: Mapping[str | None, np.ndarray], probabilities: bool
) -> tuple[dict[str, Any], int]:
    """Returns the columns that the models make, and the number of rows with a client's own model.

    Args:
        models: of a run.
        table: the rows.
        groups: the rows of each model, int64, see :func:`_by_model`.
        probabilities: adds a column for each class.
    """
    schema = models.coding.schema
    # Once for all models: a warning of values that are cut counts those of the whole table.
    features = models.coding.features(table)
    values: Any = np.zeros(len(table), dtype=object)
    chances = np.zeros((len(table), len(schema.names)))
    by = np.full(len(table), SHARED, dtype=object)
    for name, rows in groups.items():
        try:
            outputs = models.predictor(name).outputs(features[rows])
        except DataError as error:
            whose = "the shared model"
            if name is not None:
                whose = f"the model of client {name!r}"
            raise DataError(f"{table.file}: {whose}: {error}") from error
        values[rows] = schema.decode(outputs)
        if probabilities:
            chances[rows] = models.coding.chances(outputs).cpu().numpy()
        if name is None:
            continue
        by[rows] = OWN
        if table.client_of is not None:
            # a row that another client's model predicts by request is no row of that client
            others = np.array([without_zeros(each) for each in table.client_of])[rows]
            by[rows[others != without_zeros(name)]] = OTHER
    made = {f"predicted_{schema.target}": pd.Series(values).infer_objects().to_numpy()}
    if probabilities:
        made |= {
            f"probability_{name}": chances[:, place] for place, name in enumerate(schema.names)
        }
    made["predicted_by"] = by
    return made, int((by == OWN).sum())


def _by_model(
    models: Models, table: Table, client: str | None
) -> tuple[dict[str | None, np.ndarray], tuple[str, ...]]:
    """Returns the rows that each model predicts, int64, by its client or None for the shared one,
    and the clients that have no model of their own.

    Raises:
        ConfigError: the run has no shared model, and the table names no clients.
        DataError: the run has no shared model, and a client has none either.
    """
    everything = np.arange(len(table))
    if client is not None:
        models.predictor(client)  # refuses a client without a model
        return {client: everything}, ()
    if table.client_of is None:
        if models.shared is None:
            column = models.coding.schema.client
            raise ConfigError(
                f"the run has no shared model, and {table.file} has no column {column!r} with the "
                "client of each row; add it, or say whose model predicts with --client NAME."
            )
        return {None: everything}, ()
    # A model is loaded once for all rows of its client.
    names, place = np.unique(table.client_of, return_inverse=True)
    # also those of a run whose reader took 1.0 and 1 as two names
    owners = {without_zeros(name): name for name in models.personal_ids}
    owners |= {name: name for name in models.personal_ids}
    known = np.array([name in owners for name in names.tolist()], dtype=bool)
    unknown = tuple(names[~known].tolist())
    if unknown and models.shared is None:
        lacking = np.isin(np.asarray(table.client_of), names[~known])
        table.refuse(
            lacking,
            str(models.coding.schema.client),
            "a client of the run, which has no shared model",
        )
    groups: dict[str | None, np.ndarray] = {}
    for number, name in enumerate(names.tolist()):
        if known[number]:
            groups[owners[name]] = everything[place == number]
    if unknown:
        groups[None] = everything[~known[place]]
    return groups, unknown
