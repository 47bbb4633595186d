"""A model of a table as a program: raw rows of numbers in, predictions in the target's units out,
without this package.

The program is a file of ``torch.export`` or ONNX. It holds the coding of the columns, the model and
the units, and in its notes a description of the columns.
"""

from __future__ import annotations

import copy
import datetime
import io
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._extras import load, onnx, onnxruntime, onnxscript
from .._files import write_bytes
from .._text import shown
from ..data.readers.column_coding import Column
from ..errors import ConfigError, ModelError, first_line
from .coding import Coding, Predictor

SUFFIXES = (".pt2", ".onnx")
NOTES = "fedmtl"
"""Name of the notes in a file, a JSON text: in ONNX of the metadata, in ``torch.export`` of an
extra file."""
_EPOCH = datetime.date(1970, 1, 1).toordinal()
# days from the first of March of the year 0 to 1970
_MARCH = _EPOCH - datetime.date(1, 3, 1).toordinal() + 365


class Program(nn.Module):
    """A model on raw rows of numbers.

    Args:
        predictor: the model with its coding.

    Shape:
        float64 (n, columns), a number for each column of the schema, see :func:`described`. Returns
        a dictionary: ``"prediction"``, (n,), a real number, float64, or the number of a class,
        int64; and of classes whose loss gives probabilities, ``"probabilities"``, float64 (n,
        classes). A row with a value that the columns do not take has the prediction NaN or the
        class -1, and probabilities NaN.
    """

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.module = predictor.module
        self.coding = predictor.coding
        self.dtype = next(predictor.module.parameters()).dtype
        schema = self.coding.schema
        ends = [_ends_of(column) for column in schema.columns]
        self.log = schema.target_scale == "log"
        units = (-1.0, 1.0)
        if schema.target_range is not None:
            units = schema.target_range
            if self.log:
                units = (math.log(units[0]), math.log(units[1]))
        # Tensors, since ONNX has numbers in the code as float32.
        self._ends: Tensor
        self._units: Tensor
        self.register_buffer("_ends", torch.tensor(ends, dtype=torch.float64))
        self.register_buffer("_units", torch.tensor(units, dtype=torch.float64))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        coding = self.coding
        schema = self.coding.schema
        parts = []
        accepted = []
        for place, column in enumerate(schema.columns):
            value = rows[:, place : place + 1]
            features, valid = _features(column, value, self._ends[place], whole=schema.integers)
            parts.append(features)
            accepted.append(valid)
        # A program cannot raise for one row of many, so a bad row has no prediction.
        valid = torch.cat(accepted, 1).all(1)
        dtype = torch.int64 if schema.integers else torch.float32
        stored = torch.cat(parts, 1).to(dtype)
        x = coding.transform(stored, self.dtype)
        outputs = self.module(x).reshape(rows.shape[0], -1)
        if schema.classes is None:
            low = self._units[0]
            high = self._units[1]
            numbers = low + (outputs[:, 0].double() + 1) * ((high - low) / 2)
            if self.log:
                numbers = numbers.exp()
            return {"prediction": torch.where(valid, numbers, torch.nan)}
        number = outputs.argmax(1)
        if outputs.shape[1] == 1:
            number = (outputs[:, 0] > 0).long()
        made = {"prediction": torch.where(valid, number, -1)}
        if coding.odds is not None:
            made["probabilities"] = torch.where(valid[:, None], coding.chances(outputs), torch.nan)
        return made


def _ends_of(column: Column) -> tuple[float, float]:
    """Returns the range of a column, of dates the first and the last in days since 1970-01-01; (0,
    0) without one."""
    if column.period is not None:
        first, last = (
            datetime.date.fromisoformat(end).toordinal() - _EPOCH for end in column.period
        )
        return float(first), float(last)
    if column.range is not None:
        return column.range
    return 0.0, 0.0


