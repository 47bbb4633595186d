"""Safetensors files of tensors by name; equal tensors give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from .._files import parse_json, write_bytes


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors as safetensors, by :func:`write_bytes`: equal arguments give equal bytes.

    Args:
        path: of the file.
        tensors: by name.
        metadata: texts by name.
    """
    # The library refuses views, and tensors that share memory.
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, _in_order(save(ready, metadata=dict(metadata or {}))))


def _in_order(content: bytes) -> bytes:
    """Returns a safetensors file with its metadata in the order of their keys.

    The library keeps metadata in a hash map of Rust, whose order is drawn anew in every call.
    """
    header, start = split_header(content)
    metadata = header.pop("__metadata__", {})
    if len(metadata) < 2:
        return content
    ordered = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[start:]


def split_header(content: bytes) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the place at which its tensors begin.

    The first 8 bytes are the length of the header, a JSON text.
    """
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    return header, start


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of a safetensors file by name, and its metadata.

    Raises:
        OSError, SafetensorError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        names = file.keys()  # the file is no mapping
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


def write_parts(
    path: Path, parts: Mapping[str, Mapping[str, Tensor]], notes: Mapping[str, Any]
) -> None:
    """Writes tensors by part and name as one safetensors file.

    Args:
        path: of the file.
        parts: tensors by part and name.
        notes: plain values, and dataclasses of them, by name.
    """
    tensors = {
        f"{part}.{name}": row.clone()
        for part, named in parts.items()
        for name, row in named.items()
    }
    write_tensors(path, tensors, {"notes": json.dumps(notes, default=asdict)})


def read_parts(path: Path, *names: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Returns the tensors of the parts ``names`` and the notes that :func:`write_parts` wrote.

    Raises:
        OSError, SafetensorError, KeyError, ValueError: it cannot be read, or is another file.
    """
    return parts_of(*read_tensors(path), *names)


def parts_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *names: str
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Returns the parts, as :func:`read_parts` does, of a file with these tensors and metadata.

    Raises:
        KeyError, ValueError: those of another file.
    """
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, row in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = row
    return parts, parse_json(metadata["notes"], finite=False)
