"""CelebA, faces by celebrity (Liu et al., "Deep learning face attributes in the wild", ICCV 2015).

In the two forms in which it is distributed:

- the original files, as ``torchvision.datasets.CelebA`` lays them out: a folder ``celeba`` with ``img_align_celeba/``,
  ``list_attr_celeba.txt``, ``identity_CelebA.txt`` and ``list_eval_partition.txt``;
- LEAF JSON whose examples are names of images and labels, beside the folder ``img_align_celeba``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._check import one_of
from ...errors import ConfigError, DataError
from ..assemble import choose
from ..dataset import FederatedDataset
from ..loaders import reader
from .images import image_clients
from .leaf import Pair, numbers, read_sides

IMAGES = "img_align_celeba"
ATTRIBUTES, IDENTITIES, PARTITION = "list_attr_celeba.txt", "identity_CelebA.txt", "list_eval_partition.txt"
_PARTS = ("train", "valid", "test")


@reader("celeba")
def read_celeba(
    root: str | Path,
    *,
    target: str = "Smiling",
    size: int | Sequence[int] = 84,
    min_examples: int = 5,
    clients: int | None = None,
    part: str = "all",
    test_fraction: float | None = 0.2,
    seed: int = 0,
    images: str | Path | None = None,
    cache: str | Path | None = None,
    mapped: bool = True,
    progress: bool = True,
) -> FederatedDataset:
    """Read CelebA: a client a celebrity, two classes, features (3, height, width) in [0, 1].

    Images are decoded and resized once, into a file that is memory-mapped from then on
    (:func:`~fedmtl.data.readers.images.cached_images`). The dataset's domain states the bounds of the pixels.

    Args:
        root: the folder ``celeba`` or the one around it, or LEAF JSON: a file, a zip or a folder.
        target: the attribute to predict, a column of ``list_attr_celeba.txt``; LEAF JSON has labels of its own.
        size: of the images after resizing: one number of pixels, or height and width.
        min_examples: celebrities with fewer images are left out; 5 as in LEAF.
        clients: keep that many celebrities, drawn at random; None keeps all.
        part: ``"train"``, ``"valid"`` or ``"test"`` of ``list_eval_partition.txt``, whose celebrities are distinct;
            ``"all"`` reads all of them and does not need that file.
        test_fraction: share of each celebrity's images held out for test; None keeps the split of LEAF's folders
            ``train`` and ``test``, and without one means 0.2.
        seed: of the split and of the choice of celebrities.
        images: the folder of the images; None looks for ``img_align_celeba`` in ``root`` and, for LEAF JSON, where
            LEAF's own scripts put it.
        cache: the folder for decoded images; None for ``fedmtl_cache`` beside the folder of the images.
        mapped: leave the decoded images on disk; False reads them into memory (21 KB an image of 84 x 84).
        progress: show a progress bar while images are decoded.

    Raises:
        DataError: a missing, truncated or malformed file, named with its line and column.
        ConfigError: an impossible setting.
    """
    root = Path(root)
    one_of("read_celeba", ("all", *_PARTS), part=part)
    base = next((folder for folder in (root, root / "celeba") if (folder / ATTRIBUTES).is_file()), None)
    sides: Sequence[dict[str, Pair]]
    if base is not None:
        sides = _read_original(base, target, part), {}
        folder = Path(images) if images is not None else base / IMAGES
    else:
        sides = read_sides(root, _names, other=f"the folder of {ATTRIBUTES} and {IDENTITIES}")
        folder = Path(images) if images is not None else _leaf_images(root)
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; it must hold the images, such as 000001.jpg.")
    if clients is not None:  # the others' images need not be decoded
        kept = choose(
            *sides, str(root), min_examples=min_examples, draw=clients, seed=seed, test_fraction=test_fraction
        )
        sides = [{client: side[client] for client in kept if client in side} for side in sides]
    return image_clients(
        sides,
        folder,
        size=size,
        cache=Path(cache) if cache is not None else folder.parent / "fedmtl_cache",
        mapped=mapped,
        progress=progress,
        name="celeba",
        source=str(root),
        classes=2,
        test_fraction=test_fraction,
        seed=seed,
        min_examples=min_examples,
    )


def _names(x: list[Any], y: list[Any], where: str) -> Pair:
    """Return LEAF's examples as names of images."""
    for number, name in enumerate(x):
        if not isinstance(name, str):
            raise DataError(f"{where}, example {number}, field 'x' holds {name!r}; accepted: names of image files.")
        _check_name(name, f"{where}, example {number}, field 'x'")
    return np.array(x, dtype=str), numbers(y, where, "y")


