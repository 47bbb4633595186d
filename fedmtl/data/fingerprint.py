"""The fingerprint of a dataset, by which a resumed run knows its data again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from . import rows
from .checks import chunks
from .examples import Domain, Examples
from .transforms import Transform, describe


def facts_of(
    ids: Sequence[str], classes: int | None, transform: Transform, domain: Domain | None
) -> dict[str, Any]:
    """Returns the facts of a dataset that are in its fingerprint, JSON-ready.

    Args:
        ids: of the clients.
        classes: number of classes; None for real targets.
        transform: from storage to float.
        domain: public bounds on every example; None for none.
    """
    facts: dict[str, Any] = {"ids": ids, "classes": classes, "transform": describe(transform)}
    if domain is not None:
        facts["domain"] = asdict(domain)
    return facts


def digest(header: Mapping[str, Any], parts: Mapping[str, Examples]) -> str:
    """Returns the BLAKE2b digest of a dataset's facts and of every number in it.

    Args:
        header: facts that are JSON-ready.
        parts: the examples by side, in the order in which they are digested.

    Returns:
        32 hex digits; they depend neither on the device nor on the layout in memory.
    """
    found = hashlib.blake2b(digest_size=16)
    found.update(json.dumps(header, sort_keys=True).encode())
    for side, part in parts.items():
        for field in ("x", "y", "offsets"):
            for name, tensor in rows.components(getattr(part, field)).items():
                # dtype and shape, so that the same bytes in another form are other data
                found.update(f"{side}_{field}{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                for start, stop in chunks(tensor):
                    piece = tensor[start:stop].cpu().contiguous()
                    found.update(piece.view(torch.uint8).numpy().data)
    return found.hexdigest()
