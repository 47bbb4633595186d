"""The embedded data: scikit-learn's handwritten digits, dealt to clients with label skew and
writing styles.

The 1,797 images are split into a train and a test pool before anything else, so that no model,
however much of the training data it sees, has seen a test image. Every client then has its own
classes, its own images from either pool, and its own style: one rotation and one gamma for all its
images.
"""

from __future__ import annotations

import math
from importlib.metadata import distribution

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..._check import Count, Fraction, NonNegative, Positive, check_arguments
from ...errors import ConfigError
from ...random import derive_key, keyed_bits, keyed_generator, keyed_uniform
from ..dataset import FederatedDataset
from ..examples import Examples, client_keys
from ..loaders import reader

CLASSES = 10
_CLIENTS = 1024  # in a block


@reader("digits")
@check_arguments
def load_digits_clients(
    clients: Count = 1000,
    *,
    train_images: Count = 10,
    test_images: Count = 10,
    classes_per_client: Count = 4,
    rotation: NonNegative = 45.0,
    gamma: Positive = 2.0,
    test_fraction: Fraction = 0.2,
    seed: int = 0,
) -> FederatedDataset:
    """Returns the digits of many writers: features (1, 8, 8) in [0, 1], ids ``client-0``,
    ``client-1``, ...

    Every draw is keyed by (seed, client id): client 7 has the same data in a population of 10 and
    of 10,000.

    Args:
        clients: number of clients.
        train_images: training images a client, drawn without replacement from the train pool.
        test_images: test images a client, from the test pool, in the client's classes and style.
        classes_per_client: distinct digits a client writes; its images are drawn from all of these
            digits.
        rotation: each client's angle is uniform within plus or minus this many degrees.
        gamma: each client's pixels are raised to a power, log-uniform between ``1 / gamma`` and
            ``gamma``.
        test_fraction: share of the 1,797 images that forms the test pool.
        seed: of all draws.

    Raises:
        ConfigError: a setting is impossible, or a client would need more images than a pool has.

    Example:
        >>> from fedmtl.data import load_digits_clients
        >>> data = load_digits_clients(3, train_images=5, test_images=2, classes_per_client=2)
        >>> data.spec.shape, data.train.counts.tolist(), data.test.counts.tolist()
        ((1, 8, 8), [5, 5, 5], [2, 2, 2])
    """
    if classes_per_client > CLASSES:
        raise ConfigError(
            f"load_digits_clients.classes_per_client is {classes_per_client}; it must be at most "
            f"{CLASSES}."
        )
    images, labels = raw_digits()
    train_pool, test_pool = pools(len(images), test_fraction, seed)
    ids = tuple(f"client-{i}" for i in range(clients))
    keys = client_keys(ids)
    score = keyed_bits(derive_key(seed, "digits/classes"), keys[:, None], 0, torch.arange(CLASSES))
    chosen = score.argsort(1)[:, :classes_per_client]
    angle = math.radians(rotation) * (2 * _uniform(seed, "digits/rotation", keys) - 1)
    power = torch.exp(math.log(gamma) * (2 * _uniform(seed, "digits/gamma", keys) - 1))
    sides = []
    for pool, count in ((train_pool, train_images), (test_pool, test_images)):
        rows = deal(labels, pool, chosen, keys, count, seed)
        x = write(images[rows], angle, power)
        offsets = torch.arange(0, clients * count + 1, count)
        sides.append(Examples(x.flatten(0, 1), labels[rows].flatten(), offsets))
    return FederatedDataset(sides[0], sides[1], ids, classes=CLASSES, name="digits")


def raw_digits() -> tuple[Tensor, Tensor]:
    """Returns scikit-learn's images (1797, 8, 8), float32 in [0, 1], and labels (1797,)."""
    # the file itself, since the package takes longer to import than a small run
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    images = torch.from_numpy(rows[:, :-1].reshape(-1, 8, 8).astype(np.float32) / 16)
    return images, torch.from_numpy(rows[:, -1].astype(np.int64))


def pools(count: int, test_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Returns image numbers of the train and of the test pool: two ascending, disjoint int64
    tensors."""
    order = torch.from_numpy(keyed_generator(seed, "digits/pools").permutation(count))
    cut = round(count * test_fraction)
    return order[cut:].sort().values, order[:cut].sort().values


def deal(
    labels: Tensor, pool: Tensor, chosen: Tensor, keys: Tensor, count: int, seed: int
) -> Tensor:
    """Deals image numbers (n, count) to n clients: distinct images, drawn uniformly from a client's
    classes.

    Args:
        labels: of all images (N,).
        pool: the image numbers that may be used (P,).
        chosen: each client's classes (n, c).
        keys: the clients' keys (n,).
        count: images a client.
        seed: of the draws, keyed by (seed, client, image).

    Raises:
        ConfigError: some client's classes have fewer images in the pool than it needs.
    """
    dealt = []
    # a score of each for every image
    for some, own in zip(chosen.split(_CLIENTS), keys.split(_CLIENTS), strict=True):
        allowed = torch.zeros(len(own), CLASSES, dtype=torch.bool).scatter_(1, some, True)[
            :, labels[pool]
        ]
        available = int(allowed.sum(1).min())
        if available < count:
            raise ConfigError(
                f"load_digits_clients: a client needs {count} images of its {chosen.shape[1]} "
                f"classes and a pool has only {available}; ask for fewer images, more classes, or "
                "another test_fraction."
            )
        client, image = allowed.nonzero(as_tuple=True)
        score = torch.full(allowed.shape, -1, dtype=torch.int64)
        score[allowed] = keyed_bits(derive_key(seed, "digits/images"), own[client], 0, pool[image])
        dealt.append(pool[score.topk(count, 1).indices])
    return torch.cat(dealt)


def write(images: Tensor, angle: Tensor, power: Tensor) -> Tensor:
    """Draws images in each client's style: rotated about the centre (bilinear, empty outside), then
    a gamma.

    Args:
        images: (n, count, h, w) in [0, 1].
        angle: counter-clockwise, in radians (n,).
        power: exponents (n,).

    Returns:
        (n, count, 1, h, w), float32 in [0, 1].
    """
    cos = angle.cos()
    sin = angle.sin()
    zero = torch.zeros_like(angle)
    matrix = torch.stack(
        [torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1
    ).float()
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    turned = F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned.clamp(0, 1).pow(power.float()[:, None, None, None])[:, :, None]


def _uniform(seed: int, purpose: str, keys: Tensor) -> Tensor:
    return keyed_uniform(derive_key(seed, purpose), keys, 0, torch.zeros_like(keys))
