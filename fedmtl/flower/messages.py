"""What server and nodes send each other: tensors by name, and a few public settings."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

NAME, ROUND, RECEIVE, FINISH = "query.name", "train.round", "train.receive", "evaluate.finish"
"""Kinds of messages: who are you; train and send; here is the new public state; here is the last one."""
Facts = Mapping[str, int | str]
logger = logging.getLogger("fedmtl")


def log_as_flower() -> None:
    """Show the messages of this package where Flower's own appear."""
    if not logger.handlers:
        logger.setLevel(logging.INFO)
        for handler in logging.getLogger("flwr").handlers:
            logger.addHandler(handler)


def pack(facts: Facts, **tensors: Mapping[str, Tensor]) -> RecordDict:
    """Return a message's content: a record of settings, and one of tensors for each keyword."""
    content = RecordDict({"facts": ConfigRecord(dict(facts))})
    for name, values in tensors.items():
        content[name] = ArrayRecord.from_torch_state_dict(OrderedDict(values))
    return content


def facts_of(content: RecordDict) -> dict[str, int | str]:
    """Return the settings of a message; none where it has none."""
    return dict(content.config_records.get("facts", {}))  # type: ignore[arg-type]


def tensors_of(content: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of a message under ``name``; none where there is no such record.

    Raises:
        ValueError: bytes that are no array of numbers, whatever NumPy makes of them.
    """
    if name not in content.array_records:
        return {}
    try:
        return content.array_records[name].to_torch_state_dict()
    except Exception as error:
        raise ValueError(f"{name}: {error}") from error


def checked_rows(content: RecordDict | None, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the rows of a reply, (1, d) float32 or float64 by release.

    Args:
        content: of the reply; None without one.
        sizes: d of every release.

    Raises:
        ValueError: no reply, other releases, another shape or dtype, or values that are not finite; it says which.
    """
    if content is None:
        raise ValueError("no answer in time")
    if "rows" not in content.array_records:
        raise ValueError("it has no rows" if sizes else "it is empty")
    rows = tensors_of(content, "rows")
    if rows.keys() != sizes.keys():
        raise ValueError("its releases are not those of the algorithm")
    for name, row in rows.items():
        if row.dtype not in (torch.float32, torch.float64) or row.shape != (1, sizes[name]):
            raise ValueError(
                f"{name!r} is {row.dtype} of shape {tuple(row.shape)}, and not a row of {sizes[name]} numbers"
            )
        if not row.isfinite().all():
            raise ValueError(f"{name!r} is not finite")
    return rows
