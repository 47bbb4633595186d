"""CelebA, faces by celebrity (Liu et al., "Deep learning face attributes in the wild", ICCV 2015).

In the two forms in which it is distributed:

- the original files in a folder ``celeba``, or others in their layout: ``identity_CelebA.txt``,
  with an image and its celebrity a line, ``list_attr_celeba.txt``, with the number of images, the
  names of the attributes, and an image with -1 or 1 for each of them a line, and the folder
  ``img_align_celeba``;
- LEAF JSON whose examples are names of images and labels, beside the folder ``img_align_celeba``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..._check import check_arguments
from ..._extras import vision_data
from ...errors import ConfigError, DataError, first_line
from ..dataset import FederatedDataset
from ..loaders import reader, with_settings
from ..rows import by_number
from .images import image_clients
from .leaf import Pair, read_sides

IMAGES = "img_align_celeba"
IDENTITIES = "identity_CelebA.txt"
ATTRIBUTES = "list_attr_celeba.txt"
_LABELS = {"-1": 0, "1": 1}
_SHOWN = 60  # letters of a line that are printed
Line = tuple[str, list[str]]
"""The place of a line, for messages, and its fields."""


@dataclass(frozen=True)
class CelebASettings:
    """Settings of :func:`~fedmtl.data.read_celeba`, which takes them as its arguments.

    Args:
        root: the folder ``celeba`` or the one around it, or LEAF JSON: a file, a zip or a folder.
        target: the attribute to predict, a column of ``list_attr_celeba.txt``; LEAF JSON has labels
            of its own.
        size: of the images after resizing: one number of pixels, or height and width.
        min_examples: celebrities with fewer images are left out; 5 as in LEAF.
        clients: keep that many celebrities, drawn at random; None keeps all.
        test_fraction: share of each celebrity's images held out for test; None keeps the split of
            LEAF's folders ``train`` and ``test``, and without one means 0.2.
        seed: of the split and of the choice of celebrities.
        images: the folder of the images; None looks for ``img_align_celeba`` in ``root`` and, for
            LEAF JSON, where LEAF's own scripts put it.
        cache: the folder for decoded images; None for ``fedmtl_cache`` beside the folder of the
            images.
    """

    root: str | Path
    _: KW_ONLY
    target: str = "Smiling"
    size: int | Sequence[int] = 84
    min_examples: int = 5
    clients: int | None = None
    test_fraction: float | None = 0.2
    seed: int = 0
    images: str | Path | None = None
    cache: str | Path | None = None


@reader("celeba")
@check_arguments
@with_settings(CelebASettings)
def read_celeba(settings: CelebASettings) -> FederatedDataset:
    """Reads CelebA: a client a celebrity, two classes, features (3, height, width) in [0, 1].

    Images are decoded and resized once, into a file that is memory-mapped from then on
    (:func:`~fedmtl.data.readers.images.cached_images`). The dataset's domain states the bounds of
    the pixels. Its notes say if a list is not the original one.

    Args:
        settings: the fields of :class:`~fedmtl.data.CelebASettings`, each an argument of its own:
            ``read_celeba("celeba", target="Smiling", clients=100)``.

    Returns:
        Features (3, height, width), stored as uint8 and read as floats in [0, 1], and int64 labels,
        1 for the attribute. Ids are the numbers of the celebrities.

    Raises:
        DataError: a missing or damaged file, or malformed LEAF JSON.
        ConfigError: an impossible setting.
    """
    root = Path(settings.root)
    base = next(
        (folder for folder in (root, root / "celeba") if (folder / ATTRIBUTES).is_file()), None
    )
    if base is not None:
        sides = _read_lists(base, settings.target), dict[str, Pair]()
        folder = base / IMAGES
        notes = _notes(base)
    else:
        sides = read_sides(root, _names, other=f"the folder of {ATTRIBUTES}")
        folder = _leaf_images(root)
        notes = ()
    if settings.images is not None:
        folder = Path(settings.images)
    if not folder.is_dir():
        raise DataError(f"{folder} is missing; it must hold the images, such as 000001.jpg.")
    data = image_clients(
        sides,
        folder,
        size=settings.size,
        cache=settings.cache,
        name="celeba",
        source=str(root),
        classes=2,
        draw=settings.clients,
        min_examples=settings.min_examples,
        seed=settings.seed,
        test_fraction=settings.test_fraction,
    )
    return replace(data, notes=notes, verify=False)


def _names(x: list[Any], where: str) -> np.ndarray:
    """Returns LEAF's features as names of images."""
    for number, name in enumerate(x):
        if not (isinstance(name, str) and _is_plain(name)):
            raise DataError(
                f"{where}, example {number}, field 'x' holds {name!r}; accepted: the name of an "
                "image file."
            )
    return np.array(x, dtype=str)


