"""Checks of a dataset's numbers, with errors that name the file, the client and the field."""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._check import id_of
from ..errors import DataError
from .rows import take
from .units import SCALES

T = TypeVar("T")
logger = logging.getLogger("fedmtl")
_CHUNK_BYTES = 1 << 26
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def chunks(x: Tensor) -> list[tuple[int, int]]:
    """Returns row ranges of about 64 MiB each that cover x (N, ...)."""
    # rows of no feature have no bytes
    row_bytes = max(1, x[:1].numel() * x.element_size())
    step = max(1, _CHUNK_BYTES // row_bytes)
    return [(start, min(start + step, len(x))) for start in range(0, len(x), step)]


def by_id(clients: Mapping[Any, T], where: str) -> Mapping[str, T]:
    """Returns values by id, see :func:`fedmtl._check.id_of`.

    Raises:
        DataError: two ids that are the same text.
    """
    # the usual case, of which no copy is made
    if all(type(client) is str for client in clients):
        return clients
    named: dict[str, T] = {}
    for client, value in clients.items():
        if (name := id_of(client)) in named:
            raise DataError(
                f"{where}: client {name!r} occurs twice, as a number and as a text; "
                "ids must be distinct."
            )
        named[name] = value
    return named


def check_ids(ids: Sequence[str], where: str) -> None:
    """Checks that there is a client, that every id is a text, and none occurs twice."""
    if not ids:
        raise DataError(f"{where}: there are no clients; at least one is needed.")
    for name in ids:
        if not isinstance(name, str):
            raise DataError(
                f"{where}: the client id {name!r} is of type {type(name).__name__}; ids must be "
                "texts or whole numbers."
            )
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: the client id {name!r} holds half of a character, which no file can "
                "store; give whole ones, such as by errors='replace' where the text was decoded."
            ) from error
    name, times = Counter(ids).most_common(1)[0]
    if times > 1:
        raise DataError(f"{where}: client {name!r} occurs twice; ids must be distinct.")


def warn_of_alike(ids: Sequence[str], where: str) -> None:
    """Warns of ids that look the same: the data of one client under two of them would have two
    budgets."""
    shown: dict[str, str] = {}
    for name in ids:
        other = shown.setdefault(_visible(name), name)
        if other != name:
            logger.warning(
                "%s: the clients %r and %r look the same; if they are one, write it one way, "
                "since epsilon protects each by itself",
                where,
                other,
                name,
            )
            return


def _visible(name: str) -> str:
    """Returns the visible characters of an id, composed, without blanks at its ends."""
    if name.isascii() and name.isprintable():
        return name.strip()
    seen = unicodedata.normalize("NFKC", name)
    hidden = ("Cc", "Cf")  # control characters, and formats such as a mark of byte order
    return "".join(one for one in seen if unicodedata.category(one) not in hidden).strip()


def check_like(value: Tensor, other: Tensor, where: str, field: str, of: str = "in train") -> None:
    """Checks that rows have the dtype, the layout and the shape of others, which are ``of`` a
    client or a side."""
    if (value.shape[1:], value.dtype, value.layout) != (other.shape[1:], other.dtype, other.layout):
        raise DataError(
            f"{where}: field {field!r} is {value.dtype} {tuple(value.shape[1:])}, but "
            f"{other.dtype} {tuple(other.shape[1:])} {of}; they must agree."
        )


def check_transform(transform: Any, name: str) -> None:
    """Checks that the transform of the dataset ``name`` is a callable instance of a dataclass,
    whose fields are in the dataset's fingerprint."""
    if not is_dataclass(transform) or isinstance(transform, type) or not callable(transform):
        raise DataError(
            f"{name}: transform is {transform!r}; it must be a frozen dataclass with __call__."
        )


def check_target_scale(scale: str, ends: tuple[float, float] | None, name: str) -> None:
    """Checks the scale of a dataset's targets, of which a logarithm needs a range above 0."""
    if scale not in SCALES:
        raise DataError(f"{name}: target_scale is {scale!r}; accepted: {', '.join(SCALES)}.")
    if scale == "log" and (ends is None or not ends[0] > 0):
        raise DataError(f"{name}: target_scale is 'log'; it needs a target_range above 0.")


def check_lengths(x: Tensor, y: Tensor, where: str) -> None:
    """Checks that features and targets have one row an example."""
    if x.ndim == 0 or y.ndim == 0:
        raise DataError(
            f"{where}: fields 'x' and 'y' must have one row an example; one of them is "
            "a single number."
        )
    if x.shape[0] != y.shape[0]:
        raise DataError(
            f"{where}: field 'x' has {x.shape[0]} examples and field 'y' has {y.shape[0]}; "
            "they must have the same number."
        )


def say_left_out(count: int, where: str, why: str) -> None:
    """Logs the number of clients that are left out, if there are any."""
    if count:
        logger.warning(
            "%s: clients left out (a private count): %s, with %s", where, f"{count:,}", why
        )


def check_finite(x: Tensor, offsets: Tensor, ids: Sequence[str], where: str, field: str) -> None:
    """Refuses NaN and infinity in floating x (N, ...), dense or CSR, of clients with the given
    offsets (n + 1,)."""
    if not x.is_floating_point():
        return
    if x.layout != torch.strided:  # the first row with such an entry, if there is any
        entry = (~torch.isfinite(x.values())).nonzero()[:1, 0]
        row = torch.searchsorted(x.crow_indices(), entry, right=True) - 1
        x = take(x, row)
        offsets = offsets - row.sum()
    for start, stop in chunks(x):
        # in parts, so that the mask of a large tensor takes little memory
        part = x[start:stop]
        accepted = "every value must be a finite number (no NaN, no infinity)."
        refuse(~torch.isfinite(part), part, offsets - start, ids, where, field, accepted)


def refuse(
    wrong: Tensor,
    values: Tensor,
    offsets: Tensor,
    ids: Sequence[str],
    where: str,
    field: str,
    accepted: str,
) -> None:
    """Refuses the first of the values (N, ...) that is ``wrong``, bool (N, ...), if there is
    any."""
    if wrong.any():
        row = int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])
        client = int(torch.searchsorted(offsets, row, right=True)) - 1
        place = f"client {ids[client]!r}, example {row - int(offsets[client])}"
        number = values[row][wrong[row]].flatten()[0].item()
        raise DataError(f"{where}: {place}, field {field!r} holds {number}; {accepted}")
