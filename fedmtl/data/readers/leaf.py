"""LEAF JSON (Caldas et al., "LEAF: a benchmark for federated settings", 2018): a file, a folder, a
zip.

A part is one JSON object: ``users`` (ids) and ``user_data``, which maps each id to
``{"x": [example, ...], "y": [target, ...]}``; ``num_samples``, the lengths of these lists, is not
read.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ...errors import DataError
from ..arrays import as_tensor
from ..dataset import FederatedDataset
from ..examples import SIDES
from ..loaders import reader
from ..sides import Classes
from ..transforms import Integers
from .folders import is_visible_member, listed_files, unreadable

Pair = tuple[np.ndarray, np.ndarray]
Features = Callable[[list[Any], str], np.ndarray]
"""Returns the features of a client, one row an example, from its x as the file has it and its place
in the file, for messages."""
Part = tuple[str, Callable[[], bytes]]
"""A file's name for messages, and its reader."""


@reader("leaf")
def read_leaf(
    path: str | Path,
    *,
    shape: tuple[int, ...] | None = None,
    classes: Classes = "infer",
    test_fraction: float | None = None,
    seed: int = 0,
    min_examples: int = 2,
    integers: bool = False,
    name: str | None = None,
) -> FederatedDataset:
    """Reads LEAF JSON with numeric features.

    Args:
        path: a ``.json`` file, a ``.zip`` of such files, or a folder of either, in which a zip and
            its unzipped copy are read once; a folder or a zip with the folders ``train`` and
            ``test``, as LEAF's own scripts leave them, is read as that split.
        shape: shape of one example; None keeps the one in the file (a flat list of numbers for
            images).
        classes: as in :meth:`FederatedDataset.from_tensors`.
        test_fraction: share of each client's examples held out for test. None keeps the folder's
            split, and without one means 0.2; with a number, train and test are pooled and split
            again.
        seed: of the split.
        min_examples: clients with fewer examples (train and test in all) are left out.
        integers: keep the features as whole numbers, for models of tokens.
        name: for messages and reports; None for the file's name.

    Returns:
        Features as float32, or whole numbers with ``integers``, and int64 labels or float32
        targets, as the file has them.

    Raises:
        DataError: a missing, truncated or malformed file; the message names file, client and field.
        ConfigError: an impossible setting.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedmtl.data import read_leaf
        >>> ann = {"x": [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], "y": [0, 1, 0]}
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "data.json")
        ...     _ = file.write_text(json.dumps({"users": ["ann"], "user_data": {"ann": ann}}))
        ...     data = read_leaf(file, classes=2)
        >>> data.ids, len(data.train), len(data.test)
        (('ann',), 2, 1)
    """
    root = Path(path)

    def features(x: list[Any], where: str) -> np.ndarray:
        rows = numbers(x, where, "x")
        if shape is not None:
            if rows[0].size != math.prod(shape):
                raise DataError(
                    f"{where}, field 'x' has {rows[0].size} numbers an example; shape {shape} "
                    "needs others."
                )
            rows = rows.reshape(len(rows), *shape)
        if integers:
            return rows.astype(np.float64)  # exact for whole numbers up to 2^53
        return rows.astype(np.float32)

    sides = read_sides(root, features)
    dtype: type[np.generic] = np.int64
    # real targets of one client are real targets of all
    if any(y.dtype.kind == "f" for side in sides for _, y in side.values()):
        dtype = np.float32
    transform = None
    if integers:
        transform = Integers()
    train, test = (
        {client: (x, y.astype(dtype)) for client, (x, y) in side.items()} for side in sides
    )
    return FederatedDataset.from_tensors(
        train,
        test=test or None,
        name=name or root.name,
        source=str(root),
        classes=classes,
        test_fraction=test_fraction,
        seed=seed,
        min_examples=min_examples,
        transform=transform,
    )


def read_sides(
    root: Path, features: Features, *, other: str = ""
) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """Returns all clients of the train side (or of the undivided parts) and of the test side;
    ``other`` names another kind of file that is accepted, for messages."""
    if not root.exists():
        also = ""
        if other:
            also = f"{other}, "
        raise DataError(
            f"root is {str(root)!r}, which does not exist; give {also}a LEAF .json file, a .zip of "
            "them, or a folder of either."
        )
    if root.is_dir() and (root / "train").is_dir() and (root / "test").is_dir():
        sides = [_parts(root / side, other) for side in SIDES]
    else:
        sides = _divided(_parts(root, other))
    train, *test = [_read_parts(parts, root, features) for parts in sides]
    if not test:
        return train, {}
    return train, test[0]


