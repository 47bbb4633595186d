"""A dataset as a folder: one JSON file and NumPy files, which can be memory-mapped. No pickle."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .rows import csr
from .transforms import Transform, restore

_FILE = "dataset.json"
_FORMAT = "fedmtl-dataset"
_VERSION = 1
_TENSORS = tuple(f"{side}_{field}" for side in ("train", "test") for field in ("x", "y", "offsets"))
_PUBLIC = tuple(f"public_{field}" for field in ("x", "y", "offsets"))


def components(value: Tensor) -> dict[str, Tensor]:
    """Return the dense tensors that make up a tensor: itself, or the three parts of a CSR matrix."""
    if value.layout == torch.strided:
        return {"": value}
    return {"_crow": value.crow_indices(), "_columns": value.col_indices(), "_values": value.values()}


def to_array(value: Tensor) -> np.ndarray:
    """Return a contiguous NumPy array with the same bytes; bfloat16, which NumPy lacks, as int16."""
    value = value.contiguous()
    return (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()


def write_folder(folder: Path, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write to a temporary folder beside the target, sync, and rename."""
    if folder.exists():
        raise DataError(f"{folder} exists already; give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        layout: dict[str, Any] = {}
        for name, value in tensors.items():
            parts = components(value)
            layout[name] = {
                "files": {part: str(tensor.dtype).removeprefix("torch.") for part, tensor in parts.items()},
                "width": value.shape[1] if len(parts) > 1 else None,
            }
            for part, tensor in parts.items():
                with open(temporary / f"{name}{part}.npy", "wb") as file:
                    np.save(file, to_array(tensor.cpu()), allow_pickle=False)
                    _sync(file)
        content = {"format": _FORMAT, "version": _VERSION, **meta, "tensors": layout}
        with open(temporary / _FILE, "w", encoding="utf-8") as text:
            json.dump(content, text)
            _sync(text)
        temporary.chmod(0o755)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_folder(folder: Path, *, memory_map: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON content and the tensors; x and y stay on disk if ``memory_map``."""
    path = folder / _FILE
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; give a folder written by FederatedDataset.save.") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); write the folder again.") from error
    if not isinstance(meta, dict) or (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
        raise DataError(f"{path} is not a {_FORMAT} file of version {_VERSION}.")
    tensors: dict[str, Tensor] = {}
    try:
        for name in (*_TENSORS, *(extra for extra in _PUBLIC if extra in meta["tensors"])):
            entry = meta["tensors"][name]
            mapped = memory_map and not name.endswith("_offsets")
            parts = [_read(folder / f"{name}{part}.npy", dtype, mapped) for part, dtype in entry["files"].items()]
            width = entry["width"]
            tensors[name] = parts[0] if width is None else csr(parts[0], parts[1], parts[2], width)
        for name in ("ids", "classes", "name", "transform"):
            meta[name]
    except RuntimeError as error:
        raise DataError(f"{folder}: field {name!r} is not a valid CSR matrix ({error}).") from error
    except (KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{path}: the key {error} is missing or malformed; write the folder again.") from error
    return meta, tensors


def transform_of(meta: dict[str, Any], folder: Path) -> Transform:
    """Return the transform that the folder was saved with."""
    return restore(meta["transform"], str(folder / _FILE))


def _read(path: Path, dtype: str, mapped: bool) -> Tensor:
    try:
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; write the folder again.") from error
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged or truncated ({error}); write the folder again.") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