def _leaf_images(root: Path) -> Path:
    """Returns the folder of the images: in the folder of the JSON or one above, plainly or under
    ``raw`` as LEAF has it."""
    start = root if root.is_dir() else root.parent
    near = [start, start.parent, start.parent.parent]
    places = (folder / name for folder in near for name in (IMAGES, f"raw/{IMAGES}"))
    return next((folder for folder in places if folder.is_dir()), start / IMAGES)


def _is_plain(name: str) -> bool:
    """Tells whether a name is one in a folder, without a path."""
    # a list from elsewhere must not name files outside of the folder of images
    return bool(name) and Path(name).name == name


def _read_lists(folder: Path, target: str) -> dict[str, Pair]:
    """Returns names of images (n,) and labels (n,) of every celebrity, in the order of the
    identities."""
    people = _read_identities(folder / IDENTITIES)
    labels = _read_labels(folder / ATTRIBUTES, target)
    for name in labels:
        if name not in people:
            raise DataError(
                f"{folder / IDENTITIES} has no line of {name!r}, which {ATTRIBUTES} "
                "lists; both need it."
            )
    owners = [people[name] for name in labels]
    ids = sorted(set(owners), key=_in_order)
    place = {identity: number for number, identity in enumerate(ids)}
    number = np.array([place[owner] for owner in owners])
    files = np.array(list(labels), dtype=str)
    y = np.array(list(labels.values()), dtype=np.int64)
    return {client: (files[index], y[index]) for client, index in by_number(number, ids).items()}


def _in_order(identity: str) -> tuple[int, str]:
    """Returns the sort key of identities: numbers by their value, before texts."""
    if identity.isdecimal():
        return int(identity), ""
    return sys.maxsize, identity


def _read_identities(file: Path) -> dict[str, str]:
    """Returns the celebrity of each image."""
    people: dict[str, str] = {}
    for where, fields in _lines(file):
        if len(fields) != 2 or not _is_plain(fields[0]):
            raise DataError(
                f"{where} is {_shown(fields)}; accepted: the name of an image and its celebrity."
            )
        if fields[0] in people:
            raise DataError(f"{where}: image {fields[0]!r} occurs twice; each must have one line.")
        people[fields[0]] = fields[1]
    return people


def _read_labels(file: Path, target: str) -> dict[str, int]:
    """Returns the label, 0 or 1, of each image, in the order of the file."""
    lines = _lines(file)
    where, head = next(lines, (str(file), []))
    if len(head) != 1 or not head[0].isdecimal():
        raise DataError(f"{where} is {_shown(head)}; accepted: the number of images.")
    _, names = next(lines, ("", []))
    if target not in names:
        raise ConfigError(f"read_celeba.target is {target!r}; accepted: {', '.join(names)}.")
    column = names.index(target) + 1
    labels: dict[str, int] = {}
    for where, fields in lines:
        if (
            len(fields) != len(names) + 1
            or not _is_plain(fields[0])
            or fields[column] not in _LABELS
        ):
            accepted = f"the name of an image and -1 or 1 for each of {len(names)} attributes"
            raise DataError(f"{where} is {_shown(fields)}; accepted: {accepted}.")
        if fields[0] in labels:
            raise DataError(f"{where}: image {fields[0]!r} occurs twice; each must have one line.")
        labels[fields[0]] = _LABELS[fields[column]]
    # the list says its own length, by which a file that was cut off is known
    if len(labels) != int(head[0]):
        raise DataError(
            f"{file} has {len(labels):,} images and says {int(head[0]):,} in its first line, which "
            "must agree; it may be truncated."
        )
    return labels


def _lines(file: Path) -> Iterator[Line]:
    """Returns the lines of a file that are not empty."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({first_line(error)}); give the folder celeba with "
            f"{IDENTITIES}, {ATTRIBUTES} and the folder {IMAGES}."
        ) from error
    for number, line in enumerate(text.splitlines(), start=1):
        if fields := line.split():
            yield f"{file}: line {number}", fields


def _shown(fields: Sequence[str]) -> str:
    return repr(" ".join(fields)[:_SHOWN])


def _notes(folder: Path) -> tuple[str, ...]:
    """Returns a note of the lists that are not the original ones, by the checksums that torchvision
    knows."""
    sums = {name: md5 for _, md5, name in vision_data.CelebA.file_list}
    listed = (IDENTITIES, ATTRIBUTES)
    others = [n for n in listed if not vision_data.utils.check_md5(folder / n, sums[n])]
    if not others:
        return ()
    return (f"not the original CelebA: {' and '.join(others)} have other checksums",)
