"""CelebA, faces by celebrity (Liu et al., "Deep learning face attributes in the wild", ICCV 2015).

In the two forms in which it is distributed:

- the original files, as ``torchvision.datasets.CelebA`` lays them out in a folder ``celeba``;
- LEAF JSON whose examples are names of images and labels, beside the folder ``img_align_celeba``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._check import check_arguments
from ...errors import ConfigError, DataError, first_line
from ..dataset import FederatedDataset
from ..loaders import reader
from ..rows import by_number
from .images import image_clients
from .leaf import Pair, read_sides

IMAGES = "img_align_celeba"
ATTRIBUTES = "list_attr_celeba.txt"


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
        DataError: a missing file, one whose checksum is not the original's, or malformed LEAF JSON.
        ConfigError: an impossible setting.
    """
    root = Path(root)
    base = next((folder for folder in (root, root / "celeba") if (folder / ATTRIBUTES).is_file()), None)
    if base is not None:
        sides, folder = (_read_original(base, target), dict[str, Pair]()), base / IMAGES
    else:
        sides, folder = read_sides(root, _names, other=f"the folder of {ATTRIBUTES}"), _leaf_images(root)
    folder = folder if images is None else Path(images)
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; it must hold the images, such as 000001.jpg.")
    return image_clients(
        sides,
        folder,
        size=size,
        cache=cache,
        name="celeba",
        source=str(root),
        classes=2,
        draw=clients,
        min_examples=min_examples,
        seed=seed,
        test_fraction=test_fraction,
    )


def _names(x: list[Any], where: str) -> np.ndarray:
    """Return LEAF's features as names of images."""
    for number, name in enumerate(x):
        if not (isinstance(name, str) and name and Path(name).name == name):
            raise DataError(
                f"{where}, example {number}, field 'x' holds {name!r}; accepted: the name of an image file."
            )
    return np.array(x, dtype=str)


def _leaf_images(root: Path) -> Path:
    """Return the folder of the images: in the folder of the JSON or one above, plainly or under ``raw`` as LEAF has
    it."""
    start = root if root.is_dir() else root.parent
    near = [start, start.parent, start.parent.parent]
    places = (folder / name for folder in near for name in (IMAGES, f"raw/{IMAGES}"))
    return next((folder for folder in places if folder.is_dir()), start / IMAGES)


def _read_original(folder: Path, target: str) -> dict[str, Pair]:
    """Return names of images (n,) and labels (n,) of every celebrity, in the order of the identities, of files whose
    checksums torchvision verifies."""
    from torchvision.datasets import CelebA

    try:
        data = CelebA(folder.parent, split="all", target_type=["attr", "identity"])
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"{folder} is missing or damaged ({first_line(error)}); give the folder celeba as torchvision lays it out, "
            f"with {IMAGES} and all the .txt files."
        ) from error
    names = [name for name in data.attr_names if name]
    if target not in names:
        raise ConfigError(f"read_celeba.target is {target!r}; accepted: {', '.join(names)}.")
    files, y = np.array(data.filename, dtype=str), data.attr[:, names.index(target)].numpy()
    ids, number = np.unique(data.identity[:, 0].numpy(), return_inverse=True)
    return {client: (files[index], y[index]) for client, index in by_number(number, ids).items()}