def _check_name(name: str, where: str) -> None:
    if not name or Path(name).name != name:
        raise DataError(f"{where} holds {name!r}, which is no name of a file.")


def _leaf_images(root: Path) -> Path:
    """Return the folder of the images: in the folder of the JSON or one above, plainly or under ``raw`` as LEAF has
    it."""
    start = root if root.is_dir() else root.parent
    near = [start, start.parent, start.parent.parent]
    found = (folder / name for folder in near for name in (IMAGES, f"raw/{IMAGES}"))
    return next((folder for folder in found if folder.is_dir()), start / IMAGES)


def _read_original(base: Path, target: str, part: str) -> dict[str, Pair]:
    """Return names of images (n,) and labels (n,) of every celebrity, in the order of the identities."""
    labels = _attribute(base / ATTRIBUTES, target)
    wanted = None if part == "all" else _part_of(base / PARTITION, _PARTS.index(part))
    found: dict[str, tuple[list[str], list[int]]] = {}
    seen: set[str] = set()
    for where, (name, identity) in _fields(base / IDENTITIES, ("image", "identity")):
        _check_name(name, f"{where}, column 'image'")
        if name in seen:
            raise DataError(f"{where}, column 'image' holds {name!r}, which is on an earlier line too; accepted: once.")
        seen.add(name)
        if not identity.isdigit():
            raise DataError(f"{where}, column 'identity' holds {identity!r}; accepted: a whole number from 0 on.")
        if name not in labels:
            raise DataError(f"{base / ATTRIBUTES}: image {name!r} of {IDENTITIES} has no line; every image needs one.")
        if wanted is None or name in wanted:
            xs, ys = found.setdefault(str(int(identity)), ([], []))
            xs.append(name)
            ys.append(labels[name])
    if not found:
        raise DataError(f"{base / IDENTITIES} names no images; at least one is needed.")
    order = sorted(found, key=int)
    return {identity: (np.array(found[identity][0]), np.array(found[identity][1], np.int64)) for identity in order}


def _attribute(file: Path, target: str) -> dict[str, int]:
    """Return the label of every image, 1 where it has the attribute.

    The file has a count, a line of names, and a line of -1 and 1 for each image.
    """
    lines = _lines(file)
    if len(lines) < 2 or not lines[0].strip().isdigit():
        raise DataError(f"{file}: line 1 must be the number of images, and line 2 the names of the attributes.")
    names = lines[1].split()
    if target not in names:
        raise ConfigError(f"read_celeba.target is {target!r}; accepted: {', '.join(names)}.")
    labels: dict[str, int] = {}
    for where, (name, *values) in _fields(file, ("image", *names), after=2):
        value = values[names.index(target)]
        if value not in ("1", "-1"):
            raise DataError(f"{where}, column {target!r} holds {value!r}; accepted: 1 or -1.")
        labels[name] = int(value == "1")
    if len(labels) != int(lines[0]):
        raise DataError(f"{file}: line 1 says {lines[0].strip()} images and {len(labels)} follow; it may be truncated.")
    return labels


def _part_of(file: Path, part: int) -> set[str]:
    """Return the images of one part of the original division."""
    wanted = set()
    for where, (name, number) in _fields(file, ("image", "part")):
        if number not in ("0", "1", "2"):
            raise DataError(f"{where}, column 'part' holds {number!r}; accepted: 0, 1 or 2.")
        if int(number) == part:
            wanted.add(name)
    return wanted


def _fields(file: Path, columns: Sequence[str], *, after: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the fields of every line ``after`` the first ones that is not empty."""
    for number, line in enumerate(_lines(file)[after:], start=after + 1):
        where, fields = f"{file}: line {number}", line.split()
        if fields and len(fields) != len(columns):
            raise DataError(f"{where} has {len(fields)} columns; accepted: {len(columns)}, {', '.join(columns)}.")
        if fields:
            yield where, fields


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}); it is one of CelebA's own text files.") from error
