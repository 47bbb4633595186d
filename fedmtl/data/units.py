"""The scale on which a real target is stored: its public range, or the logarithm of it, mapped to
[-1, 1]."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from torch import Tensor

TargetScale = Literal["linear", "log"]
SCALES: tuple[TargetScale, ...] = get_args(TargetScale)


def mapped(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Returns values (n,), float64, cut at the ends of a range and mapped from it to [-1, 1]; 0 for
    a range of one value."""
    if low == high:
        return np.zeros(len(values))
    return 2 * (np.clip(values, low, high) - low) / (high - low) - 1


def stored(values: np.ndarray, ends: tuple[float, float], scale: TargetScale) -> np.ndarray:
    """Returns targets (n,) in their own units, cut at the ends of their range, as they are stored,
    in [-1, 1]."""
    if scale == "linear":
        return mapped(values, *ends)
    return mapped(np.log(np.clip(values, *ends)), *_logarithms(ends))


def in_units(values: Tensor, ends: tuple[float, float] | None, scale: TargetScale) -> Tensor:
    """Returns stored targets, or predictions of them, in their own units: float64, of the same
    shape.

    Args:
        values: as they are stored.
        ends: of the range; None for targets that are stored as they are.
        scale: of the range.
    """
    if ends is None:
        return values.double()
    if scale == "log":
        low, high = _logarithms(ends)
        return (low + (values.double() + 1) * ((high - low) / 2)).exp()
    low, high = ends
    return low + (values.double() + 1) * ((high - low) / 2)


def _logarithms(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    return math.log(low), math.log(high)
