"""The commands that use the models of a run: ``fedmtl predict`` and ``export``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._files import write_bytes
from .._text import counted, shown
from ..errors import ConfigError
from . import build
from .around import printed_log
from .folders import short
from .names import TRUST, unknown
from .output import say, show
from .parsers import command_parser
from .stored import stored_config

if TYPE_CHECKING:
    from ..trainer.predict import Models, Predictions

_FEW = 5  # clients that are named
_PLACES = "of a run, such as outputs/2025-01-31/12-00-00; its public/ has the shared model alone"


def predict(words: list[str]) -> int:
    """Predict the target of new rows, in its own units, with the models of a run on a table.

    A row of a client of the run is predicted by that client's own model, any other row by the
    shared one. The table needs the columns that the run predicts from, in any order, and no target;
    other columns are left out. The output has a line a row, in the same order: the client,
    predicted_TARGET, and predicted_by: own, shared, or with --client other for rows of others.

    examples
      fedmtl predict outputs/2025-01-31/12-00-00 new.csv
          writes new.predicted.csv
      fedmtl predict outputs/2025-01-31/12-00-00 new.csv --client ward-7
          a table without the column of the clients
      fedmtl predict outputs/2025-01-31/12-00-00/public new.csv --output - --probabilities
      fedmtl predict outputs/2025-01-31/12-00-00 new.csv separator=semicolon decimal=comma
    """
    parser = command_parser(predict)
    parser.add_argument("folder", type=Path, help=_PLACES)
    parser.add_argument(
        "table", type=Path, help="with the new rows: .csv, .tsv (both also .gz) or .parquet"
    )
    of_form = (
        "how the table is written, if not as that of the run: separator, decimal, encoding, comment"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=of_form)
    parser.add_argument("--client", metavar="NAME", help="whose model predicts all rows")
    parser.add_argument(
        "--probabilities", action="store_true", help="of the classes, a column each"
    )
    kept = "columns of the table that are written beside the predictions"
    parser.add_argument("--keep", action="append", default=[], metavar="COLUMN", help=kept)
    goes = "a .csv file, or - for standard output; default NAME.predicted.csv in this folder"
    parser.add_argument("--output", "--out", metavar="FILE", help=goes)
    options = parser.parse_intermixed_args(words)
    # the typed settings are checked before models are read
    settings = _form(options.overrides)
    target = _output(options.output, options.table)

    from ..trainer.predict import predicted, read_rows

    with printed_log(logging.WARNING):
        models = _models(options.folder)
        table = read_rows(
            options.table, models.coding.schema, settings, options.keep, models.personal_ids
        )
        made = predicted(
            models, table, options.client, probabilities=options.probabilities, kept=options.keep
        )
    text = made.csv_text()
    lines = _said(made, models, options.client)
    if target is None:
        sys.stdout.write(text)
        say(lines)
        return 0
    try:
        write_bytes(target, text.encode())
    except OSError as error:
        raise ConfigError(
            f"--output is {target}, which cannot be written ({error.strerror}); choose another."
        ) from error
    show(f"{lines}\n{short(target)}")
    return 0


def _form(overrides: Sequence[str]) -> dict[str, str]:
    """Returns the settings of a file of text that were typed, with or without ``data.`` before
    them.

    Raises:
        ConfigError: another one.
    """
    from ..trainer.predict import FORM

    settings: dict[str, str] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        name = key.removeprefix("data.")
        if name in ("client", "output", "probabilities", "keep"):
            raise ConfigError(f"{text} is an option here: --{name}{f' {value}' * bool(value)}.")
        if not equals and text.lower().endswith(".csv"):
            raise ConfigError(f"{text} is a second table; the file to write is --output {text}.")
        if not equals or name not in FORM:
            raise unknown(
                FORM, [], f"{text!r} is no setting of a table to predict", "fedmtl predict --help"
            )
        settings[name] = value
    return settings


def _output(given: str | None, table: Path) -> Path | None:
    """Returns the file that is written; None for standard output.

    Raises:
        ConfigError: one that is no CSV file, or that is the table.
    """
    if given == "-":
        return None
    target = Path(given or f"{table.name.partition('.')[0]}.predicted.csv")
    if target.suffix.lower() != ".csv" or target.is_dir():
        raise ConfigError(
            f"--output is {target}; give a file that ends in .csv, or - for standard output."
        )
    # also by another path: the table may be the only copy
    if target.resolve() == table.resolve():
        raise ConfigError(f"--output is {target}, the table itself; choose another file.")
    return target


def _models(folder: Path) -> Models:
    """Returns the models of a run, with a network of the user's own as the run's settings name
    it."""
    from ..trainer.predict import Models, run_folder

    place = run_folder(folder)
    model = None
    if (place / "private" / "config.yaml").is_file():
        config = stored_config(place)
        settings = config.get("model")
        target = ""
        if isinstance(settings, Mapping):
            target = str(settings.get("_target_") or "")
        # networks of fedmtl are made from the released files alone
        if target and not target.startswith("fedmtl.models."):
            model = build.settings(config | {"device": "cpu"}).model
    return Models.of(place, model, trust=TRUST.get())


def _said(made: Predictions, models: Models, client: str | None) -> str:
    """Returns in words the numbers of rows that each kind of model predicted."""
    rows = len(made.frame)
    target = shown(models.coding.schema.target)
    if client is not None:
        return f"{target} of {counted(rows, 'row')}, by the model of {shown(client)}"
    text = f"{target} of {counted(rows, 'row')}, by the shared model"
    if models.result is None:
        return text
    column = models.coding.schema.client
    if column is not None and column not in made.frame:
        return f"{text}, as the table has no column {shown(column)!r} with the client of each row"
    if not made.own and not made.unknown:
        return text
    text = f"{target} of {counted(rows, 'row')}, {made.own:,} by the own models of their clients"
    if made.unknown:
        named = ", ".join(map(shown, made.unknown[:_FEW]))
        more = len(made.unknown) - _FEW
        if more > 0:
            named += f" and {more:,} more"
        text += (
            f", {rows - made.own:,} by the shared model, as these clients have no model here: "
            f"{named}"
        )
    return text


def export(words: list[str]) -> int:
    """Write a model of a run on a table as a program: rows of numbers in, predictions in the
    target's units out.

    The program needs no fedmtl: it computes the coding of the columns, the model and the units, for
    torch.export (.pt2) or ONNX (.onnx). It takes float64 (n, columns), the columns in the printed
    order, of a text the number of its category, of a date the days since 1970-01-01; it returns
    prediction, (n,), of classes their numbers, and probabilities, (n, classes). A row with a value
    that its column does not take, such as a missing one, has the prediction NaN, of classes -1.

    examples
      fedmtl export outputs/2025-01-31/12-00-00 model.onnx                   the shared model
      fedmtl export outputs/2025-01-31/12-00-00 ward-7.pt2 --client ward-7   the model of one client
    """
    parser = command_parser(export)
    parser.add_argument("folder", type=Path, help=_PLACES)
    parser.add_argument("file", type=Path, help="that is written: .pt2 or .onnx")
    parser.add_argument(
        "--client", metavar="NAME", help="whose model is written; without it the shared one"
    )
    options = parser.parse_intermixed_args(words)
    file = options.file

    from ..trainer.export import check_path, columns_text, write_program

    # before models are read, which may take a while
    check_path(file)
    with printed_log(logging.WARNING):
        models = _models(options.folder)
        predictor = models.predictor(options.client)
        try:
            write_program(predictor, file)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written ({error.strerror}); choose another file."
            ) from error
    lines = [f"{short(file)}: the shared model"]
    if options.client is not None:
        # it is trained on the client's own data and is no release
        lines = [f"{short(file)}: the model of {shown(options.client)}, which no epsilon covers"]
    elif not predictor.coding.schema.declared:
        lines[0] += (
            "; names or categories of its columns were read off the table, which no epsilon covers"
        )
    show("\n".join([*lines, *columns_text(predictor.coding)]))
    return 0
