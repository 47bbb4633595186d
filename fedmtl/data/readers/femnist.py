"""FEMNIST, handwritten characters by writer (Caldas et al., "LEAF", 2018), in the forms in which it
is distributed.

- LEAF JSON (:mod:`~fedmtl.data.readers.leaf`): a file, a zip, a folder;
- parquet with the columns ``image``, ``writer_id`` and ``character``, as on the Hugging Face hub: a
  file or its folder;
- HDF5 of TensorFlow Federated with the fields ``pixels`` and ``label``: a file, or the folder of
  ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``.

All have 28 x 28 pixels with a white background, and number the 62 characters 0-9, A-Z, a-z.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np

from ..._check import check_arguments
from ...errors import DataError
from ..dataset import FederatedDataset
from ..examples import pixel_domain
from ..loaders import reader
from ..transforms import Affine
from .columns import Table
from .h5 import H5, Fields, divided, read_h5
from .images import with_progress
from .leaf import Pair, numbers, read_sides
from .pictures import as_type, decode

SHAPE = (1, 28, 28)
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""The 62 classes in order."""


@reader("femnist")
@check_arguments
def read_femnist(
    root: str | Path,
    *,
    test_fraction: float | None = 0.2,
    seed: int = 0,
    min_examples: int = 2,
    clients: int | None = None,
) -> FederatedDataset:
    """Reads FEMNIST: handwritten characters by writer, 62 classes, features (1, 28, 28) in [0, 1].

    Pixels have a white background, 1.0 or 255, and are inverted, so that the background is exactly
    0 and ink is positive. They are stored as uint8, rounded to whole numbers of 255ths, which they
    are in all files that are distributed. The dataset's domain states their bounds.

    Args:
        root: a file of one of the forms above, or its folder.
        test_fraction: share of each writer's examples held out for test, those of the source's test
            part included; None keeps the source's own split, and without one means 0.2.
        seed: of the split and of the choice of writers, keyed by the writer.
        min_examples: writers with fewer examples are left out.
        clients: keep that many writers, drawn at random; None keeps all.

    Returns:
        Features (1, 28, 28), stored as uint8 and read as floats in [0, 1], and int64 labels of 62
        classes; ids are those of the writers.

    Raises:
        DataError: a missing, truncated or malformed file; the message names file, writer or row,
            and field.
        ConfigError: an impossible setting.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedmtl.data import read_femnist
        >>> writer = {"x": [[1.0] * 784] * 5, "y": [0, 10, 36, 61, 0]}
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "all_data_0.json")
        ...     _ = file.write_text(json.dumps({"users": ["w1"], "user_data": {"w1": writer}}))
        ...     data = read_femnist(file)
        >>> data.spec.shape, data.spec.classes, len(data.train)
        ((1, 28, 28), 62, 4)
    """
    root = Path(root)
    train, test = _read(root)
    return FederatedDataset.from_tensors(
        train,
        test=test or None,
        name="femnist",
        source=str(root),
        classes=len(CHARACTERS),
        test_fraction=test_fraction,
        seed=seed,
        min_examples=min_examples,
        draw=clients,
        transform=Affine(scale=1 / 255),
        domain=pixel_domain(SHAPE),
    )


def _read(root: Path) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """Returns the train and the test part, each writer's pixels (:func:`_pixels`) and checked
    labels."""
    for suffixes, read in (((".parquet",), _read_parquet), (H5, _read_h5)):
        if any(sides := divided(root, suffixes)):
            train, test = (read(side) if side else {} for side in sides)
            return train, test

    def pixels(x: list[Any], where: str) -> np.ndarray:
        return _pixels(numbers(x, where, "x"), f"{where}, field 'x'")

    return read_sides(root, pixels, other="parquet or HDF5 files")


def _pixels(x: np.ndarray, where: str) -> np.ndarray:
    """Returns pixels on a black background, uint8 (n, 1, 28, 28).

    Args:
        x: (n, ...), 784 numbers an example in [0, 1], or uint8 from 0 to 255.
        where: the client and the field, for messages.

    Raises:
        DataError: not 784 numbers an example, or one outside [0, 1].
    """
    if x[0].size != 784:
        raise DataError(
            f"{where} has {x[0].size} numbers an example; FEMNIST images have 28 x 28 = 784."
        )
    if x.dtype != np.uint8:
        # so written that NaN is refused, too
        if not (x.min() >= 0 and x.max() <= 1):
            wrong = x[~((x >= 0) & (x <= 1))][0]
            raise DataError(f"{where} holds the pixel {wrong}; FEMNIST pixels must be in [0, 1].")
        x = np.rint(x * 255).astype(np.uint8)
    # ink is positive, and the background exactly 0
    return (255 - x).reshape(len(x), *SHAPE)


def _read_h5(files: list[Path]) -> dict[str, Pair]:
    def store(fields: Fields, where: str) -> Pair:
        x = fields["pixels"]
        y = fields["label"]
        if x.dtype.kind not in "fiu" or y.dtype.kind not in "iu":
            raise DataError(
                f"{where}: 'pixels' is {x.dtype} and 'label' {y.dtype}; accepted: "
                "numbers, whole labels."
            )
        return _pixels(x, f"{where}, field 'pixels'"), y.astype(np.int64)

    return read_h5(files, ("pixels", "label"), store)


def _bytes_of(value: Any) -> Any:
    """Returns the bytes of a structure of bytes and a path; any other value as it is."""
    if isinstance(value, dict):
        return value.get("bytes")
    return value


def _read_parquet(files: list[Path]) -> dict[str, Pair]:
    images: dict[str, list[np.ndarray]] = {}
    classes: dict[str, list[int]] = {}
    for file in files:
        table = Table.of(file)
        table.check_columns(("image", "writer_id", "character"))
        # the hub stores an image as a structure
        contents = table.frame["image"].map(_bytes_of)
        wrong = ~contents.map(lambda value: isinstance(value, bytes)).to_numpy(dtype=bool)
        table.refuse(
            wrong,
            "image",
            "bytes of an image, or a structure with them, as the Hugging Face hub writes",
        )
        labels = table.frame["character"].map(_label).to_numpy()
        table.refuse(labels < 0, "character", "0 to 61, or one of 0-9, A-Z, a-z")
        values = zip(
            contents,
            table.written("writer_id", "the name of a writer"),
            labels.tolist(),
            strict=True,
        )
        for row, (content, writer, label) in enumerate(
            with_progress(values, f"decoding {file.name}", len(table))
        ):
            where = f"{file}: row {row}, column 'image'"
            pixels = as_type(decode(content, where, mode="L"), np.dtype(np.uint8))
            if pixels.shape != SHAPE:
                size = "x".join(map(str, pixels.shape[1:]))
                raise DataError(f"{where} is {size} pixels; FEMNIST images have 28x28.")
            images.setdefault(str(writer), []).append(pixels)
            classes.setdefault(str(writer), []).append(label)
    return {
        writer: (_pixels(np.stack(x), f"writer {writer!r}"), np.array(classes[writer]))
        for writer, x in images.items()
    }


def _label(character: Any) -> int:
    """Returns the class of a character, from its number or the character itself; -1 for anything
    else."""
    if isinstance(character, str):
        if len(character) == 1:
            return CHARACTERS.find(character)
        return -1
    # floats where a row has none
    number = isinstance(character, (int, float)) and not isinstance(character, bool)
    if number and character in range(len(CHARACTERS)):
        return int(character)
    return -1
