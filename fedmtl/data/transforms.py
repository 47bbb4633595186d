"""Transforms: the pure functions from stored features to floats that
:meth:`FederatedDataset.gather` applies."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .._check import Checked, Finite, Positive
from ..errors import DataError

SHRINK = 1 - 2.0**-20
"""Rows are scaled down to this share of their bound, so that rounding to float32 cannot cross
it."""
_MARGIN = 2.0**-40
"""Room for rounding below a bound."""


@runtime_checkable
class Transform(Protocol):
    """A frozen dataclass that maps stored features to floats.

    ``transform(x, dtype)`` takes x of shape (B, *stored) in its storage dtype and returns a (B,
    *shape) tensor of ``dtype`` on the same device. It treats every example alike, draws no random
    numbers and leaves x as it was. Its fields (numbers, texts, tuples) belong to the fingerprint of
    the data.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from fedmtl.data import Transform
        >>> @dataclass(frozen=True)
        ... class Inverted:
        ...     def __call__(self, x, dtype):
        ...         return 1 - x.to(dtype) / 255
        >>> isinstance(Inverted(), Transform)
        True
        >>> Inverted()(torch.tensor([[0, 255]], dtype=torch.uint8), torch.float32).tolist()
        [[1.0, 0.0]]
    """

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Cast:
    """Passes on the stored numbers as they are, in the asked dtype.

    Example:
        >>> import torch
        >>> from fedmtl.data import Cast
        >>> Cast()(torch.tensor([[1, 2]]), torch.float32).tolist()
        [[1.0, 2.0]]
    """

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


@dataclass(frozen=True)
class Affine(Checked):
    """Maps stored numbers x to ``x * scale + shift``.

    Args:
        scale, shift: finite numbers.

    Example:
        >>> import torch
        >>> from fedmtl.data import Affine
        >>> x = torch.tensor([[0, 1, 255]], dtype=torch.uint8)
        >>> Affine(scale=0.5, shift=-1.0)(x, torch.float32).tolist()
        [[-1.0, -0.5, 126.5]]
    """

    scale: Finite = 1.0
    shift: Finite = 0.0

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        # a copy, which is then changed in place: fresh memory would cost more than the products
        values = x.to(dtype, copy=True)
        # without a multiplication, so that stored numbers stay equal to the bit
        if self.scale != 1.0:
            values.mul_(self.scale)
        if self.shift != 0.0:
            values.add_(self.shift)
        return values


@dataclass(frozen=True)
class Integers:
    """Passes on the stored whole numbers as int64, whatever dtype is asked: numbers of tokens, for
    embeddings.

    Example:
        >>> import torch
        >>> from fedmtl.data import Integers
        >>> Integers()(torch.tensor([[7, 2]], dtype=torch.int32), torch.float32).dtype
        torch.int64
    """

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.long()


@dataclass(frozen=True)
class Packed(Cast):
    """Passes on several inputs of a model in one row of numbers, in the asked dtype;
    :class:`~fedmtl.models.NamedInputs` divides the row.

    Args:
        inputs: name, shape and kind (``"real"`` or ``"integer"``) of each input, in the order of
            the row. Integers below 2^24 are exact in float32.

    Example:
        >>> import torch
        >>> from fedmtl import FederatedDataset
        >>> inputs = {"tokens": torch.arange(12).reshape(4, 3), "length": torch.rand(4, 1)}
        >>> data = FederatedDataset.from_tensors({"ann": (inputs, torch.rand(4))}, classes=None)
        >>> [(name, shape) for name, shape, _ in data.transform.inputs], data.spec.shape
        ([('tokens', (3,)), ('length', (1,))], (4,))
    """

    inputs: tuple[tuple[str, tuple[int, ...], str], ...]

    def __post_init__(self) -> None:
        inputs = tuple(
            (str(name), tuple(int(n) for n in shape), str(kind))
            for name, shape, kind in self.inputs
        )
        object.__setattr__(self, "inputs", inputs)


@dataclass(frozen=True)
class MappedImages:
    """Reads images by their number from an array on disk, and scales them: ``array[x] * scale``.

    Examples then hold one number an image, so that splits and choices of clients copy no image.

    Args:
        path: a NumPy file (N, *shape), memory-mapped.
        scale: one number.
    """

    path: str
    scale: float = 1 / 255

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Turns image numbers (B,) into images (B, *shape)."""
        images = _mapped(self.path)[x.cpu().numpy()]
        if images.dtype == np.uint16:
            images = images.astype(np.int32)  # which torch converts on every device
        return torch.from_numpy(images).to(x.device).to(dtype).mul_(self.scale)


@lru_cache(maxsize=16)
def _mapped(path: str) -> np.ndarray:
    try:
        # the file may come from elsewhere, and a pickle can run code
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be mapped ({error}); read the data again.") from error
    return array


@dataclass(frozen=True)
class RowBound(Checked):
    """Scales the features of every record down to a public bound: x min(1, bound / ||x||).

    A record whose norm is not finite becomes zero.

    Args:
        bound: on the norm of all features of a record, above 0.
        norm: ``"l2"`` or ``"l1"``.

    Example:
        >>> import torch
        >>> from fedmtl.data import RowBound
        >>> bound = RowBound(1.0, norm="l1")
        >>> rows = torch.tensor([[0.25, 0.5], [3.0, 1.0]], dtype=torch.float64)
        >>> bound.norms(rows).tolist(), bound.exceeded(rows).tolist()
        ([0.75, 4.0], [False, True])
        >>> bound(rows).round(decimals=6).tolist()
        [[0.25, 0.5], [0.75, 0.25]]
    """

    bound: Positive
    norm: Literal["l1", "l2"] = "l2"

    def norms(self, x: Tensor) -> Tensor:
        """Returns the norms of records.

        Args:
            x: (N, ...) of any floating dtype.

        Returns:
            float64 (N,); NaN or infinite if a feature is.
        """
        rows = x.reshape(x.shape[0], -1)  # len(x) would fix their number in an exported program
        return torch.linalg.vector_norm(rows.double(), ord=int(self.norm[1]), dim=1)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns records x (N, ...) within the bound, in the dtype of x; those that are within it
        are unchanged."""
        norms = self.norms(x)
        # the factor and the products round; the margin keeps the norm below the bound all the same
        limit = self.bound * (1 - _MARGIN)
        factor = (limit / norms.clamp(min=limit)).reshape(-1, *[1] * (x.dim() - 1))
        # a NaN survives any factor, and a sum with it would show its owner
        valid = torch.isfinite(norms).reshape(factor.shape)
        return (x.double() * factor).masked_fill_(~valid, 0.0).to(x.dtype)

    def exceeded(self, x: Tensor) -> Tensor:
        """Returns the records that are beyond the bound by more than rounding to float32.

        Args:
            x: (N, ...) of any floating dtype.

        Returns:
            bool (N,).
        """
        # negated, so that a norm that is NaN counts as beyond the bound
        return ~(self.norms(x) <= self.bound * (1 + 2.0**-20))


@dataclass(frozen=True)
class Bounded:
    """Applies another transform, and then a bound on every record.

    Args:
        inner: from storage to float.
        bound: of the records.
    """

    inner: Transform
    bound: RowBound

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.bound(self.inner(x, dtype))


def describe(transform: Transform) -> dict[str, Any]:
    """Returns the transform as plain JSON values: its class name under ``kind`` and its fields."""
    fields: Any = transform  # a protocol cannot say that it is a dataclass
    return {"kind": type(transform).__name__, **dataclasses.asdict(fields)}
