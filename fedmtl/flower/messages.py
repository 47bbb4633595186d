"""What server and nodes send each other: tensors by name, and a few public settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
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
        arrays = {key: Array(np.ascontiguousarray(one.detach().cpu().numpy())) for key, one in values.items()}
        content[name] = ArrayRecord(arrays)
    return content


def facts_of(content: RecordDict) -> dict[str, int | str]:
    """Return the settings of a message; none where it has none."""
    return dict(content.config_records.get("facts", {}))  # type: ignore[arg-type]


def tensors_of(content: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of a message under ``name``; none where there is no such record.

    Raises:
        ValueError: bytes that are no array of numbers.
    """
    if name not in content.array_records:
        return {}
    return {key: torch.from_numpy(array.numpy().copy()) for key, array in content.array_records[name].items()}


def checked_rows(content: RecordDict, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the rows of a reply, (1, d) float32 or float64 by release.

    Args:
        content: of the reply.
        sizes: d of every release.

    Raises:
        ValueError: other releases, another shape or dtype, or values that are not finite; it says which.
    """
    record = content.array_records.get("rows")
    if record is None:
        raise ValueError("it has no rows" if sizes else "it is empty")
    if set(record) != set(sizes):
        raise ValueError("its releases are not those of the algorithm")
    rows = {}
    for name, array in record.items():
        value = array.numpy()
        if value.dtype not in (np.float32, np.float64) or value.shape != (1, sizes[name]):
            raise ValueError(
                f"{name!r} is {value.dtype} of shape {value.shape}, and not a row of {sizes[name]} numbers"
            )
        if not np.isfinite(value).all():
            raise ValueError(f"{name!r} is not finite")
        rows[name] = torch.from_numpy(value.copy())
    return rows
