"""Pixels of image files: scaled by the type of their numbers, upright, on white if they are
transparent."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..._extras import Image, ImageOps
from ...errors import DataError, first_line
from .folders import unreadable

_WHITE = 65535
# tags of a TIFF file
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_WHITE_IS_ZERO = 0


def decode(
    source: Path | bytes, where: str, *, size: tuple[int, int] | None = None, mode: str = "RGB"
) -> np.ndarray:
    """Decodes an image file, as a viewer shows it.

    The largest number of the result's type is white. Pixels of 16 bits in grey are scaled by 65535
    (by 4095 for 12 bits), floats must be in [0, 1], colours of 16 bits are read with 8. An
    orientation tag is followed. Transparent pixels show white. A photo with previews (MPO) is read
    without them.

    Args:
        source: the file, or its content.
        where: names it in messages.
        size: (height, width) of the result, by bicubic interpolation; None keeps the image's own.
        mode: ``"RGB"``, or ``"L"`` for grey.

    Returns:
        uint8 (channels, height, width), or uint16 if a pixel has more than 8 bits
        (:func:`is_deep`).

    Raises:
        DataError: no image, a damaged one, or one without a known white.
    """
    with _opened(source, where) as image:
        if _deep(image):
            values = _shares(image, where)
            if size is not None:
                scaled = Image.fromarray(values).resize(
                    (size[1], size[0]), Image.Resampling.BICUBIC
                )
                values = np.asarray(scaled).clip(0.0, 1.0)
            grey = np.rint(values * _WHITE).astype(np.uint16)
            if mode == "RGB":
                return np.repeat(grey[None], 3, axis=0)
            return grey[None]
        upright = _upright(image)
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        plain = upright.convert(mode)
        if size is not None:
            plain = plain.resize((size[1], size[0]), Image.Resampling.BICUBIC)
        pixels = np.asarray(plain, dtype=np.uint8)
    if pixels.ndim == 2:
        return pixels[None]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def is_deep(source: Path, where: str) -> bool:
    """Tells by its header whether pixels of an image file have more than 8 bits.

    Raises:
        DataError: as :func:`decode`, as far as the header shows it.
    """
    with _opened(source, where) as image:
        return _deep(image)


def as_type(pixels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns pixels, uint8 or uint16, in one of these types, with the same white."""
    if pixels.dtype == dtype:
        return pixels
    if dtype == np.uint16:
        return pixels.astype(np.uint16) * np.uint16(257)
    return np.rint(pixels / 257).astype(np.uint8)


@contextlib.contextmanager
def _opened(source: Path | bytes, where: str) -> Iterator[Image.Image]:
    """Opens an image file of one picture; whatever goes wrong with it in the block is a
    :class:`DataError`."""
    content: io.BytesIO | Path = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(content) as image:
            pictures = getattr(image, "n_frames", 1)
            if pictures > 1 and image.format != "MPO":
                raise DataError(
                    f"{where} holds {pictures} pictures, pages or those of an "
                    "animation; accepted: one."
                )
            yield image
    except DataError:
        raise
    except Image.UnidentifiedImageError as error:
        empty = not (source if isinstance(source, bytes) else source.stat().st_size)
        reason = "its content begins like no image"
        if empty:
            reason = "it is empty"
        raise DataError(
            f"{where} is not a readable image ({reason}); it may be truncated."
        ) from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{where} has too many pixels for Pillow ({first_line(error)}); make it smaller."
        ) from error
    except Exception as error:  # of damaged files Pillow raises errors of many kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(where, error) from error
        raise DataError(
            f"{where} is not a readable image ({first_line(error)}); it may be truncated."
        ) from error


def _deep(image: Image.Image) -> bool:
    return image.mode == "F" or image.mode.startswith("I")


def _upright(image: Image.Image) -> Image.Image:
    """Returns an image turned as its tag says; tags that cannot be read turn nothing, as in
    viewers."""
    image.load()
    try:
        image.getexif()
    except Exception:  # of many kinds, as above
        return image
    return ImageOps.exif_transpose(image)


def _shares(image: Image.Image, where: str) -> np.ndarray:
    """Returns the pixels of a grey image of more than 8 bits as shares of white: float32 (height,
    width) in [0, 1]."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
    negative = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    white = 2**bits - 1
    if image.mode == "F":
        white = 1
    elif image.mode == "I" and image.format not in ("PPM", "PNG"):  # which Pillow scales to 16 bits
        raise DataError(
            f"{where} holds whole numbers of 32 bits or with a sign, of which nothing says what is "
            "white; accepted: whole numbers without a sign of 8 or 16 bits, which are shares of "
            "255 or 65535, or floats in [0, 1]."
        )
    transparent = image.info.get("transparency")
    values = np.asarray(_upright(image)).astype(np.float32)
    if not (values.min() >= 0 and values.max() <= white):
        wrong = values[~((values >= 0) & (values <= white))][0]
        raise DataError(
            f"{where} holds the number {wrong:g}; accepted: floats in [0, 1], or whole numbers of "
            "8 or 16 bits."
        )
    if transparent is not None:
        values = np.where(values == transparent, np.float32(white), values)
    shares = values / np.float32(white)
    if negative:
        shares = 1 - shares
    return shares
