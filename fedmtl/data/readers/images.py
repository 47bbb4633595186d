"""The reader of image files, which are decoded and resized once into one memory-mapped array."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..._extras import Image, installed, progress
from ..._extras import console as terminal
from ..._extras import pandas as pd
from ..._files import sync_folder
from ...errors import ConfigError, DataError
from ..assemble import taking_part
from ..dataset import FederatedDataset
from ..examples import pixel_domain
from ..loaders import reader, with_settings
from ..partition import Partition
from ..transforms import MappedImages
from .columns import Table
from .folders import check_file, listed_files
from .pictures import as_type, decode, is_deep

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
_UNREAD = (".heic", ".heif", ".avif", ".jp2", ".jxl", ".dcm", ".dng")

_FORMAT = "2"  # of the cache: another one is decoded anew
_LEFT_SECONDS = 86400.0
_THREADS = 8
Item = TypeVar("Item")
logger = logging.getLogger("fedmtl")


@dataclass(frozen=True, eq=False)
class ImagesSettings:
    """Settings of :func:`~fedmtl.data.read_images`, which takes them as its arguments.

    Args:
        root: the folder.
        size: of the images after resizing: one number of pixels, or height and width.
        table: a file as in :func:`~fedmtl.data.read_table`, or a table of pandas, with a row an
            image; a file name without a folder is looked for in ``root``.
        image: the column with the path of the image in ``root``.
        client: the column with the client of each image.
        target: the column with its label.
        labels: the labels in order of their class number. None takes those that occur, in order of
            their text, which a run with noise refuses.
        partition: deals the images to clients, such as :class:`~fedmtl.data.Dirichlet`, if
            neither folders nor a column name these.
        clients: number of clients, drawn at random from the others; None takes all.
        min_examples: clients with fewer images are left out.
        test_fraction: share of each client's images held out for test.
        seed: of the partition, the split and the draw of clients.
        cache: the folder for decoded images; None for ``fedmtl_cache`` beside ``root``.
    """

    root: str | Path
    _: KW_ONLY
    size: int | Sequence[int] = 64
    table: str | Path | pd.DataFrame | None = None
    image: str = "file_name"
    client: str | None = None
    target: str | None = None
    labels: Sequence[str] | None = None
    partition: Partition | None = None
    clients: int | None = None
    min_examples: int = 2
    test_fraction: float = 0.2
    seed: int = 0
    cache: str | Path | None = None


@reader("images")
@with_settings(ImagesSettings)
def read_images(settings: ImagesSettings) -> FederatedDataset:
    """Reads a folder of images: features (3, height, width) in [0, 1], which the dataset's domain
    states.

    Without a table the folders name clients and labels, ``root/CLIENT/LABEL/x.png``, or with a
    partition the labels, ``root/LABEL/x.png``. Images are decoded and resized once
    (:func:`cached_images`), as a viewer shows them (:func:`~fedmtl.data.readers.pictures.decode`).
    Names that begin with a dot are passed over, links are followed.

    Args:
        settings: the fields of :class:`~fedmtl.data.ImagesSettings`, each an argument of its own:
            ``read_images("photographs", size=32, min_examples=10)``.

    Returns:
        Features (3, height, width) and int64 labels; ids are the names of the folders or the values
        of the column.

    Raises:
        DataError: a missing or damaged image, or a malformed table.
        ConfigError: an impossible setting.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> from fedmtl.data import read_images
        >>> with TemporaryDirectory() as folder:
        ...     for place in ("ann/cat/1", "ann/cat/2", "ann/dog/1", "bob/dog/1", "bob/dog/2"):
        ...         file = Path(folder, "pictures", f"{place}.png")
        ...         file.parent.mkdir(parents=True, exist_ok=True)
        ...         Image.new("RGB", (8, 8)).save(file)
        ...     data = read_images(Path(folder, "pictures"), size=4, labels=["cat", "dog"])
        ...     data.ids, data.spec.shape, data.spec.classes
        (('ann', 'bob'), (3, 4, 4), 2)
    """
    folder = Path(settings.root)
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give one of images.")
    table, image, client, target = _labelled(settings, folder)
    columns = [column for column in (image, client, target) if column is not None]
    rows = Table.of(table, columns, str(folder))
    rows.check_columns(columns)
    y, names = rows.labels(target, settings.labels)
    files = rows.written(image)
    if client is not None and settings.table is None:
        # a folder is named, whatever its name is
        rows = replace(rows, client_of=rows.written(client))
    parts = rows.parts(client, settings.partition, y, settings.seed)
    data = image_clients(
        [{owner: (files[index], y[index]) for owner, index in parts.items()}, {}],
        folder,
        size=settings.size,
        cache=settings.cache,
        name=folder.name,
        source=str(folder),
        classes=len(names),
        test_fraction=settings.test_fraction,
        seed=settings.seed,
        min_examples=settings.min_examples,
        draw=settings.clients,
    )
    if settings.labels is not None:
        return data
    # the labels were read off the rows, so their number is private
    return replace(data, inferred=("classes",), verify=False)


def _labelled(
    settings: ImagesSettings, folder: Path
) -> tuple[str | Path | pd.DataFrame, str, str | None, str]:
    """Returns the table of the images and its columns: image, client and target; the client is None
    if a partition deals the images."""
    table = settings.table
    client = settings.client
    target = settings.target
    if table is None:
        if (client, target) != (None, None):
            raise ConfigError(
                "read_images.table is None, so the folders name client and target; give no column."
            )
        folders = ["folder of the label"]
        if not settings.partition:
            client = "folder of the client"
            folders.insert(0, client)
        return _listed(folder, folders), "image", client, "folder of the label"
    if target is None:
        raise ConfigError(
            "read_images.target is None; give the column with the label of each image."
        )
    if isinstance(table, (str, Path)) and not Path(table).is_file():
        # a name such as labels.csv lies beside the images
        table = folder / table
    return table, settings.image, client, target


def _listed(root: Path, folders: Sequence[str]) -> pd.DataFrame:
    """Returns the images of a folder, a column for each level of its folders. Logs if there are
    some of other kinds.

    Raises:
        DataError: no image, or one at another depth, and as :func:`listed_files`.
    """
    rows = []
    # one is enough to say so; a folder may hold thousands
    for file in listed_files(root, _UNREAD)[:1]:
        logger.warning(
            "%s: images of kinds that are not read are passed over, such as %s; convert them",
            root,
            file,
        )
    for file in listed_files(root, SUFFIXES):
        *names, _ = file.relative_to(root).parts
        if len(names) != len(folders):
            layout = "root/CLIENT/LABEL/FILE"
            if len(folders) == 1:
                layout = "root/LABEL/FILE with a partition"
            raise DataError(
                f"{file} is {len(names)} folders deep; accepted: {layout}, or a table "
                "of the images."
            )
        rows.append((str(file.relative_to(root)), *names))
    if not rows:
        raise DataError(f"{root} holds no images; accepted: {', '.join(SUFFIXES)} files.")
    return pd.DataFrame(rows, columns=["image", *folders])


def image_clients(
    sides: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]],
    folder: Path,
    *,
    size: int | Sequence[int],
    cache: str | Path | None,
    name: str,
    **options: Any,
) -> FederatedDataset:
    """Returns a dataset of images from their file names.

    Args:
        sides: each client's names of images (n,) and labels (n,), for training and for test.
        folder: of the images.
        size: of the images after resizing: one number of pixels, or height and width.
        cache: the folder for decoded images; None for ``fedmtl_cache`` beside ``folder``.
        name: for messages, reports and the decoded file.
        options: as in :meth:`FederatedDataset.from_tensors`.

    Raises:
        ConfigError: an impossible size, or an option outside its range.
        DataError: an image that cannot be read, or malformed data.
    """
    pixels: tuple[int, ...] = (size, size) if isinstance(size, int) else tuple(size)
    if len(pixels) != 2 or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pixels
    ):
        raise ConfigError(
            f"data.size is {size!r}; it must be a number of pixels, or height and width."
        )
    # before the images are decoded, which takes longest
    sides = taking_part(sides, **options)
    names = np.unique(np.concatenate([x for side in sides for x, _ in side.values()]))
    if cache is None:
        place = folder.parent / "fedmtl_cache"
    else:
        place = Path(cache)
    file = cached_images(folder, names.tolist(), pixels, place, name=name).resolve()
    # 255 or 65535, by the depth of the images in the file
    white = np.iinfo(np.load(file, mmap_mode="r").dtype).max
    train, test = (
        {client: (np.searchsorted(names, x), y) for client, (x, y) in side.items()}
        for side in sides
    )
    return FederatedDataset.from_tensors(
        train,
        test=test or None,
        transform=MappedImages(str(file), 1 / white),
        domain=pixel_domain((3, *pixels)),
        name=name,
        **options,
    )


def cached_images(
    root: Path, images: Sequence[str], size: tuple[int, int], folder: Path, *, name: str
) -> Path:
    """Decodes and resizes images into one NumPy file, unless that has been done before.

    The file's name has a fingerprint of the size and of every image's path, length and time of
    change, so that other images, or images that have changed, make another file. It is written
    under a temporary name and renamed when it is complete: a process that is killed leaves no file
    under the final name.

    Args:
        root: the folder of the images.
        images: their paths in it, at least 1.
        size: (height, width) of all images in the array.
        folder: the folder of the file; made if it is missing.
        name: the first part of the file's name.

    Returns:
        The file (len(images), 3, height, width): uint16 if an image has more than 8 bits a pixel,
        else uint8.

    Raises:
        DataError: a missing or damaged image, or a folder that cannot be written.
    """
    target = folder / f"{name}-{size[0]}x{size[1]}-{_fingerprint(root, images, size)}.npy"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".{target.stem}-*.tmp"):  # of a process that was killed
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        # in the same folder, since a rename is atomic only within one file system
        with tempfile.TemporaryDirectory(
            prefix=f".{target.stem}-", suffix=".tmp", dir=folder
        ) as place:
            file = Path(place) / target.name
            _decode_all(root, images, size, file, name)
            os.replace(file, target)
        # else a crash could leave the new name without the numbers
        sync_folder(folder)
    except OSError as error:
        raise DataError(
            f"{folder}: images cannot be cached there ({error}); give another folder as cache."
        ) from error
    return target


def _decode_all(
    root: Path, images: Sequence[str], size: tuple[int, int], file: Path, name: str
) -> None:
    """Writes the images, decoded and resized, to a new NumPy file."""
    places = [root / image for image in images]
    # Pillow lets other threads run while it decodes
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    with pool, warnings.catch_warnings():
        # from twice as many pixels on it is an error
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        depths = list(pool.map(lambda place: is_deep(place, str(place)), places))
        dtype = np.dtype(np.uint16 if any(depths) else np.uint8)
        array = np.lib.format.open_memmap(
            file, mode="w+", dtype=dtype, shape=(len(images), 3, *size)
        )
        decoded = pool.map(lambda place: decode(place, str(place), size=size), places)
        for number, pixels in enumerate(with_progress(decoded, f"decoding {name}", len(images))):
            array[number] = as_type(pixels, dtype)
        array.flush()


def with_progress(items: Iterable[Item], text: str, total: int | None = None) -> Iterable[Item]:
    """Returns ``items``; with a progress bar if standard error is a terminal and rich is
    installed."""
    if not sys.stderr.isatty() or not installed("rich"):
        return items
    place = terminal.Console(stderr=True)
    return progress.track(items, text, total, console=place, transient=True)


def _fingerprint(root: Path, images: Sequence[str], size: tuple[int, int]) -> str:
    digest = hashlib.blake2b(f"{_FORMAT} {size}".encode(), digest_size=8)
    for image in images:
        status = check_file(root / image)
        # the bytes themselves would have to be read for every start of a run
        digest.update(f"{image}\0{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