def _features(column: Column, value: Tensor, ends: Tensor, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Returns the features of a column, float64 (n, width), and the rows in which its value is
    accepted, bool (n, 1).

    Args:
        column: its coding.
        value: float64 (n, 1), a number, that of a category, or days since 1970-01-01; NaN for a
            missing one.
        ends: of its range, float64 (2,).
        whole: only whole numbers are accepted.
    """
    gap = value.isnan()
    if column.kind == "categories":
        numbers = torch.arange(len(column.categories), dtype=torch.float64, device=value.device)
        found = value == numbers
        valid = found.any(1, keepdim=True)
        features = found.double()
        if column.signs:
            features = 2 * torch.where(valid, value, 0.0) - 1
    else:
        # NaN in the arithmetic below would reach every column of the row.
        valid = value.abs() < math.inf
        value = torch.where(valid, value, 0.0)
        if whole and column.kind == "number":
            valid = valid & (value == value.round())
        features = value
        if column.kind == "dates":
            features = _dated(column, value.floor(), ends)
        elif column.range is not None:
            features = _mapped(value, ends[0], ends[1])
    if not column.missing:
        return features, valid
    return torch.cat((torch.where(gap, 0.0, features), gap.double()), 1), valid | gap


def _dated(column: Column, days: Tensor, ends: Tensor) -> Tensor:
    """Returns the features of dates, float64 (n, 4), of whole days since 1970-01-01, float64 (n,
    1).

    Years and months are counted from March on in periods of 400 years, which have 146,097 days
    each: a leap day is then the last day of its year, and the months before it follow one rule.
    """
    assert column.period is not None
    first, last = (datetime.date.fromisoformat(end) for end in column.period)
    days = days.clamp(ends[0], ends[1])
    since = days + _MARCH
    period = (since / 146_097).floor()
    day = since - period * 146_097
    leap = (day / 1_460).floor() - (day / 36_524).floor() + (day / 146_096).floor()
    year = ((day - leap) / 365).floor()
    day = day - (365 * year + (year / 4).floor() - (year / 100).floor())
    month = ((5 * day + 2) / 153).floor()  # 0 is March
    month = torch.where(month < 10, month + 3, month - 9)
    year = year + 400 * period + (month <= 2).double()
    weekday = days + 3 - 7 * ((days + 3) / 7).floor()  # 1970-01-01 was a Thursday
    years = torch.zeros_like(year)
    if first.year < last.year:
        years = _mapped(year, float(first.year), float(last.year))
    return torch.cat(
        (
            years,
            _mapped(month, 1.0, 12.0),
            _mapped(weekday, 0.0, 6.0),
            _mapped(days, *ends.unbind()),
        ),
        1,
    )


def _mapped(value: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Returns values, cut at the ends of a range and mapped from it to [-1, 1]."""
    return 2 * (torch.clamp(value, low, high) - low) / (high - low) - 1  # type: ignore[arg-type]


def described(coding: Coding) -> dict[str, Any]:
    """Returns the description of the inputs and outputs of a program, ready for JSON.

    ``columns`` are those of its rows, in their order. Each has its ``name``, ``missing``, whether
    NaN stands for a missing value, and one of three: ``categories``, of which a row has the number,
    counted from 0; the ``period`` of dates, at which they are cut off, of which a row has the days
    since 1970-01-01; the ``range`` at which a number is cut off, null for none. ``target`` is the
    predicted column, ``classes`` its classes in the order of their numbers, null for a real number.
    """
    schema = coding.schema
    classes = None
    if schema.classes is not None:
        classes = schema.names
    return {
        "columns": list(map(_described, schema.columns)),
        "target": schema.target,
        "classes": classes,
    }


def _described(column: Column) -> dict[str, Any]:
    common = {"name": column.name, "missing": column.missing}
    if column.kind == "categories":
        return common | {"categories": list(map(str, column.categories))}
    if column.kind == "dates":
        return common | {"period": column.period}
    return common | {"range": column.range}


def check_path(path: Path) -> None:
    """Refuses the path of a program.

    Raises:
        ConfigError: another suffix than those of programs, or a package that is not here.
    """
    if path.suffix not in SUFFIXES or path.is_dir():
        raise ConfigError(
            f"{path} is no program to write; give a file that ends in {' or '.join(SUFFIXES)}."
        )
    if path.suffix == ".onnx":
        for package in (onnx, onnxruntime, onnxscript):
            load(package)


def write_program(predictor: Predictor, path: Path) -> None:
    """Writes a model as a program.

    Args:
        predictor: the model.
        path: a file that ends in ``.pt2``, for ``torch.export``, or ``.onnx``.

    Raises:
        ConfigError: another suffix.
        MissingExtra: a package of ONNX is not installed.
        ModelError: a model that cannot be exported.
    """
    check_path(path)
    # The caller's model stays on its device, with its gradients.
    module = copy.deepcopy(Program(predictor)).cpu().eval().requires_grad_(False)
    notes = json.dumps(described(predictor.coding))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = _exported(module)
            if path.suffix == ".onnx":
                content = _onnx(program, notes)
            else:
                content = _saved(program, notes)
        except Exception as error:  # of any kind: the model may be the user's own
            raise ModelError(
                f"the model cannot be written as {path.suffix}: {type(error).__name__}: "
                f"{first_line(error)}."
            ) from error
    write_bytes(path, content)


def _exported(module: Program) -> torch.export.ExportedProgram:
    """Returns the program of any number of rows, without the places of its source."""
    # One row would be taken for a fixed number of rows.
    rows = torch.zeros(3, len(module.coding.schema.columns), dtype=torch.float64)
    options: dict[str, Any] = {"dynamic_shapes": ({0: torch.export.Dim("n")},)}
    with torch.no_grad():
        try:
            program = torch.export.export(module, (rows,), strict=False, **options)
        # Errors are of any kind. A strict export also takes models with len(x), but more slowly.
        except Exception:
            program = torch.export.export(module, (rows,), strict=True, **options)
    # The paths of this machine's source are nobody's business, and equal models have equal files.
    for node in program.graph.nodes:
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            node.meta.pop(name, None)
    return program


def _saved(program: torch.export.ExportedProgram, notes: str) -> bytes:
    """Returns the program as a file of ``torch.export``."""
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={NOTES: notes})
    return content.getvalue()


