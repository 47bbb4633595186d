"""Image files, decoded and resized once into one array on disk, which is then memory-mapped."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..._check import positive_int
from ..._files import sync_folder
from ...errors import DataError

_FORMAT = "1"  # of the cache: another one is decoded anew
_SYNC_EVERY = 1024  # images
_LEFT_SECONDS = 3600.0
_THREADS = 8
Item = TypeVar("Item")


def decode(source: Path | bytes, where: str, *, size: tuple[int, int] | None = None, mode: str = "RGB") -> np.ndarray:
    """Decode an image file.

    Args:
        source: the file, or its content.
        where: names it in messages.
        size: (height, width) of the result, by bicubic interpolation; None keeps the image's own.
        mode: ``"RGB"``, or ``"L"`` for grey.

    Returns:
        uint8 (channels, height, width).

    Raises:
        DataError: no image, or a damaged one.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            plain = image.convert(mode)
            if size is not None:
                plain = plain.resize((size[1], size[0]), Image.Resampling.BICUBIC)
            pixels = np.asarray(plain, dtype=np.uint8)
    except FileNotFoundError as error:
        raise DataError(f"{where} does not exist; every image that is listed must be there.") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} is not a readable image ({error}); it may be truncated.") from error
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def cached_images(
    files: Sequence[Path], size: tuple[int, int], folder: Path, *, name: str, progress: bool = True
) -> Path:
    """Decode and resize images into one NumPy file, unless that has been done before.

    The file's name has a fingerprint of the size and of every image's name, length and time of change, so that other
    images, or images that have changed, make another file. It is written under a temporary name and renamed when it is
    complete: a process that is killed leaves no file under the final name.

    Args:
        files: the images, at least 1.
        size: (height, width) of all images in the array.
        folder: where the file goes; made where it is missing.
        name: the first part of the file's name.
        progress: show a progress bar on standard error while images are decoded.

    Returns:
        The file, uint8 (len(files), 3, height, width).

    Raises:
        DataError: a missing or damaged image, or a folder that cannot be written.
    """
    positive_int("size", height=size[0], width=size[1])
    target = folder / f"{name}-{size[0]}x{size[1]}-{_fingerprint(files, size)}.npy"
    if target.is_file():
        return target
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".{target.stem}-*.tmp"):  # of a process that was killed: one that runs writes often
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                left.unlink(missing_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=".tmp", dir=folder)
        os.close(handle)
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=(len(files), 3, *size))
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            decoded = pool.map(lambda file: decode(file, str(file), size=size), files, chunksize=16)
            for number, pixels in enumerate(shown(decoded, f"decoding {name}", len(files), progress)):
                array[number] = pixels
                if number % _SYNC_EVERY == 0:
                    array.flush()
        array.flush()
        del array
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
        sync_folder(folder)
    except OSError as error:
        raise DataError(f"{folder}: images cannot be cached there ({error}); give another folder as cache.") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
    return target


def shown(items: Iterable[Item], text: str, total: int | None = None, progress: bool = True) -> Iterator[Item]:
    """Yield ``items`` beside a progress bar on standard error, which disappears at the end."""
    if not progress:
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()]
    with Progress(*columns, TimeRemainingColumn(compact=True), console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=len(items) if isinstance(items, Sized) else total, description=text)


def _fingerprint(files: Sequence[Path], size: tuple[int, int]) -> str:
    digest = hashlib.blake2b(f"{_FORMAT} {size}".encode(), digest_size=8)
    for file in files:
        try:
            found = file.stat()
        except OSError as error:
            raise DataError(f"{file} does not exist; every image that is listed must be there.") from error
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()
