"""Where random bits come from: a seed (reproducible, not private) or the operating system (private, not
reproducible).

Neither source keeps state that a caller could rewind by accident: seeded draws are addressed by (seed,
purpose, step), secure draws are fresh at every call and are never stored or logged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..random import keyed_generator
from .samplers import Coins


class NoiseSource(Protocol):
    """Supplies the noise of releases and the coins of cohorts."""

    @property
    def name(self) -> str:
        """``"seeded"`` or ``"secure"``."""

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """(size,) float64 standard normal numbers for one release of one step."""

    def coins(self, purpose: str, step: int) -> Coins:
        """Coins for one draw of a cohort."""


@dataclass(frozen=True)
class SeededSource:
    """Counter-based draws keyed by (seed, purpose, replicate, step): the same address gives the same bits.

    Args:
        seed: any integer.
        replicate: index of an independent repetition.
    """

    seed: int
    replicate: int = 0

    @property
    def name(self) -> str:
        """``"seeded"``."""
        return "seeded"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """(size,) float64 standard normal numbers, a function of (seed, purpose, replicate, step)."""
        return keyed_generator(self.seed, f"privacy/{purpose}", step, self.replicate).standard_normal(size)

    def coins(self, purpose: str, step: int) -> Coins:
        """Coins that are a function of (seed, purpose, replicate, step)."""
        return GeneratorCoins(keyed_generator(self.seed, f"privacy/{purpose}", step, self.replicate))


@dataclass(frozen=True)
class SecureSource:
    """Fresh bits from the operating system's generator at every call; the arguments address nothing."""

    @property
    def name(self) -> str:
        """``"secure"``."""
        return "secure"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """(size,) float64 standard normal numbers by inversion of a uniform with a full significand at every
        scale.

        The lower tail probability is ``(a + (b + 1/2) 2**-64) 2**-63 / 2`` with a of 63 bits and b of 64, so
        it carries 53 significant bits down to 2**-73 and the normal has no gaps wider than about 2**-53 out
        to 17 standard deviations; the last bit is the sign.
        """
        from scipy.special import ndtri

        words = np.frombuffer(os.urandom(16 * size), dtype=np.uint64).reshape(2, size)
        sign = np.where(words[0] & np.uint64(1), 1.0, -1.0)
        high = (words[0] >> np.uint64(1)).astype(np.float64)
        tail = (high + (words[1].astype(np.float64) + 0.5) * 2.0**-64) * 2.0**-63
        return sign * ndtri(0.5 * np.minimum(tail, 1.0))

    def coins(self, purpose: str, step: int) -> Coins:
        """Coins straight from the operating system."""
        return SystemCoins()


@dataclass(frozen=True)
class GeneratorCoins:
    generator: np.random.Generator

    def uniform(self, count: int) -> np.ndarray:
        return self.generator.random(count)


@dataclass(frozen=True)
class SystemCoins:
    def uniform(self, count: int) -> np.ndarray:
        words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
