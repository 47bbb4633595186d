"""Laws of noise. A law knows its accounting event, its size, and the norm in which it needs the
sensitivity.

Every law is written in units of the sensitivity S: ``multiplier`` is the scale of the noise over S,
draws are at S = 1, and the caller multiplies them by S. The event is relative to the full
sensitivity, so neither the relation nor the clip enters it a second time.

Draws are made in float64 by inversion of the tails that a
:class:`~fedmtl.privacy.noise.sources.NoiseSource` gives. Gaussian draws are an exception: those of
a whole release in seeded mode are the source's own, and in secure mode all are whole numbers, drawn
by rejection (:mod:`.discrete`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from ..._check import Checked, Positive, positive_int
from ..accounting.knorm import KNormDpEvent
from ..events import DpEvent, dp_event
from .discrete import discrete_gaussian
from .sources import BLOCK_ELEMENTS, client_tails

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sources import NoiseSource

Norm = Literal["l1", "l2"]
ORDERS: dict[Norm, int] = {"l1": 1, "l2": 2}
"""The orders of the norms, as functions for norms of vectors take them."""


@dataclass(frozen=True)
class NoiseLaw(Checked, ABC):
    """Additive noise on a vector.

    A law states the facts about it that the rest of the package needs;
    :data:`~fedmtl.privacy.noise.laws.LAWS` has all laws by name.

    Args:
        multiplier: scale of the noise in units of the sensitivity, above 0.

    Attributes:
        name: its name in settings (``mechanism=``).
        norm: in which it needs the sensitivity, so in which rows are clipped.
        pure: True if one release has pure epsilon 1 / ``multiplier``, with delta 0.
        joint: True if several releases under one coin are one release of the concatenated vector,
            of the same law.
        cell: the most that a cell of the public grid of secure mode is wide, over the scale of the
            noise.
        matrices: True if it is noise on symmetric matrices only.
        refuted: the reason why the event does not hold, for the law of a paper that protects
            nothing: the event is then that of the paper's claim, and epsilon is infinite. Else
            None.

    Example:
        >>> from fedmtl.privacy import GaussianNoise, NoiseLaw, SeededSource
        >>> law: NoiseLaw = GaussianNoise(1.5)
        >>> law.norm, law.draw(SeededSource(seed=0), "update", step=0, size=3).shape
        ('l2', (3,))
    """

    multiplier: Positive

    name: ClassVar[str]
    norm: ClassVar[Norm]
    pure: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    cell: ClassVar[float] = 2.0**-20
    matrices: ClassVar[bool] = False
    refuted: ClassVar[str | None] = None

    @abstractmethod
    def event(self, dimension: int) -> DpEvent:
        """Returns the ``dp_accounting`` event of one release of a vector.

        Args:
            dimension: length of the vector.

        Returns:
            The event; its parameter is relative to the full sensitivity.
        """

    @abstractmethod
    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Returns the root mean square of one coordinate of the noise, in units of the released
        sum.

        Args:
            sensitivity: S, in those units.
            dimension: length of the noised vector.
        """

    def draw(self, source: NoiseSource, purpose: str, step: int, size: int) -> np.ndarray:
        """Draws the noise of one release at sensitivity 1.

        Args:
            source: the source of the random bits.
            purpose: name of the release, which addresses seeded bits.
            step: number of the step, which addresses seeded bits.
            size: number of coordinates.

        Returns:
            float64 (size,).
        """
        return self._invert(*source.tails(purpose, step, self._coins(size)))

    def draw_rows(
        self, source: NoiseSource, purpose: str, step: int | Tensor, keys: Tensor, size: int
    ) -> np.ndarray:
        """Returns noise of several clients at once, at sensitivity 1.

        Args:
            source: the source of the random bits.
            purpose: name of the release.
            step: number of the step; (k,) int64 if every row has one of its own.
            keys: (k,) int64 keys of the clients; with a seeded source row i is a function of (seed,
                purpose, step, keys[i]) whatever else is drawn, with a secure one only k matters.
            size: length of one client's noise.

        Returns:
            (k, size) float64.
        """
        uses = torch.as_tensor(step, dtype=torch.int64).expand(len(keys))
        return self.draw_each([source], purpose, uses[:, None], keys[:, None], size)[:, 0]

    def draw_each(
        self, sources: Sequence[NoiseSource], purpose: str, uses: Tensor, keys: Tensor, size: int
    ) -> np.ndarray:
        """Returns noise of several clients in several replicates, at sensitivity 1.

        Args:
            sources: of each of R replicates.
            purpose: name of the release.
            uses: int64 (S, R), the number of the client's uses of such noise before.
            keys: int64 (S, R) keys of the clients; with a seeded source entry (s, r) is a function
                of (seed, purpose, r, uses[s, r], keys[s, r]) whatever else is drawn, with a secure
                one only the shape matters.
            size: length of one client's noise.

        Returns:
            (S, R, size) float64.
        """
        out = np.empty((*uses.shape, size))
        coins = self._coins(size)
        # A block of rows, with the tails that it is made from, stays in the cache.
        rows = max(1, BLOCK_ELEMENTS // max(1, coins * len(sources)))
        for first in range(0, len(out), rows):
            part = slice(first, first + rows)
            out[part] = self._invert(*client_tails(sources, purpose, uses[part], keys[part], coins))
        return out

    def whole(
        self, source: NoiseSource, purpose: str, step: int, shape: tuple[int, ...], cells: float
    ) -> np.ndarray:
        """Returns noise in whole numbers of cells, for secure mode: rounded to the cell above or
        below at random, in proportion to how near they are.

        Such a dither is one more independent noise, so no guarantee changes, and it makes the law
        of the rounded noise smoother than the doubles it comes from.

        Args:
            source: the source of the random bits.
            purpose: name of the release, which addresses seeded bits.
            step: number of the step, which addresses seeded bits.
            shape: (size,) of one vector, or (k, size) of several, each with the law of one.
            cells: the sensitivity in cells of the grid.

        Returns:
            float64 of that shape, whole numbers.
        """
        if len(shape) == 1:
            noise = self.draw(source, purpose, step, shape[0]) * cells
        else:
            noise = self.draw_rows(source, purpose, step, torch.arange(shape[0]), shape[1]) * cells
        down = np.floor(noise)
        # Rounding to the nearest cell would leave gaps in the law near 0.
        dither = source.coins(f"{purpose}/dither", step).uniform(noise.size).reshape(shape)
        return down + (dither < noise - down)

    def _coins(self, size: int) -> int:
        """Returns the number of tails that one vector of ``size`` coordinates takes."""
        return size

    @abstractmethod
    def _invert(self, sign: np.ndarray, tail: np.ndarray) -> np.ndarray:
        """Returns noise from (..., coins) signs and tails: (..., size)."""


@dataclass(frozen=True)
class GaussianNoise(NoiseLaw):
    """N(0, (z S)^2) on every coordinate, S the L2 sensitivity.

    Args:
        multiplier: z, the standard deviation in units of the sensitivity, above 0.

    Example:
        >>> from fedmtl.privacy import GaussianNoise
        >>> GaussianNoise(1.5).std(sensitivity=2.0)
        3.0
    """

    name = "gaussian"
    norm = "l2"
    joint = True
    cell = 2.0**-40

    def event(self, dimension: int | None = None) -> DpEvent:
        """Returns ``GaussianDpEvent(z)``, whatever the dimension."""
        return dp_event.GaussianDpEvent(self.multiplier)

    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Returns z S: the standard deviation of a coordinate."""
        return self.multiplier * sensitivity

    def draw(self, source: NoiseSource, purpose: str, step: int, size: int) -> np.ndarray:
        """Returns noise of one release at sensitivity 1: (size,) float64."""
        return source.normal(purpose, step, size) * self.multiplier

    def whole(
        self, source: NoiseSource, purpose: str, step: int, shape: tuple[int, ...], cells: float
    ) -> np.ndarray:
        """Returns noise in whole numbers of cells, exactly of the discrete Gaussian law; see
        :mod:`.discrete`."""
        # Rounded up: the noise is never less than the charged noise.
        deviation = math.floor(self.multiplier * cells) + 1
        drawn = discrete_gaussian(source.words(purpose, step), math.prod(shape), deviation)
        return drawn.reshape(shape).astype(np.float64)

    def _invert(self, sign: np.ndarray, tail: np.ndarray) -> np.ndarray:
        return _normal(sign, tail) * self.multiplier


@dataclass(frozen=True)
class LaplaceNoise(NoiseLaw):
    """Independent Laplace noise of scale b S on every coordinate, S the L1 sensitivity: pure
    epsilon 1/b.

    The event is that of one coordinate that takes the whole shift, which is the worst case: moving
    the coordinates one after the other is a chain of neighbours, a chain of log-concave shifts
    composes to the trade-off function of the single shift of the same total length, and by group
    privacy (Dong, Roth, Su, "Gaussian differential privacy", JRSS B 2022) no other pair is easier
    to distinguish.

    Args:
        multiplier: b, the scale in units of the sensitivity, above 0.

    Example:
        >>> from fedmtl.privacy import LaplaceNoise
        >>> round(LaplaceNoise(0.5).std(sensitivity=2.0), 4)  # sqrt(2) * 0.5 * 2
        1.4142
    """

    name = "laplace"
    norm = "l1"
    pure = True

    def event(self, dimension: int | None = None) -> DpEvent:
        """Returns ``LaplaceDpEvent(b)``, whatever the dimension."""
        return dp_event.LaplaceDpEvent(self.multiplier)

    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Returns sqrt(2) b S: the standard deviation of a coordinate."""
        return math.sqrt(2.0) * self.multiplier * sensitivity

    def _invert(self, sign: np.ndarray, tail: np.ndarray) -> np.ndarray:
        size = 2.0 * tail
        np.log(size, out=size)
        size *= self.multiplier
        signed: np.ndarray = np.multiply(sign, size, out=size)
        return signed


@dataclass(frozen=True)
class L2LaplaceNoise(NoiseLaw):
    """The K-norm mechanism of the L2 norm: density proportional to exp(-||v||_2 / (b S)), S the L2
    sensitivity: pure epsilon 1/b (Hardt, Talwar, "On the geometry of differential privacy", STOC
    2010).

    The direction is uniform and the radius, independent of it, is Gamma(d, b S). Normals are made
    in pairs from an exponential, half the pair's squared length, and an angle (Box, Muller, 1958).
    The direction of the first d of them is independent of the sum of these exponentials; d
    exponentials, the m = ceil(d / 2) of the pairs among them, add up to the radius. So a vector
    takes d exponentials and m angles.

    Args:
        multiplier: b, the scale in units of the sensitivity, above 0.

    Example:
        >>> from fedmtl.privacy import L2LaplaceNoise
        >>> L2LaplaceNoise(0.5).std(sensitivity=2.0, dimension=8)  # 0.5 * 2 * sqrt(9)
        3.0
    """

    name = "l2_laplace"
    norm = "l2"
    pure = True

    def event(self, dimension: int) -> DpEvent:
        """Returns ``KNormDpEvent(1 / b, dimension)``: composition is far tighter than that of pure
        epsilons, and depends on the dimension."""
        positive_int(self, dimension=dimension)
        return KNormDpEvent(epsilon=1.0 / self.multiplier, dimension=dimension)

    def std(self, sensitivity: float, dimension: int = 1) -> float:
        """Returns b S sqrt(d + 1): the root mean square of a coordinate of a vector of d."""
        return self.multiplier * sensitivity * math.sqrt(dimension + 1.0)

    def _coins(self, size: int) -> int:
        return size + -(-size // 2)

    def _invert(self, sign: np.ndarray, tail: np.ndarray) -> np.ndarray:
        size = 2 * tail.shape[-1] // 3
        # Two normals from each pair of an exponential and an angle.
        pairs = tail.shape[-1] - size
        exponential = -np.log(2.0 * tail[..., :size])
        angle = torch.from_numpy(2.0 * math.pi * sign[..., size:] * tail[..., size:])
        length = np.sqrt(exponential[..., :pairs])
        vector = np.empty((*tail.shape[:-1], 2 * pairs))
        np.multiply(length, angle.cos().numpy(), out=vector[..., :pairs])  # faster than numpy's own
        np.multiply(length, angle.sin().numpy(), out=vector[..., pairs:])
        # An odd dimension leaves one normal over.
        vector = vector[..., :size]
        radius = exponential.sum(-1, keepdims=True) * self.multiplier
        vector *= radius / np.linalg.norm(vector, axis=-1, keepdims=True)
        return vector


def _normal(sign: np.ndarray, tail: np.ndarray) -> np.ndarray:
    return sign * ndtri(tail)


LAWS: dict[str, type[NoiseLaw]] = {
    law.name: law for law in (GaussianNoise, LaplaceNoise, L2LaplaceNoise)
}
"""The laws by name: a new law is one class with its facts, and one entry here."""
