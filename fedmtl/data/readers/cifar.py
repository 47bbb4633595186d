"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), dealt to clients by classes, from the files that torchvision keeps."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ..._check import one_of
from ...errors import DataError
from ..dataset import FederatedDataset
from ..examples import pixel_domain
from ..loaders import reader
from ..partition import ByClasses, Partition, from_partition

SHAPE = (3, 32, 32)
_FILES: dict[int, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    10: ("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), "labels"),
    100: ("cifar-100-python", ("train",), ("test",), "fine_labels"),
}


@reader("cifar")
def read_cifar(
    root: str | Path,
    *,
    classes: int = 10,
    partition: Partition | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
) -> FederatedDataset:
    """Read CIFAR-10 or CIFAR-100 and deal its images to clients: features (3, 32, 32) in [0, 1].

    By default as in CENTAUR (Shen et al., "Share your representation only", 2023): 500 clients of 100 images with 5
    classes each, and the test images of the same classes.

    Args:
        root: the folder of ``cifar-10-batches-py`` or ``cifar-100-python``, as ``torchvision.datasets`` extracts them,
            or that folder itself.
        classes: 10 or 100.
        partition: such as :class:`~fedmtl.data.Dirichlet`; None for ``ByClasses(clients=500, classes_per_client=5)``.
        test_fraction: share of each client's images held out for test, train and test images dealt as one pool. None
            deals the test images as the train images by classes, and means 0.2 for another partition.
        seed: of the deal and of the split.

    Raises:
        DataError: a missing, truncated or malformed file.
        ConfigError: an impossible setting.
    """
    one_of("read_cifar", (10, 100), classes=classes)
    folder, train, test, field = _FILES[classes]
    base = Path(root) if (Path(root) / train[0]).is_file() else Path(root) / folder
    partition = partition or ByClasses(clients=500, classes_per_client=5)
    pools = [_read([base / name for name in names], field, classes) for names in (train, test)]
    options: dict[str, Any] = {
        "classes": classes,
        "name": f"cifar{classes}",
        "domain": pixel_domain(SHAPE),
        "seed": seed,
    }
    if test_fraction is not None or not isinstance(partition, ByClasses):
        x, y = (np.concatenate(part) for part in zip(*pools, strict=True))
        return from_partition(x, y, partition, test_fraction=test_fraction, **options)
    sides = [{name: (x[rows], y[rows]) for name, rows in partition.deal(y, seed).items()} for x, y in pools]
    return FederatedDataset.from_tensors(sides[0], test=sides[1], **options)


def _read(files: list[Path], field: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 3, 32, 32) uint8 and labels (N,) int64 of all files."""
    images, labels = [], []
    for file in files:
        entry = _unpickle(file)
        x, y = (entry.get(name, entry.get(name.encode())) for name in ("data", field))
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072:
            found = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            raise DataError(f"{file}: field 'data' is {found}; accepted: uint8 (images, 3072).")
        if not isinstance(y, list) or len(y) != len(x):
            found = str(len(y)) if isinstance(y, list) else f"a {type(y).__name__}"
            raise DataError(f"{file}: field {field!r} has {found} labels; accepted: a list of {len(x)}.")
        for row, label in enumerate(y):
            if isinstance(label, bool) or not isinstance(label, (int, np.integer)) or not 0 <= label < classes:
                raise DataError(f"{file}: row {row}, field {field!r} holds {label!r}; accepted: 0 to {classes - 1}.")
        images.append(x.reshape(-1, *SHAPE))
        labels.append(np.array(y, dtype=np.int64))
    return np.concatenate(images), np.concatenate(labels)


class _Arrays(pickle.Unpickler):
    """Reads arrays and plain containers; nothing else that a pickle could name is loaded or run."""

    _ALLOWED = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return super().find_class(module, name)


def _unpickle(file: Path) -> dict[Any, Any]:
    if not file.is_file():
        raise DataError(f"{file} is missing; give the folder into which torchvision extracts CIFAR.")
    try:
        with open(file, "rb") as content:
            entry = _Arrays(content, encoding="latin1").load()
    except Exception as error:  # a damaged pickle can fail in many ways
        raise DataError(f"{file} cannot be read ({error}); it may be truncated, or no file of CIFAR.") from error
    if not isinstance(entry, dict):
        raise DataError(f"{file} holds a {type(entry).__name__}; accepted: a dictionary with 'data' and labels.")
    return entry
