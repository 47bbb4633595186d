"""LEAF JSON (Caldas et al., "LEAF: a benchmark for federated settings", 2018): a file, a folder, a zip.

A part is one JSON object: ``users`` (ids), ``num_samples`` (their numbers of examples) and ``user_data``,
which maps each id to ``{"x": [example, ...], "y": [target, ...]}``.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..._check import positive_int
from ...errors import DataError
from ..checks import check_fraction
from ..dataset import Classes, FederatedDataset
from ..loaders import reader
from ..transforms import Affine, Transform

Pair = tuple[np.ndarray, np.ndarray]
Tensors = tuple[torch.Tensor, torch.Tensor]
Store = Callable[[np.ndarray], np.ndarray]

_FEMNIST_CLASSES = 62
_FEMNIST_SHAPE = (1, 28, 28)


@reader("leaf")
def read_leaf(
    path: str | Path,
    *,
    shape: tuple[int, ...] | None = None,
    classes: Classes = "infer",
    test_fraction: float | None = None,
    seed: int = 0,
    min_examples: int = 2,
    transform: Transform | None = None,
    name: str | None = None,
) -> FederatedDataset:
    """Read LEAF JSON with numeric features.

    Args:
        path: a ``.json`` file, a ``.zip`` of such files, or a folder of either; a folder with the subfolders
            ``train`` and ``test``, as LEAF's own scripts leave them, is read as that split.
        shape: shape of one example; None keeps the one in the file (a flat list of numbers for images).
        classes: as in :meth:`FederatedDataset.from_tensors`.
        test_fraction: share of each client's examples held out for test. None keeps the folder's split, and
            without one means 0.2; with a number, train and test are pooled and split again.
        seed: of the split.
        min_examples: clients with fewer examples (train and test together) are left out.
        transform: from storage (float32) to float.
        name: for messages and reports; None for the file's name.

    Raises:
        DataError: a missing, truncated or malformed file; the message names file, client and field.
        ConfigError: an impossible setting.
    """
    root = Path(path)
    positive_int("read_leaf", min_examples=min_examples)
    if test_fraction is not None:
        check_fraction(test_fraction)
    train, test = _read_sides(root, _as_float)
    merged = _merge(train, test, root)
    clients, kind = _large_enough(merged, min_examples, root), _target_kind(merged)
    title = root.name if name is None else name

    def tensors(side: dict[str, Pair]) -> dict[str, Tensors]:
        return {
            client: _pair(side[client], shape, kind, f"{root}: client {client!r}")
            for client in clients
            if client in side
        }

    if test and test_fraction is None:
        return FederatedDataset.from_tensors(
            _present(tensors(train), clients, root),
            test=tensors(test),
            classes=classes,
            transform=transform,
            name=title,
        )
    return FederatedDataset.from_tensors(
        tensors(clients),
        test_fraction=0.2 if test_fraction is None else test_fraction,
        seed=seed,
        classes=classes,
        transform=transform,
        name=title,
    )


@reader("femnist")
def read_femnist(
    root: str | Path, *, test_fraction: float = 0.2, seed: int = 0, min_examples: int = 2
) -> FederatedDataset:
    """Read LEAF's FEMNIST: handwritten characters by writer, 62 classes, features (1, 28, 28).

    LEAF's pixels lie in [0, 1] with a background of 1.0; they are inverted, so that the background is exactly
    0 and ink is positive. Where every pixel is a whole number of 255ths, as in LEAF's own files, they are
    stored as uint8.

    Args:
        root: a LEAF file, zip or folder; the parts of a ``train`` and a ``test`` folder are pooled.
        test_fraction: share of each writer's examples held out for test.
        seed: of the split, keyed by the writer.
        min_examples: writers with fewer examples are left out.

    Raises:
        DataError: a missing, truncated or malformed file, or pixels that are not 784 numbers in [0, 1].
    """
    root = Path(root)
    positive_int("read_femnist", min_examples=min_examples)
    check_fraction(test_fraction)
    clients = _large_enough(_merge(*_read_sides(root, _as_pixels), root), min_examples, root)
    exact = all(x.dtype == np.uint8 for x, _ in clients.values())
    kind = _target_kind(clients)
    pairs = {}
    for client, (x, y) in clients.items():
        stored = x if exact or x.dtype == np.float32 else x.astype(np.float32) / np.float32(255)
        pairs[client] = _pair((stored, y), _FEMNIST_SHAPE, kind, f"{root}: client {client!r}")
    return FederatedDataset.from_tensors(
        pairs,
        test_fraction=test_fraction,
        seed=seed,
        classes=_FEMNIST_CLASSES,
        transform=Affine(scale=1 / 255) if exact else None,
        name="femnist",
    )


@dataclass(frozen=True)
class _Part:
    where: str
    read: Callable[[], bytes]


def _read_sides(root: Path, store: Store) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """All clients of the train side (or of the undivided parts) and of the test side."""
    if not root.exists():
        raise DataError(f"{root} does not exist; give a LEAF .json file, a .zip of them, or a folder of either.")
    if root.is_dir() and (root / "train").is_dir() and (root / "test").is_dir():
        return _read_parts(root / "train", store), _read_parts(root / "test", store)
    return _read_parts(root, store), {}


def _read_parts(root: Path, store: Store) -> dict[str, Pair]:
    clients: dict[str, Pair] = {}
    origin: dict[str, str] = {}
    for part in _parts(root):
        for client, pair in _read_part(part, store):
            if client in clients:
                raise DataError(
                    f"{part.where}: client {client!r} is already in {origin[client]}; "
                    "each client must be in one part only."
                )
            clients[client], origin[client] = pair, part.where
    if not clients:
        raise DataError(f"{root}: there are no clients; field 'users' must list at least one.")
    return clients


def _parts(root: Path) -> Iterator[_Part]:
    files = sorted(p for p in root.iterdir() if p.suffix in (".json", ".zip")) if root.is_dir() else [root]
    any_part = False
    for file in files:
        if file.suffix == ".zip":
            for part in _zip_parts(file):
                any_part = True
                yield part
        else:
            any_part = True
            yield _Part(str(file), file.read_bytes)
    if not any_part:
        raise DataError(f"{root} holds no LEAF data; give a .json file, a .zip of them, or a folder of either.")


def _zip_parts(file: Path) -> Iterator[_Part]:
    try:
        with zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist()):
                hidden = name.startswith("__MACOSX/") or name.rsplit("/", 1)[-1].startswith(".")
                if name.endswith(".json") and not hidden:
                    yield _Part(f"{file}/{name}", partial(archive.read, name))
    except zipfile.BadZipFile as error:
        raise DataError(f"{file} is not a readable zip file ({error}); it may be truncated.") from error


def _read_part(part: _Part, store: Store) -> Iterator[tuple[str, Pair]]:
    try:
        content = json.loads(part.read())
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{part.where} cannot be read ({error}); it may be truncated or damaged.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{part.where} is not UTF-8 text ({error}); accepted: LEAF JSON.") from error
    except ValueError as error:
        raise DataError(
            f"{part.where} is not valid JSON ({error}); it may be truncated. Accepted: one LEAF JSON object."
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{part.where} holds a JSON {type(content).__name__}; accepted: a LEAF JSON object.")
    for key, kind, accepted in (
        ("users", list, "a list of client ids"),
        ("num_samples", list, "a list of numbers of examples, one a client"),
        ("user_data", dict, "an object that maps each client to its x and y"),
    ):
        if not isinstance(content.get(key), kind):
            state = "is malformed" if key in content else "is missing"
            raise DataError(f"{part.where}: field {key!r} {state}; it must be {accepted}.")
    users, counts, data = content["users"], content["num_samples"], content["user_data"]
    if len(counts) != len(users):
        raise DataError(
            f"{part.where}: field 'num_samples' has {len(counts)} entries for {len(users)} users; "
            "it must have one a client."
        )
    seen: set[str] = set()
    for client, count in zip(users, counts, strict=True):
        where = f"{part.where}: client {client!r}"
        if not isinstance(client, str) or client in seen:
            raise DataError(f"{where} in field 'users' is not a text or occurs twice; ids must be distinct texts.")
        seen.add(client)
        if client not in data:
            raise DataError(f"{where} of field 'users' is missing in 'user_data'; every client needs its x and y.")
        yield client, _read_client(data.pop(client), count, where, store)
    if data:
        raise DataError(
            f"{part.where}: client {next(iter(data))!r} of field 'user_data' is not in field 'users'; "
            "every client must be listed there."
        )


def _read_client(entry: Any, count: Any, where: str, store: Store) -> Pair:
    for key in ("x", "y"):
        if not isinstance(entry, dict) or not isinstance(entry.get(key), list):
            raise DataError(f"{where}: field {key!r} is missing or malformed; it must be a list, one entry an example.")
    x, y = entry["x"], entry["y"]
    if len(x) != len(y):
        raise DataError(
            f"{where}: field 'x' has {len(x)} examples and field 'y' has {len(y)}; they must have the same number."
        )
    if count != len(y):
        raise DataError(
            f"{where}: field 'num_samples' says {count!r} examples and 'user_data' holds {len(y)}; they must agree."
        )
    if not y:
        raise DataError(f"{where} has no examples; every client needs at least 1.")
    try:
        return store(_numbers(x, where, "x")), _numbers(y, where, "y")
    except _PixelError as error:
        raise DataError(f"{where}, field 'x' {error}") from error


class _PixelError(ValueError):
    pass


def _numbers(value: list[Any], where: str, field: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"{where}, field {field!r}: examples differ in length; each must have the same shape."
        ) from error
    if array.dtype.kind in "US":
        raise DataError(
            f"{where}, field {field!r} holds text such as {str(array.flat[0])[:40]!r}; accepted: numbers "
            "(for LEAF files of image names, load the images and use FederatedDataset.from_tensors)."
        )
    if array.dtype.kind not in "fiub":
        raise DataError(f"{where}, field {field!r} holds values that are not numbers; accepted: numbers.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = np.argwhere(~np.isfinite(array))[0]
        raise DataError(
            f"{where}, example {row[0]}, field {field!r} holds {array[tuple(row)]}; "
            "every value must be a finite number (no NaN, no infinity)."
        )
    return array


def _as_float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _as_pixels(x: np.ndarray) -> np.ndarray:
    """Inverted pixels: uint8 where all are 255ths, float32 otherwise."""
    if x[0].size != 784:
        raise _PixelError(f"has {x[0].size} numbers an example; FEMNIST images have 28 x 28 = 784.")
    if x.min() < 0 or x.max() > 1:
        wrong = x.min() if x.min() < 0 else x.max()
        raise _PixelError(f"holds the pixel {wrong}; FEMNIST pixels must be in [0, 1].")
    whole = np.rint(x * 255)
    if np.array_equal((whole / 255).astype(np.float32), x.astype(np.float32)):
        return (255 - whole).astype(np.uint8)
    return (1 - x).astype(np.float32)


def _merge(train: dict[str, Pair], test: dict[str, Pair], root: Path) -> dict[str, Pair]:
    merged = dict(train)
    for client, (x, y) in test.items():
        if client in merged:
            first = merged[client]
            if first[0].shape[1:] != x.shape[1:]:
                raise DataError(
                    f"{root}: client {client!r}, field 'x' has examples of shape {first[0].shape[1:]} in "
                    f"train and {x.shape[1:]} in test; they must agree."
                )
            x, y = np.concatenate([_alike(first[0], x), _alike(x, first[0])]), np.concatenate([first[1], y])
        merged[client] = (x, y)
    return merged


def _large_enough(clients: dict[str, Pair], least: int, root: Path) -> dict[str, Pair]:
    """Leave out clients with fewer than ``least`` examples; some must remain."""
    large = {client: pair for client, pair in clients.items() if len(pair[1]) >= least}
    if not large:
        raise DataError(f"{root}: no client has {least} or more examples (min_examples).")
    return large


def _alike(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Pixels in the other array's kind of storage: uint8 if both are, float32 otherwise."""
    if x.dtype == np.uint8 and other.dtype != np.uint8:
        return x.astype(np.float32) / np.float32(255)
    return x


def _present(train: dict[str, Tensors], clients: Iterable[str], root: Path) -> dict[str, Tensors]:
    for client in clients:
        if client not in train:
            raise DataError(f"{root}: client {client!r} has no training examples; every client needs at least 1.")
    return train


def _target_kind(clients: dict[str, Pair]) -> type:
    """One dtype for all targets: a client whose targets happen to be whole numbers follows the others."""
    return np.float32 if any(y.dtype.kind == "f" for _, y in clients.values()) else np.int64


def _pair(pair: Pair, shape: tuple[int, ...] | None, kind: type, where: str) -> Tensors:
    x, y = pair
    if shape is not None:
        if x[0].size != math.prod(shape):
            raise DataError(f"{where}, field 'x' has {x[0].size} numbers an example; shape {shape} needs others.")
        x = x.reshape(len(x), *shape)
    return torch.from_numpy(x), torch.from_numpy(y.astype(kind))
