"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), dealt to clients by classes, from the files that
torchvision extracts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..._check import check_arguments
from ..._extras import vision_data
from ...errors import DataError, first_line
from ..dataset import FederatedDataset
from ..examples import pixel_domain
from ..loaders import reader
from ..partition import ByClasses, Partition, from_partition

SHAPE = (3, 32, 32)


@reader("cifar")
@check_arguments
def read_cifar(
    root: str | Path,
    *,
    classes: Literal[10, 100] = 10,
    partition: Partition | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
) -> FederatedDataset:
    """Reads CIFAR-10 or CIFAR-100 and deals its images to clients: features (3, 32, 32) in [0, 1].

    By default as in CENTAUR (Shen et al., "Share your representation only", 2023): 500 clients of
    100 images with 5 classes each, and the test images of the same classes.

    Args:
        root: the folder of ``cifar-10-batches-py`` or ``cifar-100-python``, as
            ``torchvision.datasets`` extracts them, or that folder itself.
        classes: 10 or 100.
        partition: such as :class:`~fedmtl.data.Dirichlet`; None for
            ``ByClasses(clients=500, classes_per_client=5)``.
        test_fraction: share of each client's images held out for test, train and test images dealt
            as one pool. None deals the test images as the train images by classes, and means 0.2
            for another partition.
        seed: of the deal and of the split.

    Returns:
        Features (3, 32, 32), stored as uint8 and read as floats in [0, 1], and int64 labels; ids
        ``client-0``, ``client-1``, ...

    Raises:
        DataError: a missing file, or one whose checksum is not the original's.
        ConfigError: an impossible setting.
    """
    partition = partition or ByClasses(clients=500, classes_per_client=5)
    pools = [_pool(Path(root), classes, train=train) for train in (True, False)]
    options: dict[str, Any] = {
        "classes": classes,
        "name": f"cifar{classes}",
        "domain": pixel_domain(SHAPE),
        "seed": seed,
    }
    if test_fraction is not None or not isinstance(partition, ByClasses):
        x, y = (np.concatenate(part) for part in zip(*pools, strict=True))
        return from_partition(x, y, partition, test_fraction=test_fraction, **options)
    sides = [
        {name: (x[rows], y[rows]) for name, rows in partition.deal(y, seed).items()}
        for x, y in pools
    ]
    return FederatedDataset.from_tensors(sides[0], test=sides[1], **options)


def _pool(root: Path, classes: int, *, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns images (N, 3, 32, 32) uint8 and labels (N,) int64 of the files, whose checksums
    torchvision verifies."""
    dataset_class: type[vision_data.CIFAR10] = vision_data.CIFAR100
    if classes == 10:
        dataset_class = vision_data.CIFAR10
    folder = root
    if root.name == dataset_class.base_folder:
        folder = root.parent
    try:
        pool = dataset_class(folder, train=train)
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"{root}: {dataset_class.base_folder} is missing or damaged ({first_line(error)}); "
            "give the folder into which torchvision extracts CIFAR."
        ) from error
    return pool.data.transpose(0, 3, 1, 2), np.array(pool.targets, dtype=np.int64)
