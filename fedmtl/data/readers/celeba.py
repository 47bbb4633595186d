"""CelebA, faces by celebrity (Liu et al., "Deep learning face attributes in the wild", ICCV 2015).

In the two forms in which it is distributed:

- the original files, as ``torchvision.datasets.CelebA`` lays them out: a folder ``celeba`` with ``img_align_celeba/``,
  ``list_attr_celeba.txt`` and ``identity_CelebA.txt``;
- LEAF JSON whose examples are names of images and labels, beside the folder ``img_align_celeba``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._check import check_arguments
from ...errors import ConfigError, DataError
from ..assemble import drawn
from ..dataset import FederatedDataset
from ..loaders import reader
from ..rows import by_number
from .columns import AS_WRITTEN, Table, loaded
from .images import image_clients
from .leaf import Pair, read_sides

IMAGES = "img_align_celeba"
ATTRIBUTES, IDENTITIES = "list_attr_celeba.txt", "identity_CelebA.txt"
FILE_NAME = "the name of an image file"


@reader("celeba")
@check_arguments
def read_celeba(
    root: str | Path,
    *,
    target: str = "Smiling",
    size: int | Sequence[int] = 84,
    min_examples: int = 5,
    clients: int | None = None,
    test_fraction: float | None = 0.2,
    seed: int = 0,
    images: str | Path | None = None,
    cache: str | Path | None = None,
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
        test_fraction: share of each celebrity's images held out for test; None keeps the split of LEAF's folders
            ``train`` and ``test``, and without one means 0.2.
        seed: of the split and of the choice of celebrities.
        images: the folder of the images; None looks for ``img_align_celeba`` in ``root`` and, for LEAF JSON, where
            LEAF's own scripts put it.
        cache: the folder for decoded images; None for ``fedmtl_cache`` beside the folder of the images.

    Raises:
        DataError: a missing, truncated or malformed file, named with its line and column.
        ConfigError: an impossible setting.
    """
    root = Path(root)
    base = next((folder for folder in (root, root / "celeba") if (folder / ATTRIBUTES).is_file()), None)
    sides: Sequence[Mapping[str, Pair]]
    if base is not None:
        sides = _read_original(base, target), {}
        folder = Path(images) if images is not None else base / IMAGES
    else:
        sides = read_sides(root, _names, other=f"the folder of {ATTRIBUTES} and {IDENTITIES}")
        folder = Path(images) if images is not None else _leaf_images(root)
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; it must hold the images, such as 000001.jpg.")
    options: dict[str, Any] = {"min_examples": min_examples, "seed": seed, "test_fraction": test_fraction}
    sides = drawn(sides, str(root), draw=clients, **options)
    return image_clients(sides, folder, size=size, cache=cache, name="celeba", source=str(root), classes=2, **options)


def _names(x: list[Any], where: str) -> np.ndarray:
    """Return LEAF's features as names of images."""
    for number, name in enumerate(x):
        if not _is_file_name(name):
            raise DataError(f"{where}, example {number}, field 'x' holds {name!r}; accepted: {FILE_NAME}.")
    return np.array(x, dtype=str)


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and Path(name).name == name


def _leaf_images(root: Path) -> Path:
    """Return the folder of the images: in the folder of the JSON or one above, plainly or under ``raw`` as LEAF has
    it."""
    start = root if root.is_dir() else root.parent
    near = [start, start.parent, start.parent.parent]
    places = (folder / name for folder in near for name in (IMAGES, f"raw/{IMAGES}"))
    return next((folder for folder in places if folder.is_dir()), start / IMAGES)


def _read_original(base: Path, target: str) -> dict[str, Pair]:
    """Return names of images (n,) and labels (n,) of every celebrity, in the order of the identities."""
    people, attributes = _table(base / IDENTITIES, ("image", "identity")), _table(base / ATTRIBUTES)
    names = list(attributes.frame.columns[1:])
    if target not in names:
        raise ConfigError(f"read_celeba.target is {target!r}; accepted: {', '.join(names)}.")
    label = attributes.frame.set_index("image")[target]
    attributes.refuse(~label.isin(("1", "-1")).to_numpy(), target, "1 or -1")
    image, identity = people.frame["image"], people.frame["identity"]
    people.refuse(~image.map(_is_file_name).to_numpy(dtype=bool), "image", FILE_NAME)
    people.refuse(image.duplicated().to_numpy(), "image", "each image once")
    people.refuse(~image.isin(label.index).to_numpy(), "image", f"an image that has a line in {ATTRIBUTES}")
    people.refuse(~identity.str.fullmatch("[0-9]+").to_numpy(dtype=bool), "identity", "a whole number from 0 on")
    if not len(image):
        raise DataError(f"{base / IDENTITIES} names no images; at least one is needed.")
    files = image.to_numpy(dtype=str)
    y = (label[files] == "1").to_numpy(dtype=np.int64)
    ids, number = np.unique(identity.astype(np.int64), return_inverse=True)
    return {client: (files[index], y[index]) for client, index in by_number(number, ids).items()}


def _table(file: Path, columns: Sequence[str] | None = None) -> Table:
    """Return the lines of a file as texts.

    Args:
        file: with a line an image, fields with spaces between them.
        columns: names of the fields. None takes them from line 2, where that of the image is missing.
    """
    import pandas as pd

    options: dict[str, Any] = {"skiprows": 1} if columns is None else {"names": columns}
    frame = loaded(pd.read_csv, file, "a text file of CelebA", sep=r"\s+", dtype=str, **options, **AS_WRITTEN)
    table = Table(frame.reset_index(names="image") if columns is None else frame, file)
    table.refuse(table.frame.isna().any(axis=1).to_numpy(), str(table.frame.columns[-1]), "a value in every column")
    return table