def _onnx(program: torch.export.ExportedProgram, notes: str) -> bytes:
    """Returns the program as ONNX, with inputs and outputs by name, after one row has the same
    outputs from both.

    Raises:
        ModelError: others.
    """
    (sample, *_), _ = program.example_inputs
    expected = program.module()(sample[:1])
    made = torch.onnx.export(
        program,
        (),
        dynamo=True,
        input_names=["rows"],
        output_names=list(expected),
        verbose=False,
        optimize=True,
    )
    assert made is not None
    made.model.metadata_props[NOTES] = notes
    for node in made.model.graph:
        node.metadata_props.clear()
    content: bytes = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found = session.run(list(expected), {"rows": sample[:1].numpy()})
    for name, value in zip(expected, found, strict=True):
        if not np.allclose(value, expected[name].numpy(), rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ModelError(
                f"{name} of a row of zeros is {value} by ONNX and "
                f"{expected[name].numpy()} by PyTorch"
            )
    return content


def columns_text(coding: Coding) -> list[str]:
    """Returns the lines on the columns that a program takes, and on the target that it gives."""
    notes = described(coding)
    lines = [
        f"  column {place}  {_column_text(column)}" for place, column in enumerate(notes["columns"])
    ]
    return [*lines, f"  gives     {shown(notes['target'])}{_classes_text(notes['classes'])}"]


def _column_text(column: Mapping[str, Any]) -> str:
    """Returns the words for a column that a program takes."""
    text = shown(column["name"])
    if "categories" in column:
        text += f":{_classes_text(column['categories'])}"
    elif "period" in column:
        first, last = column["period"]
        text += f": days since 1970-01-01, cut off at {first} and {last}"
    elif column["range"] is not None:
        low, high = column["range"]
        text += f", cut off at {low:g} and {high:g}"
    if column["missing"]:
        text += "; NaN if missing"
    return text


def _classes_text(names: Sequence[Any] | None) -> str:
    """Returns the numbers of classes or categories with their names; empty without any, or if
    numbers are names."""
    if names is None or list(names) == list(range(len(names))):
        return ""
    return " " + ", ".join(f"{number} {shown(str(name))}" for number, name in enumerate(names))
