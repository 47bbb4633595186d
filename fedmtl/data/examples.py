"""Flat examples with offsets: one side of a federated dataset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..random import derive_key, id_keys, keyed_bits
from . import checks, rows

Side = Literal["train", "test"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class DataSpec:
    """The facts of the data that a model is built from; none of them comes from the examples.

    Args:
        shape: shape of one example after the transform.
        classes: number of classes; None for regression.
        clients: number of clients.
        targets: shape of one example's target: () for one label or number, (T,) for T of them.
        integer: True if features are whole numbers (int64), such as tokens.
        inputs: name, shape and kind of each of a model's inputs if an example has several
            (:class:`Packed`).

    Example:
        >>> import torch
        >>> from fedmtl.data import DataSpec
        >>> spec = DataSpec(shape=(1, 8, 8), classes=10, clients=100)
        >>> spec.outputs, tuple(spec.sample(2, torch.float32).shape)
        (10, (2, 1, 8, 8))
    """

    shape: tuple[int, ...]
    classes: int | None
    clients: int
    targets: tuple[int, ...] = ()
    integer: bool = False
    inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    def sample(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the features of examples that are all zero.

        Args:
            count: number of examples, at least 0.
            dtype: floating dtype of the features; whole numbers are int64 whatever it is.

        Returns:
            (count, *shape) on the CPU.
        """
        if self.integer:
            dtype = torch.int64
        return torch.zeros(count, *self.shape, dtype=dtype)

    @property
    def labels(self) -> int:
        """Returns T if an example has T labels that are each there or not (multi-label
        classification); else 0."""
        # one label of two classes is not several: its targets have no shape
        if self.classes == 2 and self.targets:
            return math.prod(self.targets)
        return 0

    @property
    def kind(self) -> str:
        """Returns the kind of target in words, such as ``"10 classes"``."""
        if self.classes is None:
            return "real targets"
        if self.labels:
            return f"{self.labels} labels"
        return f"{self.classes} classes"

    @property
    def outputs(self) -> int:
        """Returns the number of values that a model gives for an example: one a class, one a label,
        or one a real target."""
        if self.classes is None or self.labels:
            return math.prod(self.targets)
        return self.classes


@dataclass(frozen=True)
class Domain:
    """Public bounds that hold for every row, whatever the records are.

    Args:
        l1: on the sum of absolute features ``||x||_1``, a constant feature included.
        l2: on ``||x||_2``, likewise.
        target: on ``|y|``; infinite if targets are not bounded.

    Example:
        >>> from fedmtl.data import Domain
        >>> Domain(l1=3.0, l2=3.0**0.5, target=1.0)  # three features and a target from -1 to 1
        Domain(l1=3.0, l2=1.7320508075688772, target=1.0)
    """

    l1: float
    l2: float
    target: float


def pixel_domain(shape: Sequence[int]) -> Domain:
    """Returns the public bounds of images of this shape (channels, height, width) whose pixels lie
    in [0, 1]."""
    size = math.prod(shape)
    # each pixel is at most 1, so the sums of absolute values and of squares are at most their
    # number
    return Domain(l1=float(size), l2=math.sqrt(size), target=math.inf)


