"""The addition of noise, on a public grid in secure mode: the least significant bits of a released
value say nothing.

A double made by adding noise to a private sum gives the sum away through its low bits (Mironov, "On
significance of the least significant bits for differential privacy", CCS 2012). In secure mode the
sum is therefore rounded to multiples of a public power of two, the noise is a multiple of it too,
and both are added as whole numbers: a release is a function of the rounded sum plus the noise, and
which values are reachable does not depend on the sum.

Gaussian noise is drawn in whole numbers from the discrete Gaussian law itself (:mod:`.discrete`),
so nothing is left to the arithmetic. Laplace and L2-Laplace noise is computed in float64 and
rounded to the grid. Its tails end at 2**-129, so a pure epsilon holds but for a delta of about
``D 2**-128``, and its doubles have a spacing of about 2**-52 of their size, so the law of the
rounded noise is the ideal one up to relative errors that grow as the width shrinks beside the
noise; no epsilon here accounts for them, and reports say so.

In seeded mode, a simulation, noise is added in float64 as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...errors import PrivacyError
from .discrete import LARGEST
from .laws import NoiseLaw
from .sources import NoiseSource

Numbers = TypeVar("Numbers", Tensor, np.ndarray[Any, Any])


@dataclass(frozen=True, eq=False)
class GridValue:
    """A value that was released in secure mode, and the public grid on which it lies.

    Attributes:
        step: of the release.
        value: (D,) float64, a whole multiple of ``width`` divided by ``divisor``.
        width: of the grid.
        divisor: the public constant by which the noised sum was divided.
    """

    step: int
    value: Tensor
    width: float
    divisor: float

    @property
    def off_grid(self) -> int:
        """Returns the number of coordinates that are not on the grid."""
        # The division by the public constant rounds, so the value itself is compared and not its
        # cell.
        cells = torch.round(self.value * self.divisor / self.width)
        return int((cells * self.width / self.divisor != self.value).sum())


def grid_width(law: NoiseLaw | type[NoiseLaw], bound: float, dimension: int, scale: float) -> float:
    """Returns the width of the public grid: a power of two, at most 2**-40 of Gaussian noise,
    2**-20 of other noise.

    Rounding moves the sum by at most half a width in every coordinate, so the sums of two
    neighbours differ by at most D widths in the L1 norm and sqrt(D) widths in the L2 norm. That is
    at most half of the margin of ``2**-20`` times the bound that every clip leaves; the other half
    is for rounding in float64: of norms, and of sums that are not exact (outer products, multiples
    of rows of records) for up to 2**15 rows in any order.

    Args:
        law: of the noise, which needs the bound in its norm.
        bound: C on one contribution, above 0.
        dimension: D, at least 1.
        scale: size of the noise on one coordinate of the sum (root mean square), above 0.
    """
    if law.norm == "l1":
        # Rounding moves sums of neighbours apart by D widths in L1, sqrt(D) in L2.
        spread = float(dimension)
    else:
        spread = math.sqrt(dimension)
    return math.ldexp(1.0, math.frexp(min(bound * 2.0**-21 / spread, scale * law.cell))[1] - 1)


def check_drawable(
    law: NoiseLaw, source: NoiseSource, size: int, *, sensitivity: float, bound: float
) -> None:
    """Refuses noise that is too large beside the grid to be drawn in whole numbers, in secure mode.

    Args:
        law: of the noise, with its multiplier.
        source: seeded or secure.
        size: D, noised coordinates.
        sensitivity: S, of the sum.
        bound: C, on one contribution to the sum.

    Raises:
        PrivacyError: its standard deviation is more than 2**47 - 1 widths of the grid.
    """
    # Simulated noise is a double, and Laplace noise is rounded: neither is drawn in whole numbers.
    if source.name == "seeded" or not law.joint:
        return
    scale = law.std(sensitivity, size)
    if scale / grid_width(law, bound, size, scale) >= LARGEST - 1:
        raise PrivacyError(
            f"Gaussian noise of standard deviation {scale:g} on each of {size:,} numbers is too "
            "large to be drawn exactly in secure mode, on the grid that the clip norm sets. Ask "
            "for a larger epsilon, fewer bands or a smaller model."
        )


class IndependentNoise:
    """The noise of one release, independent from step to step.

    Args:
        law: of the noise, with its multiplier.
        source: seeded or secure.
        purpose: name of the release, which addresses seeded noise.
        size: D, noised coordinates.
        sensitivity: S, of the sum.
        bound: C, on one contribution to the sum.

    Example:
        >>> from fedmtl.privacy import GaussianNoise, SecureSource
        >>> from fedmtl.privacy.noise.grid import IndependentNoise
        >>> law = GaussianNoise(1.5)
        >>> noise = IndependentNoise(law, SecureSource(), "update", 3, sensitivity=2.0, bound=2.0)
        >>> drawn, width = noise.at(step=0)
        >>> bool((drawn / width == (drawn / width).round()).all())  # whole numbers of the grid
        True
    """

    def __init__(
        self,
        law: NoiseLaw,
        source: NoiseSource,
        purpose: str,
        size: int,
        *,
        sensitivity: float,
        bound: float,
    ) -> None:
        self._law = law
        self._source = source
        self._purpose = purpose
        self._size = size
        self._sensitivity = sensitivity
        self._width: float | None = None  # of the public grid, the same in all steps
        if source.name != "seeded":
            self._width = grid_width(law, bound, size, law.std(sensitivity, size))

    def at(self, step: int) -> tuple[Tensor, float | None]:
        """Draws the noise of a step.

        Args:
            step: its number, which addresses seeded noise.

        Returns:
            (D,) float64, and the width of the grid of which it is a multiple; None in seeded mode.
        """
        if self._width is None:
            drawn = self._law.draw(self._source, self._purpose, step, self._size)
            return torch.from_numpy(drawn) * self._sensitivity, None
        cells = self._sensitivity / self._width
        drawn = self._law.whole(self._source, self._purpose, step, (self._size,), cells)
        return torch.from_numpy(drawn) * self._width, self._width


def client_noise(
    law: NoiseLaw,
    sources: Sequence[NoiseSource],
    purpose: str,
    steps: Tensor,
    keys: Tensor,
    size: int,
    *,
    sensitivity: Tensor,
    bound: float,
) -> tuple[Tensor, Tensor | None]:
    """Draws the noise on a sum of each of several clients, in several replicates.

    Args:
        law: as for :class:`IndependentNoise`.
        sources: of each of R replicates; only one if it is secure.
        purpose: name of the release, which addresses seeded noise.
        steps: int64 (S, R), numbers of the sums, which address seeded noise.
        keys: int64 (S, R), keys of the clients, which address seeded noise.
        size: D, noised coordinates of each sum.
        sensitivity: float64 (S, R).
        bound: C, on one contribution to a sum.

    Returns:
        (S, R, D) float64, and the widths of the grids (S, R); None in seeded mode.
    """
    if sources[0].name == "seeded":
        return torch.from_numpy(law.draw_each(sources, purpose, steps, keys, size)) * sensitivity[
            ..., None
        ], None
    noise = torch.empty(*keys.shape, size, dtype=torch.float64)
    widths = torch.ones(keys.shape, dtype=torch.float64)
    # Sums of one sensitivity share a grid, and are drawn in one call.
    for each in torch.unique(sensitivity).tolist():
        those = sensitivity == each
        width = grid_width(law, bound, size, law.std(each, size))
        count = int(those.sum())
        noise[those] = (
            torch.from_numpy(law.whole(sources[0], purpose, 0, (count, size), each / width)) * width
        )
        widths[those] = width
    return noise, widths


def noised(total: Numbers, noise: Numbers, width: float | Tensor | None = None) -> Numbers:
    """Returns a private sum with its noise: the one place in which a server's noise is added.

    A client of a secure sum adds its share in :meth:`.shares.DistributedGaussian.words`.

    The sum of two whole numbers in float64 is a function of their exact sum, even beyond 2**53.

    Args:
        total: (..., D) float64 private sum, a tensor or an array.
        noise: likewise, of the same shape and device.
        width: of the public grid, of which the noise is a multiple, to which the sum is rounded: a
            number, or a tensor that broadcasts; None adds as it is.

    Returns:
        (..., D) float64.
    """
    value: Numbers
    if width is None:
        value = total + noise
    else:
        # A sum that was not rounded would show its low bits through the noise.
        value = (total / width).round() * width + noise
    return value
