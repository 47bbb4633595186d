"""Arrays of any make as tensors of real numbers: converted without loss of range, or refused by
client and type."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from ..errors import DataError
from . import checks, rows

_NUMBERS = "numbers, and rows of one shape"
_LENGTH = " (from_columns(..., length=K) pads lists of tokens)"
_MOST = 1 << 63  # first whole number beyond int64
_SIGNED = {2: np.int32, 4: np.int64, 8: np.int64}  # by the bytes of an unsigned whole number
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_OTHERS = {
    "c": (
        "complex numbers",
        "real numbers, such as the real and the imaginary part as two features",
    ),
    "M": ("dates", "numbers, such as the days since a date"),
    "m": ("spans of time", "numbers, such as days"),
    "V": ("records of several fields", "numbers, such as a column a field"),
}


def as_tensor(value: Any, where: str, field: str) -> Tensor:
    """Returns a tensor of real numbers, dense or CSR, from a tensor, an array, a list or a SciPy
    sparse matrix (as CSR).

    Numbers keep their type if PyTorch computes with it. Bytes are brought into the machine's order.
    Unsigned numbers of 16 bits become int32, those of 32 and 64 bits int64. Floating numbers of 8
    bits become float32, those of more than 64 bits float64. Objects that are whole numbers become
    int64, other real ones float64.

    Args:
        value: the rows as the user gave them: a tensor, an array, a table, a sparse matrix or
            lists.
        where: the client, for messages.
        field: ``"x"`` or ``"y"``, for messages.

    Raises:
        DataError: a value that is no real number, is missing, masked or beyond its new type, or
            rows that differ in length.
    """
    if isinstance(value, Tensor):
        return _of_tensor(value.detach(), where, field)
    if scipy.sparse.issparse(value):
        return _of_sparse(value, where, field)
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(part, Tensor) for part in value)
    ):
        # NumPy would turn such a list into an array of objects, one tensor each
        return stack_rows(value, f"{where}, example", field)
    return torch.from_numpy(real_array(value, where, field))


def as_targets(value: Any, where: str) -> Tensor:
    """Returns labels or targets as a dense tensor of real numbers; see :func:`as_tensor`."""
    y = as_tensor(value, where, "y")
    if y.layout != torch.strided:
        raise _refusal(where, "y", "is sparse", "dense labels or targets")
    return y


def real_array(value: Any, where: str, field: str) -> np.ndarray:
    """Returns a copy of an array, a list or a column of pandas as an array of real numbers,
    contiguous and in the machine's byte order; see :func:`as_tensor` for its type and errors."""
    _refuse_missing(value, where, field)
    if hasattr(value, "isna") and hasattr(value, "to_numpy"):
        value = value.to_numpy()
    try:
        # a copy, so that a later change of the user's array changes no dataset
        array = np.array(value, order="C")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _refusal(where, field, f"holds {str(value)[:40]!r}") from error
    if array.dtype.kind == "O":
        array = _of_objects(array, where, field)
    return _of_numbers(array, where, field)


def stack_rows(values: Iterable[Any], where: str, field: str) -> Tensor:
    """Returns one tensor (rows, ...) from numbers, lists, arrays, tensors or images, one a row.

    A Pillow image becomes uint8 (channels, height, width), real numbers that are no tensors become
    float32.

    Args:
        values: the rows.
        where: the words before a row's number in messages.
        field: names them in messages.

    Raises:
        DataError: a row that is missing or holds no numbers, or rows that differ in shape.
    """
    made: list[Tensor] = []
    for number, value in enumerate(values):
        place = f"{where} {number}"
        if hasattr(value, "getbands"):
            # its pixels are numbers of colours, whose order means nothing
            if value.mode in ("P", "PA"):
                raise DataError(
                    f"{place}, field {field!r} is an image with a palette; give "
                    "image.convert('RGB')."
                )
            # it would become int32 pixels up to 65535, which no transform scales
            if value.mode.startswith("I;16"):
                raise DataError(
                    f"{place}, field {field!r} is an image of 16 bits; give its shares of white, "
                    "np.asarray(image, dtype='float32') / 65535."
                )
            array = np.asarray(value)
            if array.ndim == 2:
                value = array[None]
            else:
                value = np.moveaxis(array, -1, 0)
        row = as_tensor(value, place, field)
        # Python numbers are float64 without anybody having asked for that; a tensor has its dtype
        # on purpose
        if row.dtype == torch.float64 and not isinstance(value, Tensor):
            row = row.float()
        if made and row.shape != made[0].shape:
            raise DataError(
                f"{place}, field {field!r} has the shape {tuple(row.shape)}, and row 0 has "
                f"{tuple(made[0].shape)}; "
                f"all must agree{_LENGTH * (row.ndim == made[0].ndim == 1)}."
            )
        made.append(row)
    if not made:
        raise DataError(f"{where.rpartition(',')[0]}: there are no rows; at least 1 is needed.")
    dtype = _common([row.dtype for row in made])
    return torch.stack([row.to(dtype) for row in made])


