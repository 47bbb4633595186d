"""Messages between server and nodes: tensors by name, and a few public settings."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

# The kinds of messages.
NAME = "query.name"  # asks for the client's name
ROUND = "train.round"  # asks for the rows of a round
SHARES = "train.shares"  # brings the roster of a secure sum, asks for shares of keys
ROW = "train.row"  # brings the shares of others, asks for the masked row
OPENING = "train.opening"  # says whose rows came, asks for shares that open their sum
RECEIVE = "train.receive"  # brings the public state at the end of a round
FINISH = "evaluate.finish"  # brings the public state at the end of the run
Facts = Mapping[str, int | str | bytes]
# Settings in which a node may differ from the server: they move rounding alone.
OWN_AFFAIR = ("execution", "threads", "device", "version of torch")
logger = logging.getLogger("fedmtl")


def log_as_flower() -> None:
    """Sends the log messages of this package to the handlers of Flower's own."""
    if not logger.handlers:
        logger.setLevel(logging.INFO)
        for handler in logging.getLogger("flwr").handlers:
            logger.addHandler(handler)


def pack(facts: Facts, **tensors: Mapping[str, Tensor]) -> RecordDict:
    """Packs a message: a record of settings, and a record of tensors for each keyword."""
    content = RecordDict({"facts": ConfigRecord(dict(facts))})
    for name, values in tensors.items():
        content[name] = ArrayRecord.from_torch_state_dict(OrderedDict(values))
    return content


def facts_of(content: RecordDict) -> dict[str, int | str | bytes]:
    """Returns the settings of a message; an empty mapping if it has no record of them."""
    return dict(content.config_records.get("facts", {}))  # type: ignore[arg-type]


def tensors_of(content: RecordDict, name: str) -> dict[str, Tensor]:
    """Returns the tensors of a message under ``name``; an empty mapping if it has no such record.

    Raises:
        ValueError: the bytes are no array of numbers.
    """
    if name not in content.array_records:
        return {}
    try:
        return content.array_records[name].to_torch_state_dict()
    except Exception as error:  # NumPy reads bytes from anyone here, and may fail in any way
        raise ValueError(f"{name}: {error}") from error


def checked_rows(
    content: RecordDict | None, sizes: Mapping[str, int], run: str, step: int
) -> dict[str, Tensor]:
    """Returns the rows of a reply, (1, d) float32 or float64 by release.

    Args:
        content: of the reply; None without one.
        sizes: d of every release.
        run: identity of the run that was asked for.
        step: number of the round that was asked for.

    Raises:
        ValueError: no reply, a reply to another question, other releases, another shape or dtype,
            or values that are not finite. The message says which of them.
    """
    if content is None:
        raise ValueError("no answer in time")
    if "rows" not in content.array_records:
        # a method without releases sends an empty record of rows
        raise ValueError("it has no rows" if sizes else "it is empty")
    facts = facts_of(content)
    if facts.get("run") != run:
        raise ValueError("its answer is to another run")
    if facts.get("round") != step:
        raise ValueError(f"its answer is not to round {step + 1}, for which it was asked")
    rows = tensors_of(content, "rows")
    if rows.keys() != sizes.keys():
        raise ValueError("its releases are not those of the algorithm")
    for name, row in rows.items():
        if row.dtype not in (torch.float32, torch.float64) or row.shape != (1, sizes[name]):
            found = f"{row.dtype} of shape {tuple(row.shape)}"
            raise ValueError(f"{name!r} is {found}, and not a row of {sizes[name]} numbers")
        if not row.isfinite().all():
            raise ValueError(f"{name!r} is not finite")
    return rows