def _divided(parts: list[Part]) -> list[list[Part]]:
    """Returns the parts for training and for test, if each is in a folder ``train`` or ``test`` of
    a zip; else all together."""
    sides = [[part for part in parts if Path(part[0]).parent.name == side] for side in SIDES]
    # a part outside of both folders belongs to no side, so then there is no split to keep
    whole = all(sides) and sum(map(len, sides)) == len(parts)
    if whole:
        return sides
    return [parts]


def _read_parts(parts: Sequence[Part], root: Path, features: Features) -> dict[str, Pair]:
    clients: dict[str, Pair] = {}
    origin: dict[str, str] = {}
    for part, read in parts:
        for client, pair in _read_part(part, read, features):
            if client in clients:
                raise DataError(
                    f"{part}: client {client!r} is already in {origin[client]}; each client must "
                    "be in one part only."
                )
            clients[client] = pair
            origin[client] = part
    if not clients:
        raise DataError(f"{root}: there are no clients; field 'users' must list at least one.")
    return clients


def _parts(root: Path, other: str) -> list[Part]:
    """Returns the parts of a file or of a folder, each with its name and its reader."""
    if root.is_dir():
        files = listed_files(root, (".json", ".zip"), below=False)
    else:
        files = [root]
    parts: list[Part] = []
    for file in files:
        if file.suffix.lower() == ".zip":
            parts += _zip_parts(file, files)
        else:
            parts.append((str(file), file.read_bytes))
    if not parts:
        held = "no LEAF data"
        if other:
            held = f"neither {other} nor LEAF data"
        raise DataError(
            f"{root} holds {held}; give a .json file, a .zip of them, or a folder of either."
        )
    return parts


def _zip_parts(file: Path, beside: Sequence[Path]) -> list[Part]:
    """Returns the parts in a zip file, without those that lie ``beside`` it, unzipped."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise DataError(
            f"{file} is not a readable zip file ({error}); it may be truncated."
        ) from error
    except OSError as error:
        raise unreadable(str(file), error) from error
    members = sorted(archive.infolist(), key=attrgetter("filename"))
    parts = [member for member in members if member.filename.lower().endswith(".json")]
    return [
        (f"{file}/{member.filename}", partial(archive.read, member))
        for member in parts
        if is_visible_member(member.filename)
        and not any(_is_copy(member, other) for other in beside)
    ]


def _is_copy(member: zipfile.ZipInfo, file: Path) -> bool:
    """Tells whether a file has the name and the content of one in a zip."""
    if (file.name, file.stat().st_size) != (PurePosixPath(member.filename).name, member.file_size):
        return False
    # the checksum stands in the zip, so that only the file beside it is read
    return zlib.crc32(file.read_bytes()) == member.CRC


def _read_part(
    part: str, read: Callable[[], bytes], features: Features
) -> Iterator[tuple[str, Pair]]:
    try:
        content = json.loads(read())
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{part} cannot be read as LEAF JSON ({error}); it may be truncated or damaged."
        ) from error
    users, data = (
        content.get(key) if isinstance(content, dict) else None for key in ("users", "user_data")
    )
    if (
        not isinstance(data, dict)
        or not isinstance(users, list)
        or sorted(map(str, users)) != sorted(data)
    ):
        raise DataError(
            f"{part}: fields 'users' and 'user_data' are missing or name different clients; "
            "accepted: a JSON object "
            "with the list of clients, each once, and an object that maps each to its x and y."
        )
    for client in map(str, users):
        where = f"{part}: client {client!r}"
        # popped, so that the memory of a client is free once it is an array
        entry = data.pop(client)
        for key in ("x", "y"):
            if not isinstance(entry, dict) or not isinstance(entry.get(key), list):
                raise DataError(
                    f"{where}: field {key!r} is missing or malformed; it must be a list, one entry "
                    "an example."
                )
        if len(entry["x"]) != len(entry["y"]):
            raise DataError(
                f"{where}: field 'x' has {len(entry['x']):,} examples and field 'y' has "
                f"{len(entry['y']):,}; they must have the same number."
            )
        # a user may have no examples on one side of a split
        if entry["y"]:
            yield client, (features(entry["x"], where), numbers(entry["y"], where, "y"))


def numbers(value: list[Any], where: str, field: str) -> np.ndarray:
    """Returns a client's x or y as an array of numbers."""
    return as_tensor(value, where, field).numpy()
