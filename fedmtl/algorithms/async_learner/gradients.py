"""What owners answer with: the mean gradient of their records at a point, equation (3) of Farokhi et al. 2021."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...privacy import BoundedMeans, GradientMessage, ScaledRows, Turns
from ..linear.data import LinearData, LinearLoss

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class MeanGradients:
    """Mean gradients of the owners' records, for R runs at once.

    Attributes:
        data: the owners' records, within the domain where one is given.
        loss: of a record.
    """

    data: LinearData
    loss: LinearLoss

    def message(self, points: Array, *, clipped: bool) -> GradientMessage:
        """Return what owners answer at ``points`` (R, p), which may change from one answer to the next.

        ``clipped``: the release clips every record's gradient; else the answers are means, from sufficient statistics
        where these are smaller than the records.
        """
        arrays, statistics = self.data.arrays, None if clipped else self.statistics

        def factors(owner: int, which: Array, runs: Array) -> Array:
            return self.loss.factors(points[runs], *arrays[owner])

        def factors_of_all(owners: Array, runs: Array, turns: Turns) -> Array:
            return self.loss.factors_of_all(points[runs], [(*arrays[owner], times) for owner, times in turns])

        def means(owner: int, which: Array, runs: Array) -> Array:
            if statistics is None:
                x, _ = arrays[owner]
                mean: Array = factors(owner, which, runs) @ x / len(x)
                return mean
            second, first = statistics
            mean = points[runs].dot(second[owner])
            mean -= first[owner]
            return mean

        if clipped:
            return ScaledRows(factors, factors_of_all if len(points) > 1 else None)
        return BoundedMeans(means)

    @cached_property
    def statistics(self) -> tuple[Array, Array] | None:
        """Return 2 X'X / n_i (N, p, p) and 2 X'y / n_i (N, p) of the squared loss; None for other losses and for more
        parameters than records."""
        x, y = self.data.x, self.data.y
        if self.loss.name != "squared" or self.data.dimension > max(map(len, x)):
            return None
        second = [(2 * rows.T @ rows / len(rows)).numpy() for rows in x]
        first = [(2 * rows.T @ own / len(rows)).numpy() for rows, own in zip(x, y, strict=True)]
        return np.stack(second), np.stack(first)
