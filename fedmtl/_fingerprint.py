"""Fingerprints: a digest of every input of a result, so that a part that differs can
be named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any


def fingerprint_of(parts: Mapping[str, Any]) -> str:
    """Returns the parts' names with digests of their values: ``"data=4f...; seed=09..."``.

    Args:
        parts: all that a result depends on, as JSON-ready values.
    """
    contents = {name: json.dumps(value, sort_keys=True).encode() for name, value in parts.items()}
    return "; ".join(
        f"{name}={blake2b(text, digest_size=16).hexdigest()}" for name, text in contents.items()
    )


def differing(one: str, other: str) -> list[str]:
    """Returns the names of the parts in which two fingerprints differ, of one that has no parts (as
    those of earlier versions) none."""
    first = _parts(one)
    second = _parts(other)
    if not first or not second:
        return []
    return [name for name in first | second if first.get(name) != second.get(name)]


def _parts(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split("; ")) if "=" in text else {}
