"""A dataset as a folder: one JSON file, and its tensors as safetensors, which can be memory-mapped. No pickle."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .._files import read_json, sync_folder, write_bytes
from ..errors import DataError
from .rows import csr

_FILE, _TENSORS = "dataset.json", "tensors.safetensors"
_FORMAT = {"format": "fedmtl-dataset", "version": 2}
_NAMES = tuple(f"{side}_{field}" for side in ("train", "test", "public") for field in ("x", "y", "offsets"))
_CSR = ("_crow", "_columns", "_values")


def components(value: Tensor) -> dict[str, Tensor]:
    """Return the dense tensors that make up a tensor: itself, or the three parts of a CSR matrix."""
    if value.layout == torch.strided:
        return {"": value}
    return dict(zip(_CSR, (value.crow_indices(), value.col_indices(), value.values()), strict=True))


def to_array(value: Tensor) -> np.ndarray:
    """Return a contiguous NumPy array with the same bytes; bfloat16, which NumPy lacks, as int16."""
    value = value.contiguous()
    return (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()


def write_folder(folder: Path, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write to a temporary folder beside the target, sync, and rename."""
    if folder.exists():
        raise DataError(f"{folder} exists already; give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    widths = {name: value.shape[1] for name, value in tensors.items() if value.layout != torch.strided}
    parts = {f"{name}{part}": v for name, value in tensors.items() for part, v in components(value).items()}
    addresses: set[int] = set()
    for name, value in parts.items():  # a file of safetensors has memory under one name only
        value = value.cpu().contiguous()
        parts[name] = value.clone() if value.data_ptr() in addresses else value
        addresses.add(value.data_ptr())
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        temporary = Path(place) / folder.name
        temporary.mkdir()
        save_file(parts, temporary / _TENSORS)
        write_bytes(temporary / _FILE, json.dumps({**_FORMAT, **meta, "widths": widths}).encode())
        with open(temporary / _TENSORS, "rb") as file:
            os.fsync(file.fileno())
        os.rename(temporary, folder)
    sync_folder(folder.parent)


def read_folder(folder: Path, *, memory_map: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON content and the tensors; x and y stay on disk if ``memory_map``."""
    if not (folder / _FILE).is_file():
        raise DataError(f"{folder / _FILE} is missing; give a folder written by FederatedDataset.save.")
    meta = read_json(folder / _FILE)
    if {name: meta.get(name) for name in _FORMAT} != _FORMAT:
        raise DataError(f"{folder / _FILE} is not a {_FORMAT['format']} file of version {_FORMAT['version']}.")
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(folder / _TENSORS, "pt") as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = parts if memory_map else {name: value.clone() for name, value in parts.items()}
        for name in _NAMES:
            if name in parts:
                tensors[name] = parts[name]
            elif f"{name}_crow" in parts:
                tensors[name] = csr(*(parts[f"{name}{part}"] for part in _CSR), meta["widths"][name])  # type: ignore[call-arg]
            elif not name.startswith("public"):
                raise KeyError(name)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder / _TENSORS} is missing or damaged ({error}); write the folder again.") from error
    except RuntimeError as error:
        raise DataError(f"{folder}: field {name!r} is not a valid CSR matrix ({error}).") from error
    except KeyError as error:
        raise DataError(f"{folder}: {error} is missing; write the folder again.") from error
    return meta, tensors
