"""Units of the columns of a table that follow released counts of records, in place of the declared
ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BINS = 64
"""Equal public bins of the declared range [-1, 1] of a column."""
_SHARE = 0.95  # of the records, in the shortest interval
_LONGER = 2.0  # than that interval is the range, so that a tail beyond it has room
_LEAST = 1 / 32  # half the length of a range at least, two bins


def places(values: Array) -> NDArray[np.int64]:
    """Returns the bin of each value; those outside of the declared range are in the first or in the
    last one.

    Args:
        values: finite numbers, of any shape.

    Returns:
        Whole numbers from 0 to :data:`BINS` - 1, of the same shape.
    """
    found: NDArray[np.int64] = np.floor((np.clip(values, -1, 1) + 1) / 2 * BINS).astype(np.int64)
    return np.minimum(found, BINS - 1)


def learned_range(shares: Array) -> tuple[float, float]:
    """Returns the range of a column by noised shares of the records in its bins.

    The shortest interval of bins that has .95 of the records is made twice as long about its
    middle, and cut to the declared range. Its count adds up the noise of few bins if the values are
    in few of them; a quantile would add up that of all bins below it.

    Args:
        shares: (:data:`BINS`,), with noise.

    Returns:
        The middle of the range, and half its length.
    """
    # the true shares add up to 1, which is public, and so the mean of their noise is known
    shares = shares - (shares.sum() - 1) / BINS
    below = np.concatenate([[0.0], np.cumsum(shares)])
    first = 0
    width = BINS
    for width in range(1, BINS + 1):
        inside = below[width:] - below[:-width]
        first = int(inside.argmax())
        if inside[first] >= _SHARE:
            break
    middle = -1 + (2 * first + width) / BINS
    half = max(_LONGER * width / BINS, _LEAST)
    low = max(-1.0, middle - half)
    high = min(1.0, middle + half)
    return (low + high) / 2, (high - low) / 2


@dataclass(frozen=True)
class Units:
    """Units in which each learned range is [-1, 1], of d features and of the target.

    A linear model has other numbers in other units, and the same predictions.

    Attributes:
        middle: of each range in declared units, (d + 1,), that of the target last.
        half: half of its length, above 0, (d + 1,).
    """

    middle: Array
    half: Array

    @classmethod
    def of(cls, numbers: Array | Sequence[float]) -> Units:
        """Returns the units of their middles and halves, 2 (d + 1) numbers."""
        middle, half = np.asarray(numbers, dtype=np.float64).reshape(2, -1)
        return cls(middle, half)

    @classmethod
    def by_shares(cls, shares: Array) -> Units:
        """Returns the units by noised shares of the records, (d + 1, :data:`BINS`); see
        :func:`learned_range`."""
        return cls.of(np.array([learned_range(row) for row in shares]).T)

    def records(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Returns features (n, d) and targets (n,) in these units; beyond a range they are outside
        of [-1, 1]."""
        features = (x - self.middle[:-1]) / self.half[:-1]
        return features, (y - self.middle[-1]) / self.half[-1]

    def limit(self, limit: float) -> float:
        """Returns a bound on the absolute value of a target in these units, from one in declared
        units."""
        return float((limit + abs(self.middle[-1])) / self.half[-1])

    def inside(self, model: Array) -> Array:
        """Returns a model [weights..., bias] (d + 1,) of declared units in these units."""
        slopes = model[:-1]
        level = model[-1] + slopes @ self.middle[:-1] - self.middle[-1]
        return np.append(slopes * self.half[:-1], level) / self.half[-1]

    def declared(self, model: Array) -> Array:
        """Returns a model [weights..., bias] (d + 1,) of these units in declared units."""
        slopes = model[:-1] * self.half[-1] / self.half[:-1]
        level = self.middle[-1] + self.half[-1] * model[-1] - slopes @ self.middle[:-1]
        return np.append(slopes, level)
