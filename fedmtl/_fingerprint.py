"""Fingerprints: a digest of every part of what a result depends on, so that a part that differs can be named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint_of(parts: Mapping[str, Any]) -> str:
    """Return the parts' names with digests of their values: ``"data=4f...; seed=09..."``.

    Args:
        parts: what a result depends on; JSON-ready values.
    """
    return "; ".join(f"{name}={_digest(value)}" for name, value in parts.items())


def differing(one: str, other: str) -> list[str]:
    """Return the names of the parts in which two fingerprints differ, of one that has no parts (as those of earlier
    versions) none."""
    first, second = _parts(one), _parts(other)
    if not first or not second:
        return []
    return [name for name in first | second if first.get(name) != second.get(name)]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _parts(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split("; ")) if "=" in text else {}
