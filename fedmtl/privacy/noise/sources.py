"""Where random bits come from: a seed (reproducible, not private) or the operating system (private, not
reproducible).

Neither source keeps state that a caller could rewind by accident: seeded draws are addressed by (seed,
purpose, step), secure draws are fresh at every call and are never stored or logged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from ...random import Coins, derive_key, keyed_generator, philox_words

Words = Callable[[int], np.ndarray]
"""count -> (count,) uint64, the next random words of a stream."""


class NoiseSource(Protocol):
    """Supplies the noise of releases and the coins of cohorts."""

    @property
    def name(self) -> str:
        """Return ``"seeded"`` or ``"secure"``."""

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """Return (size,) float64 standard normal numbers for one release of one step."""

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return random signs and tail probabilities, from which every law of noise is made by inversion.

        Args:
            purpose: name of the release.
            step: number of the step; (k,) int64 where every row has one of its own.
            size: numbers a row.
            keys: (k,) int64 keys of clients, one row each, or None for a single release.

        Returns:
            Signs (-1 or 1) and probabilities, uniform on (0, 1/2), independent, float64, of shape (size,), or
            (k, size) with keys. A probability carries 53 significant bits down to about 2**-75, and its least
            value is 2**-129.
        """

    def words(self, purpose: str, step: int) -> Words:
        """Return a stream of uniform words for one release of one step, as long as it is asked for."""

    def coins(self, purpose: str, step: int) -> Coins:
        """Return coins for one draw of a cohort."""


@dataclass(frozen=True)
class SeededSource:
    """Counter-based draws keyed by (seed, purpose, replicate, step): the same address gives the same bits.

    Args:
        seed: any integer.
        replicate: index of an independent repetition.
    """

    seed: int
    replicate: int = 0
    name: ClassVar[str] = "seeded"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        return keyed_generator(self.seed, f"privacy/{purpose}", step, self.replicate).standard_normal(size)

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return signs and tails that are a function of (seed, purpose, replicate, step), and of the key of the row
        where there are keys: which clients are drawn together does not matter."""
        if keys is None:
            assert isinstance(step, int)
            generator = keyed_generator(self.seed, f"privacy/tails/{purpose}", step, self.replicate)
            words = generator.integers(0, 1 << 64, size=(2, size), dtype=np.uint64)
            return signs_and_tails(words[0], words[1])
        return signs_and_tails(*client_words(self.key(purpose), keys.cpu(), step, size))

    def key(self, purpose: str) -> int:
        """Return the key of the random numbers of clients, signed 64 bits."""
        key = derive_key(self.seed, f"privacy/owners/{purpose}", self.replicate)
        return key - (1 << 64) if key >> 63 else key

    def words(self, purpose: str, step: int) -> Words:
        return keyed_generator(self.seed, f"privacy/words/{purpose}", step, self.replicate).bit_generator.random_raw

    def coins(self, purpose: str, step: int) -> Coins:
        return GeneratorCoins(keyed_generator(self.seed, f"privacy/{purpose}", step, self.replicate))


@dataclass(frozen=True)
class SecureSource:
    """Fresh bits from the operating system's generator at every call; the arguments address nothing."""

    name: ClassVar[str] = "secure"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """Return (size,) float64 standard normal numbers by inversion of :meth:`tails`: no gaps wider than about 2**-53
        out to 9 standard deviations."""
        sign, tail = self.tails(purpose, step, size)
        return sign * ndtri(tail)

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return fresh signs and tails; of ``keys`` only the number matters."""
        shape = (size,) if keys is None else (keys.numel(), size)
        words = np.frombuffer(os.urandom(16 * math.prod(shape)), dtype=np.uint64).reshape(2, *shape)
        return signs_and_tails(words[0], words[1])

    def words(self, purpose: str, step: int) -> Words:
        return lambda count: np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def coins(self, purpose: str, step: int) -> Coins:
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


BLOCK_ELEMENTS = 1 << 14  # the numbers of a block, and those from which they are made, stay in the cache


_ONE = np.array(1.0).view(np.uint64)  # its highest bit is the sign


def signs_and_tails(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return signs and ``(a + (b + 1/2) 2**-64) 2**-64`` with a of 63 bits from ``first`` and b of 64 from ``second``;
    the bit left over is the sign."""
    bits = first << 63
    bits |= _ONE
    tail = second.astype(np.float64)
    tail += 0.5
    tail *= 2.0**-64
    some = first >> 1
    some &= 0x3FF
    tail += some.astype(np.float64)
    # the other 53 bits of a are exact as a double, so the sum is rounded once, with b to break ties
    np.right_shift(first, 11, out=some)
    tail += some.astype(np.float64) * 2.0**10
    tail *= 2.0**-64
    return bits.view(np.float64), np.minimum(tail, 0.5 - 2.0**-54, out=tail)


def tails_of(
    sources: Sequence[NoiseSource], purpose: str, uses: Tensor, size: int, keys: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return signs and tails of several clients in several repetitions.

    Args:
        sources: of each of R repetitions.
        purpose: name of the release.
        uses: int64 (S, R), addresses along each client's stream.
        size: numbers a row.
        keys: int64 (S, R) keys of the clients.

    Returns:
        Two arrays (S R, size); a row is that of its source's ``tails`` for the key and the use.
    """
    if len(sources) == 1 or not all(isinstance(source, SeededSource) for source in sources):
        each = [source.tails(purpose, uses[:, r], size, keys[:, r]) for r, source in enumerate(sources)]
        if len(each) == 1:
            return each[0]
        sign, tail = (np.stack(parts, 1).reshape(-1, size) for parts in zip(*each, strict=True))
        return sign, tail
    seeds = torch.tensor([source.key(purpose) for source in sources if isinstance(source, SeededSource)])
    words = client_words(seeds.expand_as(keys).reshape(-1), keys.reshape(-1), uses.reshape(-1), size)
    return signs_and_tails(*words)


def client_words(key: int | Tensor, clients: Tensor, step: int | Tensor, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two (k, size) arrays of 64 random bits: Philox under ``key`` at the counters (index, step, client).

    Args:
        key: of all rows, or int64 (k,).
        clients: int64 (k,).
        step: of all rows, or int64 (k,).
        size: numbers a row.
    """
    out = np.empty((2, clients.numel(), size), dtype=np.uint64)
    index = np.arange(size, dtype=np.uint64)
    who, at, own = (_words(one, clients.numel()) for one in (clients, step, key))
    rows = max(1, BLOCK_ELEMENTS // max(1, size))
    for first in range(0, clients.numel(), rows):
        part = slice(first, first + rows)
        keys = key if isinstance(key, int) else own[part]
        address = at[part], who[part] & 0xFFFFFFFF, who[part] >> 32
        if len(at[part]) <= size:
            philox_words(out[:, part], keys, index, *address)
        else:  # along the longer axis
            keys = keys if isinstance(keys, int) else keys.T
            philox_words(out[:, part].mT, keys, index[:, None], *(one.T for one in address))
    return out[0], out[1]


def _words(values: int | Tensor, rows: int) -> np.ndarray:
    """int64 (rows,), or one of all rows, as uint64 (rows, 1)."""
    words = torch.as_tensor(values, dtype=torch.int64).numpy().view(np.uint64).reshape(-1, 1)
    return np.broadcast_to(words, (rows, 1))
