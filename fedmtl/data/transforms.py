"""From storage to float: the pure functions that :meth:`FederatedDataset.gather` applies to features."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import ConfigError, DataError


@runtime_checkable
class Transform(Protocol):
    """A frozen dataclass that maps stored features to floats.

    ``transform(x, dtype)`` takes x of shape (B, *stored) in its storage dtype and returns a (B, *shape)
    tensor of ``dtype`` on the same device. It treats every example alike, draws no random numbers and leaves
    x as it was. Its fields (numbers, texts, tuples) are saved with the data and belong to its fingerprint.
    """

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Cast:
    """The stored numbers as they are, in the asked dtype."""

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


@dataclass(frozen=True)
class Affine:
    """``x * scale + shift``.

    Args:
        scale: one number, or one for each position of the last axis.
        shift: likewise.
    """

    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for field in ("scale", "shift"):
            value = getattr(self, field)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field, value)
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in numbers):
                raise ConfigError(f"Affine.{field} is {value!r}; it must be a finite number or a tuple of them.")

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        out = x.to(dtype)
        scale, shift = (
            torch.tensor(v, dtype=dtype, device=x.device) if isinstance(v, tuple) else v
            for v in (self.scale, self.shift)
        )
        if self.scale != 1.0:
            out = out.mul(scale) if out is x else out.mul_(scale)
        if self.shift != 0.0:
            out = out.add(shift) if out is x else out.add_(shift)
        return out


KINDS: dict[str, type] = {"Cast": Cast, "Affine": Affine}


def describe(transform: Transform) -> dict[str, Any]:
    """The transform as plain JSON values: its class name under ``kind`` and its fields."""
    return {"kind": type(transform).__name__, **dataclasses.asdict(transform)}  # type: ignore[call-overload]


def restore(description: dict[str, Any], where: str) -> Transform:
    """The inverse of :func:`describe` for the transforms of this module.

    Raises:
        DataError: the kind is another one; the caller can pass the transform itself.
    """
    fields = dict(description)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise DataError(
            f"{where}: the data were saved with the transform {kind!r}, which is not one of "
            f"{', '.join(KINDS)}; pass it as transform=."
        )
    transform: Transform = KINDS[kind](**fields)
    return transform