@dataclass(frozen=True, eq=False)
class Examples:
    """One side (train or test) of all clients' examples.

    Args:
        x: features (N, *stored shape) in their storage dtype; a sparse CSR matrix (N, d) is
            allowed.
        y: int64 labels (N,) or (N, ...), or floating targets of these shapes; labels that are 0 or
            1 may be uint8.
        offsets: int64 (n + 1,) on the host; client i owns rows ``offsets[i]:offsets[i + 1]``.

    Raises:
        DataError: lengths that disagree, offsets that do not ascend from 0 to N, an unknown layout
            or dtype.

    Example:
        >>> import torch
        >>> from fedmtl.data import Examples
        >>> x = torch.arange(10.0).view(5, 2)
        >>> side = Examples(x, torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 2, 5]))
        >>> side.counts.tolist(), side.take_clients(torch.tensor([1])).x.tolist()
        ([2, 3], [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]])
    """

    x: Tensor
    y: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        checks.check_lengths(self.x, self.y, "examples")
        if self.y.layout != torch.strided:
            raise DataError(f"examples: field 'y' has layout {self.y.layout}; accepted: dense.")
        if self.x.layout not in (torch.strided, torch.sparse_csr):
            raise DataError(
                f"examples: field 'x' has layout {self.x.layout}; accepted: dense or sparse CSR."
            )
        for name in ("x", "y"):
            value: Tensor = getattr(self, name)
            if value.dtype not in (*checks.INTEGERS, *checks.FLOATS, torch.bool):
                raise DataError(
                    f"examples: field {name!r} has dtype {value.dtype}; accepted: real numbers "
                    "that PyTorch computes with, such as float32, float64, int64 and uint8."
                )
            if value.is_meta:
                raise DataError(
                    f"examples: field {name!r} is on the meta device, which holds no numbers."
                )
            value = value.detach()
            # rows are gathered as contiguous blocks; a transposed view would be copied at every
            # gather
            if value.layout == torch.strided:
                value = value.contiguous()
            object.__setattr__(self, name, value)
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) < 1 or offsets.dtype != torch.int64:
            raise DataError(
                "examples: field 'offsets' must be an int64 tensor of shape (clients + 1,)."
            )
        if offsets[0] != 0 or offsets[-1] != len(self) or (offsets.diff() < 0).any():
            raise DataError(
                "examples: field 'offsets' must ascend from 0 to the number of "
                f"examples, {len(self)}."
            )

    def __repr__(self) -> str:
        x, y = (
            f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}"
            for part in (self.x, self.y)
        )
        return f"Examples of {len(self.offsets) - 1:,} clients: x {x}, y {y}"

    def __len__(self) -> int:
        """Returns the number of examples N of all clients."""
        return int(self.y.shape[0])

    @cached_property
    def counts(self) -> Tensor:
        """Returns the number of examples of each client, int64 (n,)."""
        return self.offsets.diff()

    def take_clients(self, clients: Tensor) -> Examples:
        """Returns the examples of some clients, in the given order.

        Args:
            clients: int64 (k,) on the host, positions of clients; one may occur twice.
        """
        counts = self.counts[clients]
        index, _ = rows.ranges(self.offsets[clients], counts)
        return self._take(index, counts)

    def _take(self, index: Tensor, counts: Tensor) -> Examples:
        """Returns the examples of some rows (K,), of clients with ``counts`` (k,) of them."""
        x = rows.select(self.x, index.to(self.x.device))
        y = rows.take(self.y, index.to(self.y.device))
        return Examples(x, y, rows.offsets_of(counts))

    def to(self, device: torch.device | str) -> Examples:
        """Returns features and targets on another device; the offsets stay on the host, where
        batches are planned.

        Args:
            device: of the features and targets, such as ``"cuda"``.
        """
        return Examples(self.x.to(device), self.y.to(device), self.offsets)


def client_keys(ids: Sequence[str]) -> Tensor:
    """Returns :func:`fedmtl.random.id_key` of each id, int64 (n,)."""
    return torch.from_numpy(id_keys(ids))


def cut(
    whole: Examples, ids: Sequence[str], *, test_fraction: float, seed: int, where: str
) -> tuple[Examples, Examples]:
    """Divides the examples of all clients into their training and test sides, in their order.

    Each client's examples are permuted by draws keyed with (seed, id, position within the client)
    and the first ``round(test_fraction * count)`` of them, at least 1 and at most count - 1, are
    its test examples: the only example of a client is for training. The split of a client does not
    depend on the other clients or on their order.

    Args:
        whole: all examples of the clients.
        ids: (n,), of the clients.
        test_fraction: share of each client's examples for test, above 0 and below 1.
        seed: of the permutations.
        where: names the data in messages.

    Returns:
        Training and test examples of the n clients; a client with one example has none for test.

    Raises:
        DataError: a client has no examples, or none has 2.
    """
    counts = whole.counts
    if (counts < 1).any():
        client = int((counts < 1).nonzero()[0])
        raise DataError(
            f"{where}: client {ids[client]!r} has no examples; at least 1 is needed to train on."
        )
    if len(counts) and int(counts.max()) < 2:
        raise DataError(
            f"{where}: no client has 2 examples, one to train on and one to test on; at least one "
            "client needs 2."
        )
    # positions within the client, so that its split is the same among any others
    position, client_of = rows.ranges(torch.zeros_like(counts), counts)
    bits = keyed_bits(derive_key(seed, "split"), client_keys(ids)[client_of], 0, position)
    order = torch.from_numpy(np.lexsort((bits.numpy(), client_of.numpy())))
    # the minimum is last: a client with one example keeps it for training
    held = torch.round(counts * test_fraction).long().clamp(min=1).minimum(counts - 1)
    test = torch.zeros(len(client_of), dtype=torch.bool)
    test[order[position < held[client_of]]] = True
    train = whole._take((~test).nonzero().squeeze(1), counts - held)
    return train, whole._take(test.nonzero().squeeze(1), held)