def _common(dtypes: list[torch.dtype]) -> torch.dtype:
    """Returns the type of rows of several types: their own if it is one, int64 for whole numbers,
    else float32."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    if any(dtype.is_floating_point for dtype in dtypes):
        return torch.float32
    return torch.int64


def _refusal(where: str, field: str, state: str, accepted: str = _NUMBERS) -> DataError:
    return DataError(f"{where}, field {field!r} {state}; accepted: {accepted}.")


def _of_tensor(value: Tensor, where: str, field: str) -> Tensor:
    if value.is_nested:
        raise _refusal(where, field, "is a nested tensor", "rows of one shape, such as padded ones")
    if value.layout not in (torch.strided, torch.sparse_csr):
        raise _refusal(where, field, f"has the layout {value.layout}", "dense tensors, sparse CSR")
    if value.is_meta:
        raise _refusal(
            where, field, "is on the meta device, which holds no numbers", "tensors with numbers"
        )
    if value.is_quantized:
        raise _refusal(
            where,
            field,
            f"is quantized ({value.dtype})",
            "numbers, as its dequantize() returns them",
        )
    if value.layout == torch.strided:
        # a negated view shares its storage with the numbers before the sign
        return _widened(value.resolve_neg(), where, field)
    if value.ndim != 2:
        raise _refusal(
            where, field, f"is sparse of shape {tuple(value.shape)}", "one sparse row an example"
        )
    # the structure stays; only numbers of an odd type are made anew
    values = _widened(value.values(), where, field)
    if values.dtype == value.dtype:
        return value
    return rows.csr(value.crow_indices(), value.col_indices(), values, value.shape[1])


def _widened(value: Tensor, where: str, field: str) -> Tensor:
    """Returns a dense tensor in a type that PyTorch computes with."""
    dtype = value.dtype
    if dtype in (*checks.INTEGERS, *checks.FLOATS, torch.bool):
        return value
    if dtype.is_complex:
        raise _refusal(where, field, f"holds {_OTHERS['c'][0]} ({dtype})", _OTHERS["c"][1])
    # read as signed, exactly these numbers are negative; uint64 itself cannot be compared
    if dtype == torch.uint64 and bool((value.view(torch.int64) < 0).any()):
        raise _refusal(
            where, field, f"holds a whole number of 2^63 or more ({dtype})", "smaller ones"
        )
    try:
        if dtype in _WIDER:
            return value.to(_WIDER[dtype])
        if dtype.is_floating_point:
            return value.to(torch.float32)
        return value
    except RuntimeError as error:
        raise _refusal(
            where, field, f"has the type {dtype}", "real numbers of 8 bits or more"
        ) from error


def _of_sparse(value: Any, where: str, field: str) -> Tensor:
    if value.ndim != 2:
        raise _refusal(
            where, field, f"is sparse of shape {value.shape}", "one sparse row an example"
        )
    matrix: Any = scipy.sparse.csr_array(value)  # type: ignore[call-overload]
    # SciPy allows an entry twice, which means the sum; PyTorch refuses it
    matrix.sum_duplicates()
    crow, columns = (
        torch.from_numpy(np.array(part, dtype=np.int64)) for part in (matrix.indptr, matrix.indices)
    )
    return rows.csr(
        crow, columns, torch.from_numpy(real_array(matrix.data, where, field)), matrix.shape[1]
    )


def _of_numbers(array: np.ndarray, where: str, field: str) -> np.ndarray:
    """Returns an array of any type but object as one that PyTorch takes."""
    kind = array.dtype.kind
    size = array.dtype.itemsize
    # another library's numbers, such as bfloat16
    if kind == "V" and array.dtype.type is not np.void:
        if "int" in array.dtype.name:
            return array.astype(np.int64)
        return array.astype(np.float32)
    if kind == "b" or (kind in "iu" and size == 1):
        return array
    if kind == "i" or (kind == "f" and size <= 8):
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if kind == "u":
        if array.size and int(array.max()) >= _MOST:
            raise _refusal(
                where,
                field,
                f"holds the whole number {array.max()} ({array.dtype})",
                "those below 2^63",
            )
        return array.astype(_SIGNED[size])
    if kind == "f":
        # the overflow is found below, and refused with the name of the client
        with np.errstate(over="ignore"):
            near = array.astype(np.float64)
        if not np.array_equal(np.isfinite(near), np.isfinite(array)):
            raise _refusal(
                where,
                field,
                f"holds a number beyond float64 ({array.dtype})",
                "those that float64 holds",
            )
        return near
    if kind in _OTHERS:
        content, accepted = _OTHERS[kind]
        raise _refusal(where, field, f"holds {content} ({array.dtype})", accepted)
    first = next(iter(array.flat), "")
    raise _refusal(where, field, f"holds {str(first)[:40]!r}")


def _of_objects(array: np.ndarray, where: str, field: str) -> np.ndarray:
    """Returns an array of objects as an array of the numbers that they are."""
    values = array.ravel().tolist()
    # lists in a column of pandas: the inner numbers decide, not the objects around them
    if any(hasattr(value, "__len__") and not isinstance(value, (str, bytes)) for value in values):
        return _of_rows(array, where, field)
    for place, value in enumerate(values):
        if _is_missing(value):
            raise _refusal(where, field, f"is empty{_at(array, place)}", "a number for every value")
        if not isinstance(value, (numbers.Real, Decimal, np.bool_)):
            state = f"holds {str(value)[:40]!r} (a {type(value).__name__}){_at(array, place)}"
            raise _refusal(where, field, state)
    # before the whole numbers, since True is one for Python
    if all(isinstance(value, (bool, np.bool_)) for value in values):
        return np.array(values, dtype=bool).reshape(array.shape)
    number: type[np.generic] = np.float64
    if all(isinstance(value, (numbers.Integral, np.bool_)) for value in values):
        number = np.int64
    try:
        return np.array(values, dtype=number).reshape(array.shape)
    except OverflowError as error:
        state = "holds a number beyond float64"
        if number is np.int64:
            state = "holds a whole number beyond int64"
        raise _refusal(where, field, state, "smaller ones") from error


def _of_rows(array: np.ndarray, where: str, field: str) -> np.ndarray:
    """Returns an array of objects that are lists or arrays as the array of their numbers."""
    try:
        inner = np.array(array.tolist())
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refusal(where, field, f"holds {str(array)[:40]!r}") from error
    # no level was unpacked, so another call would go on for ever
    if inner.dtype.kind == "O" and inner.shape == array.shape:
        raise _refusal(where, field, f"holds a {type(array.flat[0]).__name__}")
    if inner.dtype.kind == "O":
        return _of_objects(inner, where, field)
    return inner


def _refuse_missing(value: Any, where: str, field: str) -> None:
    """Raises :class:`DataError` for values that a mask hides or that pandas holds as missing."""
    if isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = (value,)
    for number, part in enumerate(parts):
        if isinstance(part, np.ma.MaskedArray):
            hidden = np.ma.getmaskarray(part)
            state = "is masked"
        elif hasattr(part, "isna") and hasattr(part, "to_numpy"):
            hidden = np.asarray(part.isna())
            state = "is empty"
        else:
            continue
        if hidden.any():
            place = int(np.flatnonzero(hidden)[0])
            if part is not value:
                at = f" in example {number}"
            else:
                at = _at(hidden, place)
            raise _refusal(
                where,
                field,
                f"{state}{at}",
                "a number for every value (fill it, or leave the row out)",
            )


def _at(array: np.ndarray, place: int) -> str:
    """Returns in words the example of the value at a flat place."""
    if not array.ndim:
        return ""
    return f" in example {np.unravel_index(place, array.shape)[0]}"


def _is_missing(value: Any) -> bool:
    # by name, so that pandas need not be imported for data that do not come from it
    return value is None or type(value).__name__ in ("NAType", "NaTType")
